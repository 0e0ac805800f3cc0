"""What a search takes where nobody says: workers, requests, batch limit, KV rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from codesign.config import Serving, parse_deployment
from codesign.errors import InputError
from codesign.fit import Fit

if TYPE_CHECKING:
    import pandas as pd

MAX_KV_TOKENS = 4096  # of a replica, where the fit does not say, as on a CPU
MAX_BATCH, MAX_BATCH_UNKNOWN_MEMORY = 256, 8
DEFAULT_MAX_REQUESTS = 200  # of a trace, where the memory is not known: a CPU


def knows_memory(fit: Fit) -> bool:
    """Whether a fit says how many KV rows its machine holds, in every deployment."""
    return all(cost.kv_tokens is not None for cost in fit.costs.values())


def most_requests(fit: Fit) -> int | None:
    """After how many requests a trace is cut if nobody says; None for all that it has."""
    return None if knows_memory(fit) else DEFAULT_MAX_REQUESTS


def bounded(serving: Serving, fit: Fit) -> Serving:
    """With a limit of KV rows where neither the user nor the fit has one."""
    if serving.max_kv_tokens is not None or knows_memory(fit):
        return serving
    return replace(serving, max_kv_tokens=MAX_KV_TOKENS)


def expecting(serving: Serving, requests: pd.DataFrame) -> Serving:
    """With the mean answer of a trace, which policies begin with."""
    if not len(requests):
        return serving
    return replace(
        serving, answer_tokens=round(float(requests["output_tokens"].to_numpy().mean()), 1)
    )


def largest_batch(fit: Fit) -> int:
    """Batch limits are searched up to this one."""
    return MAX_BATCH if knows_memory(fit) else MAX_BATCH_UNKNOWN_MEMORY


def all_workers(fit: Fit) -> int:
    """Workers of the largest deployment that was measured or priced.

    Raises:
        InputError: If there is none.
    """
    if not fit.costs:
        raise InputError("the fit holds no step times. Fit again: codesign fit profile")
    return max(parse_deployment(label).num_workers for label in fit.costs)
