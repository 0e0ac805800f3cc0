"""Requests that every run of a pair serves, with the prompts that no profile has recorded.

Imports no torch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.campaign.units import Workload
from codesign.artifacts import read_table
from codesign.models import resolve_model
from codesign.models.shape import model_shape
from codesign.models.tokenizer import Tokenizer
from codesign.planner.prepared_trace import prepare_trace
from codesign.policy.cost import RoundCost
from codesign.prompts import (
    CATEGORIES,
    BoundRequest,
    bind_prompts,
    encode_user_turn,
    load_prompts,
)
from codesign.traces import Trace, load_trace, write_parquet

TRACE, MAX_PROMPT, MAX_OUTPUT = "conv-twin", 384, 64  # of a segment
LOAD = 0.5  # of what plain decoding bears


def load_requests(
    folder: Path, workload: Workload, target: str, cost: RoundCost | None, *, seed: int
) -> pd.DataFrame:
    """The prepared requests of a workload; made once per pair.

    Args:
        folder: The pair's.
        workload: Which.
        target: The pair's target.
        cost: Step times of the first deployment that serves it, for the rate of a segment.
        seed: Of prompts.
    """
    file = request_file(folder, workload)
    if not file.exists():
        trace = _segment(workload, cost) if workload.seconds else _at_once(workload)
        prepared = prepare_trace(trace, target, seed=seed, max_requests=workload.requests)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_parquet(prepared, file)
    return read_table(file, kind="trace")[0]


def request_file(folder: Path, workload: Workload) -> Path:
    """Where the requests of a workload are kept."""
    return folder / "requests" / f"{workload.name}.parquet"


def bound(requests: pd.DataFrame, target: str, *, seed: int) -> list[BoundRequest]:
    """Requests with token ids, as ``codesign run`` binds them."""
    directory = resolve_model(target)
    return bind_prompts(
        requests,
        load_prompts("run"),
        encode_user_turn(Tokenizer(directory)),
        seed=seed,
        max_positions=model_shape(directory).max_positions,
    )


def _at_once(workload: Workload) -> Trace:
    """Every kind of prompt in turn, all there from the start."""
    count = workload.requests
    requests = pd.DataFrame(
        {
            "arrival": np.zeros(count),
            "prompt_tokens": np.ones(count, np.int64),  # a prompt is never cut
            "output_tokens": np.full(count, workload.output_tokens, np.int64),
            "category": [CATEGORIES[i % len(CATEGORIES)] for i in range(count)],
        }
    )
    return Trace(workload.name, requests, "campaign", (), "")


def _segment(workload: Workload, cost: RoundCost | None) -> Trace:
    """A stretch of a trace, at a rate that loads plain decoding by half."""
    assert cost is not None, "the first deployment is profiled"
    trace = load_trace(TRACE).scale_lengths(max_prompt=MAX_PROMPT, max_output=MAX_OUTPUT)
    prompt, output = (trace.requests[f"{kind}_tokens"].mean() for kind in ("prompt", "output"))
    rows = workload.batch
    step = cost.target(rows, rows * (prompt + output / 2))
    rate = LOAD / (cost.prefill(prompt) + output * step / rows)
    found = (len(trace) - 1) / trace.duration
    return trace.scale_rate(rate / found).slice(0.0, workload.seconds)
