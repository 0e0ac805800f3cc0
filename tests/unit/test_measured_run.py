"""What is said of the tokens of several runs of one plan."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from codesign.config import parse_deployment
from codesign.engine.measured_run import agreement

PLAIN = {0: [1, 2, 3], 1: [4, 5, 6], 2: [7, 8]}
OTHER = {**PLAIN, 1: [4, 5, 9]}


def run_on(deployment: str, outputs: dict[int, list[int]]) -> SimpleNamespace:
    candidate = SimpleNamespace(deployment=parse_deployment(deployment))
    return SimpleNamespace(
        scored=SimpleNamespace(candidate=candidate), outputs=outputs, refused={}, is_complete=True
    )


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([("2", PLAIN), ("2", PLAIN), ("1+1", PLAIN)], "the same tokens in every run"),
        (
            [("2", PLAIN), ("1+1", OTHER), ("2", PLAIN), ("2x1", OTHER)],
            "the same tokens in all runs whose target has 1 and 2 workers; 1 request not alike on "
            "1 and 2 workers, which add their sums in another order",
        ),
        (
            [("2", PLAIN), ("1+1", OTHER), ("2", PLAIN)],
            "the same tokens in all runs whose target has 2 workers; 1 request not alike on 1 and "
            "2 workers, which add their sums in another order",
        ),
        (
            [("2", PLAIN), ("1+1", OTHER)],
            "1 request not alike on 1 and 2 workers; to compare policies run two on one split, "
            "such as plain (--candidate)",
        ),
        (
            [("2", PLAIN), ("1+1", PLAIN), ("2", OTHER)],
            "1 request not alike in runs whose target has as many workers (1): with --device cuda "
            "forwards of other sizes may round otherwise (--padded-rows)",
        ),
    ],
)
def test_a_difference_is_put_down_to_the_split_only_where_it_follows_the_split(runs, said):
    assert agreement([run_on(*run) for run in runs]) == said


def test_of_many_requests_that_differ_the_first_are_named():
    many = {i: [i] for i in range(30)}
    found = agreement([run_on("2", many), run_on("2", {i: [-1] for i in many})])
    assert found.startswith("30 requests not alike")
    assert "(0, 1, 2, 3, 4, 5, 6, 7, ...)" in found
