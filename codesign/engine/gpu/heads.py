"""What follows a forward on the device: the target samples and walks, the draft ranks its choices.

Both end in a few words for the host. With tensor parallelism every rank computes the same answer
from small gathered parts, so that every rank can move its own key and value rows; it does so when
the answer is on its way.

Letters in shapes: T rows, D hidden size, v head rows of the rank, W ranks, K choices.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.slabs import Slabs
from codesign.engine.gpu.step_rows import DeviceRows
from codesign.kernels.keyed_sampling import accepted_moves, sample_rows
from codesign.kernels.leaf_choices import chosen_words
from codesign.kernels.row_choices import choice_words, row_choices, words_of
from codesign.kernels.row_samplings import AnySampling, needs_whole_rows
from codesign.policy.walk import Sampling


class StepHead(Protocol):
    """The end of a step."""

    def words(self, rows: int) -> int:
        """Words of the answer for a bucket."""
        ...

    def answer(self, forward: RankForward, rows: DeviceRows, hidden_TD: Tensor) -> Tensor:
        """The answer, flat integers that fit int32, on the device.

        Args:
            forward: That made the hidden states, with its head and its group.
            rows: The step's message.
            hidden_TD: Last hidden states.
        """
        ...

    def keep(self, rows: DeviceRows, answer: Tensor, slabs: Slabs) -> None:
        """Move the keys and values that the answer keeps."""
        ...


class TargetHead:
    """Sample every row with keyed noise, walk, and move accepted rows behind the prefix.

    The walk knows no stop tokens and no limits: where they end a request, its slab is freed.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._counts: dict[int, Tensor] = {}

    def words(self, rows: int) -> int:
        """One token a row."""
        return rows

    def answer(self, forward: RankForward, rows: DeviceRows, hidden_TD: Tensor) -> Tensor:
        """See ``StepHead.answer``."""
        return self.sample(forward, hidden_TD, rows.key_low_T, rows.key_high_T, rows.positions_T)

    def keep(self, rows: DeviceRows, answer: Tensor, slabs: Slabs) -> None:
        """See ``StepHead.keep``."""
        moves_T3 = accepted_moves(
            rows.tokens_T,
            answer,
            positions_T=rows.positions_T,
            prefixes_T=rows.prefixes_T,
            slots_T=rows.slots_T,
            places_T=rows.kv_rows_T,
            parents_T=rows.parents_T,
            firsts_T=rows.firsts_T,
            path_TP=rows.path_TP,
            scratch_slot=slabs.scratch_slot,
        )
        slabs.move(moves_T3, self._count(moves_T3))

    def _count(self, moves_T3: Tensor) -> Tensor:
        """How many moves there are, on the device; made once."""
        rows = moves_T3.shape[0]
        if rows not in self._counts:
            self._counts[rows] = torch.full((1,), rows, dtype=torch.int32, device=moves_T3.device)
        return self._counts[rows]

    def sampling_of_rows(self) -> AnySampling:
        """How the rows that are next sample."""
        return self._sampling

    def sample(
        self,
        forward: RankForward,
        hidden_TD: Tensor,
        key_low_T: Tensor,
        key_high_T: Tensor,
        positions_T: Tensor,
    ) -> Tensor:
        """Token that the target emits after each row, (T,), an integer type."""
        keys, sampling = (key_low_T, key_high_T, positions_T), self.sampling_of_rows()
        if needs_whole_rows(sampling):
            whole_TV = forward.group.all_gather(forward.head.logits(hidden_TD))
            return sample_rows(whole_TV, *keys, sampling)[1]
        scores_T, tokens_T = forward.head.sample_rows(hidden_TD, keys, sampling)
        if forward.group.size == 1:
            return tokens_T
        # Tokens are exact in float64, as are the scores: one collective for both.
        best_TW2 = forward.group.all_gather(
            torch.stack((scores_T.double(), tokens_T.double()), dim=1)
        ).unflatten(1, (-1, 2))
        first_T1 = best_TW2[..., 0].argmax(dim=1, keepdim=True)
        return best_TW2[..., 1].gather(1, first_T1)[:, 0].long()


class DraftHead:
    """The likeliest ``choices`` tokens after every row, with natural log probabilities.

    An answer stays on the device for a step that chooses its rows from it (run_ahead.py).
    """

    def __init__(self, choices: int) -> None:
        self.choices = choices
        self._answers: dict[int, Tensor] = {}

    def room(self, rows: int, device: torch.device) -> Tensor:
        """Where a bucket's answer lies, int32, and behind it ``chosen_words`` of the next step."""
        if rows not in self._answers:
            words = self.words(rows) + chosen_words(rows)
            self._answers[rows] = torch.zeros(words, dtype=torch.int32, device=device)
        return self._answers[rows]

    def words(self, rows: int) -> int:
        """Tokens, then the bits of their log probabilities."""
        return 2 * rows * self.choices

    def keep(self, rows: DeviceRows, answer: Tensor, slabs: Slabs) -> None:
        """Rows stay where they are until the host knows the verdict."""

    def answer(self, forward: RankForward, rows: DeviceRows, hidden_TD: Tensor) -> Tensor:
        """See ``StepHead.answer``."""
        logits_Tv = forward.head.coarse_logits(hidden_TD)
        num_rows = logits_Tv.shape[0]
        into = self.room(num_rows, logits_Tv.device)[: self.words(num_rows)]
        if forward.group.size == 1:
            return choice_words(
                logits_Tv, self.choices, token_map=forward.head.token_map, into=into
            )
        own = min(self.choices, logits_Tv.shape[1])
        values_Tk, columns_Tk, total_T = row_choices(logits_Tv, own)
        # Tokens are exact in float64, as are the logits: one collective for all.
        parts = values_Tk, columns_Tk + forward.head.first_token, total_T[:, None]
        gathered = forward.group.all_gather(torch.cat([part.double() for part in parts], dim=1))
        all_TWn = gathered.unflatten(1, (-1, 2 * own + 1))
        values_TK, places_TK = all_TWn[..., :own].flatten(1).topk(self.choices, dim=1)
        tokens_TK = all_TWn[..., own:-1].flatten(1).gather(1, places_TK).long()
        total_T = torch.logsumexp(all_TWn[..., -1], dim=1)
        values_TK, total_T = values_TK.float(), total_T.float()
        return words_of(values_TK, tokens_TK, total_T, forward.head.token_map, into=into)
