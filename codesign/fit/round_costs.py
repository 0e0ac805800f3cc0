"""Costs of a round by deployment, from the timings of a profile.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from codesign.errors import InputError
from codesign.fit.children import NODES, WIDE, child_seconds, without_children
from codesign.fit.least_squares import fit_means
from codesign.fit.served_rounds import FEWEST, for_each, joining, shifted, with_ahead, with_loop
from codesign.fit.steps import MEASURE, StepFit, fit_step
from codesign.policy.cost import RoundCost, StepTime

KV_ROOMS = ("kv_tokens", "plain_kv_tokens")  # ops whose rows say what fits, in no time
DECIDING = "deciding"  # op whose rows say what a look at so many requests takes a batch's policy
CHOICE = "choice"  # op whose rows say what naming the candidates takes
PACE = "pace"  # op whose rows say what a plain round took the host from moment to moment
DRAFTED = "drafted"  # op whose rows say what a chain of so many forwards took in a served round
MISSED = "missed"  # op whose rows say what rounds took the draft that began with a lone forward
KEPT = ("kept_trees", "kept_nodes")  # likewise: what re-roots kept, and its nodes but the roots
COUNTED = (NODES, *KEPT)
PROMPTS = ("prefill", "draft_prefill")
FORWARDS = ("target", "draft", *PROMPTS)
_MAX_SLOWDOWN = 0.95
_NOTHING = StepTime(0.0, (0, 1), (0.0, 0.0))
_TIMED_IN_A_ROW = 3  # forwards of a draft whose mean is a timing


def fit_costs(
    steps: pd.DataFrame, *, on_ranks: bool = False
) -> tuple[dict[str, RoundCost], dict[str, StepFit], dict[str, float]]:
    """Round costs by deployment, the fits behind them, and held-out errors by "deployment/op".

    A draft with workers of its own nearly always runs beside the target, so its times are taken
    there; the target's are taken alone, and ``slowdown`` says what the draft costs it.

    Args:
        steps: Rows of steps.parquet.
        on_ranks: Rank groups run each prompt by itself, also of requests that start together.

    Raises:
        InputError: If a deployment lacks a kind of step.
    """
    costs: dict[str, RoundCost] = {}
    fits: dict[str, StepFit] = {}
    errors: dict[str, float] = {}
    told: set[str] = set()  # deployments whose own rows of forwards say what the first waits for
    for label, part in steps.groupby("deployment", sort=False):
        label, is_split = str(label), "+" in str(label)
        child = _child_seconds(part, is_split=is_split)
        forwards = _fit_forwards(part, label, child, on_ranks=on_ranks)
        constants, besides = _fit_constants(part, label)
        found = {op: fit.error for op, fit in forwards.items()} | besides
        errors |= {f"{label}/{op}": error for op, error in found.items()}
        fits |= {f"{label}/{op}": fit for op, fit in forwards.items()}
        alone = {op: fit.time for op, fit in forwards.items()}
        times, served = _as_served(alone, part, constants, is_split=is_split)
        constants |= served | {"child": child}
        if "first_alone" in served:
            told.add(label)
        if on_ranks:
            times |= {op: replace(times[op], apart=True) for op in PROMPTS}
        # Both engines run a chunk of prompts in a forward of its own, beside the round's.
        costs[label] = RoundCost(**times, **constants, shares_forwards=False)
    if not costs:
        raise InputError(f"the profile has no timings. {MEASURE}")
    return _with_first_forwards(costs, told), fits, errors


def _fit_constants(part: pd.DataFrame, label: str) -> tuple[dict[str, Any], dict[str, float]]:
    """What a deployment takes between forwards, and the errors of that."""
    is_split, constants, errors = "+" in label, dict[str, Any](), dict[str, float]()
    has_choice = bool((part["op"] == CHOICE).any())  # else in the re-root
    for op in ("reroot", *[CHOICE] * has_choice, *["link"] * is_split):
        timed = _timings(part, label, op, beside=None)
        found, errors[op] = _between_steps(timed, op, keeps_trees=is_split)
        constants |= found
    if is_split:
        constants["slowdown"] = fit_slowdown(_timings(part, label, "target", beside=None))
    return constants | _kv_rooms(part) | _deciding(part), errors


def _as_served(
    times: dict[str, StepTime],
    part: pd.DataFrame,
    constants: Mapping[str, float],
    *,
    is_split: bool,
) -> tuple[dict[str, StepTime], dict[str, float]]:
    """Forwards as rounds have them, and constants of these rounds.

    Args:
        times: Forwards by themselves, by op.
        part: Timings of their deployment.
        constants: What is between forwards.
        is_split: Whether the draft has ranks of its own.
    """
    target = with_loop(times["target"], part)
    served = joining(target, part)  # of rounds that waited for the host
    found = times | {"target": target if is_split else with_ahead(target, part)}
    chains = part.loc[part["op"] == DRAFTED]
    if len(set(chains["rows"])) > 1:
        besides = "first_alone" if is_split else "choice_alone"
        if not is_split:
            chains = _without_choice(chains, constants)
        found["draft"], served[besides] = _with_chains(times["draft"], chains)
        served |= _after_misses(found["draft"], part, constants)
    return found, served


def _child_seconds(part: pd.DataFrame, *, is_split: bool) -> float:
    """Seconds for each child of a draft's rows, beside the target where that has ranks of its own.

    0 where the profile of the deployment does not say.
    """
    timed = part.loc[part["beside"] == is_split]
    return child_seconds(*(timed.loc[timed["op"] == op] for op in ("draft", WIDE)))


def _fit_forwards(
    part: pd.DataFrame, label: str, child: float, *, on_ranks: bool
) -> dict[str, StepFit]:
    """The fit of each kind of forward of a deployment, a draft's without its rows' children."""
    fits = {}
    for op in FORWARDS:
        timings = _timings(part, label, op, beside="+" in label and op.startswith("draft"))
        if op == "draft":
            timings = without_children(timings, child)
        roots = int(on_ranks and op == "draft_prefill")  # run in a forward of their own
        found = fit_step(
            timings.assign(rows=timings["rows"] - roots),
            is_prefill=op in PROMPTS,
            on_ranks=on_ranks,
            waits_for_host=op == "draft",
        )
        fits[op] = found.with_more_rows(roots)
    return fits


def _without_choice(chains: pd.DataFrame, constants: Mapping[str, float]) -> pd.DataFrame:
    """Chains as if no candidates had been chosen, of which there were a row each and the root's."""
    chosen = constants.get(CHOICE, 0.0)
    chosen += constants.get("choice_row", 0.0) * (chains["rows"] + 1.0)
    return chains.assign(seconds=chains["seconds"] - chosen)


def _with_chains(draft: StepTime, chains: pd.DataFrame) -> tuple[StepTime, float]:
    """A draft's step in a row of them, and what such a row takes besides, by chains of a stream.

    A step is timed as the mean of some in a row, of which only the first waits for the host: ranks
    run ahead by the others. So a round of one forward takes longer than the mean, and each of many
    is shorter. ``chains`` are without the choice of the candidates.
    """
    count = chains["rows"].to_numpy(np.float64)
    beyond = chains["seconds"] - count * draft.of_arrays(1.0, chains["context"])
    by_count = beyond.groupby(count).median()
    each, besides = np.polyfit(by_count.index, by_count, 1)
    alone = shifted(draft.alone or _NOTHING, pd.Series([each], [1]))
    return replace(draft, alone=alone), max(float(besides), 0.0)


def _after_misses(
    draft: StepTime, part: pd.DataFrame, constants: Mapping[str, float]
) -> dict[str, float]:
    """What a draft's first forward waits for, from rounds that were served, where there are any.

    By itself a row of forwards comes after an order, and took up to 0.15 ms more than in rounds.
    """
    missed = part.loc[part["op"] == MISSED]
    if len(missed) < FEWEST:
        return {}
    choices = constants.get(CHOICE, 0.0) + constants.get("choice_row", 0.0) * missed["rows"]
    beyond = missed["seconds"] - choices - draft.of_arrays(1.0, missed["context"])
    return {"first_alone": max(float(beyond.median()), 0.0)}


def _with_first_forwards(costs: dict[str, RoundCost], told: set[str]) -> dict[str, RoundCost]:
    """Splits whose profile is of before rows of forwards were timed there wait as others do.

    It is the host that the first forward waits for, and a forward was timed as the mean of three.

    Args:
        costs: By deployment.
        told: Deployments whose own profile says what it waits for, and be it nothing.
    """
    first = next((cost.choice_alone for cost in costs.values() if cost.choice_alone), 0.0)
    found = {}
    for label, cost in costs.items():
        if "+" in label and first and label not in told:
            less = pd.Series([-first / _TIMED_IN_A_ROW], [1])
            draft = replace(cost.draft, alone=shifted(cost.draft.alone or _NOTHING, less))
            cost = replace(cost, draft=draft, first_alone=first)
        found[label] = cost
    return found


def _between_steps(
    timed: pd.DataFrame, op: str, *, keeps_trees: bool
) -> tuple[dict[str, float], float]:
    """Seconds of a re-root, a choice or a message, as in RoundCost; and how far one is off."""
    one = timed.loc[timed["requests"] == timed["requests"].min()]
    seconds = one["seconds"].to_numpy(np.float64)
    first = float(np.median(seconds))
    error = float(np.median(np.abs(seconds / first - 1.0)))
    if op != "link" and one["rows"].nunique() > 1:
        return _by_rows(timed, op, keeps_trees=keeps_trees), error
    return {op: first, f"{op}_each": for_each(timed, first)}, error


def _by_rows(timed: pd.DataFrame, op: str, *, keeps_trees: bool) -> dict[str, float]:
    """Seconds of one request, of each further one, and of each row.

    A tree that is kept is renumbered as a whole, so that the children of its rows count, too; of
    rounds of which it is known what was kept, that does.
    """
    timed = timed.loc[timed["seconds"] > 0.0]
    names = [op, f"{op}_each", f"{op}_row"]
    columns = [np.ones(len(timed)), timed["requests"] - 1.0, timed["rows"]]
    is_known = {name: name in timed and bool(np.isfinite(timed[name]).all()) for name in COUNTED}
    knows_kept = op == "reroot" and all(is_known.values())
    if is_known[NODES] and (keeps_trees or knows_kept):
        names.append(f"{op}_node")
        columns.append(timed[NODES])
    if knows_kept:
        trees = timed[KEPT[0]].to_numpy(np.float64)
        if np.count_nonzero(trees > 1.0) >= FEWEST:  # else the first tree is not told from each
            names.append(f"{op}_any")
            columns.append(trees > 0.0)
        names += [f"{op}_tree", f"{op}_kept"]
        columns += [timed[name] for name in KEPT]
    design = np.column_stack(columns).astype(np.float64)
    found = fit_means(design, timed["seconds"].to_numpy(np.float64))
    return dict(zip(names, map(float, found), strict=True))


def _deciding(part: pd.DataFrame) -> dict[str, float]:
    """Seconds of a look at a batch, and of each request in it, where the profile says so."""
    timed = part.loc[part["op"] == DECIDING]
    if timed["requests"].nunique() < 2:
        return {}
    each, first = np.polyfit(timed["requests"].to_numpy(float), timed["seconds"].to_numpy(float), 1)
    return {"deciding": max(float(first), 0.0), "deciding_each": max(float(each), 0.0)}


def _kv_rooms(part: pd.DataFrame) -> dict[str, int]:
    """KV rows that fit, where the profile says so."""
    found = part.loc[part["op"].isin(KV_ROOMS)].groupby("op")["rows"].min()
    return {str(op): int(rows) for op, rows in found.items()}


def fit_slowdown(target: pd.DataFrame) -> float:
    """Seconds that the target loses per second of drafting beside it: 1 - alone / beside.

    Args:
        target: Timings of target forwards, alone and beside, of the same shapes.

    Raises:
        InputError: If no shape was timed both ways.
    """
    shape = ["rows", "requests", "context"]
    medians = target.groupby([*shape, "beside"])["seconds"].median().unstack("beside")
    if not {True, False} <= set(medians.columns) or medians.dropna().empty:
        raise InputError(f"no target forward was timed both alone and beside the draft. {MEASURE}")
    both = medians.dropna()
    lost = np.asarray(1.0 - both[False] / both[True], np.float64)
    return float(np.clip(np.median(lost), 0.0, _MAX_SLOWDOWN))


def _timings(part: pd.DataFrame, label: str, op: str, *, beside: bool | None) -> pd.DataFrame:
    wanted = part["op"] == op
    if beside is not None:
        wanted &= part["beside"] == beside
    found = part.loc[wanted]
    if len(found) == 0:
        where = "" if beside is None else " beside its partner" if beside else " alone"
        raise InputError(
            f"the profile has no timings of {op} in deployment {label}{where}. {MEASURE}"
        )
    return found
