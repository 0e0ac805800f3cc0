"""Where a small model's dimensions, heads and channels go in an inflated one.

Everything real has a copy ("fine") that carries 1/16 of it; see inflate.py. Imports torch.

Letters in shapes: d hidden size, i channels, e head size of the small model; E that of the big one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from codesign.models.recipe import GROUP, check_fit
from codesign.models.shape import ModelShape

_ROOM = (16, 32, 64)  # real columns of a group; as many copies lie half a group behind them


@dataclass(frozen=True, slots=True)
class Placement:
    """Indices into big dimensions, int64.

    Attributes:
        hidden: (d,) in the residual stream.
        hidden_fine: (d,) their copies.
        channels: (i,) in the feed-forward.
        channels_fine: (i,) their copies.
        q_copies: (heads e,) each: rows of the query projection that hold the queries; the first
            are read by the output projection's real columns.
        k_copies: (kv heads e,) each: rows of the key projection that hold the keys.
        kv_rows: (kv heads e,) rows of the value projection.
        v_fine: (kv heads e,) rows of the values' copies; None if there is no room.
        out_fine: (heads e,) columns of the output projection that read those.
        q_heads: Big query heads that are not junk.
        kv_heads: Big key-value heads that are not junk.
    """

    hidden: Tensor
    hidden_fine: Tensor
    channels: Tensor
    channels_fine: Tensor
    q_copies: tuple[Tensor, ...]
    k_copies: tuple[Tensor, ...]
    kv_rows: Tensor
    v_fine: Tensor | None
    out_fine: Tensor | None
    q_heads: Tensor
    kv_heads: Tensor

    @property
    def q_rows(self) -> Tensor:
        """(heads e,) rows of the queries, columns of the output projection."""
        return self.q_copies[0]


def place(small: ModelShape, big: ModelShape, *, device: torch.device | str = "cpu") -> Placement:
    """Return where a small model goes in a big one.

    Copies of values lie in the same head if it is twice as wide as needed, else in heads of
    their own if there are twice as many, else there are none.

    Raises:
        InputError: If it does not fit.
    """
    check_fit(small, big)
    in_heads = big.head_dim > small.head_dim
    copies = 2 if not in_heads and big.kv_heads >= 2 * small.kv_heads else 1
    spread = torch.arange(copies * small.kv_heads, device=device)
    kv_heads = (spread * big.kv_heads // len(spread)).view(small.kv_heads, copies)
    ratio = torch.arange(small.heads // small.kv_heads, device=device)
    q_heads = kv_heads[:, None] * (big.heads // big.kv_heads) + ratio[:, None]
    # Frequency i of e / 2 is frequency i * E / e of E / 2; a head's two halves hold the same.
    first = torch.arange(small.head_dim // 2, device=device) * (big.head_dim // small.head_dim)
    inside = torch.cat((first, first + big.head_dim // 2))
    q_copies = [
        (q_heads[..., c].reshape(-1, 1) * big.head_dim + inside).flatten() for c in range(copies)
    ]
    k_copies = [(kv_heads[:, c, None] * big.head_dim + inside).flatten() for c in range(copies)]
    v_fine = out_fine = None
    if in_heads:  # the place behind each real one is free
        v_fine, out_fine = k_copies[0] + 1, q_copies[0] + 1
    elif copies == 2:
        v_fine, out_fine = k_copies[1], q_copies[1]
    hidden = _spread(small.hidden, big.hidden, evenly=False).to(device)
    channels = _spread(small.intermediate, big.intermediate, evenly=True).to(device)
    return Placement(
        hidden=hidden,
        hidden_fine=hidden + GROUP // 2,
        channels=channels,
        channels_fine=channels + GROUP // 2,
        q_copies=tuple(q_copies),
        k_copies=tuple(k_copies),
        kv_rows=k_copies[0],
        v_fine=v_fine,
        out_fine=out_fine,
        q_heads=q_heads.flatten(),
        kv_heads=kv_heads.flatten(),
    )


def entries_of(blocks: Tensor, width: int) -> Tensor:
    """Return the indices of all entries of blocks of ``width``."""
    return (blocks[:, None] * width + torch.arange(width, device=blocks.device)).flatten()


def _spread(count: int, whole: int, *, evenly: bool) -> Tensor:
    """Return ``count`` indices below ``whole``, as few in a quantisation group as possible."""
    groups = whole // GROUP
    room = next(room for room in _ROOM if -(-count // room) <= groups)
    used = -(-count // room)
    index = torch.arange(used) * groups // used if evenly else torch.arange(used)
    return (index[:, None] * GROUP + torch.arange(room)).flatten()[:count]
