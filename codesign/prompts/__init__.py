"""The shipped prompts, and how the requests of a trace get real text.

A trace says how long a request is, not what it says. Each request gets a prompt of its category;
what is missing to the trace's length is filled with other prompts of the pool, put in front of
the question inside the user's turn as earlier material. Where requests have prefix blocks in
common, that material begins with theirs (codesign/prompts/blocks.py). Planner and engine bind with
the same function and the same seed, so they serve the same token ids.

Half of each category is for recording acceptance (``profile``), half for replay (``run``): a
prediction is never tested on the prompts that it was fitted to.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from codesign.errors import InputError, counted
from codesign.policy.kv_memory import PREFIX_BLOCK
from codesign.policy.options import AS_THE_RUN, RequestOptions
from codesign.prompts.pool import EncodeChat, EncodedPool
from codesign.records import own_targets

if TYPE_CHECKING:
    import pandas as pd

    from codesign.models.tokenizer import Tokenizer

CATEGORIES = ("chat", "code", "mathematics", "translation", "summary", "retrieval")
SPLITS = ("profile", "run")

NO_SPECULATION = RequestOptions(speculates=False)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One shipped prompt; ``split`` is ``profile`` or ``run``."""

    id: str
    category: str
    split: str
    text: str


@dataclass(frozen=True, slots=True)
class BoundRequest:
    """A request of a trace with the tokens that stand for it.

    Attributes:
        request_id: Its number in the trace, from 0.
        arrival: Seconds since the start of the trace.
        category: Category of the prompt it got.
        prompt_ids: Token ids, chat template included.
        max_new_tokens: The trace's output length.
        slo_tpot: Its own target of seconds per token; None for the run's.
        options: How it is decoded, where that is not as the run says.
    """

    request_id: int
    arrival: float
    category: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    slo_tpot: float | None = None
    options: RequestOptions = AS_THE_RUN

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens, at least the trace's."""
        return len(self.prompt_ids)


def load_prompts(split: str | None = None) -> list[Prompt]:
    """Return the shipped prompts of a split, or all of them, in file order.

    Raises:
        InputError: If the split is unknown.
    """
    if split is not None and split not in SPLITS:
        raise InputError(f"prompt split {split!r} is unknown; there are: {', '.join(SPLITS)}")
    lines = (Path(__file__).parents[1] / "data" / "prompts.jsonl").read_text(encoding="utf-8")
    prompts = [Prompt(**json.loads(line)) for line in lines.splitlines()]
    return [prompt for prompt in prompts if split in (None, prompt.split)]


def encode_user_turn(tokenizer: Tokenizer) -> EncodeChat:
    """Return the function that writes a text as a single user's turn, ready for the answer."""
    return lambda text: tokenizer.chat([{"role": "user", "content": text}])


def bind_prompts(
    trace_requests: pd.DataFrame,
    prompts: Sequence[Prompt],
    encode_chat: EncodeChat,
    *,
    seed: int,
    max_positions: int | None = None,
) -> list[BoundRequest]:
    """Give every request of a trace real token ids.

    A request for fewer tokens than its prompt has keeps the whole prompt, as does one that has less
    than its prompt behind its last common block; ``binding_note`` says how many did.

    Args:
        trace_requests: (R,) rows with arrival (s), prompt_tokens, output_tokens, category; the
            category "" takes a prompt of any category. ``speculates`` if a request may opt out,
            ``slo_tpot`` if it may have a target of its own, ``hash_ids`` if prompts have common
            blocks.
        prompts: The pool, usually ``load_prompts("run")``.
        encode_chat: See ``EncodeChat``; called once or twice for each prompt of the pool.
        seed: Of the choice of prompts. Request r gets the same prompt whatever comes after it.
        max_positions: Positions of the model, None to skip the check.

    Returns:
        (R,) requests in trace order, each exactly as long as the trace says or longer.

    Raises:
        InputError: If the pool has no prompt of a category, or a request needs more positions
            than the model has.
    """
    pool, by_category = EncodedPool.of(prompts, encode_chat), _by_category(prompts)
    generator = np.random.default_rng(seed)
    columns = ("arrival", "prompt_tokens", "output_tokens", "category")
    blocks = _common_blocks(trace_requests) if "hash_ids" in trace_requests else None
    text = pool.block_text()
    wants = trace_requests["speculates"].tolist() if "speculates" in trace_requests else None
    targets = own_targets(trace_requests)
    bound = []
    for row, (arrival, wanted, output, category) in enumerate(
        zip(*(trace_requests[name] for name in columns), strict=True)
    ):
        choices = _of_category(category, by_category, row)
        chosen = choices[int(generator.integers(len(choices)))]
        first_filler = int(generator.integers(len(prompts)))
        start = text.behind_head(blocks[row]) if blocks else ()
        ids = pool.lengthened(
            chosen, first_filler=first_filler, num_tokens=int(wanted), start=start
        )
        category = prompts[chosen].category
        options = AS_THE_RUN if wants is None or wants[row] else NO_SPECULATION
        bound.append(
            BoundRequest(row, float(arrival), category, ids, int(output), targets[row], options)
        )
    _check_positions(bound, max_positions=max_positions)
    return bound


def _by_category(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Places in the pool; those of all prompts are under ""."""
    found = {"": list(range(len(prompts)))}
    for index, prompt in enumerate(prompts):
        found.setdefault(prompt.category, []).append(index)
    return found


def _of_category(category: str, by_category: Mapping[str, list[int]], row: int) -> list[int]:
    choices = by_category.get(category)
    if not choices:
        known = ", ".join(name for name in by_category if name)
        raise InputError(
            f"request {row} has category {category!r}, which no prompt has; there are: {known}"
        )
    return choices


def every_prompt(
    prompts: Sequence[Prompt],
    encode_chat: EncodeChat,
    *,
    lengths: Sequence[int],
    max_new_tokens: int,
    first_filler: int = 1,
) -> list[BoundRequest]:
    """Return each prompt once for each length, lengthened as ``bind_prompts`` does, all at time 0.

    Args:
        prompts: What to ask.
        encode_chat: See ``EncodeChat``.
        lengths: Prompt tokens; a prompt that is longer is kept whole.
        max_new_tokens: Of each request.
        first_filler: How many prompts further the material of each begins.
    """
    pool = EncodedPool.of(prompts, encode_chat)
    pairs = itertools.product(lengths, range(len(prompts)))
    return [
        BoundRequest(
            request_id=i,
            arrival=0.0,
            category=prompts[chosen].category,
            prompt_ids=pool.lengthened(
                chosen, first_filler=chosen + first_filler, num_tokens=length
            ),
            max_new_tokens=max_new_tokens,
        )
        for i, (length, chosen) in enumerate(pairs)
    ]


def binding_note(trace_requests: pd.DataFrame, bound: Sequence[BoundRequest]) -> str:
    """Return one line on how many requests are longer than the trace says; "" if none is."""
    wanted = trace_requests["prompt_tokens"]
    longer = [b.prompt_tokens - int(w) for b, w in zip(bound, wanted, strict=True)]
    longer = [extra for extra in longer if extra > 0]
    if not longer:
        return ""
    have = "has" if len(longer) == 1 else "have"
    return (
        f"{len(longer)} of {counted(len(bound), 'request')} {have} a longer prompt than the trace "
        "says, by "
        f"{sum(longer) / len(longer):.0f} tokens on average; prompts are not truncated"
    )


def _common_blocks(trace_requests: pd.DataFrame) -> list[list[int]]:
    """Return each request's first whole blocks, up to the last that another one has, too.

    What follows them is the request's own, so that any text will do.
    """
    pairs = zip(trace_requests["hash_ids"], trace_requests["prompt_tokens"], strict=True)
    whole = [list(ids)[: int(num_tokens) // PREFIX_BLOCK] for ids, num_tokens in pairs]
    times = Counter(itertools.chain.from_iterable(whole))
    common = [[i for i, block in enumerate(ids, start=1) if times[block] > 1] for ids in whole]
    return [ids[: last[-1] if last else 0] for ids, last in zip(whole, common, strict=True)]


def _check_positions(bound: Sequence[BoundRequest], *, max_positions: int | None) -> None:
    needs = [request.prompt_tokens + request.max_new_tokens for request in bound]
    if max_positions is None or max(needs, default=0) <= max_positions:
        return
    too_long = sum(need > max_positions for need in needs)
    raise InputError(
        f"{too_long} of {len(needs)} requests need more than the model's {max_positions:,} "
        f"positions, the longest {max(needs):,}. Plan again with --max-prompt N and --max-output N"
    )
