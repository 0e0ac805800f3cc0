"""One way to serve one trace: a coarse answer at once, then one from the whole trace."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from codesign import Progress
from codesign.candidate import Candidate, Interval, ScoredCandidate
from codesign.config import SLO, Deployment, Serving, parse_deployment
from codesign.dashboard.choices import (
    Machine,
    Traffic,
    file_time,
    load_machine,
    load_traffic,
    splits,
    traces_here,
)
from codesign.dashboard.kept import Kept
from codesign.dashboard.policies import first_label
from codesign.dashboard.records_frames import Frames, frames_of
from codesign.fit.extrapolated import across_hosts, origin_text
from codesign.fit.what_if import measured_note
from codesign.planner.defaults import all_workers, bounded, expecting
from codesign.planner.halving import typical_stretch
from codesign.planner.predict import prompt_note, score, simulate_outcome
from codesign.planner.question import NUM_SEEDS
from codesign.planner.screen import screen
from codesign.planner.uncertainty import interval_over_seeds, time_error
from codesign.policy.speculation import drafting_of, parse_policy
from codesign.records import has_own_targets

if TYPE_CHECKING:
    import pandas as pd

    from codesign.fit import Fit
    from codesign.planner.predict import Outcome
    from codesign.records import RunRecords


FIRST_FAMILY, FIRST_BATCH, FIRST_SLO = "tree", 64, SLO(ttft=1.0, tpot=0.05)
COARSE, COARSE_PLAYED = 300, 60  # requests; of policies whose every round is played
MOST = 20_000  # requests of the refined answer
_KEPT = 64  # answers
_TELL_EVERY = 0.15  # seconds


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked: everything that the answer depends on."""

    traffic: Traffic
    machine: Machine
    policy: str
    split: str
    max_batch: int
    slo: SLO
    serving: Serving

    @property
    def candidate(self) -> Candidate:
        """The way to serve.

        Raises:
            InputError: If policy and split do not fit each other.
        """
        deployment = parse_deployment(self.split)
        return Candidate(deployment, parse_policy(self.policy), self.max_batch)


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """What is predicted.

    Attributes:
        scored: Figures with intervals.
        plain: The same of plain decoding on all workers; None where there is no such deployment,
            or the plan is just that.
        busy: Share of the run in which each group of workers computes: "target", "draft".
        load: Demand over capacity, by the planner's arithmetic alone.
        frames: Tables for charts.
        num_requests: Simulated.
        num_in_trace: Of the trace.
        times_origin: Where the step times come from, in words.
        acceptance_origin: Where the acceptance comes from.
        has_own: Requests have TPOT targets of their own.
        remarks: What must be known of the step times.
        notes: What was done to the trace.
    """

    scored: ScoredCandidate
    plain: ScoredCandidate | None
    busy: dict[str, Interval]
    load: Interval
    frames: Frames
    num_requests: int
    num_in_trace: int
    times_origin: str
    acceptance_origin: str
    has_own: bool
    remarks: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the whole trace was simulated."""
        return self.num_requests == self.num_in_trace


_answers: Kept[Prediction] = Kept(_KEPT)
_plains: Kept[ScoredCandidate] = Kept(_KEPT)  # the same for every policy and split
_coarse = Lock()


def first_question() -> Asked:
    """What the page asks before anything is chosen."""
    machine, policy = Machine(), first_label(FIRST_FAMILY)
    split = splits(machine, policy)[0]
    traffic, serving = Traffic(traces_here()[0]), Serving(preemption=True)
    return Asked(traffic, machine, policy, split, FIRST_BATCH, FIRST_SLO, serving)


def known(asked: Asked, *, is_coarse: bool) -> Prediction | None:
    """The answer, if this question has been answered before."""
    return _answers.get(_key(asked, is_coarse))


def predict(asked: Asked, *, is_coarse: bool, progress: Progress | None = None) -> Prediction:
    """Simulate with several seeds.

    Args:
        asked: The question.
        is_coarse: A stretch of a few hundred requests whose rate is nearest the trace's own;
            otherwise the trace, or as long a stretch of it as ``MOST``.
        progress: Called with (stage, done, total); an exception out of it ends the simulation.

    Raises:
        InputError: If something chosen does not exist, or a request can never run.
    """
    key = _key(asked, is_coarse)
    if not is_coarse:
        return _answers.get(key) or _answers.put(key, _predict(asked, is_coarse, progress))
    with _coarse:  # a visitor may come while the first answer is made: make it once
        return _answers.get(key) or _answers.put(key, _predict(asked, is_coarse, progress))


def _predict(asked: Asked, is_coarse: bool, progress: Progress | None) -> Prediction:
    candidate, fit = asked.candidate, load_machine(asked.machine)
    trace = load_traffic(asked.traffic)
    serving = expecting(bounded(asked.serving, fit), trace.requests)
    requests = _stretch(trace.requests, _size(candidate, is_coarse=is_coarse))
    lengths = requests["output_tokens"]
    other = _plain_candidate(fit, candidate)
    plain_key = other, len(requests), _key(replace(asked, policy="", split=""), is_coarse)
    plain = None if other is None else _plains.get(plain_key)
    num_seeds = _num_seeds(candidate)
    is_new = other is not None and plain is None
    report = _Steps(progress, len(requests) * (num_seeds + is_new))

    def simulated(served: Candidate, seed: int) -> tuple[Outcome, RunRecords]:
        tell = report.of_one(len(requests))
        return simulate_outcome(
            requests, served, fit, slo=asked.slo, serving=serving, seed=seed, progress=tell
        )

    outcomes, frames = [], []
    cost = fit.costs[candidate.deployment.unit.label]
    cost = cost.drafting(drafting_of(candidate.speculation))
    for seed in range(num_seeds):
        outcome, records = simulated(candidate, seed)
        outcomes.append(outcome)
        frames.append(frames_of(records, candidate.deployment, cost))
    if other is not None and plain is None:
        of_plain = score(other, [simulated(other, 0)[0]], fit, asked.slo, output_tokens=lengths)
        plain = _plains.put(plain_key, of_plain)
    scored = score(candidate, outcomes, fit, asked.slo, output_tokens=lengths)
    error = time_error(fit, candidate, scored.spans, lengths)
    screened = screen([candidate], requests, fit, slo=asked.slo, serving=serving)
    load = float(screened.load[0])
    return Prediction(
        scored=scored,
        plain=plain,
        busy=_busy([each.busy for each in frames], error),
        load=Interval(load, load / (1.0 + error), load * (1.0 + error)),
        frames=Frames.over_seeds(frames, error),
        num_requests=len(requests),
        num_in_trace=len(trace),
        times_origin=origin_text(fit, scored.origin),
        acceptance_origin=fit.acceptance_origin,
        has_own=has_own_targets(trace.requests),
        remarks=_remarks(asked.machine, fit, candidate, requests),
        notes=trace.notes,
    )


def _remarks(
    machine: Machine, fit: Fit, candidate: Candidate, requests: pd.DataFrame
) -> tuple[str, ...]:
    found = (
        "" if machine.fit else measured_note(fit, machine.device),
        across_hosts(fit, candidate.deployment),
        prompt_note(fit, requests),
    )
    return tuple(filter(None, found))


def _key(asked: Asked, is_coarse: bool) -> object:
    """Files that were written anew are other questions."""
    return asked, is_coarse, file_time(asked.traffic.source), file_time(asked.machine.fit)


class _Steps:
    """Adds up the progress of several simulations, and tells it some times a second."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total = progress, total
        self._before, self._told = 0, 0.0

    def of_one(self, size: int) -> Progress | None:
        """Progress of the next simulation."""
        tell = self._progress
        if tell is None:
            return None
        before, self._before = self._before, self._before + size

        def add(stage: str, done: int, _: int) -> None:
            now = time.monotonic()
            if now - self._told >= _TELL_EVERY:
                self._told = now
                tell(stage, before + done, self._total)

        return add


def _size(candidate: Candidate, *, is_coarse: bool) -> int:
    if not is_coarse:
        return MOST
    return COARSE_PLAYED if candidate.speculation.needs_step_times else COARSE


def _num_seeds(candidate: Candidate) -> int:
    """Plain decoding has no luck that could differ."""
    return NUM_SEEDS if candidate.speculation.has_draft else 1


def _stretch(requests: pd.DataFrame, size: int) -> pd.DataFrame:
    first, end = typical_stretch(np.asarray(requests["arrival"], np.float64), size)
    if end - first == len(requests):
        return requests
    part = requests.iloc[first:end].reset_index(drop=True)
    return part.assign(arrival=part["arrival"] - part["arrival"].iloc[0])


def _plain_candidate(fit: Fit, candidate: Candidate) -> Candidate | None:
    """Plain decoding on all workers as one group, if there is such a deployment and it is other."""
    whole = Deployment(all_workers(fit))
    plain = Candidate(whole, parse_policy("plain"), candidate.max_batch)
    return plain if whole.label in fit.costs and plain != candidate else None


def _busy(shares: list[dict[str, float]], error: float) -> dict[str, Interval]:
    found = {}
    for name in shares[0]:
        values = [each[name] for each in shares]
        found[name] = interval_over_seeds(values, error, bounds=(0.0, 1.0))
    return found
