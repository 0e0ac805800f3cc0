"""The engine's loop and ``simulate`` on the same requests, recordings and clock, step by step.

Only policies that decide for the whole batch: of the others a simulation plays tapes. The engine's
clock shows when the simulated steps began, had run their prompts and ended.
"""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pandas as pd
import pytest

import codesign.engine.serve as serve
from codesign.acceptance import AcceptanceProfile
from codesign.candidate import Candidate
from codesign.config import SLO, Deployment, Serving
from codesign.engine.draft_worker import DraftWorker
from codesign.engine.partner import LocalDraft, NoDraft
from codesign.engine.schedule import Schedule
from codesign.engine.serving_log import ServingLog
from codesign.engine.target import Target, nothing
from codesign.policy.batching import BatchLimits
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.on_time import on_time_of
from codesign.policy.options import RequestOptions
from codesign.policy.protocol import DraftSide, TargetSide
from codesign.policy.resting import Resting
from codesign.policy.speculation import parse_policy
from codesign.policy.turns import Turns, turn_prices
from codesign.prompts import BoundRequest
from codesign.records import RunRecords, own_targets
from codesign.sim import simulate
from codesign.sim.acceptance import PROMPT_TOKEN, TRUE_TOKEN, SyntheticDrafter
from codesign.sim.batches import policy_of
from codesign.sim.replica import Replica
from codesign.sim.stretches import Luck

CASES = (*range(42), 154)  # six of each label, and one in which a policy learned by an eviction
LABELS = (
    "turbospec-5", "specserve-4", "specserve-3-no-drafter", "batch-tree-6x2x3", "adaserve-3x2x9",
    "async-batch-tree-6x2x3", "amusd-4",
)  # fmt: skip
# Of three requests two at a time decode faster than all at once.
STAIRS = StepTime(alpha=1e-7, rows=(1, 2, 3, 4), seconds=(0.0099, 0.01, 0.018, 0.0181))
PROFILE = AcceptanceProfile.independent([0.55, 0.2, 0.1, 0.05], num_tokens=1500, seed=5)
OF_ROUND = (
    "batch", "running", "rows", "context", "num_draft_tokens", "num_accepted_tokens",
    "num_emitted_tokens", "prefill_tokens",
)  # fmt: skip
OF_REQUEST = (
    "output_tokens", "num_rounds", "num_draft_tokens", "num_accepted_tokens", "num_preemptions",
)  # fmt: skip
WHEN = ("admitted", "first_token", "finish")
Steps = list[tuple[float, float, float]]  # start, end of whole prompts, end


class RecordedDrafter:
    """The simulator's draft model, as an engine asks one; told of admissions as they are sent."""

    def __init__(self, outputs: list[int], drafter: SyntheticDrafter) -> None:
        self._outputs, self._drafter, self._known = outputs, drafter, set()
        self.admitted: dict[int, Any] = {}

    def forward(self, expansion, fanout):
        return [self._answer(rows) for rows in expansion]

    def _answer(self, rows):
        number = rows.request_id
        if number not in self._known:
            self._known.add(number)
            left = self.admitted[number].max_new_tokens
            self._drafter.admit(
                number, category="", prompt_tokens=len(self.admitted[number].tokens),
                output_tokens=left, emitted_before=self._outputs[number] - left,
            )  # fmt: skip
        return self._drafter.answer(rows)

    def run_prompts(self, prompts) -> None: ...

    def move(self, moves) -> None: ...

    def release(self, request_ids) -> None:
        self._known.difference_update(request_ids)


class TrueTarget(Target):
    """A target without a model: its token is always the true one."""

    def __init__(self, step: StepTime) -> None:
        self.side = TargetSide(turns=Turns(turn_prices(step)))

    def open_prompt(self, admission, blocks) -> int:
        return 0

    def run_pieces(self, pieces):
        last = [piece.admission for piece in pieces if piece.is_last]
        for admission in last:
            self.side.admit(admission)
        return [self.side.commit_first(admission.request_id, TRUE_TOKEN) for admission in last]

    def verify(self, candidates, meanwhile=nothing, goes_on=None):
        meanwhile()
        rows = self.side.verify_rows(candidates)
        return rows, [self.side.judge(r, lambda row: TRUE_TOKEN)[0] for r in rows]

    def free(self, request_id) -> None: ...


class Draft(LocalDraft):
    """A draft in this process; one apart makes its overlapped forwards before the next verdict."""

    def __init__(self, worker: DraftWorker, drafter: RecordedDrafter, *, is_async: bool) -> None:
        super().__init__(worker)
        self.is_async = is_async
        self._drafter = drafter
        self._is_due = False

    def send(self, verdict) -> None:
        if self._is_due:
            self.worker.overlap()
        self._drafter.admitted |= {a.request_id: a for a in verdict.admitted}
        super().send(verdict)

    def receive(self):
        self._is_due = self.is_async
        return super().receive()

    def run_prompts(self) -> None:
        if not self.is_async:
            super().run_prompts()

    def catch_up(self) -> None:
        if not self.is_async:
            super().catch_up()


class StepClock(serve.Server):
    """A server whose clock stands at the start, the end of prompts or the end of a known step."""

    def __init__(self, steps: Steps, *arguments) -> None:
        super().__init__(*arguments)
        self._steps = steps
        self._step, self._part = -1, 0
        self.between = self._schedule.chunk is None

    @property
    def now(self) -> float:
        return self._steps[self._step][self._part] if self._step >= 0 else 0.0

    def _round(self) -> None:
        self._step, self._part = self._step + 1, 0
        super()._round()

    def _run_pieces(self, this, pieces):
        self._part = 1 if self.between else 2
        return super()._run_pieces(this, pieces)

    def _verify(self, this, answer, goes_on):
        self._part = 2
        return super()._verify(this, answer, goes_on)


def step_time(chance: random.Random, seconds: float) -> StepTime:
    return StepTime.linear(alpha=1e-7, gamma=chance.choice([1e-5, 1e-4, 1e-3]), delta=seconds)


def case_of(chance: random.Random, label: str, target: StepTime | None = None):
    """Requests, candidate, fit, ways of sharing and SLO; by steps of the target, if given."""
    spec, chunk = parse_policy(label), chance.choice([None, None, 16])
    count, gap = chance.choice([2, 5, 12]), chance.choice([0.0, 0.02, 0.1])
    requests = pd.DataFrame(
        {
            "arrival": [i * gap * chance.random() for i in range(count)],
            # Whole chunks: the engine cuts prompts at multiples of them, the simulator anywhere.
            "prompt_tokens": [chance.choice([1, 7, 33, 90]) * (chunk or 1) for _ in range(count)],
            "output_tokens": [chance.choice([1, 2, 9, 40]) for _ in range(count)],
            "speculates": [chance.random() < 0.85 for _ in range(count)],
        }
    )
    own = [chance.choice([None, None, 1e-3, 0.02, 10.0]) for _ in range(count)]
    requests["slo_tpot"] = pd.Series(own, dtype=float)
    draft = 0.01 * 10 ** chance.uniform(-2, 0.2)
    cost = RoundCost(
        *(step_time(chance, seconds) for seconds in (0.01, draft, 0.01, draft)),
        link=chance.choice([0.0, 2e-4]), deciding=chance.choice([0.0, 1e-5]),
    )  # fmt: skip
    if target is not None:  # as measured fits are: prompts have a forward of their own
        cost = replace(cost, target=target, shares_forwards=False)
    fit: Any = SimpleNamespace(
        costs={"1": cost, "1+1": cost},
        calibration=Calibration(0.9, 0.1),
        acceptance=PROFILE,
        answers=PROFILE,
    )
    longest = int((requests["prompt_tokens"] + requests["output_tokens"]).max()) + spec.kv_rows
    serving = Serving(
        max_kv_tokens=longest + chance.choice([0, 30, 100]),
        prefill_chunk=chunk,
        preemption=chunk is None and chance.random() < 0.7,
        answer_tokens=chance.choice([None, 3.0, 40.0]),
    )
    candidate = Candidate(Deployment(1, int(spec.is_async)), spec, chance.choice([1, 2, 4]))
    slo = SLO(tpot=chance.choice([None, 0.02]))
    # With chunks a step ends at one time here, tokens and prompts alike, which pace is not told by.
    if chunk is None and chance.random() < 0.5:
        serving = replace(serving, scheduling="slo")
        slo = replace(slo, ttft=chance.choice([0.02, 0.1, 0.5]))
    return requests, candidate, fit, serving, slo


def simulated(requests, candidate, fit, serving, slo) -> tuple[RunRecords, Steps]:
    """The records and when each step was."""
    steps: Steps = []
    step = Replica._step

    def noted(replica) -> float:
        start, seconds = replica._now, step(replica)
        end, made = start + seconds, replica._step_now
        told = end if made is None else start + (0.0 if serving.prefill_chunk else made.prefill)
        steps.append((start, told, end))
        return seconds

    with mock.patch.object(Replica, "_step", noted):
        return simulate(requests, candidate, fit, serving=serving, slo=slo, seed=3), steps


def served(requests, candidate, fit, serving, slo, steps: Steps) -> RunRecords:
    """The engine's records of the same requests at the same times."""
    bound = [
        BoundRequest(
            row.Index, row.arrival, "", (PROMPT_TOKEN,) * row.prompt_tokens, row.output_tokens,
            own, RequestOptions(speculates=row.speculates),
        )
        for row, own in zip(requests.itertuples(), own_targets(requests), strict=True)
    ]  # fmt: skip
    spec, outputs = candidate.speculation, requests["output_tokens"].tolist()
    cost = fit.costs[candidate.deployment.label]
    partner = NoDraft()
    if spec.has_draft:
        policy = policy_of(spec, fit, cost, slo, serving)
        policy = policy_of(spec, fit, cost.drafting(policy.drafting), slo, serving)
        luck = Luck.of(PROFILE, [""] * len(bound), outputs, 3)
        drafter = RecordedDrafter(outputs, SyntheticDrafter(PROFILE, 3, luck.path))
        partner = Draft(DraftWorker(policy, drafter), drafter, is_async=spec.is_async)
    limits = BatchLimits(candidate.max_batch, serving.max_kv_tokens)
    schedule = Schedule(
        bound, limits, serving, round_rows=spec.kv_rows, on_time=on_time_of(serving, slo, cost)
    )
    server = StepClock(steps, TrueTarget(cost.target), partner, schedule, bound)
    with (
        mock.patch.object(ServingLog, "now", property(lambda log: server.now)),
        mock.patch.object(serve, "sleep"),
    ):
        return server.run()


@pytest.mark.parametrize("seed", CASES)
def test_engine_and_simulator_serve_alike(monkeypatch, seed):
    told = []
    receive = DraftSide.receive

    def noted(side, verdict, **how):
        # Verdicts that bring a draft nothing but prompts are the engine's alone.
        admitted = tuple(admission.request_id for admission in verdict.admitted)
        told.append((round(verdict.now, 9), verdict.sharing, verdict.beside, admitted))
        return receive(side, verdict, **how)

    monkeypatch.setattr(DraftSide, "receive", noted)
    monkeypatch.setattr(Resting, "looked", lambda policy, seconds: None)  # no look is timed here
    case = case_of(random.Random(seed), LABELS[seed % len(LABELS)])
    ours, steps = simulated(*case)
    by_simulator = told[:]
    told.clear()
    theirs = served(*case, steps)
    assert not set(by_simulator) - set(told)
    assert_alike(ours, theirs)


@pytest.mark.parametrize("label", ["plain", *LABELS])
def test_engine_and_simulator_take_turns_alike(monkeypatch, label):
    monkeypatch.setattr(Resting, "looked", lambda policy, seconds: None)
    sat_out = 0
    for seed in range(6):
        case = case_of(random.Random(seed), label, STAIRS)
        case = (case[0], replace(case[1], max_batch=4), *case[2:])
        ours, steps = simulated(*case)
        assert_alike(ours, served(*case, steps))
        sat_out += sum(each.running - each.batch for each in ours.rounds)
    assert sat_out or label not in ("plain", "batch-tree-6x2x3")


def assert_alike(ours: RunRecords, theirs: RunRecords) -> None:
    for a, b in zip(ours.rounds, theirs.rounds, strict=True):
        assert [getattr(a, name) for name in OF_ROUND] == [getattr(b, name) for name in OF_ROUND]
    for a, b in zip(ours.requests, theirs.requests, strict=True):
        names = OF_REQUEST
        assert [getattr(a, name) for name in names] == [getattr(b, name) for name in names]
        assert [getattr(a, name) for name in WHEN] == pytest.approx([getattr(b, n) for n in WHEN])
