from __future__ import annotations

import itertools

from codesign.fit import Fit
from codesign.fit.shipped import DEFAULT_FIT, machine_of, shipped_acceptance
from codesign.models import DEFAULT_TARGET, DRAFTS
from codesign.policy.walk import Sampling


def test_the_shipped_fit_covers_the_default_pair_in_one_process_and_in_two():
    fit = Fit.load(DEFAULT_FIT)
    assert (fit.target, fit.draft) == (DEFAULT_TARGET, DRAFTS[DEFAULT_TARGET])
    assert set(fit.costs) == {"2", "1+1"}
    assert "measured 20" in machine_of(DEFAULT_FIT)


def test_step_times_of_the_shipped_fit_are_those_of_a_machine():
    for cost in Fit.load(DEFAULT_FIT).costs.values():
        for step in (cost.target, cost.draft):
            seconds = [step(rows, 256.0) for rows in range(1, 65)]
            assert all(0 < a <= b for a, b in itertools.pairwise(seconds))
        assert all(cost.target(n) > 4 * cost.draft(n) for n in (1, 4, 8))


def test_shipped_acceptance_is_found_for_its_pair_and_its_sampling_alone():
    pair = (DEFAULT_TARGET, DRAFTS[DEFAULT_TARGET])
    table = shipped_acceptance(*pair, Sampling(seed=7))
    assert table is not None
    assert len(table) > 3000
    assert 0.6 < (table["rank"] == 0).mean() < 0.9
    assert table["category"].nunique() == 6
    for other in (Sampling(0.7), Sampling(top_k=5), Sampling(top_p=0.9)):
        assert shipped_acceptance(*pair, other) is None
    assert shipped_acceptance(DEFAULT_TARGET, "ngram", Sampling()) is None
