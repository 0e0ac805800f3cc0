"""Commands that messages, help pages and documents tell to type: parsed as if typed."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import codesign
from codesign.cli import VERBS, build_parser

PACKAGE = Path(codesign.__file__).parent
ROOT = PACKAGE.parent
NAMES = "|".join(verb for verb, _ in VERBS)
# Not where it only says who does or did something: "that codesign plan wrote". Up to a comma, a
# full stop or what a shell ends a command at.
COMMAND = re.compile(
    rf"(?<!that )(?<!what )(?<!from )(?<!of )(?<!but )(?<!# )codesign ({NAMES})(?!: )\b"
    r"((?:(?!, |(?<!\.)\. |[;()`#>]|&&| in place).)*)"
)
STANDS_FOR = {"N": "1", "MS": "1", "--1": "--draft"}


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


def lines(text: str) -> list[str]:
    return text.replace("\\\n", " ").splitlines()


def of_modules() -> Iterator[tuple[str, str, str]]:
    for folder in (PACKAGE, ROOT / "app"):
        for path in folder.rglob("*.py"):
            for text in texts(ast.parse(path.read_text(encoding="utf-8"))):
                for line in lines(text):
                    for verb, flags in COMMAND.findall(line):
                        yield str(path.relative_to(ROOT)), verb, flags.strip()


def of_documents() -> Iterator[tuple[str, str, str]]:
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for line in lines(path.read_text(encoding="utf-8")):
            if found := re.match(rf"(?: {{4}})?codesign ({NAMES}) (-.*|\w.*)", line):
                flags = found[2].partition(" #")[0].replace("[--", "--").replace("]", "")
                yield path.name, found[1], flags.strip()


ADVISED = sorted({*of_modules(), *of_documents()})


@pytest.mark.parametrize(
    "known",
    [
        ("codesign/profiler/session.py", "profile", "--workers 1 --out profile"),
        ("codesign/engine/replay.py", "plan", "--trace TRACE --workers 1"),
        ("codesign/cli/run.py", "run", "--plan plan.json --baselines --out runs"),
        ("app/app_pages/validate.py", "validate", "--plan plan.json --run runs/*"),
        ("README.md", "validate", "--plan plan.json --run runs/*"),
    ],
)
def test_commands_are_found(known):
    assert known in ADVISED


@pytest.mark.parametrize(("where", "verb", "flags"), ADVISED)
def test_an_advised_command_can_be_typed(where, verb, flags):
    words = [
        STANDS_FOR.get(word, word) for word in shlex.split(flags.replace("--to 1", "--to vllm"))
    ]
    if words[-1:] == ["--help"]:
        with pytest.raises(SystemExit, match="0"):
            build_parser(verb).parse_args([verb, *words])
        return
    args = build_parser(verb).parse_args([verb, *words])
    if verb == "fit":  # which the parser may lack for --acceptance-from
        assert args.profile or args.acceptance_from, where
