"""Attention of tree rows in one launch, against float64; without a GPU, its definition."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from codesign.kernels.fused_attention import MAX_TAIL, fits, fused_attention
from codesign.kernels.row_attention import Scratch, SeenRows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLAB_ROWS = 2048 if DEVICE == "cuda" else 640
# query heads, key/value heads, head size: Llama 70B at TP4, 8B, 3B, 1B; Qwen2 1.5B; SmolLM2; MHA
SHAPES = [
    (16, 2, 128),
    (32, 8, 128),
    (24, 8, 128),
    (32, 8, 64),
    (12, 2, 128),
    (9, 3, 64),
    (4, 4, 64),
]


@dataclass(frozen=True)
class Case:
    """A forward: what its rows see, and random tensors of a layer."""

    qkv_TN: Tensor
    cos_TF: Tensor
    sin_TF: Tensor
    keys: Tensor
    values: Tensor
    seen: SeenRows
    places: Tensor
    heads: int

    def run(self, **options) -> Tensor:
        rows, heads, head_dim = self.qkv_TN.shape[0], self.heads, self.keys.shape[3]
        scratch = options.pop("scratch", None) or Scratch.make(
            rows, heads, head_dim, self.keys.shape[2], self.qkv_TN.device
        )
        return fused_attention(
            self.qkv_TN,
            self.cos_TF,
            self.sin_TF,
            self.keys,
            self.values,
            self.seen,
            self.places,
            heads=heads,
            scratch=scratch,
            **options,
        )


@dataclass(frozen=True)
class Request:
    """Rows of one request: a prefix, a tree in the slab, new rows that hang on either."""

    prefix: int
    tree: int
    new: int
    slot: int = 0
    is_chain: bool = False


def paths_of(request: Request, rng: np.random.Generator) -> list[list[int]]:
    """Random ancestors of the new rows, themselves last, counted from the prefix."""
    paths: list[list[int]] = []
    for row in range(request.tree + request.new):
        parent = row - 1 if request.is_chain else int(rng.integers(-1, row)) if row else -1
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    return paths[request.tree :]


def make_case(
    requests: list[Request],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    seed: int = 0,
    slabs: int = 4,
    slab_rows: int = SLAB_ROWS,
) -> Case:
    rng = np.random.default_rng(seed)
    columns: list[tuple[int, int, int, int]] = []
    paths: list[list[int]] = []
    for request in requests:
        for i, path in enumerate(paths_of(request, rng)):
            position = request.prefix + len(path) - 1
            place = request.prefix + request.tree + i
            columns.append((request.slot, position, request.prefix, place))
            paths.append(path)
    width = max(map(len, paths)) + 3
    padded = [path + [999_999] * (width - len(path)) for path in paths]
    slots, positions, prefixes, places = (
        torch.tensor(column, dtype=torch.int32, device=DEVICE)
        for column in zip(*columns, strict=True)
    )
    seen = SeenRows(slots, positions, prefixes, torch.tensor(padded, dtype=torch.int32).to(DEVICE))
    generator = torch.Generator(DEVICE).manual_seed(seed)
    size = (slabs, kv_heads, slab_rows, head_dim)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, device=DEVICE)
        return values.to(torch.bfloat16)

    frequency = 10_000.0 ** -(torch.arange(0, head_dim, 2, device=DEVICE) / head_dim)
    angle = positions[:, None] * frequency
    return Case(
        draw(len(columns), (heads + 2 * kv_heads) * head_dim),
        angle.cos().contiguous(),
        angle.sin().contiguous(),
        draw(*size),
        draw(*size),
        seen,
        places,
        heads,
    )


def expected(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """The output in float64, and keys and values afterwards."""
    rows, head_dim = case.qkv_TN.shape[0], case.keys.shape[3]
    kv_heads, heads = case.keys.shape[1], case.heads
    q, k, v = case.qkv_TN.view(rows, -1, head_dim).split((heads, kv_heads, kv_heads), dim=1)

    def turned(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        cos, sin = case.cos_TF[:, None], case.sin_TF[:, None]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    keys, values = case.keys.clone(), case.values.clone()
    slots, places = case.seen.slots_T.long(), case.places.long()
    keys[slots, :, places], values[slots, :, places] = turned(k), v
    q64 = turned(q).double().view(rows, kv_heads, heads // kv_heads, head_dim)
    out = torch.empty(rows, heads * head_dim, dtype=torch.float64, device=q.device)
    for row in range(rows):
        prefix, position = int(case.seen.prefixes_T[row]), int(case.seen.positions_T[row])
        index = [*range(prefix)]
        index += [prefix + int(i) for i in case.seen.path_TP[row, : position + 1 - prefix]]
        at = torch.tensor(index, device=q.device)
        k64 = keys[slots[row]].index_select(1, at).double()
        v64 = values[slots[row]].index_select(1, at).double()
        score = q64[row] @ k64.transpose(1, 2) / math.sqrt(head_dim)
        out[row] = (score.softmax(-1) @ v64).flatten()
    return out, keys, values


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def check(case: Case) -> None:
    wanted, keys, values = expected(case)
    out = torch.full_like(case.qkv_TN[:, : wanted.shape[1]].contiguous(), float("nan"))
    found = case.run(out_TN=out)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        assert fits(
            rows=case.qkv_TN.shape[0],
            heads=case.heads,
            kv_heads=case.keys.shape[1],
            head_dim=case.keys.shape[3],
            device=case.qkv_TN.device,
        )
    assert relative_error(found, wanted) < 5e-3
    for row in range(found.shape[0]):
        assert relative_error(found[row], wanted[row]) < 1e-2, f"row {row}"
    assert torch.equal(case.values, values)
    # a rotated key may round the other way: sine and cosine products are fused on a GPU
    torch.testing.assert_close(case.keys, keys, atol=0.04, rtol=0.01)
    untouched = torch.ones_like(keys, dtype=torch.bool)
    untouched[case.seen.slots_T.long(), :, case.places.long()] = False
    assert torch.equal(case.keys[untouched], keys[untouched])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_a_tree_behind_a_prefix_is_attended(heads: int, kv_heads: int, head_dim: int):
    request = Request(prefix=501, tree=5, new=8)
    check(make_case([request], heads=heads, kv_heads=kv_heads, head_dim=head_dim, seed=1))


@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 17, 31, 32, 127, 128, 129, 255, 256, 600])
def test_any_context_works(prefix: int):
    requests = [Request(prefix=prefix, tree=prefix % 7, new=8)]
    check(make_case(requests, heads=16, kv_heads=2, head_dim=128, seed=prefix))


def test_requests_of_ragged_sizes_share_a_forward():
    requests = [
        Request(prefix=300, tree=0, new=1, slot=2),
        Request(prefix=0, tree=0, new=5, slot=0),
        Request(prefix=77, tree=31, new=9, slot=3),
        Request(prefix=16, tree=2, new=3, slot=1),
    ]
    check(make_case(requests, heads=16, kv_heads=2, head_dim=128, seed=3))
    check(make_case(requests, heads=9, kv_heads=3, head_dim=64, seed=4))


def test_a_prompt_of_128_rows_is_a_chain_behind_its_context():
    request = Request(prefix=13, tree=0, new=128, is_chain=True)
    check(make_case([request], heads=8, kv_heads=2, head_dim=64, seed=5))


def test_rows_that_catch_up_count_new_rows_to_their_prefix():
    case = make_case(
        [Request(prefix=40, tree=0, new=6, is_chain=True)], heads=8, kv_heads=2, head_dim=64
    )
    seen = case.seen
    rows = SeenRows(seen.slots_T, seen.positions_T, seen.positions_T + 1, seen.path_TP)
    check(Case(**{**vars(case), "seen": rows}))


@pytest.mark.skipif(DEVICE == "cpu", reason="long on a CPU")
def test_a_context_of_32k_is_attended():
    request = Request(prefix=32_700, tree=20, new=8)
    check(
        make_case([request], heads=16, kv_heads=2, head_dim=128, slabs=1, slab_rows=32_768, seed=6)
    )


def test_the_largest_tail_is_attended():
    request = Request(prefix=15 + 16 * 5, tree=MAX_TAIL - 15 - 16, new=16)
    check(make_case([request], heads=16, kv_heads=2, head_dim=128, seed=7))


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_a_row_of_a_tree_gets_the_bits_of_plain_decoding(heads: int, kv_heads: int, head_dim: int):
    """The same keys in the same order of position, wherever they lie and whoever is beside them."""
    size = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    tree = make_case([Request(prefix=203, tree=40, new=8)], **size, seed=8)
    out = tree.run()
    for row in range(8):
        prefix, position = 203, int(tree.seen.positions_T[row])
        depth = position + 1 - prefix
        path = tree.seen.path_TP[row, :depth].long() + prefix
        keys, values = torch.zeros_like(tree.keys), torch.zeros_like(tree.values)
        keys[1, :, :prefix], values[1, :, :prefix] = (
            tree.keys[0, :, :prefix],
            tree.values[0, :, :prefix],
        )
        keys[1, :, prefix:position] = tree.keys[0].index_select(1, path[:-1])
        values[1, :, prefix:position] = tree.values[0].index_select(1, path[:-1])
        plain = make_case([Request(prefix=position, tree=0, new=1, slot=1)], **size)
        alone = Case(
            tree.qkv_TN[row : row + 1].contiguous(),
            tree.cos_TF[row : row + 1].contiguous(),
            tree.sin_TF[row : row + 1].contiguous(),
            keys,
            values,
            plain.seen,
            plain.places,
            heads,
        )
        assert torch.equal(alone.run()[0], out[row]), f"row {row}"


SCRATCH = 3  # slab of padding


def padded(case: Case, count: int) -> Case:
    """The same rows and ``count`` of padding; the scratch slab holds no numbers."""
    keys, values = case.keys.clone(), case.values.clone()
    keys[SCRATCH], values[SCRATCH] = torch.nan, torch.nan
    seen, rows = case.seen, torch.arange(count, dtype=torch.int32, device=DEVICE)

    def behind(column: Tensor, more: Tensor) -> Tensor:
        return torch.cat((column, more)).contiguous()

    path_TP = torch.zeros(count, seen.path_TP.shape[1], dtype=torch.int32, device=DEVICE)
    path_TP[:, 0] = rows
    slots_T = behind(seen.slots_T, torch.full_like(rows, SCRATCH))
    positions_T = behind(seen.positions_T, torch.zeros_like(rows))
    prefixes_T = behind(seen.prefixes_T, torch.zeros_like(rows))
    sees_TP = behind(seen.path_TP, path_TP)
    return Case(
        behind(case.qkv_TN, torch.ones_like(case.qkv_TN[:1]).expand(count, -1)),
        behind(case.cos_TF, torch.ones_like(case.cos_TF[:1]).expand(count, -1)),
        behind(case.sin_TF, torch.zeros_like(case.sin_TF[:1]).expand(count, -1)),
        keys,
        values,
        SeenRows(slots_T, positions_T, prefixes_T, sees_TP, padding_slot=SCRATCH),
        behind(case.places, rows),
        case.heads,
    )


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize(("new", "count"), [(4, 4), (1, 7), (7, 1), (9, 7), (5, 59)])
def test_padding_changes_no_bit_of_the_rows_in_front(heads, kv_heads, head_dim, new, count):
    requests = [Request(prefix=203, tree=6, new=new), Request(prefix=77, tree=0, new=1, slot=2)]
    alone = make_case(requests, heads=heads, kv_heads=kv_heads, head_dim=head_dim, seed=11)
    both = padded(alone, count)
    poisoned = both.keys.clone()
    out = torch.full((new + 1 + count, heads * head_dim), torch.nan, dtype=torch.bfloat16)
    found, wanted = both.run(out_TN=out.to(DEVICE)), alone.run()
    assert torch.equal(found[: new + 1], wanted)
    assert found.isfinite().all()
    assert torch.equal(both.keys[:SCRATCH], alone.keys[:SCRATCH])
    assert torch.equal(both.values[:SCRATCH], alone.values[:SCRATCH])
    if DEVICE == "cuda":  # neither written nor attended
        scratch = both.keys[SCRATCH:].view(torch.int16)
        assert torch.equal(scratch, poisoned[SCRATCH:].view(torch.int16))
        assert not found[new + 1 :].any()


@pytest.mark.parametrize("count", [1, 8, 128])
def test_a_forward_of_padding_alone_is_finite(count: int):
    alone = make_case([Request(prefix=5, tree=0, new=1)], heads=32, kv_heads=8, head_dim=64)
    both = padded(alone, count)
    columns = ("slots_T", "positions_T", "prefixes_T", "path_TP")
    seen = replace(both.seen, **{name: getattr(both.seen, name)[1:] for name in columns})
    rows = ("qkv_TN", "cos_TF", "sin_TF", "places")
    case = replace(both, seen=seen, **{name: getattr(both, name)[1:] for name in rows})
    out = torch.full((count, 32 * 64), torch.nan, dtype=torch.bfloat16)
    assert case.run(out_TN=out.to(DEVICE)).isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_one_graph_serves_every_tree_and_context():
    size = {"heads": 16, "kv_heads": 2, "head_dim": 128}
    first = make_case([Request(prefix=100, tree=0, new=8)], **size)
    wide = torch.zeros(8, 64, dtype=torch.int32, device=DEVICE)
    seen = SeenRows(*(t.clone() for t in (first.seen.slots_T, first.seen.positions_T)),
                    first.seen.prefixes_T.clone(), wide)  # fmt: skip
    case = Case(**{**vars(first), "seen": seen})
    case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run()
    for seed, prefix in enumerate((0, 3, 500, 1000, 64, 1900)):
        other = make_case([Request(prefix=prefix, tree=seed, new=8)], **size, seed=seed)
        for name in ("slots_T", "positions_T", "prefixes_T"):
            getattr(seen, name).copy_(getattr(other.seen, name))
        wide[:, : other.seen.path_TP.shape[1]] = other.seen.path_TP
        for name in ("qkv_TN", "cos_TF", "sin_TF", "keys", "values", "places"):
            getattr(case, name).copy_(getattr(other, name))
        wanted, _, _ = expected(other)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(out, wanted) < 5e-3, f"prefix {prefix}"
        again = out.clone()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, again)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("page_rows", [16, 64])
def test_rows_in_pages_give_the_bits_of_rows_in_slabs(heads, kv_heads, head_dim, page_rows):
    requests = [
        Request(prefix=300, tree=0, new=1, slot=2),
        Request(prefix=0, tree=0, new=5, slot=0),
        Request(prefix=77, tree=31, new=9, slot=3),
    ]
    whole = make_case(requests, heads=heads, kv_heads=kv_heads, head_dim=head_dim, seed=8)
    slabs, slab_rows = whole.keys.shape[0], whole.keys.shape[2]
    count = slab_rows // page_rows
    order = torch.randperm(slabs * count, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    tables = order.view(slabs, count).to(torch.int32).contiguous()

    def paged(slab: Tensor) -> Tensor:
        pages = slab.unflatten(2, (count, page_rows)).transpose(1, 2).flatten(0, 1)
        return torch.empty_like(pages).index_copy_(0, order, pages).contiguous()

    in_pages = replace(
        whole, keys=paged(whole.keys), values=paged(whole.values),
        seen=replace(whole.seen, tables_SK=tables),
    )  # fmt: skip
    scratch = Scratch.make(15, heads, head_dim, slab_rows, whole.qkv_TN.device)
    found = [case.run(scratch=scratch) for case in (whole, in_pages)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(in_pages.keys, paged(whole.keys))
    assert torch.equal(in_pages.values, paged(whole.values))
