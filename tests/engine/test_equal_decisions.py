"""Engine and simulator take the same decisions on the same recordings, whatever the policy.

Both play every request on the same recorded confidences. All that a draft model runs and all that a
target verifies must be equal, in order.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from time import perf_counter
from typing import Any

import pytest

from codesign.acceptance import AcceptanceProfile
from codesign.config import Serving
from codesign.engine.draft_worker import DraftWorker
from codesign.engine.partner import Answer, LocalDraft
from codesign.engine.schedule import Schedule
from codesign.engine.serve import Server
from codesign.engine.serving_log import ServingLog
from codesign.engine.target import Target, nothing
from codesign.policy.batching import BatchLimits
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.options import RequestOptions
from codesign.policy.protocol import DraftSide, TargetSide
from codesign.policy.resting import Resting
from codesign.policy.speculation import FAMILIES, Goodput, build_speculation, parse_policy
from codesign.prompts import BoundRequest
from codesign.sim.acceptance import PROMPT_TOKEN, TRUE_TOKEN, SyntheticDrafter
from codesign.sim.played import PlayedBatch
from codesign.sim.stretches import Luck
from codesign.sim.work import Entering

PROFILE = AcceptanceProfile.independent([0.55, 0.2, 0.1, 0.05], num_tokens=2_000, seed=5)
COST = RoundCost(
    target=StepTime.linear(alpha=1e-7, gamma=1e-4, delta=0.01),
    draft=StepTime.linear(alpha=1e-7, gamma=1e-5, delta=0.001),
    prefill=StepTime.linear(alpha=1e-7, gamma=1e-4, delta=0.01),
    draft_prefill=StepTime.linear(alpha=1e-7, gamma=1e-5, delta=0.001),
    deciding=1e-5,
)
SIZES = (  # of prompt and output
    (20, 90),
    (5, 2),
    (300, 40),
    (30, 60),
    (9, 1),
    (7, 25),
    (64, 120),
    (12, 33),
)
MAX_BATCH = 3
LABELS = [family.example for family in FAMILIES if family.spec.runs_in_engine]


class RecordedDrafter:
    """The simulator's draft model, as an engine asks one."""

    def __init__(self, requests: list[BoundRequest], drafter: SyntheticDrafter) -> None:
        self._sizes = {r.request_id: (len(r.prompt_ids), r.max_new_tokens) for r in requests}
        self._drafter = drafter
        self._known: set[int] = set()

    def forward(self, expansion, fanout):
        return [self._answer(rows) for rows in expansion]

    def _answer(self, rows):
        if rows.request_id not in self._known:
            prompt, output = self._sizes[rows.request_id]
            self._known.add(rows.request_id)
            self._drafter.admit(
                rows.request_id, category="", prompt_tokens=prompt, output_tokens=output
            )
        return self._drafter.answer(rows)

    def run_prompts(self, prompts) -> None: ...

    def move(self, moves) -> None: ...

    def release(self, request_ids) -> None: ...


class TrueTarget(Target):
    """A target without a model: its token is always the true one."""

    def __init__(self) -> None:
        self.side = TargetSide()

    def open_prompt(self, admission, blocks) -> int:
        return 0

    def run_pieces(self, pieces):
        for piece in pieces:
            self.side.admit(piece.admission)
        return [self.side.commit_first(piece.request_id, TRUE_TOKEN) for piece in pieces]

    def verify(self, candidates, meanwhile=nothing, goes_on=None):
        meanwhile()
        rows = self.side.verify_rows(candidates)
        return rows, [self.side.judge(r, lambda row: TRUE_TOKEN)[0] for r in rows]

    def free(self, request_id) -> None: ...


class DraftBeside(LocalDraft):
    """An asynchronous draft that takes its turn in this process."""

    is_async = True
    _is_due = False

    def send(self, verdict) -> None:
        if self._is_due:
            self.worker.overlap()
        super().send(verdict)

    def receive(self) -> Answer:
        self._is_due = True
        candidates, times = self.worker.answer(self._verdict)
        return Answer(candidates, self._sent, times, perf_counter())

    def run_prompts(self) -> None: ...

    def catch_up(self) -> None: ...

    def close(self) -> None:
        if self._is_due:
            self.worker.overlap()


@pytest.fixture
def decided(monkeypatch) -> list[Any]:
    """What draft sides are told and decide, in order, without the numbers of rounds."""
    found: list[Any] = []
    begin, expanded, candidates = DraftSide.begin, DraftSide.expanded, DraftSide.candidates

    def noted_begin(side) -> bool:
        policy, is_looked_at = side.policy, begin(side)
        found.append((is_looked_at, policy.beside, policy.sharing, policy.now, side.request_ids))
        return is_looked_at

    def noted(side, rows, tokens, log_probs) -> None:
        found.append(rows)
        expanded(side, rows, tokens, log_probs)

    def noted_candidates(side, number):
        sent = candidates(side, number)
        found.append(sent.requests)
        return sent

    monkeypatch.setattr(DraftSide, "begin", noted_begin)
    monkeypatch.setattr(DraftSide, "expanded", noted)
    monkeypatch.setattr(DraftSide, "candidates", noted_candidates)
    # Nobody times looks in a simulation.
    monkeypatch.setattr(Resting, "looked", lambda policy, seconds: None)
    return found


def policy_of(label: str):
    goodput = Goodput.of_cost(COST, slo_tpot=0.02)
    return build_speculation(
        parse_policy(label), goodput=goodput, calibration=Calibration(0.9, 0.1)
    )


def drafter_of() -> SyntheticDrafter:
    luck = Luck.of(PROFILE, [""] * len(SIZES), [output for _, output in SIZES], 7)
    return SyntheticDrafter(PROFILE, 7, luck.path)


def in_the_engine(label: str, requests: list[BoundRequest], monkeypatch) -> list[float]:
    """Serve the requests; when verdicts were sent."""
    spec, times = parse_policy(label), []
    clock = itertools.count()
    monkeypatch.setattr(ServingLog, "now", property(lambda log: next(clock) * 1e-3))
    worker = DraftWorker(policy_of(label), RecordedDrafter(requests, drafter_of()))
    partner = (DraftBeside if spec.is_async else LocalDraft)(worker)
    send = partner.send
    monkeypatch.setattr(partner, "send", lambda verdict: (times.append(verdict.now), send(verdict)))
    schedule = Schedule(
        requests, BatchLimits(MAX_BATCH, 1 << 16), Serving(), round_rows=spec.kv_rows
    )
    outputs = Server(TrueTarget(), partner, schedule, requests)
    outputs.run()
    assert [len(tokens) for tokens in outputs.outputs.values()] == [n for _, n in SIZES]
    return times


def in_the_simulator(label: str, requests: list[BoundRequest], times: list[float]) -> None:
    """Play the same requests; verdicts are sent at the same times."""
    spec = parse_policy(label)
    batch = PlayedBatch(
        DraftSide(policy_of(label)), drafter_of(), round_rows=spec.kv_rows,
        hears_early=spec.is_async,
    )  # fmt: skip
    waiting = [
        Entering(r.request_id, "", len(r.prompt_ids), r.max_new_tokens,
                 speculates=r.options.speculates)
        for r in requests
    ]  # fmt: skip
    for now in times:
        room = MAX_BATCH - batch.num_requests
        batch.begin([one for one in waiting[:room] if one.output_tokens > 1], now)
        waiting = waiting[room:]
        batch.end()
    assert not waiting
    assert not batch.num_requests


@pytest.mark.parametrize("opt_out", [(), (1, 3, 4)], ids=["all drafted for", "some opt out"])
@pytest.mark.parametrize("label", LABELS)
def test_engine_and_simulator_decide_alike(decided, monkeypatch, label, opt_out):
    requests = [
        BoundRequest(i, 0.0, "", (PROMPT_TOKEN,) * prompt, output)
        for i, (prompt, output) in enumerate(SIZES)
    ]
    for i in opt_out:
        requests[i] = replace(requests[i], options=RequestOptions(speculates=False))
    times = in_the_engine(label, requests, monkeypatch)
    measured = decided[:]
    decided.clear()
    in_the_simulator(label, requests, times)
    assert len(measured) > 20 or label == "plain"
    for number, (ours, simulated) in enumerate(zip(measured, decided, strict=False)):
        assert ours == simulated, f"decision {number}"
    assert len(measured) == len(decided)
