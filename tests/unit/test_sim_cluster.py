"""Parts of the cluster: who slows whom, what a prefill hides, and same seed, same bytes."""

from __future__ import annotations

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
from codesign.config import Deployment, Serving
from codesign.plan import Candidate
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.protocol import (
    Admission,
    Candidates,
    DraftSide,
    ExpansionRows,
    RequestVerdict,
    Verdict,
)
from codesign.policy.speculation import build_speculation, parse_policy
from codesign.records import RequestRecord, RunRecords
from codesign.sim import simulate
from codesign.sim.acceptance import SyntheticDrafter
from codesign.sim.cluster import DraftAnswer, exposed_wait, slowed
from codesign.sim.drafting import (
    BULK_ROWS,
    DraftWorkers,
    Forwards,
    SimulatedRequest,
    draft_seconds,
)

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
    return SimpleNamespace(costs=costs, calibration=Calibration(0.9, 0.1), acceptance=profile)


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
    def first_guesses(policy: str) -> dict[int, bool]:
        spec = parse_policy(policy)
        trace = pd.DataFrame({"arrival": [0.0], "prompt_tokens": 9, "output_tokens": 500})
        candidate = Candidate(Deployment(2), spec, 1)
        records = simulate(
            trace, candidate, make_fit(), serving=Serving(max_kv_tokens=10**6), seed=8
        )
        guesses, position = {}, 1
        for r in records.rounds:
            guesses[position] = r.num_emitted_tokens > 1
            position += r.num_emitted_tokens
        return guesses

    short, long = first_guesses("chain-1"), first_guesses("chain-3")
    common = (short.keys() & long.keys()) - {max(short), max(long)}  # the limit cuts the last
    assert len(common) > 100
    assert [short[p] for p in sorted(common)] == [long[p] for p in sorted(common)]
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


def answer(**changes: Any) -> DraftAnswer:
    values = {"late": 0.5, "link_there": 0.1, "drafting": Forwards(1, 4, 2.0)}
    rest = {"sent": 0.0, "grown": Forwards(), "overlapped": 0.0}
    return DraftAnswer(Candidates(0), **{**values, **rest, **changes})


def test_without_a_prefill_the_whole_exchange_is_exposed():
    wait = exposed_wait(answer(), make_cost(link=0.1, reroot=0.3), 0.5 + 0.1 + 0.3 + 2.0 + 0.1)
    assert (wait.link_there, wait.reroot, wait.link_back) == pytest.approx((0.1, 0.3, 0.1))
    assert wait.draft == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("waited", "expected"),
    [
        (0.0, (0.0, 0.0, 0.0, 0.0)),
        (0.05, (0.0, 0.0, 0.0, 0.05)),
        (1.1, (0.0, 0.0, 1.0, 0.1)),
        (2.2, (0.0, 0.1, 2.0, 0.1)),
        (2.45, (0.05, 0.3, 2.0, 0.1)),
    ],
)
def test_a_prefill_hides_what_came_first(waited, expected):
    wait = exposed_wait(answer(), make_cost(link=0.1, reroot=0.3), waited)
    assert (wait.link_there, wait.reroot, wait.draft, wait.link_back) == pytest.approx(expected)


def test_a_finished_request_leaves_nothing_behind_on_the_draft_side():
    simulated = {
        number: SimulatedRequest(RequestRecord(number, "", 0.0, 2 - number), 5) for number in (0, 1)
    }
    side = DraftSide(build_speculation(parse_policy("chain-3")))
    drafter = SyntheticDrafter(make_fit().acceptance, 1)
    workers = DraftWorkers(side, drafter, make_cost(), simulated)
    workers.receive(Verdict(0, (), (Admission(0, (0, 0), 5), Admission(1, (0,), 5))))
    workers.draft()
    workers.receive(Verdict(1, (RequestVerdict(0, 2, (1,), is_finished=True),)))
    assert side.request_ids == (1,)
    assert set(drafter._requests) == {1}


def test_prompts_in_a_draft_forward_are_priced_as_a_prefill():
    def rows(num_missing: int, num_nodes: int, context: int) -> ExpansionRows:
        count = num_missing + num_nodes
        return ExpansionRows(0, (0,) * count, (0,) * count, (0,) * num_nodes, None, context)

    cost = make_cost()
    caught_up, prompt = rows(BULK_ROWS - 1, 1, 100), rows(BULK_ROWS, 1, 7)
    assert draft_seconds(cost, [caught_up]) == cost.draft(BULK_ROWS, 100)
    assert draft_seconds(cost, [prompt]) == cost.draft_prefill(BULK_ROWS + 1, 7)
    mixed = draft_seconds(cost, [rows(0, 3, 50), prompt, rows(1, 2, 30)])
    assert mixed == cost.draft(6, 80) + cost.draft_prefill(BULK_ROWS + 1, 7)
