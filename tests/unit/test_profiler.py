"""What a profile measures: the steps, their order, the recorded tokens, and going on later."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from codesign.acceptance import ABSENT_LOG_PROB, AcceptanceProfile
from codesign.artifacts import header
from codesign.config import Deployment
from codesign.engine import draft_worker
from codesign.engine.gpu.paging import PAGE_ROWS
from codesign.engine.model import load_decoder
from codesign.engine.run import DraftSource
from codesign.errors import HardwareError, InputError
from codesign.policy.protocol import DraftSide
from codesign.policy.walk import Sampling
from codesign.profiler import draft_steps
from codesign.profiler import store as store_module
from codesign.profiler.bench import DraftBench, StagedNgrams, TargetBench
from codesign.profiler.draft_steps import DraftSteps
from codesign.profiler.grids import (
    CPU_GRID,
    MAX_REQUESTS,
    RANK_CONTEXTS,
    RANK_GRID,
    chain_shapes,
    contexts_within,
    draft_shapes,
    target_shapes,
)
from codesign.profiler.host_pace import HostPace, usual_of
from codesign.profiler.link import link_seconds
from codesign.profiler.neighbour import Neighbour, NeighbourSetup
from codesign.profiler.rank_joins import joining_timings
from codesign.profiler.rank_parts import RankMeasurer
from codesign.profiler.rank_rounds import batch_timings, loop_timings, stream_timings
from codesign.profiler.recorder import QUICK_TOKENS, TOP_K, record_acceptance
from codesign.profiler.session import make_profile, splits
from codesign.profiler.steadiness import CHECK, change, small_steps, without_prompts
from codesign.profiler.steps import Effort, Group, StepShape, prompts_last, time_groups
from codesign.profiler.store import (
    ACCEPTANCE_PART,
    Part,
    PartStore,
    ProfileSettings,
    in_turns,
    measured_note,
    unseen,
)
from codesign.prompts import BoundRequest

SETTINGS = ProfileSettings("target", "ngram", 2)
ONE_PASS = Effort(seconds=1e9, min_passes=1, max_passes=1)


@pytest.fixture(scope="module")
def decoders(tiny_models):
    torch.set_num_threads(1)
    return load_decoder(tiny_models[0]), load_decoder(tiny_models[1])


def requests(count: int = 3, max_new_tokens: int = 12) -> list[BoundRequest]:
    generator = np.random.default_rng(0)
    return [
        BoundRequest(
            i, 0.0, "chat", tuple(generator.integers(0, 30, 20 + i).tolist()), max_new_tokens
        )
        for i in range(count)
    ]


# Which steps, in which order.


def test_shapes_cover_batches_rows_and_contexts():
    shapes = target_shapes((32, 128, 256, 512), beside=False, lean=False)
    verify = [s for s in shapes if s.op == "target"]
    assert {s.context for s in verify} == {32, 128, 256, 512}
    assert {1, 4, 8} <= {s.requests for s in verify}
    assert {1, 2, 4, 6, 8, 12, 16, 24, 32} <= {s.requests * s.rows for s in verify}
    assert {s.rows for s in shapes if s.op == "prefill"} >= {16, 64, 128, 256, 512}
    assert len(set(shapes)) == len(shapes)
    lean = target_shapes((32, 128, 256, 512), beside=False, lean=True)
    assert len(lean) < len(shapes)


def test_every_shape_timed_beside_a_partner_is_timed_alone_too():
    for contexts in ((32, 128, 256, 512), (32, 128)):
        alone = set(target_shapes(contexts, beside=False, lean=True))
        beside = set(target_shapes(contexts, beside=True, lean=True))
        assert beside < alone
        assert len(beside) >= 6


def test_a_short_model_is_timed_at_contexts_that_it_has():
    assert contexts_within(4096, 128) == (32, 128, 256, 512)
    assert contexts_within(300, 128) == (32, 128)
    assert contexts_within(64, 128) == (32,)


def test_four_rows_of_each_request_of_a_batch_are_drafted_at_two_contexts():
    shapes = draft_shapes(RANK_CONTEXTS, few=False, lean=True, grid=RANK_GRID)
    found = {s.context for s in shapes if (s.op, s.requests, s.rows) == ("draft", MAX_REQUESTS, 4)}
    assert found == {*RANK_CONTEXTS[:2]}


def test_requests_of_a_step_have_contexts_as_mixed_as_those_of_traffic():
    for requests in range(1, 25):
        for context in (0, 1, 9, 32, 160, 1023, 2048):
            contexts = StepShape("target", requests, 1, context).contexts
            assert len(contexts) == requests
            assert sum(contexts) == requests * context
            assert [*contexts] == sorted(contexts)
            # An even draw's: the largest of n lies n / (n + 1) of the way up.
            most = context * (0.1 + 1.8 * requests / (requests + 1))
            assert contexts[-1] == pytest.approx(context if requests == 1 else most, abs=1)


@pytest.mark.parametrize("contexts", [RANK_CONTEXTS, (160, 512), (160,)])
@pytest.mark.parametrize("grid", [RANK_GRID, CPU_GRID])
@pytest.mark.parametrize("lean", [False, True])
def test_the_longest_of_several_requests_has_no_more_rows_than_one_alone(contexts, grid, lean):
    shapes = target_shapes(contexts, beside=False, lean=lean, grid=grid)
    shapes += draft_shapes(contexts, few=False, lean=lean, grid=grid)
    several = [shape for shape in shapes if shape.requests > 1 and "prefill" not in shape.op]
    assert several
    assert max(max(shape.contexts) for shape in several) <= contexts[-1]
    if len(contexts) > 2:  # plain decoding: both ends of what several may have
        plain = {s.context for s in several if (s.op, s.requests, s.rows) == ("target", 8, 1)}
        assert plain == {contexts[0], contexts[-1] // 2}
        assert len(several) == len({*several}) or grid is RANK_GRID  # (8, 4) is there twice


def test_a_pass_times_each_shape_once_in_an_order_of_the_seed():
    shapes = draft_shapes((32, 128), few=False, lean=False)
    orders = []
    for seed in (0, 0, 1):
        seen: list[StepShape] = []

        def seconds_of(shape: StepShape, seen=seen) -> float:
            seen.append(shape)
            return 0.5

        group = Group(shapes, beside=True, prepare=lambda: None)
        rows = list(
            time_groups([group], seconds_of, effort=ONE_PASS, seed=seed, tick=lambda s: None)
        )
        assert len(rows) == len(shapes)
        assert {row["beside"] for row in rows} == {True}
        timed = seen[-len(shapes) :]  # before them: the warm-up
        assert Counter(timed) == Counter(shapes)
        orders.append(timed)
    assert orders[0] == orders[1] != orders[2]


def test_no_visit_repeats_the_order_of_another(tiny_models, monkeypatch, tmp_path):
    import codesign.profiler.session as profiler

    orders: dict[int, list[StepShape]] = {}
    measurer = profiler._CpuMeasurer(ProfileSettings(str(tiny_models[0]), "ngram", 1))
    for number, visit in enumerate(p for p in measurer.parts if p.name != ACCEPTANCE_PART):
        seen = orders.setdefault(number, [])
        monkeypatch.setattr(
            measurer, "_seconds_of", lambda shape, seen=seen: seen.append(shape) or 1.0
        )
        visit.measure(unseen)
    assert len(orders) == 3
    assert orders[0] != orders[1] != orders[2]
    assert len(set(orders[0])) == len(set(orders[1]))


def test_circumstances_alternate_from_pass_to_pass_and_long_prefills_stop_early():
    log: list[str] = []
    alone = Group((StepShape("prefill", 1, 64),), False, lambda: log.append("rest"))
    beside = Group((StepShape("target", 2, 4, 32),), True, lambda: log.append("busy"))
    effort = Effort(seconds=1e9, min_passes=3, max_passes=5)
    rows = list(
        time_groups([alone, beside], lambda s: 1.0, effort=effort, seed=0, tick=lambda s: None)
    )
    assert log == ["rest", "busy"] * 6  # one for the warm-up
    assert Counter(row["op"] for row in rows) == {"target": 5, "prefill": 3}
    assert rows[1] == {
        "op": "target",
        "rows": 8,
        "requests": 2,
        "context": 64,
        "beside": True,
        "seconds": 1.0,
    }


def test_each_visit_takes_its_share_and_no_visit_is_without_a_pass():
    assert Effort(9.0, 3, 15).of_each(3) == Effort(3.0, 1, 5)
    assert Effort(18.0, 3, 15).of_each(2) == Effort(9.0, 2, 8)
    assert Effort(18.0, 3, 15).of_each(1) == Effort(18.0, 3, 15)


def test_measuring_ends_with_its_seconds_but_not_before_the_fewest_passes():
    group = Group((StepShape("target", 1, 1, 32),), False, lambda: None)
    effort = Effort(seconds=1e-9, min_passes=3, max_passes=50)
    shares: list[float] = []
    rows = time_groups([group], lambda s: 1.0, effort=effort, seed=0, tick=shares.append)
    assert len(list(rows)) == 3
    assert max(shares) <= 1.0


def test_prompts_come_behind_all_other_steps_of_a_pass_from_short_to_long():
    long, short = (StepShape("prefill", 1, rows) for rows in (512, 9))
    draft = StepShape("draft_prefill", 1, 64)
    steps = tuple(StepShape("target", n, 1, 64) for n in range(1, 9))
    log: list[str] = []
    groups = prompts_last(
        [
            Group((long, *steps, short, draft), False, lambda: log.append("alone")),
            Group(steps[:2], True, lambda: log.append("beside")),
        ]
    )
    assert [len(group.shapes) for group in groups] == [8, 2, 3]
    effort = Effort(seconds=1e9, min_passes=2, max_passes=2)
    rows = list(time_groups(groups, lambda s: 1.0, effort=effort, seed=0, tick=lambda s: None))
    assert log == ["alone", "beside", "alone"] * 3
    for a_pass in (rows[:13], rows[13:]):
        assert [row["rows"] for row in a_pass[10:]] == [9, 64, 512]
        assert sorted(row["rows"] for row in a_pass[:8]) == list(range(1, 9))
    assert [row["rows"] for row in rows[:8]] != [row["rows"] for row in rows[13:21]]  # at random


def test_ranks_are_timed_beyond_one_page_of_keys_as_answers_are():
    assert min(RANK_CONTEXTS) > 2 * PAGE_ROWS


def test_of_several_series_the_lower_median_counts_where_the_host_alone_takes_the_time():
    def series(op: str, *seconds: float) -> pd.DataFrame:
        return pd.DataFrame({"op": op, "seconds": seconds}).astype({"op": str})

    slow, quick = series("loop", 5.0, 1.0, 5.0), series("loop", 2.0, 9.0, 2.0)
    quickest, nothing = series("loop", 1.0), series("link")
    assert [f["seconds"].tolist() for f in usual_of([slow, quick])] == [[2.0, 9.0, 2.0]]
    assert [f["seconds"].tolist() for f in usual_of([slow, quickest, quick])] == [[2.0, 9.0, 2.0]]
    assert [f["seconds"].tolist() for f in usual_of([nothing, series("link", 3.0)])] == [[3.0]]
    for op in ("round", "reroot"):
        assert len(usual_of([series(op, 1.0), series(op, 2.0)])) == 2
    assert usual_of([nothing, nothing]) == []


def host_at(paces: list[float], least: float = 0.0) -> tuple[HostPace, list[float]]:
    """A host whose pace is the next of these at each sample or series, and when series were."""
    clock, taken = iter(paces), []

    def series() -> list[pd.DataFrame]:
        taken.append(pace := next(clock))
        return [
            pd.DataFrame({"op": op, "seconds": [pace, pace + extra]})
            for op, extra in (("loop", 0.0), ("round", 1.0), ("link", 0.0))
        ]

    host = HostPace(lambda: next(clock), series, least)
    host.take()
    groups = host.watched([Group((), False, list), Group((), True, list)])
    for number in range(len(paces) - 2):
        if number < 5:
            groups[0].prepare()
    return host, taken


def kept_paces(host: HostPace) -> list[list[float]]:
    return [frame["seconds"].tolist()[:1] for frame in host.kept()]


def test_a_quiet_host_is_timed_twice_between_steps_and_both_series_count():
    host, taken = host_at([1.0, 1.1, 1.05, 1.0, 1.0, 1.1, 1.2])
    host.settle()
    assert taken == [1.0, 1.2]
    assert host.samples == [1.0, 1.1, 1.05, 1.0, 1.0, 1.1, 1.2]
    assert kept_paces(host) == [[1.0], [1.0], [1.2], [1.0]]  # of the host's own the lower median
    assert not host.is_unsettled
    assert host.note() == ""


def test_a_slow_start_and_end_are_made_good_by_a_series_in_between():
    host, taken = host_at([2.0, 2.1, 1.0, 1.0, 1.0, 1.0, 1.0, 2.2])
    assert taken == [2.0, 1.0]  # as soon as the host was quicker than in the series before
    host.settle()
    assert taken == [2.0, 1.0, 2.2]
    assert host.usual == 1.0
    assert kept_paces(host) == [[1.0]] * 3
    assert "slow in 3 of 7 samples" in host.note()
    assert "is not used" in host.note()


def test_a_single_quick_moment_of_a_slow_host_does_not_count():
    host, taken = host_at([2.0, 2.0, 1.0, 1.0, 2.1, 2.0, 2.2, 2.0])
    host.settle()
    assert taken[:2] == [2.0, 1.0]
    assert host.usual == 2.0  # as runs will see it
    assert kept_paces(host)[0] == [2.0]
    assert "most of the time" in host.note()


def test_series_go_on_a_little_until_one_is_taken_at_the_usual_pace():
    host, taken = host_at([1.0, 1.5, 1.5, 1.5, 1.5, 1.5, 2.5, 2.5, 1.5, 9.9])
    host.settle()
    assert taken == [1.0, 2.5, 2.5, 1.5]  # two more at most
    assert kept_paces(host) == [[1.5]] * 3
    host, taken = host_at([1.0, 1.5, 1.5, 1.5, 1.5, 1.5, 2.5, 2.5, 2.5, 9.9])
    host.settle()
    assert len(taken) == 4
    assert kept_paces(host) == [[1.0]] * 3  # the nearest
    assert "profile again" in host.note()


def test_a_slow_host_is_quick_enough_beside_long_steps():
    paces = [2.0, 2.1, 1.0, 1.0, 1.0, 1.0, 1.0, 2.2]
    host, taken = host_at(paces, least=1.3)
    assert taken == [2.0]  # no series more
    host.settle()
    assert not host.is_unsettled
    assert host.note() == ""
    assert host_at(paces, least=0.9)[1] == [2.0, 1.0]  # as soon as the host was quicker


def test_a_host_that_is_often_off_its_usual_pace_is_unsettled():
    assert not host_at([1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0])[0].is_unsettled
    assert host_at([1.0, 2.0, 1.0, 1.0, 2.0, 1.0, 1.0])[0].is_unsettled


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_part_meets_a_slow_host_with_more_passes_and_says_so(tiny_models, monkeypatch, is_slow):
    settings = ProfileSettings(
        str(tiny_models[0]), str(tiny_models[1]), 2, is_quick=True, device="cpu-ranks"
    )
    measurer, split = RankMeasurer(settings), Deployment(1, 1)
    before, paces = len(measurer.notes), iter([2.0, 2.0] if is_slow else [])
    monkeypatch.setattr(measurer, "_effort", Effort(1e9, 3, 3))
    bench = SimpleNamespace(
        seconds=lambda shape: 1.0,
        rest=list,
        keep_drafting=list,
        keep_verifying=list,
        kv_rooms=dict,
        pace=lambda: next(paces, 1.0),
        loop_seconds=lambda count: [next(paces, 1.0) if count == 1 else 1.0] * 2,
        setup=SimpleNamespace(draft_ranks=1),
        served_rounds=lambda policy, count, *tokens, context=None: SERVED.assign(batch=count),
        joined_rounds=lambda policy: SERVED.assign(prefill_tokens=[16, 0]),
    )
    part = measurer.time(bench, split, lambda share: None)
    steps, count = part.groupby("op")["seconds"], part["op"].value_counts()
    assert steps.get_group("loop").max() == 1.0
    assert count["pace"] >= 8 if is_slow else count["pace"] == 6
    assert len(measurer.notes) - before == is_slow
    shape = part.loc[(part["op"] == "target") & part["beside"]]
    repeats = shape.groupby(["rows", "requests", "context"]).size()
    assert set(repeats) <= ({4, 5} if is_slow else {3})


def test_a_slow_phase_of_the_host_is_seen_in_small_steps_that_are_timed_again():
    shapes = (
        StepShape("target", 1, 4, 64), StepShape("target", 1, 32, 64), StepShape("draft", 1, 8, 64),
        StepShape("target", 4, 2, 64), StepShape("prefill", 1, 64),
    )  # fmt: skip
    groups = [Group(shapes, False, lambda: None), Group(shapes, True, lambda: None)]
    [small] = small_steps(groups)
    target = Group((StepShape("target", 4, 2, 64),), False, lambda: None)
    assert [(s.op, s.rows) for s in small.shapes] == [("target", 4), ("draft", 8)]
    assert not any("prefill" in s.op for group in without_prompts(groups) for s in group.shapes)

    def timed(groups: list[Group], seconds: float) -> pd.DataFrame:
        rows = time_groups(
            groups, lambda shape: seconds, effort=CHECK, seed=0, tick=lambda share: None
        )
        return pd.DataFrame(list(rows))

    first = timed(groups, 2.0)
    assert change(first, timed([small], 2.0)) == 0.0
    assert change(first, timed([small], 1.8)) == pytest.approx(-0.1)
    assert change(first.iloc[:0], timed([small], 1.8)) == 0.0  # nothing to compare
    draft = timed([small], 2.0)
    draft.loc[draft["op"] == "draft", "seconds"] = 1.8  # a large target's steps hide the host
    assert change(first, pd.concat([draft, timed([target], 2.0)])) == pytest.approx(-0.1)


@pytest.mark.parametrize(("later", "counts"), [(0.9, True), (0.99, False), (1.1, False)])
def test_steps_are_timed_anew_only_where_the_host_was_slow_and_a_change_is_noted(
    tiny_models, later, counts
):
    settings = ProfileSettings(
        str(tiny_models[0]), str(tiny_models[1]), 2, is_quick=True, device="cpu-ranks"
    )
    measurer, split = RankMeasurer(settings), Deployment(1, 1)
    before, slow = len(measurer.notes), iter([2.0 * later])  # first of what is timed anew
    bench = SimpleNamespace(
        seconds=lambda shape: 1.0,
        rest=list,
        keep_drafting=list,
        keep_verifying=list,
        pace=lambda: later,
        loop_seconds=lambda count: [next(slow, later) if count == 1 else later] * 2,
        setup=SimpleNamespace(draft_ranks=1),
        served_rounds=lambda policy, count, *tokens, context=None: SERVED.assign(
            batch=count, target=later, reroot=later
        ),
    )
    groups = measurer._groups(bench, is_split=True)
    first = measurer._timed(bench, groups, ONE_PASS, lambda share: None)
    others = pd.DataFrame(
        [
            {"op": op, "requests": 1, "seconds": 1.0, "deployment": "1+1"}
            for op in ("link", "loop", "round", "reroot", "pace", "deciding")
        ]
    )
    part = pd.concat([first.assign(deployment="1+1"), others], ignore_index=True)
    bench.seconds = lambda shape: later
    found = measurer.steadied(bench, split, part)
    paces = set(found.loc[found["op"] == "pace", "seconds"])
    assert paces == ({2.0 * later, later} if counts else {1.0})
    is_step = ~found["op"].isin(["prefill", "draft_prefill", "deciding", "link", "pace"])
    steps, kept = found.loc[is_step], found.loc[~is_step & (found["op"] != "pace")]
    assert set(steps["seconds"]) == {later if counts else 1.0}
    assert set(kept["seconds"].round(9)) == ({1.0, 3e-5} if counts else {1.0})
    assert set(kept.loc[kept["op"] != "link", "op"]) == {"prefill", "draft_prefill", "deciding"}
    assert set(found["deployment"]) == {"1+1"}
    assert len(measurer.notes) - before == (abs(later - 1.0) > 0.03) + counts


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_forward_of_several_leaves_is_staged_below_the_first_level_of_a_tree(is_apart):
    bench = DraftSteps(StagedNgrams(), vocab=61, num_requests=2, is_apart=is_apart)
    seen = []

    def spied(worker, shape, *, expansions):
        stage(worker, shape, expansions=expansions)
        seen.append([worker.side.tree(i) for i in range(shape.requests)])

    stage, bench._stage = bench._stage, spied
    for rows in (1, 4, 16):
        assert bench.seconds(StepShape("draft", 2, rows, 32)) > 0
    assert bench.seconds(StepShape("reroot", 2, 8, 32)) > 0
    chain, tree, widest, _ = (trees[-1] for trees in seen)  # of the longest context
    assert chain.num_expanded == 1 + 3  # what was timed is in it, too
    levels = 4 if is_apart else 2  # trees that are kept are larger
    assert tree.num_expanded == 1 + 4 * (levels - 1) + 4 * 3
    assert max(tree.depths) > 2
    assert len(tree.children[0]) == 7  # as in a tree of eight rows
    assert widest.num_expanded > 1 + 2 * 16  # n-grams name few tokens in the end


@pytest.mark.parametrize(
    ("op", "leaves"), [*(("draft", leaves) for leaves in (1, 2, 4, 8, 16)), ("wide", 4)]
)
def test_a_draft_s_timing_counts_the_children_that_its_rows_are_asked_for(monkeypatch, op, leaves):
    asked, drafter = [], StagedNgrams()
    forward = drafter.forward
    monkeypatch.setattr(drafter, "forward", lambda e, n: (asked.append(n), forward(e, n))[1])
    shape = StepShape(op, 2, leaves, 32)
    DraftSteps(drafter, vocab=61, num_requests=2).seconds(shape)
    assert set(asked) == {shape.tree_rows - 1}
    group = Group((shape,), False, lambda: None)
    rows = time_groups([group], lambda _: 1.0, effort=ONE_PASS, seed=0, tick=lambda _: None)
    assert [row["nodes"] for row in rows] == [2 * leaves * asked[0]]


def test_a_draft_step_is_as_a_round_has_it(monkeypatch):
    """After something else, some forwards in a row, of calibrated chances."""
    events = []
    drafter = StagedNgrams()
    forward = drafter.forward
    monkeypatch.setattr(drafter, "forward", lambda *a: (events.append("forward"), forward(*a))[1])
    bench = DraftSteps(drafter, vocab=61, num_requests=2)
    weighed = bench._worker(rows=8, width=4).side.policy.weigh([-0.5])
    assert weighed != [-0.5]
    for requests, leaves in ((1, 4), (1, 16), (2, 4), (2, 16)):
        events.clear()
        shape = StepShape("draft", requests, leaves, 32)
        assert bench.seconds(shape, before=lambda: events.append("before")) > 0
        assert events == ["before"] + 3 * ["forward"]


SHORT = 0.1  # seconds


@pytest.fixture
def take(monkeypatch) -> Callable[[float], None]:
    """``take(seconds)``: the clock of a draft's steps goes on; of itself it stands still."""
    now = [0.0]
    for module in (draft_steps, draft_worker):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])

    def take(seconds: float) -> None:
        now[0] += seconds

    return take


@pytest.mark.parametrize(("op", "slow"), [("reroot", "receive"), ("choice", "candidates")])
def test_an_answer_is_timed_in_two_parts_and_after_something_else(monkeypatch, take, op, slow):
    events = []
    work = getattr(DraftSide, slow)
    monkeypatch.setattr(DraftSide, slow, lambda *a, **k: (take(SHORT), work(*a, **k))[1])
    bench = DraftSteps(StagedNgrams(), vocab=61, num_requests=8)
    others = {"reroot": "choice", "choice": "reroot"}
    shape = StepShape(op, 8, 8, 32)
    seconds = bench.seconds(shape, before=lambda: (take(SHORT), events.append("before")))
    assert seconds == pytest.approx(SHORT)
    assert bench.seconds(dataclasses.replace(shape, op=others[op])) == 0.0
    assert events == ["before"]


SERVED = pd.DataFrame(
    {"rows": [4, 8], "batch": 1, "context": [20, 24], "target": [2e-3, 3e-3], "reroot": 3e-5,
     "link_there": 2e-5, "link_back": 4e-5, "draft": 5e-3, "draft_rows": [9, 8],
     "num_expansions": [7, 2], "round": [6, 7]}
)  # fmt: skip


@pytest.mark.parametrize("draft_ranks", [0, 1])
def test_steps_after_prompts_are_told_from_those_of_other_rounds(draft_ranks):
    asked = []

    def joined(policy: str) -> pd.DataFrame:
        asked.append(policy)
        return SERVED.assign(batch=[1, 2], prefill_tokens=[16, 0])

    bench = SimpleNamespace(setup=SimpleNamespace(draft_ranks=draft_ranks), joined_rounds=joined)
    found = joining_timings(bench)
    assert asked == ["async-tree-3x2x2" if draft_ranks else "tree-3x2x2"]
    assert found[["op", "rows", "requests", "context", "seconds"]].to_numpy().tolist() == [
        ["joined", 4, 1, 20, 2e-3], ["settled", 8, 2, 24, 3e-3],
    ]  # fmt: skip


@pytest.mark.parametrize(("slow", "kept"), [(1, 1.0), (2, 1.0), (9, 1.3)])
def test_rounds_that_something_disturbed_are_served_again_and_the_steadiest_kept(slow, kept):
    asked = []

    def served(policy: str, count: int, *size: int, context: int | None = None) -> pd.DataFrame:
        asked.append(policy)
        tried = asked.count(policy)
        disturbed = policy == "plain" and tried <= slow
        factor = [1.0, 1.6, 1.3, 1.5][tried] if disturbed else 1.0
        calm = SERVED.iloc[:1]
        rounds = pd.concat([calm, calm.assign(target=calm["target"] * factor)] * 4)
        return rounds.assign(batch=count, rows=1 if policy == "plain" else rounds["rows"])

    bench = SimpleNamespace(setup=SimpleNamespace(draft_ranks=0), served_rounds=served)
    found = pd.concat(stream_timings(bench))
    plain = found.loc[(found["op"] == "round") & (found["rows"] == 1), "seconds"]
    assert plain.max() == pytest.approx(kept * 2e-3)
    assert {policy: asked.count(policy) for policy in asked} == {
        **dict.fromkeys(("tree-3x2x2", "tree-7x3x3", "tree-15x4x5", "chain-2", "chain-7"), 1),
        "plain": min(slow + 1, 3),
    }


@pytest.mark.parametrize("draft_ranks", [0, 1])
def test_what_lies_between_steps_is_taken_from_rounds_that_are_served(draft_ranks):
    asked = []

    def served(policy: str, count: int, *size: int, context: int | None = None) -> pd.DataFrame:
        asked.append((policy, count))
        return SERVED.assign(batch=count)

    bench = SimpleNamespace(setup=SimpleNamespace(draft_ranks=draft_ranks), served_rounds=served)
    found = pd.concat([*stream_timings(bench), *batch_timings(bench)])
    trees = {("tree-3x2x2", 8), ("tree-7x3x3", 8), ("tree-15x4x5", 4)}
    trees |= {(tree, 1) for tree, _ in trees}
    if draft_ranks:
        assert set(asked) == {(f"async-{tree}", n) for tree, n in trees}
    else:
        plain = {("plain", n) for n in (1, 4, 8)}
        others = {("chain-2", 1), ("chain-7", 1), ("tree-3x2x7", 8)}  # which keeps its trees
        assert set(asked) == trees | plain | others
    assert set(found.columns) == {"rows", "requests", "context", "op", "beside", "seconds", "nodes"}
    assert found.loc[found["nodes"].notna(), "op"].unique().tolist() == ["reroot"]
    nodes = found["nodes"] / found["rows"]
    # Of rounds in turns only those behind another, whose trees they take up.
    assert sorted(nodes.dropna()) == (
        [2.0] * 4 + [6.0] * 4 + [14.0] * 4 if draft_ranks else [2.0] * 3 + [6.0] * 2 + [14.0] * 2
    )
    seconds = found.groupby(["op", "requests"])["seconds"].agg(list)
    assert seconds["round"].to_dict() == {1: [2e-3, 3e-3] * (3 if draft_ranks else 6)}
    assert ("ahead" in seconds) == (not draft_ranks)
    times = {1: 6, 4: 2, 8: 4} if draft_ranks else {1: 3, 4: 1, 8: 3}
    assert seconds["reroot"].to_dict() == {n: [3e-5] * count for n, count in times.items()}
    rows = {9, 8} if draft_ranks else {9}
    assert set(found.loc[found["op"] == "reroot", "rows"]) == rows  # the draft's
    links = found.loc[found["op"] == "link"]
    assert sorted(links["requests"]) == ([1] * 6 + [4] * 2 + [8] * 4 if draft_ranks else [])
    assert links["seconds"].tolist() == pytest.approx([3e-5] * len(links))
    drafted = found.loc[found["op"] == "drafted", ["rows", "seconds"]].to_numpy().tolist()
    whole = [] if draft_ranks else [[2, 5e-3 + 4e-5], [7, 5e-3 + 4e-5]]
    assert drafted == [pytest.approx(row) for row in whole]  # of rounds with all their forwards


def test_in_turns_a_re_root_is_timed_by_the_rows_of_the_round_before_if_that_had_no_prompt():
    def served(policy: str, count: int, *size: int, context: int | None = None) -> pd.DataFrame:
        rounds = pd.concat([SERVED] * 3).assign(batch=count, round=[6, 7, 9, 10, 11, 13])
        return rounds.assign(draft_rows=[17, 0, 17, 15, 1, 17], reroot=[9, 2, 9, 4, 5, 9])

    bench = SimpleNamespace(setup=SimpleNamespace(draft_ranks=0), served_rounds=served)
    found = pd.concat([*stream_timings(bench), *batch_timings(bench)]).query("op == 'reroot'")
    took = found[["rows", "seconds"]].to_numpy().tolist()
    assert took == [[17, 2], [17, 4], [15, 5]] * 7


def test_plain_rounds_of_batches_are_served_where_ranks_run_ahead_again_if_disturbed():
    asked, made = [], {4: [1.0, 1.0], 8: [1.6, 1.0]}

    def served(policy: str, count: int, *size: int, context: int | None = None) -> pd.DataFrame:
        asked.append((policy, count))
        assert (context is not None) == (policy == "plain")
        factor = made[count].pop(0) if policy == "plain" else 1.0
        calm = SERVED.iloc[:1].assign(rows=count, batch=count)
        return pd.concat([calm, calm.assign(target=calm["target"] * factor)] * 4)

    bench = SimpleNamespace(setup=SimpleNamespace(draft_ranks=0), served_rounds=served)
    found = pd.concat(batch_timings(bench))
    ahead = found.loc[found["op"] == "ahead"]
    assert (ahead["rows"] == ahead["requests"]).all()
    assert ahead["requests"].value_counts().to_dict() == {4: 8, 8: 8}
    assert set(ahead["seconds"]) == {2e-3}
    assert set(ahead["context"]) == {20}
    assert not ahead["beside"].any()
    assert [n for policy, n in asked if policy == "plain"] == [8, 8, 4]
    split = SimpleNamespace(setup=SimpleNamespace(draft_ranks=1), served_rounds=served)
    assert "ahead" not in set(pd.concat(batch_timings(split))["op"])


def test_the_last_rounds_of_trees_tell_nothing_of_plain_decoding():
    def served(policy: str, count: int, *size: int, context: int | None = None) -> pd.DataFrame:
        return SERVED.assign(
            batch=count, rows=[1, 4], target=[1e-3 if policy == "plain" else 9.0, 2e-3]
        )

    bench = SimpleNamespace(setup=SimpleNamespace(draft_ranks=0), served_rounds=served)
    rounds = pd.concat(stream_timings(bench)).query("op == 'round'")
    assert rounds.loc[rounds["rows"] == 4, "seconds"].tolist() == [2e-3] * 6
    assert sorted(rounds.loc[rounds["rows"] == 1, "seconds"]) == [1e-3, 9.0, 9.0]  # and of chains


@pytest.mark.parametrize("draft_ranks", [0, 1])
def test_rounds_of_a_split_that_begin_with_a_lone_forward_tell_what_it_takes(draft_ranks):
    asked = []

    def served(policy: str, count: int, *size: int, context: int | None = None) -> pd.DataFrame:
        asked.append((policy, size))
        drawn = {"num_expansions": [3, 2, 4], "draft": [6e-4, 2e-5, 9e-4]}
        return pd.concat([SERVED, SERVED[:1]]).assign(batch=count, **drawn)

    bench = SimpleNamespace(setup=SimpleNamespace(draft_ranks=draft_ranks), served_rounds=served)
    found = pd.concat(stream_timings(bench))
    missed = found.loc[found["op"] == "missed", ["rows", "requests", "context", "seconds"]]
    assert missed.to_numpy().tolist() == ([[4, 1, 20, 6e-4]] if draft_ranks else [])
    # Short requests in turn: a long one repeats itself, and then no tree is dropped.
    assert all((size == (16, 5)) == ("tree" in policy) for policy, size in asked)


@pytest.mark.parametrize("draft_ranks", [0, 1])
def test_drafting_of_whole_trees_in_batches_is_kept_with_the_children_of_its_rows(draft_ranks):
    whole = {"3x2x2": (2, 3), "7x3x3": (3, 7), "15x4x5": (5, 17)}  # forwards, rows of a request

    def served(policy: str, count: int, *size: int, context: int | None = None) -> pd.DataFrame:
        forwards, rows = whole.get(policy.rpartition("-")[2], (2, 3))
        drawn = {"num_expansions": [forwards] * 3, "draft_rows": [rows * count, 3, rows * count]}
        return pd.concat([SERVED, SERVED[:1]]).assign(batch=[count, count, 1], **drawn)

    bench = SimpleNamespace(setup=SimpleNamespace(draft_ranks=draft_ranks), served_rounds=served)
    found = pd.concat(batch_timings(bench))
    found = found.loc[found["op"] == "grown"]
    rounds = found[["requests", "rows", "nodes", "seconds"]].to_numpy().tolist()
    assert rounds == ([] if draft_ranks else [
        pytest.approx([8, 24, 48, 5.04e-3]), pytest.approx([8, 56, 336, 5.04e-3]),
        pytest.approx([4, 68, 952, 5.04e-3]),
    ])  # fmt: skip


def test_loops_are_of_one_request_and_of_many():
    frames = loop_timings(SimpleNamespace(loop_seconds=lambda count: [1e-5 * count] * 3))
    found = pd.concat(frames).groupby("requests")["seconds"].agg(list).to_dict()
    assert found == {1: [1e-5] * 3, 8: [8e-5] * 3}


def test_the_seconds_of_forwards_in_a_row_are_those_of_one(monkeypatch, take):
    drafter = StagedNgrams()
    forward = drafter.forward
    monkeypatch.setattr(drafter, "forward", lambda *a: (take(SHORT), forward(*a))[1])
    bench = DraftSteps(drafter, vocab=61, num_requests=2)
    for rows in (1, 4, 16):
        assert bench.seconds(StepShape("draft", 1, rows, 32)) == pytest.approx(SHORT)


def test_forwards_of_a_chain_are_timed_together(monkeypatch, take):
    drafter = StagedNgrams()
    forward = drafter.forward
    monkeypatch.setattr(drafter, "forward", lambda *a: (take(SHORT), forward(*a))[1])
    bench = DraftSteps(drafter, vocab=61, num_requests=2)
    for shape in chain_shapes((32, 64)):
        assert (shape.requests, shape.context) == (1, 32)
        seconds = bench.seconds(shape, before=lambda: take(7.0))
        assert seconds == pytest.approx(shape.rows * SHORT)
    assert {shape.rows for shape in chain_shapes((32,))} == {2, 7}


def test_splits_are_all_up_to_four_workers_and_then_powers_of_two():
    assert splits(1) == []
    assert [s.label for s in splits(2)] == ["1+1"]
    assert [s.label for s in splits(4)] == ["3+1", "2+2", "1+3"]
    assert [s.label for s in splits(12)] == ["11+1", "10+2", "8+4", "4+8"]
    assert all(s.num_workers == 12 for s in splits(12))
    assert isinstance(splits(2)[0], Deployment)


# Single steps.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_staged_verification_runs_the_rows_it_says_and_accepts_one_draft_token(
    decoders, temperature, verifies_as_staged
):
    bench = TargetBench(decoders[0], sampling=Sampling(temperature), num_requests=3, max_context=64)
    verifies_as_staged(bench, bench.seconds)


def test_prefills_of_any_size_leave_no_slab_behind(decoders):
    bench = TargetBench(decoders[0], sampling=Sampling(), num_requests=2, max_context=64)
    before = bench.cache.num_free
    for shape in (StepShape("prefill", 1, 64), StepShape("prefill", 4, 16)):
        assert bench.seconds(shape) > 0
    assert bench.cache.num_free == before
    assert bench.seconds(StepShape("target", 2, 4, 64)) > 0


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_every_draft_step_runs_at_every_shape_the_profile_asks_for(decoders, drafter):
    decoder = decoders[1] if drafter == "model" else None
    bench = DraftBench(decoder, num_requests=8, max_context=128)
    for shape in draft_shapes((32, 128), few=False, lean=False):
        assert 0 < bench.seconds(shape) < 5.0
        assert 0 < bench.seconds(shape) < 5.0  # staging again gives the same state


def test_a_message_takes_microseconds_to_milliseconds():
    seconds = link_seconds(1)
    assert len(seconds) == 50
    assert 1e-6 < np.median(seconds) < 0.1


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_neighbour_is_busy_when_told_to_be_and_idle_when_not(tiny_models):
    directory = tiny_models[0]
    neighbour = Neighbour(
        NeighbourSetup(directory, DraftSource("ngram", directory), Sampling(), context=32)
    )
    try:
        for keep_busy in (
            lambda: neighbour.keep("target", num_threads=1),
            lambda: neighbour.keep("draft", num_threads=1),
        ):
            neighbour.rest()
            before = cpu_seconds(neighbour.pid)
            sleep(0.5)
            assert cpu_seconds(neighbour.pid) - before <= 0.02
            keep_busy()
            before, end = cpu_seconds(neighbour.pid), monotonic() + 60
            while cpu_seconds(neighbour.pid) - before <= 0.05:  # however busy the machine is
                assert monotonic() < end
                sleep(0.05)
    finally:
        neighbour.close()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_neighbour_whose_maker_was_interrupted_before_it_spoke_ends_in_silence():
    command = [sys.executable, "-m", "codesign.profiler.neighbour"]
    ended = subprocess.run(command, input=b"gAS", capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


def test_a_neighbour_that_is_gone_is_reported_with_the_way_on(tiny_models):
    directory = tiny_models[0]
    setup = NeighbourSetup(directory, DraftSource("ngram", directory), Sampling(), context=32)
    neighbour = Neighbour(setup)
    neighbour.close()
    with pytest.raises(HardwareError, match="--resume"):
        neighbour.rest()
    with pytest.raises(HardwareError, match="ended"):
        Neighbour(dataclasses.replace(setup, target=directory / "nowhere"))


# Recorded tokens.


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_target_as_its_own_draft_always_agrees_when_greedy(decoders, temperature):
    target, _ = decoders
    frame = record_acceptance(
        requests(),
        target=target,
        draft=target,
        sampling=Sampling(temperature, seed=3),
        num_workers=1,
    )
    assert len(frame) == 3 * 12
    profile = AcceptanceProfile.from_table(frame)
    if temperature == 0.0:
        assert profile.hit_rate(1) == 1.0
    else:
        assert 0.0 < profile.hit_rate(1) < 1.0
    assert profile.top_k == TOP_K


def test_recorded_ranks_are_those_of_the_drafts_own_predictions_step_by_step(decoders):
    from codesign.engine.kv_cache import KVCache
    from codesign.engine.rows import causal_rows

    target, draft = decoders
    [request] = requests(count=1)
    frame = record_acceptance(
        [request], target=target, draft=draft, sampling=Sampling(), num_workers=1
    )
    path = list(request.prompt_ids)
    for rank, log_probs in zip(frame["rank"], frame["log_probs"], strict=True):
        best = []
        for model in (target, draft):
            cache = KVCache(model.shape, num_slots=1, max_tokens=len(path))
            hidden = model.forward(causal_rows(cache.take(), path), cache)
            best.append(torch.log_softmax(model.logits(hidden[-1:])[0], -1).sort(descending=True))
        token = int(best[0].indices[0])  # the target's greedy choice, decoded anew
        ranks = best[1].indices.tolist()
        assert rank == (ranks.index(token) if ranks.index(token) < TOP_K else -1)
        assert log_probs == pytest.approx(best[1].values[:TOP_K].tolist(), abs=1e-4)
        path.append(token)


def test_ngrams_are_recorded_along_the_path_and_padded_where_they_say_nothing(decoders):
    target, _ = decoders
    frame = record_acceptance(
        requests(), target=target, draft=None, sampling=Sampling(), num_workers=1
    )
    profile = AcceptanceProfile.from_table(frame)
    log_probs = np.stack(frame["log_probs"].tolist())
    ranks = frame["rank"].to_numpy()
    named = (log_probs > ABSENT_LOG_PROB).sum(axis=1)
    assert (ranks < np.maximum(named, 1)).all()
    assert (ranks[named == 0] == -1).all()
    assert named.max() < TOP_K
    assert profile.top_k == TOP_K


def test_the_simulator_drafts_only_what_was_named():
    from codesign.acceptance import Recording
    from codesign.sim.acceptance import load_recordings

    log_probs = np.log(np.array([[0.6, 0.2, 0.1], [0.5, 0.4, 0.05]]))
    log_probs[0, 1:] = ABSENT_LOG_PROB
    recording = Recording(0, np.array([0, -1]), log_probs)
    recordings = load_recordings(AcceptanceProfile({"chat": (recording,)}))
    assert [len(row) for row in recordings.log_probs] == [1, 3]
    assert [len(row) for row in recordings.tokens] == [1, 3]


# Visits.


def test_every_deployment_is_visited_at_the_beginning_and_at_the_end_of_a_profile():
    times = iter(range(4))

    def timed(name: str) -> Part:
        return Part(name, 1.0, lambda tick: pd.DataFrame({"of": [name], "when": [next(times)]}))

    once = Part(ACCEPTANCE_PART, 1.0, lambda tick: pd.DataFrame())
    parts = in_turns([timed("2"), timed("1+1")], [once], 2)
    assert [p.name for p in parts] == ["2.1", "1+1.1", ACCEPTANCE_PART, "2.2", "1+1.2"]
    found = pd.concat([part.measure(unseen) for part in parts])
    assert found["of"].tolist() == ["2", "1+1"] * 2
    assert found["when"].tolist() == [0, 1, 2, 3]
    assert found["visit"].tolist() == [1, 1, 2, 2]


def test_each_visit_of_a_split_starts_its_second_process_anew(tiny_models, monkeypatch, tmp_path):
    import codesign.profiler.session as profiler

    log: list[str] = []

    class Logged:
        def __init__(self, setup: NeighbourSetup) -> None:
            log.append("start")

        def rest(self) -> None: ...

        def keep(self, side: str, *, num_threads: int) -> None: ...

        def close(self) -> None:
            log.append("end")

    def one_row(groups: list[Group], *args: object, **options: object) -> list[dict]:
        groups[0].prepare()
        return [{**part().iloc[0].to_dict(), "op": "target"}]

    monkeypatch.setattr(profiler, "Neighbour", Logged)
    monkeypatch.setattr(profiler, "time_groups", one_row)
    monkeypatch.setattr(profiler, "link_seconds", lambda threads: [1e-4])
    settings = ProfileSettings(str(tiny_models[0]), "ngram", 2, is_quick=True)
    about = make_profile(settings, tmp_path)
    assert log == ["start", "end"] * 3
    steps = pd.read_parquet(tmp_path / "steps.parquet")
    visits = steps.loc[steps["op"] == "target"].groupby("deployment")["visit"]
    assert visits.nunique().to_dict() == {"2": 3, "1+1": 3}
    [measured] = about["measured"]
    assert measured["parts"] == ["2", "1+1-target", "1+1-draft", ACCEPTANCE_PART, "1+1-link"]


@pytest.mark.parametrize(("parameters", "visits"), [(8e9, 2), (70e9, 1)])
def test_ranks_are_started_twice_for_each_deployment_unless_the_target_is_large(
    tiny_models, monkeypatch, parameters, visits
):
    import codesign.profiler.rank_parts as ranks

    shape = SimpleNamespace(parameters=parameters)
    monkeypatch.setattr(ranks, "model_shape", lambda directory: shape)
    settings = ProfileSettings(str(tiny_models[0]), str(tiny_models[1]), 2, device="cpu-ranks")
    measurer = RankMeasurer(settings)
    names = [part.name for part in measurer.parts]
    assert names == [
        "2.1", "1+1.1", ACCEPTANCE_PART, *["2.2", "1+1.2"][: 2 * (visits - 1)]
    ]  # fmt: skip
    assert measurer._effort.max_passes == {1: 15, 2: 8}[visits]
    whole = RankMeasurer(settings, visits=1)  # of a campaign, which serves on the same ranks
    assert [part.name for part in whole.parts] == ["2.1", "1+1.1", ACCEPTANCE_PART]


# Parts on disk.


def part(op: str = "target") -> pd.DataFrame:
    row = {"op": op, "rows": 1, "requests": 1, "context": 32, "beside": False, "seconds": 0.1}
    return pd.DataFrame([{**row, "deployment": "2"}])


def recorded() -> pd.DataFrame:
    row = {"request": 0, "category": "chat", "position": 0, "rank": 0}
    return pd.DataFrame([{**row, "log_probs": [-0.1, -3.0]}])


def test_parts_are_kept_until_the_profile_is_complete(tmp_path):
    store = PartStore(tmp_path, SETTINGS)
    store.open(resume=False)
    store.put("2", part())
    again = PartStore(tmp_path, SETTINGS)
    again.open(resume=True)
    assert again.has("2")
    assert not again.has(ACCEPTANCE_PART)
    again.put(ACCEPTANCE_PART, recorded())
    about = again.finish(["2", ACCEPTANCE_PART], ["a note"])
    assert (about["K"], about["num_timings"], about["notes"]) == (2, 1, ["a note"])
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "acceptance.parquet",
        "profile.json",
        "steps.parquet",
    ]
    finished = PartStore(tmp_path, SETTINGS).finished()
    assert finished is not None
    assert finished["target"] == "target"


@pytest.mark.parametrize("other", ["NVIDIA H100", "NVIDIA H200"])
def test_a_profile_names_every_machine_and_day_of_its_parts(tmp_path, monkeypatch, other):
    def on(gpu: str, day: str) -> None:
        meta = {**header("profile", seed=0), "created": f"{day}T12:00:00+00:00"}
        meta["hardware"] = {**meta["hardware"], "gpus": [{"name": gpu}]}
        monkeypatch.setattr(store_module, "header", lambda kind, seed: meta)

    store = PartStore(tmp_path, dataclasses.replace(SETTINGS, device="cuda"))
    visits = (("2.1", "NVIDIA H200", "01"), ("2.2", "NVIDIA H200", "01"), ("1+1.1", other, "02"))
    for part_name, gpu, day in visits:
        on(gpu, f"2026-11-{day}")
        store.put(part_name, part())
    on("another that only recorded", "2026-11-03")
    store.put(ACCEPTANCE_PART, recorded())
    about = store.finish(["2.1", "1+1.1", ACCEPTANCE_PART, "2.2"], [])
    [note] = about["notes"]
    assert note.startswith(
        f"measured in parts: 2 on NVIDIA H200, 2026-11-01; 1+1 on {other}, 2026-11-02; acceptance"
    )
    assert ("step times of different machines" in note) == (other == "NVIDIA H100")
    assert measured_note(about["measured"][:1]) == ""


def test_threads_are_of_a_hosts_processor_whatever_gpus_it_has(tmp_path, monkeypatch):
    meta = header("profile", seed=0)
    meta["hardware"] = {**meta["hardware"], "cpu": "Xeon", "gpus": [{"name": "NVIDIA H200"}]}
    monkeypatch.setattr(store_module, "header", lambda kind, seed: meta)
    store = PartStore(tmp_path, SETTINGS)
    store.put("2", part())
    store.put(ACCEPTANCE_PART, recorded())
    about = store.finish(["2", ACCEPTANCE_PART], [])
    assert [of["machine"] for of in about["measured"]] == ["Xeon"]


@pytest.mark.parametrize("resume", [False, True])
def test_a_file_cannot_be_the_folder_of_a_profile(tmp_path, resume):
    (tmp_path / "taken").write_text("mine")
    store = PartStore(tmp_path / "taken", SETTINGS)
    assert store.finished() is None
    with pytest.raises(InputError, match=r"taken cannot hold a profile.*--out DIR"):
        store.open(resume=resume)
    assert (tmp_path / "taken").read_text() == "mine"


def test_parts_of_other_settings_are_not_mixed_in(tmp_path):
    store = PartStore(tmp_path, SETTINGS)
    store.open(resume=False)
    store.put("2", part())
    other = PartStore(tmp_path, ProfileSettings("target", "other", 2))
    with pytest.raises(InputError, match="measured with another draft"):
        other.open(resume=True)
    other.open(resume=False)
    assert not other.has("2")


def test_parts_of_a_version_that_timed_equal_contexts_are_not_mixed_in(tmp_path, monkeypatch):
    store = PartStore(tmp_path, SETTINGS)
    store.open(resume=False)
    store.put("2", part())
    store.open(resume=True)
    header = store._header()
    del header["contexts"]
    monkeypatch.setattr(store, "_header", lambda: header)
    store.put("1", part())
    with pytest.raises(InputError, match=r"begun by an older version.*Start over"):
        store.open(resume=True)


def test_a_new_profile_takes_the_place_of_an_old_one_from_its_first_moment(tmp_path):
    store = PartStore(tmp_path, SETTINGS)
    store.open(resume=False)
    for name, frame in (("2", part()), (ACCEPTANCE_PART, recorded())):
        store.put(name, frame)
    store.finish(["2", ACCEPTANCE_PART], [])
    PartStore(tmp_path, SETTINGS).open(resume=False)
    assert not (tmp_path / "profile.json").exists()


def test_an_interruption_keeps_the_parts_that_were_measured(tmp_path, tiny_models, monkeypatch):
    import codesign.profiler.session as profiler

    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(profiler, "record_acceptance", interrupted)
    settings = ProfileSettings(str(tiny_models[0]), "ngram", 1, is_quick=True)
    with pytest.raises(KeyboardInterrupt, match=r"kept 1 of 4 parts in .* --resume"):
        make_profile(settings, tmp_path)
    monkeypatch.undo()
    measured = (tmp_path / "parts" / "1.1.parquet").stat().st_mtime_ns
    shares: list[tuple[str, int, int]] = []
    about = make_profile(settings, tmp_path, resume=True, progress=lambda *a: shares.append(a))
    assert about["num_tokens"] == 24 * QUICK_TOKENS[1]
    assert shares[-1][1] == shares[-1][2]
    assert measured < (tmp_path / "steps.parquet").stat().st_mtime_ns
    assert make_profile(settings, tmp_path, resume=True) == about


def test_more_workers_than_cores_are_refused(tmp_path: Path):
    with pytest.raises(HardwareError, match="9999 workers were requested"):
        make_profile(ProfileSettings("target", "ngram", 9999), tmp_path)
