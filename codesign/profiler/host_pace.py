"""How fast the host is while it is profiled, and which of the times taken meanwhile count.

A shared host has slow phases of 0.1 to 2 s, in which a plain round takes twice the host's time. A
step's median over passes bears some. What lies between steps is timed in series of a second at
most, and may meet nothing else: so a few plain rounds before each pass sample the pace, and the
series that count are those taken at the median pace of the profile. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median, median_low
from typing import TYPE_CHECKING

from codesign.profiler.steps import Effort, Group

if TYPE_CHECKING:
    import pandas as pd

SLOW = 1.25  # times another pace from which on both are not the same
MATTERS = 0.005  # of a plain step: what the host takes more or less changes no prediction
MORE = Effort(0.3, 1, 2)  # more passes, in seconds of those before
_MORE_SERIES = 2
_UNSETTLED = 1.0 / 3.0  # share of samples off the median from which passes are repeated
_OF_HOST = {"loop", "link"}


class HostPace:
    """Samples the pace, and takes series of what lies between steps.

    Args:
        sample: Returns seconds of the host in a plain round.
        series: Times what lies between steps; host seconds of a plain round come first.
        least: Seconds by which paces differ at least, however quick the host is.

    Attributes:
        samples: So far, in order; those of series, too.
    """

    def __init__(
        self,
        sample: Callable[[], float],
        series: Callable[[], list[pd.DataFrame]],
        least: float = 0.0,
    ) -> None:
        self.samples: list[float] = []
        self._least = least
        self._sample = sample
        self._time_series = series
        self._series: list[tuple[float, list[pd.DataFrame]]] = []
        self._num_more = 0

    @property
    def usual(self) -> float:
        """The pace over time."""
        return median_low(self.samples)

    @property
    def is_unsettled(self) -> bool:
        """Whether passes are so often off the usual pace that their medians may be."""
        off = sum(not self._is_usual(sample) for sample in self.samples)
        return off >= _UNSETTLED * len(self.samples)

    def take(self) -> None:
        """Take a series."""
        frames = self._time_series()
        self._series.append((float(median(frames[0]["seconds"])), frames))
        self.samples.append(self._series[-1][0])

    def watched(self, groups: Sequence[Group]) -> list[Group]:
        """The same, with a sample before each pass."""

        def prepare() -> None:
            self._look()
            groups[0].prepare()

        return [replace(groups[0], prepare=prepare), *groups[1:]]

    def settle(self) -> None:
        """Take the last series, and more as long as none was taken at the usual pace."""
        self.take()
        while self._num_more < _MORE_SERIES and not self._usual_series():
            self._take_more()

    def kept(self) -> list[pd.DataFrame]:
        """What counts of the series at the usual pace, or of the one that is nearest to it."""
        nearest = min(self._series, key=lambda series: self._off(series[0]))
        series = self._usual_series() or [nearest]
        kept: list[pd.DataFrame] = []
        for frames in zip(*[frames for _, frames in series], strict=True):
            kept += usual_of(frames)
        return kept

    def note(self) -> str:
        """What a reader must know of the host; "" if it kept its pace."""
        quick, worst, count = min(self.samples), max(self.samples), len(self.samples)
        num_slow = sum(self._is_slower(sample, quick) for sample in self.samples)
        if not (self.is_unsettled or len(self._usual_series()) < len(self._series)):
            return ""
        found = (
            f"the host was slow in {num_slow} of {count} samples: its part of a plain round took "
            f"up to {worst * 1e3:.3f} ms, {quick * 1e3:.3f} at best"
        )
        if not self._usual_series():
            return f"{found}; no series was timed at its usual speed: profile again"
        if self._is_slower(self.usual, quick):
            return f"{found}; it was slow most of the time, so runs may be faster than predicted"
        return f"{found}; what was timed between steps meanwhile is not used"

    def _look(self) -> None:
        """Sample, and take a series at once if the host is quicker than in those so far."""
        pace, quickest = self._sample(), min((pace for pace, _ in self._series), default=0.0)
        if self._is_slower(quickest, pace) and self._num_more < _MORE_SERIES:
            self._take_more()
        else:
            self.samples.append(pace)

    def _take_more(self) -> None:
        self._num_more += 1
        self.take()

    def _usual_series(self) -> list[tuple[float, list[pd.DataFrame]]]:
        return [series for series in self._series if self._is_usual(series[0])]

    def _is_usual(self, pace: float) -> bool:
        quick, slow = sorted((pace, self.usual))
        return not self._is_slower(slow, quick)

    def _is_slower(self, pace: float, than: float) -> bool:
        return pace > max(SLOW * than, than + self._least)

    def _off(self, pace: float) -> float:
        return abs(pace - self.usual)


def usual_of(series: Sequence[pd.DataFrame]) -> list[pd.DataFrame]:
    """Those that count of several series of one kind: of the host's own seconds one.

    It is the lower median by what they took: a series takes a fraction of a second, a slow phase
    up to some. Steps of GPUs count in all, and re-roots, of which some ten rounds scatter so much
    that the quicker of two series is 10 % too short.
    """
    filled = [frame for frame in series if len(frame)]
    if not filled or not {op for frame in filled for op in frame["op"]} <= _OF_HOST:
        return filled
    return sorted(filled, key=_median_seconds)[(len(filled) - 1) // 2 :][:1]


def _median_seconds(frame: pd.DataFrame) -> float:
    return float(median(frame["seconds"]))
