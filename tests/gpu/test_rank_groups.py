"""Rank groups on GPUs: graphs and kernels change no token, in bfloat16 and bit for bit."""

from __future__ import annotations

import pytest
import torch

from benchmarks.random_pair import small_config, write_random_pair
from codesign.candidate import Candidate
from codesign.config import Deployment
from codesign.engine.gpu.launch import keep_waiting
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.gpu.run import run_on_ranks
from codesign.kernels import row_attention as ops
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling
from codesign.prompts import BoundRequest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
CONFIG = small_config(layers=4, vocabulary=997)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    write_random_pair(root, CONFIG, noise=0.15)
    return root


def requests(count: int, new_tokens: int = 48) -> list[BoundRequest]:
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 997, (1 + 37 * i,), generator=generator) for i in range(count)]
    return [BoundRequest(i, 0.0, "", tuple(p.tolist()), new_tokens) for i, p in enumerate(prompts)]


def serve(pair, policy, *, target_ranks=1, draft_ranks=0, sampling=None, check=False):
    candidate = Candidate(Deployment(target_ranks, draft_ranks), parse_policy(policy), 3)
    setup = rank_setup(
        candidate,
        requests(6),
        target=pair / "target",
        draft=pair / "draft",
        sampling=sampling or Sampling(),
        smallest_bucket=32,
        check=check,
    )
    keep_waiting(setup.num_ranks - 1)  # for the next run: loading takes as long as a run
    faults = []
    run = run_on_ranks(
        setup,
        candidate,
        requests(6),
        inspect=lambda rank: faults.extend(m.num_faults() for m in rank.models.values()),
    )
    assert not any(faults)
    return run


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, seed=3)], ids=["greedy", "0.7"])
def test_serial_speculation_changes_no_token(pair, sampling):
    plain = serve(pair, "plain", sampling=sampling)
    for policy in ("tree-8x4x2", "chain-3"):
        ours = serve(pair, policy, sampling=sampling)
        assert ours.outputs == plain.outputs
        assert len(ours.records.rounds) < len(plain.records.rounds)


def test_every_row_sees_its_own_path(pair):
    serve(pair, "tree-8x4x2", check=True)


@TWO_GPUS
@pytest.mark.multigpu
def test_a_draft_on_its_own_gpu_changes_no_token(pair):
    plain = serve(pair, "plain")
    ours = serve(pair, "async-tree-8x4x2", draft_ranks=1, check=True)
    assert ours.outputs == plain.outputs
    assert not ours.records.notes


@TWO_GPUS
@pytest.mark.multigpu
def test_two_target_ranks_serve_serial_speculation_as_plain_decoding(pair):
    plain = serve(pair, "plain", target_ranks=2)
    assert serve(pair, "tree-8x4x2", target_ranks=2).outputs == plain.outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_on_the_gpu_agrees_with_the_reference(dtype):
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn(2, 2, 512, 64, generator=generator).to("cuda", dtype) for _ in range(2)
    )
    q = torch.randn(5, 8, 64, generator=generator).to("cuda", dtype)
    columns = [[0, 1, 1, 0, 1], [0, 400, 127, 128, 511], [0, 397, 128, 128, 509]]
    seen = [torch.tensor(c, dtype=torch.int32, device="cuda") for c in columns]
    path = torch.tensor([[0, 0, 0, 0], [0, 2, 5, 7], [0] * 4, [0] * 4, [0, 1, 2, 0]])
    rows = ops.SeenRows(*seen, path.to("cuda", torch.int32))
    scratch = ops.Scratch.make(5, 8, 64, 512, torch.device("cuda"))
    ours = ops.row_attention(q, keys, values, rows, scratch).cpu().double()
    on_cpu = ops.SeenRows(*(c.cpu() for c in seen), path.int())
    in_double = [tensor.cpu().double() for tensor in (q, keys, values)]
    exact = ops.row_attention(*in_double, on_cpu, None)
    error = (ours - exact).norm() / exact.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)
