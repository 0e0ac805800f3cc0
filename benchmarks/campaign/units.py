"""What a campaign measures: pairs of models, deployments, and a grid of plans.

A unit of work leaves one file (a part of a profile) or one folder (a run); what is there is not
made again. When, and how long it takes, is in schedule.py. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from codesign.candidate import Candidate
from codesign.config import Deployment, parse_deployment
from codesign.policy.speculation import parse_policy

ROWS, DEPTHS, MAX_WIDTH = (4, 8, 16), (1, 2, 3, 4, 6, 8), 4
CHAINS = ("chain-1", "chain-3", "chain-5")
# What a planner is likely to choose, and its neighbours: run first, workload by workload in turn.
LEADING = 4
STREAM_FIRST = ("plain", "tree-8x4x3", "tree-4x2x2", "chain-3", "tree-8x4x4", "chain-1")
BATCH_FIRST = ("plain", "chain-1", "tree-4x2x2", "chain-3", "tree-4x2x4")
SPLIT_STREAM_FIRST = ("8x4x3", "4x2x2", "8x4x4", "2x1x1", "4x2x4", "8x4x6", "16x4x4")
SPLIT_BATCH_FIRST = ("4x2x2", "2x1x1", "8x4x3", "4x2x4")


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its draft.

    Attributes:
        target: A shape that a small target is inflated to, or the name of a model.
        draft: The same.
        draft_flags: Of ``codesign models inflate`` for the draft.
        is_inflated: Whether these are shapes.
    """

    target: str
    draft: str
    draft_flags: tuple[str, ...] = ()
    is_inflated: bool = True

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{Path(self.target).name}+{Path(self.draft).name}"

    @property
    def models(self) -> tuple[str, str]:
        """Names of both models in the cache."""
        if not self.is_inflated:
            return self.target, self.draft
        return f"inflated-{self.target}", f"inflated-draft-{self.draft}"


# The shipped draft has 3 key-value heads, Qwen2-1.5B's shape 2.
PAIRS = (
    Pair("llama-3-70b", "llama-3.2-1b"),
    Pair("llama-3-70b", "llama-3.2-3b"),
    Pair("llama-3-8b", "llama-3.2-1b"),
    Pair("qwen2-72b", "qwen2-1.5b", ("--drop-kv-heads", "1")),
    Pair("smollm2-135m", "smollm2-135m-draft", is_inflated=False),
)


def find_pair(name: str) -> Pair:
    """A pair by its name; TARGET+DRAFT of any other models, by name or folder."""
    target, _, draft = name.partition("+")
    known = {pair.name: pair for pair in PAIRS}
    return known.get(name) or Pair(target, draft, is_inflated=False)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests to serve.

    Attributes:
        name: Of its folder.
        requests: How many.
        batch: Most at once.
        output_tokens: Of each; a segment's own.
        seconds: Of a segment, whose requests arrive as in a trace; 0 if all are there at once.
    """

    name: str
    requests: int
    batch: int
    output_tokens: int = 48  # as many as are recorded after a prompt
    seconds: float = 0.0


STREAM, BATCH = Workload("stream", 24, 1), Workload("batch", 24, 8, output_tokens=128)
SEGMENT = Workload("segment", 400, 8, seconds=9.0)
PLAIN_STREAM = 4  # plain decoding of one stream has no luck: so many times fewer requests
WORKLOADS = (STREAM, BATCH, SEGMENT)


@dataclass(frozen=True, slots=True)
class Size:
    """How much of the grid is run.

    Attributes:
        rows: Of trees.
        depths: Of trees.
        chains: By name.
        segments: Plans that replay a segment.
        batches: Plans that serve a batch before any others serve anything.
        requests: Share of each workload's.
        seconds: Of a segment.
        streams: Plans that serve a stream before any others serve anything.
    """

    rows: Sequence[int] = ROWS
    depths: Sequence[int] = DEPTHS
    chains: Sequence[str] = CHAINS
    segments: int = 1
    requests: float = 1.0
    batches: int = LEADING
    seconds: float = SEGMENT.seconds
    streams: int = LEADING

    def of(self, workload: Workload) -> Workload:
        """A workload of this size."""
        share = self.requests
        if workload.seconds:
            share *= self.seconds / workload.seconds
            workload = replace(workload, seconds=self.seconds)
        return replace(workload, requests=max(round(share * workload.requests), 2))


FULL, SMALL = Size(), Size((4, 8), (2, 4), ("chain-3",), 1, 0.5)


@dataclass(frozen=True, slots=True)
class Unit:
    """One run: a candidate and what it serves."""

    workload: Workload
    candidate: Candidate

    @property
    def folder(self) -> str:
        """Below the pair's folder of runs."""
        return f"{self.workload.name}/{self.candidate.label.replace(', ', '_').replace(' ', '_')}"

    @property
    def requests(self) -> int:
        """How many of the workload's are served."""
        is_plain = self.candidate.speculation.kind == "plain"
        if is_plain and self.workload.batch == 1:
            return max(self.workload.requests // PLAIN_STREAM, 2)
        return self.workload.requests


def deployments(gpus: int) -> list[str]:
    """Labels of one group, and of every split, of up to so many GPUs; the largest first."""
    whole = [str(size) for size in range(1, gpus + 1)]
    split = [f"{x}+{d}" for x in range(1, gpus) for d in range(1, gpus - x + 1)]
    return sorted(whole + split, key=lambda label: -parse_deployment(label).num_workers)


def grid(label: str, size: Size) -> list[Unit]:
    """Runs of a deployment, the most telling first, so that a grid that is cut short is a grid."""
    deployment = parse_deployment(label)
    trees = [f"tree-{r}x{min(r // 2, MAX_WIDTH)}x{d}" for d in size.depths for r in size.rows]
    if deployment.draft_workers:
        pairs = ["tree-2x1x1"] if size.chains else []  # a chain of one, two rows a request
        every = _spread([f"async-{tree}" for tree in (*trees, *pairs)])
        streams, batches = (
            _ordered([f"async-tree-{shape}" for shape in first], every)
            for first in (SPLIT_STREAM_FIRST, SPLIT_BATCH_FIRST)
        )
    else:
        every = ["plain", *_spread([*trees, *size.chains])]
        streams, batches = (_ordered(first, every) for first in (STREAM_FIRST, BATCH_FIRST))
    leading, others = [], []
    for number, (stream, batch) in enumerate(zip(streams, batches, strict=True)):
        first = leading if number < size.streams else others
        first.append(unit(deployment, stream, size.of(STREAM)))
        first = leading if number < size.batches else others
        first.append(unit(deployment, batch, size.of(BATCH)))
        if number < size.segments:
            leading.append(unit(deployment, batch, size.of(SEGMENT)))
    return leading + others


def _ordered(first: Sequence[str], every: Sequence[str]) -> list[str]:
    """As many policies as there are, those that are asked for first in front."""
    known = [policy for policy in first if policy in every]
    return list(dict.fromkeys([*known, *every]))


def unit(deployment: Deployment, policy: str, workload: Workload) -> Unit:
    """A run of a policy."""
    return Unit(workload, Candidate(deployment, parse_policy(policy), workload.batch))


def _spread(policies: Sequence[str]) -> list[str]:
    """The same in long strides: neighbours of a grid are alike, and it may be cut short."""
    count = len(policies)
    stride = next(n for n in (7, 5, 3, 2, 1) if math.gcd(n, count) == 1)
    return [policies[i * stride % count] for i in range(count)]
