"""Rounds that a profile times again, because something disturbed them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from codesign.profiler.rank_rounds import _steady_rounds

STEADY, SHAKY, SHAKIER = (np.linspace(1.0, end, 9) for end in (1.1, 1.5, 3.0))


def served(*tries: np.ndarray) -> tuple[pd.DataFrame, int]:
    """What is kept of these tries, and how many were made."""
    left = [pd.DataFrame({"rows": 1, "target": seconds}) for seconds in tries]
    made = []

    def serve(policy: str, requests: int, *, context: int | None) -> pd.DataFrame:
        assert (policy, requests, context) == ("plain", 1, None)
        made.append(left.pop(0))
        return made[-1]

    return _steady_rounds(SimpleNamespace(served_rounds=serve), "plain"), len(made)


@pytest.mark.parametrize(
    ("tries", "kept", "made"),
    [
        ((STEADY, SHAKY), STEADY, 1),
        ((SHAKY, STEADY, SHAKIER), STEADY, 2),
        ((SHAKIER, SHAKY, SHAKIER, STEADY), SHAKY, 3),
    ],
)
def test_the_steadiest_of_three_is_kept_and_a_steady_one_at_once(tries, kept, made):
    rounds, count = served(*tries)
    assert count == made
    assert (rounds["target"] == kept).all()
