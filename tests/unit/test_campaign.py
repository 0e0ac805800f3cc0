"""The validation campaign: its units, its join of predictions and runs, and its document."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from codesign.acceptance import AcceptanceProfile, Recording
from codesign.artifacts import header, write_table
from codesign.candidate import Interval
from codesign.config import Deployment, Serving
from codesign.errors import InputError
from codesign.fit import FORWARDS, ROOFLINE, STEP_COLUMNS, Fit, fit_profile
from codesign.fit.prompt_luck import PromptLuck
from codesign.profiler.store import ACCEPTANCE_PART, PartStore, ProfileSettings
from codesign.prompts import BoundRequest
from codesign.run_directory import read_run, write_run
from codesign.sim import simulate
from codesign.validate import Comparison

ROOT = Path(__file__).parents[2]
PAIR = "smollm2-135m+smollm2-135m-draft"
SHAPES = [(1, 1), (1, 4), (1, 8), (1, 9), (1, 16), (2, 8), (4, 8), (8, 4)]


@pytest.fixture(scope="module")
def campaign():
    """The modules of ``benchmarks.campaign`` by name."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(ROOT))
    names = (
        "units", "schedule", "requests", "intervals", "blind", "join", "report", "true_steps",
        "replays", "chosen_plan",
    )  # fmt: skip
    yield {name: importlib.import_module(f"benchmarks.campaign.{name}") for name in names}
    patch.undo()


def steps(fit: Fit, label: str) -> pd.DataFrame:
    """A part of a profile of a machine that takes exactly what a fit says."""
    cost, rows = fit.costs[label], []
    for op in FORWARDS:
        time = getattr(cost, op)
        for requests, count in SHAPES:
            for context in (64, 256):
                shape = (requests * count, requests, requests * context)
                seconds = time(shape[0], shape[2])
                rows += [(label, op, *shape, beside, seconds) for beside in (False, True)] * 3
    constants = [("reroot", cost.reroot), ("link", max(cost.link, 1e-5)), ("loop", 2e-3)]
    rows += [(label, op, 0, 0, 0, False, seconds) for op, seconds in constants]
    return pd.DataFrame(rows, columns=list(STEP_COLUMNS))


@pytest.fixture(scope="module")
def folder(campaign, machine_fit, tmp_path_factory) -> Path:
    """A campaign whose runs are simulations of its own fit with another seed."""
    out = tmp_path_factory.mktemp("campaign")
    settings = ProfileSettings(
        target=machine_fit.target, draft=machine_fit.draft, workers=2, device="cpu-ranks",
        deployments=("2", "1+1"),
    )  # fmt: skip
    store = PartStore(out / PAIR / "profile", settings)
    store.open(resume=True)
    for label in ("2", "1+1"):
        store.put(label, steps(machine_fit, label))
    store.put(ACCEPTANCE_PART, machine_fit.acceptance.to_table())
    fit = fit_profile(campaign["join"].closed_profile(out / PAIR))
    units = campaign["units"]
    size = units.Size((4, 8), (2,), (), 1, 0.5)
    for work in [u for label in ("2", "1+1") for u in units.grid(label, size)]:
        load = replace(work.workload, seconds=6.0) if work.workload.seconds else work.workload
        requests = campaign["requests"].load_requests(
            out / PAIR, load, fit.target, fit.costs["2"], seed=0
        )
        requests = requests.assign(category="chat")
        records = simulate(
            requests, work.candidate, fit, serving=Serving(max_kv_tokens=1 << 15), seed=99
        )
        summary = {"label": work.candidate.label, "candidate": work.candidate.to_dict()}
        where = out / PAIR / "runs" / work.folder
        write_run(where, records, origin="measured", summary=summary, seed=99)
    return out


def test_every_session_of_a_grid_is_resumed_where_it_stopped(campaign, folder):
    units, session = campaign["units"], campaign["schedule"].Session
    pair = next(p for p in units.PAIRS if p.name == PAIR)
    size = units.Size((4, 8), (2,), (), 1, 0.5)
    whole = session(pair, "2", tuple(units.grid("2", size)))
    assert whole.left(folder / PAIR) == []
    assert whole.seconds(folder / PAIR) == 0.0
    more = session(pair, "2", tuple(units.grid("2", units.FULL)))
    left = more.left(folder / PAIR)
    assert len(left) == len(more.units) - len(
        [u for u in more.units if u.folder in {v.folder for v in whole.units}]
    )
    assert more.seconds(folder / PAIR) > 0
    assert more.seconds(folder / "elsewhere") > more.seconds(folder / PAIR)


def test_the_grid_has_the_rows_and_depths_asked_for_on_each_split(campaign):
    units = campaign["units"]
    assert units.deployments(4)[:5] == ["4", "1+3", "2+2", "3+1", "3"] or set(
        units.deployments(4)
    ) == {"1", "2", "3", "4", "1+1", "1+2", "1+3", "2+1", "2+2", "3+1"}
    for label in ("2", "3+1"):
        streams = [u for u in units.grid(label, units.FULL) if u.workload.name == "stream"]
        trees = [u.candidate.speculation for u in streams if "tree" in u.candidate.label]
        assert {spec.rows for spec in trees} - {2} == {4, 8, 16}
        assert {spec.expansions for spec in trees} == {1, 2, 3, 4, 6, 8}
        assert all(spec.is_async == ("+" in label) for spec in trees)
        assert len({u.folder for u in streams}) == len(streams)
    assert units.grid("2", units.FULL)[0].candidate.speculation.kind == "plain"


def test_the_schedule_fits_its_calls_and_asks_for_no_more_runs_once_they_had_their_seconds(
    campaign, tmp_path
):
    schedule, units = campaign["schedule"], campaign["units"]
    wanted = schedule.scheduled(4)
    assert [w.pair.name for w in wanted][:6] == 5 * ["llama-3-70b+llama-3.2-1b"] + [
        "llama-3-8b+llama-3.2-1b"
    ]
    pairs = {pair.name for pair in units.PAIRS if pair.is_inflated}
    for gpus in (2, 4):
        labels: dict[str, set[str]] = {name: set() for name in pairs}
        for each in schedule.scheduled(gpus):
            labels[each.pair.name].add(each.label)
        assert all({"2", "1+1"} <= found for found in labels.values())
    sessions = [
        schedule.Session(w.pair, w.label, tuple(units.grid(w.label, units.FULL)), w.run_seconds)
        for w in wanted
    ]
    seconds = [s.seconds(tmp_path / s.pair.name) for s in sessions]
    calls = schedule.by_calls(seconds, 560.0)
    for number in set(calls):
        assert sum(s for s, call in zip(seconds, calls, strict=True) if call == number) <= 560.0
    first = sessions[0]
    assert first.phases(tmp_path)["runs"] == first.run_seconds
    assert first.least_seconds(tmp_path) < first.seconds(tmp_path)
    parts = tmp_path / "profile" / "parts"
    parts.mkdir(parents=True)
    for name in ("2", "acceptance"):
        (parts / f"{name}.parquet").touch()
    assert set(first.phases(tmp_path)) == {"start", "runs"}
    (tmp_path / "2.spent").touch()
    assert first.phases(tmp_path) == {}
    assert set(replace(first, run_seconds=float("inf")).phases(tmp_path)) == {"start", "runs"}


def test_runs_share_the_seconds_that_starts_and_profiles_leave(campaign):
    share = campaign["schedule"].run_share
    phases = [{"start": 10.0, "profile": 5.0, "runs": 20.0}, {"start": 10.0, "runs": 20.0}]
    slower = 25.0 * campaign["schedule"].SLOWER
    assert share(phases, slower + 40.0) == 1.0
    assert share(phases, slower + 30.0) == 0.75
    assert share(phases, slower) == 0.5  # the last ones go without rather than all with too little
    assert share(phases, 500.0) == 2.0
    assert share(phases[:1], 25.0) == 2.0  # the last one may have what is left
    assert share([{"start": 10.0}] * 2, 5.0) == 1.0


# Seconds on H200s, 22 and 23 November: profile and acceptance of a pair on a deployment.
_TAKEN = {
    ("llama-3-8b+llama-3.2-1b", "2"): (8.8, 9.4),
    ("llama-3-8b+llama-3.2-1b", "1+1"): (11.5, None),
    ("llama-3-70b+llama-3.2-1b", "2"): (27.3, 19.0),
    ("llama-3-70b+llama-3.2-1b", "1+1"): (42.3, None),
    ("llama-3-70b+llama-3.2-1b", "1"): (41.2, 20.4),
    ("llama-3-70b+llama-3.2-3b", "2"): (29.2, 19.6),
    ("llama-3-70b+llama-3.2-3b", "1+1"): (45.9, None),
    ("qwen2-72b+qwen2-1.5b", "2"): (30.2, 19.8),
    ("qwen2-72b+qwen2-1.5b", "1+1"): (46.4, None),
}


@pytest.mark.parametrize(("name", "label"), list(_TAKEN))
def test_profiles_and_recordings_are_expected_to_take_what_they_took(campaign, name, label):
    schedule, pair = campaign["schedule"], campaign["units"].find_pair(name)
    profile, recording = _TAKEN[name, label]
    assert schedule.profile_seconds(pair, label) == pytest.approx(profile, rel=0.15)
    if recording is not None:
        assert schedule.recording_seconds(pair, label) == pytest.approx(recording, rel=0.15)


def test_a_share_of_runs_above_one_is_in_what_a_session_needs(campaign, tmp_path):
    schedule, units = campaign["schedule"], campaign["units"]
    wanted = schedule.scheduled(2)[0]
    works = tuple(units.grid(wanted.label, units.FULL))
    session = schedule.Session(wanted.pair, wanted.label, works, wanted.run_seconds)
    once, twice = (session.phases(tmp_path, share) for share in (1.0, 2.0))
    assert twice["runs"] == 2.0 * once["runs"] == 2.0 * wanted.run_seconds
    assert {**twice, "runs": 0.0} == {**once, "runs": 0.0}


def test_a_session_that_is_cut_is_noted_with_the_phase_that_it_was_in(campaign, tmp_path, capsys):
    main, schedule = importlib.import_module("benchmarks.campaign.__main__"), campaign["schedule"]
    main.note_cut(tmp_path, "2", "ended here after 170 s")  # it came to its end
    assert capsys.readouterr().out == ""
    assert not (tmp_path / schedule.SESSIONS).exists()
    cut = {"label": "2", "served": 9, "profile": 29.5, "cut": "runs: batch/plain"}
    schedule.phase_file(tmp_path, "2").write_text(json.dumps(cut))
    main.note_cut(tmp_path, "2", "ended here after 170 s")
    assert "ended here after 170 s in its phase runs: batch/plain" in capsys.readouterr().out
    assert json.loads((tmp_path / schedule.SESSIONS).read_text()) == cut
    assert not schedule.phase_file(tmp_path, "2").exists()
    table = campaign["report"].seconds_table(
        [campaign["report"].Result("H200", result() | {"sessions": [cut]})]
    )
    assert "9, cut in runs: batch/plain" in table


def test_a_fit_is_kept_before_the_first_run_and_one_that_changed_since_is_told(
    campaign, machine_fit, tmp_path
):
    blind, cost = campaign["blind"], machine_fit.costs["2"]
    kept = blind.keep_blind(tmp_path, "2", cost, machine_fit.calibration)
    later = replace(cost, reroot=cost.reroot * 1.1)
    assert blind.keep_blind(tmp_path, "2", later, machine_fit.calibration) == kept  # the first one
    rounded = replace(cost, reroot=cost.reroot * (1 + 1e-9))
    for costs, is_same in ((cost, True), (rounded, True), (later, False)):
        fit = replace(machine_fit, costs={"2": costs})
        assert blind.blind_fits(tmp_path, fit) == {"2": {"sha256": kept, "is_same": is_same}}
    assert blind.blind_fits(tmp_path, replace(machine_fit, costs={"4": cost})) == {}
    assert blind._is_same({"a": [1.0]}, {"a": [1.0], "new": 0.0})
    assert not blind._is_same({"a": [1.0]}, {"a": [1.0], "new": 0.5})
    assert not blind._is_same({"a": [1.0], "gone": 0.0}, {"a": [1.0]})
    pair = result() | {"blind": {"2": {"sha256": kept, "is_same": False}}}
    said = campaign["report"].blindness([campaign["report"].Result("H200", pair)])
    assert "0 of 1 are" in " ".join(said.split())


def test_the_leading_plans_of_a_session_serve_what_its_schedule_asks_for(campaign):
    schedule, units = campaign["schedule"], campaign["units"]
    for wanted in schedule.scheduled(2):
        size = replace(units.FULL, segments=wanted.segments, batches=wanted.batches)
        works = units.grid(wanted.label, size)
        leading = works[: units.LEADING + wanted.batches + wanted.segments]
        counts = {
            load.name: sum(w.workload.name == load.name for w in leading)
            for load in units.WORKLOADS
        }
        wished = (units.LEADING, wanted.batches, wanted.segments)
        assert tuple(counts.values()) == wished
        assert {w.folder for w in works} >= {w.folder for w in units.grid(wanted.label, units.FULL)
                                             if not w.workload.seconds}  # fmt: skip
    wide = {(w.pair.name, w.label) for w in schedule.scheduled(2)}
    assert len(wide) == 8


def test_all_deployments_of_a_pair_serve_as_many_requests_as_its_one_table_has(campaign, tmp_path):
    main = importlib.import_module("benchmarks.campaign.__main__")
    counts: dict[str, set[int]] = {}
    for words in (["--gpus", "4"], ["--deployments", "1"]):
        for session in main.sessions(main.parse(["--out", str(tmp_path), *words])):
            streams = {w.workload.requests for w in session.units if not w.workload.seconds}
            counts.setdefault(session.pair.name, set()).update(streams)
    assert len(counts) == 4
    assert all(len(numbers) == 1 for numbers in counts.values())
    assert set.union(*counts.values()) == {18, 24}


def test_a_trace_that_is_missing_is_named_before_anything_is_started(
    campaign, tmp_path, monkeypatch
):
    main = importlib.import_module("benchmarks.campaign.__main__")

    def missing(name: str) -> None:
        raise InputError(f"the bundled trace {name} is missing")

    monkeypatch.setattr(main, "load_trace", missing)
    monkeypatch.setattr(main, "start_process", lambda session: pytest.fail("was started"))
    args = main.parse(["--out", str(tmp_path), "--device", "cpu-ranks", "--deployments", "2"])
    with pytest.raises(InputError, match="conv-twin is missing"):
        main.measure(args)


def test_a_session_that_died_before_its_task_does_not_end_the_campaign(campaign, tmp_path):
    main = importlib.import_module("benchmarks.campaign.__main__")
    args = main.parse(["--out", str(tmp_path), "--device", "cpu-ranks", "--deployments", "2"])
    [session] = main.sessions(args)
    gone = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE, text=True)
    gone.wait()
    assert main.give_task(gone, session, args, end=0.0, share=1.0) is False
    with subprocess.Popen(
        ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as echo:
        assert main.give_task(echo, session, args, end=5.0, share=1.0) is True
        told = json.loads(echo.stdout.read())
    assert (told["label"], told["deadline"], told["recorded"]) == ("2", 5.0, 1.0)


def test_prompts_that_are_served_are_none_of_those_recorded_and_ask_the_same(campaign, tiny_models):
    requests, units = campaign["requests"], campaign["units"]
    first, *more = requests.recorded_prompts(tiny_models[0])
    recorded = [r for group in (first, *more) for r in group]
    served = requests.served_prompts(tiny_models[0], units.STREAM)
    assert len(served) == units.STREAM.requests == 24
    twice = requests.served_prompts(tiny_models[0], replace(units.STREAM, requests=48))
    assert twice[:24] == served
    assert len({r.prompt_ids for r in twice}) == 48
    assert not {r.prompt_ids for r in recorded} & {r.prompt_ids for r in twice}
    assert len({r.prompt_ids for r in recorded}) == len(recorded)
    assert sorted(r.request_id for r in recorded) == list(range(len(recorded)))
    assert {len(group) for group in more} == {24}
    assert len(first) == campaign["schedule"].NUM_RECORDED[0]
    assert len(recorded) == campaign["schedule"].MOST_RECORDED
    kinds = [r.category for r in first]
    for category in {r.category for r in served}:
        assert kinds.count(category) == 16
        assert [r.category for r in served].count(category) == 4
    assert len({r.category for r in served[:6]}) == 6  # a grid that is cut short stays balanced
    assert kinds.count(requests.LONG) == 12
    [fewer] = requests.recorded_prompts(tiny_models[0], share=0.25)
    assert len(fewer) == 24 + 12
    questions = {r.prompt_ids[-20:] for r in recorded}
    assert {r.prompt_ids[-20:] for r in served} <= questions


def test_acceptance_is_recorded_of_more_prompts_as_long_as_there_is_time(campaign, monkeypatch):
    ranks = importlib.import_module("benchmarks.campaign.ranks")
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
    monkeypatch.setattr(ranks, "recorded_prompts", lambda target, *, share: iter(groups))
    monkeypatch.setattr(ranks, "rank_outputs", table)
    measuring = object.__new__(ranks.Measuring)
    measuring._session = SimpleNamespace(pair=SimpleNamespace(models=("target", "draft")))
    measuring._task = SimpleNamespace(recorded=1.0)
    found = measuring._record(SimpleNamespace(serve=serve), Deployment(2))
    assert served == found["request"].tolist() == [0, 1, 2]


def test_what_is_known_of_a_request_is_played_by_that_request(campaign, folder, machine_fit):
    join, units = campaign["join"], campaign["units"]
    recordings = [r for group in machine_fit.acceptance.recordings.values() for r in group]
    table = AcceptanceProfile(
        {"chat": tuple(replace(r, request=i) for i, r in enumerate(recordings[:3]))}
    ).to_table()
    runs = folder / PAIR / "runs"
    files = [runs / f"{name}.acceptance.parquet" for name in ("batch", units.SEGMENT.name)]
    for file in files:
        write_table(file, table, header("profile", seed=0))
    try:
        known = join.fit_to_these(folder / PAIR, units.STREAM, machine_fit)
        replayed = join.fit_to_these(folder / PAIR, units.SEGMENT, machine_fit)
    finally:
        for file in files:
            file.unlink()
    requests = join.each_its_own(pd.DataFrame({"category": ["chat"] * 3}))
    assert list(known.acceptance.recordings) == requests["category"].tolist()
    for number, kind in enumerate(requests["category"]):
        [recording] = known.acceptance.recordings[kind]
        assert recording.ranks.tolist() == recordings[number].ranks.tolist()
    assert list(replayed.acceptance.recordings) == list(known.acceptance.recordings)
    assert join.fit_to_these(folder / PAIR, units.SEGMENT, machine_fit) is None


def test_what_plain_decoding_said_is_ranked_for_batches_and_replays_where_it_is_whole(
    campaign, tmp_path, monkeypatch
):
    ranks = importlib.import_module("benchmarks.campaign.ranks")
    units = campaign["units"]
    asked = [BoundRequest(i, 0.0, "", (1, 2), 3) for i in range(3)]
    table = AcceptanceProfile(
        {"": (Recording(0, np.zeros(3, np.int64), np.zeros((3, 2))),)}
    ).to_table()
    monkeypatch.setattr(ranks, "bound", lambda *args, seed: asked)
    monkeypatch.setattr(ranks, "rank_outputs", lambda bench, served, outputs: table)
    measuring = object.__new__(ranks.Measuring)
    measuring._folder = tmp_path
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


def test_true_steps_are_found_in_the_rounds_whatever_the_fit_says(campaign, folder):
    true_steps = campaign["true_steps"]
    fit = fit_profile(campaign["join"].closed_profile(folder / PAIR))
    judged = set()
    for path in sorted(folder.glob(f"{PAIR}/runs/*/*")):
        if not path.is_dir():
            continue
        policy, _, label = path.name.partition("_on_")
        cost, is_plain = fit.costs[label.partition("_")[0]], policy == "plain"
        names = ["target", "prefill", *["draft"] * (not is_plain and "+" not in label)]
        wrong = replace(cost, **{name: getattr(cost, name).scaled(0.5) for name in names})
        records = read_run(path).records
        found = true_steps.true_cost(wrong, records, has_draft=not is_plain)
        for name in names:
            wanted = getattr(cost, name)(12, 300)
            assert getattr(found, name)(12, 300) == pytest.approx(wanted, rel=0.03), (path, name)
            judged.add(name)
        if not is_plain:
            assert found.reroots(2) == pytest.approx(cost.reroots(2), rel=0.01)
            assert found.link == pytest.approx(cost.link, rel=0.05)
    assert judged == {"target", "prefill", "draft"}


def test_an_interval_holds_the_error_of_prompts_by_their_share_of_the_time(campaign, machine_fit):
    def sigmas(prefill: float, error: float) -> tuple[float, ...]:
        fit = replace(machine_fit, errors={"2/target": 0.01, "2/prefill": error})
        spans = [("target", 1.0), ("draft", 0.0), ("prefill", prefill)]
        run = SimpleNamespace(
            spans=[comparison(*each) for each in spans[:2]],
            rounds=[comparison(*spans[2])],
            candidate=campaign["units"].unit(Deployment(2), "plain", campaign["units"].BATCH)
            .candidate,
        )  # fmt: skip
        sigma = campaign["intervals"].times_sigma
        return tuple(sigma(run, fit, waits_for_prompts=waits) for waits in (True, False))

    def with_drift(error: float, seconds: float) -> object:
        drift = machine_fit.drift("2", seconds, requests=campaign["units"].BATCH.batch)
        return pytest.approx(np.hypot(error / 0.6745, drift))

    steps = with_drift(0.01, 1.0)
    assert sigmas(0.0, 0.5) == (steps, steps)
    assert sigmas(1.0, 0.5) == (with_drift(float(np.hypot(0.005, 0.25)), 2.0), steps)


def comparison(name: str, value: float) -> Comparison:
    return Comparison(name, Interval(value, value, value), value)


def test_runs_that_do_as_predicted_are_found_to(campaign, folder, tmp_path):
    file = tmp_path / "result.json"
    campaign["join"].write_result(folder, file)
    (pair,) = json.loads(file.read_text())["pairs"]
    assert pair["pair"] == PAIR
    assert {run["workload"] for run in pair["runs"]} == {"stream", "batch", "segment"}
    for run in pair["runs"]:
        predicted, low, high, measured = run["figures"]["tpot_mean"][:4]
        assert low <= predicted <= high
        if run["label"].startswith("plain") and run["workload"] == "stream":
            assert predicted == pytest.approx(measured, rel=1e-6)
        assert predicted == pytest.approx(measured, rel=0.4)
    for plan in pair["plans"]:
        assert plan["chosen"] in {run["label"] for run in pair["runs"]}
        assert 0.0 <= plan["regret"] < 0.3
    assert sum(bins[2] for bins in pair["calibration"]["all"]) == 800
    assert file.stat().st_size < 60_000
    text = campaign["report"].document(campaign["report"].read([file]))
    assert f"| {PAIR}, " in text
    for goal in ("decode speed, one stream", "regret", "rank correlation", "80 % intervals"):
        assert goal in text


def result(*runs: dict, plans: tuple[dict, ...] = ()) -> dict:
    return {
        "pair": "a+b", "runs": list(runs), "plans": list(plans), "sessions": [],
        "calibration": {"all": [[0.55, 0.5, 40], [0.95, 0.9, 60]]},
    }  # fmt: skip


def run(label: str, *, tpot: tuple, length: tuple = (), seconds: tuple = (2e-3, 2e-3)) -> dict:
    spans = {name: [0.0, 0.0] for name in ("draft", "reroot", "link_there", "link_back")}
    figures = {"tpot_mean": list(tpot), "throughput": [10.0, 9.0, 11.0, 10.0]}
    if length:
        figures["acceptance_length"] = list(length)
    rounds = {"target": list(seconds), "seconds": list(seconds), **spans}
    return {"workload": "stream", "label": label, "figures": figures, "rounds": rounds, "notes": []}


def written(report: ModuleType, tmp_path: Path, *pairs: dict) -> str:
    file = tmp_path / "results.json"
    hardware = {"cores": 2, "gpus": [{"name": "NVIDIA H200"}] * 2}
    file.write_text(json.dumps({"hardware": hardware, "num_seeds": 8, "pairs": list(pairs)}))
    return report.document(report.read([file]))


def test_the_document_states_errors_goals_and_the_cause_of_the_worst(campaign, tmp_path):
    runs = (
        run("plain on 2, batch 1", tpot=(2e-3, 1.9e-3, 2.1e-3, 2e-3)),
        run(
            "tree-8x4x2 on 2, batch 1",
            tpot=(1e-3, 0.9e-3, 1.1e-3, 1.25e-3, 1.2e-3),
            length=(2.5, 2.4, 2.6, 2.0),
            seconds=(2.2e-3, 2e-3),
        ),
    )
    plan = {
        "workload": "stream", "workers": 2, "regret": 0.015, "correlation": 0.97, "num_runs": 9
    }  # fmt: skip
    text = written(campaign["report"], tmp_path, result(*runs, plans=(plan,)))
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert rows["decode speed, one stream, mean error"].endswith("| 12.5 % |")  # 0 and 25 %
    assert rows["the same, worst"].endswith("| 25.0 % |")
    assert rows["the same, acceptance known"].endswith("| 4.2 % |")
    assert rows["acceptance length, mean error"].endswith("| 25.0 % |")
    assert rows["round time, one stream, mean error"].endswith("| 5.0 % |")
    assert rows["span: target, mean error"].endswith("| 5.0 % |")
    assert rows["regret: latency of one stream"].endswith("| 1.5 % of 9 |")
    assert rows["coverage of 80 % intervals"].endswith("| 60 % of 5 |")
    assert "tokens per round +25.0 %, round time +10.0 %" in rows["tree-8x4x2 on 2, batch 1"]
    assert "| a+b, H200 |" in text


def test_intervals_name_the_drift_that_they_were_made_with(campaign, tmp_path):
    older = {"host": 45e-6, "batch": 0.017, "host_spread": {}}
    for drift, said in (
        (older, "(45 us per round, and 1.7 % of a round of several"),
        (older | {"share": 0.012}, "(45 us per round, 1.2 % of its time, and 1.7 % of a round"),
    ):
        pair = result() | {"unsure": {}, "drift": drift}
        text = " ".join(written(campaign["report"], tmp_path, pair).split())
        assert said in text


def test_intervals_of_steps_are_judged_where_luck_is_known(campaign, tmp_path):
    known = [(2.0, 1.0, 3.0, 2.0, 2.03), (2.0, 1.0, 3.0, 2.0, 2.08), (2.0, 1.0, 3.0, 2.0)]
    runs = [run("plain on 2, batch 1", tpot=each) for each in known]
    length = (2.0, 1.0, 3.0, 2.0, 1.9)  # seconds a round are 1 % off
    runs.append(run("chain-3 on 2, batch 1", tpot=(2.0, 1.0, 3.0, 2.0, 2.08), length=length))
    for each in runs:
        each["parts"] = {"tpot_mean": [0.3, 0.3, 0.3, 0.02]}
    now = written(campaign["report"], tmp_path, result(*runs) | {"unsure": {}})
    assert "| of the steps' part alone, acceptance known |  | 67 % of 3 |" in now
    then = written(campaign["report"], tmp_path, result(*runs))
    assert "part alone" not in then
    assert ("held-out errors" in then, "held-out errors" in now) == (True, False)


def test_of_a_pair_that_was_run_again_the_last_file_counts(campaign):
    hardware = {"cores": 2, "gpus": [{"name": "NVIDIA H200"}] * 2}
    files = [
        {
            "hardware": hardware,
            "pairs": [result() | {"pair": pair, "recorded": n} for pair in pairs],
        }
        for n, pairs in enumerate((("a+b", "c+d"), ("a+b",)))
    ]
    found = campaign["report"].newest(files)
    assert [(each.pair["pair"], each.pair["recorded"]) for each in found] == [
        ("a+b", 1),
        ("c+d", 0),
    ]


def test_the_document_of_the_repository_is_made_from_its_results(campaign):
    report = campaign["report"]
    text = report.DOCUMENT.read_text(encoding="utf-8")
    shown = text.partition(report.BEGIN)[2].partition(report.END)[0].strip()
    results = ROOT / "benchmarks" / "results"
    files = [results / name for name in re.findall(r"`results/(campaign_[\w-]+\.json)`", shown)]
    newest = sorted(results.glob("campaign_*.json"))
    several = [f for f in newest if len(json.loads(f.read_text())["hardware"]["gpus"]) > 1]
    assert files[-1] == several[-1], "the latest of several GPUs is not in it"
    assert newest[-1].name in text, "the page does not name the latest"
    campaigns = report.read(files)
    assert shown == report.document(campaigns).strip()
    drawn = report.calibration_svg(report.calibrations(campaigns))
    assert report.CALIBRATION.read_text(encoding="utf-8") == drawn


def test_a_chance_that_holds_is_drawn_on_the_diagonal(campaign):
    bins = [[0.25, 0.25, 90], [0.75, 0.5, 900], [0.9, 0.1, 3]]
    drawn = ElementTree.fromstring(campaign["report"].calibration_svg({"a & b": {"chat": bins}}))
    circles = [e.attrib for e in drawn.iter() if e.tag.endswith("circle")]
    frame = next(e.attrib for e in drawn.iter() if e.tag.endswith("rect"))
    left, top, side = (float(frame[name]) for name in ("x", "y", "width"))
    places = [((float(c["cx"]) - left) / side, 1 - (float(c["cy"]) - top) / side) for c in circles]
    assert places == [pytest.approx((0.25, 0.25)), pytest.approx((0.75, 0.5))]  # three tokens: none
    assert float(circles[1]["r"]) > float(circles[0]["r"])


def test_an_interval_widens_with_the_spread_of_seeds_and_with_the_fits_error(campaign):
    likely = campaign["intervals"].likely
    low, high = likely([1.0, 1.0, 1.0], 0.0).bounds
    assert low == high == 1.0
    narrow, wide = (likely([1.0, 1.1, 0.9], error).bounds for error in (0.0, 0.05))
    assert wide[0] < narrow[0] < 1.0 < narrow[1] < wide[1]
    normal = np.random.default_rng(0).normal(1.0, 0.1, (2000, 9))
    inside = [a <= row[8] <= b for row in normal for a, b in [likely(row[:8].tolist(), 0.0).bounds]]
    assert np.mean(inside) == pytest.approx(0.8, abs=0.03)


def test_an_interval_says_what_each_part_adds_and_known_questions_narrow_it(campaign):
    likely, values = campaign["intervals"].likely, [2.0, 2.2, 1.8]
    whole = likely(values, 0.02, PromptLuck(0.03, 0.1), [4.0, 4.4, 3.6])
    known = likely(values, 0.02, PromptLuck(0.01, 0.05), [4.0, 4.4, 3.6])
    simulations, *others = whole.parts
    assert simulations == pytest.approx(1.8856 * 0.1 / np.sqrt(3), rel=1e-3)
    assert others == pytest.approx([1.2816 * 0.1, 1.2816 * 0.03, 1.2816 * 0.02])
    low, high = whole.bounds
    assert (high - low) / 4.0 == pytest.approx(np.linalg.norm(whole.parts))
    assert known.parts[1:3] == pytest.approx([others[0] / 2, others[1] / 3])
    assert high > known.bounds[1]


def test_a_figure_has_as_much_of_the_prompts_luck_as_it_goes_with_the_tokens_of_a_round(campaign):
    likely, luck = campaign["intervals"].likely, PromptLuck(0.03, 0.1)
    lengths = [2.0, 2.1, 1.9, 2.0]
    [same, half, none] = (
        likely(values, 0.0, luck, lengths).parts
        for values in ([5.0, 5.25, 4.75, 5.0], [5.0, 4.875, 5.125, 5.0], [5.0] * 4)
    )
    assert same[1:3] == pytest.approx([1.2816 * 0.1, 1.2816 * 0.03])
    assert half[1:3] == pytest.approx([1.2816 * 0.05, 1.2816 * 0.015])
    assert none == [0.0] * 4
    chance = likely([5.0, 5.1, 5.1, 5.0], 0.0, luck, [2.0, 2.1, 1.9, 2.0]).parts
    assert chance[1] > 0.01 > 1e-9 > chance[2]  # which no tokens explain


def test_what_unsure_steps_do_to_a_replay_is_in_its_interval(campaign):
    likely_replay, luck = campaign["intervals"].likely_replay, PromptLuck(0.03, 0.05)
    draws, values, lengths = [2.0, 2.4, 1.6, 2.2, 1.8], [2.0, 2.1, 1.9], [1.0, 1.05, 0.95]
    _, served, recorded, steps = likely_replay(draws, values, luck, lengths).parts
    assert (served, recorded) == pytest.approx((1.2816 * 0.05, 1.2816 * 0.03))
    one, alone = (campaign["intervals"].likely(v, 0.0).parts[1] for v in (draws, values))
    assert steps**2 + alone**2 == pytest.approx(one**2)
    sure = likely_replay([2.0, 2.0], values, luck, lengths)
    assert (sure.parts[0], sure.parts[3]) == (0.0, 0.0)


def test_draws_of_a_replay_are_as_unsure_as_the_fit(campaign, machine_fit):
    unsure_cost = campaign["replays"].unsure_cost
    fit = replace(machine_fit, errors={"2/target": 0.02, "2/prefill": 0.0}, steps={})
    generator, cost = np.random.default_rng(0), machine_fit.costs["2"]
    sheets = replace(fit, origin=ROOFLINE)  # of no machine that drifts
    drawn = [unsure_cost(sheets, "2", generator, seconds=0.002, drift=1.0) for _ in range(400)]
    factors = np.array(
        [[each.target(4, 0, n) / cost.target(4, 0, n) for n in (1, 2, 8, 9)] for each in drawn]
    )
    assert np.median(np.abs(np.log(factors)), axis=0) == pytest.approx([0.02] * 4, rel=0.15)
    together = np.corrcoef(factors.T)
    assert together[2, 3] == pytest.approx(1.0)
    assert np.abs(together[np.triu_indices(3, 1)]).max() < 0.2
    sure = replace(fit, errors={})
    for drift in (-1.0, 2.0):  # of one machine
        each = unsure_cost(sure, "2", generator, seconds=0.002, drift=drift)
        logs = np.log([each.target(4, 0, n) / cost.target(4, 0, n) for n in (1, 8)])
        assert logs == pytest.approx([drift * fit.drift("2", 0.002, requests=n) for n in (1, 8)])
    arrays = drawn[0].target.of_arrays([4, 4], 0, [1, 8])
    assert arrays.tolist() == [drawn[0].target(4, 0, 1), drawn[0].target(4, 0, 8)]
    assert {each.prefill(9) for each in drawn} == {cost.prefill(9)}
    cost = replace(cost, draft_prefill=replace(cost.draft_prefill, apart=True))
    fit = replace(sheets, costs={"2": cost}, errors={"2/draft_prefill": 0.02})
    for each in (unsure_cost(fit, "2", generator, seconds=0.002, drift=0.0) for _ in range(9)):
        factor = each.draft_prefill(100) / cost.draft_prefill(100)
        once = replace(cost, draft_prefill=cost.draft_prefill.scaled(factor))
        assert each.draft_prompt(100) == pytest.approx(once.draft_prompt(100))


def test_a_size_says_how_long_a_segment_is_and_how_many_a_stream_serves(campaign):
    units, main = campaign["units"], importlib.import_module("benchmarks.campaign.__main__")
    words = ["--device", "cpu-ranks", "--deployments", "2", "--pair", PAIR]
    [session] = main.sessions(main.parse([*words, "--replay-seconds", "18", "--requests", "2"]))
    loads = {unit.workload.name: unit.workload for unit in session.units}
    assert (loads["stream"].requests, loads["batch"].requests) == (48, 48)
    assert (loads["segment"].seconds, loads["segment"].requests) == (18.0, 1600)
    [session] = main.sessions(main.parse(words))
    assert {unit.workload for unit in session.units} == set(units.WORKLOADS)


def test_measured_streams_say_how_sure_their_order_is(campaign):
    redrawn = campaign["chosen_plan"].redrawn_correlation
    rng = np.random.default_rng(0)
    shared = rng.normal(1.0, 0.3, 24)

    def runs(*speeds: float, luck: float) -> SimpleNamespace:
        times = [pd.DataFrame({"measured_tpot": s * shared + luck * rng.normal(size=24)})
                 for s in speeds]  # fmt: skip
        plain = pd.DataFrame({"measured_tpot": np.full(6, 2.0)})
        return SimpleNamespace(runs=[SimpleNamespace(requests=t) for t in (*times, plain)])

    assert redrawn(runs(0.5, 1.0, 1.5, luck=0.0)) == pytest.approx(1.0, abs=0.02)
    assert redrawn(runs(1.0, 1.001, 1.002, luck=0.3)) < 0.9
    assert redrawn(runs(0.5, luck=0.0)) is None


def test_requests_that_are_shorter_than_their_question_ask_it_bare(campaign, tiny_models):
    requests, segment = campaign["requests"], campaign["units"].SEGMENT
    asked = pd.DataFrame(
        {"arrival": 0.0, "prompt_tokens": [1] * 40 + list(range(400, 420)), "output_tokens": 4,
         "category": ["chat"] * 40 + ["code"] * 20}
    )  # fmt: skip
    found = requests.alike(asked, tiny_models[0], segment, seed=0)
    assert found["chat"] >= 10.0 > found["code"] == 1.0  # four questions
    assert requests.alike(asked, tiny_models[0], campaign["units"].BATCH, seed=0) == {}
    assert requests.alike(asked, "not here", segment, seed=0) == {}


def test_recorded_requests_are_known_by_their_question(campaign, tiny_models):
    requests = campaign["requests"]
    prompts = [r for group in requests.recorded_prompts(tiny_models[0]) for r in group]
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
    asked = requests.recorded_questions(profile)
    amounts = len(requests.MATERIALS)
    assert amounts == len(set(requests.MATERIALS)) == 16
    for row in range(4):  # whatever is recorded last, each amount and each filler has its share
        amount, filler = zip(*requests.MATERIALS[4 * row : 4 * row + 4], strict=True)
        assert (sorted(amount), sorted(filler)) == ([16, 32, 48, 64], sorted(requests.FILLERS))
    by_question = [[p for p in prompts if asked.get(p.request_id) == q] for q in range(24)]
    assert all(len(group) == amounts for group in by_question)
    for group in by_question:
        endings = {tuple(p.prompt_ids[-8:]) for p in group}
        assert len(endings) == 1
        assert len({p.prompt_ids for p in group}) == amounts
        assert requests.LONG not in {p.category for p in group}
