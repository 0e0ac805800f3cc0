"""How rows sample: all alike, or each in its own way.

Letters in shapes: T rows, 1 where a column stands beside rows of tokens.

Imports torch and nothing of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from codesign.policy.walk import Sampling


@dataclass(frozen=True, slots=True)
class RowSamplings:
    """How each row samples; as ``Sampling``, whose seed is in the rows' keys.

    What some rows have is known before their numbers are, so that kernels are launched or not.

    Attributes:
        temperature_T: float64, as top_k_T and top_p_T.
        top_k_T: Whole numbers.
        top_p_T: See ``Sampling.top_p``.
        has_top_k: Some rows may have a top-k; else none is looked at.
        has_top_p: The same of a top-p.
    """

    temperature_T: Tensor
    top_k_T: Tensor
    top_p_T: Tensor
    has_top_k: bool = True
    has_top_p: bool = True

    @classmethod
    def of(cls, sampling: AnySampling, rows: int, device: torch.device) -> RowSamplings:
        """The same for each of ``rows`` rows, if it is not by row already."""
        if isinstance(sampling, RowSamplings):
            return sampling
        numbers = sampling.temperature, float(sampling.top_k), sampling.top_p
        whole = [torch.full((rows,), x, dtype=torch.float64, device=device) for x in numbers]
        return cls(*whole, has_top_k=has_top_k(sampling), has_top_p=has_top_p(sampling))


AnySampling = Sampling | RowSamplings


def has_top_k(sampling: AnySampling) -> bool:
    """Whether a top-k cuts some row."""
    if isinstance(sampling, RowSamplings):
        return sampling.has_top_k
    return sampling.temperature > 0 and sampling.top_k > 0


def has_top_p(sampling: AnySampling) -> bool:
    """Whether a top-p does."""
    if isinstance(sampling, RowSamplings):
        return sampling.has_top_p
    return sampling.temperature > 0 and sampling.top_p < 1.0


def needs_whole_rows(sampling: AnySampling) -> bool:
    """Whether a sample cannot be taken from the parts of a vocabulary one by one."""
    return has_top_k(sampling) or has_top_p(sampling)


def is_greedy(sampling: AnySampling) -> bool:
    """Whether all rows are known to take the largest logit."""
    return isinstance(sampling, Sampling) and sampling.temperature == 0
