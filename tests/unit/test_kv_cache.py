from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from codesign.engine.kv_cache import CapacityError, KVCache  # noqa: E402
from codesign.engine.prefix_store import PrefixStore  # noqa: E402
from codesign.engine.rows import RowBatch, causal_rows, join_rows  # noqa: E402
from codesign.models.shape import ModelShape, Rope  # noqa: E402
from codesign.policy.kv_memory import PREFIX_BLOCK  # noqa: E402

SHAPE = ModelShape(
    family="llama",
    hidden=8,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=4,
    intermediate=8,
    vocab=16,
    rope=Rope(10000.0),
    eps=1e-5,
    tie=True,
    qkv_bias=False,
    qk_norm=False,
    max_positions=64,
)


def filled(cache: KVCache, values: list[float]) -> int:
    """A slab whose row i holds values[i] in every key and minus that in every value."""
    slot = cache.take()
    cache.extend(causal_rows(slot, [int(v) for v in values]))
    rows = torch.tensor(values)[:, None, None].expand(-1, 1, 4)
    for layer in range(SHAPE.layers):
        cache.append(layer, slot, rows, -rows)
    return slot


def content(cache: KVCache, slot: int) -> list[float]:
    found = []
    for layer in range(SHAPE.layers):
        keys, values = cache.rows(layer, slot)
        assert torch.equal(keys, -values)
        found.append(keys[0, :, 0].tolist())
    assert found[0] == found[1]
    return found[0]


def tree_rows(slot: int, positions: list[int], visible: list[list[int]]) -> RowBatch:
    return RowBatch(
        slots=(slot,),
        counts=(len(positions),),
        tokens=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions),
        visible=(torch.tensor(visible, dtype=torch.bool),),
    )


def test_rows_come_back_as_they_were_appended():
    cache = KVCache(SHAPE, num_slots=2, max_tokens=8)
    first, second = filled(cache, [1, 2, 3]), filled(cache, [7])
    assert content(cache, first) == [1, 2, 3]
    assert content(cache, second) == [7]


def test_gather_may_overlap_in_both_directions():
    cache = KVCache(SHAPE, num_slots=2, max_tokens=8)
    other = filled(cache, [9, 9, 9])
    slot = filled(cache, [0, 1, 2, 3, 4, 5])
    cache.gather(slot, 1, [2, 1, 5, 3])
    assert content(cache, slot) == [0, 2, 1, 5, 3]
    assert content(cache, other) == [9, 9, 9]


def test_gather_of_nothing_keeps_the_prefix():
    cache = KVCache(SHAPE, num_slots=1, max_tokens=8)
    slot = filled(cache, [0, 1, 2])
    cache.gather(slot, 2, [])
    assert content(cache, slot) == [0, 1]


@pytest.mark.parametrize("rows", [[0], [3], [2, 2]])
def test_gather_refuses_rows_that_are_prefix_unused_or_taken_twice(rows: list[int]):
    cache = KVCache(SHAPE, num_slots=1, max_tokens=8)
    slot = filled(cache, [0, 1, 2])
    with pytest.raises(AssertionError):
        cache.gather(slot, 1, rows)


def test_a_slab_can_be_taken_again_and_is_then_empty():
    cache = KVCache(SHAPE, num_slots=1, max_tokens=8, check=True)
    slot = filled(cache, [1, 2])
    with pytest.raises(CapacityError, match="all 1 slabs"):
        cache.take()
    cache.free(slot)
    assert cache.num_free == 1
    assert cache.take() == slot
    assert cache.length(slot) == 0
    with pytest.raises(AssertionError):
        cache.assert_prefix(slot, [1, 2])


def test_freeing_twice_is_refused():
    cache = KVCache(SHAPE, num_slots=1, max_tokens=8)
    slot = cache.take()
    cache.free(slot)
    with pytest.raises(AssertionError, match="free already"):
        cache.free(slot)


def test_a_batch_too_long_for_one_slab_changes_no_slab():
    cache = KVCache(SHAPE, num_slots=2, max_tokens=4, check=True)
    slots = filled(cache, [1]), filled(cache, [1, 2, 3])
    batch = join_rows([causal_rows(slot, [5, 5], start=cache.length(slot)) for slot in slots])
    with pytest.raises(CapacityError, match="holds 3 of 4 rows; 2 more"):
        cache.extend(batch)
    assert [cache.length(slot) for slot in slots] == [1, 3]


def test_truncate_drops_rows_and_their_labels():
    cache = KVCache(SHAPE, num_slots=1, max_tokens=8, check=True)
    slot = filled(cache, [4, 5, 6])
    cache.truncate(slot, 1)
    assert content(cache, slot) == [4]
    cache.assert_prefix(slot, [4])
    with pytest.raises(AssertionError):
        cache.assert_prefix(slot, [4, 5])


def test_slabs_made_in_inference_mode_can_be_gathered_outside():
    with torch.inference_mode():
        cache = KVCache(SHAPE, num_slots=1, max_tokens=8)
        slot = filled(cache, [0, 1, 2])
    cache.gather(slot, 0, [2])
    assert content(cache, slot) == [2]


def test_of_kept_prompt_blocks_the_last_of_a_prompt_goes_first():
    cache = KVCache(SHAPE, num_slots=1, max_tokens=3 * PREFIX_BLOCK)
    store = PrefixStore(3 * PREFIX_BLOCK)
    for blocks in ((1, 2, 3), (7,)):
        slot = filled(cache, list(range(PREFIX_BLOCK * len(blocks))))
        store.keep(cache, slot, blocks, cache.length(slot))
        cache.free(slot)
    slot = cache.take()
    assert store.restore(cache, slot, (1, 2, 3), range(3 * PREFIX_BLOCK)) == 2 * PREFIX_BLOCK
    assert content(cache, slot) == list(range(2 * PREFIX_BLOCK))


def test_check_accepts_a_tree_and_the_path_gathered_from_it():
    cache = KVCache(SHAPE, num_slots=1, max_tokens=16, check=True)
    slot = filled(cache, [1, 2])
    cache.extend(tree_rows(slot, [2, 3, 3], [[1, 0, 0], [1, 1, 0], [1, 0, 1]]))
    cache.gather(slot, 2, [2, 4])
    cache.extend(tree_rows(slot, [4], [[1]]))


@pytest.mark.parametrize("kept", [[3, 2], [2, 3, 4], [4]])
def test_check_catches_a_gather_that_is_no_path(kept: list[int]):
    cache = KVCache(SHAPE, num_slots=1, max_tokens=16, check=True)
    slot = filled(cache, [1, 2])
    cache.extend(tree_rows(slot, [2, 3, 3], [[1, 0, 0], [1, 1, 0], [1, 0, 1]]))
    cache.gather(slot, 2, kept)
    with pytest.raises(AssertionError, match="prefix positions"):
        cache.extend(tree_rows(slot, [4], [[1]]))


def test_check_catches_a_row_that_sees_its_sibling_or_misses_its_parent():
    cache = KVCache(SHAPE, num_slots=1, max_tokens=16, check=True)
    slot = filled(cache, [1, 2])
    for mask in ([[1, 0, 0], [1, 1, 0], [1, 1, 1]], [[1, 0, 0], [1, 1, 0], [0, 0, 1]]):
        with pytest.raises(AssertionError, match="sees tree positions"):
            cache.extend(tree_rows(slot, [2, 3, 3], mask))


def test_check_catches_the_wrong_token_at_the_right_position():
    cache = KVCache(SHAPE, num_slots=1, max_tokens=16, check=True)
    slot = filled(cache, [1, 2])
    batch = tree_rows(slot, [2, 2], [[1, 0], [0, 1]])
    batch.tokens[:] = torch.tensor([7, 8])
    cache.extend(batch)
    cache.gather(slot, 2, [3])
    cache.assert_prefix(slot, [1, 2, 8])
    with pytest.raises(AssertionError, match="must be"):
        cache.assert_prefix(slot, [1, 2, 7])


def test_a_batch_names_each_slab_once_and_counts_its_rows():
    rows = causal_rows(0, [1, 2])
    with pytest.raises(AssertionError, match="used twice"):
        join_rows([rows, rows])
    with pytest.raises(AssertionError, match="one entry a row"):
        RowBatch((0,), (3,), rows.tokens, rows.positions, (None,))
