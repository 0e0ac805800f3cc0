"""A model of agreement that a few published figures determine: hits come in runs.

The chance that the target's token is the draft model's first choice depends on how many tokens in
a row, right before it, were. With a chain of K draft tokens a server counts how many rounds
accepted at least 1, 2, ..., K of them, and these K figures determine the model: a round begins
either after a miss (its bonus token) or after K hits and a bonus token that nobody drafted.

On the recordings that ship with the package, the model made from one chain length (2, 3, 5, 7)
tells the acceptance length of every other one from 1 to 8 within 2 %.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from codesign.acceptance import AcceptanceProfile, Recording
from codesign.errors import InputError

NUM_RECORDINGS, RECORDING_TOKENS = 96, 160
_GRID = 4000  # chances after K hits that are tried
_CERTAIN = 1.0 - 1e-6
_STEPS = 60  # of a bisection


@dataclass(frozen=True, slots=True)
class RunModel:
    """Chance of a hit after 0, 1, 2, ... hits in a row; the last goes on.

    Attributes:
        hits: At least one chance, each in [0, 1).
    """

    hits: tuple[float, ...]

    @classmethod
    def from_survival(cls, survival: Sequence[float]) -> RunModel:
        """The model of a server that drafts chains of ``len(survival)`` tokens.

        Args:
            survival: Share of rounds that accepted at least 1, 2, ..., K draft tokens.

        Raises:
            InputError: If the shares are not such.
        """
        shares = np.array([1.0, *survival])
        is_falling = (np.diff(shares) <= 1e-9).all()
        if len(shares) < 2 or not is_falling or shares.min() < 0:
            shown = ", ".join(f"{share:.3g}" for share in survival)
            raise InputError(
                f"shares of rounds that accepted 1, 2, ... draft tokens must fall from at most 1, "
                f"not {shown or 'be missing'}. Count them again on the server"
            )
        if shares[-1] > _CERTAIN:
            return cls((_CERTAIN,))
        # K shares leave one chance open: the one after K hits is the nearest that can be to the
        # one before it. With 0 the shares are met by their ratios, so one always can be.
        after = np.linspace(0.0, _CERTAIN, _GRID)
        hits = np.array([_hits_after_miss(shares, float(chance)) for chance in after])
        step = np.where((hits <= 1.0 + 1e-9).all(axis=1), np.abs(hits[:, -1] - after), np.inf)
        best = int(np.argmin(step))
        return cls(tuple(np.clip([*hits[best], after[best]], 0.0, _CERTAIN).tolist()))

    @classmethod
    def from_length(cls, length: float, *, chain: int, shape: RunModel) -> RunModel:
        """The model with an acceptance length; its odds are those of ``shape`` times a constant.

        Args:
            length: Tokens per round of a chain, bonus token included.
            chain: Draft tokens per round.
            shape: How chances rise along a run.

        Raises:
            InputError: If no chain of that many tokens can have that length.
        """
        if chain < 1 or not 1.0 <= length <= chain + 1.0:
            raise InputError(
                f"an accept length of {length:g} is not possible with {chain} draft tokens per "
                f"round (1 to {chain + 1}). Give the right number: --chain N"
            )
        low, high = -40.0, 40.0
        for _ in range(_STEPS):
            middle = (low + high) / 2.0
            if shape.shifted(middle).acceptance_length(chain) < length:
                low = middle
            else:
                high = middle
        return shape.shifted((low + high) / 2.0)

    def shifted(self, log_odds: float) -> RunModel:
        """The model with this much added to the logarithm of each chance's odds."""
        chances = np.clip(self.hits, 1e-9, _CERTAIN)
        logits = np.log(chances / (1.0 - chances)) + log_odds
        return RunModel(tuple(np.clip(1.0 / (1.0 + np.exp(-logits)), 0.0, _CERTAIN).tolist()))

    def survival(self, chain: int) -> tuple[float, ...]:
        """Share of rounds of a chain that accept at least 1, 2, ..., ``chain`` draft tokens."""
        last = len(self.hits) - 1
        total, weights = np.zeros(chain), 0.0
        run, weight = 0, 1.0  # rounds that begin after a miss; then those that begin in a run
        while True:
            chances = np.cumprod([self.hits[min(run + i, last)] for i in range(chain + 1)])
            if run == last:
                weight /= 1.0 - chances[-1]  # such a round may be followed by its like
            total += weight * chances[:chain]
            weights += weight
            if run == last:
                return tuple((total / weights).tolist())
            # After a whole chain and a bonus token that nobody drafted but that was a hit as well.
            weight *= chances[-1]
            run = min(run + chain + 1, last)

    def acceptance_length(self, chain: int) -> float:
        """Tokens per round of a chain, bonus token included."""
        return 1.0 + sum(self.survival(chain))

    def recordings(self, template: AcceptanceProfile, *, seed: int) -> AcceptanceProfile:
        """A profile with this model's hits, and the template's confidences and further ranks.

        Each token's vector of log probabilities, and its rank if it is no hit, is that of a random
        token of the template that is a hit, or is none.

        Raises:
            InputError: If the template has only hits or none.
        """
        rng = np.random.default_rng(seed)
        ranks = np.concatenate([r.ranks for r in _all(template)])
        log_probs = np.concatenate([r.log_probs for r in _all(template)])
        of_hits, of_others = np.flatnonzero(ranks == 0), np.flatnonzero(ranks != 0)
        if not len(of_hits) or not len(of_others):
            raise InputError(
                "the recorded acceptance of the fit has only agreement or none: too little to take "
                "confidences from. Give another one: --steps-from FIT"
            )
        is_hit = self._draw(NUM_RECORDINGS * RECORDING_TOKENS, rng)
        like = np.where(
            is_hit, rng.choice(of_hits, len(is_hit)), rng.choice(of_others, len(is_hit))
        )
        pieces = np.split(like, NUM_RECORDINGS)
        recordings = (Recording(i, ranks[at], log_probs[at]) for i, at in enumerate(pieces))
        return AcceptanceProfile({"": tuple(recordings)})

    def _draw(self, count: int, rng: np.random.Generator) -> NDArray[np.bool_]:
        """Hits of a long text; per length of run as many as the chance says, in random order."""
        draws = [itertools.chain.from_iterable(_stratified(rng)) for _ in self.hits]
        is_hit = np.zeros(count, np.bool_)
        run = 0
        for i in range(count):
            is_hit[i] = next(draws[run]) < self.hits[run]
            run = min(run + 1, len(self.hits) - 1) if is_hit[i] else 0
        return is_hit


def template_shape(template: AcceptanceProfile, chain: int) -> RunModel:
    """The run model of recorded acceptance."""
    survival = np.zeros(chain + 1)
    num_rounds = 0
    for recording in _all(template):
        for run in _rounds(recording.ranks == 0, chain):
            survival[: run + 1] += 1.0
            num_rounds += 1
    if not num_rounds:
        raise InputError("the recorded acceptance of the fit is too short to compare with")
    return RunModel.from_survival((survival[1:] / num_rounds).tolist())


def _rounds(is_hit: NDArray[np.bool_], chain: int) -> Iterable[int]:
    """Accepted tokens of each whole round, from every place where the first could begin."""
    for first in range(chain + 1):
        at = first
        while at + chain < len(is_hit):
            missed = np.flatnonzero(~is_hit[at : at + chain])
            run = int(missed[0]) if len(missed) else chain
            yield run
            at += run + 1


def _hits_after_miss(shares: NDArray[np.float64], after: float) -> NDArray[np.float64]:
    """Chances after 0, 1, ... hits if the chance after K hits is ``after``."""
    begins_in_run = shares[-1] * after
    rounds = shares - begins_in_run * after ** np.arange(len(shares))
    return _ratio(np.maximum(rounds, 0.0))


def _ratio(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    before = shares[:-1]
    return np.divide(shares[1:], before, out=np.zeros(len(before)), where=before > 0)


def _stratified(rng: np.random.Generator) -> Iterable[list[float]]:
    """Blocks of uniform draws, one from each of 64 equal parts, in random order."""
    while True:
        yield ((rng.permutation(64) + rng.random(64)) / 64).tolist()


def _all(profile: AcceptanceProfile) -> list[Recording]:
    return [recording for group in profile.recordings.values() for recording in group]
