"""Recorded acceptance: tables in, recordings out, and what is refused."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from codesign.acceptance import AcceptanceProfile
from codesign.errors import InputError


def small_table() -> pd.DataFrame:
    rows = [
        (7, "chat", 0, 0, [-0.1, -3.0]),
        (7, "chat", 1, -1, [-0.7, -0.8]),
        (7, "chat", 2, 1, [-0.5, -1.5]),
        (3, "code", 0, 0, [-0.2, -2.0]),
        (9, "chat", 0, 1, [-0.3, -1.8]),
    ]
    return pd.DataFrame(rows, columns=["request", "category", "position", "rank", "log_probs"])


def test_requests_stay_whole_and_in_order_whatever_the_order_of_the_rows():
    profile = AcceptanceProfile.from_table(small_table().sample(frac=1.0, random_state=3))
    assert profile.categories == ("chat", "code")
    first, second = profile.recordings["chat"]
    assert (first.request, second.request) == (7, 9)
    assert first.ranks.tolist() == [0, -1, 1]
    assert first.log_probs.tolist() == [[-0.1, -3.0], [-0.7, -0.8], [-0.5, -1.5]]
    assert profile.num_tokens == 5
    assert profile.top_k == 2


def test_the_table_that_a_profile_writes_is_read_back_the_same():
    profile = AcceptanceProfile.from_table(small_table())
    table = profile.to_table()
    assert table["rank"].dtype == np.int8
    again = AcceptanceProfile.from_table(table)
    for category in profile.categories:
        for old, new in zip(profile.recordings[category], again.recordings[category], strict=True):
            assert old.request == new.request
            np.testing.assert_array_equal(old.ranks, new.ranks)
            np.testing.assert_allclose(old.log_probs, new.log_probs, rtol=1e-6)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("rank", [0.5, -1, 1, 0, 1]),
        ("rank", ["a", "b", "c", "d", "e"]),
        ("position", [0, 1, 2, 0, float("nan")]),
        ("category", [None, "chat", "chat", "code", "chat"]),
        ("log_probs", [False] * 5),
        ("log_probs", [[-0.1, "a"]] * 5),
        ("log_probs", [[-0.1, None]] * 5),
    ],
)
def test_values_of_another_type_are_refused_and_none_is_cut_to_a_whole_number(column, values):
    with pytest.raises(InputError, match="Record again: codesign profile"):
        AcceptanceProfile.from_table(small_table().assign(**{column: values}))


def test_hit_rate_counts_the_ranks_within_the_fanout():
    profile = AcceptanceProfile.from_table(small_table())
    assert profile.hit_rate(1) == pytest.approx(2 / 5)
    assert profile.hit_rate(2) == pytest.approx(4 / 5)
    assert profile.hit_rate(1, "chat") == pytest.approx(1 / 4)


def test_independent_ranks_have_the_chances_asked_for():
    profile = AcceptanceProfile.independent([0.6, 0.2], num_tokens=40_000, seed=1)
    error = np.sqrt(0.6 * 0.4 / 40_000)
    assert abs(profile.hit_rate(1) - 0.6) < 5 * error
    assert abs(profile.hit_rate(2) - 0.8) < 5 * error


@pytest.mark.parametrize("chances", [[], [0.0], [0.2, 0.3], [0.9, 0.2]])
def test_chances_that_cannot_be_are_refused(chances):
    with pytest.raises(InputError, match="descending chances"):
        AcceptanceProfile.independent(chances, num_tokens=10, seed=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop(columns="rank"), "lacks rank"),
        (lambda t: t.iloc[:0], "no recorded tokens"),
        (lambda t: t.assign(rank=[0, -2, 1, 0, 1]), "ranks must lie"),
        (lambda t: t.assign(rank=[0, -1, 2, 0, 1]), "ranks must lie"),
        (lambda t: t.assign(position=[0, 2, 3, 0, 0]), "request 7 have gaps"),
        (lambda t: t.assign(log_probs=[[-1.0, -0.5]] * 5), "must descend"),
        (lambda t: t.assign(log_probs=[[0.5, -0.5]] * 5), "at most 0"),
        (lambda t: t.assign(log_probs=[[-0.5, -np.inf]] * 5), "finite"),
        (lambda t: t.assign(log_probs=[[-0.5]] * 4 + [[-0.5, -1.0]]), "one length"),
    ],
)
def test_a_damaged_table_is_refused_with_the_command_that_makes_a_new_one(change, message):
    with pytest.raises(InputError, match=message) as caught:
        AcceptanceProfile.from_table(change(small_table()))
    assert "codesign profile" in str(caught.value)
