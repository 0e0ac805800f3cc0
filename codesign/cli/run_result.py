"""What ``codesign run`` prints for people: figures beside predictions, and what to do next."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

from codesign.cli.tables import table
from codesign.errors import counted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from codesign.engine.measured_run import MeasuredRun
    from codesign.plan import Plan


def next_command(
    plan_file: Path, runs: Sequence[MeasuredRun], *, is_whole: bool, resumes: bool
) -> str:
    """What to type after runs of a plan: the same again if one of them was cut.

    Args:
        plan_file: As it was named.
        runs: That were made or found.
        is_whole: Whether all that was asked for is complete.
        resumes: Whether what was typed has ``--resume``, which torchrun does not take.
    """
    from codesign.artifacts import command_line

    if not is_whole and "TORCHELASTIC_RUN_ID" in os.environ:
        return _torchrun_command()
    if not is_whole:
        return command_line() + ("" if resumes else " --resume")
    words = ("codesign", "validate", "--plan", plan_file, "--run", *(r.directory for r in runs))
    return shlex.join(map(str, words))


def _torchrun_command() -> str:
    """What started this process, as far as torchrun tells: not where its hosts meet."""
    hosts = os.environ.get("GROUP_WORLD_SIZE", "1")
    words = ["torchrun"] if hosts == "1" else ["torchrun", "--nnodes", hosts]
    words += ["--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], "-m", "codesign", *sys.argv[1:]]
    where = "" if hosts == "1" else " on each host, with the flags of its rendezvous:"
    return f"{shlex.join(words)}  #{where} from the start, as torchrun resumes nothing"


def result_text(plan: Plan, runs: Sequence[MeasuredRun], then: str) -> str:
    """The figures of each run beside its prediction, whether they agree, and what to type next."""
    from codesign.engine.measured_run import agreement

    columns = ["measured (predicted)", "TTFT p50 ms", "TPOT ms", "tokens/s", "tok/round"]
    columns += ["SLO %"] if plan.slo.is_set else []
    rows = []
    for run in runs:
        m, predicted = run.metrics, run.scored.predicted
        rows.append(
            [
                run.scored.label,
                _pair(m.ttft_p50, predicted.get("ttft_p50"), 1e3, 0),
                _pair(m.tpot_mean, predicted.get("tpot_mean"), 1e3, 1),
                _pair(m.throughput, predicted.get("throughput"), 1.0, 1),
                _pair(m.acceptance_length, predicted.get("acceptance_length"), 1.0, 2),
                _pair(m.slo_attainment, predicted.get("slo_attainment"), 100.0, 0),
            ][: len(columns)]
        )
    lines = [table(columns, rows)]
    if len(runs) > 1:
        lines.append(f"lossless  {counted(plan.num_requests, 'request')}, {agreement(runs)}")
    lines.append(f"next      {then}")
    return "\n".join(lines)


def _pair(measured: float | None, predicted: Any, scale: float, digits: int) -> str:
    left = "-" if measured is None else f"{measured * scale:,.{digits}f}"
    right = "-" if predicted is None else f"{predicted.value * scale:,.{digits}f}"
    return f"{left} ({right})"
