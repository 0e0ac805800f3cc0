"""What is timed on rank groups: the rows it says it is, on the ranks that serve, and what fits."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pandas as pd
import pytest

from codesign.engine.gpu.launch import LocalRanks
from codesign.engine.gpu.rank_setup import RankSetup
from codesign.engine.gpu.ranks import DRAFT_MODEL, TARGET_MODEL
from codesign.engine.gpu.run_ahead import RunAhead
from codesign.engine.partner import DraftLostError
from codesign.engine.run import PolicySetup
from codesign.models import NGRAM
from codesign.policy.speculation import SpeculationSpec
from codesign.policy.walk import Sampling
from codesign.profiler import rank_rounds
from codesign.profiler.bench import SPARE_ROWS
from codesign.profiler.grids import (
    RANK_CONTEXTS,
    RANK_GRID,
    chain_shapes,
    draft_shapes,
    target_shapes,
)
from codesign.profiler.rank_bench import rank_bench
from codesign.profiler.rank_draft import lead_draft
from codesign.profiler.rank_joins import joining_timings
from codesign.profiler.rank_rounds import batch_timings, stream_timings
from codesign.profiler.rank_steps import NUM_SLOTS, rows_that_fit
from codesign.profiler.steps import StepShape

LONGEST = 128


def setup(pair, draft: Path | str, *, draft_ranks: int = 0, temperature: float = 0.0) -> RankSetup:
    return RankSetup(
        target=pair.target_dir,
        draft=draft,
        target_ranks=1,
        draft_ranks=draft_ranks,
        policy=PolicySetup(SpeculationSpec(kind="tree", rows=17, width=16, expansions=1)),
        sampling=Sampling(temperature),
        num_slots=NUM_SLOTS,
        target_tokens=LONGEST + SPARE_ROWS,
        draft_tokens=LONGEST + SPARE_ROWS,
        max_rows=32,
        device="cpu",
        dtype="float32",
        lead_draft=lead_draft,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_staged_verification_runs_the_rows_it_says_and_accepts_one_draft_token(
    pair, temperature, verifies_as_staged
):
    with rank_bench(setup(pair, NGRAM, temperature=temperature)) as bench:
        verifies_as_staged(bench.target_steps, bench.seconds)
        for _ in range(NUM_SLOTS + 1):  # its slab is given back
            assert bench.seconds(StepShape("prefill", 1, 32)) > 0


@pytest.fixture
def served_once(monkeypatch) -> None:
    """Rounds are not served again for steadier ones, which test_rank_rounds.py is about."""
    monkeypatch.setattr(rank_rounds, "_TRIES", 1)


@pytest.mark.usefixtures("served_once")
@pytest.mark.parametrize("is_model", [True, False])
def test_every_step_of_a_draft_can_be_timed_again_and_again(pair, is_model):
    draft = pair.draft_dir if is_model else NGRAM
    with rank_bench(setup(pair, draft)) as bench:
        for _ in range(2):
            for shape in draft_shapes((32, LONGEST), few=False, lean=True, grid=RANK_GRID):
                assert bench.seconds(shape) > 0
        assert bench.kv_rooms() == {}  # not known of a CPU
        for count in (1, 8):
            loops = bench.loop_seconds(count)
            assert len(loops) > 10
            assert min(loops) > 0
        found = pd.concat([*stream_timings(bench), *batch_timings(bench)])
        assert {"round", "reroot", "grown"} <= set(found["op"])
        assert set(found["op"]) <= {"round", "reroot", "grown", "drafted", "ahead"}
        ahead = found.loc[found["op"] == "ahead"]
        assert ahead["requests"].value_counts().min() > 20
        assert set(ahead["requests"]) == {4, 8}
        assert (ahead["rows"] == ahead["requests"]).all()
        # Mixed prompts, half as long as slabs on average, and up to 40 tokens more.
        longest = bench.setup.target_tokens - SPARE_ROWS
        rows = ahead["context"] / ahead["requests"]
        assert rows.between(min(256, longest // 2), min(256, longest // 2) + 40).all()
        grown = found.loc[found["op"] == "grown"]
        children = set(grown["nodes"] / grown["rows"])
        assert children == {2.0, 6.0, 14.0} if is_model else children <= {2.0, 6.0, 14.0}
        assert set(found.loc[found["op"] == "drafted", "rows"]) <= {2, 7}
        kept = found.loc[found["op"] == "reroot", ["kept_trees", "kept_nodes", "requests"]]
        assert len(kept) > 20  # of rounds behind another
        assert kept.notna().all(axis=None)
        assert (kept["kept_trees"] <= kept["requests"]).all()
        assert ((kept["kept_nodes"] > 0) == (kept["kept_trees"] > 0)).all()
        assert found.loc[found["op"] != "reroot", "seconds"].gt(0).all()
        assert found.groupby("op")["seconds"].median().gt(0).all()  # a late look leaves no re-root
        rounds = found.loc[found["op"] == "round"]
        assert set(rounds["requests"]) == {1}
        assert {1, 3} <= set(rounds["rows"])
        assert rounds["context"].between(16, 112).all()
        assert found["requests"].max() == 8
        joined = joining_timings(bench).groupby("op")["requests"].agg(["size", "max"])
        assert joined["size"].min() > 10
        assert joined["max"].max() == 4
        assert bench.seconds(StepShape("draft", 1, 4, 64)) > 0  # and is timed as before


@pytest.mark.usefixtures("served_once")
def test_a_split_times_each_side_alone_and_beside_the_other(pair, monkeypatch):
    """And notices that the draft has ended while the target is kept busy beside it."""
    ranks, start = [], LocalRanks.__init__
    monkeypatch.setattr(LocalRanks, "__init__", lambda *own: (ranks.append(own[0]), start(*own))[1])
    with rank_bench(setup(pair, pair.draft_dir, draft_ranks=1)) as bench:
        for _ in range(3):  # circumstances change in any order
            bench.keep_drafting()
            assert bench.seconds(StepShape("target", 2, 4, 64)) > 0
            bench.keep_verifying()
            assert bench.seconds(StepShape("draft", 2, 4, 64)) > 0
            bench.rest()
            assert bench.seconds(StepShape("draft_prefill", 1, 64)) > 0
        bench.keep_drafting()
        served = pd.concat([*stream_timings(bench), *batch_timings(bench)])
        links = served.loc[served["op"] == "link"]
        assert len(links) == (served["op"] == "reroot").sum() > 20
        assert links["seconds"].ge(0).all()
        assert links["seconds"].median() > 0  # of a host that looks late there is none
        kept = served.loc[served["op"] == "reroot", ["kept_trees", "kept_nodes"]]
        assert kept.notna().all(axis=None)
        assert ((kept["kept_nodes"] > 0) == (kept["kept_trees"] > 0)).all()
        assert (served["op"] == "round").any()
        missed = served.loc[served["op"] == "missed"]
        assert len(missed) >= 4  # fewer tell a fit nothing
        assert missed["seconds"].min() > 0.0
        assert set(missed["requests"]) == {1}
        bench.keep_verifying()
        for shape in chain_shapes((64,)):
            assert bench.seconds(shape) > 0
        assert set(joining_timings(bench)["op"]) == {"joined", "settled"}
        assert bench.seconds(StepShape("draft", 2, 4, 64)) > 0
        assert bench.seconds(StepShape("choice", 8, 8, 64)) > 0
        bench.keep_verifying()
        os.kill(ranks[0].pids[0], signal.SIGKILL)
        with pytest.raises(DraftLostError, match="draft rank 0 ended, exit code -9"):
            bench.seconds(StepShape("draft", 2, 4, 64))
        bench._link = None  # nobody is there to be let go


def test_rows_lie_on_both_sides_of_every_bucket_and_what_is_timed_beside_is_timed_alone():
    for lean in (True, False):
        alone = target_shapes(RANK_CONTEXTS, beside=False, lean=lean, grid=RANK_GRID)
        rows = {s.requests * s.rows for s in alone if s.op == "target"}
        assert {1, 8, 9, 16, 17, 32, 33, 64, 65, 128} <= rows
        beside = set(target_shapes(RANK_CONTEXTS, beside=True, lean=lean, grid=RANK_GRID))
        assert beside <= set(alone)
        assert len(beside) >= 5
        draft = draft_shapes(RANK_CONTEXTS, few=False, lean=lean, grid=RANK_GRID)
        rows = {s.requests * s.rows for s in draft if s.op == "draft"}
        assert {1, 8, 9, 16, 18, 32, 33, 64, 65, 128} <= rows
    assert {s.requests for s in alone if s.op == "prefill"} == {1}  # each prompt runs by itself
    full = {s.rows for s in alone if s.op == "target" and s.requests == 8}
    assert {1, 2, 4, 8, 16} <= full  # a whole batch in every bucket


@pytest.mark.parametrize(
    ("row_bytes", "fits"),
    [
        ({TARGET_MODEL: 100, DRAFT_MODEL: 20}, (100, 126)),
        ({TARGET_MODEL: 100}, (120, 126)),
        ({DRAFT_MODEL: 20}, (600, None)),
        ({}, (None, None)),
    ],
)
def test_kv_rows_that_fit_count_the_draft_where_it_is(row_bytes, fits):
    assert rows_that_fit(12_000, row_bytes, 600) == fits
    assert rows_that_fit(-5, {TARGET_MODEL: 100}, 0) == (0, 0)


def test_expansions_in_a_row_run_ahead_as_in_a_run(pair, monkeypatch):
    begin, made = RunAhead.__init__, []

    def noted(self, *arguments) -> None:
        begin(self, *arguments)
        made.append(self)

    monkeypatch.setattr(RunAhead, "__init__", noted)
    with rank_bench(setup(pair, pair.draft_dir)) as bench:
        for shape in (StepShape("draft", 1, 4, 64), StepShape("draft", 1, 1, 32)):
            assert bench.seconds(shape) > 0
        (ahead,) = made
        confirmed = 2 * 2 * 2  # shapes, repetitions of each, steps behind the first
        assert ahead.num_confirmed == ahead.num_guesses == confirmed
        bench.seconds(StepShape("draft", 2, 4, 64))
        assert ahead.num_guesses == confirmed
