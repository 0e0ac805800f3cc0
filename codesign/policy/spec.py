"""A speculation policy as data: what a plan file holds and a label names.

Must not import torch or read a clock.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import mul
from typing import Any, Literal, get_args

from codesign.errors import InputError
from codesign.policy.interface import MAX_TREE_ROWS

Kind = Literal[
    "plain",
    "chain",
    "threshold",
    "turbospec",
    "specserve",
    "static-tree",
    "tree",
    "inflight-tree",
    "batch-tree",
    "adaserve",
    "pearl",
    "amusd",
    "pipeinfer",
    "ssd",
    "eagle",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
CHAINS = ("chain", "threshold", "turbospec", "specserve", "pearl", "amusd")  # width 1
SHAPED = ("tree", "inflight-tree", "batch-tree", "pipeinfer", "eagle")  # rows x width x expansions
ALWAYS_ASYNC = ("inflight-tree", "pearl", "amusd", "pipeinfer", "ssd")
MAYBE_ASYNC = ("tree", "batch-tree", "eagle")
FEATURE_DECAY = 0.96  # EAGLE's acceptance falls from about 0.79 to 0.67 over four own features


@dataclass(frozen=True, slots=True)
class SpeculationSpec:
    """A speculation policy as data, as it stands in a plan file.

    Attributes:
        kind: Which policy; ``codesign simulate --list-policies`` says what each does.
        is_async: The draft model has workers of its own and drafts while the target verifies.
        max_depth: Longest chain, in draft tokens (chain, threshold, turbospec, specserve, amusd,
            adaserve); tokens of each branch (ssd) or drafted per round (pearl).
        rows: Nodes that the target verifies per request, root included (tree, inflight-tree,
            pipeinfer, eagle), at most (batch-tree); rows for all requests together (adaserve).
        width: Leaves the draft model runs on per request and expansion (tree, inflight-tree,
            pipeinfer, eagle, adaserve), at most (batch-tree); outcomes per position (ssd).
        expansions: Draft forwards per round (tree, inflight-tree, pipeinfer, eagle), at most
            (batch-tree).
        widths: Children of each node, level by level (static-tree).
        threshold: Confidence below which drafting stops after that token (threshold).
        adaptive_drafter: Stop drafting when predicted goodput falls (specserve).
        confidence_prior: Verify only the drafted tokens that pay (specserve).
        slo_aware: Never speculate past the TPOT target (specserve).
        feature_decay: Share of the acceptance that is left when the draft head reads one more
            feature that it has predicted itself instead of the target's own (eagle).

    Source:
        ``feature_decay``: EAGLE, arXiv:2401.15077, acceptance 0-alpha to 4-alpha; 1.0 stands for
        heads that are trained on their own features, as EAGLE-3's (arXiv:2503.01840).
    """

    kind: Kind = "plain"
    is_async: bool = False
    max_depth: int = 0
    rows: int = 1
    width: int = 1
    expansions: int = 0
    threshold: float = 0.4
    adaptive_drafter: bool = True
    confidence_prior: bool = True
    slo_aware: bool = True
    widths: tuple[int, ...] = ()
    feature_decay: float = FEATURE_DECAY

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(self.widths))  # a list when read from a file
        if self.kind not in KINDS:
            raise InputError(f"unknown policy {self.kind!r}; choose one of {', '.join(KINDS)}")
        self._check_shape()
        for name in ("threshold", "feature_decay"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InputError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if self.is_async and self.kind not in (*MAYBE_ASYNC, *ALWAYS_ASYNC):
            raise InputError(f"{self.kind} does not run asynchronously")
        if not self.is_async and self.kind in ALWAYS_ASYNC:
            raise InputError(f"{self.kind} runs asynchronously only")

    def _check_shape(self) -> None:
        if self.kind in (*CHAINS, "ssd", "adaserve") and self.max_depth < 1:
            raise InputError(f"{self.kind} needs max_depth >= 1, got {self.max_depth}")
        if self.kind in SHAPED and (self.rows < 2 or self.width < 1 or self.expansions < 1):
            raise InputError(
                f"{_a(self.kind)} needs rows >= 2, width >= 1 and expansions >= 1, got "
                f"{self.rows}, {self.width}, {self.expansions}"
            )
        if self.kind == "adaserve" and (self.rows < 2 or self.width < 1):
            raise InputError(
                f"adaserve needs width >= 1 and rows >= 2, got {self.width}, {self.rows}"
            )
        if self.kind == "static-tree" and (not self.widths or min(self.widths) < 1):
            raise InputError(f"a static-tree needs widths >= 1, got {list(self.widths)}")
        if self.kind == "ssd" and self.width < 1:
            raise InputError(f"ssd needs outcomes >= 1 per position, got {self.width}")
        if self.draft_kv_rows > MAX_TREE_ROWS:
            raise InputError(
                f"{self.label} needs {self.draft_kv_rows} draft KV rows per request and round, "
                f"at most {MAX_TREE_ROWS}. Take a smaller shape"
            )

    @property
    def label(self) -> str:
        """Short name that ``parse_policy`` reads; unique among policies."""
        shape = f"{self.rows}x{self.width}x{self.expansions}"
        prefix = "async-" if self.is_async and self.kind in MAYBE_ASYNC else ""
        name = {
            "plain": "plain",
            "threshold": f"threshold-{self.max_depth}@{self.threshold}",
            "specserve": f"specserve-{self.max_depth}" + "".join(self._parts_off()),
            "static-tree": f"static-tree-{'x'.join(map(str, self.widths))}",
            "adaserve": f"adaserve-{self.max_depth}x{self.width}x{self.rows}",
            "ssd": f"ssd-{self.max_depth}x{self.width}",
            "eagle": f"eagle-{shape}@{self.feature_decay}",
        }.get(self.kind)
        if name is None:
            size = shape if self.kind in SHAPED else str(self.max_depth)
            name = f"{self.kind}-{size}"
        return prefix + name

    def _parts_off(self) -> list[str]:
        parts = (
            ("drafter", self.adaptive_drafter),
            ("prior", self.confidence_prior),
            ("slo", self.slo_aware),
        )
        return [f"-no-{name}" for name, is_on in parts if not is_on]

    @property
    def family(self) -> str:
        """Name without numbers, for example "chain", "tree" or "async-tree"."""
        return f"async-{self.kind}" if self.is_async and self.kind in MAYBE_ASYNC else self.kind

    @property
    def max_rows(self) -> int:
        """Most rows of one request that the target verifies in a round."""
        if self.kind in SHAPED:
            return self.rows
        if self.kind == "static-tree":
            return 1 + sum(accumulate(self.widths, mul))
        if self.kind == "adaserve":
            return min(1 + self.max_depth * self.width, self.rows)
        return self.max_depth + 1

    @property
    def max_overlap(self) -> int:
        """Most draft forwards of a round that overlap the target's verification."""
        if not self.is_async:
            return 0
        if self.kind in SHAPED:
            return self.expansions
        return 1 + self.max_depth if self.kind == "ssd" else self.max_depth

    @property
    def has_draft(self) -> bool:
        """Whether anything is drafted."""
        return self.kind != "plain"

    @property
    def kv_rows(self) -> int:
        """KV rows per request and round, of the model that needs more; one limit serves both."""
        return max(self.max_rows, self.draft_kv_rows)

    @property
    def draft_kv_rows(self) -> int:
        """KV rows of the draft per request and round; what stays of a tree may add some to them."""
        if self.kind in SHAPED:
            return min(self.width * self.expansions, MAX_TREE_ROWS)
        if self.kind == "static-tree":
            return 1 + sum(accumulate(self.widths[:-1], mul))
        if self.kind == "ssd":
            return (1 + self.max_depth) * (1 + self.width * self.max_depth)
        if self.kind == "adaserve":
            return 1 + (self.max_depth - 1) * self.width
        return 2 * self.max_depth + 1 if self.is_async else self.max_depth

    @property
    def runs_in_engine(self) -> bool:
        """Whether the engine can run it, not the simulator alone."""
        return self.kind != "eagle"

    @property
    def needs_step_times(self) -> bool:
        """Whether it decides by predicted seconds, which a fit holds."""
        return self.kind in ("specserve", "turbospec", "adaserve", "amusd", "batch-tree")

    @property
    def takes_turns(self) -> bool:
        """Whether requests may take turns in its rounds of plain decoding (turns.py).

        Policies that treat requests one by one draft in nearly all rounds.
        """
        return self.kind == "plain" or self.needs_step_times

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a plan file."""
        return asdict(self)


def _a(kind: str) -> str:
    return (
        f"a {kind}"
        if kind in ("tree", "batch-tree")
        else f"an {kind}"
        if kind[0] in "aei"
        else kind
    )
