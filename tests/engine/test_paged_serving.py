"""Pages, prefix reuse, chunks of prompts, preemption, requests of their own kind: same tokens.

Every run is compared with plain decoding of the same requests, whole prompts, whole slabs, one at a
time. Every KV row carries its position and token, and no step may see one in the wrong place.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

import codesign.engine.gpu.ranks as ranks_module
from codesign.candidate import Candidate
from codesign.config import Deployment
from codesign.engine.gpu import group_drafter, group_target
from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.group_drafter import GroupDrafter
from codesign.engine.gpu.paging import PageTable, Paging
from codesign.engine.gpu.prompt_rows import PROMPT_BUCKETS, SLOT_WORD, START_WORD
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.gpu.run import run_on_ranks
from codesign.engine.gpu.step_rows import KIND, PIECE
from codesign.kernels.row_samplings import needs_whole_rows
from codesign.policy.protocol import ExpansionRows, PromptRows
from codesign.policy.speculation import parse_policy
from codesign.policy.step_time import BUCKETS
from codesign.policy.walk import Sampling


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
def on_ranks(pair, new_text, monkeypatch):
    """Serve on ranks; at the end nobody holds a page and no step saw a row in the wrong place."""
    for module in (group_drafter, group_target):
        monkeypatch.setattr(module, "PageTable", Checked)

    def run(policy, requests, serving=None, max_kv_tokens=1 << 16, *, ranks=(1, 0), **options):
        Checked.made.clear()
        candidate = Candidate(Deployment(*ranks), parse_policy(policy), 3)
        setup = rank_setup(
            candidate, requests, target=pair.target_dir, draft=pair.draft_dir,
            serving=serving, max_kv_tokens=max_kv_tokens, page_rows=16, device="cpu",
            dtype="float32", check=True, **options,
        )  # fmt: skip
        faults = []
        result = run_on_ranks(
            setup, candidate, requests, serving=serving, max_kv_tokens=max_kv_tokens,
            new_text=new_text,
            inspect=lambda rank: faults.extend(m.num_faults() for m in rank.models.values()),
        )  # fmt: skip
        assert not any(faults)
        assert not result.records.notes
        for table in Checked.made:
            table.check()
        assert Checked.made[0].requests == ()
        return result

    return run


@pytest.mark.parametrize("policy", ["plain", "tree-4x2x2"])
def test_ranks_share_memory_and_steps_without_changing_a_token(
    on_ranks, plain_outputs, mixed_requests, policy, serving
):
    how, max_kv_tokens = serving
    ours = on_ranks(policy, mixed_requests, how, max_kv_tokens)
    assert ours.outputs == plain_outputs(mixed_requests)
    told = ours.records.requests
    assert any(r.num_preemptions for r in told) == (max_kv_tokens < 2000)
    assert any(r.cached_tokens for r in told) == how.prefix_cache
    if how.prefill_chunk:
        assert ours.records.rounds.column("prefill_tokens").max() <= how.prefill_chunk


@pytest.mark.usefixtures("at_rest")
def test_rounds_at_rest_change_no_token_on_ranks(on_ranks, plain_outputs, mixed_requests, serving):
    ours = on_ranks("tree-4x2x2", mixed_requests, *serving)
    assert ours.outputs == plain_outputs(mixed_requests)
    assert sum(r.num_accepted_tokens for r in ours.records.requests) > 0


@pytest.fixture
def padded(monkeypatch):
    """Ranks run prompts of up to 256 rows padded, as graphs do; returns the buckets taken."""
    taken = []
    hidden = RankForward.padded_prompt_hidden

    def spy(forward, prompt, slabs):
        taken.append(len(prompt.tokens_T))
        return hidden(forward, prompt, slabs)

    monkeypatch.setattr(RankForward, "padded_prompt_hidden", spy)
    monkeypatch.setattr(ranks_module, "prompt_buckets", lambda *_: PROMPT_BUCKETS)
    return taken


def test_padded_prompts_change_no_token(on_ranks, plain_outputs, mixed_requests, serving, padded):
    how, max_kv_tokens = serving
    ours = on_ranks("tree-4x2x2", mixed_requests, how, max_kv_tokens)
    assert ours.outputs == plain_outputs(mixed_requests)
    assert len(set(padded)) > 1


def test_padded_prompts_are_sampled_as_their_requests_want(
    on_ranks, plain_outputs, own_requests, all_at_once, padded
):
    sampling = Sampling(temperature=0.7, seed=1)
    ours = on_ranks("chain-3", own_requests, *all_at_once, sampling=sampling)
    assert ours.outputs == plain_outputs(own_requests, sampling)
    assert len(padded) > 20


@pytest.mark.parametrize("policy", ["plain", "chain-3"])
def test_requests_of_their_own_kind_share_a_batch(
    on_ranks, plain_outputs, own_requests, all_at_once, policy
):
    sampling = Sampling(temperature=0.7, seed=1)
    ours = on_ranks(policy, own_requests, *all_at_once, sampling=sampling)
    expected = plain_outputs(own_requests, sampling)
    assert ours.outputs == expected
    longest = max(map(len, expected.values()))
    assert any(len(tokens) < longest for tokens in expected.values()), "no stop token was met"
    drafted = {r.request_id: r.num_draft_tokens for r in ours.records.requests}
    for request in own_requests:
        decodes = len(expected[request.request_id]) > 1
        is_drafted_for = policy != "plain" and decodes and request.options.speculates
        assert (drafted[request.request_id] > 0) == is_drafted_for


@pytest.mark.parametrize("cut", [False, True])
def test_two_ranks_sample_each_request_in_its_own_way(
    on_ranks, plain_outputs, own_requests, all_at_once, cut
):
    """From their parts of the vocabulary, or from whole rows where a request cuts it."""
    requests = [
        r for r in own_requests if cut or not needs_whole_rows(r.options.sampling or Sampling())
    ]
    assert len({r.options.sampling for r in requests}) > 1
    ours = on_ranks("chain-3", requests, *all_at_once, ranks=(2, 0))
    assert ours.outputs == plain_outputs(requests)


def test_a_draft_on_ranks_of_its_own_shares_as_well(
    on_ranks, plain_outputs, own_requests, all_at_once
):
    ours = on_ranks("async-tree-4x2x2", own_requests, *all_at_once, ranks=(1, 1))
    assert ours.outputs == plain_outputs(own_requests)
    assert sum(r.num_accepted_tokens for r in ours.records.requests) > 0
    assert any(r.num_preemptions for r in ours.records.requests)


def test_a_draft_reads_no_block_that_another_request_has_taken_and_not_run():
    """The other one's prompt runs in parts; this one's waited until its first expansion."""
    prompt = tuple(range(1200))
    starts = []

    class Leader:
        scratch_slot = 3

        def tell(self, message):
            """Pages."""

        def ask(self, message, meanwhile=None):
            if message[KIND] == PIECE:
                starts.append((int(message[SLOT_WORD]), int(message[START_WORD])))
            return np.zeros(2 * BUCKETS[0], np.int32)

    drafter = GroupDrafter(
        Leader(), num_slots=3, choices=1, paging=Paging(64, 100), keeps_prefixes=True
    )
    drafter.run_prompts([PromptRows(1, prompt, 600)])
    drafter.forward([ExpansionRows(0, prompt, tuple(range(1200)), (0,), None, 0)], 1)
    drafter.run_prompts([PromptRows(1, (), 1200)])
    assert starts == [(0, 0), (1, 512), (0, 600)]
