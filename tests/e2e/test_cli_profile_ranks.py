"""A plan for GPUs from nothing but measurements, as typed, over gloo: profile, fit, plan, run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import codesign
from codesign.artifacts import header, read_json, read_table, write_table
from codesign.errors import HardwareError, InputError, UsageError
from codesign.fit import STEP_COLUMNS, Fit
from codesign.fit.drift import VISIT
from codesign.fit.round_costs import COUNTED, FORWARDS, KEPT, NODES
from codesign.fit.served_rounds import JOINED, SETTLED

BETWEEN = ("loop", "pace", "round", "deciding")  # of rounds that are served
pytestmark = pytest.mark.timeout(1200)  # where others keep the machine busy
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(codesign.__file__).parents[1]),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def codesign_(
    folder: Path,
    *words: object,
    command: Sequence[str] = (sys.executable, "-m", "codesign"),
    python_path: str = "",
) -> subprocess.CompletedProcess:
    environment = {**ENVIRONMENT}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [python_path, ENVIRONMENT["PYTHONPATH"]])
    )
    return subprocess.run(
        [*command, *map(str, words)], cwd=folder, env=environment,
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip


POSITIONS = 1024  # of the models: two contexts to time, not four


@pytest.fixture(scope="module")
def short_models(tiny_models, tmp_path_factory) -> list[Path]:
    """The tiny pair with fewer positions."""
    folder = tmp_path_factory.mktemp("short")
    for source in tiny_models:
        shutil.copytree(source, folder / source.name)
        config = json.loads((source / "config.json").read_text())
        config["max_position_embeddings"] = POSITIONS
        (folder / source.name / "config.json").write_text(json.dumps(config))
    return [folder / source.name for source in tiny_models]


@pytest.fixture(scope="module")
def chain(short_models, tmp_path_factory, brief_codesign) -> tuple[Path, dict]:
    """A profile of the tiny pair, alone and split, and what was printed; no simulator is there."""
    folder = tmp_path_factory.mktemp("chain")
    (folder / "blocked").mkdir()
    for name in ("simpy", "streamlit", "scipy", "ray"):
        (folder / "blocked" / f"{name}.py").write_text("raise ImportError('not on this machine')")
    target, draft = short_models
    done = codesign_(
        folder, "profile", "--device", "cpu-ranks", "--deployments", "1,1+1", "--target", target,
        "--draft", draft, "--quick", "--out", "profile", "--json",
        command=brief_codesign, python_path=str(folder / "blocked"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_a_profile_of_ranks_holds_every_step_of_every_deployment(chain):
    folder, printed = chain
    steps = read_table(folder / "profile" / "steps.parquet", kind="profile")[0]
    assert tuple(steps.columns) == (*STEP_COLUMNS, *COUNTED, VISIT)
    assert steps.groupby(["deployment", "op"])[VISIT].nunique().eq(2).all()  # of starts
    assert set(steps.loc[steps[NODES].notna(), "op"]) == {"reroot", "grown", "draft", "wide"}
    found = {tuple(row) for row in steps[["deployment", "op", "beside"]].drop_duplicates().values}
    wanted = {("1", op, False) for op in (*FORWARDS, "reroot", "choice")}
    wanted |= {("1+1", "target", False), ("1+1", "target", True), ("1+1", "prefill", False)}
    wanted |= {("1+1", op, True) for op in ("draft", "draft_prefill", "choice")}
    wanted |= {("1+1", op, False) for op in ("draft", "reroot", "link")}
    wanted |= {(split, op, False) for split in ("1", "1+1") for op in (*BETWEEN, JOINED, SETTLED)}
    wanted |= {("1", "drafted", False), ("1+1", "drafted", True), ("1", "grown", False)}
    wanted |= {("1+1", "missed", False), ("1", "ahead", False)}
    wanted |= {("1", "wide", False), ("1+1", "wide", True)}
    assert found == wanted
    kept = steps.loc[steps["op"] == "reroot", list(KEPT)]
    assert kept.notna().all(axis=None)
    assert set(steps.loc[steps[KEPT[0]].notna(), "op"]) == {"reroot"}
    # Of a host that looks late no re-root and no link is left, which a busy machine does to some.
    late = steps["op"].isin(["reroot", "link"])
    hidden = steps["op"] == "missed"  # what the target waits for: nothing if its step takes longer
    assert steps.loc[~late & ~hidden, "seconds"].gt(0).all()
    assert steps.loc[late | hidden, "seconds"].ge(0).all()
    assert steps.loc[late].groupby(["deployment", "op"])["seconds"].median().gt(0).all()
    rows = set(steps.loc[steps["op"] == "target", "rows"])
    assert {8, 9, 16, 17, 32, 33, 64, 65, 128} <= rows  # both sides of every bucket
    about = read_json(folder / "profile" / "profile.json", kind="profile")
    assert about["device"] == printed["device"] == "cpu-ranks"
    assert about["settings"]["deployments"] == ["1", "1+1"]
    assert about["hardware"]["cores"] > 0
    assert not (folder / "profile" / "parts").exists()


def test_acceptance_is_recorded_on_the_ranks_as_on_threads(
    chain, short_models, brief_tokens, monkeypatch
):
    """Both engines decode the same tokens, and drafts rank them alike."""
    from codesign.engine.model import load_decoder
    from codesign.policy.walk import Sampling
    from codesign.profiler import recorder
    from codesign.profiler.recorder import record_acceptance, recorded_requests

    monkeypatch.setattr(recorder, "QUICK_TOKENS", {1: brief_tokens})
    recorded = read_table(chain[0] / "profile" / "acceptance.parquet", kind="profile")[0]
    requests, _ = recorded_requests(short_models[0], POSITIONS, is_quick=True)
    target, draft = map(load_decoder, short_models)
    few = record_acceptance(
        requests[:3], target=target, draft=draft, sampling=Sampling(), num_workers=1
    )
    same = recorded.loc[recorded["request"].isin(few["request"])].reset_index(drop=True)
    assert (same["rank"] == few["rank"]).mean() > 0.98
    assert recorded.groupby("request").size().eq(brief_tokens).all()


def test_profile_fit_plan_run_and_validate_follow_each_other(chain, cli_here):
    import pandas as pd

    folder, _ = chain
    done = cli_here("fit", "profile", "--out", "fit.json", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    fit = Fit.load(folder / "fit.json")
    assert list(fit.costs) == ["1", "1+1"]
    assert fit.costs["1+1"].link > 0
    assert all(cost.kv_tokens is None for cost in fit.costs.values())  # not known of a CPU
    trace = pd.DataFrame(
        {
            "arrival": [0.0, 0.1, 0.4, 0.9],
            "prompt_tokens": [20, 9, 31, 14],
            "output_tokens": [16, 24, 12, 20],
            "category": ["chat"] * 4,
        }
    )
    write_table(folder / "trace.parquet", trace, header("trace", seed=0))
    done = cli_here(
        "plan", "--trace", "trace.parquet", "--fit", "fit.json", "--workers", "2",
        "--policies", "plain,tree-4x2x2,async-tree-4x2x2", "--max-batch", "2",
        "--out", "plan.json", "--json", folder=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["target"] == fit.target
    labels = [p["candidate"]["label"] for p in (plan["chosen"], *plan["alternatives"])]
    (split,) = [x for x in labels if x.startswith("async-tree") and x.endswith("batch 2")][:1]
    done = codesign_(
        folder, "run", "--plan", "plan.json", "--candidate", split, "--device", "cpu-ranks",
        "--out", "runs", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    assert run["metrics"]["num_finished"] == 4
    # Steps take a millisecond here, and neighbours' load is in them: the unit is what is checked.
    words = ("--tolerance", "900", "--report", "report.html", "--json")
    words = ("--plan", "plan.json", "--run", run["directory"], *words)
    done = cli_here("validate", *words, folder=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "report.html").stat().st_size > 1000


def test_too_few_gpus_end_the_process_in_one_line(tmp_path, tiny_models):
    """At once, so in a process of its own."""
    pair = ("--target", tiny_models[0], "--draft", tiny_models[1])
    words = (*pair, "--device", "cuda", "--workers", "64", "--out", "no")
    done = codesign_(tmp_path, "profile", *words)
    assert done.returncode == HardwareError.exit_code, done.stderr
    assert "needs 64 GPUs, found" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (("--deployments", "1+1"), UsageError, "add --device cuda"),
        (("--device", "cpu-ranks", "--deployments", "2x1"), UsageError, "2x1 has replicas"),
        (("--device", "cpu-ranks", "--deployments", "one"), InputError, "unknown split 'one'"),
        (("--device", "cpu-ranks", "--deployments", "9+9"), HardwareError, "starts 16 at most"),
        (
            ("--device", "cpu-ranks", "--deployments", "1", "--workers", "1"),
            UsageError,
            "not both",
        ),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(
    cli_here, tmp_path, tiny_models, words, error, says
):
    target, draft = tiny_models
    pair = ("--target", target, "--draft", draft)
    done = cli_here("profile", *pair, *words, "--out", "no")
    assert done.returncode == error.exit_code, done.stderr
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "no").exists()
