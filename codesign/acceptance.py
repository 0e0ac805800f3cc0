"""How often the target agrees with the draft model, as recorded on real text.

For every token that the target emitted in plain decoding: the draft model's largest log
probabilities at that position, and the rank of the target's token among them. Whole requests are
kept in order, because agreement comes in runs. Nothing is drawn here; codesign.sim.acceptance
replays the recordings.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from codesign.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("request", "category", "position", "rank", "log_probs")
NOT_DRAFTED = -1  # rank of a token outside the draft model's top K
ABSENT_LOG_PROB = -30.0  # fills up to K where a drafter names fewer tokens, as n-grams do
_FIX = "Record again: codesign profile --out profile"


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """One recorded request.

    Attributes:
        request: Its number in the profile.
        ranks: (L,) int64 rank of the target's token among the draft model's top K at each output
            position, from 0; ``NOT_DRAFTED`` when it is not there.
        log_probs: (L, K) float64 natural logarithms of the draft model's chances, descending;
            ``ABSENT_LOG_PROB`` and below stand for no token.
    """

    request: int
    ranks: NDArray[np.int64]
    log_probs: NDArray[np.float64]

    def part(self, start: int, end: int | None) -> Recording:
        """Its tokens from ``start`` on, before ``end``; None for all of them."""
        return Recording(self.request, self.ranks[start:end], self.log_probs[start:end])


@dataclass(frozen=True, slots=True, eq=False)
class AcceptanceProfile:
    """Recorded requests by category.

    Attributes:
        recordings: Per category, in alphabetical order, the requests in order of their number;
            none is empty.
    """

    recordings: dict[str, tuple[Recording, ...]]

    def __post_init__(self) -> None:
        if not self.num_tokens:
            raise InputError(f"the acceptance profile has no recorded tokens. {_FIX}")

    @property
    def categories(self) -> tuple[str, ...]:
        """Kinds of prompt that were recorded."""
        return tuple(self.recordings)

    @property
    def num_tokens(self) -> int:
        """Recorded tokens in all."""
        return sum(len(r.ranks) for group in self.recordings.values() for r in group)

    @property
    def top_k(self) -> int:
        """Ranks that each position has."""
        return next(iter(self.recordings.values()))[0].log_probs.shape[1]

    def hit_rate(self, fanout: int, category: str | None = None) -> float:
        """Share of positions where the target's token is among the ``fanout`` likeliest.

        Args:
            fanout: Ranks to look at.
            category: Only this one; None for all tokens.
        """
        groups = self.recordings.values() if category is None else [self.recordings[category]]
        ranks = np.concatenate([r.ranks for group in groups for r in group])
        return float(np.mean((ranks >= 0) & (ranks < fanout)))

    @classmethod
    def independent(
        cls, chances: Sequence[float], *, num_tokens: int, seed: int
    ) -> AcceptanceProfile:
        """A made-up profile where each token's rank is drawn alone, for "what if" questions.

        Args:
            chances: Of each rank, descending; the rest to 1 is the chance that the target's token
                is not drafted. The draft model's confidences are these very chances.
            num_tokens: Tokens of its one recording.
            seed: Of the draws.

        Raises:
            InputError: If the chances are not such.
        """
        shares = np.asarray(chances, np.float64)
        if shares.size == 0 or shares.min() <= 0 or shares.sum() > 1 or (np.diff(shares) > 0).any():
            raise InputError(f"need descending chances above 0 with sum at most 1, got {chances}")
        drawn = np.searchsorted(np.cumsum(shares), np.random.default_rng(seed).random(num_tokens))
        ranks = np.where(drawn == len(shares), NOT_DRAFTED, drawn)
        return cls({"": (Recording(0, ranks, np.tile(np.log(shares), (num_tokens, 1))),)})

    @classmethod
    def from_table(cls, table: pd.DataFrame) -> AcceptanceProfile:
        """The profile in a table with one row per emitted token, as ``codesign profile`` writes it.

        Args:
            table: Columns ``COLUMNS``: request, category, position (0, 1, ... in the output), rank,
                log_probs (K descending values).

        Raises:
            InputError: If a column is missing or a value cannot be.
        """
        missing = [name for name in COLUMNS if name not in table]
        if missing:
            raise InputError(f"acceptance table lacks {', '.join(missing)}. {_FIX}")
        if table.empty:
            raise InputError(f"the acceptance profile has no recorded tokens. {_FIX}")
        _check_types(table)
        ordered = table.sort_values(["category", "request", "position"], kind="stable")
        log_probs = _stack(ordered["log_probs"].tolist())
        ranks = ordered["rank"].to_numpy(np.int64)
        _check_values(ranks, log_probs)
        recordings: dict[str, list[Recording]] = {}
        keys = list(zip(ordered["category"].tolist(), ordered["request"].tolist(), strict=True))
        first = 0
        for (category, request), rows in itertools.groupby(keys):
            end = first + sum(1 for _ in rows)
            if ordered["position"].iloc[first:end].tolist() != list(range(end - first)):
                raise InputError(f"positions of recorded request {request} have gaps. {_FIX}")
            recording = Recording(int(request), ranks[first:end], log_probs[first:end])
            recordings.setdefault(str(category), []).append(recording)
            first = end
        return cls({category: tuple(group) for category, group in recordings.items()})

    def to_table(self) -> pd.DataFrame:
        """The table that ``from_table`` reads."""
        import pandas as pd

        parts = [
            pd.DataFrame(
                {
                    "request": recording.request,
                    "category": category,
                    "position": np.arange(len(recording.ranks)),
                    "rank": recording.ranks.astype(np.int8),
                    "log_probs": list(recording.log_probs.astype(np.float32)),
                }
            )
            for category, group in self.recordings.items()
            for recording in group
        ]
        return pd.concat(parts, ignore_index=True)


def _check_types(table: pd.DataFrame) -> None:
    """Whole numbers, texts and vectors where they must be; NumPy would cut 0.5 to 0 in silence."""
    whole = all(table[name].dtype.kind in "iu" for name in ("request", "position", "rank"))
    texts = all(isinstance(category, str) for category in table["category"].unique())
    vectors = all(isinstance(v, list | tuple | np.ndarray) for v in table["log_probs"])
    if not (whole and texts and vectors):
        raise InputError(f"the acceptance table holds values of another type. {_FIX}")


def _stack(vectors: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """(N, K) array of the recorded vectors."""
    lengths = {len(vector) for vector in vectors}
    if len(lengths) != 1 or 0 in lengths:
        raise InputError(f"recorded vectors must have one length, found {sorted(lengths)}. {_FIX}")
    try:
        return np.array(vectors, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as err:
        raise InputError(f"log probabilities must be numbers ({err}). {_FIX}") from err


def _check_values(ranks: NDArray[np.int64], log_probs: NDArray[np.float64]) -> None:
    top_k = log_probs.shape[1]
    if ranks.min() < NOT_DRAFTED or ranks.max() >= top_k:
        raise InputError(
            f"ranks must lie in -1 to {top_k - 1}, found {ranks.min()} to {ranks.max()}. {_FIX}"
        )
    if not np.isfinite(log_probs).all() or log_probs.max() > 1e-3:
        raise InputError(f"log probabilities must be finite and at most 0. {_FIX}")
    if (np.diff(log_probs, axis=1) > 1e-4).any():
        raise InputError(f"log probabilities must descend at each position. {_FIX}")
