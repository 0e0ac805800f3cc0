"""Attention of other projects over the same slabs: FlashInfer, FlashAttention-3, flex_attention.

``bench_attention --peers`` compares each with float64 and times it. All attend rotated queries over
keys that are in place; rotation and KV write, part of our launch, are extra there. FlashInfer's
decoding kernel takes no mask and no slab with room behind its rows, so it is not here.
FlashAttention-3 takes no mask but the causal one; it comes as the package ``fa3-fwd``.

Letters in shapes: T rows, S keys that rows may see, H query heads, G key/value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Call = Callable[[int], Tensor]


class Slabs(Protocol):
    """What is attended.

    Attributes:
        q_THE: Rotated queries, bfloat16.
        mask_TS: Which keys each row sees.
    """

    q_THE: Tensor
    mask_TS: Tensor

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, (1, G, M, E) each, M at least S."""
        ...


def expected_attention(slabs: Slabs, mask_TS: Tensor | None) -> Tensor:
    """Return attention over the first layer in float64, (T, H, E)."""
    keys_GSE, values_GSE = (t[0, :, : slabs.mask_TS.shape[1]].double() for t in slabs.layer(0))
    q_TGRE = slabs.q_THE.double().unflatten(1, (keys_GSE.shape[0], -1))
    scores = torch.einsum("tgre,gse->tgrs", q_TGRE, keys_GSE) * q_TGRE.shape[-1] ** -0.5
    if mask_TS is not None:
        scores = scores.masked_fill(~mask_TS[:, None, None], -torch.inf)
    return torch.einsum("tgrs,gse->tgre", scores.softmax(-1), values_GSE).flatten(1, 2)


def packed_bits(mask_TS: Tensor) -> Tensor:
    """Return a mask as FlashInfer reads it: row after row, the first key in the lowest bit."""
    bits = mask_TS.flatten().to(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1).to(torch.uint8)


def flashinfer(slabs: Slabs, *, masked: bool) -> Call:
    """FlashInfer's prefill kernel with a mask of any form, or with its own causal one."""
    from flashinfer import single_prefill_with_kv_cache  # type: ignore[import-not-found]

    end = slabs.mask_TS.shape[1]
    bits = packed_bits(slabs.mask_TS) if masked else None

    def call(i: int) -> Tensor:
        keys, values = slabs.layer(i)
        return single_prefill_with_kv_cache(
            slabs.q_THE,
            keys[0, :, :end],
            values[0, :, :end],
            packed_custom_mask=bits,
            causal=not masked,
            kv_layout="HND",
            backend="fa2",
        )

    return call


def flash3(slabs: Slabs) -> Call:
    """FlashAttention-3 as for decoding, where it chooses its own number of shares of the keys."""
    from fa3_fwd_interface import flash_attn_with_kvcache  # type: ignore[import-not-found]

    q_1THE, end = slabs.q_THE[None], slabs.mask_TS.shape[1]

    def call(i: int) -> Tensor:
        keys_1SGE, values_1SGE = (t[:, :, :end].transpose(1, 2) for t in slabs.layer(i))
        return flash_attn_with_kvcache(q_1THE, keys_1SGE, values_1SGE, causal=True)[0]

    return call


def flex(slabs: Slabs) -> Call:
    """PyTorch's flex_attention, compiled for this shape, with the mask read from memory."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # type: ignore[attr-defined]
    rows, end = slabs.mask_TS.shape
    mask_TS = slabs.mask_TS

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return mask_TS[row, key]

    blocks = create_block_mask(sees, None, None, rows, end, device=str(mask_TS.device))
    compiled = torch.compile(flex_attention, dynamic=False)
    q_1HTE = slabs.q_THE.transpose(0, 1)[None]

    def call(i: int) -> Tensor:
        keys, values = slabs.layer(i)
        out_1HTE = compiled(
            q_1HTE, keys[:, :, :end], values[:, :, :end], block_mask=blocks, enable_gqa=True
        )
        return out_1HTE[0].transpose(0, 1)

    return call


def makers(slabs: Slabs) -> dict[str, Callable[[], Call]]:
    """Return by name what makes each version's call, or raises if it cannot."""
    return {
        "FlashInfer, masked": lambda: flashinfer(slabs, masked=True),
        "FlashInfer, causal": lambda: flashinfer(slabs, masked=False),
        "flex_attention, masked": lambda: flex(slabs),
        "FlashAttention-3, causal": lambda: flash3(slabs),
    }
