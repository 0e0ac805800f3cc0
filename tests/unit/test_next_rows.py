"""The next step of plain decoding: rows that go on are a token on, the others are padding."""

from __future__ import annotations

import pytest
import torch

from codesign.kernels import next_rows as ops
from codesign.kernels.step_rows import StepRows

SCRATCH, LONGEST = 77, 12


@pytest.fixture(params=["reference", "kernel"])
def next_rows(request):
    """The op and its Triton kernel in the interpreter."""
    if request.param == "reference":
        return ops.next_rows
    return request.getfixturevalue("interpreted")("next_rows_triton")[0].next_rows


@pytest.mark.parametrize(("num_rows", "count"), [(8, 8), (8, 1), (8, 0), (32, 24), (128, 100)])
@pytest.mark.parametrize("turn", [0, 1])
def test_each_row_that_goes_on_is_one_token_on(next_rows, num_rows, count, turn):
    generator = torch.Generator().manual_seed(num_rows + count)

    def drawn(most: int, *size: int) -> torch.Tensor:
        return torch.randint(0, most, size, generator=generator, dtype=torch.int32)

    columns, path, sampled = (
        drawn(1000, 5, num_rows),
        drawn(9, num_rows, LONGEST),
        drawn(50_000, num_rows),
    )
    goes = torch.zeros(num_rows, dtype=torch.bool)
    goes[torch.randperm(num_rows, generator=generator)[:count]] = True
    going = torch.stack([goes, ~goes] if turn == 0 else [~goes, goes]).int()
    before, paths = columns.clone(), path.clone()
    now = torch.tensor([turn], dtype=torch.int32)
    next_rows(sampled, going, now, StepRows(*columns, path, SCRATCH))
    tokens, positions, slots, kv_rows, prefixes = columns
    assert torch.equal(tokens[goes], sampled[goes])
    assert torch.equal(slots[goes], before[2][goes])
    for column, place in ((positions, 1), (kv_rows, 3), (prefixes, 4)):
        assert torch.equal(column[goes], before[place][goes] + 1)
    assert torch.equal(path[goes], paths[goes])
    assert slots[~goes].eq(SCRATCH).all()
    assert torch.equal(kv_rows[~goes], torch.arange(num_rows)[~goes].int())
    assert torch.equal(path[~goes, 0], kv_rows[~goes])
    assert torch.equal(path[:, 1:], paths[:, 1:])
    for column in (tokens, positions, prefixes):
        assert not column[~goes].any()
    assert now.tolist() == [turn]


def test_padding_stays_what_the_message_of_a_step_makes_it(next_rows):
    from codesign.engine.gpu.step_rows import DeviceRows, pack_step

    idle = torch.from_numpy(pack_step((), bucket=8, scratch_slot=3))
    before, rows = idle.clone(), DeviceRows.of(idle, 8)
    going, turn = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    next_rows(torch.full((8,), 9, dtype=torch.int32), going, turn, rows.changing(3))
    assert torch.equal(idle, before)
