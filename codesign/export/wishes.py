"""What each policy would ask of an engine, and what of it no engine has.

One entry per kind of policy. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from codesign.export.setup import Loss
from codesign.policy.speculation import Kind, SpeculationSpec

MAX_LENGTH = 8  # of a chain that stands for a policy without a length of its own


@dataclass(frozen=True, slots=True)
class Wish:
    """A policy, as far as engines with serial drafts can follow it.

    Attributes:
        longest: Draft tokens of its longest chain; 0 for plain decoding.
        shape: (depth, width, rows) of its trees, root included; None for chains.
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


def wish_of(spec: SpeculationSpec, *, batch: int) -> Wish:
    """What a policy asks for when ``batch`` requests run on a copy, as they do on average."""
    return WISHES[spec.kind](spec, batch)


def _plain(spec: SpeculationSpec, batch: int) -> Wish:
    return Wish(0, is_fixed=True)


def _chain(spec: SpeculationSpec, batch: int) -> Wish:
    return Wish(spec.max_depth, is_fixed=True)


def _threshold(spec: SpeculationSpec, batch: int) -> Wish:
    loss = Loss(
        f"drafting stops after a token below confidence {spec.threshold:g}",
        "chains of one length",
    )
    return Wish(spec.max_depth, losses=(loss,))


def _turbospec(spec: SpeculationSpec, batch: int) -> Wish:
    loss = Loss("the length follows the acceptance seen lately", "the plan's acceptance, for good")
    return Wish(spec.max_depth, by_batch=True, losses=(loss,))


def _specserve(spec: SpeculationSpec, batch: int) -> Wish:
    loss = Loss(
        "each request drafts and verifies as far as its confidences pay",
        "one length for all requests of a step",
    )
    return Wish(spec.max_depth, by_batch=True, losses=(loss,))


def _static_tree(spec: SpeculationSpec, batch: int) -> Wish:
    loss = Loss(
        f"the same {'x'.join(map(str, spec.widths))} children on each level",
        "the likeliest nodes of as many rows",
    )
    depth, width = len(spec.widths), max(spec.widths)
    if width == 1:
        return Wish(depth, is_fixed=True)
    return Wish(MAX_LENGTH, (depth, width, spec.max_rows), losses=(loss,))


def _tree(spec: SpeculationSpec, batch: int) -> Wish:
    if spec.width == 1 and not spec.is_async:  # a chain by another name
        return Wish(min(spec.expansions, spec.rows - 1), is_fixed=True)
    return _shaped(spec, MAX_LENGTH)


def _inflight(spec: SpeculationSpec, batch: int) -> Wish:
    return _shaped(spec, MAX_LENGTH)


def _pipeinfer(spec: SpeculationSpec, batch: int) -> Wish:
    loss = Loss("trees are drafted below those under verification", "one tree a round")
    return _shaped(spec, MAX_LENGTH, loss)


def _eagle(spec: SpeculationSpec, batch: int) -> Wish:
    if spec.width == 1 and not spec.is_async:
        return _tree(spec, batch)
    return _shaped(spec, spec.expansions)


def _shaped(spec: SpeculationSpec, longest: int, *losses: Loss) -> Wish:
    shape = (spec.expansions, spec.width, spec.rows) if spec.width > 1 else None
    return Wish(longest, shape, losses=losses)


def _batch_tree(spec: SpeculationSpec, batch: int) -> Wish:
    loss = Loss(
        "requests share the rows and the forwards of a round by what they promise",
        "one shape for all requests of a step",
    )
    shape = (spec.expansions, spec.width, spec.rows) if spec.width > 1 else None
    return Wish(spec.expansions, shape, by_batch=True, losses=(loss,))


def _adaserve(spec: SpeculationSpec, batch: int) -> Wish:
    rows = min(max(spec.rows // batch, 2), spec.max_rows)
    loss = Loss(
        f"{spec.rows} rows a step go first to requests behind their TPOT target",
        "as many rows for each request",
    )
    shape = (spec.max_depth, spec.width, rows) if spec.width > 1 else None
    return Wish(spec.max_depth, shape, by_batch=True, max_rows=spec.rows, losses=(loss,))


def _pearl(spec: SpeculationSpec, batch: int) -> Wish:
    loss = Loss(
        "a round after a miss sends the root alone", "every round drafts before it verifies"
    )
    return Wish(min(spec.max_depth, MAX_LENGTH), losses=(loss,))


def _amusd(spec: SpeculationSpec, batch: int) -> Wish:
    loss = Loss(
        "as many tokens as could be drafted in the time are verified", "chains of one length"
    )
    return Wish(min(spec.max_depth, MAX_LENGTH), losses=(loss,))


def _ssd(spec: SpeculationSpec, batch: int) -> Wish:
    loss = Loss(
        f"chains for {spec.width} outcomes of each position are drafted beforehand",
        "a chain is drafted after each verdict",
    )
    return Wish(min(spec.max_depth, MAX_LENGTH), losses=(loss,))


WISHES: dict[Kind, Callable[[SpeculationSpec, int], Wish]] = {
    "plain": _plain,
    "chain": _chain,
    "threshold": _threshold,
    "turbospec": _turbospec,
    "specserve": _specserve,
    "static-tree": _static_tree,
    "tree": _tree,
    "inflight-tree": _inflight,
    "batch-tree": _batch_tree,
    "adaserve": _adaserve,
    "pearl": _pearl,
    "amusd": _amusd,
    "pipeinfer": _pipeinfer,
    "ssd": _ssd,
    "eagle": _eagle,
}
