"""Shared by all tests: threads, hypothesis profiles, and the command line as a user types it."""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import settings

import codesign
from codesign.acceptance import AcceptanceProfile, Recording
from codesign.artifacts import header, write_table
from codesign.candidate import ScoredCandidate
from codesign.config import SLO, Serving
from codesign.file_ref import FileRef
from codesign.fit import Fit
from codesign.plan import Plan
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.walk import Sampling

# Before anything imports torch or NumPy's BLAS; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads that wait for the others of a step sleep: where tests share the cores, the one that they
# wait for may not be running, and they would keep it from that.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Before anything imports Triton, whose newer releases settle on the interpreter at import.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What a shell runs in its background ignores Ctrl-C, and so does all that it starts: tests that
# interrupt a command would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Importing torch takes two seconds: processes that a fork server starts find it there.
multiprocessing.set_forkserver_preload(["torch"])

# Shared machines stall: a deadline would fail a test for what its neighbour does.
settings.register_profile("dev", deadline=None, max_examples=50)
settings.register_profile("ci", deadline=None, max_examples=100, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run ``python -m codesign ARGUMENTS`` in an empty folder, with the copy that tests import."""
    home = str(Path(codesign.__file__).parents[1])

    def run(*arguments: str | Path, timeout: float = 120.0, **environment: str):
        return subprocess.run(
            [sys.executable, "-m", "codesign", *map(str, arguments)],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": home, **environment},
            check=False,
        )

    return run


@pytest.fixture
def cli_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Cli]:
    """As ``cli`` in this process: a tenth of the time, where a fresh one is not the point.

    ``folder`` is another folder to run in.
    """
    from codesign.cli import main

    def run(*arguments: str | Path, folder: Path = tmp_path, **environment: str):
        monkeypatch.chdir(folder)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        words = [str(word) for word in arguments]
        try:
            code = main(words)
        except SystemExit as stop:  # after --help
            code = int(stop.code or 0)
        return subprocess.CompletedProcess(words, code, *capsys.readouterr())

    yield run
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # a run or a profile takes as many as it has workers


@pytest.fixture(scope="session")
def target_dir() -> Path:
    """The real default target, from the user's cache; fetched once if a network allows."""
    from codesign.errors import HardwareError
    from codesign.models.fetch import fetch_model

    try:
        return fetch_model("smollm2-135m").path
    except HardwareError as err:
        pytest.skip(f"the default target cannot be fetched: {err}")


@pytest.fixture(scope="session")
def machine_fit() -> Fit:
    """A made-up machine with 2 workers, whole ("2") or split ("1+1"), and a calibrated draft.

    A target forward takes 20 ms on both workers and half as long again on one, a draft forward
    2 ms. The target's token is drawn from the draft model's own chances.
    """
    rng = np.random.default_rng(0)
    acceptance = {name: tuple(_recording(rng, i) for i in range(4)) for name in ("chat", "code")}
    return Fit(
        target="smollm2-135m",
        draft="smollm2-135m-draft",
        temperature=0.0,
        costs={"2": _cost(1.0), "1+1": _cost(1.5, link=0.0002, slowdown=0.1)},
        calibration=Calibration(),
        acceptance=AcceptanceProfile(acceptance),
        errors={"2/target": 0.02, "2/draft": 0.04, "1+1/target": 0.02, "1+1/draft": 0.04},
    )


@pytest.fixture(scope="session")
def planned_folder(machine_fit: Fit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with fit.json, plan.json and runs/ of two candidates, simulated with seed 9."""
    from codesign.cli import main

    folder = tmp_path_factory.mktemp("planned")
    fit, plan = str(folder / "fit.json"), folder / "plan.json"
    machine_fit.save(fit)
    trace = ["--trace", "conv-twin", "--slice", "0:60", "--rate-scale", "0.05"]
    trace += ["--max-prompt", "120", "--max-output", "32", "--max-requests", "8"]
    policies = ("plain", "async-tree-8x2x2")
    code = main(
        ["plan", *trace, "--fit", fit, "--workers", "2", "--policies", ",".join(policies),
         "--max-batch", "4", "--out", str(plan), "--quiet"]
    )  # fmt: skip
    assert code == 0
    for policy, split in zip(policies, ("2", "1+1"), strict=True):
        code = main(
            ["simulate", "--trace", str(folder / "plan.trace.parquet"), "--fit", fit,
             "--policy", policy, "--deployment", split, "--max-batch", "4", "--seed", "9",
             "--out", str(folder / "runs" / policy), "--quiet"]
        )  # fmt: skip
        assert code == 0
    return folder


@pytest.fixture(scope="session")
def gpu_fit() -> Fit:
    """Eight GPUs by their data sheet and a pair of models that other engines load."""
    from codesign.fit.what_if import what_if_fit

    return what_if_fit("h100", 8, "llama-3.1-70b", "llama-3.2-1b")


@pytest.fixture(scope="session")
def gpu_plan(gpu_fit: Fit) -> Callable[..., Plan]:
    """Make a plan of some candidates, the first chosen; its trace and fit lie in a folder."""

    def make(folder: Path, *candidates: ScoredCandidate, prompts, outputs, **changes) -> Plan:
        columns = {"prompt_tokens": prompts, "output_tokens": outputs}
        arrival = 0.1 * np.arange(len(prompts))
        meta = header("trace", seed=None)
        write_table(folder / "trace.parquet", pd.DataFrame({"arrival": arrival, **columns}), meta)
        if not (folder / "fit.json").exists():  # the same for every plan
            gpu_fit.save(folder / "fit.json")
        values = {
            "target": gpu_fit.target, "draft": gpu_fit.draft, "slo": SLO(), "serving": Serving(),
            "objective": "goodput", "sampling": Sampling(seed=0), "seed": 0, "num_seeds": 1,
            "trace": FileRef.of(folder / "trace.parquet"), "num_requests": len(prompts),
            "fit": FileRef.of(folder / "fit.json"), "chosen": candidates[0],
            "alternatives": candidates[1:],
        }  # fmt: skip
        return Plan(**{**values, **changes})

    return make


def _recording(rng: np.random.Generator, request: int) -> Recording:
    chances = np.sort(rng.dirichlet(np.full(16, 0.12), size=100), axis=1)[:, ::-1]
    chances = np.maximum(chances, 1e-6) * 0.99
    ranks = (rng.random((100, 1)) > np.cumsum(chances, axis=1)).sum(axis=1)
    return Recording(request, np.where(ranks < 16, ranks, -1), np.log(chances))


def _cost(factor: float, *, link: float = 0.0, slowdown: float = 0.0) -> RoundCost:
    rows = (1, 2, 4, 8, 16, 32)
    target = tuple(factor * ms / 1000 for ms in (20, 21, 23, 27, 36, 55))
    draft = tuple(ms / 1000 for ms in (2.0, 2.1, 2.2, 2.4, 3.0, 4.0))
    return RoundCost(
        target=StepTime(2e-6, rows, target),
        draft=StepTime(2e-7, rows, draft),
        prefill=StepTime.linear(alpha=2e-6, gamma=0.0012 * factor, delta=0.02),
        draft_prefill=StepTime.linear(alpha=1e-7, gamma=0.0001, delta=0.002),
        reroot=0.0004,
        link=link,
        slowdown=slowdown,
    )


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories of a tiny random target, with a tokenizer of letters, and of a noisy copy."""
    import torch

    from benchmarks.random_pair import LETTERS, TINY, write_letters, write_random_pair

    root = tmp_path_factory.mktemp("tiny")
    config = TINY | {"vocab_size": len(LETTERS)}
    write_random_pair(root, config, noise=0.15, dtype=torch.float32)
    for name in ("target", "draft"):
        write_letters(root / name)
    return root / "target", root / "draft"


@pytest.fixture
def slow_links(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], float]:
    """Delays between the leaders of target and draft; returns more, before each answer by round."""
    from codesign.engine.gpu.link import LinkedDraft

    chance = random.Random(5)

    def slowed(method: Callable) -> Callable:
        def slow(*arguments):
            time.sleep(chance.choice((0.0, 0.0, 0.001)))
            return method(*arguments)

        return slow

    for name in ("send", "receive"):
        monkeypatch.setattr(LinkedDraft, name, slowed(getattr(LinkedDraft, name)))
    return [chance.choice((0.0, 0.0, 0.0005, 0.002)) for _ in range(10_000)].__getitem__


@pytest.fixture
def verifies_as_staged() -> Callable[..., None]:
    """``check(worker, seconds)``: timed verifications run the rows that their shapes say."""
    from codesign.profiler.steps import StepShape

    def check(worker, seconds: Callable[[StepShape], float]) -> None:
        verify, seen = worker.verify, []

        def spy(candidates):
            seen.append(verify(candidates))
            return seen[-1]

        worker.verify = spy
        for requests, rows, context in ((3, 5, 64), (1, 2, 16), (2, 1, 32), (3, 5, 64)):
            shape = StepShape("target", requests, rows, context)
            assert seconds(shape) > 0
            verified, verdicts = seen[-1]
            assert [len(r.tokens) for r in verified] == [rows] * requests
            assert [r.context for r in verified] == [*shape.contexts]
            # One draft token is accepted, where there is any.
            assert [len(v.tokens) for v in verdicts] == [min(rows, 2)] * requests
            assert not any(v.is_finished for v in verdicts)

    return check


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[ModuleType]]]:
    """Load modules of codesign.kernels with their Triton kernels in the interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope) -> None:
        patch(tensor, scope)  # NumPy 2.4 turns no array of one entry into an integer by itself
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(interpreter, "_patch_builtin", _patch_builtins)
    loaded: list[ModuleType] = []

    def load(*names: str) -> list[ModuleType]:
        found = [importlib.import_module(f"codesign.kernels.{name}") for name in names]
        loaded.extend(importlib.reload(module) for module in found)
        return found

    yield load
    monkeypatch.undo()
    for module in loaded:
        importlib.reload(module)  # other tests may have a GPU


def _patch_builtins(package, builder, scope) -> None:
    """As Triton's, which looks at all of a package whenever a kernel calls a function."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    names = _builtin_names(package)
    if names and is_builtin(getattr(package, names[0])):  # else all have been replaced already
        for name in names:
            interpreter._patch_attr(package, name, getattr(package, name), builder, scope)


@cache
def _builtin_names(package) -> list[str]:
    from triton.language.core import is_builtin

    return [name for name, member in inspect.getmembers(package) if is_builtin(member)]


@pytest.fixture(scope="session")
def each_its_own() -> Callable[..., Any]:
    """Make ``RowSamplings`` of rows' samplings, on a device."""
    import torch

    from codesign.kernels.row_samplings import RowSamplings, has_top_k, has_top_p

    def make(samplings: Sequence[Sampling], device: str = "cpu") -> RowSamplings:
        numbers = [(s.temperature, float(s.top_k), s.top_p) for s in samplings]
        columns = torch.tensor(numbers, dtype=torch.float64, device=device).T.contiguous()
        top_k, top_p = any(map(has_top_k, samplings)), any(map(has_top_p, samplings))
        return RowSamplings(*columns, has_top_k=top_k, has_top_p=top_p)

    return make


@pytest.fixture
def overlapping_draft() -> type:
    """A ``LocalDraft`` with an asynchronous draft's order of steps, in this process."""
    from codesign.engine.partner import LocalDraft

    class OverlappingDraft(LocalDraft):
        is_async = True

        def receive(self):
            answer = super().receive()
            self.worker.overlap()
            return answer

    return OverlappingDraft


@dataclass
class Watched:
    """All that drafts sent to be verified, and what their ranks guessed."""

    candidates: list = field(default_factory=list)
    guessers: list = field(default_factory=list)

    @property
    def num_guesses(self) -> int:
        return sum(each.num_guesses for each in self.guessers)

    @property
    def num_confirmed(self) -> int:
        return sum(each.num_confirmed for each in self.guessers)


@pytest.fixture
def watched_drafts(
    monkeypatch: pytest.MonkeyPatch, overlapping_draft: type
) -> Callable[..., AbstractContextManager[Watched]]:
    """``with watched_drafts(is_async=..., ahead=...)``: drafts of rank groups, led in this process.

    Without ``ahead`` the host asks for every step.
    """
    import codesign.engine.gpu.run as gpu_run
    from codesign.engine.draft_worker import DraftWorker
    from codesign.engine.gpu.run_ahead import RunAhead

    @contextmanager
    def watch(*, is_async: bool, ahead: bool) -> Iterator[Watched]:
        found = Watched()
        look, begin = DraftWorker.look, RunAhead.__init__

        def kept(worker, verdict):
            answered = look(worker, verdict)
            found.candidates.append(answered[0])
            return answered

        def noted(self, *arguments) -> None:
            begin(self, *arguments)
            found.guessers.append(self)

        with monkeypatch.context() as patch:
            patch.setattr(DraftWorker, "look", kept)
            patch.setattr(RunAhead, "__init__", noted)
            if not ahead:
                patch.setattr(RunAhead, "expect", lambda *_, **__: None)
            if is_async:
                patch.setattr(gpu_run, "LocalDraft", overlapping_draft)
            yield found

    return watch
