"""What ``codesign validate`` says of runs that are not whole, and the command that mends them."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from codesign.plan import Plan
    from codesign.validate import RunComparison


def unfinished_text(runs: Sequence[RunComparison], plan: Plan, plan_file: str) -> str:
    """Why the first of ``runs`` cannot be validated, and what to type: one that was cut, if any.

    Args:
        runs: Each with requests that did not finish.
        plan: That they are held against.
        plan_file: As it was named.
    """
    run = next((run for run in runs if run.num_cut), runs[0])
    total = f"of {len(run.requests):,} requests"
    if run.num_cut:
        again = again_command(run, plan, plan_file) + " --resume"
        return (
            f"{run.label}: {run.num_cut:,} {total} did not finish, so the run cannot be "
            f"validated. Complete it: {again}"
        )
    number, why = next(iter(run.refused.items()))
    text = (
        f"{run.label}: {len(run.refused):,} {total} refused, so the run cannot be validated: "
        f"the prediction serves all. Request {number}: {why}"
    )
    if _max_waiting(run) is None:
        return text
    return f"{text}. Serve all: {again_command(run, plan, plan_file, refuses=False)}"


def again_command(run: RunComparison, plan: Plan, plan_file: str, *, refuses: bool = True) -> str:
    """``codesign run`` as it made ``run``: with other flags ``--resume`` would replace it.

    Args:
        run: Of ``plan``.
        plan: Whose models need not be named.
        plan_file: As it was named.
        refuses: With its ``--max-waiting``.
    """
    from codesign.fit.step_pace import has_usual_rows

    words = ["codesign", "run", "--plan", plan_file, "--candidate", run.label]
    served = run.served
    if served is not None:
        for role, model, planned in (
            ("target", served.target, plan.target),
            ("draft", served.draft, plan.draft),
        ):
            words += [f"--{role}", model] if model and model != planned else []
        words += ["--device", served.device] if served.device != "cpu" else []
    if not has_usual_rows(run.settings) and run.settings.get("device") != "cpu":
        words += ["--padded-rows", str(run.settings["padded_rows"])]
    if refuses and (waiting := _max_waiting(run)) is not None:
        words += ["--max-waiting", str(waiting)]
    return shlex.join([*words, "--out", str(run.path.parent)])


def _max_waiting(run: RunComparison) -> int | None:
    return run.settings.get("max_waiting")
