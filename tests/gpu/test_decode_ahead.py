"""Ranks on GPUs run plain decoding ahead of the host: no token differs, nearly all are used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.random_pair import small_config, write_random_pair
from codesign.candidate import Candidate
from codesign.config import Deployment, Serving
from codesign.engine.gpu import run as gpu_run
from codesign.engine.gpu.decode_ahead import DecodeAhead
from codesign.engine.gpu.launch import keep_waiting
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.gpu.run import run_on_ranks
from codesign.engine.run import PolicySetup
from codesign.policy.cost import RoundCost, StepTime
from codesign.policy.options import RequestOptions
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling
from codesign.prompts import BoundRequest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
VOCABULARY = 997


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    write_random_pair(root, small_config(layers=4, vocabulary=VOCABULARY), noise=0.15)
    return root


def made_up(count: int) -> list[BoundRequest]:
    generator = torch.Generator().manual_seed(2)
    prompts = [
        torch.randint(0, VOCABULARY, (1 + 37 * i,), generator=generator) for i in range(count)
    ]
    return [
        BoundRequest(i, 0.002 * i, "", tuple(p.tolist()), 64 + 16 * (i % 3))
        for i, p in enumerate(prompts)
    ]


@pytest.fixture
def serve(pair, monkeypatch):
    """Outputs of a run, how many steps were run ahead in it and used, and the largest batch."""

    def run(requests, *, ahead=True, ranks=1, max_batch=3, serving=None, step=None, **options):
        found, faults = [], []
        begin = DecodeAhead.__init__

        def noted(self, *arguments) -> None:
            begin(self, *arguments)
            found.append(self)

        with monkeypatch.context() as patch:
            patch.setattr(DecodeAhead, "__init__", noted)
            if not ahead:
                patch.setattr(DecodeAhead, "_is_about_to_end", lambda _: False)
            candidate = Candidate(Deployment(ranks), parse_policy("plain"), max_batch)
            if step is not None:  # whose seconds tell who takes part
                options["policy"] = PolicySetup(candidate.speculation, RoundCost(*[step] * 4))
                # With more padding than there must be nobody takes turns otherwise.
                patch.setattr(gpu_run, "BUCKETS", (options["smallest_bucket"],))
            setup = rank_setup(
                candidate, requests, target=pair / "target", draft=None, check=True,
                serving=serving, **options,
            )  # fmt: skip
            keep_waiting(setup.num_ranks - 1)  # for the next run: loading takes as long as a run
            result = run_on_ranks(
                setup, candidate, requests, serving=serving,
                inspect=lambda rank: faults.extend(m.num_faults() for m in rank.models.values()),
            )  # fmt: skip
        assert not any(faults)
        assert not result.records.notes
        most = max(result.records.rounds.column("batch"))
        return result.outputs, found[0].num_ahead, found[0].num_used, most

    return run


def compare(serve, shown, what, requests, **options) -> float:
    """Serve in both ways; the largest batch."""
    alone, ours = serve(requests, ahead=False, **options), serve(requests, **options)
    differ = sum(alone[0][number] != tokens for number, tokens in ours[0].items())
    shown(f"decoding ahead, {what}", ahead=ours[1], used=ours[2], differ=differ)
    assert ours[0] == alone[0]
    assert alone[1] == 0
    assert ours[2] > 0.5 * 64
    assert ours[2] > 0.9 * ours[1]
    return ours[3]


@pytest.mark.parametrize("max_batch", [1, 3, 12])
def test_outputs_are_those_of_a_host_that_asks_for_every_step(serve, shown, max_batch):
    bucket = max(8, 16 * (max_batch > 8))  # of all steps: those of others round otherwise
    compare(
        serve, shown, f"{max_batch} at once", made_up(12), max_batch=max_batch,
        smallest_bucket=bucket,
    )  # fmt: skip


def test_each_request_samples_in_its_own_way(serve, shown):
    ways = (Sampling(), Sampling(0.8, seed=5), Sampling(1.1, top_k=7, seed=6))
    requests = [
        replace(r, options=RequestOptions(sampling=ways[r.request_id % 3])) for r in made_up(6)
    ]
    compare(serve, shown, "own sampling", requests)


def test_pages_are_there_before_their_rows(serve, shown):
    serving = Serving(preemption=True, prefix_cache=True)
    compare(serve, shown, "pages of 16 rows", made_up(9), serving=serving, page_rows=16)


def test_who_takes_turns_waits_for_the_host(serve, shown):
    stairs = StepTime(alpha=0.0, rows=(1, 8, 9, 12), seconds=(1.0, 1.0, 3.0, 3.0))
    # All are there from the first round on, and eight of them for 32 rounds after the others.
    requests = [
        replace(r, arrival=0.0, max_new_tokens=64 + 32 * (r.request_id % 3)) for r in made_up(12)
    ]
    most = compare(
        serve, shown, "12 at once, turns of 8", requests, max_batch=12, smallest_bucket=16,
        step=stairs,
    )  # fmt: skip
    assert most == 8


@TWO_GPUS
@pytest.mark.multigpu
@pytest.mark.parametrize("max_batch", [1, 8])
def test_followers_run_the_same_steps(serve, shown, max_batch):
    compare(serve, shown, f"{max_batch} at once on two", made_up(8), ranks=2, max_batch=max_batch)
