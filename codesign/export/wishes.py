"""What each policy would ask of an engine, and what of it no engine has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from codesign.export.setup import Loss
from codesign.policy.speculation import Kind, SpeculationSpec

MAX_LENGTH = 8  # of a chain that stands for a policy without a length of its own
_ANY = sys.maxsize


@dataclass(frozen=True, slots=True)
class Wish:
    """A policy, as far as engines with serial drafts can follow it.

    Attributes:
        longest: Draft tokens of its longest chain; 0 for plain decoding.
        shape: (depth, width, rows) of its trees, root included; None for chains. Trees of width 1
            run one leaf a forward and verify siblings all the same.
        is_fixed: Each round drafts ``longest`` tokens.
        by_batch: Its length depends on how many requests run.
        max_rows: Rows of all requests together in a step; None without such a limit.
        losses: What no engine does.
    """

    longest: int
    shape: tuple[int, int, int] | None = None
    is_fixed: bool = False
    by_batch: bool = False
    max_rows: int | None = None
    losses: tuple[Loss, ...] = ()


# What no engine does, and what takes its place.
_LOST: dict[Kind, tuple[str, str]] = {
    "threshold": (
        "drafting stops after a token below confidence {spec.threshold:g}",
        "chains of one length",
    ),
    "turbospec": (
        "the length follows the recent acceptance rate",
        "the plan's acceptance, for good",
    ),
    "specserve": (
        "each request drafts and verifies as far as its confidences pay",
        "one length for all requests of a step",
    ),
    "static-tree": (
        "the same {levels} children on each level",
        "the likeliest nodes of as many rows",
    ),
    "pipeinfer": ("trees are drafted below those under verification", "one tree a round"),
    "batch-tree": (
        "requests share the rows and the forwards of a round by what they promise",
        "one shape for all requests of a step",
    ),
    "adaserve": (
        "{spec.rows} rows a step go first to requests behind their TPOT target",
        "as many rows for each request",
    ),
    "pearl": (
        "a round after a miss sends the root alone",
        "every round drafts before it verifies",
    ),
    "amusd": (
        "as many tokens as could be drafted in the time are verified",
        "chains of one length",
    ),
    "ssd": (
        "chains for {spec.width} outcomes of each position are drafted beforehand",
        "a chain is drafted after each verdict",
    ),
}
# ``longest`` is the most that stands for the policy's own length.
_CHAINS: dict[Kind, Wish] = {
    "plain": Wish(0, is_fixed=True),
    "chain": Wish(_ANY, is_fixed=True),
    "threshold": Wish(_ANY),
    "turbospec": Wish(_ANY, by_batch=True),
    "specserve": Wish(_ANY, by_batch=True),
    "pearl": Wish(MAX_LENGTH),
    "amusd": Wish(MAX_LENGTH),
    "ssd": Wish(MAX_LENGTH),
}


def wish_of(spec: SpeculationSpec, *, batch: int) -> Wish:
    """What a policy asks for when ``batch`` requests run on a copy, as they do on average."""
    if spec.kind in _CHAINS:
        chain = _CHAINS[spec.kind]
        wish = replace(chain, longest=min(spec.max_depth, chain.longest))
    else:
        wish = _TREES[spec.kind](spec, batch)
    if wish.is_fixed or spec.kind not in _LOST:
        return wish
    what, instead = _LOST[spec.kind]
    levels = "x".join(map(str, spec.widths))
    return replace(wish, losses=(Loss(what.format(spec=spec, levels=levels), instead),))


def _static_tree(spec: SpeculationSpec, batch: int) -> Wish:
    depth, width = len(spec.widths), max(spec.widths)
    if width == 1:
        return Wish(depth, is_fixed=True)
    return Wish(MAX_LENGTH, (depth, width, spec.max_rows))


def _tree(spec: SpeculationSpec, batch: int) -> Wish:
    if spec.rows == 2 and not spec.is_async:  # a chain by another name
        return Wish(1, is_fixed=True)
    return Wish(spec.expansions if spec.kind == "eagle" else MAX_LENGTH, _shape(spec))


def _batch_tree(spec: SpeculationSpec, batch: int) -> Wish:
    return Wish(spec.expansions, _shape(spec), by_batch=True)


def _adaserve(spec: SpeculationSpec, batch: int) -> Wish:
    rows = min(max(spec.rows // batch, 2), spec.max_rows)
    shape = (spec.max_depth, spec.width, rows) if spec.width > 1 else None  # a node has ``width``
    return Wish(spec.max_depth, shape, by_batch=True, max_rows=spec.rows)


def _shape(spec: SpeculationSpec) -> tuple[int, int, int] | None:
    return (spec.expansions, spec.width, spec.rows) if spec.rows > 2 else None


_TREES: dict[Kind, Callable[[SpeculationSpec, int], Wish]] = {
    "static-tree": _static_tree,
    "tree": _tree,
    "inflight-tree": _tree,
    "pipeinfer": _tree,
    "eagle": _tree,
    "batch-tree": _batch_tree,
    "adaserve": _adaserve,
}
