"""The prompts of the validation campaign: recorded, served, and known again."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from benchmarks.campaign import expected_seconds, questions, ranks, schedule, units
from benchmarks.campaign import requests as campaign_requests
from codesign.acceptance import AcceptanceProfile, Recording
from codesign.config import Deployment
from codesign.errors import InputError
from codesign.profiler.store import PartStore, ProfileSettings
from codesign.prompts import BoundRequest
from codesign.traces import Trace, write_parquet


def test_prompts_that_are_served_are_none_of_those_recorded_and_ask_the_same(tiny_models):
    first, *more = questions.recorded_prompts(tiny_models[0], seed=0)
    recorded = [r for group in (first, *more) for r in group]
    served = questions.served_prompts(tiny_models[0], units.STREAM, seed=0)
    assert len(served) == units.STREAM.requests == 24
    more_of_them = replace(units.STREAM, requests=48)
    twice = questions.served_prompts(tiny_models[0], more_of_them, seed=0)
    assert twice[:24] == served
    assert len({r.prompt_ids for r in twice}) == 48
    assert not {r.prompt_ids for r in recorded} & {r.prompt_ids for r in twice}
    assert len({r.prompt_ids for r in recorded}) == len(recorded)
    assert sorted(r.request_id for r in recorded) == list(range(len(recorded)))
    assert {len(group) for group in more} == {24}
    assert len(first) == expected_seconds.NUM_RECORDED[0]
    assert len(recorded) == expected_seconds.MOST_RECORDED
    kinds = [r.category for r in first]
    for category in {r.category for r in served}:
        assert kinds.count(category) == 16
        assert [r.category for r in served].count(category) == 4
    assert len({r.category for r in served[:6]}) == 6  # a grid that is cut short stays balanced
    assert kinds.count(questions.LONG) == 12
    [fewer] = questions.recorded_prompts(tiny_models[0], seed=0, share=0.25)
    assert len(fewer) == 24 + 12
    assert sum(r.max_new_tokens == questions.LONG_ANSWER for r in fewer) == 12
    asked = {r.prompt_ids[-20:] for r in recorded}
    assert {r.prompt_ids[-20:] for r in served} <= asked
    most = replace(units.STREAM, requests=24 * questions.MOST_TIMES)
    often = [r.prompt_ids for r in questions.served_prompts(tiny_models[0], most, seed=0)]
    assert len(set(often)) == len(often) == 96
    assert often[:48] == [r.prompt_ids for r in twice]
    assert not set(often) & {r.prompt_ids for r in recorded}


def test_other_seeds_serve_other_prompts_that_ask_the_same(tiny_models):
    workload = replace(units.STREAM, requests=48)
    first = questions.served_prompts(tiny_models[0], workload, seed=0)
    asked = {r.prompt_ids[-20:] for r in first}
    seen, seconds = {r.prompt_ids for r in first}, {questions.served_texts(0)[1]}
    for seed in range(1, len(questions.SERVED_FILLERS)):
        other = questions.served_prompts(tiny_models[0], workload, seed=seed)
        assert [r.category for r in other] == [r.category for r in first]
        assert {r.prompt_ids[-20:] for r in other} == asked
        if (second := questions.served_texts(seed)[1]) not in seconds:
            assert not seen & {r.prompt_ids for r in other}
        seconds.add(second)
        seen |= {r.prompt_ids for r in other}
        groups = questions.recorded_prompts(tiny_models[0], seed=seed)
        recorded = [r.prompt_ids for group in groups for r in group]
        assert len(set(recorded)) == len(recorded)
        assert not set(recorded) & {r.prompt_ids for r in other}


def test_half_of_each_kinds_questions_are_behind_either_text(tiny_models):
    most = replace(units.STREAM, requests=24 * questions.MOST_TIMES)
    served = questions.served_prompts(tiny_models[0], most, seed=5)
    texts = questions.served_texts(5)
    encode = questions._encoder(tiny_models[0])
    where = {
        prompt.prompt_ids: (text, amount)
        for text in texts
        for amount in questions.SERVED_MATERIAL
        for prompt in questions._behind(encode, amount, 48, text)
    }
    found = [(request.category, *where[request.prompt_ids]) for request in served]
    for start in range(0, len(found), 24):
        amount = questions.SERVED_MATERIAL[start // 24 % 2]
        for kind in {category for category, *_ in found}:
            behind = [rest for category, *rest in found[start : start + 24] if category == kind]
            assert Counter(text for text, _ in behind) == dict.fromkeys(texts, 2)
            assert {length for _, length in behind} == {amount}
    assert len(set(where) - {request.prompt_ids for request in served}) == 0
    assert len({text for _, text, _ in found[:12]}) == 2  # so of a stream of half as many


def test_each_seed_replays_another_stretch_of_the_trace(tmp_path, tiny_models, machine_fit):
    target, cost = str(tiny_models[0]), machine_fit.costs["2"]
    long = replace(units.SEGMENT, seconds=120.0)
    whole = campaign_requests._segment(replace(long, seconds=1e6), cost, 0)
    stretches = [
        campaign_requests.load_requests(tmp_path / str(seed), long, target, cost, seed=seed)
        for seed in (0, 9, 13)
    ]
    gaps = [np.diff(stretch["arrival"].to_numpy()[:12]) for stretch in stretches]
    assert np.allclose(gaps[0], np.diff(whole.requests["arrival"].to_numpy()[:12]))
    assert not np.allclose(gaps[1], gaps[0])
    assert not np.allclose(gaps[2], gaps[1])
    rates = [len(stretch) / long.seconds for stretch in stretches]
    assert min(rates) > 0.5 * len(whole) / whole.duration  # of one trace, and at one rate


def test_every_material_begins_elsewhere_and_in_another_order_with_each_seed():
    found = [questions.materials(seed) for seed in range(len(questions.SERVED_FILLERS))]
    for seed, (served, materials) in enumerate(zip(questions.SERVED_FILLERS, found, strict=True)):
        amounts, fillers = zip(*materials, strict=True)
        assert not set(fillers) & set(questions.served_texts(seed))
        assert len(set(fillers)) == len(materials) == 16
        assert min(abs(filler - served) for filler in fillers) > 1
        assert set(fillers) < set(range(1, 24))  # none is the question itself
        for start in range(0, 16, 4):  # whatever is recorded last, each amount has its share
            assert sorted(amounts[start : start + 4]) == [16, 32, 48, 64]
        for (amount, filler), (other, further) in itertools.combinations(materials, 2):
            assert amount != other or abs(filler - further) > 3  # else both may end alike
    assert len({tuple(materials[:4]) for materials in found}) == len(found)
    assert found[3] == questions.materials(3)


def test_each_question_has_two_long_answers_and_each_of_the_first_materials_as_many(tiny_models):
    recorded = [r for group in questions.recorded_prompts(tiny_models[0], seed=0) for r in group]
    long = [r.request_id for r in recorded if r.max_new_tokens == questions.LONG_ANSWER]
    assert {r.max_new_tokens for r in recorded} == {48, 192}
    assert Counter(number % 24 for number in long) == dict.fromkeys(range(24), 2)
    assert Counter(number // 24 for number in long) == dict.fromkeys(range(4), 12)


def test_requests_that_a_pair_serves_are_of_one_seed(tmp_path, tiny_models, machine_fit):
    target, cost = str(tiny_models[0]), machine_fit.costs["2"]
    assert campaign_requests.seed_of(tmp_path) == 0
    for workload in (units.BATCH, units.SEGMENT):
        made = [
            campaign_requests.load_requests(tmp_path, workload, target, cost, seed=2)
            for _ in range(2)
        ]
        assert made[0].equals(made[1])
        with pytest.raises(InputError, match="has the requests of seed 2, not 0"):
            campaign_requests.load_requests(tmp_path, workload, target, cost, seed=0)
    assert campaign_requests.seed_of(tmp_path) == 2
    old = Trace("stream", made[0], "campaign", (), "")  # as campaigns before wrote them
    write_parquet(old, campaign_requests.request_file(tmp_path / "old", units.STREAM))
    assert campaign_requests.seed_of(tmp_path / "old") == 0
    asked = campaign_requests.load_requests(tmp_path / "old", units.STREAM, target, None, seed=0)
    assert len(asked) == len(made[0])


def test_acceptance_is_recorded_of_more_prompts_as_long_as_there_is_time(monkeypatch):
    served, now = [], [0.0]
    groups = [[BoundRequest(n, 0.0, "", (1, 2), 3)] for n in range(5)]

    def serve(candidate, requests, policy, *, max_kv_tokens):
        served.append(requests[0].request_id)
        now[0] += 0.4 * ranks.RECORDING
        return SimpleNamespace(outputs={})

    def table(bench, requests, outputs):
        return pd.DataFrame({"request": [r.request_id for r in requests]})

    monkeypatch.setattr(ranks, "perf_counter", lambda: now[0])
    monkeypatch.setattr(ranks, "resolve_model", lambda name: name)
    monkeypatch.setattr(ranks, "recorded_prompts", lambda target, *, seed, share: iter(groups))
    monkeypatch.setattr(ranks, "rank_outputs", table)
    measuring = object.__new__(ranks.Measuring)
    measuring._session = SimpleNamespace(pair=SimpleNamespace(models=("target", "draft")))
    measuring._task = SimpleNamespace(recorded=1.0, seed=3)
    found = measuring._record(SimpleNamespace(serve=serve), Deployment(2))
    assert served == found["request"].tolist() == [0, 1, 2]


def test_a_start_before_the_first_run_is_one_more_visit_of_its_part(tmp_path, monkeypatch):
    label, work = "2", units.grid("2", units.FULL)
    pair = next(pair for pair in units.PAIRS if pair.is_inflated)
    monkeypatch.setattr(ranks.Measuring, "_enter", lambda self, phase: 0.0)
    monkeypatch.setattr(ranks.Measuring, "_warm_up", lambda self, bench: None)
    settings = ProfileSettings(target="t", draft="d", workers=0, is_quick=True, device="cuda")

    def start(
        served, seconds: float, slower: float = 1.0, most: int = 2
    ) -> list[tuple[float, int]]:
        """A session's profile; the part that is kept then."""
        measuring = object.__new__(ranks.Measuring)
        measuring._folder, measuring._seconds = tmp_path, {}
        measuring._session = schedule.Session(pair, label, tuple(served))
        measuring._store = PartStore(tmp_path / "profile", settings)
        measuring._store.open(resume=True)
        part = pd.DataFrame({"seconds": [seconds]})
        measuring._measurer = SimpleNamespace(
            time=lambda bench, deployment, tick: part,
            steadied=lambda bench, deployment, part: part * slower,
            most_visits=most,
        )
        measuring._record = lambda bench, deployment: part
        measuring._profile(None, Deployment(2))
        kept = measuring._earlier(label)
        return list(zip(kept["seconds"], kept.get("visit", [1] * len(kept)), strict=True))

    assert start((), 1.0, slower=2.0) == [(2.0, 1)]
    assert start((), 3.0) == [(2.0, 1)], "nothing is to be served"
    assert start(work, 3.0, most=1) == [(2.0, 1)], "of a large target one is enough"
    assert start(work, 4.0) == [(2.0, 1), (4.0, 2)]
    assert start(work, 5.0) == [(2.0, 1), (4.0, 2)], "cut before its first run"
    assert start(work, 6.0, most=3) == [(2.0, 1), (4.0, 2), (6.0, 3)]
    (tmp_path / schedule.BLIND).mkdir()
    (tmp_path / schedule.BLIND / "2.json").touch()
    assert len(start(work, 7.0, most=9)) == 3, "its runs are predicted from what there was"


def test_what_plain_decoding_said_is_ranked_for_batches_and_replays_where_it_is_whole(
    tmp_path, monkeypatch
):
    asked = [BoundRequest(i, 0.0, "", (1, 2), 3) for i in range(3)]
    table = AcceptanceProfile(
        {"": (Recording(0, np.zeros(3, np.int64), np.zeros((3, 2))),)}
    ).to_table()
    monkeypatch.setattr(ranks, "bound", lambda *args, seed: asked)
    monkeypatch.setattr(ranks, "rank_outputs", lambda bench, served, outputs: table)
    measuring = object.__new__(ranks.Measuring)
    measuring._folder, measuring._task = tmp_path, SimpleNamespace(seed=0)
    measuring._session = SimpleNamespace(pair=SimpleNamespace(models=("target", "draft")))
    runs = tmp_path / "runs"
    runs.mkdir()
    whole = {i: [7, 8, 9] for i in range(3)}
    for workload, outputs, is_kept in (
        (units.STREAM, whole, False),  # the batch's
        (units.SEGMENT, whole | {1: [7]}, False),
        (units.BATCH, whole, True),
        (units.SEGMENT, whole, True),
    ):
        work = SimpleNamespace(workload=workload, requests=3)
        measuring._rank(None, work, None, SimpleNamespace(outputs=outputs))
        assert (runs / f"{workload.name}.acceptance.parquet").exists() == is_kept


def test_requests_that_are_shorter_than_their_question_ask_it_bare(tiny_models):
    requests, segment = campaign_requests, units.SEGMENT
    asked = pd.DataFrame(
        {"arrival": 0.0, "prompt_tokens": [1] * 40 + list(range(400, 420)), "output_tokens": 4,
         "category": ["chat"] * 40 + ["code"] * 20}
    )  # fmt: skip
    found = requests.alike(asked, tiny_models[0], segment, seed=0)
    assert found["chat"] >= 10.0 > found["code"] == 1.0  # four questions
    assert requests.alike(asked, tiny_models[0], units.BATCH, seed=0) == {}
    assert requests.alike(asked, "not here", segment, seed=0) == {}


def test_recorded_requests_are_known_by_their_question(tiny_models):
    prompts = [r for group in questions.recorded_prompts(tiny_models[0], seed=0) for r in group]
    recording = Recording(0, np.array([0]), np.array([[-1.0]]))
    kinds = {p.category for p in prompts}
    profile = AcceptanceProfile(
        {
            kind: tuple(
                replace(recording, request=p.request_id) for p in prompts if p.category == kind
            )
            for kind in kinds
        }
    )
    asked = questions.recorded_questions(profile)
    amounts = len(questions.materials(0))
    by_question = [[p for p in prompts if asked.get(p.request_id) == q] for q in range(24)]
    assert all(len(group) == amounts for group in by_question)
    for group in by_question:
        endings = {tuple(p.prompt_ids[-8:]) for p in group}
        assert len(endings) == 1
        assert len({p.prompt_ids for p in group}) == amounts
        assert questions.LONG not in {p.category for p in group}


@pytest.mark.parametrize("count", [6, 18, 24, 48])
def test_predictions_have_the_recordings_of_the_questions_that_are_served(tiny_models, count):
    workload = replace(units.BATCH, requests=count)
    served = questions.served_prompts(tiny_models[0], workload, seed=3)
    prompts = [r for group in questions.recorded_prompts(tiny_models[0], seed=0) for r in group]
    recording = Recording(0, np.array([0]), np.array([[-1.0]]))
    profile = AcceptanceProfile(
        {
            kind: tuple(
                replace(recording, request=p.request_id) for p in prompts if p.category == kind
            )
            for kind in {p.category for p in prompts}
        }
    )
    asked = questions.served_questions(count)
    assert len(asked) == min(count, 24)
    found = questions.of_questions(profile, asked)
    kept = {r.request for group in found.recordings.values() for r in group}
    endings = {p.prompt_ids[-30:] for p in served}
    for prompt in prompts:
        is_long = prompt.category == questions.LONG
        assert (prompt.request_id in kept) == (is_long or prompt.prompt_ids[-30:] in endings)
