"""How much to speculate this round: plain decoding, chains, trees, and SpecServe's adaptive length.

A policy sees the draft trees of all requests in the batch. It says which leaves the draft model
runs on next, and which nodes the target verifies. Chains are trees of width 1. Whatever it decides,
the output is unchanged: the target decides tokens by walking (policy/walk.py).

Must not import torch or read a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Literal

from codesign.errors import InputError
from codesign.policy.cost import Calibration
from codesign.policy.tree import DraftTree

Kind = Literal["plain", "chain", "threshold", "tree", "specserve"]
KINDS: tuple[Kind, ...] = ("plain", "chain", "threshold", "tree", "specserve")
INITIAL_CONFIDENCE = 0.6  # SpecServe's start value of the running mean
MAX_TREE_ROWS = 128  # expanded nodes per request, so that draft KV slabs have a fixed size


@dataclass(frozen=True, slots=True)
class SpeculationSpec:
    """A speculation policy as data, as it stands in a plan file.

    Attributes:
        kind: "plain" (no draft), "chain" (fixed length), "threshold" (stop after an unsure token),
            "tree" (SwiftSpec: best-first tree), "specserve" (length by predicted goodput).
        is_async: The draft model grows the tree while the target verifies.
        max_depth: Longest chain, in draft tokens (chain, threshold, specserve).
        rows: Nodes that the target verifies per request, root included (tree).
        width: Leaves the draft model runs on per request and expansion (tree).
        expansions: Draft forwards per round (tree).
        threshold: Confidence below which drafting stops after that token (threshold).
        adaptive_drafter: Stop drafting when predicted goodput falls (specserve).
        confidence_prior: Verify only the drafted tokens that pay (specserve).
        slo_aware: Never speculate past the TPOT target (specserve).
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

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"unknown policy {self.kind!r}; choose one of {', '.join(KINDS)}")
        if self.kind in ("chain", "threshold", "specserve") and self.max_depth < 1:
            raise InputError(f"{self.kind} needs max_depth >= 1, got {self.max_depth}")
        if self.kind == "tree" and (self.rows < 2 or self.width < 1 or self.expansions < 1):
            raise InputError(
                f"a tree needs rows >= 2, width >= 1 and expansions >= 1, got "
                f"{self.rows}, {self.width}, {self.expansions}"
            )
        if not 0.0 <= self.threshold <= 1.0:
            raise InputError(f"threshold must be in [0, 1], got {self.threshold}")
        if self.is_async and self.kind != "tree":
            raise InputError(f"only trees run asynchronously, not {self.kind}")

    @property
    def label(self) -> str:
        """Short name, unique among the policies that the planner tries."""
        if self.kind == "tree":
            shape = f"{self.rows}x{self.width}x{self.expansions}"
            return f"{'async-tree' if self.is_async else 'tree'}-{shape}"
        if self.kind == "plain":
            return "plain"
        if self.kind == "threshold":
            return f"threshold-{self.max_depth}@{self.threshold}"
        if self.kind == "specserve":
            off = [
                name
                for name, is_on in (
                    ("drafter", self.adaptive_drafter),
                    ("prior", self.confidence_prior),
                    ("slo", self.slo_aware),
                )
                if not is_on
            ]
            return f"specserve-{self.max_depth}" + "".join(f"-no-{name}" for name in off)
        return f"chain-{self.max_depth}"

    @property
    def max_rows(self) -> int:
        """Most rows of one request that the target verifies in a round."""
        return self.rows if self.kind == "tree" else self.max_depth + 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a plan file."""
        return asdict(self)


def parse_policy(label: str) -> SpeculationSpec:
    """The policy that a label such as "chain-3", "tree-8x4x2" or "specserve-5" names.

    Raises:
        InputError: If the label is not one that ``SpeculationSpec.label`` writes.
    """
    name, _, shape = label.rpartition("-")
    try:
        if label == "plain":
            return SpeculationSpec()
        if name in ("tree", "async-tree"):
            rows, width, expansions = (int(n) for n in shape.split("x"))
            return SpeculationSpec(
                kind="tree",
                is_async=name == "async-tree",
                rows=rows,
                width=width,
                expansions=expansions,
            )
        if label.startswith("threshold-"):  # a bound may hold a minus sign: 1e-05
            depth, _, bound = label.removeprefix("threshold-").partition("@")
            return SpeculationSpec(
                kind="threshold", max_depth=int(depth), threshold=float(bound or 0.4)
            )
        if name == "chain":
            return SpeculationSpec(kind="chain", max_depth=int(shape))
        if label.startswith("specserve-"):
            depth, *off = label.removeprefix("specserve-").split("-no-")
            if set(off) <= {"drafter", "prior", "slo"}:
                return SpeculationSpec(
                    kind="specserve",
                    max_depth=int(depth),
                    adaptive_drafter="drafter" not in off,
                    confidence_prior="prior" not in off,
                    slo_aware="slo" not in off,
                )
    except ValueError:
        pass
    raise InputError(
        f"unknown policy {label!r}; write plain, chain-3, threshold-5@0.4, tree-8x4x2 "
        "(rows x width x expansions), async-tree-8x4x2 or specserve-5"
    )


class Speculation:
    """Plain autoregression, and what the other policies share.

    A round: ``begin``; while ``leaves`` names any, the draft model runs on them; ``select`` names
    the nodes to verify; an asynchronous policy then names ``overlap_leaves`` while the target
    verifies.
    """

    fanout = 1
    overlap = 0

    def __init__(self, calibration: Calibration | None = None) -> None:
        self._calibration = calibration or Calibration()

    def weigh(self, log_probs: Sequence[float]) -> list[float]:
        """Calibrated log chance of acceptance of each draft log probability; at most 0."""
        if self._calibration.is_identity:
            return list(log_probs)
        return [_calibrated(log_prob, self._calibration) for log_prob in log_probs]

    def begin(self, trees: Sequence[DraftTree]) -> None:
        """A round starts; the trees are already re-rooted."""

    def leaves(self, trees: Sequence[DraftTree], done: int) -> list[list[int]]:
        """Leaves of each tree to run next, after ``done`` expansions; all empty to stop."""
        return [[] for _ in trees]

    def overlap_leaves(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        """Leaves of each tree to run while the target verifies; called ``overlap`` times."""
        return [[] for _ in trees]

    def select(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        """Nodes of each tree that the target verifies, root included, connected."""
        return [[0] for _ in trees]


class FixedChain(Speculation):
    """A chain of fixed length, optionally cut after the first unsure token.

    The unsure token itself is still verified, so that its own draw never decides whether it is.

    Source:
        Leviathan et al., arXiv:2211.17192; dynamic length as in Hugging Face transformers.
    """

    def __init__(
        self, max_depth: int, threshold: float = 0.0, calibration: Calibration | None = None
    ) -> None:
        super().__init__(calibration)
        self._max_depth = max_depth
        self._threshold = threshold

    def leaves(self, trees: Sequence[DraftTree], done: int) -> list[list[int]]:
        return [tree.leaves(1) if self._goes_on(tree) else [] for tree in trees]

    def _goes_on(self, tree: DraftTree) -> bool:
        if len(tree) == 1:
            return True
        # Not counted in ``done``: a stale message or a cut chain leaves tokens to the next round.
        return len(tree) <= self._max_depth and last_confidence(tree) >= self._threshold

    def select(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        return [list(range(len(tree))) for tree in trees]


class BestTree(Speculation):
    """SwiftSpec's tree: run the ``width`` heaviest leaves, verify the ``rows`` heaviest nodes.

    Serial: ``expansions`` forwards, then verify. Asynchronous: the forwards overlap the
    verification, and before sending only as many run as it takes to have ``rows`` nodes (after a
    miss: one).

    Source:
        SwiftSpec, Algorithm 1.
    """

    def __init__(self, spec: SpeculationSpec, calibration: Calibration | None = None) -> None:
        super().__init__(calibration)
        self._rows = spec.rows
        self._width = spec.width
        self._required = 0 if spec.is_async else spec.expansions
        self.overlap = spec.expansions if spec.is_async else 0
        # At most this many of one node's children can be among the next heaviest leaves or rows.
        self.fanout = max(spec.width, spec.rows - 1)

    def leaves(self, trees: Sequence[DraftTree], done: int) -> list[list[int]]:
        return [
            self._heaviest(tree) if done < self._required or len(tree) < self._rows else []
            for tree in trees
        ]

    def overlap_leaves(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        return [self._heaviest(tree) for tree in trees]

    def _heaviest(self, tree: DraftTree) -> list[int]:
        return tree.leaves(min(self._width, MAX_TREE_ROWS - tree.num_expanded))

    def select(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        return [tree.best(self._rows) for tree in trees]


class Goodput:
    """SpecServe's estimator: tokens per second of a round, -1 where it would break the SLO.

    Args:
        draft_seconds: ``f(rows, context)`` of one draft forward.
        target_seconds: ``f(rows, context)`` of the target forward.
        overhead: Seconds per round beside the forwards.
        slo_tpot: Seconds per token that every step must keep, as a request may get one token
            only; None when there is no target.

    Source:
        SpecServe, Algorithm 3 and equations 3 to 9, with each request's context read once per step
        and counted as in StepTime's fit: KV rows before the forward.
    """

    def __init__(
        self,
        draft_seconds: Callable[[float, float], float],
        target_seconds: Callable[[float, float], float],
        *,
        overhead: float = 0.0,
        slo_tpot: float | None = None,
    ) -> None:
        self._draft_seconds = draft_seconds
        self._target_seconds = target_seconds
        self._overhead = overhead
        self._slo_tpot = slo_tpot

    def without_slo(self) -> Goodput:
        """The same estimator without a TPOT target."""
        return Goodput(self._draft_seconds, self._target_seconds, overhead=self._overhead)

    def __call__(
        self, *, batch: int, context: int, steps: int, draft_tokens: int, accepted: float
    ) -> float:
        """Expected tokens per second of a round.

        Args:
            batch: Requests; each emits one token at least.
            context: Sum of the requests' KV rows before the round.
            steps: Draft forwards made.
            draft_tokens: Draft tokens verified, roots not counted.
            accepted: Expected number of accepted draft tokens.
        """
        rows = batch + draft_tokens
        seconds = self._target_seconds(rows, context) + self._overhead
        seconds += sum(self._draft_seconds(batch, context + batch * j) for j in range(steps))
        if draft_tokens and self._slo_tpot is not None and seconds > self._slo_tpot:
            return -1.0
        return (batch + accepted) / seconds


class SpecServe(Speculation):
    """Chains whose length follows predicted goodput, for the whole batch and per request.

    Adaptive drafter: predict the goodput of one more step with the running mean confidence; if it
    does not fall, draft the step, and correct with the confidences seen. Confidence-prior verifier:
    of all drafted tokens verify the set with the largest goodput, most likely first.

    Source:
        SpecServe, Algorithms 1 and 2. The verifier takes the best prefix of the tokens sorted by
        path chance, which is what popping the smallest while goodput rises leads to.
    """

    def __init__(
        self, spec: SpeculationSpec, goodput: Goodput, calibration: Calibration | None = None
    ) -> None:
        super().__init__(calibration)
        self._spec = spec
        self._goodput = goodput if spec.slo_aware else goodput.without_slo()
        self._sum_confidence = INITIAL_CONFIDENCE
        self._num_confidence = 1
        self._best = 0.0
        self._steps = 0  # draft forwards of this round
        self._worth: list[int] = []  # nodes of each tree up to the last step that paid

    @property
    def mean_confidence(self) -> float:
        """Running mean of the confidences seen, at first ``INITIAL_CONFIDENCE``."""
        return self._sum_confidence / self._num_confidence

    def begin(self, trees: Sequence[DraftTree]) -> None:
        self._best = self._estimate(trees, steps=0, chances=_draft_chances(trees))
        self._worth = [len(tree) for tree in trees]

    def leaves(self, trees: Sequence[DraftTree], done: int) -> list[list[int]]:
        stop: list[list[int]] = [[] for _ in trees]
        self._steps = done
        if done and not self._correct(trees, done):
            return stop
        # By length, not by ``done``: verified only in part, a chain may live on in the next round.
        leaves = [tree.leaves(1) if len(tree) <= self._spec.max_depth else [] for tree in trees]
        if any(leaves) and (self._spec.adaptive_drafter or self._spec.slo_aware):
            chances = _draft_chances(trees)
            chances += [
                math.exp(tree.log_weights[leaf[0]]) * self.mean_confidence
                for tree, leaf in zip(trees, leaves, strict=True)
                if leaf
            ]
            predicted = self._estimate(trees, steps=done + 1, chances=chances)
            if predicted < 0 or (self._spec.adaptive_drafter and predicted < self._best):
                return stop
        return leaves

    def _correct(self, trees: Sequence[DraftTree], done: int) -> bool:
        """Take in the confidences of step ``done``; whether drafting may go on."""
        for tree, num_nodes in zip(trees, self._worth, strict=True):
            if len(tree) > num_nodes:
                self._sum_confidence += last_confidence(tree)
                self._num_confidence += 1
        goodput = self._estimate(trees, steps=done, chances=_draft_chances(trees))
        if self._spec.adaptive_drafter and goodput < self._best:
            return False
        self._best = goodput
        self._worth = [len(tree) for tree in trees]
        return True

    def select(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        drafted = sorted(
            (-tree.log_weights[node], tree.depths[node], i, node)
            for i, (tree, num_nodes) in enumerate(zip(trees, self._worth, strict=True))
            for node in range(1, num_nodes)
        )
        chances = [math.exp(-d[0]) for d in drafted]
        if self._spec.confidence_prior:
            drafted = drafted[: self._best_prefix(trees, chances)]
        elif self._estimate(trees, steps=self._steps, chances=chances) < 0:
            drafted = []  # tokens left over from the last round may be too many by themselves
        chosen = [[0] for _ in trees]
        for _, _, i, node in drafted:
            chosen[i].append(node)
        return chosen

    def _best_prefix(self, trees: Sequence[DraftTree], chances: list[float]) -> int:
        context = _context(trees)
        goodputs = [
            self._goodput(
                batch=len(trees),
                context=context,
                steps=self._steps,
                draft_tokens=n,
                accepted=accepted,
            )
            for n, accepted in enumerate(accumulate(chances, initial=0.0))
        ]
        return max(range(len(goodputs)), key=goodputs.__getitem__)

    def _estimate(self, trees: Sequence[DraftTree], *, steps: int, chances: list[float]) -> float:
        return self._goodput(
            batch=len(trees),
            context=_context(trees),
            steps=steps,
            draft_tokens=len(chances),
            accepted=sum(chances),
        )


def last_confidence(tree: DraftTree) -> float:
    """Chance of a chain's last token given its parent, as the draft model sees it."""
    parent = tree.parents[-1]
    return math.exp(tree.log_weights[-1] - tree.log_weights[parent])


def build_speculation(
    spec: SpeculationSpec,
    *,
    goodput: Goodput | None = None,
    calibration: Calibration | None = None,
) -> Speculation:
    """The policy object that a plan's ``spec`` describes.

    Raises:
        InputError: If SpecServe is asked for without the step times that it needs.
    """
    if spec.kind == "plain":
        return Speculation(calibration)
    if spec.kind == "chain":
        return FixedChain(spec.max_depth, calibration=calibration)
    if spec.kind == "threshold":
        return FixedChain(spec.max_depth, spec.threshold, calibration)
    if spec.kind == "tree":
        return BestTree(spec, calibration)
    if goodput is None:
        raise InputError(
            "specserve needs fitted step times: codesign fit PROFILE, then codesign plan --fit FIT"
        )
    return SpecServe(spec, goodput, calibration)


def _context(trees: Sequence[DraftTree]) -> int:
    return sum(tree.base_len - 1 for tree in trees)


def _draft_chances(trees: Sequence[DraftTree]) -> list[float]:
    return [math.exp(weight) for tree in trees for weight in tree.log_weights[1:]]


def _calibrated(log_prob: float, calibration: Calibration) -> float:
    confidence = min(max(math.exp(log_prob), 1e-6), 1.0 - 1e-6)
    logit = math.log(confidence) - math.log1p(-confidence)
    score = calibration.slope * logit + calibration.intercept
    return -math.log1p(math.exp(-score)) if score > -30 else score
