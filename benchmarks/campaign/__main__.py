"""The validation campaign: profile, fit, plan, run a grid and a trace segment, join, report.

    python -m benchmarks.campaign --out campaign --gpus 2 --dry-run       # units and seconds
    python -m benchmarks.campaign --out campaign --gpus 2 --max-seconds 560
    python -m benchmarks.campaign --out campaign --gpus 2 --max-seconds 560   # goes on
    python -m benchmarks.campaign --out campaign --join benchmarks/results/campaign_DATE_gpu.json
    python -m benchmarks.campaign --report benchmarks/results/campaign_*.json

Without --pair and --deployments a schedule is followed (schedule.py), pair after pair, each session
with a budget for its runs; one whose runs had theirs leaves LABEL.spent, which may be removed to go
on with them. With both, --plans says how many runs of each deployment come first:

    python -m benchmarks.campaign --out campaign --pair llama-3-8b+llama-3.2-1b \\
        --deployments 2,1+1 --plans 6,2,1 --seed 1

--seed serves and records other prompts than most campaigns did; the result names it. A call ends by
itself before its seconds are over, with 130 if there is more to do.

The first calls need the GPUs (or --device cpu-ranks, which needs none), and the small models of
``codesign models fetch``; nothing large is downloaded. --join predicts every run from the profile
alone and needs no GPU. --report writes docs/validation*.md from what --join left.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import IO

from benchmarks.campaign.asked_sessions import seed_for, sessions
from benchmarks.campaign.closed_profile import check_machine
from benchmarks.campaign.expected_seconds import cold_seconds, unit_seconds
from benchmarks.campaign.questions import MOST_TIMES, SERVED_FILLERS
from benchmarks.campaign.requests import TRACE
from benchmarks.campaign.schedule import (
    Session,
    by_calls,
    note_session,
    phase_file,
    run_share,
)
from benchmarks.campaign.task import Task
from benchmarks.campaign.units import PAIRS, SEGMENT, Pair
from codesign.config import parse_deployment
from codesign.errors import CodesignError, counted
from codesign.traces import load_trace

END_SECONDS = 8.0  # for a session to end after its deadline
SLACK = 60.0  # beyond the guess, after which a session is taken to hang
MODULE = "benchmarks.campaign.ranks"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.campaign",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("campaign"), help="the campaign's folder")
    parser.add_argument("--gpus", type=int, default=4, help="GPUs of this machine (4)")
    parser.add_argument("--device", choices=("cuda", "cpu-ranks"), default="cuda")
    parser.add_argument(
        "--pair", action="append", metavar="TARGET+DRAFT", help="these, in this order, or your own"
    )
    parser.add_argument("--deployments", help="these labels, in this order, as 2,1+1,1")
    parser.add_argument("--max-seconds", type=float, default=560.0, help="of this call (560)")
    parser.add_argument(
        "--run-seconds", type=float, default=math.inf, help="of a session, for runs"
    )
    parser.add_argument("--small", action="store_true", help="a small grid")
    parser.add_argument(
        "--plans", metavar="STREAMS,BATCHES,REPLAYS", type=_counts,
        help="of each of --deployments, and time for these: 4,2,1",
    )  # fmt: skip
    parser.add_argument("--replay-seconds", type=float, default=SEGMENT.seconds, help="of a trace")
    parser.add_argument(
        "--requests", type=float, default=1.0,
        help=f"times those of a workload, {MOST_TIMES} at most (1)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, choices=range(len(SERVED_FILLERS) - len(PAIRS)), metavar="N",
        help="of what the first pair serves and records; each pair has its own (all the same)",
    )  # fmt: skip
    parser.add_argument("--full-profile", action="store_true", help="more shapes and repetitions")
    parser.add_argument("--profile-only", action="append", default=[], metavar="TARGET+DRAFT")
    parser.add_argument("--dry-run", action="store_true", help="print units and seconds only")
    parser.add_argument("--join", type=Path, metavar="FILE", help="predict and compare, no GPU")
    parser.add_argument("--remark", action="append", default=[], help="with --join, for readers")
    parser.add_argument("--report", nargs="+", type=Path, metavar="FILE", help="write the document")
    args = parser.parse_args(words)
    if args.plans and not args.deployments:
        parser.error("--plans needs --deployments: a schedule has numbers of its own")
    if not 0 < args.requests <= MOST_TIMES:
        parser.error(f"--requests is above 0 and {MOST_TIMES} at most: there are no other prompts")
    return args


def _counts(text: str) -> tuple[int, ...]:
    """Numbers of plans, as they are typed."""
    numbers = tuple(map(int, text.split(",")))
    if len(numbers) != 3 or min(numbers) < 0:
        raise ValueError(text)
    return numbers


def measure(args: argparse.Namespace) -> int:
    """Run sessions until everything is done or the seconds are over; 130 if there is more to do."""
    end = monotonic() + args.max_seconds - END_SECONDS
    todo = [s for s in sessions(args) if s.seconds(args.out / s.pair.name)]
    if any(work.workload.seconds for session in todo for work in session.units):
        load_trace(TRACE)  # says so at once if it is not here
    for pair in {s.pair.name: s.pair for s in todo}.values():
        check_machine(args.out / pair.name)
        make_models(pair)
    cold = cold_seconds(args.device)  # until one has been given its task
    for number, (session, process) in enumerate(started(todo)):
        folder = args.out / session.pair.name
        left = end - monotonic()
        share = run_share([s.phases(args.out / s.pair.name) for s in todo[number:]], left - cold)
        if left < session.least_seconds(folder) + cold:
            process.kill()
            process.wait()
            continue
        needed = min(sum(session.phases(folder, share).values()) + cold, left)
        print(f"{session.pair.name} on {session.label}: about {needed:.0f} s", flush=True)
        if not give_task(process, session, args, end=end, share=share):
            print("  had ended before its task came", flush=True)
            continue
        cold = 0.0
        limit = min(left, needed + SLACK) + END_SECONDS
        try:
            process.wait(timeout=limit)
            how = "ended by itself"
        except subprocess.TimeoutExpired:
            how = f"ended here after {limit:.0f} s"
            process.kill()
            process.wait()
        note_cut(folder, session.label, how)
    return 130 if any(s.seconds(args.out / s.pair.name) for s in todo) else 0


def note_cut(folder: Path, label: str, how: str) -> None:
    """Say in which phase a session ended that did not come to its end, and note it as others do."""
    file = phase_file(folder, label)
    if not file.exists():
        return
    line = json.loads(file.read_text())
    print(f"  {how} in its phase {line['cut']}", flush=True)
    note_session(folder, label, line)


def started(todo: Sequence[Session]) -> Iterator[tuple[Session, subprocess.Popen[str]]]:
    """Sessions with their processes, each started while the one before works."""
    following = start_process(todo[0]) if todo else None
    for number, session in enumerate(todo):
        process = following
        assert process is not None
        following = start_process(todo[number + 1]) if number + 1 < len(todo) else None
        try:
            yield session, process
        except GeneratorExit:
            for each in (process, following):
                if each is not None:
                    each.kill()
            raise


def start_process(session: Session) -> subprocess.Popen[str]:
    """A process that loads what it needs, as its other ranks do, and waits for its task."""
    words = [sys.executable, "-m", MODULE, str(parse_deployment(session.label).num_workers)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, text=True)


def give_task(
    process: subprocess.Popen[str],
    session: Session,
    args: argparse.Namespace,
    *,
    end: float,
    share: float,
) -> bool:
    """Tell a process what to do, by when, in what share of its runs' time; False if it is gone."""
    task = Task(
        out=str(args.out),
        pair=f"{session.pair.target}+{session.pair.draft}",
        label=session.label,
        device=args.device,
        deadline=end,
        run_seconds=min(share * session.run_seconds, 1e9),
        size=asdict(session.size) if session.units else None,
        is_quick=not args.full_profile,
        recorded=0.25 if args.small else 1.0,
        seed=seed_for(args, session.pair),
    )
    stdin: IO[str] | None = process.stdin
    assert stdin is not None
    try:
        stdin.write(json.dumps(asdict(task)) + "\n")
        stdin.close()
    except BrokenPipeError:
        process.wait()
        return False
    return True


def make_models(pair: Pair) -> None:
    """Write the recipes of a pair's inflated models; their weights are made on the ranks."""
    from codesign.cli import main as codesign
    from codesign.models import models_dir

    if not pair.is_inflated:
        return
    for role, shape, name, flags in (
        ("--target", pair.target, pair.models[0], ()),
        ("--draft", pair.draft, pair.models[1], pair.draft_flags),
    ):
        if not (models_dir() / name).is_dir():
            codesign(["models", "inflate", role, "--shape", shape, "--name", name, *flags])


def dry_run(args: argparse.Namespace) -> None:
    """Print units of work and about how long they take, call by call."""
    todo: list[tuple[Session, dict[str, float]]] = []
    for session in sessions(args):
        phases = session.phases(args.out / session.pair.name)
        if any(other.pair == session.pair and "acceptance" in found for other, found in todo):
            phases.pop("acceptance", None)  # once a pair
        todo.append((session, phases))
    seconds = [sum(phases.values()) for _, phases in todo]
    cold = cold_seconds(args.device)
    calls = by_calls(seconds, args.max_seconds - cold)
    total = 0.0
    for (session, phases), needed, call in zip(todo, seconds, calls, strict=True):
        total += needed
        parts = ", ".join(f"{name} {value:.0f}" for name, value in phases.items()) or "done"
        print(
            f"call {call}, at {total - needed:4.0f} s: {session.pair.name} on {session.label}, "
            f"{needed:.0f} s ({parts})"
        )
        budget = phases.get("runs", 0.0)
        for work in session.left(args.out / session.pair.name) if "runs" in phases else ():
            taken = unit_seconds(work, session.pair)
            budget -= taken
            if budget < 0:
                break
            print(f"    {taken:5.1f} s  {work.folder}")
    more = f", and {cold:.0f} to compile" if cold else ""
    print(f"about {total:.0f} s on {counted(args.gpus, 'GPU')}{more}")


def main() -> int:
    """Do what the flags ask for."""
    args = parse()
    if args.report:
        from benchmarks.campaign.report import write_document

        write_document(args.report)
        return 0
    if args.join is not None:
        from benchmarks.campaign.join import write_result

        write_result(args.out, args.join, args.remark)
        return 0
    if args.dry_run:
        dry_run(args)
        return 0
    if args.device == "cuda":
        from benchmarks.common import need_gpus

        need_gpus()
    try:
        return measure(args)
    except CodesignError as error:
        print(f"campaign: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
