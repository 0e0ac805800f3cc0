"""A roofline of one engine: from its steps at few degrees to degrees that nobody has run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine_roofline import TimedStep, engine_software, errors_by_degree
from codesign.errors import InputError
from codesign.fit.devices import load_device
from codesign.fit.priced_model import parse_model
from codesign.fit.roofline import DEFAULT_SOFTWARE, Software

ROOT = Path(__file__).parents[2]
STEPS = ROOT / "benchmarks" / "results" / "engine_steps_2026-11-21_h200.json"
H200 = load_device("h200")


def made_up(software: Software, *shapes: tuple[str, int]) -> list[TimedStep]:
    """Steps of an engine that is exactly as near to the hardware as ``software`` says."""
    blank = [TimedStep(parse_model(f"{name}:int4"), gpus, 8, 500, 1.0) for name, gpus in shapes]
    return [
        TimedStep(s.model, s.gpus, s.rows, s.context, s.predicted(H200, software)) for s in blank
    ]


def measured() -> list[TimedStep]:
    rows = json.loads(STEPS.read_text())["rows"]
    names = {"llama-3-8b": "llama-3.1-8b"}
    return [
        TimedStep(
            parse_model(f"{names.get(row['model'], row['model'])}:int4"),
            row["gpus"], row["rows"], row["context"], row["ms_median"] / 1e3,
        )
        for row in rows
        if row.get("rows") == 8 and "ms_median" in row
    ]  # fmt: skip


def test_an_engine_that_is_a_roofline_is_found_from_one_two_and_four_gpus():
    shares = {**DEFAULT_SOFTWARE.weight_share, "int4": 0.9, "bf16": 0.7}
    true = Software(
        weight_share=shares, layer=3e-5, all_reduce={"nvlink": 4e-6, "pcie": 3e-5}, peer=5e-7
    )
    sizes = [("llama-3-70b", 1), ("llama-3.2-1b", 1), ("llama-3.1-8b", 1), ("llama-3-70b", 2),
             ("llama-3.2-3b", 4), ("llama-3-70b", 4)]  # fmt: skip
    found = engine_software(made_up(true, *sizes), H200)
    for step in made_up(true, ("llama-3-70b", 8), ("qwen2-72b", 6)):
        assert step.predicted(H200, found) == pytest.approx(step.seconds, rel=1e-6)
    assert found.weight_share["fp8"] == DEFAULT_SOFTWARE.weight_share["fp8"]  # never timed


def test_steps_of_one_gpu_leave_all_reduces_as_they_were():
    found = engine_software(made_up(DEFAULT_SOFTWARE, ("llama-3-70b", 1)), H200)
    assert found.all_reduce == DEFAULT_SOFTWARE.all_reduce
    assert found.peer == 0.0
    with pytest.raises(InputError, match="codesign profile"):
        engine_software([], H200)


@pytest.mark.parametrize("most", [2])
def test_steps_on_four_gpus_follow_from_those_on_one_and_two(most):
    if not STEPS.exists():
        pytest.skip("no steps are committed")
    found = errors_by_degree(measured(), H200, most)
    assert {step.gpus for step, _ in found} == {4}
    assert max(abs(error) for _, error in found) < 0.06
    by_data_sheet = [step.predicted(H200, DEFAULT_SOFTWARE) / step.seconds for step, _ in found]
    assert min(by_data_sheet) > 1.9  # engines of others are that much slower
