"""``codesign run`` on rank groups as typed, over gloo: processes of its own, and under torchrun."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import codesign
from codesign.artifacts import header, write_table
from codesign.candidate import Candidate, ScoredCandidate
from codesign.config import SLO, Deployment, Serving
from codesign.engine.replay import Replay
from codesign.errors import HardwareError, InputError, UsageError
from codesign.file_ref import FileRef
from codesign.plan import Plan
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling
from codesign.run_directory import read_run

CANDIDATES = ("plain on 1", "plain on 2", "tree-4x2x2 on 2", "async-tree-4x2x2 on 1+1")
NUM_REQUESTS = 4
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(codesign.__file__).parents[1]),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def scored(label: str) -> ScoredCandidate:
    policy, _, split = label.partition(" on ")
    target, _, draft = split.partition("+")
    deployment = Deployment(int(target), int(draft or 0))
    return ScoredCandidate(Candidate(deployment, parse_policy(policy), 2), {}, {}, "fitted", True)


@pytest.fixture(scope="module")
def planned(machine_fit, tiny_models, tmp_path_factory) -> Path:
    """A folder with a plan for the tiny pair that holds every way to split two ranks."""
    import pandas as pd

    folder = tmp_path_factory.mktemp("ranks")
    target, draft = map(str, tiny_models)
    dataclasses.replace(machine_fit, target=target, draft=draft).save(folder / "fit.json")
    trace = pd.DataFrame(
        {
            "arrival": [0.0] * NUM_REQUESTS,
            "prompt_tokens": [20, 9, 31, 14],
            "output_tokens": [16, 24, 12, 20],
            "category": ["chat"] * NUM_REQUESTS,
        }
    )
    write_table(folder / "trace.parquet", trace, header("trace", seed=0))
    chosen, *others = map(scored, CANDIDATES)
    plan = Plan(
        target=target, draft=draft, slo=SLO(), objective="latency", sampling=Sampling(),
        serving=Serving(max_kv_tokens=2048), trace=FileRef.of(folder / "trace.parquet"),
        num_requests=NUM_REQUESTS, fit=FileRef.of(folder / "fit.json"), seed=0, num_seeds=1,
        chosen=chosen, alternatives=tuple(others),
    )  # fmt: skip
    plan.save(folder / "plan.json")
    return folder


def run(
    folder: Path, *words: str, launcher: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess:
    python = [sys.executable, *launcher, "-m", "codesign", "run", "--plan", "plan.json", *words]
    return subprocess.run(
        python, cwd=folder, env=ENVIRONMENT | environment, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip


def wanted(*labels: str) -> list[str]:
    return [word for label in labels for word in ("--candidate", f"{label}, batch 2")]


def torchrun(processes: int) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))


def test_a_plan_runs_on_rank_groups_and_no_token_differs(planned):
    """And needs no simulator and no app."""
    (planned / "blocked").mkdir()
    for name in ("simpy", "streamlit", "ray"):
        (planned / "blocked" / f"{name}.py").write_text("raise ImportError('not on this machine')")
    path = f"{planned / 'blocked'}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"
    words = ("--device", "cpu-ranks", "--padded-rows", "32", "--out", "here", "--json", "--quiet")
    done = run(planned, *wanted(*CANDIDATES), *words, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["differing_requests"] == []
    assert [r["label"].partition(",")[0] for r in printed["runs"]] == list(CANDIDATES)
    for found in printed["runs"]:
        stored = read_run(planned / found["directory"])
        assert stored.origin == "measured"
        assert stored.records.notes == []
        assert [len(stored.outputs[i]) for i in range(NUM_REQUESTS)] == [16, 24, 12, 20]
        speculates = not found["label"].startswith("plain")
        assert (found["metrics"]["acceptance_length"] > 1.0) == speculates


def test_policies_expect_the_answers_that_the_plan_names(planned):
    plan, serving = Plan.load(planned / "plan.json"), Serving(1000, answer_tokens=7.5)
    plan = dataclasses.replace(plan, serving=serving)
    setup, _ = Replay(plan, planned / "plan.json").policy(scored("tree-4x2x2 on 2").candidate)
    assert setup.answer_tokens == 7.5


def test_both_engines_share_steps_and_memory_as_the_plan_says(planned, cli_here):
    """And refuse the request that does not fit, while they serve the others."""
    plan = Plan.load(planned / "plan.json")
    replay = Replay(plan, planned / "plan.json")
    longest = sum(sorted(len(request.prompt_ids) for request in replay.requests)[-2:])
    serving = Serving(
        max_kv_tokens=longest + 8, prefill_chunk=8, prefix_cache=True, preemption=True
    )
    requests = plan.requests()
    requests.loc[3, "output_tokens"] = longest
    write_table(planned / "mixed.parquet", requests, header("trace", seed=0))
    trace = FileRef.of(planned / "mixed.parquet")
    dataclasses.replace(plan, serving=serving, trace=trace).save(planned / "shared.json")
    outputs = []
    for device in ("cpu", "cpu-ranks"):
        words = (*wanted("plain on 1"), "--device", device, "--out", f"shared-{device}", "--quiet")
        done = cli_here("run", "--plan", "shared.json", *words, "--json", folder=planned)
        assert done.stdout, done.stderr
        assert done.returncode == InputError.exit_code
        (found,) = json.loads(done.stdout)["runs"]
        assert list(found["refused"]) == ["3"]
        assert f"KV tokens, the limit is {longest + 8}" in found["refused"]["3"]
        stored = read_run(planned / found["directory"])
        assert stored.records.rounds.column("prefill_tokens").max() == 8
        assert any(request.num_preemptions for request in stored.records.requests)
        outputs.append(stored.outputs)
    assert outputs[0] == outputs[1]
    assert [len(outputs[0][number]) for number in range(4)] == [16, 24, 12, 0]


def test_torchrun_starts_the_same_run(planned):
    """The first process leads, whatever the split; a process too many stays idle."""
    labels = ("plain on 1", "tree-4x2x2 on 2", "async-tree-4x2x2 on 1+1")
    words = ("--device", "cpu-ranks", "--padded-rows", "32", "--out", "torchrun", "--json")
    done = run(planned, *wanted(*labels), *words, "--quiet", launcher=torchrun(2))
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["differing_requests"] == []
    assert len(printed["runs"]) == len(labels)
    assert all(r["metrics"]["num_finished"] == NUM_REQUESTS for r in printed["runs"])


def test_two_nodes_meet_through_torchrun(planned, start_process, free_port):
    labels = ("tree-4x2x2 on 2", "async-tree-4x2x2 on 1+1")
    words = ("--device", "cpu-ranks", "--padded-rows", "32", "--out", "nodes", "--json", "--quiet")
    nodes = []
    for node in range(2):
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank",
            str(node), "--nproc-per-node", "1", "--master-addr", "127.0.0.1",
            "--master-port", str(free_port), "-m", "codesign", "run", "--plan", "plan.json",
            *wanted(*labels), *words,
        ]  # fmt: skip
        nodes.append(start_process(command, cwd=planned, env=ENVIRONMENT))
    printed = [node.communicate(timeout=200) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], printed
    assert printed[1][0] == ""
    assert json.loads(printed[0][0])["differing_requests"] == []


@pytest.fixture
def start(planned, start_process) -> Callable[..., subprocess.Popen[str]]:
    """``start(label, *words)``: a long run that is not yet ready to serve."""

    def start(label: str, *words: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        (planned / "talk.py").write_text(
            "import sys\nfrom codesign.cli import main, output\noutput._PIPE_INTERVAL = 0.2\n"
            "sys.exit(main())\n"
        )
        long_plan(planned)
        command = ["talk.py", "run", "--plan", "long.json", *wanted(label), "--device", "cpu-ranks"]
        command = [sys.executable, *launcher, *command, *words]
        return start_process(command, cwd=planned, env=ENVIRONMENT)

    return start


@pytest.fixture
def begin(start) -> Callable[..., subprocess.Popen[str]]:
    """The same, when it has begun to serve; it goes on for long."""

    def begin(*words: str, **options) -> subprocess.Popen[str]:
        running = start(*words, **options)
        said = ""
        while not re.search(r"\b[0-3] of 4", said):
            line = running.stderr.readline()
            assert line, said
            said += line
        return running

    return begin


def test_a_process_that_torchrun_loses_ends_the_run_with_what_is_done(planned, begin):
    """The first process writes what is finished before torchrun ends it."""
    running = begin("plain on 2", "--out", "lost", "--json", launcher=torchrun(2))
    os.kill(second_process(running.pid), signal.SIGKILL)
    printed, errors = running.communicate(timeout=200)
    assert running.returncode != 0
    assert (planned / "lost").exists(), errors
    (directory,) = (planned / "lost").iterdir()
    stored = read_run(directory)
    (note,) = stored.records.notes
    num_finished = sum(request.finish is not None for request in stored.records.requests)
    assert f": {NUM_REQUESTS - num_finished} of {NUM_REQUESTS} requests unfinished" in note, errors
    assert "lost" in note or "target ranks cannot be reached" in note
    assert json.loads(printed)["runs"][0]["notes"] == [note]


def test_ranks_end_when_their_run_is_killed_and_leave_no_memory(begin):
    """A draft rank waits for verdicts in shared memory, where nobody tells it."""
    running = begin("async-tree-4x2x2 on 1+1", "--out", "killed")
    mailboxes: list[str] = []
    deadline = time.monotonic() + 60  # the leader may serve before the draft has opened them
    while not mailboxes and time.monotonic() < deadline:
        time.sleep(0.01)
        opened = Path(f"/proc/{rank_of(running)}/maps").read_text()
        mailboxes = re.findall(r"/\S*/codesign-\w+(?=/verdicts)", opened)
    assert Path(mailboxes[0]).exists()
    kill_with_ranks(running)
    assert not Path(mailboxes[0]).exists()


def test_ranks_that_still_load_end_when_their_run_is_killed(start):
    running = start("async-tree-4x2x2 on 1+1", "--out", "killed")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not rank_of(running):
        time.sleep(0.01)
    kill_with_ranks(running)


def rank_of(running: subprocess.Popen[str]) -> int:
    """Process number of the only rank that a run has started; 0 while there is none."""
    found = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    for number in found:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # others come and go
            if b"codesign.engine.gpu.rank_process" in Path(f"/proc/{number}/cmdline").read_bytes():
                return int(number)
    return 0


def kill_with_ranks(running: subprocess.Popen[str]) -> None:
    rank = rank_of(running)
    assert rank
    running.kill()
    try:
        running.communicate(timeout=60)  # comes to an end when the rank has gone, too
    except subprocess.TimeoutExpired:
        os.kill(rank, signal.SIGKILL)
        raise


def long_plan(folder: Path) -> None:
    """The plan with outputs so long that no request is over before a process is killed."""
    from codesign.artifacts import read_table

    frame, _ = read_table(folder / "trace.parquet", kind="trace")
    frame["output_tokens"] = 3000
    write_table(folder / "long.parquet", frame, header("trace", seed=0))
    plan, trace = Plan.load(folder / "plan.json"), FileRef.of(folder / "long.parquet")
    serving = Serving(max_kv_tokens=1 << 14)
    dataclasses.replace(plan, trace=trace, serving=serving).save(folder / "long.json")


def second_process(agent: int) -> int:
    """Process number of torchrun's second process."""
    for found in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        if b"RANK=1" in Path(f"/proc/{found}/environ").read_bytes().split(b"\0"):
            return int(found)
    raise AssertionError("torchrun started no second process")


def test_too_few_processes_of_torchrun_are_refused_in_one_line(planned):
    words = (*wanted("tree-4x2x2 on 2"), "--device", "cpu-ranks", "--out", "no")
    done = run(planned, *words, launcher=torchrun(1))
    assert done.returncode == 1  # torchrun's own
    assert done.stderr.count("needs 2 ranks, torchrun started") == 1
    assert not (planned / "no").exists()


# What torchrun tells a process that it starts alone.
OF_TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "a", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "environment", "error", "says"),
    [
        (("--device", "cuda"), {}, HardwareError, "needs 2 GPUs on this machine, found 0"),
        ((), OF_TORCHRUN, UsageError, "torchrun needs --device cuda"),
    ],
    ids=["too few GPUs", "torchrun without ranks"],
)
def test_what_cannot_run_is_said_in_one_line(planned, cli_here, words, environment, error, says):
    if "cuda" in words:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("this machine has GPUs")
    words = ("--plan", "plan.json", *wanted("tree-4x2x2 on 2"), *words, "--out", "no")
    done = cli_here("run", *words, folder=planned, **environment)
    assert done.returncode == error.exit_code
    assert len([line for line in done.stderr.splitlines() if says in line]) == 1
    assert not (planned / "no").exists()


def test_more_ranks_than_a_cpu_is_asked_for_are_not_started(planned, cli_here, monkeypatch):
    monkeypatch.setattr("codesign.engine.gpu.launch.MOST_ON_CPU", 1)
    words = ("--plan", "plan.json", *wanted("tree-4x2x2 on 2"), "--device", "cpu-ranks")
    done = cli_here("run", *words, "--out", "no", folder=planned)
    assert done.returncode == HardwareError.exit_code
    assert "2 processes would stand for GPUs, cpu-ranks starts 1 at most" in done.stderr
    assert not (planned / "no").exists()


def test_a_draft_of_an_unknown_kind_is_refused(planned, cli_here, tiny_models, tmp_path):
    for file in tiny_models[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = Plan.load(planned / "plan.json")
    dataclasses.replace(plan, draft=str(tmp_path)).save(planned / "yarn.json")
    words = ("--plan", "yarn.json", "--device", "cpu-ranks", "--out", "no")
    done = cli_here("run", *words, folder=planned)
    assert done.returncode == InputError.exit_code
    assert "asks for rope type 'yarn'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_replicas_are_refused_under_torchrun(planned, cli_here):
    plan = Plan.load(planned / "plan.json")
    candidate = Candidate(Deployment(1, replicas=2), parse_policy("plain"), 2)
    chosen = dataclasses.replace(plan.chosen, candidate=candidate)
    dataclasses.replace(plan, chosen=chosen).save(planned / "replicas.json")
    words = ("--plan", "replicas.json", "--device", "cpu-ranks", "--out", "no")
    done = cli_here("run", *words, folder=planned, **OF_TORCHRUN)
    assert done.returncode == HardwareError.exit_code
    assert "Start without torchrun" in done.stderr
