"""What follows a forward on the device: the target samples and walks, the draft ranks its choices.

Both end in a few int32 words for the host. With tensor parallelism every rank computes the same
answer from small gathered parts, so that every rank can move its own key and value rows.

Letters in shapes: T rows, D hidden size, v head rows of the rank, W ranks, K choices.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.slabs import Slabs
from codesign.engine.gpu.step_rows import DeviceRows
from codesign.kernels.keyed_sampling import accepted_rows, best_tokens, needs_whole_rows, row_keys
from codesign.policy.walk import Sampling


class StepHead(Protocol):
    """The end of a step."""

    def words(self, rows: int) -> int:
        """int32 words of the answer for a bucket."""
        ...

    def finish(
        self, forward: RankForward, rows: DeviceRows, slabs: Slabs, hidden_TD: Tensor
    ) -> Tensor:
        """The answer, flat int32, on the device."""
        ...


class TargetHead:
    """Sample every row with keyed noise, walk, and move accepted rows behind the prefix.

    The walk knows no stop tokens and no limits: where they end a request, its slab is freed.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def words(self, rows: int) -> int:
        """One token a row."""
        return rows

    def finish(
        self, forward: RankForward, rows: DeviceRows, slabs: Slabs, hidden_TD: Tensor
    ) -> Tensor:
        """See ``StepHead.finish``."""
        keys_T = row_keys(rows.key_low_T, rows.key_high_T, rows.positions_T)
        sampled_T = self.sample(forward, hidden_TD, keys_T)
        depths_T = rows.positions_T - rows.prefixes_T
        accepted_T = accepted_rows(
            rows.tokens_T,
            sampled_T,
            parents_T=rows.parents_T,
            firsts_T=rows.firsts_T,
            path_TP=rows.path_TP,
            depths_T=depths_T,
        )
        # A row that is not accepted moves to where it is, in the scratch slab: to no effect.
        place_T = torch.where(accepted_T, rows.kv_rows_T, 0)
        slot_T = torch.where(accepted_T, rows.slots_T, slabs.scratch_slot)
        target_T = torch.where(accepted_T, rows.positions_T, 0)
        moves_T3 = torch.stack((slot_T, place_T, target_T), dim=1)
        num_moves_1 = torch.full_like(slot_T[:1], slot_T.shape[0])
        slabs.move(moves_T3, num_moves_1)
        return sampled_T.to(torch.int32)

    def sample(self, forward: RankForward, hidden_TD: Tensor, keys_T: Tensor) -> Tensor:
        """Token that the target emits after each row, (T,) int64."""
        logits_Tv = forward.logits(hidden_TD)
        if needs_whole_rows(self._sampling):
            whole_TV = forward.group.all_gather(logits_Tv)
            return best_tokens(whole_TV, keys_T, self._sampling)[1]
        scores_T, tokens_T = best_tokens(
            logits_Tv, keys_T, self._sampling, first_token=forward.first_token
        )
        scores_TW = forward.group.all_gather(scores_T[:, None])
        tokens_TW = forward.group.all_gather(tokens_T[:, None])
        return tokens_TW.gather(1, scores_TW.argmax(dim=1, keepdim=True))[:, 0]


class DraftHead:
    """The likeliest ``choices`` tokens after every row, with natural log probabilities."""

    def __init__(self, choices: int) -> None:
        self.choices = choices

    def words(self, rows: int) -> int:
        """Tokens, then the bits of their log probabilities."""
        return 2 * rows * self.choices

    def finish(
        self, forward: RankForward, rows: DeviceRows, slabs: Slabs, hidden_TD: Tensor
    ) -> Tensor:
        """See ``StepHead.finish``."""
        gather = forward.group.all_gather
        logits_Tv = forward.logits(hidden_TD)
        total_TW = gather(torch.logsumexp(logits_Tv, dim=-1, keepdim=True))
        own = logits_Tv.topk(min(self.choices, logits_Tv.shape[-1]), dim=-1)
        best = gather(own.values).topk(self.choices, dim=-1)
        tokens_TK = gather(own.indices + forward.first_token).gather(1, best.indices)
        if forward.token_map is not None:
            tokens_TK = forward.token_map[tokens_TK]
        log_probs_TK = best.values - torch.logsumexp(total_TW, dim=-1, keepdim=True)
        bits_TK = log_probs_TK.contiguous().view(torch.int32)
        return torch.cat((tokens_TK.to(torch.int32).flatten(), bits_TK.flatten()))
