"""What is to be exported, and where to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from codesign.candidate import Candidate, ScoredCandidate
from codesign.export.models import EngineModel
from codesign.export.setup import Engine, Method

if TYPE_CHECKING:
    import pandas as pd

    from codesign.fit import Fit
    from codesign.plan import Plan


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """What is to be exported where.

    Attributes:
        plan: It names limits, targets and requests.
        scored: The candidate, and what is predicted for it.
        fit: The plan's.
        requests: The plan's.
        engine: Where to.
        method: How tokens are proposed.
        target: What the engine is to load.
        draft: Draft model or head; None if the method has none.
        is_cpu: Workers of the plan are CPU threads, not GPUs.
        tensor_parallel: GPUs of one copy; None for the best.
        is_vocab_padded: See ``Setup``.
    """

    plan: Plan
    scored: ScoredCandidate
    fit: Fit
    requests: pd.DataFrame
    engine: Engine
    method: Method
    target: EngineModel
    draft: EngineModel | None
    is_cpu: bool = False
    tensor_parallel: int | None = None
    is_vocab_padded: bool = False

    @property
    def candidate(self) -> Candidate:
        """What is to be exported."""
        return self.scored.candidate

    @property
    def running(self) -> float:
        """Requests that run at once on average, on all copies together."""
        each = self.scored.running
        mean = self.candidate.max_batch if each is None else max(each.value, 1.0)
        return mean * self.candidate.deployment.replicas

    @property
    def batch(self) -> int:
        """The same on one copy, a whole number."""
        return max(round(self.running / self.candidate.deployment.replicas), 1)

    def can_cut(self, *sizes: int) -> bool:
        """Whether the models can be cut for groups of so many GPUs."""
        models = [m for m in (self.target, self.draft) if m is not None]
        return all(model.runs_on(size) for model in models for size in sizes)
