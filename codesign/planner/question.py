"""What is asked of the planner, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from codesign.candidate import ScoredCandidate
from codesign.config import SLO, Serving
from codesign.plan import Doubt, Economics
from codesign.planner.defaults import expecting

if TYPE_CHECKING:
    import pandas as pd

    from codesign.fit import Fit

NUM_SEEDS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What is asked of the planner.

    Attributes:
        requests: Prepared trace: arrival (s), prompt_tokens, output_tokens, category.
        fit: Step times and acceptance of the machine.
        slo: Targets.
        serving: How memory and steps are shared; without a limit of KV rows the fit must say. How
            long answers are is the trace's to say.
        objective: "goodput": most requests per second that meet the SLO, then the shortest
            latency; "latency": lowest mean TPOT, of the plans that bear the load if there are any;
            "fewest": as goodput, of these plans as well, for ``fewest``.
        workers: Workers of the machine.
        max_batch: Largest batch limit of a replica to try.
        policies: Labels that the search is restricted to; empty for all.
        runnable: Only plans that ``codesign run`` serves.
        seed: First seed.
        num_seeds: Simulations of each finalist.
        rate_scale: By which the trace's rate was multiplied already, to name another.
        notes: What a reader of the answer must know of the machine.
    """

    requests: pd.DataFrame
    fit: Fit
    slo: SLO
    serving: Serving
    objective: str = "goodput"
    workers: int = 1
    max_batch: int = 8
    policies: tuple[str, ...] = ()
    runnable: bool = False
    seed: int = 0
    num_seeds: int = NUM_SEEDS
    rate_scale: float = 1.0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "serving", expecting(self.serving, self.requests))


@dataclass(frozen=True, slots=True)
class Answer:
    """What the search found.

    Attributes:
        ranked: What was simulated on the whole trace, best first; the first meets the SLO.
        ties: Labels of those that the prediction cannot tell from the first.
        reason: Why the first.
        runner_up: Why the second one lost.
        economics: Whether speculation pays; None if nothing could be compared.
        doubts: Terms of the fit whose error would change the choice.
        notes: What a reader must know.
        num_candidates: Size of the search space.
        num_simulated: Candidates simulated on the trace or a stretch of it.
        screen_seconds: Wall time of the screen; no part of the answer's equality.
    """

    ranked: tuple[ScoredCandidate, ...]
    ties: tuple[str, ...]
    reason: str
    runner_up: str
    economics: Economics | None
    doubts: tuple[Doubt, ...]
    notes: tuple[str, ...]
    num_candidates: int
    num_simulated: int
    screen_seconds: float = field(default=0.0, compare=False)

    @property
    def chosen(self) -> ScoredCandidate:
        """The best plan."""
        return self.ranked[0]

    @property
    def num_feasible(self) -> int:
        """Those of ``ranked`` that meet the SLO."""
        return sum(scored.is_feasible for scored in self.ranked)
