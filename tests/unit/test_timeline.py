"""Timelines: the trace-event schema, and that they say what the tables say."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict

import numpy as np
import pandas as pd
import pytest

from codesign.candidate import Candidate
from codesign.config import Serving, parse_deployment
from codesign.errors import InputError
from codesign.policy.speculation import parse_policy
from codesign.records import RequestRecord, RoundLog, RoundRecord, RunRecords
from codesign.sim import simulate
from codesign.timeline import TimelineRun, timeline_events, write_timeline

SPANS = ("prefill", "link_there", "reroot", "draft", "link_back", "target")


def make_round(number: int, start: float, replica: int = 0, **spans: float) -> RoundRecord:
    values = dict.fromkeys(SPANS, 0.0) | spans
    return RoundRecord(
        round=number, start=start, batch=2, rows=6, context=50, num_expansions=3, draft_rows=9,
        num_draft_tokens=4, num_accepted_tokens=1, num_emitted_tokens=3, prefill_tokens=7,
        replica=replica, **values,
    )  # fmt: skip


def make_run(rounds=None, requests=None, seconds=9.0) -> RunRecords:
    first = make_round(0, 1.0, prefill=0.5, link_there=0.01, draft=0.1, link_back=0.02, target=0.3)
    rounds = [first, make_round(1, 1.93, reroot=0.04, target=0.3)] if rounds is None else rounds
    finished = RequestRecord(3, "chat", 0.25, 10, 4, 1.0, 1.5, 2.25)
    requests = [finished] if requests is None else requests
    return RunRecords(requests, RoundLog(rounds), seconds, [])


def events_of(*records: RunRecords, **options) -> list[dict]:
    runs = [TimelineRun(f"run {i}", r) for i, r in enumerate(records)]
    return json.loads(json.dumps(list(timeline_events(runs, **options))))


def slices_by_lane(events: list[dict]) -> dict[tuple[int, str], list[dict]]:
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], names[event["pid"], event["tid"]]].append(event)
    return lanes


def random_run(seed: int, *, replicas: int = 2) -> RunRecords:
    rng = np.random.default_rng(seed)
    rounds = []
    for replica in range(replicas):
        at = 0.0
        for number in range(60):
            at += float(rng.choice([0.0, rng.exponential(0.1)]))
            spans = {name: float(rng.exponential(0.01) * (rng.random() < 0.7)) for name in SPANS}
            rounds.append(make_round(number, at, replica, **spans))
            at += sum(spans.values())
    return make_run(rounds, seconds=at)


def test_every_event_has_what_the_format_asks_of_its_phase():
    needed = {
        "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
        "b": {"name", "cat", "id", "pid", "ts"},
        "e": {"name", "cat", "id", "pid", "ts"},
        "C": {"name", "pid", "ts", "args"},
        "M": {"name", "pid", "args"},
    }
    events = events_of(random_run(0), make_run())
    assert {event["ph"] for event in events} == set(needed)
    for event in events:
        assert needed[event["ph"]] <= set(event)
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 1) > 0


def test_a_span_is_one_slice_in_its_lane_at_its_place_in_the_protocol():
    found = [
        (lane, e["name"], e["ts"], round(e["dur"], 3))
        for (_, lane), slices in slices_by_lane(events_of(make_run())).items()
        for e in slices
        if e["args"]["round"] == 0
    ]
    assert sorted(found, key=lambda row: row[2]) == [
        ("target", "prefill", 1e6, 5e5),
        ("link", "link_there", 1.5e6, 1e4),
        ("draft", "draft", 1.51e6, 1e5),
        ("link", "link_back", 1.61e6, 2e4),
        ("target", "target", 1.63e6, 3e5),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_slices_of_a_round_add_up_to_its_duration(seed):
    run = random_run(seed, replicas=1)
    total = defaultdict(float)
    for slices in slices_by_lane(events_of(run)).values():
        for event in slices:
            total[event["args"]["round"]] += event["dur"]
    for record in run.rounds:
        assert total[record.round] == pytest.approx(
            1e6 * (record.prefill + record.seconds), abs=0.1
        )


@pytest.mark.parametrize("seed", range(4))
def test_nothing_overlaps_in_a_lane(seed):
    lanes = slices_by_lane(events_of(random_run(seed), random_run(seed + 10)))
    assert {lane for _, lane in lanes} >= {"target 0", "target 1", "draft 0", "draft 1"}
    for slices in lanes.values():
        slices.sort(key=lambda event: event["ts"])
        for before, after in itertools.pairwise(slices):
            assert before["ts"] + before["dur"] <= after["ts"] + 5e-4  # half a nanosecond


@pytest.mark.parametrize(
    ("policy", "deployment", "chunk"),
    [("chain-3", "2x2", 64), ("async-tree-8x4x2", "2x1+1", 64), ("async-tree-8x4x2", "1+1", None)],
)
def test_a_simulated_run_fills_its_lanes_without_overlap(machine_fit, policy, deployment, chunk):
    rng = np.random.default_rng(0)
    requests = pd.DataFrame(
        {
            "arrival": np.cumsum(rng.exponential(0.2, 40)),
            "prompt_tokens": rng.integers(10, 200, 40),
            "output_tokens": rng.integers(1, 40, 40),
        }
    )
    candidate = Candidate(parse_deployment(deployment), parse_policy(policy), 4)
    serving = Serving(max_kv_tokens=1000, prefill_chunk=chunk, preemption=True)
    run = simulate(requests, candidate, machine_fit, serving=serving, seed=0)
    lanes = slices_by_lane(events_of(run))
    for slices in lanes.values():
        slices.sort(key=lambda event: event["ts"])
        for before, after in itertools.pairwise(slices):
            assert before["ts"] + before["dur"] <= after["ts"] + 5e-4
    shown = sum(event["dur"] for slices in lanes.values() for event in slices)
    wanted = sum(record.prefill + record.seconds for record in run.rounds)
    assert shown == pytest.approx(1e6 * wanted, rel=1e-6)


def test_clock_jitter_at_the_seam_of_two_rounds_makes_no_overlap():
    run = make_run([make_round(0, 0.0, target=0.1000004), make_round(1, 0.1, target=0.1)])
    first, second = slices_by_lane(events_of(run))[1, "target"]
    assert first["ts"] + first["dur"] == pytest.approx(second["ts"], abs=1e-6)


def test_lanes_say_the_replica_only_where_there_are_several():
    one = {lane for _, lane in slices_by_lane(events_of(random_run(0, replicas=1)))}
    assert one == {"target", "draft", "link"}
    both = make_run([make_round(0, 1.0, target=0.3), make_round(0, 5.0, 1, target=0.3)])
    assert {lane for _, lane in slices_by_lane(events_of(both, window=(4.0, 2.0)))} == {"target 1"}


def test_plain_decoding_has_no_empty_lanes():
    events = events_of(make_run([make_round(0, 0.0, prefill=0.2, target=0.1)]))
    assert {lane for _, lane in slices_by_lane(events)} == {"target"}


def test_a_request_is_an_asynchronous_event_with_its_phases_inside():
    events = [e for e in events_of(make_run()) if e["ph"] in "be"]
    assert [(e["ph"], e["name"], e["ts"]) for e in events] == [
        ("b", "request", 0.25e6),
        ("b", "queue", 0.25e6),
        ("e", "queue", 1e6),
        ("b", "prefill", 1e6),
        ("e", "prefill", 1.5e6),
        ("b", "decode", 1.5e6),
        ("e", "decode", 2.25e6),
        ("e", "request", 2.25e6),
    ]
    assert len({e["id"] for e in events}) == 1
    assert events[0]["args"]["request"] == 3


def test_an_unfinished_request_lasts_until_the_run_ends():
    events = events_of(make_run(requests=[RequestRecord(0, "", 2.0, 10)], seconds=5.0))
    ends = {e["name"]: e["ts"] for e in events if e["ph"] == "e"}
    assert ends == {"queue": 5e6, "request": 5e6}
    begin = next(e for e in events if e["ph"] == "b")
    assert begin["args"]["is_finished"] is False


def test_counters_follow_the_rounds_and_fall_to_0_where_the_replica_waits():
    run = make_run([make_round(0, 0.0, target=0.5), make_round(1, 2.0, target=0.5)])
    values = [
        (e["ts"], e["args"]["value"])
        for e in events_of(run)
        if (e["ph"], e["name"]) == ("C", "batch")
    ]
    assert values == [(0, 2), (0.5e6, 0), (2e6, 2), (2.5e6, 0)]


def test_runs_are_processes_with_names_and_requests_of_their_own_from_one_origin():
    events = events_of(make_run(), make_run())
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "run 0", 2: "run 1"}
    assert len({e["id"] for e in events if e["ph"] == "b"}) == 2
    starts = {e["pid"]: e["ts"] for e in reversed(events) if e["ph"] == "X"}
    assert starts[1] == starts[2]


def test_a_window_keeps_rounds_that_start_in_it_and_requests_that_are_there():
    requests = [RequestRecord(i, "", i, 10, 4, i, i + 0.1, i + 0.5) for i in range(5)]
    rounds = [make_round(i, float(i), target=0.5) for i in range(5)]
    events = events_of(make_run(rounds, requests), window=(1.9, 1.2))
    assert [e["args"]["round"] for e in events if e["ph"] == "X"] == [2, 3]
    kept = [e["args"]["request"] for e in events if (e["ph"], e["name"]) == ("b", "request")]
    assert kept == [2, 3]


def test_a_run_without_rounds_has_its_requests():
    events = events_of(make_run([], [RequestRecord(0, "", 0.0, 3)]))
    assert {e["ph"] for e in events} == {"M", "b", "e"}


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_the_file_is_one_json_object_and_its_events_are_counted(tmp_path, name):
    count = write_timeline(tmp_path / name, [TimelineRun("a", make_run())])
    opener = gzip.open if name.endswith(".gz") else open
    with opener(tmp_path / name, "rt", encoding="utf-8") as file:
        content = json.load(file)
    assert content["displayTimeUnit"] == "ms"
    assert len(content["traceEvents"]) == count


def test_no_file_is_left_when_it_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        write_timeline(tmp_path / "file" / "t.json", [TimelineRun("a", make_run())])
