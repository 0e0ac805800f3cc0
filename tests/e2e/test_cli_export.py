from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess

import pytest

from codesign.candidate import Candidate, Interval, ScoredCandidate
from codesign.config import SLO, Serving, parse_deployment
from codesign.policy.speculation import parse_policy


@pytest.fixture
def cli(cli_here):
    return cli_here


def scored(policy, split):
    candidate = Candidate(parse_deployment(split), parse_policy(policy), 16)
    names = ("mean_batch", "tpot_mean", "goodput", "acceptance_length")
    figures = {name: Interval(0.02, 0.01, 0.03) for name in names}
    return ScoredCandidate(candidate, figures, {}, "roofline", is_feasible=True)


@pytest.fixture
def export(cli, gpu_plan, tmp_path):
    """``codesign export`` of a plan with four candidates, in its folder."""
    policies = {"async-tree-8x4x2": "6+2", "specserve-5": "8", "eagle-8x4x3@1": "8",
                "chain-3": "2x4"}  # fmt: skip
    candidates = [scored(policy, split) for policy, split in policies.items()]
    requests = {"prompts": [90, 200], "outputs": [20, 10]}
    gpu_plan(tmp_path, *candidates, **requests, num_seeds=2).save(tmp_path / "plan.json")

    def run(*arguments):
        return cli("export", "--plan", "plan.json", *arguments)

    return run


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm", "vllm serve meta-llama/Llama-3.1-70B-Instruct"),
        ("sglang", "--speculative-eagle-topk 4"),
        ("trtllm", "trtllm-serve meta-llama/Llama-3.1-70B-Instruct"),
    ],
)
def test_the_text_has_the_command_the_losses_and_the_prediction(export, engine, words):
    result = export("--to", engine)
    assert result.returncode == 0, result.stderr
    assert words in result.stdout
    heads = {line.split()[0] for line in result.stdout.splitlines() if line.strip()}
    assert {"plan", "engine", "predicted", "lost", "note"} <= heads
    assert "2 workers of its own" in result.stdout
    assert "slower than" in result.stdout or "faster than" in result.stdout


@pytest.mark.parametrize(("scheduling", "is_as_planned"), [("fcfs", True), ("slo", False)])
def test_only_equal_figures_are_called_as_planned(
    cli, gpu_plan, tmp_path, scheduling, is_as_planned
):
    plan = gpu_plan(
        tmp_path, scored("chain-3", "8"), prompts=[90, 200], outputs=[20, 10],
        serving=Serving(scheduling=scheduling), slo=SLO(ttft=0.05, tpot=0.05),
    )  # fmt: skip
    plan.save(tmp_path / "plan.json")
    result = cli("export", "--plan", "plan.json", "--to", "vllm")
    assert result.returncode == 0, result.stderr
    assert ("as planned: mean TPOT" in result.stdout) == is_as_planned
    assert (" against " in result.stdout) == (not is_as_planned)


def test_json_is_one_object_with_all_of_it(export):
    result = export("--to", "vllm", "--json", "--candidate", "specserve")
    assert result.returncode == 0, result.stderr
    payload = json.loads(result.stdout)
    assert payload["candidate"] == "specserve-5 on 8, batch 16"
    assert payload["engine"] == "vllm"
    assert payload["num_gpus"] == 8
    assert payload["checked_against"]["sources"]
    config = payload["arguments"]["speculative_config"]
    assert config["num_speculative_tokens_per_batch_size"][-1][1] == 16
    assert json.loads(payload["commands"][0]["argv"][-1]) == config
    assert {"what", "instead"} == set(payload["cannot_express"][0])
    assert payload["prediction"]["num_seeds"] == 2
    assert payload["prediction"]["exported"]["tpot_mean"]["value"] > 0


def test_out_that_is_a_file_asks_for_another_folder(export, tmp_path):
    (tmp_path / "made").write_text("mine")
    result = export("--to", "trtllm", "--out", "made", "--candidate", "chain-3")
    assert (result.returncode, result.stdout) == (4, "")
    assert result.stderr.endswith(
        "cannot write into made: File exists. Name another: --out FOLDER\n"
    )


def test_out_writes_a_script_that_a_shell_reads_and_the_files_it_names(export, tmp_path):
    result = export("--to", "trtllm", "--out", "made", "--json")
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "made"
    assert {p.name for p in folder.iterdir()} == {"serve.sh", "export.json", "trtllm.yaml"}
    assert json.loads((folder / "export.json").read_text()) == json.loads(result.stdout)
    script = (folder / "serve.sh").read_text()
    assert "--config trtllm.yaml" in script
    assert subprocess.run(["sh", "-n", folder / "serve.sh"], check=False).returncode == 0
    served = tmp_path / "bin" / "trtllm-serve"
    served.parent.mkdir()
    served.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    served.chmod(0o755)
    ran = subprocess.run(
        ["sh", "serve.sh"],
        cwd=folder,
        env={**os.environ, "PATH": f"{served.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.splitlines() == json.loads(result.stdout)["commands"][0]["argv"][1:]


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("before_it_is_noted", ["", "sleep 1\n"])
def test_servers_that_a_script_starts_end_with_it(export, tmp_path, before_it_is_noted, stop):
    result = export("--to", "trtllm", "--out", ".", "--candidate", "chain-3")
    assert result.returncode == 0, result.stderr
    script_text = (tmp_path / "serve.sh").read_text()
    slow_text = script_text.replace("pids=", f"{before_it_is_noted}pids=")
    (tmp_path / "serve.sh").write_text(slow_text)
    served = tmp_path / "bin" / "trtllm-serve"
    served.parent.mkdir()
    served.write_text("#!/bin/sh\necho serving\nexec sleep 600\n")
    served.chmod(0o755)
    path = f"{served.parent}:{os.environ['PATH']}"
    with subprocess.Popen(
        ["sh", "serve.sh"], cwd=tmp_path, env={**os.environ, "PATH": path}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    ) as script:  # fmt: skip
        try:
            assert [script.stdout.readline() for _ in range(2)] == ["serving\n"] * 2
            script.send_signal(stop)
            rest, _ = script.communicate(timeout=60)  # comes to an end when the last has gone
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)  # what it should have ended
        assert (rest, script.returncode) == ("", 130)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "--to"),
        (("--to", "llama.cpp"), 2, "invalid choice"),
        (("--to", "vllm", "--tensor-parallel", "0"), 2, "1 or above"),
        (("--to", "vllm", "--target-model", ""), 2, "--target-model: must be a name or a folder"),
        (("--to", "vllm", "--candidate", "chain-9"), 4, "no candidate 'chain-9'"),
        (("--to", "vllm", "--candidate", "eagle"), 4, "--head NAME"),
        (("--to", "vllm", "--tensor-parallel", "16"), 4, "more than the plan has"),
    ],
)
def test_nonsense_is_one_line_on_stderr_and_an_exit_code(export, arguments, code, words):
    result = export(*arguments)
    assert result.returncode == code
    assert result.stdout == ""
    assert words in result.stderr.splitlines()[-1]
    assert result.stderr.splitlines()[-1].startswith("codesign export: ")


def test_a_plan_whose_fit_is_gone_or_changed_is_refused(export, tmp_path):
    (tmp_path / "fit.json").write_text("{}")
    result = export("--to", "vllm")
    assert result.returncode == 4
    assert "has changed since the plan was made" in result.stderr
