"""Rows that fill up a bucket change nothing and are not attended, on a Hopper GPU.

python -m pytest tests/gpu/test_padding.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.bench_forward import RandomWeights, one_request
from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.heads import DraftHead, StepHead, TargetHead
from codesign.engine.gpu.model_rank import ModelRank
from codesign.engine.gpu.slabs import Slabs
from codesign.engine.gpu.step_rows import DeviceRows, crowd_of, pack_step
from codesign.engine.gpu.tensor_group import SingleRank
from codesign.policy.walk import Sampling

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability(0)[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
CONTEXT = 300


@pytest.fixture(scope="module", params=["llama-3.2-1b", "llama-3.1-8b"])
def forward(request: pytest.FixtureRequest) -> Iterator[RankForward]:
    """Two layers of a shape with random weights."""
    torch.manual_seed(0)
    weights: Any = RandomWeights(request.param, 1)
    weights.shape = replace(weights.shape, layers=2)
    with torch.inference_mode():
        yield RankForward(weights, SingleRank())


def drawn_slabs(forward: RankForward, slots: int = 1, tokens: int = 1024) -> Slabs:
    """Contexts in all slabs, the same every time, and scratch."""
    shape = {"dtype": forward.dtype, "device": forward.device}
    slabs = Slabs(forward.shape, num_slots=slots, max_tokens=tokens, **shape)
    random = torch.Generator("cuda").manual_seed(1)
    for tensor in (slabs.keys_LBGME, slabs.values_LBGME):
        tensor[:, :slots].normal_(generator=random)
    return slabs


def poison(slabs: Slabs) -> None:
    """Leave no number in scratch."""
    slabs.keys_LBGME[:, slabs.scratch_slot] = torch.nan
    slabs.values_LBGME[:, slabs.scratch_slot] = torch.nan


def hidden(forward: RankForward, slabs: Slabs, rows: int, bucket: int) -> Tensor:
    """Of ``rows`` rows behind the context, in a bucket."""
    packed = pack_step([one_request(rows, CONTEXT)], bucket=bucket, scratch_slot=1)
    words = torch.from_numpy(packed).to(forward.device)
    return forward.hidden(DeviceRows.of(words, bucket), slabs, None)


@pytest.mark.parametrize(("rows", "bucket"), [(4, 8), (1, 8), (7, 8), (9, 16)])
@torch.inference_mode()
def test_a_padded_step_gives_the_bits_of_its_rows_alone(
    forward: RankForward, rows: int, bucket: int
) -> None:
    alone, padded = drawn_slabs(forward), drawn_slabs(forward)
    poison(padded)
    wanted = hidden(forward, alone, rows, rows)
    found = hidden(forward, padded, rows, bucket)
    assert torch.equal(found[:rows], wanted)
    assert found.isfinite().all()
    assert torch.equal(padded.keys_LBGME[:, 0], alone.keys_LBGME[:, 0])
    assert torch.equal(padded.values_LBGME[:, 0], alone.values_LBGME[:, 0])
    assert padded.keys_LBGME[:, 1].isnan().all(), "padding was written"


@pytest.mark.parametrize("is_target", [True, False])
@torch.inference_mode()
def test_one_graph_answers_the_same_whatever_lies_in_scratch(
    forward: RankForward, *, is_target: bool
) -> None:
    head: StepHead = TargetHead(Sampling()) if is_target else DraftHead(8)
    answers = []
    for poisoned in (False, True):
        rank = ModelRank(forward, drawn_slabs(forward), head)
        rank.prepare((8,))
        if poisoned:
            poison(rank.slabs)
        found = []
        for rows in (8, 4, 0, 1, 4):  # one graph, other numbers of rows
            requests = [one_request(rows, CONTEXT)] if rows else []
            answer = rank.answer(pack_step(requests, bucket=8, scratch_slot=1))
            found += answer.reshape(1 if is_target else 2, 8, -1)[:, :rows].flatten().tolist()
        answers.append(found)
        rank.close()
    assert answers[0] == answers[1]


@torch.inference_mode()
def test_fused_attention_holds_no_room_for_partial_results_of_the_other_kernels(
    forward: RankForward,
) -> None:
    """128 rows over 100,000 tokens would take 0.8 GB of the 1B, 1.7 of the 8B."""
    rank = ModelRank(forward, drawn_slabs(forward, tokens=100_000), TargetHead(Sampling()))
    before = torch.cuda.memory_allocated()
    rank.prepare((128,))
    assert torch.cuda.memory_allocated() - before < 256 << 20
    rank.close()


@torch.inference_mode()
def test_a_step_of_many_requests_is_attended_in_pairs_with_the_same_answer(
    forward: RankForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [replace(one_request(1, CONTEXT + i), slot=i) for i in range(8)]
    message = pack_step(requests, bucket=8, scratch_slot=8)
    assert forward.pairs_do_more(crowd_of(message))
    assert not forward.pairs_do_more(crowd_of(pack_step(requests[:1], bucket=8, scratch_slot=8)))
    run_in_pairs: list[bool] = []
    hidden_of = forward.hidden

    def noted(*args: Any, in_pairs: bool = False) -> Tensor:
        run_in_pairs.append(in_pairs)
        return hidden_of(*args, in_pairs=in_pairs)

    monkeypatch.setattr(forward, "hidden", noted)
    answers = []
    for allowed in (True, False):
        if not allowed:
            monkeypatch.setattr(forward, "pairs_do_more", lambda crowd: False)
        rank = ModelRank(forward, drawn_slabs(forward, slots=8), TargetHead(Sampling()))
        rank.prepare((8,), requests=8)
        captured = len(run_in_pairs)
        answers.append(rank.answer(message))
        assert len(run_in_pairs) == captured, "a graph was captured late"
        rank.close()
    assert True in run_in_pairs
    assert answers[0].tolist() == answers[1].tolist()
