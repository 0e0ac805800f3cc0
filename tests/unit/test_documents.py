"""Documents point at what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from codesign.policy.speculation import FAMILIES

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
INDEX = BENCHMARKS / "results" / "README.md"
DOCUMENTS = [
    *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "traces" / "README.md",
    BENCHMARKS / "README.md", INDEX,
]  # fmt: skip
RESULTS = {path.name for path in INDEX.parent.iterdir()}


def anchors(path: Path) -> set[str]:
    """Of headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_a_relative_link_leads_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        file, _, anchor = link.partition("#")
        if not file.startswith("http"):
            there = path.parent / file if file else path
            assert there.exists(), f"{path.name} links to {link}"
            assert not anchor or anchor in anchors(there), f"{path.name} links to {link}"


def test_the_index_has_every_result_once_the_newest_of_a_kind_first():
    rows = [
        re.findall(r"`([^`]+)`", line.split(" | ")[-1])
        for line in INDEX.read_text(encoding="utf-8").splitlines()
        if line.startswith("| ") and not line.startswith("| what ")
    ]
    named = [name.removesuffix("/") for row in rows for name in row]
    assert sorted(named) == sorted(RESULTS - {INDEX.name})
    for row in rows:
        dates = [name.partition("_20")[2].partition("_")[0] for name in row]
        assert dates == sorted(dates, reverse=True)


def test_every_benchmark_is_in_the_table_of_benchmarks():
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    commands = {
        path.stem for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text("utf-8")
    }
    assert commands <= set(re.findall(r"`(\w+)`", text))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_a_result_that_is_named_is_there(path):
    named = re.findall(r"[\w/]*_20\d\d-[\w\-.]+(?:/|json)", path.read_text(encoding="utf-8"))
    assert {name.removesuffix("/").rpartition("/")[2] for name in named} <= RESULTS


def test_every_policy_has_a_row_in_the_table():
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for family in FAMILIES[1:]:  # plain decoding is no speculation
        assert any(f"`{family.spec.family}-" in row for row in rows), family.pattern
