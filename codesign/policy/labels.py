"""Names of policies: what a label such as "tree-8x4x2" stands for, and the list of all families.

Must not import torch or read a clock.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from codesign.errors import InputError
from codesign.policy.spec import FEATURE_DECAY, SpeculationSpec

_PARTS = ("drafter", "prior", "slo")  # of SpecServe, each may be switched off
_SHAPE = r"(\d+)x(\d+)x(\d+)"
AMUSD_DEPTH = 16  # longest chain of "amusd" without a number


@dataclass(frozen=True, slots=True)
class Family:
    """One way to speculate, in all its sizes.

    Attributes:
        pattern: How its labels are written.
        example: One of its labels.
        summary: What it does, in a line.
        source: Who published it.
        expression: What ``parse_policy`` matches.
        read: From the groups of a match to the policy.
    """

    pattern: str
    example: str
    summary: str
    source: str
    expression: str
    read: Callable[..., SpeculationSpec]

    @property
    def spec(self) -> SpeculationSpec:
        """The example as data."""
        return parse_policy(self.example)


def parse_policy(label: str) -> SpeculationSpec:
    """The policy that a label such as "chain-3", "tree-8x4x2" or "specserve-5" names.

    Raises:
        InputError: If the label is of no family, or its numbers have no meaning.
    """
    for family in FAMILIES:
        if match := re.fullmatch(family.expression, label):
            try:
                return family.read(*match.groups())
            except ValueError:
                break
    raise InputError(
        f"unknown policy {label!r}; write plain, chain-3, threshold-5@0.4, tree-8x4x2 "
        "(rows x width x expansions), async-tree-8x4x2 or specserve-5; all of them: "
        "codesign simulate --list-policies"
    )


def summarise_policy(spec: SpeculationSpec) -> str:
    """What a policy does, in a line."""
    return next(family.summary for family in FAMILIES if family.spec.family == spec.family)


def check_runs_in_engine(spec: SpeculationSpec) -> None:
    """Refuse a policy that exists in the simulator alone.

    Raises:
        InputError: If it does.
    """
    if not spec.runs_in_engine:
        raise InputError(
            f"{spec.label} runs in the simulator only: its draft head reads the target's features. "
            "Choose another: codesign simulate --list-policies"
        )


def _threshold(depth: str, bound: str | None) -> SpeculationSpec:
    return SpeculationSpec(kind="threshold", max_depth=int(depth), threshold=float(bound or 0.4))


def _tree(is_async: str | None, *shape: str) -> SpeculationSpec:
    return _shaped("tree", is_async is not None, shape)


def _batch_tree(is_async: str | None, *shape: str) -> SpeculationSpec:
    return _shaped("batch-tree", is_async is not None, shape)


def _shaped(kind: str, is_async: bool, shape: tuple[str, ...], **more: float) -> SpeculationSpec:
    rows, width, expansions = map(int, shape)
    return SpeculationSpec(
        kind=kind,  # type: ignore[arg-type]
        is_async=is_async,
        rows=rows,
        width=width,
        expansions=expansions,
        **more,  # type: ignore[arg-type]
    )


def _eagle(
    is_async: str | None, rows: str, width: str, expansions: str, decay: str | None
) -> SpeculationSpec:
    shape = (rows, width, expansions)
    kept = FEATURE_DECAY if decay is None else float(decay)
    return _shaped("eagle", is_async is not None, shape, feature_decay=kept)


def _specserve(depth: str, off: str) -> SpeculationSpec:
    parts = off.split("-no-")[1:]
    return SpeculationSpec(
        kind="specserve",
        max_depth=int(depth),
        adaptive_drafter="drafter" not in parts,
        confidence_prior="prior" not in parts,
        slo_aware="slo" not in parts,
    )


FAMILIES: tuple[Family, ...] = (  # from simple to involved
    Family(
        "plain",
        "plain",
        "no draft, one token per step",
        "",
        "plain",
        SpeculationSpec,
    ),
    Family(
        "chain-K",
        "chain-3",
        "K draft tokens one after another; SpecInfer* of the SpecServe paper",
        "arXiv:2211.17192",
        r"chain-(\d+)",
        lambda depth: SpeculationSpec(kind="chain", max_depth=int(depth)),
    ),
    Family(
        "threshold-K@X",
        "threshold-5@0.4",
        "up to K tokens, stop after one below confidence X",
        "Hugging Face transformers",
        r"threshold-(\d+)(?:@(.*))?",
        _threshold,
    ),
    Family(
        "turbospec-K",
        "turbospec-5",
        "up to K tokens: the length of highest goodput at the recent acceptance rate",
        "SmartSpec, arXiv:2406.14066",
        r"turbospec-(\d+)",
        lambda depth: SpeculationSpec(kind="turbospec", max_depth=int(depth)),
    ),
    Family(
        "specserve-K[-no-PART]..",
        "specserve-5",
        "up to K tokens while goodput is predicted to rise, verify those that pay "
        "(PART: drafter, prior, slo)",
        "SpecServe, arXiv:2503.05096",
        rf"specserve-(\d+)((?:-no-(?:{'|'.join(_PARTS)}))*)",
        _specserve,
    ),
    Family(
        "static-tree-AxBx..",
        "static-tree-3x2x1",
        "a tree of A, B, .. children per node, level by level",
        "SpecInfer, arXiv:2305.09781",
        r"static-tree-(\d+(?:x\d+)*)",
        lambda widths: SpeculationSpec(
            kind="static-tree", widths=tuple(map(int, widths.split("x")))
        ),
    ),
    Family(
        "tree-RxWxE",
        "tree-8x4x2",
        "best-first tree: R rows verified, E forwards of W leaves (SwiftSpec-base)",
        "SwiftSpec, arXiv:2506.11309",
        rf"(async-)?tree-{_SHAPE}",
        _tree,
    ),
    Family(
        "async-tree-RxWxE",
        "async-tree-8x4x2",
        "the same, grown while the target verifies; what follows the accepted path is kept",
        "SwiftSpec, arXiv:2506.11309",
        rf"(async-)?tree-{_SHAPE}",
        _tree,
    ),
    Family(
        "inflight-tree-RxWxE",
        "inflight-tree-8x4x2",
        "async-tree that drafts below every possible next root before it grows deeper",
        "this project",
        rf"inflight-tree-{_SHAPE}",
        lambda *shape: _shaped("inflight-tree", True, shape),
    ),
    Family(
        "batch-tree-RxWxE",
        "batch-tree-16x4x6",
        "trees that share the rows of the batch: up to R rows, W leaves per request, E forwards",
        "this project",
        rf"(async-)?batch-tree-{_SHAPE}",
        _batch_tree,
    ),
    Family(
        "async-batch-tree-RxWxE",
        "async-batch-tree-16x4x6",
        "the same, grown while the target verifies, as deep as time allows",
        "this project",
        rf"(async-)?batch-tree-{_SHAPE}",
        _batch_tree,
    ),
    Family(
        "adaserve-DxWxB",
        "adaserve-4x2x32",
        "beams of width W to depth D; B rows per step, first to requests behind their TPOT",
        "AdaServe, arXiv:2501.12162",
        rf"adaserve-{_SHAPE}",
        lambda depth, width, rows: SpeculationSpec(
            kind="adaserve", max_depth=int(depth), width=int(width), rows=int(rows)
        ),
    ),
    Family(
        "pearl-K",
        "pearl-4",
        "K tokens drafted during each verification; after a miss only the root is verified",
        "PEARL, arXiv:2408.11850",
        r"pearl-(\d+)",
        lambda depth: SpeculationSpec(kind="pearl", is_async=True, max_depth=int(depth)),
    ),
    Family(
        "amusd[-K]",
        "amusd-16",
        "a chain that grows all the time; what is there is verified, up to K tokens",
        "AMUSD, arXiv:2410.17375",
        r"amusd(?:-(\d+))?",
        lambda depth: SpeculationSpec(
            kind="amusd", is_async=True, max_depth=int(depth or AMUSD_DEPTH)
        ),
    ),
    Family(
        "pipeinfer-RxWxE",
        "pipeinfer-4x2x3",
        "several small trees in sequence; a miss drops all later ones",
        "PipeInfer, arXiv:2407.11798",
        rf"pipeinfer-{_SHAPE}",
        lambda *shape: _shaped("pipeinfer", True, shape),
    ),
    Family(
        "ssd-KxF",
        "ssd-4x3",
        "a chain of K drafted in advance for each of F outcomes per position",
        "Speculative speculative decoding (Saguaro), released code",
        r"ssd-(\d+)x(\d+)",
        lambda depth, width: SpeculationSpec(
            kind="ssd", is_async=True, max_depth=int(depth), width=int(width)
        ),
    ),
    Family(
        "eagle-RxWxE[@X]",
        "eagle-8x4x2@0.96",
        "tree of a head that reads target features; each feature of its own leaves X acceptance",
        "EAGLE-2, arXiv:2406.16858",
        rf"(async-)?eagle-{_SHAPE}(?:@(.*))?",
        _eagle,
    ),
    Family(
        "async-eagle-RxWxE[@X]",
        "async-eagle-8x4x2@0.96",
        "the same during the verification; one forward with true features per round",
        "this project",
        rf"(async-)?eagle-{_SHAPE}(?:@(.*))?",
        _eagle,
    ),
)
