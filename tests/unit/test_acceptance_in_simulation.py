"""What a simulation accepts is what was recorded: by kind of prompt, in runs, by rank and depth.

Each expectation is counted on the recordings themselves, by walking them as the policy would; the
simulation is only looked at from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd
import pytest

from codesign.candidate import Candidate
from codesign.config import Deployment, Serving
from codesign.fit import Fit
from codesign.fit.shipped import DEFAULT_FIT
from codesign.policy.cost import RoundCost, StepTime
from codesign.policy.speculation import parse_policy
from codesign.records import RunRecords
from codesign.sim import simulate

FIT = Fit.load(DEFAULT_FIT)
PROFILE = FIT.acceptance
STEP = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.01)
DRAFT = StepTime.linear(alpha=0.0, gamma=0.0, delta=0.001)
COST = RoundCost(STEP, DRAFT, STEP, DRAFT, link=1e-4)
REQUESTS, TOKENS = 60, 400
_STARTS = 6
Walk = Callable[[list[int], int], int]  # ranks and position of the root's successor -> accepted


def played(policy: str, category: str, *, deployment: Deployment) -> RunRecords:
    """One request after another, so that a round is a request's own."""
    requests = pd.DataFrame(
        {
            "arrival": np.arange(REQUESTS) * 1e3,
            "prompt_tokens": 8,
            "output_tokens": TOKENS,
            "category": category,
        }
    )
    fit = Fit(
        target=FIT.target, draft=FIT.draft, temperature=0.0, costs={deployment.label: COST},
        calibration=FIT.calibration, acceptance=PROFILE, errors={},
    )  # fmt: skip
    candidate = Candidate(deployment, parse_policy(policy), 1)
    serving = Serving(max_kv_tokens=100_000)
    return simulate(requests, candidate, fit, serving=serving, seed=4)


def counted(category: str, walk: Walk) -> list[list[int]]:
    """Accepted draft tokens of each round, recording by recording, from several starts each."""
    found = []
    for recording in PROFILE.recordings[category]:
        ranks = recording.ranks.tolist()
        for start in range(_STARTS):
            rounds, at = [], start
            while at < len(ranks) - 4:
                rounds.append(walk(ranks, at))
                at += rounds[-1] + 1
            found.append(rounds)
    return found


def chain(length: int) -> Walk:
    def walk(ranks: list[int], at: int) -> int:
        run = 0
        while run < length and ranks[at + run] == 0:
            run += 1
        return run

    return walk


def static_tree(widths: tuple[int, ...]) -> Walk:
    def walk(ranks: list[int], at: int) -> int:
        depth = 0
        while depth < len(widths) and 0 <= ranks[at + depth] < widths[depth]:
            depth += 1
        return depth

    return walk


def by_request(records: RunRecords) -> Iterator[np.ndarray]:
    """Accepted draft tokens of each round of a request; the last ones are cut by its end."""
    accepted = records.rounds.column("num_accepted_tokens")
    start = records.rounds.column("start")
    for number in range(REQUESTS):
        own = accepted[(start >= number * 1e3) & (start < (number + 1) * 1e3)]
        yield own[:-3]


def mean_and_error(groups: list[np.ndarray]) -> tuple[float, float]:
    """Mean over all rounds, and its standard error from the spread over groups."""
    means = np.array([np.mean(g) for g in groups])
    return float(np.mean(np.concatenate(groups))), float(means.std(ddof=1) / np.sqrt(len(means)))


def lag_one(groups: list[np.ndarray]) -> float:
    """Correlation of a round's accepted tokens with the next one's."""
    before = np.concatenate([g[:-1] for g in groups])
    after = np.concatenate([g[1:] for g in groups])
    return float(np.corrcoef(before, after)[0, 1])


@pytest.mark.parametrize("category", PROFILE.categories)
def test_a_chain_is_accepted_as_often_as_on_the_recordings_of_its_kind_of_prompt(category):
    simulated = list(by_request(played("chain-3", category, deployment=Deployment(1))))
    recorded = [np.array(r) for r in counted(category, chain(3))]
    (mean, error), (wanted, _) = mean_and_error(simulated), mean_and_error(recorded)
    assert mean == pytest.approx(wanted, abs=4 * error + 0.03)


def test_kinds_of_prompt_differ_in_the_simulation_as_they_do_in_the_recordings():
    rates = {name: PROFILE.hit_rate(1, name) for name in PROFILE.categories}
    low, high = min(rates, key=rates.__getitem__), max(rates, key=rates.__getitem__)
    means = [
        mean_and_error(list(by_request(played("chain-3", name, deployment=Deployment(1)))))[0]
        for name in (low, high)
    ]
    assert means[1] > means[0] + 0.3


def test_agreement_comes_in_runs_as_long_as_the_recorded_ones():
    """Rounds of one token: the correlation of hits along a request survives the replay."""
    simulated, recorded = [], []
    for category in PROFILE.categories:
        simulated += list(by_request(played("chain-1", category, deployment=Deployment(1))))
        recorded += [np.array(r) for r in counted(category, chain(1))]
    wanted = lag_one(recorded)
    shuffled = np.random.default_rng(0).permutation(np.concatenate(recorded))
    assert wanted > 0.05 > abs(lag_one([shuffled]))
    assert lag_one(simulated) == pytest.approx(wanted, abs=0.04)


@pytest.mark.parametrize("widths", [(3,), (2, 2), (4, 1, 1)])
def test_a_tree_accepts_each_rank_and_depth_as_often_as_the_recordings_have_it(widths):
    policy = f"static-tree-{'x'.join(map(str, widths))}"
    simulated = list(by_request(played(policy, "summary", deployment=Deployment(1))))
    recorded = [np.array(r) for r in counted("summary", static_tree(widths))]
    got, wanted = np.concatenate(simulated), np.concatenate(recorded)
    for depth in range(1, len(widths) + 1):
        error = np.sqrt(0.25 / len(wanted)) + np.sqrt(0.25 / len(got))
        assert np.mean(got >= depth) == pytest.approx(np.mean(wanted >= depth), abs=3 * error)


def test_the_target_waits_for_a_draft_forward_exactly_where_the_bonus_token_was_not_drafted():
    """One candidate, two forwards meanwhile: a miss is any round but one of two hits in a row."""

    def walk(ranks: list[int], at: int) -> int:
        return 1 if ranks[at] == 0 else 0

    misses = []
    for recording in PROFILE.recordings["code"]:
        ranks, at = recording.ranks.tolist(), 0
        while at < len(ranks) - 2:
            misses.append(not (ranks[at] == 0 and ranks[at + 1] == 0))
            at += walk(ranks, at) + 1
    records = played("async-tree-2x1x2", "code", deployment=Deployment(1, 1))
    waited = records.rounds.column("draft")[1:] > 1e-9
    assert np.mean(waited) == pytest.approx(np.mean(misses), abs=0.05)
    # A miss costs its forward: nothing that the target waits for is free.
    assert np.median(records.rounds.column("draft")[1:][waited]) == pytest.approx(0.001, rel=1e-6)


def test_drafting_meanwhile_accepts_less_than_drafting_before():
    """The asynchronous loss: a tree grown without the verdict is not as good."""
    serial = played("tree-8x4x3", "chat", deployment=Deployment(1))
    apart = played("async-tree-8x4x3", "chat", deployment=Deployment(1, 1))
    means = [r.rounds.column("num_emitted_tokens").mean() for r in (serial, apart)]
    assert 1.0 < means[1] < means[0]
