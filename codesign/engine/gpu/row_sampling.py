"""Requests that sample each in its own way: temperature, top-k and top-p by slot.

Used where a run has such requests; where all sample alike, ``heads.TargetHead`` has them as
constants. Both choose the tokens that ``policy/walk.py`` chooses.

Letters in shapes: S slots, T rows, V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.heads import TargetHead
from codesign.engine.gpu.step_rows import DeviceRows, Words
from codesign.kernels.keyed_sampling import gumbel_rows, needs_whole_rows, row_keys
from codesign.policy.walk import Sampling

SAMPLING_WORDS = 6  # temperature, top-k and top-p as float64


def sampling_words(sampling: Sampling) -> Words:
    """int32 words of a request's sampling."""
    values = (sampling.temperature, float(sampling.top_k), sampling.top_p)
    return np.array(values, np.float64).view(np.int32)


class RowTargetHead(TargetHead):
    """``TargetHead`` whose rows sample as the request in their slot wants.

    Args:
        num_slots: Requests at once; the slot behind them holds padding.
        device: Where forwards run.
        samplings: All ways of sampling that requests have.

    Attributes:
        slots_T: Slot of each row that is sampled next.
    """

    def __init__(self, num_slots: int, device: torch.device, samplings: Sequence[Sampling]) -> None:
        super().__init__(Sampling())
        self._has_cuts = any(map(needs_whole_rows, samplings))
        self._samplings_S3 = torch.zeros(num_slots + 1, 3, dtype=torch.float64)
        if device.type == "cuda":
            self._samplings_S3 = self._samplings_S3.pin_memory()
        self._on_device_S3 = self._samplings_S3.to(device, copy=True)
        self.slots_T = torch.zeros(1, dtype=torch.int32, device=device)

    def note(self, slot: int, words: Words) -> None:
        """A request has come to a slot."""
        self._samplings_S3[slot] = torch.from_numpy(words.view(np.float64).copy())
        self._on_device_S3.copy_(self._samplings_S3, non_blocking=True)

    def answer(self, forward: RankForward, rows: DeviceRows, hidden_TD: Tensor) -> Tensor:
        """See ``StepHead.answer``."""
        self.slots_T = rows.slots_T
        return super().answer(forward, rows, hidden_TD)

    def sample(
        self,
        forward: RankForward,
        hidden_TD: Tensor,
        key_low_T: Tensor,
        key_high_T: Tensor,
        positions_T: Tensor,
    ) -> Tensor:
        """See ``TargetHead.sample``."""
        logits_TV = forward.group.all_gather(forward.head.logits(hidden_TD))
        keys_T = row_keys(key_low_T, key_high_T, positions_T)
        samplings_T3 = self._on_device_S3[self.slots_T.long()]
        return sample_by_row(logits_TV, keys_T, samplings_T3, has_cuts=self._has_cuts)


def sample_by_row(
    logits_TV: Tensor, keys_T: Tensor, samplings_T3: Tensor, *, has_cuts: bool = True
) -> Tensor:
    """Token that each row's noise chooses, (T,) int64.

    Args:
        logits_TV: float32, of all tokens.
        keys_T: From ``keyed_sampling.row_keys``.
        samplings_T3: Temperature, top-k and top-p of each row, float64.
        has_cuts: Some rows have a top-k or top-p, for which their tokens must be ordered.
    """
    temperature_T1, top_k_T1, top_p_T1 = samplings_T3.split(1, dim=1)
    is_warm_T1 = temperature_T1 > 0
    scaled_TV = logits_TV.double() / torch.where(is_warm_T1, temperature_T1, 1.0)
    vocab = logits_TV.shape[1]
    scores_TV = scaled_TV + gumbel_rows(keys_T, vocab)
    if has_cuts:
        is_dropped_TV = _dropped(scaled_TV, top_k_T1, top_p_T1)
        scores_TV = scores_TV.masked_fill(is_dropped_TV, -torch.inf)
    return torch.where(is_warm_T1, scores_TV, logits_TV.double()).argmax(dim=-1)


def _dropped(scaled_TV: Tensor, top_k_T1: Tensor, top_p_T1: Tensor) -> Tensor:
    """Tokens outside top-k and top-p, (T, V) bool: as in ``walk.shape_logits``."""
    vocab = scaled_TV.shape[1]
    ordered_TV, order_TV = scaled_TV.sort(dim=-1, descending=True, stable=True)
    last_T1 = torch.where(top_k_T1 > 0, top_k_T1, vocab).clamp(max=vocab).long() - 1
    ordered_TV = ordered_TV.masked_fill(ordered_TV < ordered_TV.gather(1, last_T1), -torch.inf)
    probs_TV = torch.exp(ordered_TV - ordered_TV[:, :1])
    before_TV = probs_TV.cumsum(-1) - probs_TV
    is_beyond_TV = before_TV >= top_p_T1 * probs_TV.sum(-1, keepdim=True)
    is_dropped_TV = (is_beyond_TV & (top_p_T1 < 1.0)) | ordered_TV.isneginf()
    return torch.zeros_like(is_dropped_TV).scatter(1, order_TV, is_dropped_TV)
