"""How right a draft's calibrated chances were, by kind of prompt: what a run reports of them.

Every draft token that the target has judged counts: those whose parent was accepted. Imports no
torch.
"""

from __future__ import annotations

from codesign.policy.protocol import RequestVerdict, VerifyRows

NUM_BINS = 10  # of equal width


class CalibrationLog:
    """Sums over judged tokens, by category and by bin of their chance."""

    def __init__(self) -> None:
        self._bins: dict[str, list[list[float]]] = {}

    def add(self, category: str, rows: VerifyRows, verdict: RequestVerdict) -> None:
        """Take in a request's round; rows without chances say nothing."""
        if len(rows.chances) < 2:
            return
        bins = self._of(category)
        tokens, parents, chances = rows.tokens, rows.parents, rows.chances
        at = 0
        for emitted in verdict.tokens:
            taken = 0
            for row in range(at + 1, len(tokens)):
                if parents[row] == at:
                    sums = bins[min(int(chances[row] * NUM_BINS), NUM_BINS - 1)]
                    sums[0] += 1.0
                    sums[1] += chances[row]
                    if tokens[row] == emitted:
                        sums[2] += 1.0
                        taken = row
            if not taken:
                return
            at = taken

    def add_all(self, other: CalibrationLog) -> None:
        """Take in what another log has."""
        for category, bins in other._bins.items():
            for sums, more in zip(self._of(category), bins, strict=True):
                sums[:] = map(sum, zip(sums, more, strict=True))

    def _of(self, category: str) -> list[list[float]]:
        bins = self._bins.get(category)
        if bins is None:
            bins = self._bins[category] = [[0.0, 0.0, 0.0] for _ in range(NUM_BINS)]
        return bins

    def errors(self) -> dict[str, float]:
        """Expected calibration error of each category, and under "all" of all judged tokens.

        Source:
            Guo et al., arXiv:1706.04599: mean distance of chance and frequency over the bins.
        """
        found = {name: _error(bins) for name, bins in sorted(self._bins.items())}
        if found:
            parts = zip(*self._bins.values(), strict=True)
            found["all"] = _error([[sum(s) for s in zip(*bins, strict=True)] for bins in parts])
        return {name: error for name, error in found.items() if error is not None}


def _error(bins: list[list[float]]) -> float | None:
    count = sum(bin_[0] for bin_ in bins)
    return sum(abs(bin_[1] - bin_[2]) for bin_ in bins) / count if count else None
