"""The plans that the planner considers: deployments x policies x batch limits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from codesign.candidate import Candidate
from codesign.config import Deployment, Serving, parse_deployment
from codesign.errors import InputError, counted
from codesign.fit import SHEETS
from codesign.policy.speculation import SpeculationSpec, check_runs_in_engine, parse_policy

if TYPE_CHECKING:
    import pandas as pd

    from codesign.policy.cost import RoundCost

CHAIN_LENGTHS = (1, 2, 3, 4, 5, 6, 8)
TREE_ROWS = (4, 8, 16)
TREE_WIDTHS = (1, 2, 4)
TREE_EXPANSIONS = (1, 2, 3, 4)
ADAPTIVE_LENGTH = 5  # of threshold and specserve
BATCH_TREE = (16, 2, 8)  # most rows, leaves and forwards
BATCH_LIMITS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)

_MEASURE = "codesign profile --out profile"
_MOST_NAMED = 12  # splits that a note lists
MAX_PLAYED_TOKENS = 200_000  # output tokens of a trace up to which slow policies are searched, too


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Candidates, what runs them, and a note for each part of the space that is left out.

    Attributes:
        candidates: Simple policies first.
        notes: One line each.
    """

    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...]


def default_policies() -> list[SpeculationSpec]:
    """All policies that are tried unless the user restricts them, simple ones first."""
    specs = [SpeculationSpec()]
    specs += [SpeculationSpec(kind="chain", max_depth=depth) for depth in CHAIN_LENGTHS]
    specs += [
        SpeculationSpec(kind="threshold", max_depth=ADAPTIVE_LENGTH),
        SpeculationSpec(kind="specserve", max_depth=ADAPTIVE_LENGTH),
    ]
    rows, width, expansions = BATCH_TREE
    specs += [
        SpeculationSpec(
            kind="batch-tree", is_async=is_async, rows=rows, width=width, expansions=expansions
        )
        for is_async in (False, True)
    ]
    shapes = list(product(TREE_ROWS, TREE_WIDTHS, TREE_EXPANSIONS))
    specs += [
        SpeculationSpec(
            kind="tree", is_async=is_async, rows=rows, width=width, expansions=expansions
        )
        for is_async in (False, True)
        for rows, width, expansions in shapes
    ]
    return specs


def deployments(workers: int, costs: Mapping[str, RoundCost]) -> list[Deployment]:
    """Every priced way to use all workers: one group, replicas, draft apart, prompts apart.

    Tensor parallel groups that do not divide a model are left to the fit: it has no step times for
    them. Those without a pool for prompts come first, larger groups before more replicas.
    """
    units = [parse_deployment(label) for label in costs]
    largest = sorted(units, key=lambda unit: (-unit.num_workers, unit.draft_workers))
    pools = sorted(unit.target_workers for unit in units if not unit.draft_workers)
    found = []
    for prefill in (0, *(pool for pool in pools if pool < workers)):
        for unit in largest:
            replicas, rest = divmod(workers - prefill, unit.num_workers)
            if rest == 0 and replicas:
                found.append(Deployment(unit.target_workers, unit.draft_workers, replicas, prefill))
    return found


def search_space(
    costs: Mapping[str, RoundCost],
    *,
    workers: int,
    max_batch: int,
    policies: Sequence[str] = (),
    runnable: bool = False,
    serving: Serving | None = None,
    requests: pd.DataFrame | None = None,
    origin: str = "fitted",
    measure: str = _MEASURE,
) -> SearchSpace:
    """Candidates that use all workers and hold every request.

    Args:
        costs: Step times by label of what was measured, for example "4", "3+1".
        workers: Workers of the machine; every candidate uses all of them.
        max_batch: Largest batch limit of a replica.
        policies: Labels to restrict the search to; none for ``default_policies``. Plain decoding
            on all workers is always among the candidates.
        runnable: Leave out what ``codesign run`` does not serve.
        serving: Its limit of KV rows; otherwise what the step times say that the memory holds.
        requests: Prepared trace, to leave out what cannot hold its longest request.
        origin: Of the step times; those in SHEETS are of every split that holds the weights.
        measure: Command that measures what has no step times.

    Raises:
        InputError: If a label names no policy, or one that must be runnable and is not, or nothing
            remains.
    """
    specs = list(dict.fromkeys(map(parse_policy, policies))) or default_policies()
    if runnable:
        for spec in specs:
            check_runs_in_engine(spec)
    slow = [] if policies or requests is None else _too_slow(specs, requests)
    specs = [spec for spec in specs if spec not in slow]
    wanted = {spec.is_async for spec in specs}
    usable = [d for d in deployments(workers, costs) if (d.draft_workers > 0) in wanted]
    why = _why_without_pools(serving, runnable)
    pools = [d for d in usable if d.prefill_workers] if why else []
    usable = [d for d in usable if d not in pools]
    limit = None if serving is None else serving.max_kv_tokens
    longest = 0 if requests is None else longest_request(requests)
    pairs = [(d, spec) for spec, d in product(specs, usable) if _suits(d, spec)]
    held = [pair for pair in pairs if _holds(*pair, costs, limit, longest)]
    too_small = {d.label for d, _ in set(pairs) - set(held)}
    if not held:
        room = max((_room(*pair, costs, limit) for pair in pairs), default=0)
        raise InputError(
            _nothing_remains(costs, workers, specs, too_small, (longest, room), measure)
        )
    null, whole = SpeculationSpec(), Deployment(workers)
    if null not in specs and whole.label in costs and _holds(whole, null, costs, limit, longest):
        held.append((whole, null))
    candidates = [Candidate(*pair, size) for pair in held for size in batch_limits(max_batch)]
    left_out = too_small - {d.label for d, _ in held}
    measure = "" if origin in SHEETS else measure
    notes = (
        *_notes(costs, workers, wanted, measure),
        *_notes_of_slow(slow),
        *_notes_of_small(left_out, longest),
        *([f"not searched: pools for prompts, {why}"] if pools else []),
    )
    return SearchSpace(tuple(candidates), notes)


def _why_without_pools(serving: Serving | None, runnable: bool) -> str:
    """Why nothing with workers for prompts alone can be chosen; "" if it can."""
    if serving is not None and serving.scheduling == "slo":
        return "which serve who comes first"
    return "which the engine here has not (--runnable)" if runnable else ""


def _too_slow(specs: Sequence[SpeculationSpec], requests: pd.DataFrame) -> list[SpeculationSpec]:
    """Policies that decide by the whole batch: the simulator plays each of their rounds."""
    tokens = int(np.asarray(requests["output_tokens"], np.int64).sum())
    return [s for s in specs if s.needs_step_times] if tokens > MAX_PLAYED_TOKENS else []


def _notes_of_slow(slow: Sequence[SpeculationSpec]) -> list[str]:
    if not slow:
        return []
    return [
        f"not searched, too slow to simulate on a trace of this length: "
        f"{', '.join(s.label for s in slow)}. Search them: --policies LABEL,..., or a shorter "
        "trace: --slice or --max-requests"
    ]


def _notes_of_small(left_out: Collection[str], longest: int) -> list[str]:
    if not left_out:
        return []
    names = ", ".join(sorted(left_out))
    return [f"not searched, KV memory below the longest request ({longest:,}): {names}"]


def batch_limits(max_batch: int) -> list[int]:
    """The batch limits that are tried, the largest one last."""
    return [*(limit for limit in BATCH_LIMITS if limit < max_batch), max_batch]


def longest_request(requests: pd.DataFrame) -> int:
    """KV rows of the longest prompt with its answer."""
    both = np.asarray(requests["prompt_tokens"] + requests["output_tokens"], np.int64)
    return int(both.max(initial=0))


def _suits(deployment: Deployment, spec: SpeculationSpec) -> bool:
    """Whether drafts have workers of their own in one exactly if they have in the other."""
    return (deployment.draft_workers > 0) == spec.is_async


def _holds(
    deployment: Deployment,
    spec: SpeculationSpec,
    costs: Mapping[str, RoundCost],
    limit: int | None,
    longest: int,
) -> bool:
    """Whether the longest request fits a replica, and the workers for prompts if there are any."""
    room = costs[deployment.unit.label].kv_room(limit, has_draft=spec.has_draft)
    if room is not None and longest + spec.kv_rows > room:
        return False
    if not deployment.prefill_workers:
        return True
    room = costs[str(deployment.prefill_workers)].kv_room(limit, has_draft=False)
    return room is None or longest <= room


def _room(
    deployment: Deployment,
    spec: SpeculationSpec,
    costs: Mapping[str, RoundCost],
    limit: int | None,
) -> int:
    """KV rows of a replica, or of the workers for prompts if these hold fewer; 0 if unknown."""
    rooms = [costs[deployment.unit.label].kv_room(limit, has_draft=spec.has_draft)]
    if deployment.prefill_workers:
        rooms.append(costs[str(deployment.prefill_workers)].kv_room(limit, has_draft=False))
    return min((room for room in rooms if room is not None), default=0)


def _notes(
    costs: Mapping[str, RoundCost], workers: int, wanted: Collection[bool], measure: str
) -> list[str]:
    """What was not measured, of the shapes that are one group or one split.

    Data sheets price every split that holds the weights: others need no profile, ``measure`` is
    "".
    """
    splits = [Deployment(workers - draft, draft) for draft in range(workers)]
    shapes = [d.label for d in splits if (d.draft_workers > 0) in wanted]
    missing = [label for label in shapes if label not in costs]
    names = ", ".join(missing[:_MOST_NAMED])
    names += f" and {more:,} more" if (more := len(missing) - _MOST_NAMED) > 0 else ""
    notes = []
    if missing and not measure:
        notes.append(f"not searched, the weights do not fit: {names}")
    elif missing:
        notes.append(
            f"not searched, no step times: {names}. Add them: {measure}, then codesign fit profile"
        )
    if workers == 1 and True in wanted:
        notes.append("not searched: asynchronous trees, which need at least 2 workers")
    return notes


def _nothing_remains(
    costs: Mapping[str, RoundCost],
    workers: int,
    specs: Sequence[SpeculationSpec],
    too_small: Iterable[str],
    needed_and_held: tuple[int, int],
    measure: str,
) -> str:
    labels = ", ".join(costs) or "nothing"
    names = ", ".join(sorted(too_small))
    if names:
        needed, held = needed_and_held
        return (
            f"the longest request needs {needed:,} KV rows and a round's draft, more than fit any "
            f"deployment ({names}: at most {held:,}). Cut or scale requests: --max-prompt N, "
            "--max-output N, --length-scale X; or raise --max-kv-tokens"
        )
    if deployments(workers, costs):
        return (
            f"none of the policies {', '.join(s.label for s in specs)} runs on what the fit has "
            f"step times for with {counted(workers, 'worker')}: {labels}. Restrict --policies less"
        )
    return (
        f"the fit has no step times for {counted(workers, 'worker')}, only for {labels}. "
        f"Measure them: {measure}, then codesign fit profile; or plan for those of the fit: "
        "--workers N"
    )
