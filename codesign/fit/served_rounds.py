"""What served rounds say of the target's steps beyond what these took by themselves.

A step is timed alone, after something else. In a round the host does its part before the next one,
the draft runs in between, or prompts do; and steps of plain decoding of the same requests follow
one another without waiting for the host, as ranks run ahead of it.

Must not import torch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from codesign.fit.least_squares import non_negative_fit
from codesign.policy.host_cost import SEVERAL
from codesign.policy.step_time import StepTime

LOOP = "loop"  # op whose rows say what a round's loop takes beside the target's step
ROUND = "round"  # op whose rows say what a served round takes beside the draft's part
AHEAD = "ahead"  # op whose rows say what a served plain round of several requests takes
JOINED = "joined"  # op whose rows say what a round's step took after prompts
SETTLED = "settled"  # op whose rows say the same of rounds without prompts, in between
FEWEST = 4  # rounds of a kind: of fewer none is sure to be a usual one
_MOST_LESS = 0.5  # of the shortest step that a round may take less: no step takes less than nothing


def with_loop(target: StepTime, part: pd.DataFrame) -> StepTime:
    """A step with the host's seconds between two of them, where the profile says so.

    Where rounds were served, it is what these took beyond the step as it was timed. That may be
    less than nothing: a step by itself comes after something else than in a round. A round of plain
    decoding comes after another step, one of a tree after the draft: so each number of rows has
    its own where a step of one request does, too. Steps of several requests have what rounds of
    trees say: where a machine was busier while steps were timed than while rounds were served, they
    keep half of the shortest step, ``_MOST_LESS``.
    """
    looped, served = (part.loc[part["op"] == op] for op in (LOOP, ROUND))
    first = max(float(looped.loc[looped["requests"] <= 1, "seconds"].median()), 0.0)
    more = for_each(looped.loc[looped["requests"] > 1], first) if len(looped) else 0.0
    if len(served):
        steps = target.of_arrays(served["rows"], served["context"], served["requests"])
        found = (served["seconds"] - steps).groupby(served["rows"]).agg(["median", "size"])
        most = found["size"].max()
        beyond = found.loc[found["size"] >= min(FEWEST, most), "median"]
        grown = beyond.loc[beyond.index > 1]
        first = float(np.median(grown if len(grown) else beyond))
        first = max(first, -_MOST_LESS * min(target.seconds))
        if len(grown):  # two rows are a draft's, however close to plain decoding's one
            beyond = beyond.reindex(beyond.index.union([2]), fill_value=grown.iloc[0])
        if target.alone is not None:
            target = replace(target, alone=shifted(target.alone, beyond - first))
    elif not len(looped):
        return target
    return replace(target.later(first), each=target.each + more)


def shifted(step: StepTime, by_rows: pd.Series) -> StepTime:
    """A step and seconds by rows, straight between them."""
    rows = sorted({*step.rows, *map(int, by_rows.index)})
    more = np.interp(rows, by_rows.index, by_rows)
    return replace(step, rows=tuple(rows), seconds=tuple((step.of_arrays(rows, 0) + more).tolist()))


def joining(target: StepTime, part: pd.DataFrame) -> dict[str, float]:
    """Seconds that a step takes more after prompts, where the profile says so."""
    served = part.loc[part["op"].isin([JOINED, SETTLED])]
    steps = target.of_arrays(served["rows"], served["context"], served["requests"])
    beyond = (served["seconds"] - steps).groupby(served["op"]).agg(["median", "size"])
    if len(beyond) < 2 or beyond["size"].min() < FEWEST:
        return {}
    return {"joining": max(float(beyond["median"][JOINED] - beyond["median"][SETTLED]), 0.0)}


def with_ahead(target: StepTime, part: pd.DataFrame) -> StepTime:
    """A step with its loop, and what plain rounds that were served took less, by requests.

    Rounds of one request were served as a whole, and need no such thing.

    Args:
        target: Seconds of a step after which the host is waited for.
        part: Timings of its deployment.
    """
    is_plain = (part["requests"] >= SEVERAL) & (part["rows"] == part["requests"])
    plain = part.loc[(part["op"] == AHEAD) & is_plain]
    steps = target.of_arrays(plain["rows"], plain["context"], plain["requests"])
    timed = plain.assign(steps=steps, less=steps - plain["seconds"]).groupby("requests")
    found = timed[["steps", "less"]].median().loc[timed.size() >= FEWEST]
    if found.empty:
        return target
    beyond = found.index.to_numpy(np.float64) - 1.0
    # Rounds of one number of requests alone say nothing of each further one.
    design = np.column_stack([np.ones_like(beyond), beyond])[:, : len(found)]
    less, seconds = (found[name].to_numpy(np.float64) for name in ("less", "steps"))
    ahead, each = [*map(float, non_negative_fit(design, less, seconds)), 0.0][:2]
    return replace(target, ahead=ahead, ahead_each=each)


def for_each(timed: pd.DataFrame, first: float) -> float:
    """Seconds for each request beyond the first, through what one takes; 0 of one request alone."""
    seconds = timed.groupby("requests")["seconds"].median()
    beyond = seconds.index.to_numpy(np.float64) - 1.0
    if not beyond.any():
        return 0.0
    return max(float(beyond @ (seconds.to_numpy(np.float64) - first) / (beyond @ beyond)), 0.0)
