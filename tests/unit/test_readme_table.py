"""The README's figures are those of the committed results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_in_the_readme_is_made_from_the_newest_committed_result():
    spec = importlib.util.spec_from_file_location("demo_table", ROOT / "benchmarks/demo_table.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    newest = max((ROOT / "benchmarks" / "results").glob("demo_*.json"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = text.partition(script.BEGIN)[2].partition(script.END)[0].strip()
    assert shown == script.table(json.loads(newest.read_text(encoding="utf-8")))
