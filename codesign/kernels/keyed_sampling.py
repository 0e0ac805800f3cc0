"""Sampling with keyed noise and the walk, on the device: codesign/policy/walk.py for many rows.

``walk.gumbel_row`` hashes (key, token) with SplitMix64; the same integers come out here, in int64
arithmetic that wraps, so noise agrees to the last bits of a logarithm. Every rank of a tensor
parallel group may sample its own part of the vocabulary: the largest of the parts' largest is the
sample, unless top-k or top-p need the whole row.

Letters in shapes: T rows, V tokens (of one rank), P longest path, W ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from codesign.kernels.cut_sampling import MOST_TOKENS, is_dropped
from codesign.kernels.row_samplings import AnySampling, RowSamplings, is_greedy, needs_whole_rows

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed 64-bit integer
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix64(x: Tensor) -> Tensor:
    """Finaliser of SplitMix64 on int64."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def row_keys(key_low_T: Tensor, key_high_T: Tensor, positions_T: Tensor) -> Tensor:
    """Noise keys of the tokens that follow the rows, (T,) int64: ``walk.noise_key``.

    Args:
        key_low_T: Low words of the requests' keys (``walk.request_key``), int32.
        key_high_T: High words.
        positions_T: Position of each row; the token after it is one further.
    """
    request_T = (key_high_T.long() << 32) | (key_low_T.long() & 0xFFFFFFFF)
    return _mix64(request_T ^ ((positions_T.long() + 1) * _GOLDEN))


def gumbel_rows(keys_T: Tensor, size: int, *, first_token: int = 0) -> Tensor:
    """Noise of tokens ``first_token`` and on, (T, size) float64: ``walk.gumbel_row``."""
    tokens = torch.arange(first_token + 1, first_token + size + 1, device=keys_T.device)
    hashed = _mix64(tokens * _GOLDEN + keys_T[:, None])
    uniform = (_shifted(hashed, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def score_rows(
    logits_TV: Tensor, keys_T: Tensor, sampling: AnySampling, *, first_token: int = 0
) -> Tensor:
    """Scores of tokens, (T, V), of which a row's sample has the largest; as in ``best_tokens``."""
    if is_greedy(sampling):
        return logits_TV
    rows, tokens = logits_TV.shape
    samplings = RowSamplings.of(sampling, rows, logits_TV.device)
    temperature_T1 = samplings.temperature_T[:, None]
    is_warm_T1 = temperature_T1 > 0
    logits_TV = logits_TV.double()
    scaled_TV = logits_TV / torch.where(is_warm_T1, temperature_T1, 1.0)
    scores_TV = scaled_TV + gumbel_rows(keys_T, tokens, first_token=first_token)
    if needs_whole_rows(sampling):
        scores_TV = scores_TV.masked_fill(is_dropped(scaled_TV, samplings), -torch.inf)
    return torch.where(is_warm_T1, scores_TV, logits_TV)


def best_tokens(
    logits_TV: Tensor, keys_T: Tensor, sampling: AnySampling, *, first_token: int = 0
) -> tuple[Tensor, Tensor]:
    """Each row's sample among these tokens, and its score, by which parts compare.

    Args:
        logits_TV: float32, of tokens ``first_token`` and on; of all for a top-k or top-p.
        keys_T: From ``row_keys``.
        sampling: Temperature 0 takes the first of the largest logits.
        first_token: Token of column 0.

    Returns:
        Scores (T,), float32 where all rows have temperature 0 and else float64, and tokens (T,)
        int64.
    """
    scores_TV = score_rows(logits_TV, keys_T, sampling, first_token=first_token)
    best_T = scores_TV.argmax(dim=-1)
    return scores_TV.gather(1, best_T[:, None])[:, 0], best_T + first_token


def sample_rows(
    logits_TV: Tensor,
    key_low_T: Tensor,
    key_high_T: Tensor,
    positions_T: Tensor,
    sampling: AnySampling,
    *,
    first_token: int = 0,
) -> tuple[Tensor, Tensor]:
    """The token that each row's noise chooses among these, and its score, by which parts compare.

    Args:
        logits_TV: As for ``best_tokens``.
        key_low_T: As for ``row_keys``.
        key_high_T: The same.
        positions_T: The same.
        sampling: As for ``best_tokens``.
        first_token: Token of column 0.

    Returns:
        Scores (T,) and tokens (T,), an integer type.
    """
    if logits_TV.is_cuda and not (needs_whole_rows(sampling) and logits_TV.shape[1] > MOST_TOKENS):
        from codesign.kernels import cut_sampling_triton, keyed_sampling_triton

        kernels = cut_sampling_triton if needs_whole_rows(sampling) else keyed_sampling_triton
        keys = key_low_T, key_high_T, positions_T
        return kernels.sample_rows(logits_TV, *keys, sampling, first_token=first_token)
    keys_T = row_keys(key_low_T, key_high_T, positions_T)
    return best_tokens(logits_TV, keys_T, sampling, first_token=first_token)


def accepted_moves(
    tokens_T: Tensor,
    sampled_T: Tensor,
    *,
    positions_T: Tensor,
    prefixes_T: Tensor,
    slots_T: Tensor,
    places_T: Tensor,
    parents_T: Tensor,
    firsts_T: Tensor,
    path_TP: Tensor,
    scratch_slot: int,
) -> Tensor:
    """Where each accepted row goes, (T, 3) int32: slab, its row there, the row behind the prefix.

    A row that is not accepted moves to where it is, in the scratch slab: to no effect.

    Args:
        tokens_T: As for ``accepted_rows``, and so ``sampled_T`` and others of the same names.
        sampled_T: See there.
        positions_T: Position of each row, which is the slab row of an accepted one.
        prefixes_T: Slab rows before its tree.
        slots_T: Slab of each row.
        places_T: Slab row that it is in.
        parents_T: See there.
        firsts_T: See there.
        path_TP: See there.
        scratch_slot: Slab of padding rows, which no request owns.
    """
    if tokens_T.is_cuda:
        from codesign.kernels import keyed_sampling_triton

        columns = (tokens_T, sampled_T, positions_T, prefixes_T, slots_T, places_T)
        columns += (parents_T, firsts_T)
        return keyed_sampling_triton.accepted_moves(columns, path_TP, scratch_slot)
    accepted_T = accepted_rows(
        tokens_T,
        sampled_T,
        parents_T=parents_T,
        firsts_T=firsts_T,
        path_TP=path_TP,
        depths_T=positions_T - prefixes_T,
    )
    return torch.stack(
        (
            torch.where(accepted_T, slots_T, scratch_slot),
            torch.where(accepted_T, places_T, 0),
            torch.where(accepted_T, positions_T, 0),
        ),
        dim=1,
    )


def accepted_rows(
    tokens_T: Tensor,
    sampled_T: Tensor,
    *,
    parents_T: Tensor,
    firsts_T: Tensor,
    path_TP: Tensor,
    depths_T: Tensor,
) -> Tensor:
    """Rows on the accepted paths, (T,) bool: those whose whole path was sampled.

    Siblings are distinct, so one path of each tree remains. Stop tokens and limits are not looked
    at: they end the request, whose rows are not read again.

    Args:
        tokens_T: Candidate of each row.
        sampled_T: Token that the target emits after each row.
        parents_T: Row of the parent, -1 for a root.
        firsts_T: Row of the request's root.
        path_TP: Path of each row, counted from its root's row, itself last.
        depths_T: Depth of each row.
    """
    matches_T = (parents_T < 0) | (sampled_T[parents_T.long().clamp(min=0)] == tokens_T)
    steps = torch.arange(path_TP.shape[1], device=path_TP.device)
    beyond_TP = steps > depths_T[:, None]
    rows_TP = (firsts_T[:, None] + path_TP).long().masked_fill(beyond_TP, 0)
    return (matches_T[rows_TP] | beyond_TP).all(dim=1)
