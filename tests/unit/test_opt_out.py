"""A request that wants no speculation gets none, whatever the others of its batch do."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from codesign.candidate import Candidate
from codesign.config import SLO, Serving, parse_deployment
from codesign.errors import InputError
from codesign.fit.what_if import what_if_fit
from codesign.policy.speculation import parse_policy
from codesign.prompts import Prompt, bind_prompts
from codesign.sim import simulate
from codesign.traces import load_trace, write_csv


@pytest.fixture(scope="module")
def fit():
    return what_if_fit("h100", 2, "llama-3.1-70b:int4", "llama-3.2-1b:int4")


def requests(**columns) -> pd.DataFrame:
    frame = pd.DataFrame(
        {
            "arrival": [0.0, 0.0, 0.1, 0.2],
            "prompt_tokens": [40, 300, 60, 90],
            "output_tokens": [30, 25, 40, 20],
            "category": ["chat", "code", "chat", "code"],
        }
    )
    return frame.assign(**columns)


@pytest.mark.parametrize(
    ("policy", "deployment"),
    [
        ("chain-3", "2"),
        ("specserve-4", "2"),
        ("batch-tree-8x2x4", "2"),
        ("async-tree-8x4x3", "1+1"),
        ("async-batch-tree-8x2x4", "1+1"),
    ],
)
def test_who_opts_out_is_never_drafted_for_and_loses_no_token(fit, policy, deployment):
    candidate = Candidate(parse_deployment(deployment), parse_policy(policy), 4)
    records = simulate(
        requests(speculates=[True, False, True, False]),
        candidate,
        fit,
        serving=Serving(),
        slo=SLO(),
        seed=3,
    )
    drafted = [r.num_draft_tokens > 0 for r in records.requests]
    assert drafted == [True, False, True, False]
    assert [r.output_tokens for r in records.requests] == [30, 25, 40, 20]
    assert [r.num_rounds for r in records.requests if not r.num_draft_tokens] == [24, 19]
    emitted = records.rounds.column("num_emitted_tokens").sum()
    assert emitted == sum(r.output_tokens - 1 for r in records.requests)


def test_if_all_opt_out_every_policy_is_plain_decoding(fit):
    # But for what its rounds cost beside the target's forward.
    rounds = []
    for policy in ("plain", "chain-3", "batch-tree-8x2x4"):
        candidate = Candidate(parse_deployment("2"), parse_policy(policy), 4)
        trace = requests(speculates=False)
        records = simulate(trace, candidate, fit, serving=Serving(), slo=SLO(), seed=3)
        rounds.append([r.rows - r.batch for r in records.rounds])
        assert set(rounds[-1]) == {0}


@pytest.mark.parametrize(
    ("columns", "pays"),
    [({"speculates": True}, True), ({"speculates": False}, False), ({"output_tokens": 1}, False)],
    ids=["drafted for", "opt out", "end with their first token"],
)
@pytest.mark.parametrize("chunk", [None, 100])
def test_the_draft_runs_no_prompt_of_a_request_that_it_drafts_nothing_for(
    fit, chunk, columns, pays
):
    candidate = Candidate(parse_deployment("2"), parse_policy("chain-3"), 4)
    seconds = []
    for factor in (1.0, 100.0):
        cost = replace(fit.costs["2"], draft_prefill=fit.costs["2"].draft_prefill.scaled(factor))
        dear = replace(fit, costs={"2": cost})
        serving = Serving(prefill_chunk=chunk)
        records = simulate(requests(**columns), candidate, dear, serving=serving, seed=3)
        seconds.append(records.seconds)
    assert (seconds[1] > 1.1 * seconds[0]) == pays
    assert pays or seconds[0] == seconds[1]


def test_a_trace_s_wishes_come_from_its_file_and_reach_the_engine(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(
        "arrival,prompt_tokens,output_tokens,category,speculates\n0,5,3,chat,1\n1,6,2,chat,0\n"
    )
    trace = load_trace(path)
    assert trace.requests["speculates"].tolist() == [True, False]
    write_csv(trace, tmp_path / "again.csv")
    again = load_trace(tmp_path / "again.csv")
    assert again.requests["speculates"].tolist() == [True, False]
    prompts = [Prompt("a", "chat", "run", "Hello")]
    bound = bind_prompts(again.requests, prompts, lambda text: [*text.encode()], seed=0)
    assert [request.options.speculates for request in bound] == [True, False]


def test_a_wish_that_is_neither_yes_nor_no_is_named(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("arrival,prompt_tokens,output_tokens,speculates\n0,5,3,1\n1,6,2,7\n")
    with pytest.raises(InputError, match=r"line 3.*speculates is 7, not 0 or 1"):
        load_trace(path)
    path.write_text("arrival,prompt_tokens,output_tokens,speculates\n0,5,3,1\n1,6,2,no\n")
    with pytest.raises(InputError, match=r"line 3.*speculates is no, not 0 or 1"):
        load_trace(path)
