"""Rows of requests for a forward of a rank group: a tree to verify, leaves to expand.

A step's message (step_rows.py) is made of them. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from codesign.engine.gpu.step_rows import MAX_PATH, packer
from codesign.policy.light import light
from codesign.policy.messages import ancestors_of
from codesign.policy.protocol import ExpansionRows, VerifyRows
from codesign.policy.step_time import BUCKETS

SMALL_TREE = 16  # rows; the paths of larger trees are seldom those of another one


@light
class RequestRows:
    """Rows of one request, for a target or a draft alike.

    Attributes:
        slot: Slab.
        tokens: (n,) tokens.
        positions: (n,) absolute positions.
        context: Slab rows before this forward; row i goes to slab row ``context + i``.
        prefixes: (n,) slab rows that each row sees, whatever the tree.
        paths: (n,) tree rows that each sees after these, counted from its prefix, root first.
        parents: (n,) row of each parent within the request, -1 for a root.
        noise_key: 64-bit key of the request's noise.
        path_block: The words of its paths as they lie in a message, in the place of ``paths``.
    """

    slot: int
    tokens: Sequence[int]
    positions: Sequence[int]
    context: int
    prefixes: Sequence[int]
    paths: Sequence[Sequence[int]]
    parents: Sequence[int]
    noise_key: int = 0
    path_block: bytes = b""


def rows_to_verify(rows: VerifyRows, slot: int, noise_key: int) -> RequestRows:
    """The target's rows of one request: a tree behind its whole prefix."""
    count, context = len(rows.tokens), rows.context
    is_small = count <= SMALL_TREE
    return RequestRows(
        slot,
        rows.tokens,
        rows.positions,
        context,
        (context,) * count,
        () if is_small else rows.ancestors(),
        rows.parents,
        noise_key,
        _tree_block(rows.parents) if is_small else b"",
    )


def _block(paths: Sequence[Sequence[int]]) -> bytes:
    """Words of the paths of a request."""
    block = bytearray(4 * MAX_PATH * len(paths))
    for row, path in enumerate(paths):
        packer(len(path))(block, 4 * MAX_PATH * row, *path)
    return bytes(block)


# The same few hundred come again and again.
_path_block = lru_cache(maxsize=512)(_block)


@lru_cache(maxsize=512)
def _tree_block(parents: tuple[int, ...]) -> bytes:
    return _block(ancestors_of(parents))


def rows_to_expand(rows: ExpansionRows, slot: int, *, skip: int = 0) -> RequestRows:
    """The draft's rows of one request, without the first ``skip``, which are in the slab already.

    Leaves of a tree see tree rows of earlier forwards; rows that catch up see all before them.
    """
    tokens, positions = rows.tokens[skip:], rows.positions[skip:]
    context = rows.context + skip
    count = len(tokens)
    if rows.visible is None:
        prefixes: Sequence[int] = range(context + 1, context + count + 1)
        paths: tuple[tuple[int, ...], ...] = ((),) * count
    else:
        paths = rows.visible
        tree_rows = paths[-1][-1] + 1 - count  # expanded before this forward
        prefixes = (context - tree_rows,) * count
    length = positions[-1] + 1 - prefixes[-1]
    assert len(paths[-1]) == length, f"a row at {positions[-1]} sees {len(paths[-1])} tree rows"
    parents = (-1,) * count
    if count <= SMALL_TREE and rows.visible is not None:
        block = _path_block(paths)
        return RequestRows(slot, tokens, positions, context, prefixes, (), parents, 0, block)
    return RequestRows(slot, tokens, positions, context, prefixes, paths, parents)


def split_steps(requests: Sequence[RequestRows]) -> list[Sequence[RequestRows]]:
    """Requests in as few forwards as the largest bucket allows, in order."""
    if 0 < sum([len(r.tokens) for r in requests]) <= BUCKETS[-1]:
        return [requests]
    parts: list[Sequence[RequestRows]] = []
    part: list[RequestRows] = []
    room = BUCKETS[-1]
    for request in (piece for whole in requests for piece in _pieces(whole)):
        if len(request.tokens) > room:
            parts.append(part)
            part, room = [], BUCKETS[-1]
        part.append(request)
        room -= len(request.tokens)
    if part:
        parts.append(part)
    return parts


def _pieces(request: RequestRows) -> Iterator[RequestRows]:
    """A request's rows, none more than a forward has: one that was not drafted for has many."""
    for start in range(0, len(request.tokens), BUCKETS[-1]):
        rows = slice(start, start + BUCKETS[-1])
        yield replace(
            request,
            tokens=request.tokens[rows],
            positions=request.positions[rows],
            context=request.context + start,
            prefixes=request.prefixes[rows],
            paths=request.paths[rows],
            parents=request.parents[rows],
        )
