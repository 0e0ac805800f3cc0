"""Exports of three plans, frozen: a change of them must be meant.

Rewrite them after a change that was: pytest tests/golden --update-golden
"""

from __future__ import annotations

import json

import pytest

from codesign.artifacts import to_json
from codesign.candidate import Candidate, Interval, ScoredCandidate
from codesign.config import SLO, Serving, parse_deployment
from codesign.export import ENGINES, export_plan
from codesign.policy.speculation import parse_policy

PLANS = {
    "export-vllm": ("async-tree-8x4x2", "6+2", Serving(prefill_chunk=1024, prefix_cache=True)),
    "export-sglang": ("tree-8x4x2", "4/p4", Serving(routing="prefix-aware", preemption=True)),
    "export-trtllm": ("specserve-5", "8", Serving(max_kv_tokens=200_000)),
}


@pytest.mark.parametrize("name", PLANS)
def test_an_export_is_the_one_that_was_frozen(name, frozen, gpu_fit, gpu_plan, tmp_path):
    policy, split, serving = PLANS[name]
    candidate = Candidate(parse_deployment(split), parse_policy(policy), 32)
    figures = {"mean_batch": Interval(6.0, 6.0, 6.0), "tpot_mean": Interval(0.02, 0.02, 0.02)}
    scored = ScoredCandidate(candidate, figures, {}, "roofline", is_feasible=True)
    requests = {"prompts": [900, 2000], "outputs": [200, 100]}
    plan = gpu_plan(tmp_path, scored, **requests, slo=SLO(tpot=0.05), serving=serving)
    found = export_plan(plan, gpu_fit, ENGINES[name.removeprefix("export-")])
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
