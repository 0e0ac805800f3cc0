"""When a campaign measures what, and about how long it takes.

Seconds are those of the campaigns of 2026-11-23 on H200s: starts, profiles, prompts by the token;
steps by a roofline of the engine on this machine's GPU. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from benchmarks import eight_predictions
from benchmarks.campaign.requests import LONG_ANSWER, NUM_LONG, RECORDED_TOKENS
from benchmarks.campaign.units import FULL, LEADING, PAIRS, Pair, Size, Unit
from benchmarks.this_device import this_device
from codesign.config import parse_deployment
from codesign.fit.prompt_stairs import LONGEST
from codesign.fit.roofline import Forward, Software

START_FIXED, START_LAYER = 6.0, 0.08  # seconds of a start: 8.5 s of 32 layers, 12.5 s of 80
COLD_START = 18.0  # more for the first session of a call: it compiles what all of them run
PROFILE, SPLIT_PROFILE, PROFILE_STEPS = 2.5, 4.5, 3700  # so many seconds and steps of eight rows
# Of a prompt on one H200, a layer of 70B: what weights and rows do, and the host beyond graphs.
PROMPT_LAYER, ROW_LAYER, LONG_ROW_LAYER, HOST_LAYER = 150e-6, 3.7e-6, 2.55e-6, 400e-6
RANK = 0.01  # of a recorded request, for the draft's opinion of it
NUM_RECORDED = (108, 21_800)  # requests at least, and prompt tokens of all
RECORDING = 18.0  # seconds after which no more are begun, of
MOST_RECORDED, RECORDED_AT_ONCE = 396, 24
SERVED_PROMPT = 256  # rows of the graph of 140 tokens
TOKENS_A_ROUND = 2.1  # as served
CPU_START, CPU_STEP, CPU_PROFILE = 8.0, 0.01, 30.0  # of tiny models


@dataclass(frozen=True, slots=True)
class Wanted:
    """A deployment of a pair.

    Attributes:
        pair: Which models.
        label: Of the deployment.
        run_seconds: Most seconds for its runs.
        segments: Plans that replay a trace.
        batches: Of the leading plans, those that serve a batch.
    """

    pair: Pair
    label: str
    run_seconds: float
    segments: int = 0
    batches: int = LEADING

    @property
    def share(self) -> float:
        """Of the requests of streams and batches: one for all deployments, as the table is."""
        return 1.0 if self.pair == _SMALL or not self.pair.is_inflated else _SHORT


_LARGE, _LARGER_DRAFT, _SMALL, _QWEN = PAIRS[:4]


# With a large target a stream of all requests takes 7 to 11 s, so that fewer are served.
_SHORT = 0.75

_ON_ONE = (
    Wanted(_LARGE, "1", 52.0, segments=2),
    Wanted(_SMALL, "1", 50.0, segments=2),
    Wanted(_QWEN, "1", 52.0, segments=2),
    Wanted(_LARGER_DRAFT, "1", 48.0, segments=1),
)
# Eight plans of every pair serve one stream and batches, and two or more replay a trace.
_ON_TWO = (
    Wanted(_LARGE, "2", 46.0, segments=2),
    Wanted(_LARGE, "1+1", 52.0, segments=1),
    Wanted(_SMALL, "2", 32.0, segments=2),
    Wanted(_SMALL, "1+1", 22.0, segments=1),
    Wanted(_QWEN, "2", 44.0, segments=1),
    Wanted(_QWEN, "1+1", 62.0, segments=1),
    Wanted(_LARGER_DRAFT, "2", 38.0, segments=1),
    Wanted(_LARGER_DRAFT, "1+1", 53.0, segments=1),
)
_ON_FOUR = tuple(Wanted(_LARGE, label, 20.0) for label in ("4", "2+2", "3+1"))
_REST = (
    *(Wanted(_LARGE, label, 15.0) for label in ("2+1", "3", "1+2", "1")),
    Wanted(_SMALL, "1", 10.0),
    *(Wanted(_LARGER_DRAFT, label, 20.0) for label in ("4", "3+1", "2+2")),
    *(Wanted(_QWEN, label, 20.0) for label in ("4", "3+1", "2+2")),
)
# By GPUs of the machine, the most telling first; --dry-run says about how long each takes.
SCHEDULES = {1: _ON_ONE, 2: _ON_TWO, 4: (*_ON_TWO[:2], *_ON_FOUR, *_ON_TWO[2:], *_REST)}
BLIND = "blind"  # folder of the fits that runs are predicted from, below their pair's
SESSIONS = "sessions.jsonl"  # a line for each, below its pair's folder
MOST_SHARE, LEAST_SHARE = 2.0, 0.5  # of the seconds wanted for runs
SLOWER = 1.25  # times a guess: what all but runs takes where the host is slow


@dataclass(frozen=True, slots=True)
class Session:
    """Everything that is measured on one start of a deployment's ranks.

    Attributes:
        pair: Which models.
        label: Of the deployment.
        units: Runs, in order.
        run_seconds: Most seconds for them.
        size: Of the grid that they are.
    """

    pair: Pair
    label: str
    units: tuple[Unit, ...]
    run_seconds: float = inf
    size: Size = FULL

    def left(self, folder: Path) -> list[Unit]:
        """Runs that are not there yet, below the pair's folder."""
        return [u for u in self.units if not (folder / "runs" / u.folder / "run.json").exists()]

    def lacks_visit(self, folder: Path) -> bool:
        """Whether a start measures its deployment before it serves, below the pair's folder.

        The first does, and one that is to serve the first run behind a profile of an earlier start.
        """
        if not is_profiled(folder, self.label):
            return True
        is_blind = (folder / BLIND / f"{self.label}.json").exists()
        return bool(self.left(folder)) and not is_blind and not self._is_spent(folder)

    def phases(self, folder: Path, share: float = 1.0) -> dict[str, float]:
        """About how long each part takes that is not there yet; empty if all is.

        Args:
            folder: The pair's.
            share: Of its seconds for runs, which they may have.
        """
        phases: dict[str, float] = {}
        if self.lacks_visit(folder):
            phases["profile"] = profile_seconds(self.pair, self.label)
        if "+" not in self.label and not is_profiled(folder, "acceptance"):
            phases["acceptance"] = recording_seconds(self.pair, self.label)
        if self.left(folder) and not self._is_spent(folder):
            guess = sum(unit_seconds(u, self.pair) for u in self.left(folder))
            phases["runs"] = min(guess, share * self.run_seconds)
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


def phase_file(folder: Path, label: str) -> Path:
    """What a session is at, below its pair's folder; gone once the session has noted its end."""
    return folder / f"{label}.phase.json"


def note_session(folder: Path, label: str, line: Mapping[str, Any]) -> None:
    """Add a session's line to its pair's folder; it is at nothing any more."""
    with (folder / SESSIONS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    phase_file(folder, label).unlink()


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
        sorted(eight_predictions.RESULTS.glob("engine_steps_*_h200.json"))
    )
    return eight_predictions.software_of(steps)


def _forward(name: str, gpus: int) -> Forward:
    return Forward(eight_predictions.model(name), this_device(), gpus, _software())


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


def prompt_seconds(pair: Pair, label: str, tokens: float) -> float:
    """Of a prompt of so many tokens, both models, where they take turns or not."""
    if not pair.is_inflated:
        return tokens * CPU_STEP / 50.0
    seconds = 0.0
    for name, gpus in zip((pair.target, pair.draft), _sides(label), strict=True):
        shape = eight_predictions.model(name).shape
        size = shape.hidden * shape.intermediate / (8192 * 28672) / gpus
        beyond = max(tokens - LONGEST, 0.0)
        layer = size * (PROMPT_LAYER + ROW_LAYER * min(tokens, LONGEST) + LONG_ROW_LAYER * beyond)
        seconds += shape.layers * (max(layer, HOST_LAYER) if beyond else layer)
    return seconds


def start_seconds(pair: Pair) -> float:
    """Until ranks are up and models are made."""
    if not pair.is_inflated:
        return CPU_START
    return START_FIXED + START_LAYER * eight_predictions.model(pair.target).shape.layers


def profile_seconds(pair: Pair, label: str) -> float:
    """Of one deployment's part of a profile."""
    fixed = SPLIT_PROFILE if "+" in label else PROFILE
    if not pair.is_inflated:
        return CPU_PROFILE
    return fixed + PROFILE_STEPS * step_seconds(pair, label)[0]


def recording_seconds(pair: Pair, label: str) -> float:
    """Of recording acceptance."""
    fewest, prompt_tokens = NUM_RECORDED
    step = step_seconds(pair, label)[0] / 8.0  # of a request among eight
    one = step * RECORDED_TOKENS + RANK
    one += prompt_seconds(pair, label, prompt_tokens / fewest)
    least = fewest * one + NUM_LONG * RECORDED_AT_ONCE * step * (LONG_ANSWER - RECORDED_TOKENS)
    return min(max(least, RECORDING + RECORDED_AT_ONCE * one), MOST_RECORDED * one)


def unit_seconds(work: Unit, pair: Pair) -> float:
    """About how long a run takes."""
    label = work.candidate.deployment.label
    target, draft = step_seconds(pair, label)
    load, spec = work.workload, work.candidate.speculation
    if load.seconds:
        return load.seconds + 1.5
    rounds = work.requests * load.output_tokens / min(load.batch, work.requests)
    seconds = target
    if spec.kind != "plain":
        drafting = draft * max(spec.expansions, spec.max_depth)
        rounds /= TOKENS_A_ROUND
        tiles = -(-spec.max_rows * min(load.batch, load.requests) // 8) if load.batch > 1 else 1
        seconds = target * max(1.0, 0.75 * tiles)
        seconds = max(seconds, drafting) if spec.is_async else seconds + drafting
    return rounds * seconds + work.requests * prompt_seconds(pair, label, SERVED_PROMPT)


def run_share(phases: Sequence[dict[str, float]], left: float) -> float:
    """What share of its seconds for runs each of these sessions may have, if all are to come.

    The last one may have what is left: it ends with the call.

    Args:
        phases: Of the sessions that are left, from ``Session.phases``.
        left: Seconds for all of them.
    """
    if len(phases) == 1:
        return MOST_SHARE
    wanted = sum(each.get("runs", 0.0) for each in phases)
    fixed = SLOWER * (sum(sum(each.values()) for each in phases) - wanted)
    return min(max((left - fixed) / wanted, LEAST_SHARE), MOST_SHARE) if wanted else 1.0


def by_calls(seconds: Sequence[float], call: float) -> list[int]:
    """The call, from 1, in which each session runs, none cut in two."""
    calls, number, used = [], 1, 0.0
    for needed in seconds:
        if used and used + needed > call:
            number, used = number + 1, 0.0
        used += needed
        calls.append(number)
    return calls
