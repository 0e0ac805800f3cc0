"""How one launch of ``fused_attention`` shares out contexts over blocks, and where they join.

Positions are cut into columns and classes: what is added up with what is a matter of position
alone. Which block adds up which column, which cluster which class, and how many there are of both,
is free: a row has the same bits for every number of them. Imports torch.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

CLASSES = 8  # also the most clusters that share a request's context
SPAN = 4096  # positions; a context of one span is attended as if there were no others
TILES = 2  # of 16 query rows, a block
ROWS = 16 * TILES
PAIR = 2  # blocks of the smallest clusters
_BLOCKS = 120  # that run at once in larger ones on 132 multiprocessors: they do not fill them


class Space(ctypes.Structure):
    """``SharedParts`` as the kernel takes it."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("scores", ctypes.c_void_p),
        ("arrived", ctypes.c_void_p),
    )


def max_tokens(heads: int, kv_heads: int) -> int:
    """Return the rows of a forward that one item of work takes: their query heads fill a tile."""
    return ROWS // (heads // kv_heads)


def num_columns(heads: int, kv_heads: int) -> int:
    """Return the columns that the keys of a tile of rows are cut into.

    As many as the chip holds blocks at once for eight rows. It depends on the model alone: the
    order of additions follows from it.
    """
    items = -(-8 // max_tokens(heads, kv_heads))
    return 8 if 8 * kv_heads * items <= _BLOCKS else 4


def cluster_blocks(rows: int, heads: int, kv_heads: int) -> int:
    """Return the blocks of a cluster: a column each, or fewer where rows fill the chip anyway.

    Args:
        rows: Of the forward, padding among them.
        heads: Query heads.
        kv_heads: Key/value heads.
    """
    clusters = -(-rows // max_tokens(heads, kv_heads)) * kv_heads  # at least, without turns
    blocks = num_columns(heads, kv_heads)
    while blocks > PAIR and clusters * blocks > _BLOCKS:
        blocks //= 2
    return blocks


@dataclass(frozen=True, slots=True)
class Crowd:
    """What a forward attends, as far as it matters for how blocks share it out.

    Attributes:
        bucket: Rows of its graph, padding among them.
        rows: Without padding.
        requests: They belong to.
        spans: Of ``SPAN`` positions that the requests' contexts take together.
    """

    bucket: int
    rows: int
    requests: int
    spans: int


@lru_cache(maxsize=1 << 14)  # asked before every step
def pairs_do_more(crowd: Crowd, heads: int, kv_heads: int, multiprocessors: int) -> bool:
    """Return whether clusters of two are faster than those of ``cluster_blocks``.

    They are where larger ones would be cut up into pairs anyway, or would keep fewer blocks busy.

    A cluster of eight is the fastest for one tree over a short context: a column a block, joined
    without a way over memory. But only one fits beside seven other heads, so that of several
    requests, or of a long context's classes, each block takes several in turn on half of a chip;
    and the blocks of a cluster wait for each other even if each request has but two of them.

    Args:
        crowd: Of the forward.
        heads: Query heads.
        kv_heads: Key/value heads.
        multiprocessors: Of the GPU; pairs fill all of them.
    """
    blocks = cluster_blocks(crowd.bucket, heads, kv_heads)
    if blocks == PAIR:
        return False
    items = max(crowd.requests, -(-crowd.rows // max_tokens(heads, kv_heads)), 1)
    parts = items * crowd.spans // max(crowd.requests, 1)  # spans that items attend

    def busy(blocks: int, clusters: int) -> int:
        """Blocks of a key/value head that have something to attend."""
        if items > clusters:
            teams = teams_of(items, clusters, blocks)
            return min(items, clusters * teams) * (blocks // teams)
        return min(items * shares_of(items, clusters), parts) * blocks

    clusters = most_items(min(_BLOCKS, multiprocessors) // blocks, kv_heads)
    pairs = most_items(multiprocessors // PAIR, kv_heads)
    are_cut = teams_of(items, clusters, blocks) >= blocks // PAIR
    return are_cut or busy(PAIR, pairs) > busy(blocks, clusters)


def pairs_may_do_more(
    bucket: int, requests: int, spans: int, heads: int, kv_heads: int, multiprocessors: int
) -> bool:
    """Return whether ``pairs_do_more`` for any forward of a graph.

    Fewer requests or rows may fill pairs better than all of them do.

    Args:
        bucket: Rows of the graph.
        requests: Most of a forward.
        spans: Most of a request.
        heads: Query heads.
        kv_heads: Key/value heads.
        multiprocessors: Of the GPU.
    """
    of_one = (Crowd(bucket, rows, 1, spans) for rows in range(1, bucket + 1))
    of_several = (Crowd(bucket, num, num, num * spans) for num in range(2, requests + 1))
    return any(
        pairs_do_more(crowd, heads, kv_heads, multiprocessors) for crowd in (*of_one, *of_several)
    )


def teams_of(items: int, clusters: int, blocks: int) -> int:
    """Return how many items a cluster attends side by side, as the kernel has it.

    Args:
        items: Of a forward, which the kernel counts: padding is not among them.
        clusters: From ``clusters_of``.
        blocks: Of a cluster.
    """
    teams = 1
    while teams < blocks and teams * clusters < items:
        teams *= 2
    return teams


def most_items(clusters: int, kv_heads: int) -> int:
    """Return how many items can have a cluster a key/value head at once; at least one."""
    return max(1, clusters // kv_heads)


def clusters_of(rows: int, room: int) -> int:
    """Return the clusters a key/value head that forwards of ``rows`` rows are launched with.

    Those that find neither an item nor a class with keys leave at once; of more items than
    clusters, each takes several, side by side as far as it has blocks (``teams_of``).

    Args:
        rows: Of the forward, padding among them.
        room: From ``most_items``.
    """
    return min(rows * CLASSES, room)


def shares_of(items: int, clusters: int) -> int:
    """Return over how many clusters each item's context is shared out, as the kernel has it.

    Args:
        items: Of a forward, which the kernel counts: padding is not among them.
        clusters: From ``clusters_of``.
    """
    return max(1, min(CLASSES, clusters // items))


@dataclass(frozen=True, slots=True)
class SharedParts:
    """Results of columns and of classes, float32, until they are joined.

    Launches that may overlap need one each; graphs hold its addresses. A launch leaves ``arrived``
    at zero, and what else is here to the next one.

    Attributes:
        values: (N, ROWS, E) of columns, then of classes.
        scores: (N, ROWS, 2) their largest score and their sum of weights.
        arrived: int32, how many clusters of an item have left their parts.
        items: Most items side by side, and clusters, a key/value head that there is room for.
    """

    values: Tensor
    scores: Tensor
    arrived: Tensor
    items: int

    @classmethod
    def make(cls, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> SharedParts:
        """Room for every forward of a model on this device."""
        columns = num_columns(heads, kv_heads)
        blocks = torch.cuda.get_device_properties(device).multi_processor_count
        items = max(most_items(blocks, kv_heads), columns)
        return cls.of(items, columns, kv_heads, head_dim, device)

    @classmethod
    def of(
        cls, items: int, columns: int, kv_heads: int, head_dim: int, device: torch.device
    ) -> SharedParts:
        """Room for a number of items at a time."""
        slots = items * kv_heads * CLASSES * (columns + 1)
        values = torch.empty(slots, ROWS, head_dim, dtype=torch.float32, device=device)
        scores = torch.empty(slots, ROWS, 2, dtype=torch.float32, device=device)
        arrived = torch.zeros(items * kv_heads * columns, dtype=torch.int32, device=device)
        return cls(values, scores, arrived, items)

    def space(self) -> Space:
        """The addresses."""
        return Space(self.values.data_ptr(), self.scores.data_ptr(), self.arrived.data_ptr())
