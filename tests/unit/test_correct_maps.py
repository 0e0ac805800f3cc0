"""Fits of before the maps' kernels of 28 November lose what steps save since, and nothing else."""

from __future__ import annotations

import copy
import json

import pytest

from benchmarks.correct_maps import Savings, num_weights
from benchmarks.fit_corrections import correct, models_of
from codesign.fit.shipped import DEFAULT_FIT

FOLDER = DEFAULT_FIT.parents[1] / "h200-llama-3.1-8b-int4+llama-3.2-1b-int4"
TARGET, DRAFT = "llama-3.1-8b", "llama-3.2-1b"
US = 1e-6


@pytest.fixture
def saved() -> Savings:
    """An 8B saves 10 us in steps of eight rows and 80 of 64, half of it over two GPUs."""
    rows = [
        {"model": TARGET, "gpus": gpus, "rows": count, "saved_us": us / gpus}
        for gpus in (1, 2)
        for count, us in ((8, 10.0), (64, 80.0))
    ]
    return Savings(rows)


def test_an_8b_has_the_maps_that_it_is_known_for():
    assert num_weights(TARGET, 1) == 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
    assert num_weights(TARGET, 2) == num_weights(TARGET, 1) // 2


def test_what_is_saved_follows_bytes_and_rows(saved):
    size = num_weights(TARGET, 1)
    assert saved.of(size, 1) == pytest.approx(10 * US)
    assert saved.of(size // 2, 8) == pytest.approx(5 * US)
    assert saved.of(size // 4, 9) == pytest.approx(20 * US), "down to nothing at none"
    assert saved.of(2 * size, 64) == pytest.approx(80 * US), "no more than was measured"
    assert saved.of(size, 128) == pytest.approx(160 * US), "weights are read twice"


def test_only_steps_and_short_prompts_of_the_named_deployments_change(saved):
    fit = json.loads((FOLDER / "fit.json").read_text())
    before, models = copy.deepcopy(fit), models_of(FOLDER)
    correct(fit, models, ["1+1"], saved)
    assert fit["costs"]["1"] == before["costs"]["1"]
    old, new = before["costs"]["1+1"], fit["costs"]["1+1"]
    for op, model in (("target", TARGET), ("draft", DRAFT)):
        expected = saved.of(num_weights(model, 1), 8)
        assert old[op]["seconds"][0] - new[op]["seconds"][0] == pytest.approx(expected)
        steps = (each["steps"][f"1+1/{op}"]["time"]["seconds"][0] for each in (before, fit))
        assert next(steps) - next(steps) == pytest.approx(expected)
    gone = {
        rows: a - b
        for rows, a, b in zip(
            old["prefill"]["rows"],
            old["prefill"]["seconds"],
            new["prefill"]["seconds"],
            strict=True,
        )
    }
    assert gone[64] == pytest.approx(80 * US)
    assert {gone[rows] for rows in gone if rows > 64} == {0.0}
    freed = num_weights(TARGET, 1) // (16 * 128) * 32
    assert new["kv_tokens"] - old["kv_tokens"] == freed // (2 * 2 * 32 * 8 * 128)
    assert old["reroot"] == new["reroot"]
