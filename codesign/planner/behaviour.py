"""What a policy does in one round, found once per policy: for arithmetic on thousands of plans.

Plain decoding and chains follow from the recordings in closed form. Every other policy is the real
object of codesign.policy, run over a sample of recorded rounds without a clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from codesign.acceptance import AcceptanceProfile
from codesign.answer_parts import part_names, tokens_of_parts
from codesign.planner.sample import NUM_TOKENS, WARM_UP, Sample, recorded_ranks, rounds_of
from codesign.policy.protocol import DraftSide
from codesign.policy.speculation import SpeculationSpec, build_speculation
from codesign.sim.acceptance import weighed_profile
from codesign.sim.played import PlayedBatch
from codesign.sim.requests import categories_of
from codesign.sim.tapes import last_forwards, play_alone
from codesign.sim.work import Entering, Work

if TYPE_CHECKING:
    import pandas as pd

    from codesign.fit import Fit

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
        ends: (F,) tokens left of an answer up to which such a forward is left out.
        unused: Tokens that the last round of an answer would emit beyond its end.
        by_request: Rounds per token, on average over requests, over those of all tokens together:
            answers begin with fewer tokens a round, and short ones are only beginnings.
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
    ends: tuple[int, ...] = ()
    unused: float = 0.0
    by_request: float = 1.0


def token_shares(requests: pd.DataFrame, profile: AcceptanceProfile) -> dict[str, float]:
    """Share of the output tokens of each recorded category; "" for those that were not recorded.

    Args:
        requests: Prepared trace.
        profile: ``Fit.answers``, whose parts of answers have shares of their own.
    """
    return _shares(requests, profile, np.ones(len(requests)))


def request_shares(requests: pd.DataFrame, profile: AcceptanceProfile) -> dict[str, float]:
    """The same where each request counts alike, however many tokens it has."""
    return _shares(requests, profile, 1.0 / np.maximum(requests["output_tokens"], 1))


def _shares(
    requests: pd.DataFrame, profile: AcceptanceProfile, weights: ArrayLike
) -> dict[str, float]:
    """Of each category, where a token of a request counts as much as its (R,) weight."""
    tokens, weight = np.asarray(requests["output_tokens"], np.int64), np.asarray(weights)
    kinds = categories_of(requests)
    known = np.array([kind if kind in profile.recordings else "" for kind in kinds], dtype=str)
    sums: dict[str, float] = {}
    for kind in np.unique(known).tolist():
        names, here = part_names(kind, profile), known == kind
        of_parts = weight[here] @ tokens_of_parts(tokens[here], len(names))
        sums |= {name: float(count) for name, count in zip(names, of_parts, strict=True) if count}
    return {name: count / sum(sums.values()) for name, count in sums.items()}


def observe_all(
    specs: Sequence[SpeculationSpec],
    fit: Fit,
    shares: Mapping[str, float],
    each: Mapping[str, float] | None = None,
) -> dict[SpeculationSpec, Behaviour]:
    """The behaviour of each policy that decides for each request alone.

    Args:
        specs: Policies.
        fit: Its recordings and its calibration.
        shares: See ``token_shares``.
        each: See ``request_shares``; None where they do not matter.
    """
    sample: Sample | None = None
    found: dict[SpeculationSpec, Behaviour] = {}
    for spec in specs:
        if spec.kind in ("plain", "chain"):
            found[spec] = chain_behaviour(spec.max_depth, fit.answers, shares, each)
        else:
            sample = sample or _sample(fit, shares, each or shares)
            found[spec] = observe(spec, sample, shares, each)
    return found


def _sample(fit: Fit, shares: Mapping[str, float], each: Mapping[str, float]) -> Sample:
    weights = {kind: (share + each[kind]) / 2 for kind, share in shares.items()}
    return Sample(weighed_profile(fit.answers, fit.calibration), weights)


def chain_behaviour(
    length: int,
    profile: AcceptanceProfile,
    shares: Mapping[str, float],
    each: Mapping[str, float] | None = None,
) -> Behaviour:
    """Chains of a fixed length, 0 for plain decoding: replayed on every recorded token.

    Args:
        length: Draft tokens of a round.
        profile: What was recorded.
        shares: See ``token_shares``.
        each: See ``request_shares``; None where they do not matter.
    """
    rounds = [np.array(rounds_of(recorded_ranks(profile, kind), length)) for kind in shares]
    ones = (1.0,) * length
    kinds = [
        Behaviour(
            emitted=float(of_kind.mean()),
            rows=length + 1.0,
            awaited=ones,
            awaited_rows=ones,
            unused=unused_tokens(of_kind),
        )
        for of_kind in rounds
    ]
    ends = _ends(last_forwards(1, length, 0, width=1), length)
    return replace(_of_all(kinds, shares, each), ends=ends)


def _ends(last: Sequence[int], num_forwards: int) -> tuple[int, ...]:
    """See ``Behaviour``, from the most forwards where one, two, ... tokens are left."""
    return tuple(sum(most <= forward for most in last) for forward in range(num_forwards))


def unused_tokens(emitted: ArrayLike) -> float:
    """Tokens behind the end of an answer that its last round would emit, on average.

    An answer ends in a long round rather than in a short one, and anywhere in it.

    Args:
        emitted: (N,) tokens of rounds.

    Source:
        The mean excess of a renewal process, for whole numbers.
    """
    tokens = np.asarray(emitted, np.float64)
    return float((np.square(tokens).sum() / tokens.sum() - 1.0) / 2.0)


def observe(
    spec: SpeculationSpec,
    sample: Sample,
    shares: Mapping[str, float],
    each: Mapping[str, float] | None = None,
) -> Behaviour:
    """Run the policy's own object over a sample of recorded rounds.

    Args:
        spec: The policy.
        sample: Where in the recordings.
        shares: See ``token_shares``.
        each: See ``request_shares``; None where they do not matter.
    """
    depth = max(spec.max_depth, spec.expansions)
    kinds: list[Behaviour] = []
    for kind in shares:
        rounds = [_seen(spec, sample, kind, place) for place in sample.places[kind]]
        of_kind = _means(list(chain.from_iterable(rounds)))
        emitted = of_kind.emitted / sample.luck(kind, of_kind.emitted, depth)
        kinds.append(replace(of_kind, emitted=max(emitted, 1.0)))
    found = _of_all(kinds, shares, each)
    fanout, num = build_speculation(spec).fanout, len(found.awaited)
    # The second forward is as wide as any behind the first one, which runs the root.
    width = round(found.awaited_rows[1]) if num > 1 else 1
    last = last_forwards(fanout, num, math.ceil(found.overlapped), width=max(width, 1))
    return replace(found, fanout=fanout, ends=_ends(last, num))


def _seen(
    spec: SpeculationSpec, sample: Sample, kind: str, place: int
) -> Iterator[tuple[Work, int]]:
    """Rounds of a request of its own that begins in a place, with the tokens of each."""
    side = DraftSide(build_speculation(spec))
    batch = PlayedBatch(side, sample.drafter, hears_early=spec.is_async)
    alone = play_alone(batch, Entering(place, kind, 1, _MAX_TOKENS))
    seen = 0
    for work, emitted in islice(alone, WARM_UP, None):
        yield work, emitted
        seen += emitted
        if seen >= NUM_TOKENS:
            return


def _of_all(
    kinds: Sequence[Behaviour], shares: Mapping[str, float], each: Mapping[str, float] | None
) -> Behaviour:
    """The behaviour over all kinds of prompt, in the order of ``shares``."""
    emitted = np.array([behaviour.emitted for behaviour in kinds])
    rounds = np.array(list(shares.values())) / emitted
    found = _mean(kinds, rounds.tolist())
    if each is None:
        return found
    of_requests = np.array([each[kind] for kind in shares]) / emitted
    return replace(found, by_request=float(of_requests.sum() / rounds.sum()))


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
        unused=mean([b.unused for b in kinds], weights * [b.emitted for b in kinds]),
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
        unused=unused_tokens([emitted for _, emitted in rounds]),
    )
