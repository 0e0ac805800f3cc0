"""An inflated int4 target on GPUs: no way of drafting changes a token; parity, delays, lost ranks.

The small models are random, so that nothing is downloaded; prompts are the shipped ones, byte by
byte. A table at the end says how many rounds there were, how many requests another number of GPUs
turns round, and how close their calls were.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import codesign.engine.gpu.ranks as rank_module
import codesign.engine.gpu.run as run_module
from benchmarks.random_pair import inflate_source, small_config, write_source_pair
from codesign.candidate import Candidate
from codesign.config import Deployment
from codesign.engine.gpu.group_drafter import GroupDrafter
from codesign.engine.gpu.launch import keep_waiting
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.gpu.request_rows import rows_to_expand
from codesign.engine.gpu.run import run_on_ranks
from codesign.engine.gpu.slabs import Slabs
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling
from codesign.prompts import BoundRequest, load_prompts

ROOT = Path(__file__).parents[2]
NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not NUM_GPUS, reason="needs a GPU")]
TWO_GPUS = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")
PROMPTS, NEW_TOKENS, BATCH, ROWS = 64, 256, 8, 64
SAMPLINGS = {"greedy": Sampling(), "0.7": Sampling(0.7, seed=3)}
CONFIG = small_config(layers=16, max_positions=4096)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Directories of a target of Llama-3.2-1B's shape, and of a small draft: noisy."""
    root = tmp_path_factory.mktemp("lossless")
    write_source_pair(root, CONFIG)
    shutil.move(inflate_source(root, "llama-3.2-1b", prefix=f"test-{root.name}"), root / "target")
    keep_waiting(NUM_GPUS > 1)
    return root


def requests(count: int = PROMPTS, new_tokens: int = NEW_TOKENS) -> list[BoundRequest]:
    prompts = load_prompts()
    texts = [prompts[i % len(prompts)].text.encode()[: 300 - i] for i in range(count)]
    return [BoundRequest(i, 0.0, "", tuple(text), new_tokens) for i, text in enumerate(texts)]


def serve(pair, policy, asked, *, max_batch=BATCH, rows=ROWS, **options):
    spec = parse_policy(policy)
    candidate = Candidate(Deployment(1, int(spec.is_async)), spec, max_batch)
    setup = rank_setup(
        candidate, asked, target=pair / "target", draft=pair / "draft", max_kv_tokens=1 << 16,
        smallest_bucket=rows, **options,
    )  # fmt: skip
    keep_waiting(setup.num_ranks - 1)  # for the next run: loading takes as long as a run
    run = run_on_ranks(setup, candidate, asked, max_kv_tokens=1 << 16)
    assert not run.records.notes
    return run


@pytest.fixture(scope="module")
def both(pair, serve_both):
    """Runs without and with a draft on the same ranks, by sampling and policy, each made once."""
    runs = {}

    def run(name, policy, target_ranks):
        key = name, policy, target_ranks
        if key not in runs:
            spec = parse_policy(policy)
            candidate = Candidate(Deployment(target_ranks, int(spec.is_async)), spec, BATCH)
            setup = rank_setup(
                candidate, requests(), target=pair / "target", draft=pair / "draft",
                max_kv_tokens=1 << 16, smallest_bucket=ROWS, sampling=SAMPLINGS[name],
            )  # fmt: skip
            keep_waiting(setup.num_ranks - 1)
            runs[key] = serve_both(setup, candidate, requests(), max_kv_tokens=1 << 16)
        return runs[key]

    return run


ON_TWO = [TWO_GPUS, pytest.mark.multigpu]
WAYS = [
    ("tree-8x4x2", 1),
    pytest.param("async-tree-8x4x2", 1, marks=ON_TWO),
    pytest.param("tree-8x4x2", 2, marks=ON_TWO),
]


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize(("policy", "target_ranks"), WAYS)
def test_speculation_changes_no_token(both, show_runs, name, policy, target_ranks):
    plain, ours = both(name, policy, target_ranks)
    show_runs(f"{policy} on {target_ranks} target ranks, {name}", plain, ours)
    assert ours.outputs == plain.outputs
    assert len(ours.records.rounds) < 0.8 * len(plain.records.rounds)
    assert not plain.records.notes + ours.records.notes


@TWO_GPUS
@pytest.mark.multigpu
@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_that_another_number_of_gpus_turns_round_were_close_calls(
    pair, both, check_calls, name
):
    one = both(name, "async-tree-8x4x2", 1)[0].outputs
    two = both(name, "tree-8x4x2", 2)[0].outputs
    check_calls(f"two GPUs for one, {name}", pair / "target", requests(), one, two, SAMPLINGS[name])


@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_that_another_number_of_rows_turns_round_were_close_calls(
    pair, both, check_calls, name
):
    sampling = SAMPLINGS[name]
    made = "async-tree-8x4x2" if NUM_GPUS > 1 else "tree-8x4x2"
    many = both(name, made, 1)[0].outputs
    few = serve(pair, "plain", requests(), rows=8, sampling=sampling).outputs
    check_calls(f"8 rows for {ROWS}, {name}", pair / "target", requests(), many, few, sampling)


class ParityDrafter(GroupDrafter):
    """Compares the slab rows that each new row sees, and its answer, with a fresh forward."""

    num_checked = 0

    def forward(self, expansion, fanout):
        choices = super().forward(expansion, fanout)
        if ParityDrafter.num_checked < 300:
            for rows, (tokens, log_probs) in zip(expansion, choices, strict=True):
                request = rows_to_expand(rows, self._slots[rows.request_id])
                seen_in_tree = rows.visible or [()] * len(rows.tokens)
                first = len(rows.tokens) - len(rows.nodes)  # rows before are not asked about
                for i, (best, chances) in enumerate(zip(tokens, log_probs, strict=True), first):
                    steps = [request.prefixes[i] + step for step in seen_in_tree[i]]
                    seen = [*range(request.prefixes[i]), *steps]
                    self.check(seen, request.slot, best, chances)
        return choices

    def check(self, rows, slot, best, chances):
        rank = self._leader.rank
        labels = rank.slabs.labels(slot)
        assert [labels[row][0] for row in rows] == list(range(len(rows)))
        device = rank.forward.device
        path = torch.tensor([labels[row][1] for row in rows], device=device)
        fresh = Slabs(
            rank.forward.shape, num_slots=1, max_tokens=len(rows), dtype=rank.forward.dtype,
            device=device,
        )  # fmt: skip
        with torch.inference_mode():
            hidden = rank.forward.prompt_hidden(path, 0, fresh)
            wanted = torch.log_softmax(rank.forward.head.logits(hidden)[0], dim=-1)[best].tolist()
        assert chances == pytest.approx(wanted, abs=0.25)
        for ours, theirs in (
            (rank.slabs.keys_LBGME, fresh.keys_LBGME),
            (rank.slabs.values_LBGME, fresh.values_LBGME),
        ):
            found, right = ours[:, slot][:, :, rows].float(), theirs[:, 0].float()
            apart = (found - right).norm(dim=-1) / right.norm(dim=-1)
            assert float(apart.max()) < 0.2, "a wrong row is as far away as it is long"
        ParityDrafter.num_checked += 1


@pytest.mark.parametrize("policy", ["tree-4x2x3", "async-tree-8x4x3"])
def test_every_row_that_the_draft_sees_equals_a_fresh_forward(
    pair, policy, monkeypatch, shown, overlapping_draft
):
    ParityDrafter.num_checked = 0
    monkeypatch.setattr(rank_module, "GroupDrafter", ParityDrafter)
    monkeypatch.setattr(run_module, "LocalDraft", overlapping_draft)
    spec = parse_policy(policy)
    candidate = Candidate(Deployment(1, int(spec.is_async)), spec, 3)
    asked = requests(3, 40)
    setup = rank_setup(
        candidate, asked, target=pair / "target", draft=pair / "draft", max_kv_tokens=1 << 16,
        check=True,
    )  # fmt: skip
    faults = []
    run_on_ranks(
        replace(setup, draft_ranks=0), candidate, asked, max_kv_tokens=1 << 16,
        inspect=lambda rank: faults.extend(m.num_faults() for m in rank.models.values()),
    )  # fmt: skip
    shown(f"rows of a draft compared, {policy}", rows=ParityDrafter.num_checked)
    assert ParityDrafter.num_checked >= 100
    assert not any(faults)


@TWO_GPUS
@pytest.mark.multigpu
def test_a_thousand_rounds_over_slow_links_change_no_token(pair, slow_links, show_runs):
    asked = requests(16)
    plain = serve(pair, "plain", asked)
    ours = serve(pair, "async-tree-8x4x2", asked, max_batch=1, draft_delay=slow_links)
    show_runs("slow links", plain, ours)
    assert len(ours.records.rounds) >= 1000
    assert ours.outputs == plain.outputs


@pytest.fixture(scope="module")
def lost_models(tmp_path_factory):
    return str(tmp_path_factory.mktemp("lost"))


@TWO_GPUS
@pytest.mark.multigpu
@pytest.mark.parametrize(
    ("stage", "says", "finished"),
    [
        ("killed_target", "target rank 1 ended, exit code -9", 0),
        ("killed_draft", "draft rank 0 ended, exit code -9", 4),
        ("hung_target", "gave no answer within 4 s", 0),
    ],
)
def test_a_lost_rank_ends_the_run_or_its_speculation_within_ten_seconds(
    lost_models, shown, stage, says, finished
):
    words = ["-m", "benchmarks.bench_rank_groups", "--stage", stage, "--models", lost_models]
    done = subprocess.run(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        timeout=90,
        check=True,
    )
    row = json.loads(done.stdout.rpartition("ROW ")[2])
    shown(stage, seconds=row["seconds_to_the_end"])
    assert row["seconds_to_the_end"] < 10
    assert row["finished"] == finished
    assert row["tokens"] > 0
    assert says in row["notes"][0]
