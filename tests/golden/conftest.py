"""``--update-golden`` rewrites the frozen results instead of comparing with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite frozen results (name tests/golden on the command line)",
    )


@pytest.fixture
def frozen(request: pytest.FixtureRequest) -> Callable[[str, Any], Any]:
    """Return what is frozen under a name; with ``--update-golden`` freeze ``found`` first."""
    update = request.config.getoption("--update-golden", default=False)

    def read(name: str, found: Any) -> Any:
        path = Path(__file__).parent / f"{name}.json"
        if update:
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return json.loads(path.read_text(encoding="utf-8"))

    return read
