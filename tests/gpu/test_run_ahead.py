"""Ranks on GPUs run ahead of the draft's host: the same drafts, nearly all guesses confirmed."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.random_pair import small_config, write_random_pair
from codesign.candidate import Candidate
from codesign.config import Deployment
from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.growth import growth_words
from codesign.engine.gpu.launch import keep_waiting
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.gpu.run import run_on_ranks
from codesign.engine.run import PolicySetup
from codesign.kernels import leaf_choices as ops
from codesign.kernels.step_rows import StepRows
from codesign.policy.cost import Calibration
from codesign.policy.protocol import Growth
from codesign.policy.speculation import parse_policy
from codesign.prompts import BoundRequest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability(0)[0] != 9,
    reason="needs a Hopper GPU",
)
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
CALIBRATION = Calibration(0.85, 0.25)
ROWS, CHOICES, LONGEST = 8, 7, 136


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    write_random_pair(root, small_config(layers=4, vocabulary=997), noise=0.15)
    return root


@pytest.fixture
def serve(pair, watched_drafts):
    """Outputs, all candidates, guesses and those that were confirmed of a run."""

    def run(policy, *, ahead=True, ranks=1):
        spec = parse_policy(policy)
        generator = torch.Generator().manual_seed(2)
        prompts = [torch.randint(0, 997, (1 + 37 * i,), generator=generator) for i in range(5)]
        requests = [BoundRequest(i, 0.0, "", tuple(p.tolist()), 64) for i, p in enumerate(prompts)]
        with watched_drafts(is_async=spec.is_async, ahead=ahead) as watched:
            candidate = Candidate(Deployment(ranks, int(spec.is_async)), spec, 1)
            setup = rank_setup(
                candidate, requests, target=pair / "target", draft=pair / "draft", check=True,
                policy=PolicySetup(spec, calibration=CALIBRATION),
            )  # fmt: skip
            setup, faults = replace(setup, draft_ranks=0), []
            keep_waiting(setup.num_ranks - 1)  # for the next run: loading takes as long as a run
            result = run_on_ranks(
                setup, candidate, requests,
                inspect=lambda rank: faults.extend(m.num_faults() for m in rank.models.values()),
            )  # fmt: skip
        assert not any(faults)
        assert not result.records.notes
        return (result.outputs, watched.candidates, watched.num_guesses, watched.num_confirmed)

    return run


def compare(serve, shown, policy, ranks=1) -> None:
    alone, ours = serve(policy, ahead=False, ranks=ranks), serve(policy, ranks=ranks)
    guesses, confirmed = ours[2:]
    drafts = sum(one != other for one, other in zip(alone[1], ours[1], strict=False))
    shown(f"run ahead, {policy} on {ranks}", rounds=len(ours[1]), guesses=guesses,
          confirmed=confirmed, drafts_differ=drafts)  # fmt: skip
    assert ours[0] == alone[0]
    assert ours[1] == alone[1]
    assert alone[2] == 0
    assert guesses > len(ours[1])
    assert confirmed > 0.99 * guesses


@pytest.mark.parametrize("policy", ["tree-8x4x4", "chain-5", "async-tree-8x4x12", "tree-12x10x3"])
def test_drafts_are_those_that_the_host_alone_would_send(serve, shown, policy):
    compare(serve, shown, policy)


@HOPPER
def test_steps_ahead_in_pairs_choose_and_answer_the_same(serve, monkeypatch):
    alone, in_pairs_or_not = serve("tree-8x4x4", ahead=False), []
    hidden = RankForward.hidden

    def noted(*of, in_pairs=False):
        in_pairs_or_not.append(in_pairs)
        return hidden(*of, in_pairs=in_pairs)

    monkeypatch.setattr(RankForward, "hidden", noted)  # runs where a graph is captured
    monkeypatch.setattr(RankForward, "pairs_may_do_more", lambda *_: True)
    monkeypatch.setattr(RankForward, "pairs_do_more", lambda *_: True)
    ours = serve("tree-8x4x4")
    assert ours[:2] == alone[:2]
    assert ours[3] > 0.99 * ours[2] > 0
    assert in_pairs_or_not.count(True) == in_pairs_or_not.count(False) > 0


@TWO_GPUS
@pytest.mark.multigpu
@pytest.mark.parametrize("policy", ["tree-8x4x4", "async-tree-8x4x8"])
def test_followers_choose_the_same_rows(serve, shown, policy):
    compare(serve, shown, policy, ranks=2)


def device_side(words: np.ndarray, positions: list[int], device: str):
    """A pool, a step's rows and where the choice is told."""
    buffer = torch.from_numpy(words.copy()).to(device)
    columns = torch.zeros(5, ROWS, dtype=torch.int32, device=device)
    columns[1, : len(positions)] = torch.tensor(positions, dtype=torch.int32)
    path = torch.zeros(ROWS, LONGEST, dtype=torch.int32, device=device)
    rows = StepRows(*columns, path, scratch_slot=1)
    chosen = torch.zeros(ops.chosen_words(ROWS), dtype=torch.int32, device=device)
    return buffer, rows, chosen


def random_growth(chance: random.Random, calibration: Calibration) -> tuple[Growth, list[int]]:
    """A tree of random parents and weights, and the positions of the last four of its nodes."""
    parents = [-1, *[chance.randrange(i) for i in range(1, 20)]]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    rivals = sorted((-3 * chance.random(), chance.randrange(20), i) for i in range(30))[::-1]
    growth = Growth(
        request_id=0, steps=4, width=4, fanout=CHOICES, calibration=calibration, prefix=90,
        weights=tuple(-chance.random() for _ in range(4)),
        rivals=tuple((1000 + i, 91 + depths[slot], slot) for _, slot, i in rivals),
        rival_weights=tuple(weight for weight, _, _ in rivals),
        slot_parents=tuple(parents), end=90 + chance.choice((6, 40)),
    )  # fmt: skip
    return growth, [90 + depth for depth in depths[-4:]]


def random_answer(chance: random.Random) -> torch.Tensor:
    """Tokens and the bits of log probabilities of a step's rows."""
    words = np.zeros((2, ROWS, CHOICES), np.int32)
    words[0] = np.arange(ROWS * CHOICES).reshape(ROWS, CHOICES)
    draws = -np.random.default_rng(chance.randrange(1 << 30)).exponential(size=words[0].shape)
    words[1] = draws.astype(np.float32).view(np.int32)
    return torch.from_numpy(words.reshape(-1))


def check_same(ours: StepRows, theirs: StepRows) -> None:
    """Rows on the CPU and on the GPU, and their paths as far as they are looked at."""
    for name in ("tokens_T", "positions_T", "slots_T", "kv_rows_T", "prefixes_T"):
        assert getattr(theirs, name).tolist() == getattr(ours, name).tolist()
    for row, position in enumerate(ours.positions_T.tolist()):
        length = max(position - 90, 0) + 1
        assert theirs.path_TQ[row, :length].tolist() == ours.path_TQ[row, :length].tolist()


@pytest.mark.parametrize("calibration", [Calibration(), CALIBRATION], ids=["plain", "calibrated"])
def test_the_kernel_chooses_as_the_reference_on_the_cpu(calibration):
    chance = random.Random(4)
    for _ in range(50):
        growth, positions = random_growth(chance, calibration)
        words = growth_words(growth, slab=0, first_row=0)
        (ours, one, chosen), (theirs, other, found) = (
            device_side(words, positions, device) for device in ("cpu", "cuda")
        )
        for _ in range(growth.steps):
            answer = random_answer(chance)
            ops.choose_leaves(answer, ops.PoolWords.of(ours), one, chosen)
            ops.choose_leaves(answer.cuda(), ops.PoolWords.of(theirs), other, found)
            assert found.tolist() == chosen.tolist()
            check_same(one, other)
        pool, copied = ops.PoolWords.of(ours), ops.PoolWords.of(theirs.cpu())
        assert pool.scalars.tolist() == copied.scalars.tolist()
        assert torch.allclose(pool.weights_P, copied.weights_P, rtol=0, atol=1e-12)


def test_a_choice_takes_a_few_microseconds(shown):
    growth, positions = random_growth(random.Random(1), CALIBRATION)
    words = growth_words(growth, slab=0, first_row=0)
    buffer, rows, chosen = device_side(words, positions, "cuda")
    pool = ops.PoolWords.of(buffer)
    answer = torch.zeros(2 * ROWS * CHOICES, dtype=torch.int32, device="cuda")
    kept, times = buffer.clone(), []
    for _ in range(20):
        buffer.copy_(kept)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)  # the host is ahead of the GPU
        start.record()
        ops.choose_leaves(answer, pool, rows, chosen)
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    median = sorted(times)[len(times) // 2]
    shown("choice of a draft's next leaves", microseconds=f"{median:.1f}")
    assert median < 100
