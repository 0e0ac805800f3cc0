"""The draft's process, started by RemoteDraft: python -m codesign.engine.draft_process FILENO."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from codesign.engine.remote_draft import serve_draft

if __name__ == "__main__":
    serve_draft(Connection(int(sys.argv[1])))
