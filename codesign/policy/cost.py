"""Seconds of a step, as a function of what the step does.

Both papers write a forward as T = alpha * context + gamma * rows + delta. On some machines the cost
of a row is not constant (a matrix-vector product becomes a matrix product), so ``gamma * rows`` may
be replaced by a table over rows, whichever predicts held-out measurements better (codesign.fit).

Source:
    SpecServe, equations 2 to 6 (papers' form).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one forward: ``alpha * context + f(rows)``.

    Attributes:
        alpha: Seconds per token of context that the rows attend to.
        rows: Knots, ascending row counts; at least one.
        seconds: Seconds at each knot without context. Linear between knots; beyond the last knot
            the last slope goes on (with a single knot: ``gamma``).
        gamma: Seconds per row beyond a single knot.
    """

    alpha: float
    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    gamma: float = 0.0

    @classmethod
    def linear(cls, *, alpha: float, gamma: float, delta: float) -> StepTime:
        """The papers' form, ``alpha * context + gamma * rows + delta``."""
        return cls(alpha=alpha, rows=(0,), seconds=(delta,), gamma=gamma)

    def __call__(self, rows: float, context: float = 0.0) -> float:
        """Seconds of a forward of ``rows`` rows that attend to ``context`` tokens in all."""
        return self.alpha * context + self._row_seconds(rows)

    def _row_seconds(self, rows: float) -> float:
        if len(self.rows) == 1:
            return self.seconds[0] + self.gamma * (rows - self.rows[0])
        right = min(max(bisect_right(self.rows, rows), 1), len(self.rows) - 1)
        r0, r1 = self.rows[right - 1], self.rows[right]
        s0, s1 = self.seconds[right - 1], self.seconds[right]
        return s0 + (s1 - s0) * (max(rows, self.rows[0]) - r0) / (r1 - r0)


@dataclass(frozen=True, slots=True)
class RoundCost:
    """What a round costs in one deployment (a split of the machine between draft and target).

    Attributes:
        target: One target forward, sampling and walk included.
        draft: One draft forward, tree bookkeeping included.
        prefill: Target forward over prompt rows.
        draft_prefill: Draft forward over prompt rows.
        reroot: Seconds to re-root and move KV rows, per round.
        link: Seconds of one message, one way; 0 when both models share a process.
        slowdown: Seconds that the target loses for each second in which the draft model runs beside
            it (shared memory bandwidth); 0 on separate GPUs.
    """

    target: StepTime
    draft: StepTime
    prefill: StepTime
    draft_prefill: StepTime
    reroot: float = 0.0
    link: float = 0.0
    slowdown: float = 0.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """Chance that the target agrees, from the draft model's own probability.

    P(accept) = sigmoid(slope * logit(confidence) + intercept); the identity by default.
    """

    slope: float = 1.0
    intercept: float = 0.0

    @property
    def is_identity(self) -> bool:
        """Whether confidences are taken at face value."""
        return self.slope == 1.0 and self.intercept == 0.0
