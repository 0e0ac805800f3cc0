"""Two Triton kernels for batched decoding, each with the plain PyTorch that defines it.

Rows have their own lengths (no padding on the left), and a row of length zero costs nothing:
finished rows stay in the batch without reading their cache.

Shapes: B rows, H query heads, G key/value heads, T cache slots, E head width (64).
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU build of torch: the reference runs instead
    triton = None

HEAD_DIM = 64
KEY_BLOCK = 64


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the last axis in Hugging Face's half-split order."""
    half = heads.shape[-1] // 2
    turned = torch.cat([-heads[..., half:], heads[..., :half]], dim=-1)
    return (heads * cos + turned * sin).to(heads.dtype)


def rotate_and_store_reference(
    qkv: Tensor, keys: Tensor, values: Tensor, position: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Rotated queries [B, H, E]; writes the new key and value at each row's cache position."""
    num_kv_heads = keys.shape[1]
    heads = qkv.view(qkv.shape[0], -1, HEAD_DIM)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    cos_B, sin_B = cos[position][:, None], sin[position][:, None]
    rows = torch.arange(qkv.shape[0], device=qkv.device)
    new_keys = heads[:, num_heads : num_heads + num_kv_heads]
    keys[rows, :, position] = rotate(new_keys, cos_B, sin_B)
    values[rows, :, position] = heads[:, num_heads + num_kv_heads :]
    return rotate(heads[:, :num_heads], cos_B, sin_B)


def decode_attention_reference(
    queries: Tensor, keys: Tensor, values: Tensor, length: Tensor
) -> Tensor:
    """Attention output [B, H * E] of one query a row over the first `length` cache slots."""
    batch, num_heads, _ = queries.shape
    num_kv_heads, slots = keys.shape[1], keys.shape[2]
    grouped = queries.view(batch, num_kv_heads, num_heads // num_kv_heads, HEAD_DIM)
    scores = torch.einsum("bgre,bgte->bgrt", grouped.float(), keys.float()) * HEAD_DIM**-0.5
    visible = torch.arange(slots, device=length.device) < length[:, None]
    scores = scores.masked_fill(~visible[:, None, None], -1e30)
    weights = scores.softmax(dim=-1) * visible[:, None, None]
    out = torch.einsum("bgrt,bgte->bgre", weights, values.float())
    return out.reshape(batch, num_heads * HEAD_DIM).to(queries.dtype)


if triton is not None:

    @triton.jit
    def _rotate_and_store_kernel(  # noqa: ANN202
        qkv_ptr, query_ptr, key_ptr, value_ptr, position_ptr, cos_ptr, sin_ptr, num_slots,  # noqa: ANN001
        NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, E: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1)
        lane = tl.arange(0, E)
        position = tl.load(position_ptr + row)
        source = qkv_ptr + (row * (NUM_HEADS + 2 * NUM_KV) + head) * E
        x = tl.load(source + lane)
        if head < NUM_HEADS + NUM_KV:
            partner = tl.load(source + (lane + E // 2) % E).to(tl.float32)
            partner = tl.where(lane < E // 2, -partner, partner)
            cos = tl.load(cos_ptr + position * E + lane)
            sin = tl.load(sin_ptr + position * E + lane)
            turned = (x.to(tl.float32) * cos + partner * sin).to(x.dtype)
            if head < NUM_HEADS:
                tl.store(query_ptr + (row * NUM_HEADS + head) * E + lane, turned)
            else:
                slot = (row * NUM_KV + head - NUM_HEADS) * num_slots + position
                tl.store(key_ptr + slot * E + lane, turned)
        else:
            slot = (row * NUM_KV + head - NUM_HEADS - NUM_KV) * num_slots + position
            tl.store(value_ptr + slot * E + lane, x)

    @triton.jit
    def _decode_attention_kernel(  # noqa: ANN202
        query_ptr, key_ptr, value_ptr, out_ptr, length_ptr, num_slots, scale,  # noqa: ANN001
        NUM_KV: tl.constexpr, GROUP: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        kv_head = tl.program_id(1)
        length = tl.load(length_ptr + row)
        member = tl.arange(0, 16)  # the smallest tile of a tensor-core product
        lane = tl.arange(0, E)
        slot = tl.arange(0, BLOCK)
        query_at = ((row * NUM_KV + kv_head) * GROUP + member[:, None]) * E + lane[None, :]
        is_member = member[:, None] < GROUP
        query = tl.load(query_ptr + query_at, mask=is_member, other=0.0)
        base = (row * NUM_KV + kv_head) * num_slots * E
        best = tl.full([16], -1e30, tl.float32)
        total = tl.zeros([16], tl.float32)
        acc = tl.zeros([16, E], tl.float32)
        for start in range(0, length, BLOCK):
            at = base + (start + slot[:, None]) * E + lane[None, :]
            is_visible = start + slot < length
            key = tl.load(key_ptr + at, mask=is_visible[:, None], other=0.0)
            value = tl.load(value_ptr + at, mask=is_visible[:, None], other=0.0)
            score = tl.dot(query, tl.trans(key)) * scale
            score = tl.where(is_visible[None, :], score, -1e30)
            peak = tl.maximum(best, tl.max(score, axis=1))
            weight = tl.exp(score - peak[:, None])
            shrink = tl.exp(best - peak)
            total = total * shrink + tl.sum(weight, axis=1)
            acc = acc * shrink[:, None] + tl.dot(weight.to(value.dtype), value)
            best = peak
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_ptr + query_at, acc.to(out_ptr.dtype.element_ty), mask=is_member)


def rotate_and_store(
    qkv: Tensor, keys: Tensor, values: Tensor, position: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """As `rotate_and_store_reference`; one kernel on a GPU."""
    if triton is None or not qkv.is_cuda:
        return rotate_and_store_reference(qkv, keys, values, position, cos, sin)
    batch, num_kv_heads, num_slots, _ = keys.shape
    num_heads = qkv.shape[1] // HEAD_DIM - 2 * num_kv_heads
    queries = torch.empty(batch, num_heads, HEAD_DIM, device=qkv.device, dtype=qkv.dtype)
    _rotate_and_store_kernel[(batch, num_heads + 2 * num_kv_heads)](
        qkv, queries, keys, values, position, cos, sin, num_slots,
        NUM_HEADS=num_heads, NUM_KV=num_kv_heads, E=HEAD_DIM, num_warps=1,
    )  # fmt: skip
    return queries


def decode_attention(queries: Tensor, keys: Tensor, values: Tensor, length: Tensor) -> Tensor:
    """As `decode_attention_reference`; one kernel on a GPU."""
    if triton is None or not queries.is_cuda:
        return decode_attention_reference(queries, keys, values, length)
    batch, num_heads, _ = queries.shape
    num_kv_heads, num_slots = keys.shape[1], keys.shape[2]
    out = torch.empty(batch, num_heads * HEAD_DIM, device=queries.device, dtype=queries.dtype)
    _decode_attention_kernel[(batch, num_kv_heads)](
        queries, keys, values, out, length, num_slots, HEAD_DIM**-0.5,
        NUM_KV=num_kv_heads, GROUP=num_heads // num_kv_heads, E=HEAD_DIM, BLOCK=KEY_BLOCK,
        num_warps=2,
    )  # fmt: skip
    return out
