"""Documents point at what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from codesign.policy.speculation import FAMILIES

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "traces" / "README.md"]
RESULTS = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}


def anchors(path: Path) -> set[str]:
    """Of headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_relative_link_leads_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        file, _, anchor = link.partition("#")
        if not file.startswith("http"):
            there = path.parent / file if file else path
            assert there.exists(), f"{path.name} links to {link}"
            assert not anchor or anchor in anchors(there), f"{path.name} links to {link}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_result_that_is_named_is_there(path):
    named = re.findall(r"[\w/]*_20\d\d-[\w\-.]+(?:/|json)", path.read_text(encoding="utf-8"))
    assert {name.removesuffix("/").rpartition("/")[2] for name in named} <= RESULTS


def test_every_policy_has_a_row_in_the_table():
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for family in FAMILIES[1:]:  # plain decoding is no speculation
        assert any(f"`{family.spec.family}-" in row for row in rows), family.pattern
