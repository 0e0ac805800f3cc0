"""Requests that sample each in its own way: temperature, top-k and top-p by slot.

Used where a run has such requests; where all sample alike, ``heads.TargetHead`` has them as
constants. Both choose the tokens that ``policy/walk.py`` chooses.

Letters in shapes: S slots, T rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.heads import TargetHead
from codesign.engine.gpu.step_rows import DeviceRows, Words
from codesign.kernels.row_samplings import RowSamplings, has_top_k, has_top_p
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
        self._has_top_k = any(map(has_top_k, samplings))
        self._has_top_p = any(map(has_top_p, samplings))
        self._numbers_3S = torch.zeros(3, num_slots + 1, dtype=torch.float64)
        if device.type == "cuda":
            self._numbers_3S = self._numbers_3S.pin_memory()
        self._on_device_3S = self._numbers_3S.to(device, copy=True)
        self.slots_T = torch.zeros(1, dtype=torch.int32, device=device)

    def note(self, slot: int, words: Words) -> None:
        """A request has come to a slot."""
        self._numbers_3S[:, slot] = torch.from_numpy(words.view(np.float64).copy())
        self._on_device_3S.copy_(self._numbers_3S, non_blocking=True)

    def answer(self, forward: RankForward, rows: DeviceRows, hidden_TD: Tensor) -> Tensor:
        """See ``StepHead.answer``."""
        self.slots_T = rows.slots_T
        return super().answer(forward, rows, hidden_TD)

    def sampling_of_rows(self) -> RowSamplings:
        """See ``TargetHead.sampling_of_rows``."""
        numbers_3T = self._on_device_3S.index_select(1, self.slots_T)
        return RowSamplings(*numbers_3T, has_top_k=self._has_top_k, has_top_p=self._has_top_p)
