"""Fits of before a search of tilings lose what it found where that was taken, and nothing else."""

from __future__ import annotations

import copy
import json
import shutil

import pytest

from benchmarks.correct_tilings import Found
from benchmarks.fit_corrections import correct, models_of
from codesign.fit import Fit
from codesign.fit.shipped import DEFAULT_FIT

FOLDER = DEFAULT_FIT.parents[1] / "h200-qwen2-72b-int4+qwen2-1.5b-int4"
DRAFT = "qwen2-1.5b"
US = 1e-6


@pytest.fixture
def found() -> Found:
    """The draft on one GPU saves 70 us in steps of up to 8 rows and 50 of up to 16."""
    return Found(
        [
            {"model": model, "tensor_parallel": gpus, "rows": rows, "taken": taken}
            | {"ms": {"now": 1.0 + 0.001 * us, "best": 1.0}}
            for model, gpus, rows, us, taken in (
                (DRAFT, 1, 8, 70.0, True),
                (DRAFT, 1, 16, 50.0, True),
                (DRAFT, 2, 8, 10.0, False),
            )
        ]
    )


def test_what_is_saved_is_that_of_the_bucket_that_was_searched(found):
    saved = [found.step(DRAFT, 1, rows, is_draft=True) for rows in (1, 8, 9, 16, 17)]
    assert saved == pytest.approx([70 * US, 70 * US, 50 * US, 50 * US, 0.0])
    assert found.step(DRAFT, 2, 8, is_draft=True) == 0.0, "not taken"
    assert found.step("qwen2-72b", 1, 8, is_draft=False) == 0.0, "not searched"


def test_only_the_draft_on_one_gpu_changes(found):
    fit = json.loads((FOLDER / "fit.json").read_text())
    before, models = copy.deepcopy(fit), models_of(FOLDER)
    correct(fit, models, ["2", "1+1"], found)
    assert fit["costs"]["2"] == before["costs"]["2"]
    old, new = before["costs"]["1+1"], fit["costs"]["1+1"]
    assert new["target"] == old["target"]
    assert new["kv_tokens"] == old["kv_tokens"]
    rows, seconds = new["draft"]["rows"], new["draft"]["seconds"]
    gone = [a - b for a, b in zip(old["draft"]["seconds"], seconds, strict=True)]
    assert gone[rows.index(8)] == pytest.approx(70 * US)
    assert gone[rows.index(16)] == pytest.approx(50 * US)
    assert gone[-1] == 0.0


def test_a_draft_s_prompt_gets_no_dearer_as_the_row_behind_it_gets_cheaper(found, tmp_path):
    old = Fit.load(FOLDER / "fit.json").costs["1+1"]
    fit = json.loads((FOLDER / "fit.json").read_text())
    correct(fit, models_of(FOLDER), ["1+1"], found)
    shutil.copytree(FOLDER, tmp_path / "new")
    (tmp_path / "new" / "fit.json").write_text(json.dumps(fit))
    new = Fit.load(tmp_path / "new" / "fit.json").costs["1+1"]
    for rows in (8, 16):
        assert new.draft_prompt(rows) < old.draft_prompt(rows)
    for rows in (64, 500, 2_000):
        assert new.draft_prompt(rows) == pytest.approx(old.draft_prompt(rows))
