"""A replica's process, started by replicas.py: python -m codesign.engine.replica_process ..."""

from __future__ import annotations

import pickle
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from codesign.engine.feed import Feed
from codesign.errors import CodesignError


def main(setup_file: str, number: str, line: str) -> int:
    """Serve what comes through ``line``, an open file's number; exit code."""
    connection = Connection(int(line))
    setup = pickle.loads(Path(setup_file).read_bytes())
    try:
        connection.send(setup.serve(Feed(connection, int(number))))
    except CodesignError as error:
        sys.stderr.write(f"codesign run: {error}\n")
        return error.exit_code
    except OSError:  # the routing process is gone
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
