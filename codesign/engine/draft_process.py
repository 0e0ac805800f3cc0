"""The draft's process, started by RemoteDraft: python -m codesign.engine.draft_process FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

from codesign.engine.remote_draft import serve_draft

if __name__ == "__main__":
    serve_draft(Path(sys.argv[1]))
