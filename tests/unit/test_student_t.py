from __future__ import annotations

import pytest
from scipy.special import stdtrit

from codesign.planner.student_t import student_t_quantile


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 6, 9, 10, 31, 100, 999, 1000])
@pytest.mark.parametrize("chance", [0.5001, 0.6, 0.9, 0.95, 0.975, 0.9999])
def test_quantiles_are_those_of_scipy(freedom, chance):
    expected = pytest.approx(stdtrit(freedom, chance), rel=1e-9)
    assert student_t_quantile(freedom, chance) == expected
