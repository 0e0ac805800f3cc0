"""``codesign simulate`` as a user types it."""

from __future__ import annotations

import json
from dataclasses import replace

import pandas as pd
import pytest

from codesign.acceptance import AcceptanceProfile
from codesign.artifacts import read_table, sha256
from codesign.config import Serving
from codesign.fit import Fit
from codesign.fit.shipped import DEFAULT_FIT
from codesign.metrics import summarise
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.speculation import FAMILIES, parse_policy
from codesign.run_directory import read_run


@pytest.fixture
def cli(cli_here):
    return cli_here


@pytest.fixture
def inputs(tmp_path):
    """A trace and a fit in the folder that the command runs in."""
    cost = RoundCost(
        target=StepTime.linear(alpha=1e-6, gamma=1e-3, delta=0.02),
        draft=StepTime.linear(alpha=0.0, gamma=1e-4, delta=0.002),
        prefill=StepTime.linear(alpha=0.0, gamma=1e-3, delta=0.0),
        draft_prefill=StepTime.linear(alpha=0.0, gamma=1e-4, delta=0.0),
    )
    fit = Fit(
        target="target",
        draft="draft",
        temperature=0.0,
        costs={"2": cost, "1+1": cost},
        calibration=Calibration(),
        acceptance=AcceptanceProfile.independent([0.6, 0.2], num_tokens=500, seed=1),
        errors={},
    )
    fit.save(tmp_path / "fit.json")
    trace = pd.DataFrame({"arrival": [0.0, 0.1, 0.2], "prompt_tokens": 20, "output_tokens": 30})
    trace.to_csv(tmp_path / "trace.csv", index=False)
    return ("simulate", "--trace", "trace.csv", "--fit", "fit.json", "--deployment")


@pytest.mark.parametrize(
    ("words", "spans"),
    [
        (("2", "--policy", "plain"), ["target"]),
        (("2", "--policy", "chain-3"), ["target", "draft"]),
        (("1+1", "--policy", "async-tree-4x2x2"), ["target", "draft", "link there", "link back"]),
    ],
)
def test_only_spans_that_a_round_has_are_shown(cli, inputs, tmp_path, words, spans):
    fit = Fit.load(tmp_path / "fit.json")
    linked = {label: replace(cost, link=0.001) for label, cost in fit.costs.items()}
    replace(fit, costs=linked).save(tmp_path / "fit.json")
    shown = cli(*inputs, *words).stdout.partition("span of a round")[2].splitlines()[1:]
    assert [line.rpartition("  ")[0].strip() for line in shown] == spans


def test_json_is_one_object_and_the_run_folder_holds_the_same_figures(cli, inputs, tmp_path):
    slo = ("--slo-tpot-ms", "60", "--slo-ttft-ms", "400")
    serving = ("--prefill-chunk", "16", "--preemption")
    found = cli(*inputs, "2", "--policy", "tree-4x2x2", *slo, *serving, "--out", "run", "--json")
    assert found.returncode == 0, found.stderr
    payload = json.loads(found.stdout)
    assert payload["label"] == "tree-4x2x2 on 2, batch 4"
    assert payload["slo"]["tpot"] == pytest.approx(0.06)
    stored = read_run(tmp_path / "run")
    assert stored.origin == "simulated"
    assert stored.outputs is None
    assert [r.output_tokens for r in stored.records.requests] == [30] * 3
    assert payload["metrics"]["tpot_mean"] == summarise(stored.records).tpot_mean
    assert stored.summary["metrics"] == payload["metrics"]
    assert stored.summary["serving"] == payload["serving"]
    limit = payload["serving"].pop("max_kv_tokens")  # what this fit does not say
    assert Serving(limit, **payload["serving"]) == Serving(
        4096, 16, preemption=True, answer_tokens=30.0
    )
    _, meta = read_table(tmp_path / "run" / "rounds.parquet", kind="rounds")
    assert meta["seed"] == 0
    assert set(meta["inputs"]) == {"fit"}


def test_text_names_the_candidate_and_where_its_times_come_from(cli, inputs):
    found = cli(*inputs, "1+1", "--policy", "async-tree-4x2x1", "--max-batch", "2")
    assert found.returncode == 0, found.stderr
    assert "async-tree-4x2x1 on 1+1, batch 2; step times fitted" in found.stdout
    assert "acceptance length" in found.stdout
    assert max(map(len, found.stdout.splitlines())) <= 100


def test_without_the_flag_the_fit_is_that_of_the_folder_else_the_shipped_one(cli, inputs, tmp_path):
    words = [*inputs[:3], "--deployment", "2", "--policy", "chain-3", "--out", "run", "--json"]
    here = cli(*words)
    assert here.returncode == 0, here.stderr
    assert here.stderr.splitlines()[0] == "fit: fit.json"
    (tmp_path / "fit.json").unlink()
    shipped = cli(*words)
    assert shipped.returncode == 0, shipped.stderr
    assert "ships with the package" in shipped.stderr
    assert json.loads(shipped.stdout)["metrics"] != json.loads(here.stdout)["metrics"]
    _, meta = read_table(tmp_path / "run" / "rounds.parquet", kind="rounds")
    assert meta["inputs"]["fit"]["sha256"] == sha256(DEFAULT_FIT)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("4",), 4, "no step times for deployment 4, only for 2, 1+1"),
        (("4",), 4, "Fix: one of these with --deployment"),
        (("two",), 2, "--deployment: unknown split 'two'"),
        (("2", "--slo-ttft-ms", "nan"), 2, "--slo-ttft-ms: must be a number above 0, not 'nan'"),
        (("2", "--policy", "chain"), 4, "unknown policy 'chain'"),
        (("2", "--policy", "async-tree-4x2x1"), 4, "needs workers of its own"),
        (("2", "--max-kv-tokens", "40"), 4, "the machine holds 40"),
        (("2", "--fit", "none.json"), 4, "none.json does not exist"),
    ],
)
def test_a_wrong_input_is_one_line_and_its_exit_code(cli, inputs, arguments, code, message):
    found = cli(*inputs, *arguments)
    assert found.returncode == code, found.stderr
    assert message in found.stderr.splitlines()[-1]
    assert found.stdout == ""


def test_a_device_and_a_pair_stand_in_for_a_fit(cli, tmp_path):
    hardware = ["--device", "h100", "--gpus", "8", "--target", "llama-3-70b:int4"]
    arguments = ["--trace", "conv-twin", "--slice", "0:2", "--max-kv-tokens", "100000", "--json"]
    what_if = [*hardware, "--draft", "llama-3.2-3b:int8", "--acceptance", "0.7"]  # never measured
    beyond = cli(
        "simulate", *arguments, *hardware, "--draft", "qwen2-1.5b:int4", "--deployment", "9"
    )
    assert beyond.returncode == 4
    assert "no engine runs this pair, whose vocabularies are 128,256 and 151,936" in beyond.stderr
    assert "not as 9. Fix: one of these with --deployment, or --gpus N" in beyond.stderr
    split = ["--deployment", "6+2", "--policy", "async-tree-8x4x4"]
    result = cli("simulate", *arguments, *what_if, *split)
    assert result.returncode == 0, result.stderr
    assert "8 x h100, roofline (data sheets, not measured)" in result.stderr
    assert "vocabular" not in result.stderr
    printed = json.loads(result.stdout)
    assert printed["data"] == "roofline"
    assert 0.002 < printed["metrics"]["tpot_mean"] < 0.05
    measured = cli("simulate", *arguments, *hardware, "--draft", "llama-3.2-3b:int4", *split)
    assert "8 x h100, measured on up to 4 GPUs, other groups extrapolated by" in measured.stderr
    again = json.loads(measured.stdout)
    assert again["data"] == "extrapolated"
    assert again["metrics"]["tpot_mean"] < printed["metrics"]["tpot_mean"]


def test_a_data_sheet_that_was_edited_leaves_the_fit_of_earlier_plans_as_it_was(
    cli, tmp_path, monkeypatch
):
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path / "home"))
    sheet = {
        "gpu": "X", "memory_bytes": 80e9, "memory_bandwidth": 2e12, "bf16_flops": 5e14,
        "link": "nvlink", "link_bandwidth": 3e11, "source": "",
    }  # fmt: skip
    words = ["--device", "x.json", "--gpus", "1", "--target", "smollm2-135m"]
    words += ["--draft", "smollm2-135m", "--trace", "conv-twin", "--slice", "0:2"]
    kept = []
    for bandwidth in (2e12, 3e12, 2e12):
        (tmp_path / "x.json").write_text(json.dumps(sheet | {"memory_bandwidth": bandwidth}))
        found = cli("simulate", *words, "--deployment", "1")
        assert found.returncode == 0, found.stderr
        kept.append({p: p.read_bytes() for p in (tmp_path / "home" / "rooflines").iterdir()})
    assert [len(files) for files in kept] == [2, 4, 4]  # a fit is two files
    assert kept[0].items() <= kept[1].items() == kept[2].items()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "h100"], "--device needs --gpus"),
        (["--gpus", "8"], "--gpus needs --device"),
        (["--device", "h100", "--fit", "fit.json"], "give --device or --fit, not both"),
        (["--device", "h100", "--gpus", "0"], "--gpus: must be a whole number of 1 or above"),
        (["--acceptance", "nan"], "--acceptance: must be a number from 0.01 to 0.99, not 'nan'"),
    ],
)
def test_half_a_device_or_two_sources_of_step_times_are_refused(cli, arguments, message):
    result = cli("simulate", "--trace", "conv-twin", *arguments)
    assert result.returncode == 2
    assert message in result.stderr


def test_list_policies_names_every_family_its_source_and_where_it_runs(cli):
    found = cli("simulate", "--list-policies", "--json")
    assert found.returncode == 0, found.stderr
    policies = json.loads(found.stdout)["policies"]
    assert len(policies) == len(FAMILIES) == 18
    for policy in policies:
        assert parse_policy(policy["example"]).label == policy["example"]
        assert policy["summary"]
    simulated = {p["pattern"] for p in policies if p["runs_in"] == ["simulator"]}
    assert simulated == {"eagle-RxWxE[@X]", "async-eagle-RxWxE[@X]"}
    text = cli("simulate", "--list-policies").stdout
    for policy in policies:
        assert policy["pattern"] in text
    assert "simulator only; EAGLE-2, arXiv:2406.16858" in text
    assert max(map(len, text.splitlines())) <= 100


def test_simulate_without_a_trace_or_a_list_is_a_usage_error_in_one_line(cli):
    found = cli("simulate", "--policy", "plain")
    assert found.returncode == 2
    assert "--trace" in found.stderr
    assert len(found.stderr.splitlines()) == 1


@pytest.mark.parametrize("label", [f.example for f in FAMILIES])
def test_every_policy_is_simulated_from_the_command_line(cli, inputs, label):
    deployment = "1+1" if parse_policy(label).is_async else "2"
    found = cli(*inputs, deployment, "--policy", label, "--slo-tpot-ms", "60", "--json")
    assert found.returncode == 0, found.stderr
    metrics = json.loads(found.stdout)["metrics"]
    assert metrics["num_finished"] == 3
    assert metrics["acceptance_length"] >= 1.0
