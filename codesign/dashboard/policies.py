"""The sizes that each family of policies has, and the label that they make.

Must not import streamlit or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from codesign.policy.speculation import FAMILIES, Family


@dataclass(frozen=True, slots=True)
class Size:
    """One number of a policy.

    Attributes:
        key: Its name in labels of this module and in links.
        title: Its name for people.
        low: Least value.
        high: Largest value.
        default: Where a slider starts.
    """

    key: str
    title: str
    low: int
    high: int
    default: int


_LENGTH = Size("k", "Draft tokens in a row", 1, 16, 4)
_BRANCH = Size("k", "Draft tokens in a row", 1, 8, 4)
_DEPTH = Size("k", "Depth of the tree", 1, 8, 4)
_ROWS = Size("rows", "Rows verified per request", 2, 64, 8)
_BUDGET = Size("rows", "Rows verified per step", 2, 64, 32)
_WIDTH = Size("width", "Leaves per draft forward", 1, 8, 4)
_BEAMS = Size("width", "Beams", 1, 8, 2)
_OUTCOMES = Size("width", "Outcomes per position", 1, 4, 3)
_FORWARDS = Size("expansions", "Draft forwards per round", 1, 8, 2)
_LEVELS = tuple(Size(f"level{i}", f"Children per node, level {i}", 1, 4, 4 - i) for i in (1, 2, 3))
_TREE = (_ROWS, _WIDTH, _FORWARDS)

# Sizes of a family, and its label as codesign.policy.labels reads it.
_SHAPES: dict[str, tuple[tuple[Size, ...], str]] = {
    "plain": ((), "plain"),
    "static-tree": (_LEVELS, "static-tree-{level1}x{level2}x{level3}"),
    "adaserve": ((_DEPTH, _BEAMS, _BUDGET), "adaserve-{k}x{width}x{rows}"),
    "ssd": ((_BRANCH, _OUTCOMES), "ssd-{k}x{width}"),
    **{
        name: (_TREE, name + "-{rows}x{width}x{expansions}")
        for name in ("tree", "async-tree", "inflight-tree", "pipeinfer", "eagle", "async-eagle")
    },
    **{
        name: ((_LENGTH,), name + "-{k}")
        for name in ("chain", "threshold", "turbospec", "specserve", "pearl", "amusd")
    },
}


def families() -> dict[str, Family]:
    """Families of policies by name, from simple to involved."""
    return {family.spec.family: family for family in FAMILIES}


def sizes_of(family: str) -> tuple[Size, ...]:
    """What a visitor may choose of a family."""
    return _SHAPES[family][0]


def label_of(family: str, sizes: Mapping[str, int]) -> str:
    """The label that ``parse_policy`` reads.

    Args:
        family: Name.
        sizes: Value of each of ``sizes_of``, by key.
    """
    return _SHAPES[family][1].format(**sizes)
