"""What a policy does in one round, found once per policy: for arithmetic on thousands of plans.

Plain decoding and chains follow from the recordings in closed form. Every other policy is the real
object of codesign.policy, run over a sample of recorded rounds without a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from codesign.acceptance import AcceptanceProfile
from codesign.answer_parts import part_names, part_of_all, tokens_of_parts
from codesign.policy.protocol import DraftSide
from codesign.policy.speculation import SpeculationSpec, build_speculation
from codesign.sim.acceptance import SyntheticDrafter, weighed_profile
from codesign.sim.played import PlayedBatch
from codesign.sim.requests import categories_of
from codesign.sim.stretches import Stretches
from codesign.sim.tapes import play_alone
from codesign.sim.work import Entering, Work

if TYPE_CHECKING:
    import pandas as pd

    from codesign.fit import Fit

NUM_ROUNDS = 150  # observed of each policy
_ROUNDS_EACH = 25  # of one request: recordings are short, and kinds of prompt differ
_FEWEST_ROUNDS = 10  # where there are many kinds, as parts of answers are
_WARM_UP = 2  # rounds in which a draft still reads the prompt, or has not drafted beside yet
_MAX_TOKENS = 1024  # more than any request emits here


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What a policy does for one request in one round, on average.

    Attributes:
        emitted: Tokens emitted, bonus token included.
        rows: Rows verified, root included.
        awaited: (F,) chance that the request needs a first, second, ... draft forward that the
            target waits for.
        awaited_rows: (F,) rows of such a forward, if it is needed.
        overlapped: Draft forwards beside the verification.
        overlapped_rows: Rows of one of them.
        fanout: Children that each row of the draft gets.
        kept_trees: Share of rounds of which the re-root keeps more than the root.
        kept_nodes: Nodes that it keeps in a round, the root left out.
    """

    emitted: float
    rows: float
    awaited: tuple[float, ...] = ()
    awaited_rows: tuple[float, ...] = ()
    overlapped: float = 0.0
    overlapped_rows: float = 1.0
    fanout: int = 1
    kept_trees: float = 0.0
    kept_nodes: float = 0.0


def token_shares(requests: pd.DataFrame, profile: AcceptanceProfile) -> dict[str, float]:
    """Share of the output tokens of each recorded category; "" for those that were not recorded.

    Args:
        requests: Prepared trace.
        profile: ``Fit.answers``, whose parts of answers have shares of their own.
    """
    tokens = np.asarray(requests["output_tokens"], np.int64)
    kinds = categories_of(requests)
    known = np.array([kind if kind in profile.recordings else "" for kind in kinds], dtype=str)
    sums: dict[str, float] = {}
    for kind in np.unique(known).tolist():
        names = part_names(kind, profile)
        of_parts = tokens_of_parts(tokens[known == kind], len(names)).sum(axis=0)
        sums |= {name: float(count) for name, count in zip(names, of_parts, strict=True) if count}
    return {name: count / sum(sums.values()) for name, count in sums.items()}


def observe_all(
    specs: Sequence[SpeculationSpec], fit: Fit, shares: Mapping[str, float]
) -> dict[SpeculationSpec, Behaviour]:
    """The behaviour of each policy that decides for each request alone.

    Args:
        specs: Policies.
        fit: Its recordings and its calibration.
        shares: See ``token_shares``.
    """
    weighed = weighed_profile(fit.answers, fit.calibration)
    stretches = Stretches(weighed, sorted(shares))
    found: dict[SpeculationSpec, Behaviour] = {}
    for spec in specs:
        if spec.kind in ("plain", "chain"):
            found[spec] = chain_behaviour(spec.max_depth, fit.answers, shares)
        else:
            found[spec] = observe(spec, weighed, stretches, shares)
    return found


def chain_behaviour(
    length: int, profile: AcceptanceProfile, shares: Mapping[str, float]
) -> Behaviour:
    """Chains of a fixed length, 0 for plain decoding: replayed on every recorded token.

    Args:
        length: Draft tokens of a round.
        profile: What was recorded.
        shares: See ``token_shares``.
    """
    rounds = sum(
        share / _tokens_per_round(agreement_runs(profile, kind), length)
        for kind, share in shares.items()
    )
    ones = (1.0,) * length
    return Behaviour(emitted=1.0 / rounds, rows=length + 1.0, awaited=ones, awaited_rows=ones)


def agreement_runs(
    profile: AcceptanceProfile, kind: str, fanout: int = 1
) -> list[NDArray[np.int64]]:
    """Per recording and position, how many tokens in a row from there a perfect draft could have.

    Args:
        profile: What was recorded.
        kind: Category, "" for all, or a part of answers.
        fanout: Ranks of the draft's choices that may carry the target's token.
    """
    groups = [
        group for name, group in profile.recordings.items() if kind in (name, part_of_all(name))
    ]
    return [_runs((r.ranks >= 0) & (r.ranks < fanout)) for group in groups for r in group]


def _runs(agreed: NDArray[np.bool_]) -> NDArray[np.int64]:
    """(N,) length of the run of True that starts at each position, 0 where there is False."""
    positions = np.arange(len(agreed))
    ends = np.where(agreed, len(agreed), positions)
    return np.minimum.accumulate(ends[::-1])[::-1] - positions


def _tokens_per_round(runs: Sequence[NDArray[np.int64]], length: int) -> float:
    """Mean tokens per round when chains of ``length`` replay recordings to their ends."""
    if length == 0:
        return 1.0
    tokens = rounds = 0
    for run in runs:
        steps = (np.minimum(run, length) + 1).tolist()
        at = 0
        while at < len(steps):
            at += steps[at]
            rounds += 1
        tokens += at  # a chain that reaches beyond the end would have found more
    return tokens / rounds


def observe(
    spec: SpeculationSpec,
    weighed: AcceptanceProfile,
    stretches: Stretches,
    shares: Mapping[str, float],
) -> Behaviour:
    """Run the policy's own object over a sample of recorded rounds.

    Args:
        spec: The policy.
        weighed: See ``sim.acceptance.weighed_profile``.
        stretches: Runs of it that simulations play, too; of each that is used, the beginning.
        shares: See ``token_shares``.
    """

    drafter = SyntheticDrafter(weighed, 0, stretches.path)
    each = _ROUNDS_EACH if len(shares) * _ROUNDS_EACH <= NUM_ROUNDS else _FEWEST_ROUNDS
    found: list[Behaviour] = []
    rounds_a_token: list[float] = []
    for kind, share in sorted(shares.items()):
        rounds: list[tuple[Work, int]] = []
        for number in range(max(round(share * NUM_ROUNDS / each), 1)):
            side = DraftSide(build_speculation(spec))
            batch = PlayedBatch(side, drafter, hears_early=spec.is_async)
            stretch = stretches.first(kind) + number % stretches.count(kind)
            alone = play_alone(batch, Entering(stretch, kind, 1, _MAX_TOKENS))
            rounds += islice(alone, _WARM_UP, _WARM_UP + each)
        found.append(_means(rounds))
        rounds_a_token.append(share / found[-1].emitted)
    return replace(_mean(found, rounds_a_token), fanout=build_speculation(spec).fanout)


def _mean(kinds: Sequence[Behaviour], rounds: Sequence[float]) -> Behaviour:
    """The behaviour over rounds of all kinds, of which there are so many each."""
    weights = np.asarray(rounds) / sum(rounds)

    def mean(values: ArrayLike, weights: NDArray[np.float64] = weights) -> float:
        found = np.asarray(values)
        # Rounded, a mean of chances of 1 may be above 1, and what is left for none below 0.
        return float(np.clip(weights @ found / weights.sum(), found.min(), found.max()))

    awaited: list[float] = []
    awaited_rows: list[float] = []
    for forwards in zip_longest(*(zip(b.awaited, b.awaited_rows, strict=True) for b in kinds)):
        chances, rows = np.array([pair or (0.0, 0.0) for pair in forwards]).T
        awaited.append(mean(chances))
        awaited_rows.append(mean(rows, weights * chances))
    overlapped = [b.overlapped for b in kinds]
    beside = weights * np.array(overlapped)
    return Behaviour(
        emitted=mean([b.emitted for b in kinds]),
        rows=mean([b.rows for b in kinds]),
        awaited=tuple(awaited),
        awaited_rows=tuple(awaited_rows),
        overlapped=mean(overlapped),
        overlapped_rows=mean([b.overlapped_rows for b in kinds], beside) if beside.any() else 0.0,
        kept_trees=mean([b.kept_trees for b in kinds]),
        kept_nodes=mean([b.kept_nodes for b in kinds]),
    )


def _means(rounds: Sequence[tuple[Work, int]]) -> Behaviour:
    works, num = [work for work, _ in rounds], len(rounds)
    forwards = zip_longest(*(work.drafting for work in works))  # the first of all, the second, ...
    awaited = [[pair[0] for pair in each if pair is not None] for each in forwards]
    overlapped = [rows for work in works for rows, _ in work.overlapped]
    return Behaviour(
        emitted=sum(emitted for _, emitted in rounds) / num,
        rows=sum(work.rows for work in works) / num,
        awaited=tuple(len(rows) / num for rows in awaited),
        awaited_rows=tuple(sum(rows) / len(rows) for rows in awaited),
        overlapped=len(overlapped) / num,
        overlapped_rows=sum(overlapped) / max(len(overlapped), 1),
        kept_trees=sum(work.kept_trees for work in works) / num,
        kept_nodes=sum(work.kept_nodes for work in works) / num,
    )
