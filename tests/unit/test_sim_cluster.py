"""Parts of the cluster: who slows whom, what a prefill hides, and same seed, same bytes."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import codesign
from codesign.acceptance import AcceptanceProfile
from codesign.candidate import Candidate
from codesign.config import Deployment, Serving
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.protocol import DraftSide
from codesign.policy.speculation import build_speculation, parse_policy
from codesign.records import RunRecords
from codesign.sim import simulate
from codesign.sim.acceptance import SyntheticDrafter
from codesign.sim.played import BULK_ROWS, PlayedBatch
from codesign.sim.timing import ApartTiming, TogetherTiming, draft_seconds, slowed
from codesign.sim.work import Entering, Work

POLICIES = ("plain", "chain-3", "threshold-4@0.5", "tree-6x3x2", "async-tree-6x3x2", "specserve-4")


def make_cost(**changes: Any) -> RoundCost:
    steps = {
        "target": StepTime.linear(alpha=1e-6, gamma=1e-3, delta=0.02),
        "draft": StepTime.linear(alpha=1e-7, gamma=1e-4, delta=0.002),
        "prefill": StepTime.linear(alpha=0.0, gamma=1e-3, delta=0.01),
        "draft_prefill": StepTime.linear(alpha=0.0, gamma=1e-4, delta=0.001),
    }
    rest = {"reroot": 1e-4, "link": 2e-4, "slowdown": 0.2}
    return RoundCost(**{**steps, **rest, **changes})


def make_fit() -> Any:
    profile = AcceptanceProfile.independent([0.55, 0.15, 0.1, 0.05], num_tokens=2_000, seed=4)
    costs = {"2": make_cost(link=0.0, slowdown=0.0), "1+1": make_cost()}
    return SimpleNamespace(
        costs=costs, calibration=Calibration(0.9, 0.1), acceptance=profile, answers=profile
    )


def make_trace(num: int = 12) -> pd.DataFrame:
    rng = np.random.default_rng(6)
    return pd.DataFrame(
        {
            "arrival": np.cumsum(rng.exponential(0.3, num)),
            "prompt_tokens": rng.integers(1, 60, num),
            "output_tokens": rng.integers(1, 40, num),
            "category": rng.choice(["chat", "code", ""], num),
        }
    )


def run(policy: str, *, seed: int = 1, max_batch: int = 3) -> RunRecords:
    spec = parse_policy(policy)
    deployment = Deployment(1, 1) if spec.is_async else Deployment(2)
    candidate = Candidate(deployment, spec, max_batch)
    return simulate(
        make_trace(), candidate, make_fit(), serving=Serving(max_kv_tokens=400), seed=seed
    )


def table_bytes(records: RunRecords) -> bytes:
    buffer = io.BytesIO()
    for table in (records.request_table(), records.round_table()):
        buffer.write(table.to_csv(float_format="%.17g").encode())
        table.to_parquet(buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("policy", POLICIES)
def test_same_seed_same_bytes(policy):
    assert table_bytes(run(policy)) == table_bytes(run(policy))


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_another_seed_gives_another_run(policy):
    assert table_bytes(run(policy, seed=1)) != table_bytes(run(policy, seed=2))


def test_the_seed_of_the_process_does_not_matter():
    script = (
        "import sys, runpy, hashlib; import numpy; numpy.random.seed(int(sys.argv[2]));"
        "tests = runpy.run_path(sys.argv[1]);"
        "data = b''.join(tests['table_bytes'](tests['run'](p)) for p in tests['POLICIES']);"
        "print(hashlib.sha256(data).hexdigest())"
    )
    home = str(Path(codesign.__file__).parents[1])
    found = [
        subprocess.run(
            [sys.executable, "-c", script, __file__, seed],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": home},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1]


def test_two_policies_see_the_same_true_path():
    # One request at a time: the rounds say at which output positions the first draft token was
    # right (a round emits two tokens or more) and at which it was wrong.
    def first_guesses(policy: str) -> dict[tuple[int, int], bool]:
        spec = parse_policy(policy)
        trace = pd.DataFrame({"arrival": [0.0] * 12, "prompt_tokens": 9, "output_tokens": 60})
        candidate = Candidate(Deployment(2), spec, 1)
        records = simulate(
            trace, candidate, make_fit(), serving=Serving(max_kv_tokens=10**6), seed=8
        )
        guesses, request, position = {}, 0, 1
        for r in records.rounds:
            guesses[request, position] = r.num_emitted_tokens > 1
            position += r.num_emitted_tokens
            if position == 60:
                request, position = request + 1, 1
        return guesses

    short, long = first_guesses("chain-1"), first_guesses("chain-3")
    common = [key for key in sorted(short.keys() & long.keys()) if key[1] < 55]
    assert len(common) > 100
    assert [short[p] for p in common] == [long[p] for p in common]
    assert len({short[p] for p in common}) == 2


@pytest.mark.parametrize("policy", ["chain-3", "threshold-4@0.5"])
def test_who_shares_the_batch_does_not_change_what_a_request_accepts(policy):
    alone, together = run(policy, max_batch=1), run(policy, max_batch=6)
    assert max(r.batch for r in together.rounds) > 1
    for a, b in zip(alone.requests, together.requests, strict=True):
        assert (a.num_rounds, a.num_accepted_tokens) == (b.num_rounds, b.num_accepted_tokens)


@pytest.mark.parametrize("slowdown", [0.0, 0.3, 0.9, 1.5])
@pytest.mark.parametrize("beside", [0.0, 0.01, 0.02, 0.2])
def test_a_slowed_forward_loses_the_slowdown_for_each_second_that_both_run(slowdown, beside):
    alone = 0.02
    seconds = slowed(alone, beside, slowdown)
    assert seconds == pytest.approx(alone + slowdown * min(beside, seconds))


def apart_spans(cost: RoundCost, *, late: float, prefill: float) -> tuple[float, ...]:
    """Spans before the target's, of a round with one forward of 20 s and a busy draft."""
    timing = ApartTiming(cost)
    busy = Work(1, 1, 0, overlapped=[(1, 0)])
    timing.spans(-100.0, 0.0, busy)
    timing._draft_free = late
    spans = timing.spans(0.0, prefill, Work(1, 1, 0, drafting=[(1, 0)]))
    return spans.link_there, spans.reroot, spans.draft, spans.link_back


EXCHANGE = make_cost(
    link=1.0, reroot=3.0, draft=StepTime.linear(alpha=0.0, gamma=0.0, delta=20.0), slowdown=0.0
)


def test_without_a_prefill_the_whole_exchange_is_exposed():
    assert apart_spans(EXCHANGE, late=0.0, prefill=0.0) == pytest.approx((1, 3, 20, 1))
    # A draft that is busy for 5 s more hears nothing before, and then takes as long to hear it.
    assert apart_spans(EXCHANGE, late=5.0, prefill=0.0) == pytest.approx((1, 3, 25, 1))


@pytest.mark.parametrize(
    ("prefill", "expected"),
    [
        (99.0, (0.0, 0.0, 0.0, 0.0)),
        (24.5, (0.0, 0.0, 0.0, 0.5)),
        (14.0, (0.0, 0.0, 10.0, 1.0)),
        (2.0, (0.0, 2.0, 20.0, 1.0)),
        (0.5, (0.5, 3.0, 20.0, 1.0)),
    ],
)
def test_a_prefill_hides_what_came_first(prefill, expected):
    assert apart_spans(EXCHANGE, late=0.0, prefill=prefill) == pytest.approx(expected)


def played(policy: str) -> PlayedBatch:
    side = DraftSide(build_speculation(parse_policy(policy)))
    drafter = SyntheticDrafter(make_fit().acceptance, 1, lambda i, length, _: list(range(length)))
    return PlayedBatch(side, drafter, round_rows=4)


def test_a_finished_or_evicted_request_leaves_nothing_behind_on_the_draft_side():
    batch = played("chain-3")
    batch.begin([Entering(n, "", 2, 5 + 30 * n) for n in range(3)], 0.0)
    finished = batch.end()[1]
    assert batch.drop(1) >= 2
    while 0 not in finished:
        batch.begin([], 0.0)
        finished += batch.end()[1]
    batch.begin([], 0.0)
    assert batch._side.request_ids == (2,)
    assert set(batch._drafter._requests) == {2}
    assert set(batch._requests) == {2}


def test_kv_rows_of_a_played_batch_are_those_of_its_requests():
    batch = played("chain-3")
    batch.begin([Entering(0, "", 20, 30), Entering(1, "", 5, 30, shared_tokens=3)], 0.0)
    emitted, _ = batch.end()
    assert batch.kv_tokens == 25 - 3 + emitted + 2 * 4
    batch.drop(0)
    assert batch.kv_tokens == 5 - 3 + batch._tallies[1].num_accepted_tokens + 1 + 4


def test_prompts_in_a_draft_forward_are_priced_as_a_prefill():
    cost = make_cost()
    work = Work(2, 8, 0, drafting=[(3, 50), (0, 0)], prompts=[(30, 7)])
    assert draft_seconds(cost, work) == (cost.draft(3, 50) + cost.draft_prefill(30, 7), 0.0)
    beside = Work(2, 8, 0, [(3, 50)], [(4, 9), (0, 0)], [(30, 7)], is_prompt_overlapped=True)
    assert draft_seconds(cost, beside) == (
        cost.draft(3, 50), cost.draft(4, 9) + cost.draft_prefill(30, 7)
    )  # fmt: skip

    def first_work(prompt_tokens: int) -> Work:
        return played("chain-1").begin([Entering(0, "", prompt_tokens, 9)], 0.0)

    caught_up, prompt = first_work(BULK_ROWS - 1), first_work(BULK_ROWS)
    assert (caught_up.drafting, caught_up.prompts) == ([(BULK_ROWS, 0)], [])
    assert (prompt.drafting, prompt.prompts) == ([(0, 0)], [(BULK_ROWS + 1, 0)])


def test_prompts_that_run_apart_share_the_forward_of_their_roots():
    prompt = StepTime.linear(alpha=0.0, gamma=1e-4, delta=0.005)
    cost = make_cost(draft_prefill=dataclasses.replace(prompt, apart=True))
    alone = cost.draft_prefill(30, 7) - cost.draft(1, 29)  # a profile times it with its root
    work = Work(2, 8, 0, drafting=[(3, 50), (3, 60)], prompts=[(30, 7)])
    before, _ = draft_seconds(cost, work)
    assert before == pytest.approx(alone + cost.draft(4, 86, 2) + cost.draft(3, 60, 2))
    first = Work(1, 2, 0, drafting=[(0, 0)], prompts=[(30, 7)])
    assert draft_seconds(cost, first)[0] == pytest.approx(alone + cost.draft(1, 36))
    beside = Work(2, 8, 0, [], [(0, 0)], [(30, 0), (20, 0)], is_prompt_overlapped=True)
    alone = [cost.draft_prefill(rows) - cost.draft(1, rows - 1) for rows in (30, 20)]
    assert draft_seconds(cost, beside)[1] == pytest.approx(sum(alone) + cost.draft(2, 48, 2))
    cached = Work(1, 2, 0, drafting=[(0, 0)], prompts=[(1, 64)])  # nothing to run but the root
    assert draft_seconds(cost, cached)[0] == pytest.approx(cost.draft(1, 64))
    chunk = TogetherTiming(cost, is_plain=False).run_prompts(0.0, [(30, 0)])
    assert chunk == pytest.approx(cost.draft_prefill(30) - cost.draft(1, 29))


def test_a_request_whose_arrival_the_clock_rounds_down_is_served():
    arrivals = [2.2988072518532445, 2.0**-52]  # the clock's sum of the gap is one digit short
    trace = pd.DataFrame({"arrival": arrivals, "prompt_tokens": 1, "output_tokens": 1})
    records = simulate(
        trace, Candidate(Deployment(2), parse_policy("plain"), 1), make_fit(),
        serving=Serving(max_kv_tokens=400), seed=1,
    )  # fmt: skip
    assert all(r.finish > r.arrival for r in records.requests)
