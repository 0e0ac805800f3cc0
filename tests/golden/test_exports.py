"""Exports of three plans, frozen: a change of them must be meant.

Rewrite them after a change that was: pytest tests/golden --update-golden
"""

from __future__ import annotations

import json

import pandas as pd
import pytest

from codesign.artifacts import header, to_json, write_table
from codesign.candidate import Candidate, Interval, ScoredCandidate
from codesign.config import SLO, Serving, parse_deployment
from codesign.export import ENGINES, export_plan
from codesign.fit.what_if import what_if_fit
from codesign.plan import FileRef, Plan
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling

PLANS = {
    "export-vllm": ("async-tree-8x4x2", "6+2", Serving(prefill_chunk=1024, prefix_cache=True)),
    "export-sglang": ("tree-8x4x2", "4/p4", Serving(routing="prefix-aware", preemption=True)),
    "export-trtllm": ("specserve-5", "8", Serving(max_kv_tokens=200_000)),
}


@pytest.mark.parametrize("name", PLANS)
def test_an_export_is_the_one_that_was_frozen(name, frozen, tmp_path):
    policy, split, serving = PLANS[name]
    fit = what_if_fit("h100", 8, "llama-3.1-70b", "llama-3.2-1b")
    fit.save(tmp_path / "fit.json")
    requests = pd.DataFrame(
        {"arrival": [0.0, 1.0], "prompt_tokens": [900, 2000], "output_tokens": [200, 100]}
    )
    write_table(tmp_path / "trace.parquet", requests, header("trace", seed=None))
    candidate = Candidate(parse_deployment(split), parse_policy(policy), 32)
    figures = {"mean_batch": Interval(6.0, 6.0, 6.0), "tpot_mean": Interval(0.02, 0.02, 0.02)}
    plan = Plan(
        target=fit.target,
        draft=fit.draft,
        slo=SLO(tpot=0.05),
        objective="goodput",
        sampling=Sampling(seed=0),
        serving=serving,
        trace=FileRef.of(tmp_path / "trace.parquet"),
        num_requests=2,
        fit=FileRef.of(tmp_path / "fit.json"),
        seed=0,
        num_seeds=1,
        chosen=ScoredCandidate(candidate, figures, {}, "roofline", is_feasible=True),
    )
    found = export_plan(plan, fit, ENGINES[name.removeprefix("export-")])
    assert found.forecast is not None
    body = {
        "arguments": found.configuration.arguments,
        "commands": found.configuration.commands,
        "files": found.configuration.files,
        "cannot_express": found.losses,
        "notes": found.notes,
        "simulated_as": found.forecast.label,
    }
    text = json.loads(to_json(body))
    assert frozen(name, text) == text
