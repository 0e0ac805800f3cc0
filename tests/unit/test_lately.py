"""What a figure has been lately."""

from __future__ import annotations

import numpy as np
import pytest

from codesign.policy.lately import Lately


def test_the_first_figure_is_all_that_is_known():
    lately = Lately()
    assert lately.take_in(0.0, 5.0, 1.0) == 0.0
    assert Lately().take_in(3.0, 5.0, 1.0) == 3.0


def test_a_figure_counts_for_as_long_as_it_has_held():
    lately = Lately()
    lately.take_in(1.0, 0.0, 2.0)
    assert lately.take_in(3.0, 0.0, 2.0) == 1.0
    assert lately.take_in(3.0, 2.0, 2.0) == pytest.approx(3.0 - 2.0 / np.e)
    assert lately.take_in(3.0, 1e4, 2.0) == pytest.approx(3.0)


def test_few_times_say_the_same_as_many_between_which_it_changes_steadily():
    few, many = Lately(), Lately()
    few.take_in(1.0, 0.0, 2.0)
    for now in np.linspace(0.0, 1.5, 1001):
        found = many.take_in(1.0 + 2.0 * now / 1.5, now, 2.0)
    assert few.take_in(3.0, 1.5, 2.0) == pytest.approx(found, rel=1e-4)
