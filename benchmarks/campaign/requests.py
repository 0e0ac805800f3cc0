"""The requests that every run of a pair serves, as tables and with their tokens.

Streams and batches ask questions (questions.py); a segment is a stretch of a trace. Imports no
torch.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.campaign.questions import SERVED_FILLERS, served_prompts
from benchmarks.campaign.units import Workload
from codesign.artifacts import header, read_table, write_table
from codesign.errors import HardwareError, InputError
from codesign.models import resolve_model
from codesign.models.shape import model_shape
from codesign.models.tokenizer import Tokenizer
from codesign.planner.prepared_trace import prepare_trace
from codesign.policy.cost import RoundCost
from codesign.prompts import CATEGORIES, BoundRequest, bind_prompts, encode_user_turn, load_prompts
from codesign.traces import Trace, load_trace

# Of a segment: prompts of a median of 150 tokens, cut to what runs as a graph (how far the host
# slows longer ones, 12 % of these, is luck), and answers as long as those that are recorded.
TRACE, PROMPT_SCALE, MAX_PROMPT, MAX_OUTPUT = "conv-twin", 0.15, 240, 48
LOAD = 0.3  # of what plain decoding bears on all GPUs: where they are split, more than twice that


def load_requests(
    folder: Path, workload: Workload, target: str, cost: RoundCost | None, *, seed: int
) -> pd.DataFrame:
    """The prepared requests of a workload; made once per pair.

    Args:
        folder: The pair's.
        workload: Which.
        target: The pair's target.
        cost: Step times of the first deployment that serves it, for the rate of a segment.
        seed: Which of ``questions.SERVED_FILLERS``, of a segment's prompts, and which stretch of
            the trace it is.

    Raises:
        InputError: If those that are there are of another seed.
    """
    file = request_file(folder, workload)
    if not file.exists():
        if workload.seconds:
            trace = _segment(workload, cost, seed)
            prepared = prepare_trace(trace, target, seed=seed, max_requests=workload.requests)
        else:
            prepared = _at_once(workload, target, seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_table(file, prepared.requests, header("trace", seed=seed))
    requests, meta = read_table(file, kind="trace")
    if (found := meta["seed"] or 0) != seed:
        raise InputError(
            f"{file} has the requests of seed {found}, not {seed}: those that a pair serves are "
            f"made once. Fix: --seed as before, or --out with another folder"
        )
    return requests


def seed_of(folder: Path) -> int:
    """Of the requests that a pair serves, below whose folder they are; 0 if there are none yet."""
    files = sorted((folder / "requests").glob("*.parquet"))
    return read_table(files[0], kind="trace")[1]["seed"] or 0 if files else 0


def request_file(folder: Path, workload: Workload) -> Path:
    """Where the requests of a workload are kept."""
    return folder / "requests" / f"{workload.name}.parquet"


def bound(
    requests: pd.DataFrame, target: str, workload: Workload, *, seed: int
) -> list[BoundRequest]:
    """Requests with token ids; those of a segment as ``codesign run`` binds them."""
    directory = resolve_model(target)
    if not workload.seconds:
        return served_prompts(directory, workload, seed=seed)
    return bind_prompts(
        requests,
        load_prompts("run"),
        encode_user_turn(Tokenizer(directory)),
        seed=seed,
        max_positions=model_shape(directory).max_positions,
    )


def alike(
    requests: pd.DataFrame, target: str, workload: Workload, *, seed: int
) -> dict[str, float]:
    """How many requests have the mean one's very prompt, itself counted, by kind.

    Those of a trace that are shorter than their question all ask it bare. Nothing is known of it
    where the target is not on this machine.
    """
    if not workload.seconds:
        return {}
    with contextlib.suppress(InputError, HardwareError):
        asked = bound(requests, target, workload, seed=seed)
        times = Counter(request.prompt_ids for request in asked)
        found: dict[str, list[int]] = {}
        for request in asked:
            found.setdefault(request.category, []).append(times[request.prompt_ids])
        return {category: float(np.mean(copies)) for category, copies in found.items()}
    return {}


def tokens_of(workload: Workload) -> int:
    """Most tokens of an answer."""
    return MAX_OUTPUT if workload.seconds else workload.output_tokens


def _at_once(workload: Workload, target: str, seed: int) -> Trace:
    """What is served, as a trace; of as many tokens as asked for where the target is not here."""
    count = workload.requests
    lengths, kinds = [1] * count, [CATEGORIES[i % len(CATEGORIES)] for i in range(count)]
    with contextlib.suppress(InputError, HardwareError):  # the target is not on this machine
        asked = served_prompts(resolve_model(target), workload, seed=seed)
        lengths, kinds = [r.prompt_tokens for r in asked], [r.category for r in asked]
    requests = pd.DataFrame(
        {
            "arrival": np.zeros(count),
            "prompt_tokens": np.array(lengths, np.int64),
            "output_tokens": np.full(count, workload.output_tokens, np.int64),
            "category": kinds,
        }
    )
    return Trace(workload.name, requests, "campaign", (), "")


def _segment(workload: Workload, cost: RoundCost | None, seed: int) -> Trace:
    """A stretch of a trace, another one of each seed, at a rate that loads plain decoding by
    ``LOAD``.

    The tail of one stretch's TTFT is that of a burst or two: campaigns that all replay the same
    tell nothing new of it.
    """
    assert cost is not None, "the first deployment is profiled"
    trace = load_trace(TRACE).scale_lengths(
        prompt=PROMPT_SCALE, max_prompt=MAX_PROMPT, max_output=MAX_OUTPUT
    )
    prompts = trace.requests["prompt_tokens"].to_numpy()
    output, rows = float(np.mean(trace.requests["output_tokens"])), workload.batch
    step = cost.target(rows, rows * (prompts.mean() + output / 2))
    prefill = float(cost.prefill.of_arrays(prompts, 0.0).mean())
    rate = LOAD / (prefill + output * step / rows)
    found = (len(trace) - 1) / trace.duration
    trace = trace.scale_rate(rate / found)
    room = max(trace.duration - workload.seconds, 0.0)
    return trace.slice(room * seed / len(SERVED_FILLERS), workload.seconds)
