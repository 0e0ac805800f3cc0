"""How far the coverage of 80 % intervals may be from 80 % though they are right.

Figures of a pair are not so many chances: its plans share one draw of prompts, and plans of a
deployment its profile and its machine. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.campaign.intervals import SIGMAS

_DRAWS = 4000
_USUAL = (0.1, 0.9)
# Which way a figure goes as tokens of a round grow, and as steps get longer.
_SIGNS = {"tpot_mean": (-1.0, 1.0), "throughput": (1.0, -1.0), "acceptance_length": (1.0, 0.0)}
Floats = NDArray[np.float64]


def usual_coverage(runs: Iterable[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Between which shares eight of ten campaigns would lie whose intervals are right.

    Args:
        runs: As ``join`` left them; those without the parts of their intervals are left out. The
            requests of streams and batches are the same ones, those of a replay others.
    """
    generator, shared = np.random.default_rng(0), {}

    def draw(*source: str) -> Floats:
        if source not in shared:
            shared[source] = generator.normal(size=_DRAWS)
        return shared[source]

    held = []
    for run in runs:
        requests = "replay" if run["workload"] == "segment" else "at once"
        deployment = run["label"].split(" on ")[1].split(",")[0]
        for name, (of_tokens, of_steps) in _SIGNS.items():
            parts = np.asarray(run.get("parts", {}).get(name, ()))
            if not parts.any():
                continue
            simulations, served, recorded, steps = parts / SIGMAS
            error = simulations * generator.normal(size=_DRAWS)
            error += of_tokens * (served * draw("served", requests) + recorded * draw("recorded"))
            error += of_steps * steps * draw("steps", deployment, run["workload"])
            held.append(np.abs(error) <= np.linalg.norm(parts))
    if not held:
        return None
    low, high = np.quantile(np.mean(held, axis=0), _USUAL)
    return float(low), float(high)
