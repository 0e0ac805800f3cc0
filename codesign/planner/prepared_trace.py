"""The trace exactly as it will be simulated and run: few enough requests, bound to real prompts.

The engine binds the same prompts with the same seed, so the lengths here are those it will serve.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd

from codesign.errors import HardwareError, InputError, counted
from codesign.fit.priced_model import find_shape
from codesign.models import resolve_model
from codesign.models.tokenizer import Tokenizer
from codesign.planner.defaults import DEFAULT_MAX_REQUESTS
from codesign.policy.kv_memory import PREFIX_BLOCK
from codesign.prompts import CATEGORIES, bind_prompts, binding_note, encode_user_turn, load_prompts
from codesign.traces import Trace

_MANY_REQUESTS = 200_000  # a search takes the time of about 20 simulations of all, or more


def prepare_trace(
    trace: Trace, target: str, *, seed: int, max_requests: int | None = None
) -> Trace:
    """The requests to plan for, with the prompt lengths that the engine will see.

    A longer trace is cut; requests without a category get one at random; prompts are bound with the
    target's tokenizer. Each of this is said in the notes of the trace, as is a target that is not
    on this machine, in which case the trace's own prompt lengths stay, and requests that are too
    long for it.

    Args:
        trace: As loaded, with the user's changes.
        target: Name or directory of the target model.
        seed: Of categories and prompts.
        max_requests: Most requests; None for DEFAULT_MAX_REQUESTS.

    Raises:
        InputError: If a category has no prompt.
    """
    limit = DEFAULT_MAX_REQUESTS if max_requests is None else max_requests
    prepared = _bound(_with_categories(trace.head(limit), seed), target, seed)
    note = too_long_note(target, prepared.requests)
    return _noted(prepared, note) if note else prepared


def _bound(prepared: Trace, target: str, seed: int) -> Trace:
    """The trace with the prompt lengths of real texts, if the target's tokenizer is here."""
    try:
        tokenizer = Tokenizer(resolve_model(target))
    except (InputError, HardwareError) as err:
        return _noted(
            prepared, f"prompt lengths are the trace's own, not those of real prompts: {err}"
        )
    requests = prepared.requests
    bound = bind_prompts(requests, load_prompts("run"), encode_user_turn(tokenizer), seed=seed)
    lengths = [b.prompt_tokens for b in bound]
    bound_requests = requests.assign(prompt_tokens=np.array(lengths, np.int64))
    if "hash_ids" in requests:
        bound_requests["hash_ids"] = _bound_blocks(requests, lengths)
    note = binding_note(requests, bound) or "prompts bound; all have the length the trace says"
    return _noted(dataclasses.replace(prepared, requests=bound_requests), note)


def too_long_note(target: str, requests: pd.DataFrame) -> str:
    """One line if requests need more positions than the target has; else "".

    Args:
        target: As a fit names it; nothing is said of a model whose shape is not known.
        requests: With prompt_tokens and output_tokens.
    """
    shape = find_shape(target)
    needed = (requests["prompt_tokens"] + requests["output_tokens"]).to_numpy()
    if shape is None or not (needed > shape.max_positions).any():
        return ""
    count = int((needed > shape.max_positions).sum())
    return (
        f"{count:,} of {counted(len(needed), 'request')} need more than the "
        f"{shape.max_positions:,} positions of {target}, up to {needed.max():,}: they are "
        "simulated, but codesign run refuses a plan with them. Cut them: --max-prompt N, "
        "--max-output N"
    )


def long_trace_note(num_requests: int) -> str:
    """One line if a search on so many requests takes hours; else ""."""
    if num_requests < _MANY_REQUESTS:
        return ""
    return (
        f"up to {num_requests:,} requests are simulated again and again, which may take hours. An "
        "hour of the traffic answers most questions: --slice 0:3600, or --max-requests N"
    )


def _bound_blocks(requests: pd.DataFrame, lengths: Sequence[int]) -> pd.Series:
    """Prefix blocks of the bound prompts: where one got longer, its end is like no other's."""
    columns = requests["hash_ids"], requests["prompt_tokens"], lengths
    new = itertools.count(1 + max(itertools.chain.from_iterable(columns[0]), default=-1))
    blocks = []
    for ids, wanted, length in zip(*columns, strict=True):
        known = list(ids) if length == wanted else list(ids)[: wanted // PREFIX_BLOCK]
        blocks.append([*known, *itertools.islice(new, -(-length // PREFIX_BLOCK) - len(known))])
    return pd.Series(blocks, index=requests.index, dtype=object)


def _with_categories(trace: Trace, seed: int) -> Trace:
    """Fill in what the trace does not say, so that binding draws the same when it is done again."""
    known = trace.requests["category"].to_numpy(object)
    if (known != "").all():
        return trace
    drawn = trace.with_categories(CATEGORIES, [1.0] * len(CATEGORIES), seed)
    category = np.where(known == "", drawn.requests["category"].to_numpy(object), known)
    return dataclasses.replace(drawn, requests=drawn.requests.assign(category=category))


def _noted(trace: Trace, note: str) -> Trace:
    return dataclasses.replace(trace, notes=(*trace.notes, note))
