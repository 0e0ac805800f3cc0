"""Flat-row attention: what it sees, that tree rows give plain decoding's bits, and the kernels.

The Triton kernels run in Triton's interpreter where Triton is installed: slow, but the same code.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from codesign.kernels import row_attention as ops

HEADS, GROUPS, HEAD_DIM, TOKENS = 6, 2, 16, 400


@pytest.fixture
def slabs():
    generator = torch.Generator().manual_seed(0)
    size = (3, 2, GROUPS, TOKENS, HEAD_DIM)  # layers, slabs
    return tuple(torch.randn(size, generator=generator) for _ in range(2))


def seen_rows(slots, positions, prefixes, paths) -> ops.SeenRows:
    table = torch.zeros(len(slots), 12, dtype=torch.int32)
    for row, path in enumerate(paths):
        table[row, : len(path)] = torch.tensor(path)
    columns = [torch.tensor(c, dtype=torch.int32) for c in (slots, positions, prefixes)]
    return ops.SeenRows(*columns, table)


def queries(rows: int) -> torch.Tensor:
    return torch.randn(rows, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))


TREE = ([0, 0, 0, 1], [299, 300, 3, 130], [299, 298, 4, 128], [(0,), (0, 2, 5), (), (1, 0, 4)])


def by_hand(q_HE, keys_GME, values_GME, rows):
    out = []
    for head, q_E in enumerate(q_HE):
        group = head * GROUPS // HEADS
        weights = torch.softmax(keys_GME[group, rows] @ q_E * HEAD_DIM**-0.5, 0)
        out.append(weights @ values_GME[group, rows])
    return torch.stack(out)


def test_a_row_sees_its_prefix_and_then_its_path(slabs):
    keys, values = slabs[0][0], slabs[1][0]
    seen, q = seen_rows(*TREE), queries(4)
    out = ops.row_attention(q, keys, values, seen, None)
    expected_rows = [
        [*range(299), 299],
        [*range(298), 298, 300, 303],
        [0, 1, 2, 3],
        [*range(128), 129, 128, 132],
    ]
    for row, rows in enumerate(expected_rows):
        assert ops.seen_row_indices(seen, row).tolist() == rows
        slot = TREE[0][row]
        expected = by_hand(q[row], keys[slot], values[slot], rows)
        torch.testing.assert_close(out[row], expected, rtol=1e-5, atol=1e-5)


def moved_to_prefix(slab: torch.Tensor) -> torch.Tensor:
    """The slab after rows 298, 300 and 303 of TREE's second row joined the prefix."""
    moved = slab.clone()
    moved[0, :, 298:301] = slab[0][:, [298, 300, 303]]
    return moved


def test_a_tree_row_gives_the_bits_of_plain_decoding(slabs):
    keys, values = slabs[0][0], slabs[1][0]
    q = queries(4)
    tree = ops.row_attention(q, keys, values, seen_rows(*TREE), None)[1]
    plain = seen_rows([0], [300], [300], [(0,)])
    alone = ops.row_attention(q[1:2], moved_to_prefix(keys), moved_to_prefix(values), plain, None)
    assert torch.equal(tree, alone[0])


def test_moves_happen_in_order_and_only_as_many_as_told(slabs):
    keys, values = (slab.clone() for slab in slabs)
    moves = torch.tensor([[0, 5, 3], [0, 6, 5], [1, 9, 2], [0, 0, 7]], dtype=torch.int32)
    ops.move_rows(keys, values, moves, torch.tensor([3], dtype=torch.int32))
    for new, old in zip((keys, values), slabs, strict=True):
        expected = old.clone()
        expected[:, 0, :, [3, 5]] = old[:, 0, :, [5, 6]]
        expected[:, 1, :, 2] = old[:, 1, :, 9]
        assert torch.equal(new, expected)


@pytest.fixture
def writing(interpreted):
    """The Triton kernels that write slabs, in the interpreter."""
    return interpreted("slab_rows_triton")[0]


@pytest.fixture
def kernels(interpreted, writing):
    """The Triton kernels of attention in the interpreter."""
    return interpreted("row_attention_triton")[0]


@pytest.mark.filterwarnings("ignore")
def test_the_attention_kernel_agrees_and_gives_plain_decodings_bits(slabs, kernels):
    keys, values = slabs[0][0], slabs[1][0]
    seen, q = seen_rows(*TREE), queries(4)
    scratch = ops.Scratch.make(4, HEADS, HEAD_DIM, TOKENS, torch.device("cpu"))
    ours = kernels.attend(q, keys, values, seen, scratch)
    torch.testing.assert_close(
        ours, ops.row_attention(q, keys, values, seen, None), rtol=1e-4, atol=1e-4
    )
    plain = seen_rows([0], [300], [300], [(0,)])
    alone = kernels.attend(q[1:2], moved_to_prefix(keys), moved_to_prefix(values), plain, scratch)
    assert torch.equal(ours[1], alone[0])


@pytest.mark.filterwarnings("ignore")
def test_the_kernels_that_write_slabs_agree(slabs, writing):
    rows = 5
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(rows, (HEADS + 2 * GROUPS) * HEAD_DIM, generator=generator)
    angles = torch.randn(rows, HEAD_DIM // 2, generator=generator)
    slots = torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32)
    places = torch.tensor([7, 0, 3, 399, 4], dtype=torch.int32)
    results = []
    for op, move in (
        (ops.rotate_and_append, ops.move_rows),
        (writing.rotate_and_append, writing.move_rows),
    ):
        keys, values = (slab.clone() for slab in slabs)
        q = op(qkv, angles.cos(), angles.sin(), keys[1], values[1], slots, places, heads=HEADS)
        moves = torch.tensor([(0, 20 + 2 * i, 10 + i) for i in range(40)], dtype=torch.int32)
        move(keys, values, moves, torch.tensor([37], dtype=torch.int32))
        results.append((q, keys, values))
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


PAGE = 16
PAGES_OF = TOKENS // PAGE


@pytest.fixture
def paged(slabs):
    """The slabs' rows in pages that lie anywhere, their tables, and a page that is nobody's."""
    order = torch.randperm(2 * PAGES_OF, generator=torch.Generator().manual_seed(3))
    tables = order.view(2, PAGES_OF).to(torch.int32)
    pages = []
    for slab in slabs:
        whole = slab.unflatten(3, (PAGES_OF, PAGE)).transpose(2, 3).flatten(1, 2)
        pool = torch.full((3, 2 * PAGES_OF + 1, GROUPS, PAGE, HEAD_DIM), torch.nan)
        pool[:, order] = whole
        pages.append(pool)
    return *pages, tables


def gathered(pool: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Slabs from their pages."""
    return pool[:, tables.long()].transpose(2, 3).flatten(3, 4)


def test_rows_in_pages_give_the_bits_of_rows_in_slabs(slabs, paged):
    keys, values, tables = paged
    seen, q = seen_rows(*TREE), queries(4)
    whole = ops.row_attention(q, slabs[0][0], slabs[1][0], seen, None)
    assert torch.equal(
        ops.row_attention(q, keys[0], values[0], replace(seen, tables_SK=tables), None), whole
    )


def written(op, move, slabs, tables=None):
    """Queries and slabs after new rows were written and others moved, as one tensor each."""
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(5, (HEADS + 2 * GROUPS) * HEAD_DIM, generator=generator)
    angles = torch.randn(5, HEAD_DIM // 2, generator=generator)
    places = (torch.tensor([0, 1, 1, 0, 1]).int(), torch.tensor([7, 0, 3, 399, 4]).int())
    keys, values = (slab.clone() for slab in slabs)
    q = op(
        qkv, angles.cos(), angles.sin(), keys[1], values[1], *places, heads=HEADS, tables_SK=tables
    )
    moves = torch.tensor([(0, 20 + 2 * i, 10 + i) for i in range(40)], dtype=torch.int32)
    move(keys, values, moves, torch.tensor([37], dtype=torch.int32), tables)
    return q, keys, values


def test_pages_are_written_as_slabs_are(slabs, paged):
    *pools, tables = paged
    q, *whole = written(ops.rotate_and_append, ops.move_rows, slabs)
    paged_q, *pools = written(ops.rotate_and_append, ops.move_rows, pools, tables)
    assert torch.equal(paged_q, q)
    for pool, slab in zip(pools, whole, strict=True):
        assert torch.equal(gathered(pool, tables), slab)
        assert pool[:, -1].isnan().all()


@pytest.mark.filterwarnings("ignore")
def test_the_kernels_find_rows_in_pages(slabs, paged, kernels, writing):
    *pools, tables = paged
    seen, q = seen_rows(*TREE), queries(4)
    scratch = ops.Scratch.make(4, HEADS, HEAD_DIM, TOKENS, torch.device("cpu"))
    whole = kernels.attend(q, slabs[0][0], slabs[1][0], seen, scratch)
    in_pages = replace(seen, tables_SK=tables)
    assert torch.equal(kernels.attend(q, pools[0][0], pools[1][0], in_pages, scratch), whole)
    ours = written(writing.rotate_and_append, writing.move_rows, pools, tables)
    theirs = written(ops.rotate_and_append, ops.move_rows, pools, tables)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, equal_nan=True)
