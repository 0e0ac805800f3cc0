"""The command that measures the models of a fit, on a machine such as its own or a run's.

Must not import torch.
"""

from __future__ import annotations

import shlex

from codesign.artifacts import read_json
from codesign.fit import ROOFLINE, Fit
from codesign.fit.shipped import DEFAULT_FIT
from codesign.models import FETCHABLE, has_model


def profile_command(
    fit: Fit,
    *,
    target: str | None = None,
    draft: str | None = None,
    device: str | None = None,
    workers: int | None = None,
) -> str:
    """``codesign profile`` with what it needs to measure the same as ``fit``.

    Args:
        fit: Whose sampling is kept: a plan samples as its fit was recorded.
        target: Another one than the fit's; "" if nobody knows.
        draft: The same; "ngram" for the drafter without a model.
        device: As ``--device`` takes it, if not the fit's.
        workers: Threads or GPUs, if not all.
    """
    target = _checkpoint(fit.target) if target is None else target
    draft = _checkpoint(fit.draft) if draft is None else draft
    device = device_of(fit) if device is None else device
    default = read_json(DEFAULT_FIT, kind="fit")
    words = ["codesign", "profile"]
    if target and (target, draft) != (default["target"], default["draft"]):
        words += ["--target", target, "--draft", draft]
    if device != "cpu":
        words += ["--device", device]
    sampling = (
        ("--temperature", fit.temperature, 0.0),
        ("--top-k", fit.top_k, 0),
        ("--top-p", fit.top_p, 1.0),
    )
    for flag, value, usual in sampling:
        words += [flag, f"{value:g}"] if value != usual else []
    words += [] if workers is None else ["--workers", str(workers)]
    return shlex.join([*words, "--out", "profile"])


def is_of_memory(fit: Fit) -> bool:
    """Whether it says how many KV rows fit, as only those of GPUs do."""
    return any(cost.kv_tokens is not None for cost in fit.costs.values())


def device_of(fit: Fit) -> str:
    """What runs its plans, as ``--device`` of profile and run takes it; data sheets are of GPUs."""
    if fit.device:
        return fit.device
    return "cuda" if fit.origin == ROOFLINE or is_of_memory(fit) else "cpu"


def _checkpoint(model: str) -> str:
    """A name that can be typed; sizes of data sheets and models of other machines cannot."""
    return model if model == "ngram" or model in FETCHABLE or has_model(model) else "FOLDER"
