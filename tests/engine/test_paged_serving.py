"""Pages, prefix reuse, chunks of prompts, preemption, requests of their own kind: same tokens.

Every run is compared with plain decoding of the same requests, whole prompts, whole slabs, one at a
time. Every KV row carries its position and token, and no step may see one in the wrong place.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

import codesign.engine.gpu.workers as workers
from codesign.config import Deployment, Serving
from codesign.engine.gpu.paging import PageTable
from codesign.engine.gpu.run import rank_setup, run_on_ranks
from codesign.engine.model import load_decoder
from codesign.engine.run import run_candidate
from codesign.plan import Candidate
from codesign.policy.options import RequestOptions
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling
from codesign.prompts import BoundRequest
from tests.engine.conftest import CONFIG, VOCABULARY, Pair

OUTPUT = 20
SERVINGS = {
    "pages": (Serving(preemption=True), 1 << 16),
    "preemption": (Serving(preemption=True), 1670),
    "prefixes": (Serving(prefix_cache=True), 4000),
    "chunks": (Serving(prefill_chunk=100), 1 << 16),
    "all": (Serving(prefill_chunk=200, prefix_cache=True, preemption=True), 1150),
}


@pytest.fixture(scope="module")
def long_pair(pair, tmp_path_factory) -> Pair:
    """The tiny pair with room for prompts of several prefix blocks."""
    root = tmp_path_factory.mktemp("long")
    for source in (pair.target_dir, pair.draft_dir):
        folder = root / source.name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 4096}))
        (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    return Pair(root / "target", root / "draft", load_decoder(root / "target"))


def prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist())


def mixed_requests() -> list[BoundRequest]:
    """Shared prefixes of one and two blocks, a prompt of whole blocks, twice, and short ones."""
    shared = prompt(1024, 0)
    prompts = [
        (*shared, *prompt(40, 1)),
        prompt(7, 2),
        (*shared[:512], *prompt(60, 3)),
        shared,
        prompt(90, 4),
        (*shared, *prompt(3, 5)),
        shared,
        (5,),
    ]
    return [BoundRequest(i, 0.0, "chat", ids, OUTPUT) for i, ids in enumerate(prompts)]


OWN_WAYS = (
    RequestOptions(),
    RequestOptions(sampling=Sampling(temperature=0.8, seed=5)),
    RequestOptions(sampling=Sampling(temperature=1.1, top_k=7, seed=6), speculates=False),
    RequestOptions(sampling=Sampling(temperature=1.0, top_p=0.7, seed=7)),
    RequestOptions(stop_tokens=frozenset(range(0, VOCABULARY, 4))),
    RequestOptions(speculates=False),
)


def own_ways(requests) -> list[BoundRequest]:
    return [replace(r, options=OWN_WAYS[r.request_id % len(OWN_WAYS)]) for r in requests]


class Checked(PageTable):
    """Keeps every table that was made."""

    made: ClassVar[list[Checked]] = []

    def __init__(self, num_slots, paging=None) -> None:
        super().__init__(num_slots, paging)
        self.num_pages = paging.num_pages if paging else 0
        Checked.made.append(self)

    def check(self) -> None:
        """Every page is free, or kept, or some request's; the draft may hold its last requests'."""
        held = {page for number in self.requests for page in self.pages(number)}
        assert self.num_free + self.num_idle + len(held) == self.num_pages


@pytest.fixture
def on_ranks(long_pair, monkeypatch):
    """Serve on ranks; at the end nobody holds a page and no step saw a row in the wrong place."""
    monkeypatch.setattr(workers, "PageTable", Checked)

    def run(policy, requests, serving=None, max_kv_tokens=1 << 16, *, ranks=(1, 0), **options):
        Checked.made.clear()
        candidate = Candidate(Deployment(*ranks), parse_policy(policy), 3)
        setup = rank_setup(
            candidate, requests, target=long_pair.target_dir, draft=long_pair.draft_dir,
            serving=serving, max_kv_tokens=max_kv_tokens, page_rows=16, device="cpu",
            dtype="float32", check=True, **options,
        )  # fmt: skip
        faults = []
        result = run_on_ranks(
            setup, candidate, requests, serving=serving, max_kv_tokens=max_kv_tokens,
            inspect=lambda rank: faults.extend(m.num_faults() for m in rank.models.values()),
        )  # fmt: skip
        assert not any(faults)
        assert not result.records.notes
        for table in Checked.made:
            table.check()
        assert Checked.made[0].requests == ()
        return result

    return run


@pytest.fixture(scope="module")
def plain(long_pair):
    """Outputs of plain decoding on the CPU engine, one request at a time; kept."""
    kept = {}

    def outputs(requests, sampling=None):
        key = (tuple(requests), sampling)
        if key not in kept:
            candidate = Candidate(Deployment(1, 0), parse_policy("plain"), 1)
            kept[key] = run_candidate(
                candidate, requests, target=long_pair.target, draft=None, sampling=sampling,
                max_kv_tokens=1 << 16,
            ).outputs  # fmt: skip
        return kept[key]

    return outputs


@pytest.mark.parametrize("serving", SERVINGS)
@pytest.mark.parametrize("policy", ["plain", "tree-4x2x2"])
def test_ranks_share_memory_and_steps_without_changing_a_token(on_ranks, plain, policy, serving):
    requests = mixed_requests()
    how, max_kv_tokens = SERVINGS[serving]
    ours = on_ranks(policy, requests, how, max_kv_tokens)
    assert ours.outputs == plain(requests)
    told = ours.records.requests
    assert any(r.num_preemptions for r in told) == (max_kv_tokens < 2000)
    assert any(r.cached_tokens for r in told) == how.prefix_cache
    if how.prefill_chunk:
        assert ours.records.rounds.column("prefill_tokens").max() <= how.prefill_chunk


@pytest.mark.parametrize("policy", ["plain", "chain-3"])
def test_requests_of_their_own_kind_share_a_batch(on_ranks, plain, policy):
    requests = own_ways(mixed_requests())
    run_sampling = Sampling(temperature=0.7, seed=1)
    how, max_kv_tokens = SERVINGS["all"]
    ours = on_ranks(policy, requests, how, max_kv_tokens, sampling=run_sampling)
    expected = plain(requests, run_sampling)
    assert ours.outputs == expected
    assert any(len(tokens) < OUTPUT for tokens in expected.values()), "no stop token was met"
    drafted = {r.request_id: r.num_draft_tokens for r in ours.records.requests}
    for request in requests:
        decodes = len(expected[request.request_id]) > 1
        is_drafted_for = policy != "plain" and decodes and request.options.speculates
        assert (drafted[request.request_id] > 0) == is_drafted_for


def test_a_draft_on_ranks_of_its_own_shares_as_well(on_ranks, plain):
    requests = own_ways(mixed_requests())
    how, max_kv_tokens = SERVINGS["all"]
    ours = on_ranks("async-tree-4x2x2", requests, how, max_kv_tokens, ranks=(1, 1))
    assert ours.outputs == plain(requests)
    assert sum(r.num_accepted_tokens for r in ours.records.requests) > 0
    assert any(r.num_preemptions for r in ours.records.requests)
