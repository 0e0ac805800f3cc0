"""A rank's rows of a model's head: logits, and the tokens that they lead to.

On a GPU a bf16 head is read as int8 codes (kernels/head_codes.py) where that serves.

Letters in shapes: T rows, D hidden size, v head rows of the rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from codesign.engine.rank_weights import EndWeights
from codesign.kernels import head_codes, keyed_sampling
from codesign.kernels.head_codes import MOST_ROWS, HeadCodes
from codesign.kernels.packed_linear import logits_map
from codesign.kernels.row_samplings import AnySampling


class RankHead:
    """The head's part on one rank.

    Args:
        ends: Of this rank.
        coded: Read it as int8 codes, if the kernels run it.

    Attributes:
        first_token: Head row of the whole model that logit 0 of this rank stands for.
        token_map: Head row of the whole model -> token, or None if they are the same.
    """

    def __init__(self, ends: EndWeights, *, coded: bool) -> None:
        head = ends.decoding_head()
        self._map = logits_map(head)
        self._codes = HeadCodes.of(head) if coded and head_codes.takes(head) else None
        self._num_real = ends.num_real
        self.first_token = ends.head_start
        self.token_map = ends.token_map

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Float32 logits, (T, v); -inf where a row stands for no token."""
        return self._real(self._map(hidden_TD))

    def coarse_logits(self, hidden_TD: Tensor) -> Tensor:
        """The same for a draft, whose logits may be those of the codes."""
        codes = self._codes_for(hidden_TD)
        if codes is None:
            return self.logits(hidden_TD)
        return self._real(head_codes.coarse_logits(codes, hidden_TD))

    def _codes_for(self, hidden_TD: Tensor) -> HeadCodes | None:
        return self._codes if len(hidden_TD) <= MOST_ROWS else None

    def _real(self, logits_Tv: Tensor) -> Tensor:
        logits_Tv[:, self._num_real :] = -torch.inf
        return logits_Tv

    def sample_rows(
        self, hidden_TD: Tensor, keys: tuple[Tensor, Tensor, Tensor], sampling: AnySampling
    ) -> tuple[Tensor, Tensor]:
        """``keyed_sampling.sample_rows`` of the logits: scores and tokens, (T,) each.

        Args:
            hidden_TD: Last hidden states.
            keys: What noise depends on, as for ``keyed_sampling.row_keys``.
            sampling: Without top-k and top-p.
        """
        first, codes = self.first_token, self._codes_for(hidden_TD)
        if codes is None:
            logits_Tv = self.logits(hidden_TD)
            return keyed_sampling.sample_rows(logits_Tv, *keys, sampling, first_token=first)
        return head_codes.sample_rows(
            codes, hidden_TD, *keys, sampling, num_tokens=self._num_real, first_token=first
        )
