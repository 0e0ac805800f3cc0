"""What a draft's confidence is worth, learned while requests run.

P(accept) = sigmoid(slope * logit(confidence) + intercept), with one pair of numbers for the
likeliest child of a node and one for its siblings. Both start at the fit's calibration. Tokens that
the target has judged move them; older ones are slowly forgotten.

Must not import torch or read a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from codesign.policy.cost import Calibration

Floats = NDArray[np.float64]
# Calibrated log chance of a token given its parent, whether it was the likeliest child, and whether
# it was accepted.
Judged = tuple[float, bool, bool]

BATCH = 256  # judged tokens between two updates
PRIOR = 20.0  # weight of the start: about that of 100 judged tokens
KEPT = 0.98  # weight of what was learned before, per update: half is forgotten in 9,000 tokens
START_CONFIDENCE = 0.6  # as SpecServe's; counts as one
KNOWN = 256  # confidences that a mean counts for which a fit knows
_MOST_CONFIDENCES = 512  # that the mean is made of
_BINS = 256  # of the table of chances
_EDGE = 1e-4
_MIDDLE_B = np.clip((np.arange(_BINS + 1) + 0.5) / _BINS, _EDGE, 1.0 - 0.25 / _BINS)
_LOGIT_B = np.log(_MIDDLE_B) - np.log1p(-_MIDDLE_B)
_SLOPES, _INTERCEPTS, _STEPS = (0.1, 4.0), (-4.0, 4.0), (-0.5, 0.5)
_RIDGE = 1e-3 * np.eye(2)


class OnlineCalibration:
    """Chances of acceptance that follow what is accepted.

    Args:
        start: Of the fit.
        confidence: Where its mean starts; None for ``START_CONFIDENCE``.

    Attributes:
        confidence: Mean chance of a likeliest child lately; what a new request starts with.
        num_confidences: Of requests, seen or known.

    Source:
        Logistic regression by one damped Newton step per batch, with exponential forgetting.
    """

    def __init__(self, start: Calibration | None = None, confidence: float | None = None) -> None:
        start = start or Calibration()
        # At a slope of 0, as a fit may find, what the draft said would be lost (see ``_step``).
        slope = max(start.slope, _SLOPES[0])
        self._found = np.tile([slope, start.intercept], (2, 1))  # (likeliest, siblings)
        self._curvature = np.tile(PRIOR * np.eye(2), (2, 1, 1))
        self._tables = [_table(*pair) for pair in self._found.tolist()]
        self._judged: list[Judged] = []  # since the last update
        self._unlearned: list[Callable[[], Sequence[Judged]]] = []
        self.confidence = START_CONFIDENCE if confidence is None else confidence
        self.num_confidences = 1 if confidence is None else KNOWN

    def log_chances(self, log_probs: Sequence[float], least: float) -> list[float]:
        """Calibrated log chance of a node's children, the likeliest first, others above ``least``.

        Args:
            log_probs: What the draft says, descending; at most 0 but for rounding.
            least: Log chance below which no child but the likeliest is wanted.
        """
        if not log_probs:
            return []
        if self._unlearned:
            self.settle()
        first, others = self._tables
        exp = math.exp
        chances = [first[int(_BINS * exp(log_probs[0]))]]
        for log_prob in log_probs[1:]:
            chance = others[int(_BINS * exp(log_prob))]
            if chance < least:
                break
            chances.append(chance)
        return chances

    def take_in(self, confidences: Sequence[float]) -> None:
        """Move the mean by requests' own ones."""
        if confidences:
            self.num_confidences += len(confidences)
            beyond = sum(confidences) - len(confidences) * self.confidence
            self.confidence += beyond / min(self.num_confidences, _MOST_CONFIDENCES)

    def learn_later(self, judge: Callable[[], Sequence[Judged]]) -> None:
        """Take in tokens that the target has judged, but not before ``settle`` or the next use."""
        self._unlearned.append(judge)

    def settle(self) -> None:
        """Learn what is to be learned, in the order in which it came."""
        unlearned, self._unlearned = self._unlearned, []
        for judge in unlearned:
            self.learn(judge())

    def learn(self, judged: Sequence[Judged]) -> None:
        """Take in tokens that the target has judged."""
        self._judged += judged
        while len(self._judged) >= BATCH:
            self._update(self._judged[:BATCH])
            del self._judged[:BATCH]

    def _update(self, judged: Sequence[Judged]) -> None:
        table_N3 = np.fromiter(chain.from_iterable(judged), float).reshape(-1, 3)
        log_chance_N, is_likeliest_N, agreed_N = table_N3.T
        for kind, own_N in enumerate((is_likeliest_N == 1.0, is_likeliest_N == 0.0)):
            if own_N.any():
                self._step(kind, log_chance_N[own_N], agreed_N[own_N])

    def _step(self, kind: int, log_chance_N: Floats, agreed_N: Floats) -> None:
        slope, intercept = self._found[kind].tolist()
        chance_N = np.minimum(np.maximum(np.exp(log_chance_N), _EDGE), 1.0 - _EDGE)
        # What the draft said, from what was made of it; the numbers have hardly moved since.
        said_N = (np.log(chance_N) - np.log1p(-chance_N) - intercept) / slope
        design_NP = np.ones((len(said_N), 2))
        design_NP[:, 0] = said_N
        weight_N = chance_N * (1.0 - chance_N)
        self._curvature[kind] *= KEPT
        self._curvature[kind] += (design_NP.T * weight_N) @ design_NP
        beyond_P = design_NP.T @ (chance_N - agreed_N)
        steps = np.linalg.solve(self._curvature[kind] + _RIDGE, beyond_P).tolist()
        by_slope, by_intercept = (_within(step, *_STEPS) for step in steps)
        slope = _within(slope - by_slope, *_SLOPES)
        intercept = _within(intercept - by_intercept, *_INTERCEPTS)
        self._found[kind] = slope, intercept
        self._tables[kind] = _table(slope, intercept)


def _within(number: float, least: float, most: float) -> float:
    return min(max(number, least), most)


def _table(slope: float, intercept: float) -> list[float]:
    """Log chances by the draft's probability in equal bins."""
    return (-np.logaddexp(0.0, -(slope * _LOGIT_B + intercept))).tolist()
