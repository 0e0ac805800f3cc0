"""When a campaign measures what, and about how long it takes.

Seconds are those of the campaign of 2026-11-21 on H200s: starts, profiles, prompts by the token;
steps by a roofline of the engine. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path

from benchmarks import eight_predictions
from benchmarks.campaign.units import PAIRS, Pair, Unit
from codesign.config import parse_deployment
from codesign.fit.devices import load_device
from codesign.fit.roofline import Forward, Software

START_FIXED, START_LAYER = 12.0, 0.22  # seconds of a start: 14 s of 32 layers, 30 s of 80
PROFILE = 9.0  # of steps; prompts beside them:
PROFILE_PROMPT_TOKENS = 15_000  # each length three times, the longest once more to warm up
# Of a prompt, a layer, on one GPU: 20 us then. Prompts have kernels of their own since, which are
# taken to be twice as fast until somebody has timed them.
TOKEN_LAYER = 10e-6
RANK = 0.04  # of a recorded request, for the draft's opinion of it
NUM_RECORDED = (108, 21_800)  # requests, and prompt tokens of all
SERVED_PROMPT = 140  # tokens
TOKENS_A_ROUND = 2.1  # as served
CPU_START, CPU_STEP, CPU_PROFILE = 8.0, 0.01, 30.0  # of tiny models


@dataclass(frozen=True, slots=True)
class Wanted:
    """A deployment of a pair, the most seconds of its runs, and plans that replay a trace."""

    pair: Pair
    label: str
    run_seconds: float
    segments: int = 0


_LARGE, _LARGER_DRAFT, _SMALL, _QWEN = PAIRS[:4]


def _on_two(first: float, larger: float, small: float) -> tuple[Wanted, ...]:
    """Every pair on two GPUs; seconds of runs of the first pair, of other large ones, of 8B's."""
    budgets = (
        (_LARGE, first, 1),
        (_LARGER_DRAFT, larger, 0),
        (_SMALL, small, 1),
        (_QWEN, larger, 0),
    )
    return tuple(
        Wanted(pair, label, seconds, segments)
        for pair, seconds, segments in budgets
        for label in ("2", "1+1")
    )


_ON_FOUR = (Wanted(_LARGE, "4", 20.0), Wanted(_LARGE, "2+2", 20.0), Wanted(_LARGE, "3+1", 20.0))
_REST = (
    Wanted(_LARGE, "1", 12.0), Wanted(_SMALL, "1", 10.0), Wanted(_LARGER_DRAFT, "2+2", 20.0),
    Wanted(_LARGER_DRAFT, "4", 20.0), Wanted(_LARGE, "2+1", 15.0), Wanted(_LARGE, "1+2", 15.0),
)  # fmt: skip
# By GPUs of the machine, the most telling first: 600 s of two, 900 s of four and what is left.
SCHEDULES = {
    2: (*_on_two(32.0, 15.0, 17.0), Wanted(_LARGE, "1", 12.0), Wanted(_SMALL, "1", 10.0)),
    4: (*_on_two(45.0, 27.0, 27.0)[:2], *_ON_FOUR, *_on_two(45.0, 27.0, 27.0)[2:], *_REST),
}


@dataclass(frozen=True, slots=True)
class Session:
    """Everything that is measured on one start of a deployment's ranks.

    Attributes:
        pair: Which models.
        label: Of the deployment.
        units: Runs, in order.
        run_seconds: Most seconds for them.
    """

    pair: Pair
    label: str
    units: tuple[Unit, ...]
    run_seconds: float = inf

    def left(self, folder: Path) -> list[Unit]:
        """Runs that are not there yet, below the pair's folder."""
        return [u for u in self.units if not (folder / "runs" / u.folder / "run.json").exists()]

    def phases(self, folder: Path) -> dict[str, float]:
        """About how long each part takes that is not there yet; empty if all is."""
        phases: dict[str, float] = {}
        if not is_profiled(folder, self.label):
            phases["profile"] = profile_seconds(self.pair, self.label)
        if "+" not in self.label and not is_profiled(folder, "acceptance"):
            phases["acceptance"] = recording_seconds(self.pair, self.label)
        if self.left(folder) and not self._is_spent(folder):
            guess = sum(unit_seconds(u, self.pair) for u in self.left(folder))
            phases["runs"] = min(guess, self.run_seconds)
        return {"start": start_seconds(self.pair), **phases} if phases else {}

    def _is_spent(self, folder: Path) -> bool:
        """Whether its runs have had their seconds: a schedule goes on to the next session."""
        return self.run_seconds < inf and (folder / f"{self.label}.spent").exists()

    def seconds(self, folder: Path) -> float:
        """About how long it takes."""
        return sum(self.phases(folder).values())

    def least_seconds(self, folder: Path) -> float:
        """Without which it is not worth a start: all but runs, and the first of these."""
        phases = self.phases(folder)
        return sum(phases.values()) - phases.get("runs", 0.0) + min(phases.get("runs", 0.0), 8.0)


def scheduled(gpus: int, most: float = inf) -> list[Wanted]:
    """The schedule of a machine, or of the next smaller one.

    Args:
        gpus: Of the machine.
        most: Seconds for runs of any session.
    """
    known = max((number for number in SCHEDULES if number <= gpus), default=min(SCHEDULES))
    return [replace(w, run_seconds=min(w.run_seconds, most)) for w in SCHEDULES[known]]


def is_profiled(folder: Path, label: str) -> bool:
    """Whether a part of a pair's profile is there."""
    profile = folder / "profile"
    return (profile / "profile.json").exists() or (profile / "parts" / f"{label}.parquet").exists()


@cache
def _software() -> Software:
    steps = eight_predictions.known_steps(
        sorted(eight_predictions.RESULTS.glob("engine_steps_*.json"))
    )
    return eight_predictions.software_of(steps)


def _forward(name: str, gpus: int) -> Forward:
    return Forward(eight_predictions.model(name), load_device("h200"), gpus, _software())


def _sides(label: str) -> tuple[int, int]:
    """GPUs of the target and of the draft."""
    deployment = parse_deployment(label)
    return deployment.target_workers, deployment.draft_workers or deployment.target_workers


def step_seconds(pair: Pair, label: str) -> tuple[float, float]:
    """About how long a step of eight rows takes, of target and draft."""
    if not pair.is_inflated:
        return CPU_STEP, CPU_STEP / 2.0
    target, draft = (
        _forward(name, gpus).delta
        for name, gpus in zip((pair.target, pair.draft), _sides(label), strict=True)
    )
    return target, draft


def token_seconds(pair: Pair, label: str) -> float:
    """Of a prompt's token, both models, where they take turns or not."""
    if not pair.is_inflated:
        return CPU_STEP / 50.0
    shapes = [eight_predictions.model(name).shape.layers for name in (pair.target, pair.draft)]
    return sum(
        TOKEN_LAYER * layers / gpus**0.6 for layers, gpus in zip(shapes, _sides(label), strict=True)
    )


def start_seconds(pair: Pair) -> float:
    """Until ranks are up and models are made."""
    if not pair.is_inflated:
        return CPU_START
    return START_FIXED + START_LAYER * eight_predictions.model(pair.target).shape.layers


def profile_seconds(pair: Pair, label: str) -> float:
    """Of one deployment's part of a profile."""
    fixed = PROFILE if pair.is_inflated else CPU_PROFILE
    return fixed + PROFILE_PROMPT_TOKENS * token_seconds(pair, label)


def recording_seconds(pair: Pair, label: str) -> float:
    """Of recording acceptance."""
    requests, prompt_tokens = NUM_RECORDED
    rounds = requests * 48 / 8.0
    return (
        rounds * step_seconds(pair, label)[0]
        + prompt_tokens * token_seconds(pair, label)
        + requests * RANK
    )


def unit_seconds(work: Unit, pair: Pair) -> float:
    """About how long a run takes."""
    label = work.candidate.deployment.label
    target, draft = step_seconds(pair, label)
    load, spec = work.workload, work.candidate.speculation
    if load.seconds:
        return load.seconds + 1.0
    rounds = work.requests * load.output_tokens / min(load.batch, work.requests)
    seconds = target
    if spec.kind != "plain":
        drafting = draft * max(spec.expansions, spec.max_depth)
        rounds /= TOKENS_A_ROUND
        tiles = -(-spec.max_rows * min(load.batch, load.requests) // 8) if load.batch > 1 else 1
        seconds = target * max(1.0, 0.75 * tiles)
        seconds = max(seconds, drafting) if spec.is_async else seconds + drafting
    return rounds * seconds + SERVED_PROMPT * work.requests * token_seconds(pair, label)


def by_calls(seconds: Sequence[float], call: float) -> list[int]:
    """The call, from 1, in which each session runs, none cut in two."""
    calls, number, used = [], 1, 0.0
    for needed in seconds:
        if used and used + needed > call:
            number, used = number + 1, 0.0
        used += needed
        calls.append(number)
    return calls
