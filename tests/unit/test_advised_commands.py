"""Commands that messages tell to type: read from the source, and parsed as if typed."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import codesign
from codesign.cli import build_parser

PACKAGE = Path(codesign.__file__).parent
# After what it is for; up to a comma, a full stop or what a shell ends a command at.
COMMAND = re.compile(
    r"(?:: |then )codesign (fit|profile)\b((?:(?!, |(?<!\.)\. |[;()]|&&| in place).)*)"
)


def texts(tree: ast.AST) -> Iterator[str]:
    """Strings of a module, with a word for each value that is put into one; no docstrings."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(p.value) if isinstance(p, ast.Constant) else "1" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        else:
            yield from texts(node)


ADVISED = sorted(
    {
        (str(path.relative_to(PACKAGE)), verb, flags.strip())
        for path in PACKAGE.rglob("*.py")
        for text in texts(ast.parse(path.read_text(encoding="utf-8")))
        for verb, flags in COMMAND.findall(text)
        if "--help" not in flags
    }
)


def test_some_commands_are_found():
    assert ("profiler/session.py", "profile", "--workers 1 --out profile") in ADVISED


@pytest.mark.parametrize(("where", "verb", "flags"), ADVISED)
def test_an_advised_command_can_be_typed(where, verb, flags):
    args = build_parser(verb).parse_args([verb, *shlex.split(flags)])
    if verb == "fit":  # which the parser may lack for --acceptance-from
        assert args.profile is not None, where
