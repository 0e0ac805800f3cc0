"""What docs/python.md and examples/sweep.py show runs as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).parents[2]
SMALL = {
    "draft": ["llama-3.2-1b"],
    "acceptance": [0.5, 0.8],
    "policy": ["plain", "chain-2", "async-tree-4x2x2"],
    "seed": [0],
}


def run(*args: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, *args], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_on_python_runs(tmp_path):
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    tpot, goodput, length = map(float, run("-c", script, folder=tmp_path).split())
    assert 0 < tpot < 0.1
    assert goodput > 0
    assert 1 < length < 8


def test_a_sweep_has_the_same_rows_whatever_the_number_of_processes(tmp_path):
    for processes in "12":
        script = (
            f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r}); import sweep; "
            f"sweep.GRID = {SMALL!r}; sys.argv[1:] = ['--requests', '5', '--processes', "
            f"'{processes}', '--out', '{processes}.csv']; sweep.main()"
        )
        assert "6 simulations in" in run("-c", script, folder=tmp_path)
    assert (tmp_path / "1.csv").read_bytes() == (tmp_path / "2.csv").read_bytes()
    table = pd.read_csv(tmp_path / "1.csv").set_index(["policy", "acceptance"])
    length = table["acceptance_length"]
    assert length["plain", 0.5] == length["plain", 0.8] == 1
    assert length["chain-2", 0.8] > length["chain-2", 0.5] > 1
