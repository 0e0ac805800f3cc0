"""The command that measures what a fit is of."""

from __future__ import annotations

import dataclasses

import pytest

from codesign.fit import Fit
from codesign.fit.profile_command import device_of, profile_command
from codesign.fit.shipped import FITS

H200 = FITS / "h200-llama-3.1-8b-int4+llama-3.2-1b-int4" / "fit.json"


def test_the_default_models_on_this_machine_need_no_flag(machine_fit):
    assert profile_command(machine_fit) == "codesign profile --out profile"
    warm = dataclasses.replace(machine_fit, temperature=0.7, draft="ngram")
    words = "codesign profile --target smollm2-135m --draft ngram --temperature 0.7 --out profile"
    assert profile_command(warm) == words


@pytest.mark.parametrize("is_shipped", [True, False])
def test_gpus_are_measured_as_gpus_with_checkpoints_that_only_the_user_can_name(
    is_shipped, gpu_fit, tmp_path, monkeypatch
):
    """Before, with the small models of a laptop on its CPU."""
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path))  # whoever has inflated ones can use them
    fit = Fit.load(H200) if is_shipped else gpu_fit
    assert device_of(fit) == "cuda"
    words = (
        "codesign profile --target FOLDER --draft FOLDER --device cuda --workers 4 --out profile"
    )
    assert profile_command(fit, workers=4) == words
