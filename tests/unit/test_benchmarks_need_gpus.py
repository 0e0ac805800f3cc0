"""Where a GPU is missing, a benchmark says so in one line."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from codesign.errors import HardwareError

ROOT = Path(__file__).parents[2]
SCRIPTS = {  # that measure on GPUs: flags without which they stop earlier, and GPUs that they need
    "bench_attention": ([], 1),
    "bench_collectives": (["--gpus", "4"], 4),
    "bench_decode_ahead": ([], 1),
    "bench_turns": ([], 1),
    "bench_engine": (["--plan", "plan.json"], 1),
    "bench_forward": ([], 1),
    "bench_heads": ([], 1),
    "bench_gpu_engine": (["target", "--draft", "draft", "--only", "2"], 2),
    "bench_kernels": ([], 1),
    "bench_prompt_graphs": ([], 1),
    "bench_prompts": ([], 1),
    "bench_rank_groups": ([], 1),
    "bench_serving": ([], 1),
    "bench_step_ends": ([], 1),
    "check_inflated": ([], 1),
    "eight_gpus": ([], 8),
    "search_tilings": (["--model", "llama-3.2-1b"], 1),
    "policy_ranks": (["serve", "folder"], 2),
    "campaign.__main__": ([], 1),
}
# What concerns hosts is measured anywhere, and written where there are GPUs.
OTHERS = {"bench_pair_link", "bench_cores"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_without_its_gpus_ends_in_one_line(name, monkeypatch, capsys):
    flags, needed = SCRIPTS[name]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: needed - 1)
    monkeypatch.setattr(sys, "argv", [f"/somewhere/{name}.py", *flags])
    monkeypatch.syspath_prepend(str(ROOT))
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"benchmarks.{name}").main()
    gpus = "1 GPU" if needed == 1 else f"{needed} GPUs"
    assert stop.value.code == HardwareError.exit_code
    assert capsys.readouterr().err == f"{name}.py: needs {gpus}, found {needed - 1}\n"


def test_the_engine_benchmark_needs_the_gpus_of_its_widest_candidate(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module("benchmarks.bench_engine")
    labels = ("tree-8x4x2@1", "async-tree-8x4x2@2+1", "plain@4")
    parse = importlib.import_module("benchmarks.inflated_plan").parse_candidate
    scored = [SimpleNamespace(candidate=parse(label, 1)) for label in labels]
    monkeypatch.setattr(
        module, "Bench", lambda *_: SimpleNamespace(plan=SimpleNamespace(scored=scored))
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(sys, "argv", ["bench_engine.py", "--plan", "plan.json"])
    with pytest.raises(SystemExit) as stop:
        module.main()
    assert stop.value.code == HardwareError.exit_code
    assert capsys.readouterr().err == "bench_engine.py: needs 3 GPUs, found 2\n"


def test_every_script_that_writes_what_a_gpu_did_is_held_to_it():
    writes = {
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if "write_result" in (text := path.read_text(encoding="utf-8")) and "def main" in text
    }
    assert writes <= SCRIPTS.keys() | OTHERS
