"""Plans as configurations of other engines: vLLM, SGLang, TensorRT-LLM.

A candidate of a plan becomes the nearest setup that the engine can run, with a list of what it
cannot and what was done instead, and with what our model predicts for it.

    setup       nouns: what is served, what the engine is given, what is lost
    models      checkpoints that the engine is to load
    wishes      what each policy asks for
    problem     a candidate, its fit and an engine
    nearest     from these to a setup, with its groups of GPUs (groups) and lengths (lengths)
    vllm, sglang, trtllm   from a setup to command lines and files
    prediction  the simulator's word on the result

Imports no torch and asks no network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from codesign import Progress
from codesign.artifacts import read_json
from codesign.errors import InputError
from codesign.export import sglang, trtllm, vllm
from codesign.export.models import (
    EngineModel,
    MissingNameError,
    ask_for,
    check_pair,
    engine_model,
    position_note,
)
from codesign.export.nearest import Nearest, find_nearest
from codesign.export.prediction import Forecast, better_candidate, forecast, runs_as_is
from codesign.export.problem import Problem
from codesign.export.setup import Configuration, Engine, Loss, Method
from codesign.fit import EXTRAPOLATED, ROOFLINE
from codesign.fit.extrapolated import origin_text
from codesign.fit.shipped import is_of_gpus
from codesign.models import NGRAM

if TYPE_CHECKING:
    from codesign.candidate import ScoredCandidate
    from codesign.fit import Fit
    from codesign.plan import Plan

__all__ = ["ENGINES", "Checkpoints", "Export", "closest_engine", "export_plan"]

ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (vllm.ENGINE, sglang.ENGINE, trtllm.ENGINE)
}


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Hugging Face names or folders that replace what the plan names; None to go by the plan.

    Attributes:
        target: Of the target.
        draft: Of the draft.
        head: EAGLE head of the target, for policies that draft with one.
    """

    target: str | None = None
    draft: str | None = None
    head: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Export:
    """A candidate as a configuration of an engine.

    Attributes:
        engine: Which.
        scored: The candidate.
        nearest: What of it the engine can run.
        configuration: What the engine is given.
        forecast: Predictions for both; None where the fit has no step times for the export.
        better: Label of a candidate of the plan that the engine runs as it is and that is
            predicted to serve better than the export; "" if there is none.
        losses: All that the engine cannot express.
        notes: What a reader must know.
    """

    engine: Engine
    scored: ScoredCandidate
    nearest: Nearest
    configuration: Configuration
    forecast: Forecast | None
    better: str
    losses: tuple[Loss, ...]
    notes: tuple[str, ...]


def export_plan(
    plan: Plan,
    fit: Fit,
    engine: Engine,
    *,
    candidate: str = "",
    checkpoints: Checkpoints | None = None,
    tensor_parallel: int | None = None,
    progress: Progress | None = None,
) -> Export:
    """The nearest configuration of an engine.

    Args:
        plan: What to export from.
        fit: The plan's.
        engine: One of ENGINES.
        candidate: See ``Plan.find``.
        checkpoints: What to load instead of what the plan names.
        tensor_parallel: GPUs of one copy; None for the size that decodes fastest.
        progress: Called with ("simulate", done, total), and the same of another candidate.

    Raises:
        InputError: If the candidate makes no sense on any engine: see docs/export.md.
    """
    given = Checkpoints() if checkpoints is None else checkpoints
    problem = _problem(plan, plan.find(candidate), fit, engine, given, tensor_parallel)
    nearest = find_nearest(problem)
    configuration = engine.write(nearest.setup)
    found = _forecast(problem, nearest, progress)
    better = ""
    if found is not None:
        better = better_candidate(
            plan,
            found,
            problem.scored,
            fit,
            problem.requests,
            runs=lambda other: _runs(other, problem, given),
            progress=progress,
        )
    models = (problem.target, problem.draft)
    notes = [model.note for model in models if model is not None and model.note]
    if problem.method == "draft" and problem.draft is not None:
        notes.append(position_note(problem.draft, nearest.setup.longest_request))
    return Export(
        engine,
        problem.scored,
        nearest,
        configuration,
        found,
        better,
        (*nearest.losses, *configuration.losses),
        tuple(filter(None, (*notes, *configuration.notes, *_plan_notes(problem, nearest)))),
    )


def closest_engine(plan: Plan, fit: Fit) -> Engine | None:
    """The engine that leaves out the fewest parts of a plan's choice; None if none can be asked.

    Checkpoints are those that the plan names; of heads and int4 weights it names none.
    """
    losses: dict[str, int] = {}
    for name, engine in ENGINES.items():
        try:
            nearest = find_nearest(_problem(plan, plan.chosen, fit, engine, Checkpoints(), None))
        except InputError:
            continue
        losses[name] = len(nearest.losses) + len(engine.write(nearest.setup).losses)
    return ENGINES[min(losses, key=losses.__getitem__)] if losses else None


def _problem(
    plan: Plan,
    scored: ScoredCandidate,
    fit: Fit,
    engine: Engine,
    given: Checkpoints,
    tensor_parallel: int | None,
) -> Problem:
    method = _method(plan, scored, engine)
    target, draft = _models(plan, method, given)
    return Problem(
        plan,
        scored,
        fit,
        plan.requests(),
        engine,
        method,
        target,
        draft,
        is_cpu=_is_cpu(plan, fit),
        tensor_parallel=tensor_parallel,
        is_vocab_padded=draft is not None and method == "draft" and check_pair(target, draft),
    )


def _forecast(problem: Problem, nearest: Nearest, progress: Progress | None) -> Forecast | None:
    """What is predicted for the export; None if nothing that can be simulated stands for it."""
    if nearest.candidate is None:
        return None
    setup, note = nearest.setup, ""
    if setup.schedule:
        note = "the length of its mean batch stands for the lengths by batch size"
    elif nearest.candidate.speculation.kind == "eagle" and not setup.is_tree and setup.rows > 2:
        note = "a tree of one leaf a forward stands for the chain, which has no siblings"
    return forecast(
        problem.plan,
        problem.scored,
        nearest.candidate,
        problem.fit,
        problem.requests,
        note=note,
        progress=progress,
    )


def _runs(other: ScoredCandidate, problem: Problem, given: Checkpoints) -> bool:
    """Whether the export of another candidate of the plan is that candidate."""
    if not runs_as_is(other.candidate, problem.engine):
        return False
    try:
        own = _problem(problem.plan, other, problem.fit, problem.engine, given, None)
        return find_nearest(own).candidate == other.candidate
    except InputError:
        return False


def _method(plan: Plan, scored: ScoredCandidate, engine: Engine) -> Method:
    spec = scored.candidate.speculation
    if not spec.has_draft:
        return "plain"
    if spec.kind != "eagle":
        return "ngram" if plan.draft == NGRAM else "draft"
    # Heads trained on their own features lose nothing by reading them: EAGLE-3.
    method: Method = "eagle3" if spec.feature_decay == 1.0 else "eagle"
    if method not in engine.methods:
        raise InputError(
            f"{engine.title} loads EAGLE-3 heads only, and {spec.label} is an earlier one. Plan "
            "with @1 (--policies eagle-RxWxE@1), or export to vllm or sglang"
        )
    return method


def _models(
    plan: Plan, method: Method, given: Checkpoints
) -> tuple[EngineModel, EngineModel | None]:
    """The target, and the draft or head if there is one.

    Raises:
        InputError: That asks at once for all that is missing.
    """
    missing: list[MissingNameError] = []
    target, draft = _found("target", plan.target, given.target, missing), None
    if method == "draft":
        draft = _found("draft", plan.draft, given.draft, missing)
    elif method in ("eagle", "eagle3") and given.head is None:
        name = given.target or plan.target
        missing.append(MissingNameError(f"a head that was trained for {name}", "--head"))
    if missing or target is None:
        raise InputError(ask_for(missing))
    if given.head is not None and method in ("eagle", "eagle3"):
        draft = EngineModel(given.head, target.shape)  # cut as its target is
    return target, draft


def _found(
    role: str, planned: str, given: str | None, missing: list[MissingNameError]
) -> EngineModel | None:
    """A model of the plan; None if its name is missing, which ``missing`` then says."""
    try:
        return engine_model(role, planned, given)
    except MissingNameError as err:
        missing.append(err)
        return None


def _is_cpu(plan: Plan, fit: Fit) -> bool:
    """Whether the plan's workers are threads: no GPU was measured, nor taken from a data sheet."""
    return fit.origin != ROOFLINE and not is_of_gpus(read_json(plan.fit.path, kind="fit"))


def _plan_notes(problem: Problem, nearest: Nearest) -> list[str]:
    setup, fit = nearest.setup, problem.fit
    notes = [
        f"sized for requests of up to {setup.longest_request:,} tokens, the longest of the plan's "
        "trace; longer ones are refused"
    ]
    if setup.method != "plain":
        sampling = problem.plan.sampling
        how = (
            "greedily" if sampling.temperature == 0 else f"at temperature {sampling.temperature:g}"
        )
        notes.append(f"the acceptance is of requests that sample {how}; ask for the same")
    both = (problem.candidate, nearest.candidate)
    if any(each and fit.origin_of(each.deployment) == EXTRAPOLATED for each in both):
        notes.append(f"the step times of what is predicted were {origin_text(fit, EXTRAPOLATED)}")
    return notes
