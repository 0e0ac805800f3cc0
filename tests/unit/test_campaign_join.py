"""Predictions and runs of the validation campaign, joined."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from benchmarks.campaign import (
    chosen_plan,
    join,
    phases,
    report,
    schedule,
    served_rounds,
    true_steps,
    units,
)
from benchmarks.campaign import requests as campaign_requests
from codesign.acceptance import AcceptanceProfile
from codesign.artifacts import header, write_table
from codesign.candidate import Candidate
from codesign.config import Serving, parse_deployment
from codesign.fit import STEP_COLUMNS, Fit, fit_profile
from codesign.fit.round_costs import FORWARDS
from codesign.policy.labels import parse_policy
from codesign.profiler.store import ACCEPTANCE_PART, PartStore, ProfileSettings
from codesign.run_directory import read_run, write_run
from codesign.sim import simulate

PAIR = "smollm2-135m+smollm2-135m-draft"
SHAPES = [(1, 1), (1, 4), (1, 8), (1, 9), (1, 16), (2, 8), (4, 8), (8, 4)]


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
def folder(machine_fit, tmp_path_factory) -> Path:
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
    fit = fit_profile(join.closed_profile(out / PAIR))
    size = units.Size((4, 8), (2,), (), 1, 0.5)
    for work in [u for label in ("2", "1+1") for u in units.grid(label, size)]:
        load = replace(work.workload, seconds=6.0) if work.workload.seconds else work.workload
        requests = campaign_requests.load_requests(
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


def test_every_session_of_a_grid_is_resumed_where_it_stopped(folder):
    session = schedule.Session
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


def test_what_is_known_of_a_request_is_played_by_that_request(folder, machine_fit):
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
        first = recordings[number].ranks[: units.STREAM.output_tokens]
        assert recording.ranks.tolist() == first.tolist(), "the batch's answers are longer"
    assert list(replayed.acceptance.recordings) == list(known.acceptance.recordings)
    assert join.fit_to_these(folder / PAIR, units.SEGMENT, machine_fit) is None


def test_requests_are_made_to_take_the_rounds_that_they_took(machine_fit):
    requests = pd.DataFrame(
        {
            "arrival": [0.0, 0.1, 0.2, 0.3],
            "prompt_tokens": 40,
            "output_tokens": 40,
            "category": "chat",
        }
    )
    candidate = Candidate(parse_deployment("1+1"), parse_policy("async-tree-4x2x2"), 2)

    def rounds_of(requests: pd.DataFrame) -> np.ndarray:
        found = simulate(requests, candidate, machine_fit, serving=Serving(4096), seed=5)
        return found.request_table()["num_rounds"].to_numpy()

    usual = rounds_of(requests)
    wanted = usual + np.array([-3, 0, 2, 1])
    served = served_rounds.with_rounds(requests, wanted, rounds_of)
    assert rounds_of(served).tolist() == wanted.tolist()
    assert served["output_tokens"][1] == 40
    assert served["output_tokens"][0] < 40 < served["output_tokens"][2]


def test_answers_that_are_other_ones_than_those_recorded_are_counted():
    recorded = {0: [1, 2, 3], 1: [4, 5, 6], 3: [7]}
    assert served_rounds.num_other({0: [1, 2, 3], 1: [4, 9, 6], 2: [8]}, recorded) == (1, 2)


def test_true_steps_are_found_in_the_rounds_whatever_the_fit_says(folder):
    fit = fit_profile(join.closed_profile(folder / PAIR))
    judged = set()
    for path in sorted(folder.glob(f"{PAIR}/runs/*/*")):
        if not path.is_dir():
            continue
        policy, _, label = path.name.partition("_on_")
        cost, is_plain = fit.costs[label.partition("_")[0]], policy == "plain"
        names = ["target", "prefill", *["draft"] * (not is_plain and "+" not in label)]
        wrong = replace(cost, **{name: getattr(cost, name).scaled(0.5) for name in names})
        wrong = replace(wrong, reroot_any=1e-3, reroot_tree=1e-3, reroot_kept=1e-3)
        records = read_run(path).records
        found = true_steps.true_cost(wrong, records, has_draft=not is_plain)
        for name in names:
            wanted = getattr(cost, name)(12, 300)
            assert getattr(found, name)(12, 300) == pytest.approx(wanted, rel=0.03), (path, name)
            judged.add(name)
        if not is_plain:
            assert found.reroots(2) == pytest.approx(cost.reroots(2), rel=0.01)
            assert found.keeping(3.0, 9.0) == 0.0, "what was kept is in the rounds' own mean"
            assert found.link == pytest.approx(cost.link, rel=0.05)
    assert judged == {"target", "prefill", "draft"}


def test_runs_that_do_as_predicted_are_found_to(folder, tmp_path):
    file = tmp_path / "result.json"
    join.write_result(folder, file)
    (pair,) = json.loads(file.read_text())["pairs"]
    assert (pair["pair"], pair["requests_seed"]) == (PAIR, 0)
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
    campaigns = report.read([file])
    text = report.document(campaigns) + report.run_document(campaigns)
    assert f"| {PAIR}, " in text
    for goal in ("decode speed, one stream", "regret", "rank correlation", "80 % intervals"):
        assert goal in text
    paces = phases.compare(folder / PAIR)
    assert len(paces) > 1
    assert all(row[2:4] == ["0%", "0%"] for row in paces), "steps are the fit's throughout"


def test_measured_streams_say_how_sure_their_order_is():
    redrawn = chosen_plan.redrawn_correlation
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
