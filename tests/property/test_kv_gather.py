from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from codesign.engine.kv_cache import KVCache  # noqa: E402
from codesign.engine.rows import causal_rows  # noqa: E402
from codesign.models.shape import ModelShape, Rope  # noqa: E402

SHAPE = ModelShape(
    family="llama",
    hidden=8,
    layers=2,
    heads=2,
    kv_heads=2,
    head_dim=2,
    intermediate=8,
    vocab=16,
    rope=Rope(10000.0),
    eps=1e-5,
    tie=True,
    qkv_bias=False,
    qk_norm=False,
    max_positions=64,
)
MAX_TOKENS = 12


def append(cache: KVCache, slot: int, values: list[int]) -> None:
    cache.extend(causal_rows(slot, values, start=cache.length(slot)))
    rows = torch.tensor(values, dtype=torch.float32)[:, None, None]
    heads = rows * torch.tensor([1.0, 100.0])[:, None].expand(-1, SHAPE.head_dim)
    for layer in range(SHAPE.layers):
        cache.append(layer, slot, heads + layer, -heads)


def check(cache: KVCache, slot: int, want: list[int]) -> None:
    assert cache.length(slot) == len(want)
    expected = torch.tensor(want, dtype=torch.float32)
    for layer in range(SHAPE.layers):
        keys, values = cache.rows(layer, slot)
        for head, factor in enumerate((1.0, 100.0)):
            for lane in range(SHAPE.head_dim):
                assert torch.equal(keys[head, :, lane], expected * factor + layer)
                assert torch.equal(values[head, :, lane], -expected * factor)


@given(st.data())
def test_any_mix_of_appends_gathers_and_cuts_equals_a_list(data: st.DataObject):
    cache = KVCache(SHAPE, num_slots=2, max_tokens=MAX_TOKENS)
    slots = cache.take(), cache.take()
    model: dict[int, list[int]] = {slot: [] for slot in slots}
    fresh = 1
    for _ in range(data.draw(st.integers(1, 8))):
        slot = data.draw(st.sampled_from(slots))
        rows = model[slot]
        action = data.draw(st.sampled_from(["append", "gather", "truncate"]))
        if action == "append" and len(rows) < MAX_TOKENS:
            count = data.draw(st.integers(1, MAX_TOKENS - len(rows)))
            new = list(range(fresh, fresh + count))
            fresh += count
            append(cache, slot, new)
            rows.extend(new)
        elif action == "gather":
            base = data.draw(st.integers(0, len(rows)))
            order = data.draw(st.permutations(range(base, len(rows))))
            kept = order[: data.draw(st.integers(0, len(order)))]
            cache.gather(slot, base, kept)
            model[slot] = rows[:base] + [rows[row] for row in kept]
        elif action == "truncate":
            length = data.draw(st.integers(0, len(rows)))
            cache.truncate(slot, length)
            del rows[length:]
        for each in slots:
            check(cache, each, model[each])
