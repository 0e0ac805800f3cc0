"""What a campaign measures: pairs of models, deployments, a grid of plans, and how long it takes.

A unit of work leaves one file (a part of a profile) or one folder (a run); what is there is not
made again. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from codesign.candidate import Candidate
from codesign.config import Deployment, parse_deployment
from codesign.fit.devices import load_device
from codesign.fit.priced_model import parse_model
from codesign.fit.roofline import Forward
from codesign.policy.speculation import parse_policy

ROWS, DEPTHS, MAX_WIDTH = (4, 8, 16), (1, 2, 3, 4, 6, 8), 4
CHAINS = ("chain-3", "chain-5")
START, PROFILE = 15.0, 12.0  # seconds, guesses
PROFILE_CPU = 300.0
TOKENS_A_ROUND = 2.5  # another guess
SECONDS_CPU = 0.06  # of a forward of the small pair on a CPU


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
    Pair("llama-3-8b", "llama-3.2-1b"),
    Pair("llama-3-70b", "llama-3.2-1b"),
    Pair("llama-3-70b", "llama-3.2-3b"),
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


STREAM, BATCH = Workload("stream", 12, 1), Workload("batch", 24, 8)
SEGMENT = Workload("segment", 400, 8, seconds=10.0)
WORKLOADS = (STREAM, BATCH, SEGMENT)


@dataclass(frozen=True, slots=True)
class Size:
    """How much of the grid is run: every so many plans, and how many of them on a segment."""

    rows: Sequence[int] = ROWS
    depths: Sequence[int] = DEPTHS
    chains: Sequence[str] = CHAINS
    segments: int = 1
    requests: float = 1.0  # share of each workload's

    def of(self, workload: Workload) -> Workload:
        """A workload of this size."""
        return replace(workload, requests=max(round(self.requests * workload.requests), 2))


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


def deployments(gpus: int) -> list[str]:
    """Labels of one group, and of every split, of up to so many GPUs; the largest first."""
    whole = [str(size) for size in range(1, gpus + 1)]
    split = [f"{x}+{d}" for x in range(1, gpus) for d in range(1, gpus - x + 1)]
    return sorted(whole + split, key=lambda label: -parse_deployment(label).num_workers)


def grid(label: str, size: Size) -> list[Unit]:
    """Runs of a deployment, the most telling first, so that a grid that is cut short is a grid."""
    deployment = parse_deployment(label)
    trees = [f"tree-{r}x{min(r // 2, MAX_WIDTH)}x{d}" for d in size.depths for r in size.rows]
    middle = trees[len(trees) // 2 :] + trees[: len(trees) // 2]
    if deployment.draft_workers:
        policies = [f"async-{tree}" for tree in _spread(middle)]
    else:
        policies = ["plain", *_spread([*middle, *size.chains])]
    units = []
    for number, policy in enumerate(policies):
        workloads = [STREAM, BATCH] + [SEGMENT] * (number < size.segments)
        units += [unit(deployment, policy, size.of(workload)) for workload in workloads]
    return units


def unit(deployment: Deployment, policy: str, workload: Workload) -> Unit:
    """A run of a policy."""
    return Unit(workload, Candidate(deployment, parse_policy(policy), workload.batch))


def _spread(policies: Sequence[str]) -> list[str]:
    """The same in long strides: neighbours of a grid are alike, and it may be cut short."""
    count = len(policies)
    stride = next(n for n in (7, 5, 3, 2, 1) if math.gcd(n, count) == 1)
    return [policies[i * stride % count] for i in range(count)]


def forward_seconds(pair: Pair) -> tuple[float, float]:
    """About how long a forward of target and draft takes on one GPU."""
    if not pair.is_inflated:
        return SECONDS_CPU, SECONDS_CPU / 4.0
    shape = {"llama-3-8b": "llama-3.1-8b"}.get(pair.target, pair.target)
    device = load_device("h200")
    target, draft = (
        Forward(parse_model(f"{name}:int4"), device, 1).delta for name in (shape, pair.draft)
    )
    return target, draft


def unit_seconds(work: Unit, pair: Pair) -> float:
    """About how long a run takes."""
    target, draft = forward_seconds(pair)
    load, spec = work.workload, work.candidate.speculation
    if load.seconds:
        return load.seconds + 1.0
    rounds = load.requests * load.output_tokens / min(load.batch, load.requests)
    seconds = target
    if spec.kind != "plain":
        drafting = draft * max(spec.expansions, spec.max_depth)
        rounds /= TOKENS_A_ROUND
        seconds = max(target, drafting) if spec.is_async else target + drafting
    return rounds * seconds + 3.0 * load.requests * target


@dataclass(frozen=True, slots=True)
class Session:
    """Everything that is measured on one start of a deployment's ranks.

    Attributes:
        pair: Which models.
        label: Of the deployment.
        units: Runs, in order.
    """

    pair: Pair
    label: str
    units: tuple[Unit, ...]

    def left(self, folder: Path) -> list[Unit]:
        """Runs that are not there yet, below the pair's folder."""
        return [u for u in self.units if not (folder / "runs" / u.folder / "run.json").exists()]

    def seconds(self, folder: Path) -> float:
        """About how long it takes."""
        guess = PROFILE if self.pair.is_inflated else PROFILE_CPU
        profile = 0.0 if is_profiled(folder, self.label) else guess
        runs = sum(unit_seconds(u, self.pair) for u in self.left(folder))
        return START + profile + runs if profile or runs else 0.0


def is_profiled(folder: Path, label: str) -> bool:
    """Whether a part of a pair's profile is there."""
    profile = folder / "profile"
    return (profile / "profile.json").exists() or (profile / "parts" / f"{label}.parquet").exists()
