"""Fits of before heads were int8 codes lose what these save, and nothing else."""

from __future__ import annotations

import copy
import json

import pytest

from benchmarks.correct_heads import Savings, head_bytes
from benchmarks.fit_corrections import correct, models_of
from codesign.fit.shipped import DEFAULT_FIT

NAME = "h200-llama-3.1-8b-int4+llama-3.2-1b-int4"
US = 1e-6


@pytest.fixture
def fit():
    return json.loads((DEFAULT_FIT.parents[1] / NAME / "fit.json").read_text())


@pytest.fixture
def saved() -> Savings:
    """Targets save 100 us per GB and 1 more with each doubling of eight rows, drafts 10 less."""
    rows = []
    for model, offset in (("llama-3.1-8b", 0.0), ("llama-3.2-1b", -10.0)):
        for gpus in (1, 2, 4):
            for more, count in enumerate((8, 16, 64)):
                us = head_bytes(model, gpus) / 1e7 + more + offset
                place = {"model": model, "gpus": gpus, "rows": count}
                rows += [place | {"head": "bf16", "us": us}, place | {"head": "int8", "us": 0.0}]
    return Savings(rows)


def test_what_is_saved_follows_bytes_and_rows(saved):
    size = head_bytes("llama-3.1-8b", 2)
    assert saved.of(size, 3, is_draft=False) == pytest.approx(size / 1e13)
    assert saved.of(size, 17, is_draft=False) == pytest.approx(size / 1e13 + 2 * US)
    assert saved.of(size, 64, is_draft=True) == pytest.approx(size / 1e13 - 8 * US)
    assert saved.of(size, 65, is_draft=False) == 0.0
    assert saved.of(10, 8, is_draft=True) == 0.0, "no head costs anything"


def test_a_draft_saves_no_sampling():
    place = {"model": "llama-3.1-8b", "rows": 8}
    rows = [place | {"gpus": gpus, "head": "bf16", "us": 200.0 / gpus} for gpus in (1, 2)]
    rows += [row | {"head": "int8", "us": row["us"] / 2, "what": "logits only"} for row in rows]
    saved = Savings(rows).of(head_bytes("llama-3.1-8b", 1), 8, is_draft=True)
    assert saved == pytest.approx(95.5 * US)


def test_only_steps_of_the_named_deployments_change(fit, saved):
    before = copy.deepcopy(fit)
    models = models_of(DEFAULT_FIT.parents[1] / NAME)
    assert models == ("llama-3.1-8b", "llama-3.2-1b")
    correct(fit, models, ["3+1"], saved)
    assert fit["costs"]["1"] == before["costs"]["1"]
    old, new = before["costs"]["3+1"], fit["costs"]["3+1"]
    sizes = {"target": head_bytes(models[0], 3), "draft": head_bytes(models[1], 1)}
    for op, prompt in (("target", "prefill"), ("draft", "draft_prefill")):
        saving = saved.of(sizes[op], 8, is_draft=op == "draft")
        gone = [a - b for a, b in zip(old[op]["seconds"], new[op]["seconds"], strict=True)]
        assert gone[0] == pytest.approx(saving)
        assert gone[-1] == 0.0, "more rows than the codes take"
        assert old[prompt]["seconds"][0] - new[prompt]["seconds"][0] == pytest.approx(saving)
        steps = (each["steps"][f"3+1/{op}"]["time"]["seconds"][0] for each in (before, fit))
        assert next(steps) - next(steps) == pytest.approx(saving)
    rows = head_bytes(models[0], 3) // 2 // (4 * 32 * 3 * 128)  # 8 heads over three GPUs: 3
    assert old["kv_tokens"] - new["kv_tokens"] == rows
    assert old["reroot"] == new["reroot"]
