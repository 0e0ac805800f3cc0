"""Acceptance on real text: plain decoding with the target, then the draft's opinion of every token.

The target's tokens come from the engine itself. The draft sees prompt and output in one causal
forward per request: its prediction at each position is the one it would make in a run that had
come so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

from codesign import Progress
from codesign.acceptance import ABSENT_LOG_PROB
from codesign.candidate import Candidate
from codesign.config import Deployment
from codesign.engine.drafter import NgramDrafter
from codesign.engine.kv_cache import KVCache
from codesign.engine.model import Decoder
from codesign.engine.rows import causal_rows
from codesign.engine.run import run_candidate
from codesign.errors import InputError
from codesign.fit.shipped import shipped_acceptance
from codesign.models import resolve_model
from codesign.models.recipe import read_recipe
from codesign.models.shape import model_shape
from codesign.models.tokenizer import Tokenizer
from codesign.policy.protocol import ExpansionRows
from codesign.policy.speculation import SpeculationSpec
from codesign.policy.walk import Sampling
from codesign.profiler.store import ProfileSettings
from codesign.prompts import BoundRequest, encode_user_turn, every_prompt, load_prompts

TOP_K = 16  # ranks that are kept
MAX_BATCH = 8

# Tokens recorded after prompts of each length; no prompt is cut, so 1 is its own length. Agreement
# grows along an answer (answer_parts.py), so that some are long.
OUTPUT_TOKENS = {1: 192, 128: 48, 256: 48}
QUICK_TOKENS = {1: 128}

Ranked = tuple[list[int], list[float]]  # tokens and log probabilities, likeliest first


def record_acceptance(
    requests: Sequence[BoundRequest],
    *,
    target: Decoder,
    draft: Decoder | None,
    sampling: Sampling,
    num_workers: int,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Decode the requests without speculation and rank every emitted token.

    Args:
        requests: Prompts, and how many tokens to emit after each; stop tokens are ignored.
        target: The target.
        draft: The draft model; None for n-grams.
        sampling: How the target samples, keyed as in any run.
        num_workers: CPU threads of the target.
        progress: Passed on to the engine.

    Returns:
        One row per emitted token: request, category, position in the output, rank of the token
        among the draft's likeliest (-1 when it is not there), their log probabilities.

    Raises:
        KeyboardInterrupt: If decoding was interrupted.
    """
    run = run_candidate(
        Candidate(Deployment(num_workers), SpeculationSpec(), MAX_BATCH),
        requests,
        target=target,
        draft=None,
        sampling=sampling,
        max_kv_tokens=sum(len(r.prompt_ids) + r.max_new_tokens + 1 for r in requests),
        progress=progress,
    )
    return ranked_tokens(
        requests, run.outputs, lambda request, output: _predictions(request, output, draft)
    )


def ranked_tokens(
    requests: Sequence[BoundRequest],
    outputs: Mapping[int, Sequence[int]],
    predictions: Callable[[BoundRequest, Sequence[int]], Iterator[Ranked]],
) -> pd.DataFrame:
    """Rank every emitted token among what a draft expected; see ``record_acceptance``.

    Args:
        requests: As they were decoded.
        outputs: Tokens of each.
        predictions: The draft's likeliest tokens at each position of an output.

    Raises:
        KeyboardInterrupt: If an output is not whole: decoding was interrupted.
    """
    if any(len(outputs[r.request_id]) < r.max_new_tokens for r in requests):
        raise KeyboardInterrupt
    parts = []
    for request in requests:
        output = outputs[request.request_id]
        ranked = list(predictions(request, output))
        parts.append(
            pd.DataFrame(
                {
                    "request": request.request_id,
                    "category": request.category,
                    "position": range(len(output)),
                    "rank": [
                        tokens.index(token) if token in tokens else -1
                        for token, (tokens, _) in zip(output, ranked, strict=True)
                    ],
                    "log_probs": [log_probs for _, log_probs in ranked],
                }
            )
        )
    return pd.concat(parts, ignore_index=True).astype({"rank": "int8"})


def pair_positions(target: Path, draft: Path | str) -> int:
    """Positions that both models of a pair have.

    Args:
        target: Its directory.
        draft: The same, or NGRAM.

    Raises:
        InputError: If the draft was made for a target of other tokens.
    """
    positions = model_shape(target).max_positions
    if not isinstance(draft, Path):
        return positions
    ours, theirs = _num_tokens(target), _num_tokens(draft)
    if ours != theirs:
        raise InputError(
            f"the draft has {theirs:,} tokens, its target {ours:,}: it was made for another "
            "target. Choose another: codesign models list, or --draft ngram"
        )
    return min(positions, model_shape(draft).max_positions)


def _num_tokens(directory: Path) -> int:
    """An inflated model's head has the tokens of the small one inside; others stand for none."""
    recipe = read_recipe(directory)
    return model_shape(directory if recipe is None else resolve_model(recipe.source)).vocab


def recorded_requests(
    target: Path, positions: int, *, is_quick: bool
) -> tuple[list[BoundRequest], list[str]]:
    """Each prompt of the profile's half as it is, and in a full profile also in longer contexts.

    Returns:
        Those that fit, and a note if some do not.

    Raises:
        InputError: If none does.
    """
    prompts, wanted = load_prompts("profile"), QUICK_TOKENS if is_quick else OUTPUT_TOKENS
    bound = every_prompt(
        prompts, encode_user_turn(Tokenizer(target)), lengths=tuple(wanted), max_new_tokens=0
    )
    tokens = [count for count in wanted.values() for _ in prompts]  # length after length
    bound = [replace(r, max_new_tokens=n) for r, n in zip(bound, tokens, strict=True)]
    short = [r for r in bound if len(r.prompt_ids) + r.max_new_tokens <= positions]
    if not short:
        raise InputError(
            f"{target.name} has {positions} positions, fewer than the shortest prompt needs. "
            "Choose another target: codesign models list"
        )
    missing = len(bound) - len(short)
    note = f"{missing} of {len(bound)} prompts do not fit {positions} positions"
    return short, [note] if missing else []


def shipped_frame(settings: ProfileSettings, notes: list[str]) -> pd.DataFrame | None:
    """What the package has recorded of a pair, if a quick profile may take it; says so."""
    if not settings.is_quick:
        return None
    shipped = shipped_acceptance(settings.target, settings.draft, settings.sampling)
    if shipped is not None:
        notes.append(
            f"acceptance: {len(shipped):,} tokens that ship with the package, as they do "
            "not depend on the machine; to record again: the same command without --quick"
        )
    return shipped


def _predictions(
    request: BoundRequest, output: Sequence[int], draft: Decoder | None
) -> Iterator[Ranked]:
    """What the draft expects at each position of the output, given everything before it."""
    if draft is None:
        return ngram_predictions(request, output)
    return _model_predictions(request, output, draft)


@torch.inference_mode()
def _model_predictions(
    request: BoundRequest, output: Sequence[int], draft: Decoder
) -> Iterator[Ranked]:
    path = [*request.prompt_ids, *output[:-1]]
    cache = KVCache(draft.shape, num_slots=1, max_tokens=len(path))
    hidden_TD = draft.forward(causal_rows(cache.take(), path), cache)
    logits_LV = draft.logits(hidden_TD[len(request.prompt_ids) - 1 :])
    best = torch.log_softmax(logits_LV, dim=-1).topk(min(TOP_K, logits_LV.shape[-1]), dim=-1)
    tokens_LK = best.indices if draft.token_map is None else draft.token_map[best.indices]
    return iter(list(zip(tokens_LK.tolist(), best.values.tolist(), strict=True)))


def ngram_predictions(request: BoundRequest, output: Sequence[int]) -> Iterator[Ranked]:
    """The n-gram drafter along the path; what it leaves open is padded with absent tokens."""
    drafter = NgramDrafter()
    new: tuple[int, ...] = request.prompt_ids
    context = 0
    for token in output:
        rows = ExpansionRows(
            request_id=request.request_id,
            tokens=new,
            positions=tuple(range(context, context + len(new))),
            nodes=(0,),
            visible=None,
            context=context,
        )
        [(tokens, log_probs)] = drafter.forward([rows], TOP_K)
        missing = TOP_K - len(tokens[0])
        yield tokens[0], log_probs[0] + [ABSENT_LOG_PROB] * missing
        context += len(new)
        new = (token,)
