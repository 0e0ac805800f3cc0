"""A head read in half the bytes whose samples are those of the whole head.

A step samples one token a row, the one of the largest score. The head's int8 copy gives every
logit to within a bound that follows from the copy's rounding and the hidden row's length
(Cauchy-Schwarz); only tokens whose upper end reaches the best lower end can be that one. Those
few, the open tokens, are multiplied again from the bf16 head. No approximation is left: whichever
token the whole head would choose is open, and among open tokens scores are the whole head's.

Lengths are float32 numbers, as are their squares: entries between 1e-19 and 1e19, where those of
normed rows lie, have bounds that hold.

A logit here is the float32 sum over a row's products in one fixed order, whatever else is open
and however many rows there are. ``torch.mm`` adds in other orders, to differences of 1e-6.

Letters in shapes: T rows, D hidden size, V tokens (of one rank), R of them at once, U groups of C
columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from codesign.kernels.keyed_sampling import best_tokens, row_keys, score_rows
from codesign.kernels.row_samplings import AnySampling

MOST_ROWS = 64  # the kernels hold so many at once
MOST_CODE = 127
GROUP = 256  # columns of the head that share a scale
ROW_CODES = 127 * 256  # a hidden row in two planes of int8: 256 high + low
# Of the product of lengths: what float32 sums lose, of the kernels' blocks and of anyone's
# orders of up to 128 additions in a row.
SLACK = 2.0**-16
GROWTH = 1 + 2.0**-16  # of lengths, against the rounding of their own sums
_ROWS_AT_ONCE = 4096  # of the head, while its codes are made


def takes(head: object) -> TypeGuard[Tensor]:
    """Whether the kernels run this head where it lies."""
    return (
        isinstance(head, Tensor)
        and head.is_cuda
        and head.dtype == torch.bfloat16
        and head.shape[1] % 16 == 0
        and head.is_contiguous()
        and torch.cuda.get_device_capability(head.device)[0] >= 8
    )


@dataclass(frozen=True, slots=True)
class HeadCodes:
    """A head and its int8 copy.

    Attributes:
        head_VD: bfloat16.
        codes_VD: int8; a weight is about its code times the scale of its group.
        scales_UV: float32, of each row's ``GROUP`` columns in a row, the last maybe fewer.
        lengths_2V: float32: of what a row's codes leave out, with slack; of what they hold.
    """

    head_VD: Tensor
    codes_VD: Tensor
    scales_UV: Tensor
    lengths_2V: Tensor

    @classmethod
    def of(cls, head_VD: Tensor) -> HeadCodes:
        """Round a head to int8."""
        tokens, hidden = head_VD.shape
        groups, device = -(-hidden // GROUP), head_VD.device
        codes_VD = torch.empty_like(head_VD, dtype=torch.int8)
        scales_UV = torch.empty(groups, tokens, dtype=torch.float32, device=device)
        lengths_2V = torch.empty(2, tokens, dtype=torch.float32, device=device)
        for first in range(0, tokens, _ROWS_AT_ONCE):
            part = slice(first, first + _ROWS_AT_ONCE)
            whole_RD = F.pad(head_VD[part].float(), (0, groups * GROUP - hidden))
            whole_RUC = whole_RD.unflatten(1, (groups, GROUP))
            scale_RU1 = whole_RUC.abs().amax(dim=2, keepdim=True) / MOST_CODE
            scale_RU1 = torch.where(scale_RU1 > 0, scale_RU1, 1.0)
            code_RUC = torch.round(whole_RUC / scale_RU1)
            codes_VD[part] = code_RUC.flatten(1)[:, :hidden].to(torch.int8)
            scales_UV[:, part] = scale_RU1[..., 0].t()
            held_RD = (code_RUC.double() * scale_RU1.double()).flatten(1)
            whole_RD = whole_RD.double()
            lost_R = (whole_RD - held_RD).norm(dim=1) + SLACK * whole_RD.norm(dim=1)
            lengths_2V[:, part] = torch.stack((lost_R, held_RD.norm(dim=1))).float() * GROWTH
        return cls(head_VD, codes_VD, scales_UV, lengths_2V)


@dataclass(frozen=True, slots=True)
class RowCodes:
    """Hidden rows as the int8 product takes them.

    Attributes:
        planes_T2D: int8: high and low part.
        rows_T3: float32: scale; length of a row; length of what its codes leave out.
    """

    planes_T2D: Tensor
    rows_T3: Tensor

    @classmethod
    def of(cls, x_TD: Tensor) -> RowCodes:
        """Round hidden rows to 15 bits and a sign."""
        x_TD = x_TD.float()
        scale_T = x_TD.abs().amax(dim=1) / ROW_CODES
        scale_T = torch.where(scale_T > 0, scale_T, 1.0)
        whole_TD = torch.round(x_TD / scale_T[:, None]).clamp(-ROW_CODES, ROW_CODES)
        high_TD = torch.floor((whole_TD + 128) / 256)
        planes_T2D = torch.stack((high_TD, whole_TD - 256 * high_TD), dim=1).to(torch.int8)
        lost_T = (x_TD - whole_TD * scale_T[:, None]).norm(dim=1)
        lengths = x_TD.norm(dim=1) * GROWTH, lost_T * GROWTH
        return cls(planes_T2D, torch.stack((scale_T, *lengths), dim=1))


def coarse_logits(codes: HeadCodes, x_TD: Tensor) -> Tensor:
    """Logits from the codes alone, (T, V) float32; for a draft, whose choices need not be exact."""
    if x_TD.is_cuda:
        from codesign.kernels import head_codes_triton

        return head_codes_triton.coarse_logits(codes, x_TD)[0]
    return coarse_and_bounds(codes, RowCodes.of(x_TD))[0]


def coarse_and_bounds(codes: HeadCodes, x: RowCodes) -> tuple[Tensor, Tensor]:
    """Logits from the codes, (T, V) float32, and how far each may be from the head's own."""
    high_TD, low_TD = x.planes_T2D.double().unbind(1)
    scales_VD = codes.scales_UV.double().t().repeat_interleave(GROUP, dim=1)
    held_VD = codes.codes_VD * scales_VD[:, : codes.codes_VD.shape[1]]
    coarse_TV = ((256 * high_TD + low_TD) @ held_VD.t()).float() * x.rows_T3[:, :1]
    lost_V, length_V = codes.lengths_2V
    lost_TV = x.rows_T3[:, 1:2] * lost_V + x.rows_T3[:, 2:] * length_V
    return coarse_TV, lost_TV


def sample_rows(
    codes: HeadCodes,
    x_TD: Tensor,
    key_low_T: Tensor,
    key_high_T: Tensor,
    positions_T: Tensor,
    sampling: AnySampling,
    *,
    num_tokens: int | None = None,
    first_token: int = 0,
) -> tuple[Tensor, Tensor]:
    """``keyed_sampling.sample_rows`` of the head's logits of hidden rows.

    Args:
        codes: The head.
        x_TD: bfloat16, up to ``MOST_ROWS`` rows.
        key_low_T: As for ``keyed_sampling.row_keys``.
        key_high_T: The same.
        positions_T: The same.
        sampling: Without top-k and top-p, which need whole rows of logits.
        num_tokens: Rows of the head that stand for tokens, the first; None for all.
        first_token: Token of the head's first row.

    Returns:
        Scores (T,) and tokens (T,), an integer type.
    """
    keys = key_low_T, key_high_T, positions_T
    num_tokens = len(codes.head_VD) if num_tokens is None else num_tokens
    if x_TD.is_cuda:
        from codesign.kernels import head_codes_triton

        return head_codes_triton.sample_rows(
            codes,
            x_TD,
            *keys,
            sampling,
            num_tokens=num_tokens,
            first_token=first_token,
        )
    keys_T = row_keys(*keys)
    coarse_TV, lost_TV = coarse_and_bounds(codes, RowCodes.of(x_TD))
    coarse_TV[:, num_tokens:] = -torch.inf
    score = partial(score_rows, keys_T=keys_T, sampling=sampling, first_token=first_token)
    best_T1 = score(coarse_TV - lost_TV).amax(dim=1, keepdim=True)
    is_open_TV = score(coarse_TV + lost_TV) >= best_T1
    is_open_TV[:, num_tokens:] = False
    logits_TV = (x_TD.float() @ codes.head_VD.float().t()).masked_fill(~is_open_TV, -torch.inf)
    return best_tokens(logits_TV, keys_T, sampling, first_token=first_token)
