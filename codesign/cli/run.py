"""``codesign run``: execute a plan on this machine's engine."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codesign.cli.argument_types import positive
from codesign.cli.output import add_output_arguments, emit, progress, say
from codesign.cli.run_result import next_command, result_text

if TYPE_CHECKING:
    from codesign.candidate import ScoredCandidate
    from codesign.engine.measured_run import MeasuredRun
    from codesign.engine.replay import Engine, Replay
    from codesign.engine.replicas import PlanEngine
    from codesign.plan import Plan

_BASELINES = ("plain", "chain-3", "tree", "async-tree")
_EXAMPLES = """\
examples:
  codesign run --plan plan.json
  codesign run --plan plan.json --baselines --out runs
  codesign run --plan plan.json --device cuda
  codesign run --plan plan.json --device cuda --target ./Llama-70B-int4 --draft ./Llama-1B-int4
  torchrun --nnodes 2 --nproc-per-node 4 -m codesign run --plan plan.json --device cuda
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``codesign run`` takes."""
    parser.description = "Serve a plan's requests with real models, in real time."
    parser.epilog = _EXAMPLES
    workload = parser.add_argument_group("workload")
    workload.add_argument("--plan", required=True, type=Path, help="plan.json from codesign plan")
    workload.add_argument(
        "--candidate",
        action="append",
        default=[],
        metavar="NAME",
        help="run this candidate of the plan instead of the chosen one: a label, a policy such as "
        "chain-3, or a family such as async-tree; repeatable",
    )
    workload.add_argument(
        "--baselines",
        action="store_true",
        help=f"also run the best of {', '.join(_BASELINES)} that the plan has: each takes as long "
        "as the trace, and on ranks (cuda, cpu-ranks) starts them and loads the models again",
    )
    models = parser.add_argument_group("models")
    for role in ("target", "draft"):
        models.add_argument(
            f"--{role}",
            metavar="MODEL",
            help=f"name or directory of a checkpoint of the {role}'s size, if the plan names only "
            "a size (the plan's)",
        )
    machine = parser.add_argument_group("hardware")
    machine.add_argument(
        "--device",
        choices=("cpu", "cuda", "cpu-ranks"),
        default="cpu",
        help="cpu: a plan's workers are threads (default); cuda: they are GPUs, with a process "
        "each; cpu-ranks: the same processes on the CPU, to try a plan for GPUs",
    )
    machine.add_argument("--workers", type=positive, metavar="N", help="CPU cores for cpu (all)")
    machine.add_argument(
        "--padded-rows",
        type=int,
        default=8,
        choices=(8, 16, 32, 64, 128),
        help="pad target forwards on cuda and cpu-ranks to this many rows (8); if it covers the "
        "largest batch and tree, all runs round alike and give the same tokens",
    )
    machine.add_argument(
        "--max-waiting",
        type=positive,
        metavar="N",
        help="refuse requests that arrive while N others wait (serve all)",
    )
    output = parser.add_argument_group("files")
    output.add_argument("--out", type=Path, default=Path("runs"), help="folder (default: runs)")
    output.add_argument("--resume", action="store_true", help="skip complete runs of these flags")
    add_output_arguments(parser)
    parser.set_defaults(func=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    """Run the chosen candidate, or those asked for; 130 when interrupted, 4 with refusals."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _check_torchrun(args)
        if os.environ["RANK"] != "0":
            return _follow(args)
    return _lead(args)


def _check_torchrun(args: argparse.Namespace) -> None:
    from codesign.errors import UsageError

    if args.device == "cpu":
        raise UsageError("torchrun needs --device cuda (or cpu-ranks)")
    if args.resume:
        raise UsageError("--resume does not work under torchrun: leave it out")


def _follow(args: argparse.Namespace) -> int:
    """Be a process of torchrun that leads nothing; the first one says what goes wrong."""
    import signal

    from codesign.engine.gpu.rank_engine import RankEngine
    from codesign.errors import CodesignError

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the first one's to handle
    args.quiet = True
    try:
        plan = _plan(args)
        wanted = _wanted(plan, args)
        replay = _replay(plan, wanted, args)
        engine = _engine(plan, wanted, args).here
        assert isinstance(engine, RankEngine), "torchrun starts ranks"
        engine.follow(replay, [scored.candidate for scored in wanted])
    except CodesignError as error:
        return error.exit_code
    return 0


def _lead(args: argparse.Namespace) -> int:
    from codesign.engine.measured_run import differing_requests
    from codesign.errors import InputError
    from codesign.fit.profile_command import device_of
    from codesign.fit.step_pace import Served, other_machine_note, step_pace_note
    from codesign.run_directory import make_folder

    plan = _plan(args)
    wanted = _wanted(plan, args)
    replay = _replay(plan, wanted, args)
    if args.device == "cpu" and device_of(replay.fit) == "cuda":
        say("fit: the plan is for GPUs and would run on this machine's CPU; on GPUs: --device cuda")
    engine = _engine(plan, wanted, args)
    make_folder(args.out)
    served = Served.here(plan.target, plan.draft, args.device)
    if note := other_machine_note(replay.fit, plan.fit.path, served):
        say(f"fit: {note}")
    runs = _run_all(replay, engine, wanted, args)
    paces = [(run.scored.candidate.deployment, run.step_pace) for run in runs]
    if note := step_pace_note(paces, replay.fit, plan.fit.path, served):
        say(f"fit: {note}")
    payload = {"plan": str(args.plan), "runs": [_as_dict(run) for run in runs]}
    payload["differing_requests"] = differing_requests(runs)
    whole = len(runs) == len(wanted) and all(run.is_complete for run in runs)
    then = next_command(args.plan, runs, is_whole=whole, resumes=args.resume)
    emit(args, payload, lambda: result_text(plan, runs, then))
    if not whole and args.device == "cuda":
        sys.stdout.flush()
        os._exit(130)  # a kernel that waits for a lost rank would keep this process for ever
    if not whole:
        return 130
    return InputError.exit_code if any(run.refused for run in runs) else 0


def _wanted(plan: Plan, args: argparse.Namespace) -> list[ScoredCandidate]:
    from codesign.errors import InputError
    from codesign.policy.speculation import check_runs_in_engine

    wanted = [plan.find(name) for name in args.candidate or [""]]
    for scored in wanted:  # before models are loaded
        check_runs_in_engine(scored.candidate.speculation)
    if args.baselines:
        for name in _BASELINES:
            try:
                wanted.append(plan.find(name))
            except InputError:
                say(f"the plan has no {name}; skipped")
    return list({scored.label: scored for scored in wanted}.values())


def _plan(args: argparse.Namespace) -> Plan:
    """The plan, with the checkpoints that stand for its models.

    Raises:
        InputError: If the plan cannot be read, or nobody knows a checkpoint of a model's name.
    """
    from codesign.errors import InputError
    from codesign.models import FETCHABLE, lasting_name, resolve_model
    from codesign.plan import Plan

    plan = Plan.load(args.plan)
    named = {"target": args.target, "draft": args.draft}
    named = {role: lasting_name(name) for role, name in named.items() if name is not None}
    plan = replace(plan, **named)
    if plan.target not in FETCHABLE:
        try:
            resolve_model(plan.target)
        except InputError as err:
            raise InputError(f"{err}; or name one: --target MODEL --draft MODEL") from err
    return plan


def _replay(plan: Plan, wanted: list[ScoredCandidate], args: argparse.Namespace) -> Replay:
    from codesign.errors import HardwareError

    try:
        from codesign.engine.replay import Replay
    except ImportError as error:
        raise HardwareError(
            f"the engine needs {error.name}, which is not installed: pip install 'codesign[engine]'"
        ) from error
    settings = {name: getattr(args, name) for name in ("device", "padded_rows", "max_waiting")}
    replay = Replay(plan, args.plan, settings=settings)
    for scored in wanted:  # before models are loaded
        replay.policy(scored.candidate)
    return replay


def _engine(plan: Plan, wanted: list[ScoredCandidate], args: argparse.Namespace) -> PlanEngine:
    from codesign.engine.replicas import PlanEngine
    from codesign.engine.source import EngineSource
    from codesign.errors import UsageError
    from codesign.fit.step_pace import has_usual_rows

    if args.device == "cpu" and not has_usual_rows(vars(args)):
        raise UsageError(
            "--padded-rows is for --device cuda and cpu-ranks: on cpu no row is added. Leave it out"
        )
    source = EngineSource(plan, args.device, num_workers=_cores(args), padded_rows=args.padded_rows)
    engine = PlanEngine(source)
    engine.check([scored.candidate for scored in wanted])
    return engine


def _cores(args: argparse.Namespace) -> int:
    """CPU cores that the run may use.

    Raises:
        UsageError: If they were given for ranks.
        HardwareError: If the machine has fewer.
    """
    from codesign.artifacts.machine import check_cores, hardware
    from codesign.errors import UsageError

    if args.workers is None:
        return hardware()["cores"]
    if args.device != "cpu":
        raise UsageError(
            f"--workers is for --device cpu, of {args.device} the plan says how many. Leave it out"
        )
    check_cores(args.workers, "Leave --workers out: codesign run --plan PLAN")
    return args.workers


def _run_all(
    replay: Replay, engine: Engine, wanted: list[ScoredCandidate], args: argparse.Namespace
) -> list[MeasuredRun]:
    from codesign.busy_cores import core_times
    from codesign.engine.measured_run import run_directories

    runs = []
    directories = run_directories(args.out, wanted)
    for number, (scored, directory) in enumerate(zip(wanted, directories, strict=True), 1):
        run = replay.stored(scored, directory) if args.resume else None
        if run is None and args.device != "cpu" and not args.quiet:
            say(f"run {number} of {len(wanted)}, {scored.label}: ranks start and load the models")
        if run is None:
            start = core_times()
            with progress(args) as report:
                run = replay.run(
                    scored,
                    engine,
                    directory,
                    max_waiting=args.max_waiting,
                    progress=lambda _, done, total, label=scored.label: report(label, done, total),
                )
            end = core_times()
            # Ranks outlive a run: what they use is not known to be ours.
            if start and end and args.device == "cpu" and (warning := start.note(end)):
                say(f"{scored.label}: {warning}")
        for note in run.notes:
            say(f"{scored.label}: {note}")
        runs.append(run)
        if not run.is_complete:
            break
    return runs


def _as_dict(run: MeasuredRun) -> dict[str, Any]:
    return {
        "label": run.scored.label,
        "directory": str(run.directory),
        "metrics": run.metrics.to_dict(),
        "step_pace": run.step_pace,
        "notes": list(run.notes),
        "refused": run.refused,
    }
