"""``codesign plan``: search for the plan that meets the SLO on a trace."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from codesign.cli.argument_types import non_negative, out_file, positive
from codesign.cli.fit_argument import add_fit_argument, fit_from_args
from codesign.cli.output import add_output_arguments, emit, progress, say
from codesign.cli.plan_result import next_command, result_text
from codesign.cli.serving_arguments import (
    add_serving_arguments,
    add_slo_arguments,
    serving_from_args,
    slo_from_args,
)
from codesign.cli.trace_argument import add_trace_arguments, check_targets, trace_from_args
from codesign.errors import InfeasibleError, UsageError, counted

if TYPE_CHECKING:
    from pathlib import Path

    from codesign.file_ref import FileRef
    from codesign.fit import Fit
    from codesign.planner import Answer, Question
    from codesign.planner.search_cache import SearchCache
    from codesign.traces import Trace

_EXAMPLES = """\
examples:
  codesign plan --trace conv-twin --slice 0:60 --rate-scale 0.1 --max-prompt 256 --max-output 64
  codesign plan --trace azure-conv --device h100 --gpus 8 --target llama-3-70b:int4 \\
      --draft llama-3.2-1b:int4 --slo-ttft-ms 1000 --slo-tpot-ms 50 --preemption --out conv.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``codesign plan`` takes."""
    parser.description = (
        "Search policies, splits of the machine and batch limits for the plan that "
        "meets the SLO on a trace."
    )
    parser.epilog = _EXAMPLES
    add_trace_arguments(parser)
    machine = parser.add_argument_group("hardware")
    add_fit_argument(machine)
    machine.add_argument(
        "--workers",
        type=positive,
        metavar="N",
        help="CPU threads or GPUs to use (all that the fit has)",
    )
    add_serving_arguments(machine)
    add_slo_arguments(parser, with_percentile=True)
    search = parser.add_argument_group("search")
    search.add_argument(
        "--objective",
        choices=("goodput", "latency", "fewest"),
        default="goodput",
        help="goodput: most requests/s within the SLO; latency: lowest mean TPOT of the plans that "
        "bear the load; fewest: as goodput, on the fewest workers that do and meet the SLO "
        "(goodput)",
    )
    search.add_argument(
        "--max-batch",
        type=positive,
        metavar="N",
        help="largest batch limit of a replica to try (256; 8 if the fit has no memory limit)",
    )
    search.add_argument(
        "--policies",
        metavar="LABEL,...",
        help="only these and plain decoding, e.g. chain-3,tree-8x4x2",
    )
    search.add_argument(
        "--runnable",
        action="store_true",
        help="only plans that the engine here runs: without workers for prompts alone",
    )
    search.add_argument(
        "--seed", type=non_negative, default=0, help="seed of prompts and simulations (0)"
    )
    search.add_argument(
        "--executor",
        choices=("local", "ray"),
        default="local",
        help="simulate on all cores of this machine or on a Ray cluster (local)",
    )
    search.add_argument(
        "--processes", type=positive, metavar="N", help="simulations in parallel (all cores)"
    )
    search.add_argument(
        "--resume",
        action="store_true",
        help="take the simulations that the last search kept, also an interrupted one",
    )
    files = parser.add_argument_group("files")
    files.add_argument("--out", default="plan.json", metavar="FILE", help="plan (plan.json)")
    add_output_arguments(parser)
    parser.set_defaults(func=make_plan)


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """What ends a job on a cluster ends a search as a user does, with what is finished kept.

    A time limit tells the process and then its group: the second time must not kill it before it
    has said what it kept.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are the main one's
        yield
        return

    def stop(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is stop:
            signal.signal(signal.SIGTERM, before)


@_sigterm_as_ctrl_c()
def make_plan(args: argparse.Namespace) -> None:
    """Search, write the plan and the prepared trace, print the result.

    With ``--json`` that nothing meets the SLO is a result, too: a plan of null, and the reason.
    """
    import time

    from codesign.file_ref import FileRef
    from codesign.planner.defaults import most_requests
    from codesign.planner.plan_file import save_plan
    from codesign.planner.predict import prompt_note
    from codesign.planner.prepared_trace import long_trace_note, prepare_trace

    out = _out(args)
    fit, fit_file = fit_from_args(args)
    trace = trace_from_args(args, most=most_requests(fit))
    check_targets(args, trace)
    prepared = prepare_trace(trace, fit.target, seed=args.seed, max_requests=len(trace))
    for note in prepared.notes[len(trace.notes) :]:
        say(f"trace {trace.name}: {note}")
    if note := prompt_note(fit, prepared.requests):
        say(f"fit: {note}")
    if note := long_trace_note(len(prepared)):
        say(f"trace {trace.name}: {note}")
    question = _question(args, fit, prepared)
    start = time.monotonic()
    try:
        answer = _search(args, question, FileRef.of(fit_file), out)
    except InfeasibleError as err:
        if args.json:
            emit(args, {"plan": None, "chosen": None, "reason": str(err)}, "")
        raise
    seconds = time.monotonic() - start
    plan = save_plan(out, question, answer, trace=prepared, fit_file=fit_file)
    payload = {
        "plan": out,
        "chosen": plan.chosen.to_dict(),
        "alternatives": [scored.to_dict() for scored in plan.alternatives],
        "ties": plan.ties,
        "reason": plan.reason,
        "runner_up": plan.runner_up,
        "economics": plan.economics,
        "doubts": plan.doubts,
        "notes": plan.notes,
        "serving": plan.serving,
        "num_candidates": answer.num_candidates,
        "num_simulated": answer.num_simulated,
        "num_feasible": answer.num_feasible,
        "screen_seconds": answer.screen_seconds,
        "search_seconds": seconds,
    }
    then = next_command(plan, out, fit)
    emit(args, payload, lambda: result_text(plan, prepared, fit, answer, seconds, then))


def _out(args: argparse.Namespace) -> Path:
    """Where the plan goes; the trace beside it must not be the one that is read."""
    from pathlib import Path

    from codesign.planner.plan_file import trace_beside

    out = out_file(args.out, "plan.json", reads=(args.trace, args.fit or "fit.json"))
    written, read = trace_beside(out), Path(args.trace)
    if written.is_file() and read.is_file() and written.samefile(read):
        raise UsageError(
            f"--out {out} would overwrite {written}, which is read. Name another: --out FILE"
        )
    return out


def _question(args: argparse.Namespace, fit: Fit, prepared: Trace) -> Question:
    from codesign.fit.what_if import measured_note
    from codesign.planner import Question
    from codesign.planner.defaults import all_workers, largest_batch

    if args.gpus is not None and (args.workers or 0) > args.gpus:
        raise UsageError(f"--workers {args.workers} is more than --gpus {args.gpus}. Ask for fewer")
    note = "" if args.device is None else measured_note(fit, args.device)
    return Question(
        requests=prepared.requests,
        fit=fit,
        slo=slo_from_args(args),
        serving=serving_from_args(args, fit),
        objective=args.objective,
        workers=all_workers(fit) if args.workers is None else args.workers,
        max_batch=largest_batch(fit) if args.max_batch is None else args.max_batch,
        policies=tuple(args.policies.split(",")) if args.policies is not None else (),
        runnable=args.runnable,
        seed=args.seed,
        rate_scale=args.rate_scale or 1.0,
        notes=tuple(filter(None, [note])),
    )


def _search(args: argparse.Namespace, question: Question, fit_ref: FileRef, out: Path) -> Answer:
    from codesign.artifacts import beside
    from codesign.planner import search, task_of
    from codesign.planner.executor import open_executor
    from codesign.planner.fewest import FEWEST, search_fewest

    kept = beside(out, "search.jsonl")
    cache = _opened(question, fit_ref, kept, resume=args.resume)
    try:
        with (
            open_executor(task_of(question), args.executor, processes=args.processes) as executor,
            progress(args) as report,
        ):
            find = search_fewest if question.objective == FEWEST else search
            answer = find(question, executor=executor, cache=cache, progress=report)
    except KeyboardInterrupt:
        if not len(cache):
            raise
        raise KeyboardInterrupt(
            f"kept {counted(len(cache), 'simulation')} in {kept}; "
            "to continue repeat the command with --resume"
        ) from None
    except InfeasibleError as err:
        if not len(cache):
            raise
        raise InfeasibleError(f"{err}. {_kept_text(cache, kept)}") from err
    if len(cache):
        say(_kept_text(cache, kept))
    return answer


def _opened(question: Question, fit_ref: FileRef, kept: Path, *, resume: bool) -> SearchCache:
    """What earlier searches kept, said on stderr where it is asked for."""
    from codesign.planner import task_of
    from codesign.planner.search_cache import SearchCache, SearchKey

    is_kept = kept.exists()
    key = SearchKey(task_of(question), fit_ref.sha256)
    cache = SearchCache(key, kept, resume=resume, warn=say)
    if resume and not is_kept:
        say(f"resume: there is no {kept}, in which a search keeps its simulations; from the start")
    elif resume:
        found = counted(len(cache), "simulation") if len(cache) else "no simulations"
        say(f"resume: {kept} has {found} that hold for this trace, fit, SLO and way of serving")
    return cache


def _kept_text(cache: SearchCache, kept: Path) -> str:
    """Where a search's simulations are, and what they save whom."""
    count, free = len(cache), cache.num_of_any_slo
    what, whom = f"{counted(count, 'simulation')} kept in {kept}", "objective or choice of policies"
    if cache.num_lost:
        return f"{what}, {cache.num_lost:,} more could not be"
    if free == count:
        return f"{what}: with --resume another SLO, {whom} needs few others"
    which = f", {free:,} of them for any SLO" if free else ", for this SLO alone"
    return f"{what}{which}: with --resume another {whom} needs few others"
