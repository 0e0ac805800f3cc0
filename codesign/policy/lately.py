"""What a figure has been lately, where it is known now and then.

Must not import torch or read a clock.
"""

from __future__ import annotations

from math import exp


class Lately:
    """A mean over time that forgets; from one time to the next a figure changes steadily."""

    def __init__(self) -> None:
        self._mean = self._last = self._when = 0.0
        self._is_known = False

    def take_in(self, figure: float, now: float, horizon: float) -> float:
        """The mean, this figure among it.

        Args:
            figure: As it is now; the first one is all that is known.
            now: Seconds since the start of the run.
            horizon: Seconds after which a figure counts by 1 / e.
        """
        if not self._is_known:
            self._mean, self._is_known = figure, True
        elif (passed := now - self._when) > 0.0:
            parts = passed / horizon
            faded = exp(-parts)
            # The mean of exp(-t) (figure - (figure - last) t / parts), t from 0 to parts.
            missing = (1.0 - faded * (1.0 + parts)) / parts * (figure - self._last)
            self._mean = faded * self._mean + (1.0 - faded) * figure - missing
        self._last, self._when = figure, now
        return self._mean
