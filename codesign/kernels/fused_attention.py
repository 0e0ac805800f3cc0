"""Attention of tree rows in one launch: rotation, KV write, split keys and their joining.

The same as ``row_attention.rotate_and_append`` and then ``row_attention.row_attention``, which run
where the CUDA kernel cannot; see there for what a row sees, and ``attention_shares.py`` and
``cuda/fused_attention.cu`` for how the keys are shared out. Imports torch.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Self

import torch
from torch import Tensor

from codesign.kernels.attention_shares import (
    CLASSES,
    PAIR,
    TILES,
    SharedParts,
    cluster_blocks,
    clusters_of,
    max_tokens,
    most_items,
    num_columns,
)
from codesign.kernels.cuda_module import CudaKernel, kernels_run, load_kernel
from codesign.kernels.row_attention import Scratch, SeenRows, rotate_and_append, row_attention

MAX_ROWS = 256  # of a forward: one thread reads each
MAX_TAIL = 160  # slab rows from the last full 16 of a request's prefix to its last new row
_SMALL_TAIL = 32  # leaves room for more keys in flight
_THREADS = 256
_MAX_STAGES = 4  # tiles of keys and values in flight
_SHARED_BYTES = 220 << 10  # of a Hopper multiprocessor, less what the kernel declares statically


class _Slabs(ctypes.Structure):
    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
    )

    @classmethod
    def of(cls, keys_BGME: Tensor, values_BGME: Tensor, heads: int) -> Self:
        _, kv_heads, slab_rows, _ = keys_BGME.shape
        return cls(keys_BGME.data_ptr(), values_BGME.data_ptr(), slab_rows, heads, kv_heads)


class _Rows(ctypes.Structure):
    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("prefixes", ctypes.c_void_p),
        ("paths", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("path_length", ctypes.c_int32),
        ("table_length", ctypes.c_int32),
        ("padding_slot", ctypes.c_int32),
    )

    @classmethod
    def of(cls, seen: SeenRows, kv_rows_T: Tensor) -> Self:
        tables_SK = _tables(seen)
        columns = (seen.slots_T, seen.positions_T, seen.prefixes_T, seen.path_TP)
        tensors = (*columns, kv_rows_T, tables_SK)
        counts = (*seen.path_TP.shape, tables_SK.shape[1], seen.padding_slot)
        return cls(*(tensor.data_ptr() for tensor in tensors), *counts)


def fits(*, rows: int, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> bool:
    """Return whether the CUDA kernel takes forwards of this size on this device."""
    return (
        device.type == "cuda"
        and rows <= MAX_ROWS
        and head_dim in (64, 128)
        and heads // kv_heads <= 16 * TILES
        and kernels_run(device.index or 0)
    )


def fused_attention(
    qkv_TN: Tensor,
    cos_TF: Tensor,
    sin_TF: Tensor,
    keys_BGME: Tensor,
    values_BGME: Tensor,
    seen: SeenRows,
    kv_rows_T: Tensor,
    *,
    heads: int,
    max_tail: int = MAX_TAIL,
    scratch: Scratch | None = None,
    parts: SharedParts | None = None,
    out_TN: Tensor | None = None,
    pdl: bool = False,
    in_pairs: bool = False,
    most_shares: int = CLASSES,
) -> Tensor:
    """Return attention of new rows, (T, H * E); their keys and values go to their slabs.

    On a GPU the rows of a request are neighbours, their ``kv_rows_T`` consecutive, and its slab
    rows from the last full 16 of the shortest prefix to the last new row at most ``max_tail``.
    Nothing is attended or written for rows of padding there: their results are zero.

    Args:
        qkv_TN: Query heads, key heads, value heads of every row, not rotated.
        cos_TF: Cosine of each row's angles, float32.
        sin_TF: Sine of the same.
        keys_BGME: Slabs of one layer, contiguous.
        values_BGME: The same.
        seen: Which slab rows each row sees; new rows can be among them.
        kv_rows_T: int32, slab row that each row's key and value go to.
        heads: Query heads H.
        max_tail: See above; at most ``MAX_TAIL``, and 15 more than a request's tree and new rows.
        scratch: For the kernels that run where this one cannot.
        parts: Of this model on this device, for no launch that may overlap; None: the device's, for
            those that follow one another. The first launch without must not be captured.
        out_TN: Where the result goes; None: a new tensor.
        pdl: Allow the launch before the kernel in front has ended (CUDA only).
        in_pairs: Launch clusters of two blocks (``attention_shares.pairs_do_more``): the same bits.
        most_shares: Most clusters that share a context, for tests: it changes no bit.
    """
    rows = qkv_TN.shape[0]
    _, kv_heads, _, head_dim = keys_BGME.shape
    device = qkv_TN.device
    if out_TN is None:
        out_TN = qkv_TN.new_empty(rows, heads * head_dim)
    if not fits(rows=rows, heads=heads, kv_heads=kv_heads, head_dim=head_dim, device=device):
        tables = (cos_TF, sin_TF, keys_BGME, values_BGME)
        return out_TN.copy_(
            attention_in_two(qkv_TN, *tables, seen, kv_rows_T, heads=heads, scratch=scratch)
        )
    _check_layout(
        qkv_TN, (cos_TF, sin_TF, keys_BGME, values_BGME, out_TN, kv_rows_T), seen, heads=heads
    )
    _launch(
        (qkv_TN, cos_TF, sin_TF),
        _Slabs.of(keys_BGME, values_BGME, heads),
        _Rows.of(seen, kv_rows_T),
        parts or _device_parts(heads, kv_heads, head_dim, device),
        out_TN,
        kernel=_kernel(keys_BGME, seen, heads=heads, tail=max_tail),
        cluster=PAIR if in_pairs else cluster_blocks(rows, heads, kv_heads),
        most_shares=most_shares,
        pdl=pdl,
    )
    return out_TN


def _launch(
    inputs: tuple[Tensor, Tensor, Tensor],
    slabs: _Slabs,
    rows: _Rows,
    parts: SharedParts,
    out_TN: Tensor,
    *,
    kernel: tuple[CudaKernel, int],
    cluster: int,
    most_shares: int,
    pdl: bool,
) -> None:
    """Launch a kernel, given with its bytes of shared memory, over as many clusters as help."""
    function, shared_bytes = kernel
    num_rows, width = out_TN.shape
    at_once = function.clusters_at_once(_THREADS, cluster=cluster, shared_bytes=shared_bytes)
    room = min(parts.items // cluster, most_items(at_once, slabs.kv_heads))
    scale = math.log2(math.e) / math.sqrt(width // slabs.heads)
    function.launch(
        (cluster, slabs.kv_heads, clusters_of(num_rows, room)),
        _THREADS,
        [*inputs, slabs, rows, parts.space(), most_shares, out_TN, scale],
        shared_bytes=shared_bytes,
        cluster=cluster,
        pdl=pdl,
    )


def attention_in_two(
    qkv_TN: Tensor,
    cos_TF: Tensor,
    sin_TF: Tensor,
    keys_BGME: Tensor,
    values_BGME: Tensor,
    seen: SeenRows,
    kv_rows_T: Tensor,
    *,
    heads: int,
    scratch: Scratch | None = None,
) -> Tensor:
    """``fused_attention`` as rotation and then attention, for any device, type and size."""
    tables = (cos_TF, sin_TF, keys_BGME, values_BGME)
    q_THE = rotate_and_append(
        qkv_TN, *tables, seen.slots_T, kv_rows_T, heads=heads, tables_SK=seen.tables_SK
    )
    return row_attention(q_THE, keys_BGME, values_BGME, seen, scratch).flatten(1)


def _tables(seen: SeenRows) -> Tensor:
    """Pages of each row's slab; of a whole slab its own number."""
    return seen.slots_T[:, None] if seen.tables_SK is None else seen.tables_SK


@cache
def _device_parts(heads: int, kv_heads: int, head_dim: int, device: torch.device) -> SharedParts:
    assert not torch.cuda.is_current_stream_capturing(), "launch once before you capture"
    return SharedParts.make(heads, kv_heads, head_dim, device)


def _check_layout(
    qkv_TN: Tensor, others: tuple[Tensor, ...], seen: SeenRows, *, heads: int
) -> None:
    _, _, keys_BGME, *_ = others
    _, kv_heads, slab_rows, head_dim = keys_BGME.shape
    assert qkv_TN.dtype == keys_BGME.dtype == torch.bfloat16, "only bfloat16 is attended"
    assert qkv_TN.shape[1] == (heads + 2 * kv_heads) * head_dim, f"{qkv_TN.shape[1]} columns"
    assert seen.tables_SK is None or slab_rows % 16 == 0, f"pages of {slab_rows} rows"
    tensors = (qkv_TN, *others, seen.path_TP, _tables(seen))
    assert all(tensor.is_contiguous() for tensor in tensors), "layout"


def _kernel(keys_BGME: Tensor, seen: SeenRows, *, heads: int, tail: int) -> tuple[CudaKernel, int]:
    """The kernel for this model and so long a tail, and bytes of its dynamic shared memory."""
    _, kv_heads, slab_rows, head_dim = keys_BGME.shape
    tail = _SMALL_TAIL if tail <= _SMALL_TAIL else MAX_TAIL
    path_words = max_tokens(heads, kv_heads) * seen.path_TP.shape[1]
    stages, shared_bytes = _shared_memory(head_dim, tail, path_words=path_words)
    columns = num_columns(heads, kv_heads)
    defines = {"E": head_dim, "MT": TILES, "C": columns, "TAIL": tail, "STAGES": stages}
    defines |= {"GROUP": heads // kv_heads, "PAGE": 0 if seen.tables_SK is None else slab_rows}
    return load_kernel("fused_attention.cu", "fused_attention", defines), shared_bytes


def _shared_memory(head_dim: int, tail: int, *, path_words: int) -> tuple[int, int]:
    """Return tiles of keys in flight and bytes of dynamic shared memory, as the source has them."""
    row = (head_dim + 8) * 2
    stage = 16 * (8 // TILES) * 2 * row
    queries, joined = 16 * TILES * row, 16 * TILES * head_dim * 4
    fixed = 2 * tail * row + queries + joined + path_words * 4
    stages = min(_MAX_STAGES, (_SHARED_BYTES - fixed) // stage)
    return stages, fixed + stages * stage
