"""The layout of a campaign's JSON: a run a line, numbers of six digits."""

from __future__ import annotations

import json
from typing import Any

from codesign.artifacts import to_json


def compact(body: dict[str, Any]) -> str:
    """JSON with a run a line, and numbers of six digits."""
    return _lines(_rounded(json.loads(to_json(body))), 4) + "\n"


def _lines(value: Any, depth: int, margin: str = "") -> str:
    """A value as JSON, whose parts below a depth stand on one line each."""
    if not depth or not isinstance(value, dict | list) or not value:
        return json.dumps(value)
    inner = margin + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(k)}: {_lines(v, depth - 1, inner)}" for k, v in value.items()]
    else:
        parts = [_lines(each, depth - 1, inner) for each in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(parts) + f"\n{margin}{closing}"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value
