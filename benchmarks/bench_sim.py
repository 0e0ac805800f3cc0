"""How long codesign and its peers take to simulate whole traces: wall time and peak memory.

    python -m benchmarks.bench_sim [--trace AzureLLMInferenceTrace_conv.csv]
        [--mooncake conversation_trace.jsonl] [--out benchmarks/results/sim_DATE.json]
        [--only NAME ...] [--repeat N]

Each case runs in a fresh process, several times; a case that the file already has is not run
again. Without the published files the bundled twins are scaled to their size. Peers are installed
into virtual environments of their own below --work; one that cannot be is reported as not run.
Run it on an idle machine: the load before each run is kept beside its time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.sim.measure import PEERS, NotRunError, installed_peer, measure, measure_install
from codesign.artifacts import command_line
from codesign.cli.tables import table

HERE = Path(__file__).parent
NOT_RUN = {
    "Vidur": "not on PyPI, and its profiles are large files of its repository",
    "BLIS": "a Go program that no package registry has",
}
SEARCH = (
    "cli", "default", "--model-path", "meta-llama/Meta-Llama-3.1-70B", "--total-gpus", "8",
    "--system", "h200_sxm", "--isl", "4000", "--osl", "500", "--ttft", "1000", "--tpot", "50",
)  # fmt: skip
PLAN = (
    "--device", "h100", "--gpus", "8", "--target", "llama-3.1-70b", "--draft", "llama-3.2-1b",
    "--slo-ttft-ms", "1000", "--slo-tpot-ms", "50", "--prefill-chunk", "8192", "--prefix-cache",
    "--preemption", "--quiet", "--json",
)  # fmt: skip
KV_TOKENS = 24_576  # little enough that the hour needs preemption
# For Mooncake's prompts; and Dynamo's default, whose default timing slows with the share in use.
MANY_KV_TOKENS = 1_048_576


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: Key in the file.
        about: What is run.
        command: Makes the command line; may raise NotRunError.
        goal: Largest wall seconds and MB, None where there is none.
    """

    name: str
    about: str
    command: Callable[[], list[str]]
    goal: tuple[float | None, float | None] = (None, None)


@dataclass
class Bench:
    """Where things are: arguments, traces in Mooncake's format, and the results so far."""

    args: argparse.Namespace
    work: Path
    results: dict[str, Any] = field(default_factory=dict)

    def trace(self, name: str) -> str:
        """conv, conv-10 (ten hours) or mooncake as JSON Lines; made once."""
        path = self.work / f"{name}.jsonl"
        if not path.exists():
            given = self.args.mooncake if name == "mooncake" else self.args.trace
            twin = "mooncake-twin" if name == "mooncake" else "conv-twin"
            source = [given or twin, "10" if name.endswith("-10") else "1", str(path)]
            if given is None:  # twins last 600 s; the published hours have this many requests
                source.append("12031" if name == "mooncake" else "19366")
            subprocess.run([sys.executable, HERE / "sim" / "make_trace.py", *source], check=True)
        return str(path)


def cases(bench: Bench) -> list[Case]:
    """All rows, ours first."""

    def ours(name: str, trace: str, policy: str, deployment: str = "1", **serving: Any) -> Any:
        limits = {"max_kv_tokens": KV_TOKENS, "prefix_cache": True, "preemption": True}
        limits |= {"prefill_chunk": 8192} | serving

        def command() -> list[str]:
            case = {"trace": bench.trace(trace), "policy": policy, "deployment": deployment}
            case |= {"max_batch": 256, "serving": limits}
            return [sys.executable, str(HERE / "sim" / "ours.py"), json.dumps(case)]

        goal = GOALS.get(name, (None, None))
        shown = "whole prompts" if limits["prefill_chunk"] is None else "chunks of 8,192"
        return Case(name, f"{trace}, {policy} on {deployment}, {shown}", command, goal)

    def dynamo(trace: str, workers: int) -> Callable[[], list[str]]:
        def command() -> list[str]:
            python = installed_peer("dynamo", bench.work) / "python"
            script = str(HERE / "sim" / "dynamo_replay.py")
            blocks = str(MANY_KV_TOKENS // 64)
            return [str(python), script, bench.trace(trace), str(workers), blocks]

        return command

    def simpy(trace: str, replicas: int) -> Callable[[], list[str]]:
        def command() -> list[str]:
            script = str(HERE / "sim" / "simpy_loop.py")
            return [sys.executable, script, bench.trace(trace), str(replicas)]

        return command

    def search() -> list[str]:
        return [str(installed_peer("aiconfigurator", bench.work) / "aiconfigurator"), *SEARCH]

    def plan() -> list[str]:
        files = ("--trace", bench.trace("conv"), "--out", str(bench.work / "plan.json"))
        return [sys.executable, "-m", "codesign", "plan", *files, *PLAN]

    big = MANY_KV_TOKENS
    return [
        ours("conv-plain", "conv", "plain"),
        ours("conv-chain-3", "conv", "chain-3"),
        ours("conv-async-tree", "conv", "async-tree-8x4x2", "1+1"),
        ours("conv-4-replicas", "conv", "plain", "4x1", routing="least-loaded"),
        ours("conv-4-replicas-chain-3", "conv", "chain-3", "4x1", routing="least-loaded"),
        ours("conv-whole-prompts", "conv", "plain", prefill_chunk=None),
        ours("mooncake", "mooncake", "plain", "8x1", routing="least-loaded", max_kv_tokens=big),
        ours("mooncake-prefix-aware", "mooncake", "plain", "8x1", routing="prefix-aware",
             max_kv_tokens=big),
        ours("mooncake-chain-3", "mooncake", "chain-3", "8x1", routing="least-loaded",
             max_kv_tokens=big),
        ours("conv-10-plain", "conv-10", "plain"),
        ours("conv-10-chain-3", "conv-10", "chain-3"),
        Case("plan-conv", "codesign plan: conv on 8 H100", plan, GOALS["plan-conv"]),
        Case("help", "codesign --help", lambda: [sys.executable, "-m", "codesign", "--help"],
             GOALS["help"]),
        Case("dynamo-conv", "Dynamo replay: conv, 1 worker", dynamo("conv", 1)),
        Case("dynamo-conv-4", "Dynamo replay: conv, 4 workers", dynamo("conv", 4)),
        Case("dynamo-mooncake", "Dynamo replay: mooncake, 8 workers", dynamo("mooncake", 8)),
        Case("dynamo-conv-10", "Dynamo replay: ten hours, 1 worker",
             dynamo("conv-10", 1)),
        Case("simpy-conv", "SimPy loop, no KV limits: conv", simpy("conv", 1)),
        Case("simpy-conv-4", "SimPy loop, no KV limits: conv, 4 replicas", simpy("conv", 4)),
        Case("aiconfigurator", "aiconfigurator: one search, no speculation, no trace", search),
    ]  # fmt: skip


GOALS: dict[str, tuple[float | None, float | None]] = {
    "conv-plain": (4.0, 200.0),
    "conv-chain-3": (4.0, 200.0),
    "conv-async-tree": (8.0, None),
    "conv-4-replicas": (8.0, None),
    "mooncake": (10.0, None),
    "plan-conv": (62.0, None),
    "help": (0.3, None),
}
INSTALL_GOAL = 300.0  # MB


def run_all(bench: Bench, rows: list[Case], save: Callable[[], None]) -> None:
    """Fill ``bench.results``; rounds over all cases, so that a slow minute hits each of them."""
    results = bench.results
    for repetition in range(bench.args.repeat):
        for case in rows:
            entry = results.setdefault(case.name, {"about": case.about, "runs": []})
            if len(entry["runs"]) > repetition or "not_run" in entry:
                continue
            say(f"{case.name}: run {repetition + 1} of {bench.args.repeat}")
            try:
                entry["runs"].append(measure(case.command(), HERE.parent))
            except (NotRunError, subprocess.CalledProcessError, OSError) as err:
                say(f"{case.name}: not run: {err}")
                if not entry["runs"]:
                    entry["not_run"] = str(err)
            save()


def results_table(bench: Bench, rows: list[Case]) -> str:
    """Best wall time, its spread, where it went, and the goals."""
    lines = []
    for case in rows:
        runs = bench.results.get(case.name, {}).get("runs", [])
        if not runs:
            lines.append([case.name, *[None] * 6, "", "not run"])
            continue
        best = min(runs, key=lambda run: run["wall"])
        spread = max(run["wall"] for run in runs) - best["wall"]
        said, (seconds, memory) = best["said"], case.goal
        goal = " ".join(f"{g:g} {u}" for g, u in ((seconds, "s"), (memory, "MB")) if g is not None)
        is_met = all(g is None or best[k] <= g for g, k in ((seconds, "wall"), (memory, "peak_mb")))
        verdict = "" if not goal else "met" if is_met else "MISSED"
        core = said.get("seconds", {}).get("simulate")
        cpu = min(run["cpu"] for run in runs)
        numbers = [best["wall"], spread, cpu, core, best["peak_mb"], said.get("rounds")]
        lines.append([case.name, *numbers, goal, verdict])
    heads = ("case", "wall s", "spread", "cpu s", "sim s", "peak MB", "rounds", "goal", "")
    return "\n".join([table(heads, lines), "", *remarks(bench)])


def remarks(bench: Bench) -> list[str]:
    """Linearity, the size of the install, what was not run, and whether the machine was idle."""
    results, lines = bench.results, []

    def best(name: str, core: bool) -> float | None:
        runs = results.get(name, {}).get("runs", [])
        times = [run["said"]["seconds"]["simulate"] if core else run["wall"] for run in runs]
        return min(times, default=None)

    for name in ("plain", "chain-3"):
        hour, ten = best(f"conv-{name}", True), best(f"conv-10-{name}", True)
        if hour and ten:
            lines.append(f"ten hours of {name} simulate in {ten / hour:.2f} times one hour")
    install = results.get("core-install", {})
    if "mb" in install:
        largest = ", ".join(f"{n} {mb:.0f}" for n, mb in list(install["largest"].items())[:5])
        verdict = "met" if install["mb"] <= INSTALL_GOAL else "MISSED"
        lines.append(f"core install {install['mb']:.0f} MB (goal {INSTALL_GOAL:.0f}: {verdict}); "
                     f"MB: {largest}")  # fmt: skip
    lines += [f"not run: {name}: {why}" for name, why in NOT_RUN.items()]
    lines += [f"not run: {n}: {e['not_run']}" for n, e in results.items() if "not_run" in e]
    loads = [run["load_before"] for e in results.values() for run in e.get("runs", [])]
    if loads and max(loads) > 1.5:
        lines.append(f"the machine was not idle: load up to {max(loads):.1f} before a run")
    return lines


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    today = datetime.now(UTC).date()
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=form)
    parser.add_argument("--trace", help="the Azure 2023 conversation trace as published")
    parser.add_argument("--mooncake", help="the Mooncake conversation trace as published")
    parser.add_argument("--out", default=str(HERE / "results" / f"sim_{today}.json"))
    parser.add_argument("--work", default=str(Path(tempfile.gettempdir()) / "codesign-bench"))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="these cases; core-install is one, too")
    return parser.parse_args()


def main() -> None:
    """Run what is missing, save after every run, print the table."""
    args = parse()
    work, out = Path(args.work), Path(args.out)
    work.mkdir(parents=True, exist_ok=True)
    content = json.loads(out.read_text()) if out.exists() else {}
    bench = Bench(args, work, content.get("cases", {}))
    rows = [case for case in cases(bench) if not args.only or case.name in args.only]

    about = json.loads(subprocess.check_output([sys.executable, HERE / "sim" / "about.py"]))

    def save() -> None:
        body = {
            "what": "wall seconds and peak MB of simulations in fresh processes",
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command_line(),
            **about,
            "traces": {"conv": args.trace or "conv-twin", "mooncake": args.mooncake or "twin"},
            "peers": {name: " ".join(words) for name, words in PEERS.items()},
            "not_run": NOT_RUN,
            "goals": GOALS,
            "cases": bench.results,
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(body, indent=1) + "\n")

    run_all(bench, rows, save)
    if (not args.only or "core-install" in args.only) and "mb" not in bench.results.get(
        "core-install", {}
    ):
        say("core-install")
        try:
            bench.results["core-install"] = measure_install(HERE.parent, work)
        except NotRunError as err:
            bench.results["core-install"] = {"not_run": str(err)}
        save()
    print(results_table(bench, rows))


if __name__ == "__main__":
    main()
