"""Benchmarks run as modules, ``python -m benchmarks.NAME``, and documents say so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = {path.stem for path in (ROOT / "benchmarks").iterdir() if path.suffix in ("", ".py")}
TEXTS = [
    ROOT / "README.md",
    *(ROOT / "docs").glob("*.md"),
    *(path for path in (ROOT / "benchmarks").rglob("*") if path.suffix in (".py", ".sh", ".md")),
]


@pytest.mark.parametrize("path", [*(ROOT / "benchmarks").glob("*.py")], ids=lambda path: path.stem)
def test_a_module_imports_its_neighbours_by_their_full_name(path):
    imports = [
        name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or node.names[0].name]
    ]
    assert not {name.partition(".")[0] for name in imports} & MODULES


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_a_command_that_is_written_down_runs_a_module_that_is_there(path):
    text = " ".join(path.read_text(encoding="utf-8").split())
    assert "python benchmarks/" not in text
    for name in re.findall(r"python -m benchmarks\.(\w+)", text):
        assert name in MODULES, f"{path.name} names benchmarks.{name}"


def test_the_folders_page_names_every_command():
    folder = ROOT / "benchmarks"
    page = (folder / "README.md").read_text(encoding="utf-8")
    commands = {path.stem for path in folder.glob("*.py") if "__main__" in path.read_text("utf-8")}
    assert set(re.findall(r"`(\w+)`", page)) & MODULES >= commands
