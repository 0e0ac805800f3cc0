"""Long contexts and batches shared out over blocks: the same bits, on a Hopper GPU.

python -m pytest tests/gpu/test_long_attention.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from codesign.kernels.attention_shares import CLASSES, SharedParts, max_tokens, shares_of
from codesign.kernels.cuda_module import CudaKernel
from codesign.kernels.fused_attention import fused_attention
from codesign.kernels.row_attention import SeenRows

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability(0)[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
PATH, PAGE, PADDING = 64, 64, 3
ROWS = ("slots_T", "positions_T", "prefixes_T", "path_TP")
# query heads, key/value heads, head size: Llama 70B at TP4 and TP1, 1B
SHAPES = [(16, 2, 128), (64, 8, 128), (32, 8, 64)]
REPLAYS = 1000


@dataclass(frozen=True)
class Layer:
    """Slabs of a layer, and what comes to its attention."""

    qkv: Tensor
    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor
    heads: int
    parts: SharedParts

    @classmethod
    def drawn(
        cls,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        slab_rows: int,
        rows: int = 8,
        slabs: int = PADDING + 1,
        seed: int = 0,
    ) -> Layer:
        generator = torch.Generator("cuda").manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=generator, device="cuda")
            return values.to(torch.bfloat16)

        angles = torch.rand(rows, head_dim // 2, generator=generator, device="cuda") * 6
        size = (slabs, kv_heads, slab_rows, head_dim)
        parts = SharedParts.make(heads, kv_heads, head_dim, angles.device)
        parts.values.fill_(torch.nan)  # whoever reads what nobody left shows it
        parts.scores.fill_(torch.nan)
        return cls(
            draw(rows, (heads + 2 * kv_heads) * head_dim), draw(*size), draw(*size),
            angles.cos(), angles.sin(), heads, parts,
        )  # fmt: skip

    def room(self, rows: Forward) -> Tensor:
        """For a result, without numbers."""
        size = (rows.places.shape[0], self.heads * self.keys.shape[3])
        return torch.full(size, torch.nan, dtype=torch.bfloat16, device="cuda")

    def run(
        self,
        rows: Forward,
        *,
        most_shares: int = CLASSES,
        pdl: bool = False,
        in_pairs: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        count = rows.places.shape[0]
        return fused_attention(
            self.qkv[:count], self.cos[:count], self.sin[:count], self.keys, self.values,
            rows.seen, rows.places, heads=self.heads, parts=self.parts,
            out_TN=self.room(rows) if out is None else out, most_shares=most_shares, pdl=pdl,
            in_pairs=in_pairs,
        )  # fmt: skip

    def expected(self, rows: Forward) -> Tensor:
        """The output in float64; the new keys and values are in the slabs."""
        kv_heads, head_dim = self.keys.shape[1], self.keys.shape[3]
        a, b = self.qkv.float().view(len(self.qkv), -1, head_dim).chunk(2, -1)
        cos, sin = self.cos[:, None], self.sin[:, None]
        q = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(torch.bfloat16).double()
        out = []
        for row, slot in enumerate(rows.seen.slots_T.tolist()):
            if slot == PADDING:
                out.append(q.new_zeros(self.heads * head_dim))
                continue
            prefix, position = (int(t[row]) for t in (rows.seen.prefixes_T, rows.seen.positions_T))
            path = rows.seen.path_TP[row, : position + 1 - prefix].long() + prefix
            index = torch.cat((torch.arange(prefix, device="cuda"), path))
            keys = self.keys[slot].index_select(1, index).double()
            values = self.values[slot].index_select(1, index).double()
            mine = q[row, : self.heads].view(kv_heads, -1, head_dim)
            score = mine @ keys.transpose(1, 2) / math.sqrt(head_dim)
            out.append((score.softmax(-1) @ values).flatten())
        return torch.stack(out)


@dataclass(frozen=True)
class Forward:
    """Where rows are and what they see."""

    seen: SeenRows
    places: Tensor

    @classmethod
    def of(
        cls, requests: list[tuple[int, int]], *, padding: int = 0, first_slot: int = 0
    ) -> Forward:
        """Requests, (context, new rows) each: a tree whose rows hang on the one two above."""
        slots, positions, prefixes, places, paths = [], [], [], [], []
        for slot, (context, new) in enumerate(requests, start=first_slot):
            for row in range(new):
                path = [*range(row % 2, row + 1, 2)]
                slots.append(slot)
                positions.append(context + len(path) - 1)
                prefixes.append(context)
                places.append(context + row)
                paths.append(path + [0] * (PATH - len(path)))
        for row in range(padding):
            slots.append(PADDING)
            positions.append(0)
            prefixes.append(0)
            places.append(row)
            paths.append([row] + [0] * (PATH - 1))
        columns = (slots, positions, prefixes, paths, places)
        *seen, where = (torch.tensor(c, dtype=torch.int32, device="cuda") for c in columns)
        return cls(SeenRows(*seen, padding_slot=PADDING), where)

    def copy_(self, other: Forward) -> None:
        for name in ROWS:
            getattr(self.seen, name).copy_(getattr(other.seen, name))
        self.places.copy_(other.places)

    def clone(self) -> Forward:
        seen = replace(self.seen, **{name: getattr(self.seen, name).clone() for name in ROWS})
        return Forward(seen, self.places.clone())


def check(found: Tensor, wanted: Tensor) -> None:
    assert found.isfinite().all()
    for row in range(len(wanted)):
        error = (found[row].double() - wanted[row]).norm() / wanted[row].norm().clamp(min=1e-30)
        assert error < 1e-2, f"row {row}: {error}"


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_every_number_of_clusters_gives_the_same_bits(heads: int, kv_heads: int, head_dim: int):
    layer = Layer.drawn(heads, kv_heads, head_dim, slab_rows=32_064)
    for context in (0, 1, 15, 500, 2047, 4000, 4092, 4095, 4096, 4097, 8200, 17_000, 32_000):
        for new in (1, 8):
            rows = Forward.of([(context, new)])
            found = layer.run(rows, most_shares=1)
            check(found, layer.expected(rows))
            for shares in (2, 4, 8):
                other = layer.run(rows, most_shares=shares)
                assert torch.equal(other, found), f"{context} + {new}, {shares} shares"
            for shares in (1, 8):
                other = layer.run(rows, most_shares=shares, in_pairs=True)
                assert torch.equal(other, found), f"{context} + {new}, {shares} shares, in pairs"
    assert not layer.parts.arrived.any()


def test_a_request_of_eight_rows_has_several_clusters(shown, monkeypatch):
    """Models with two key/value heads; how many others have is shown."""
    grids: list[tuple[int, ...]] = []
    launch = CudaKernel.launch

    def noted(self, grid, *args, **options) -> None:
        grids.append(grid)
        launch(self, grid, *args, **options)

    monkeypatch.setattr(CudaKernel, "launch", noted)
    shares = []
    for heads, kv_heads, head_dim in SHAPES:
        Layer.drawn(heads, kv_heads, head_dim, slab_rows=64).run(Forward.of([(20, 8)]))
        shares.append(shares_of(-(-8 // max_tokens(heads, kv_heads)), grids[-1][2]))
        shown(f"attention {heads}, {kv_heads}, {head_dim}", grid=grids[-1], clusters=shares[-1])
    assert shares[0] >= 3


def paged(layer: Layer) -> tuple[Layer, Tensor]:
    """The same slabs in pages, wherever they lie; and their tables."""
    slabs, _, slab_rows, _ = layer.keys.shape
    count = slab_rows // PAGE
    order = torch.randperm(slabs * count, generator=torch.Generator().manual_seed(1)).cuda()

    def pages(slab: Tensor) -> Tensor:
        parts = slab.unflatten(2, (count, PAGE)).transpose(1, 2).flatten(0, 1)
        return torch.empty_like(parts).index_copy_(0, order, parts).contiguous()

    tables = order.view(slabs, count).to(torch.int32).contiguous()
    return replace(layer, keys=pages(layer.keys), values=pages(layer.values)), tables


def test_neighbours_padding_and_pages_change_no_bit():
    layer = Layer.drawn(16, 2, 128, slab_rows=9216, rows=16)
    requests = [(9000, 3), (15, 2), (2046, 5)]
    rows = Forward.of(requests, padding=6)
    found = layer.run(rows)
    check(found, layer.expected(rows))
    assert not found[10:].any()
    for shares in (1, 2, 8):
        assert torch.equal(layer.run(rows, most_shares=shares), found)
    in_pages, tables = paged(layer)
    paged_rows = replace(rows, seen=replace(rows.seen, tables_SK=tables))
    for shares in (1, 2, 8):
        assert torch.equal(in_pages.run(paged_rows, most_shares=shares), found)
    first = 0
    for slot, (context, new) in enumerate(requests):
        at = slice(first, first + new)
        alone = replace(layer, qkv=layer.qkv[at], cos=layer.cos[at], sin=layer.sin[at])
        own = Forward.of([(context, new)], first_slot=slot)
        assert torch.equal(alone.run(own), found[at]), f"request {slot}"
        first += new


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_requests_side_by_side_have_the_bits_that_they_have_alone(
    heads: int, kv_heads: int, head_dim: int
):
    first, slabs = PADDING + 1, PADDING + 1 + 40
    layer = Layer.drawn(heads, kv_heads, head_dim, slab_rows=5120, rows=72, slabs=slabs)
    one_row_each = ((7, 1, 1), (8, 1, 0), (9, 1, 7), (12, 1, 4), (24, 1, 8), (40, 1, 0))
    for count, new, padding in (*one_row_each, (5, 4, 0), (18, 4, 0), (3, 16, 0)):
        contexts = [5000 * (i * 11 % count) // count for i in range(count)]
        requests = [(context, new) for context in contexts]  # of one class and of two
        rows = Forward.of(requests, padding=padding, first_slot=first)
        found = layer.run(rows)
        check(found, layer.expected(rows))
        assert torch.equal(layer.run(rows, in_pairs=True), found)
        for i, request in enumerate(requests):
            at = slice(i * new, (i + 1) * new)
            alone = replace(layer, qkv=layer.qkv[at], cos=layer.cos[at], sin=layer.sin[at])
            own = Forward.of([request], first_slot=first + i)
            assert torch.equal(alone.run(own), found[at]), f"{count} x {new}, request {i}"
    assert not layer.parts.arrived.any()


def test_plain_decoding_gives_the_bits_of_a_tree():
    layer = Layer.drawn(16, 2, 128, slab_rows=8256)
    for context in (2045, 4090, 8190):
        rows = Forward.of([(context, 8)])
        found = layer.run(rows)
        for row in range(8):
            path = rows.seen.path_TP[row, : row // 2 + 1].long() + context
            position = context + len(path) - 1
            for slab in (layer.keys, layer.values):
                slab[1, :, :context] = slab[0, :, :context]
                slab[1, :, context:position] = slab[0].index_select(1, path[:-1])
            at = slice(row, row + 1)
            alone = replace(layer, qkv=layer.qkv[at], cos=layer.cos[at], sin=layer.sin[at])
            own = Forward.of([(position, 1)], first_slot=1)
            for shares in (1, 8):
                other = alone.run(own, most_shares=shares)[0]
                assert torch.equal(other, found[row]), f"{context}, row {row}"


def test_a_graph_of_two_layers_serves_every_length_a_thousand_times():
    """Two layers in turn, each launched before the one in front has ended, with the same parts."""
    layers = [Layer.drawn(16, 2, 128, slab_rows=32_064, seed=seed) for seed in range(2)]
    layers[1] = replace(layers[1], parts=layers[0].parts)
    # Their new rows lie apart, so that each run leaves the slabs as it found them.
    cases = [Forward.of([(n, 8)]) for n in (30, 500, 2040, 2060, 4100, 9000, 16_400, 32_000)]
    cases += [Forward.of([(n, 3)], padding=5) for n in (100, 2100, 20_000)]
    cases += [
        Forward.of([(n, 4), (m, 4)]) for n, m in ((40, 12_000), (8300, 2080), (25_000, 31_000))
    ]
    for layer in layers:
        for rows in cases:
            layer.run(rows)
    wanted = [[layer.run(rows, most_shares=1) for layer in layers] for rows in cases]
    rows = cases[0].clone()
    outs = [layers[0].room(rows) for _ in range(4)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i, out in enumerate(outs):
            layers[i % 2].run(rows, pdl=True, out=out)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(REPLAYS):
        case = turn * 5 % len(cases)
        rows.copy_(cases[case])
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        for i, out in enumerate(outs):
            wrong += (out != wanted[case][i % 2]).sum()
    assert int(wrong) == 0
    assert not layers[0].parts.arrived.any()
