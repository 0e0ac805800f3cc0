"""The sizes that each family of policies has, and the label that they make.

Both are read from the list of families: a new one has its sliders here as soon as it is in it. Must
not import streamlit or torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from codesign.policy.speculation import FAMILIES, Family


@dataclass(frozen=True, slots=True)
class Size:
    """One number of a policy.

    Attributes:
        key: Its name in labels of this module and in links.
        title: Its name for people.
        low: Least value.
        high: Largest value.
        default: Where a slider starts: as in the family's example.
    """

    key: str
    title: str
    low: int
    high: int
    default: int = 0


# By the letter that stands for it in the family's pattern.
_SIZES = {
    "K": Size("k", "Draft tokens in a row", 1, 16),
    "D": Size("k", "Depth of the tree", 1, 8),
    "R": Size("rows", "Rows verified per request", 2, 64),
    "B": Size("rows", "Rows verified per step", 2, 64),
    "W": Size("width", "Leaves per draft forward", 1, 8),
    "F": Size("width", "Outcomes per position", 1, 4),
    "E": Size("expansions", "Draft forwards per round", 1, 8),
}
_MOST_BESIDE = {"KxF": 5}  # longest chain where every outcome has one: all must fit the draft's KV
_LEVELS = "AxBx.."  # children per node, as many levels as the example has


def families() -> dict[str, Family]:
    """Families of policies by name, from simple to involved."""
    return {family.spec.family: family for family in FAMILIES}


def sizes_of(family: str) -> tuple[Size, ...]:
    """What a visitor may choose of a family; nothing where its pattern has unknown letters."""
    known = families()[family]
    letters = _shape(known)
    numbers = [int(text) for text in _NUMBERS.findall(known.example.partition("@")[0])]
    if letters == _LEVELS:
        return tuple(
            Size(f"level{level}", f"Children per node, level {level}", 1, 4, number)
            for level, number in enumerate(numbers, 1)
        )
    found = letters.split("x")
    if not all(letter in _SIZES for letter in found):
        return ()
    sizes = {letter: _SIZES[letter] for letter in found}
    if letters in _MOST_BESIDE:
        sizes["K"] = replace(sizes["K"], high=_MOST_BESIDE[letters])
    return tuple(
        replace(size, default=number) for size, number in zip(sizes.values(), numbers, strict=True)
    )


def label_of(family: str, sizes: Mapping[str, int]) -> str:
    """The label that ``parse_policy`` reads, from a value of each of ``sizes_of`` by key."""
    wanted = sizes_of(family)
    if not wanted:
        return families()[family].example
    return f"{family}-{'x'.join(str(sizes[size.key]) for size in wanted)}"


def first_label(family: str) -> str:
    """The label that the sliders make before they are moved."""
    return label_of(family, {size.key: size.default for size in sizes_of(family)})


_NUMBERS = re.compile(r"(?<=[-x])\d+")


def _shape(family: Family) -> str:
    """The letters of a family's pattern: "RxWxE" of "async-tree-RxWxE", "K" of "amusd[-K]"."""
    pattern = family.pattern.replace("[-K]", "-K").partition("[")[0].partition("@")[0]
    return pattern.rpartition("-")[2]
