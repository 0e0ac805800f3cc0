"""A trace in a few numbers, against hand counts."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codesign.planner.workload import Workload, cached_share


def trace(arrival, prompt=100, output=50) -> pd.DataFrame:
    return pd.DataFrame({"arrival": arrival, "prompt_tokens": prompt, "output_tokens": output})


def test_lengths_by_hand():
    found = Workload.of(trace([0.0, 1.0, 4.0], [10, 20, 30], [10, 20, 60]))
    assert found.duration == 4.0
    assert found.num_requests == 3.0
    assert found.output == 30.0
    assert found.output_variation == pytest.approx(np.var([10, 20, 60]) / 900)
    # A request weighs as much as its output; on average half of its answer is there.
    assert found.context == pytest.approx((10 * 15 + 20 * 30 + 60 * 60) / 90)


@pytest.mark.parametrize(("scale", "variation"), [(0.0, 0.0), (1.0, 1.0)])
def test_regular_arrivals_do_not_vary_and_poisson_ones_vary_as_much_as_their_mean(scale, variation):
    gaps = np.random.default_rng(0).exponential(1.0, 4000)
    arrival = np.cumsum(scale * gaps + (1 - scale))
    assert Workload.of(trace(arrival)).variation == pytest.approx(variation, abs=0.12)


def test_a_rate_that_changes_slowly_is_load_and_not_variation():
    arrival = np.concatenate([np.arange(4000) * 1.0, 4000 + np.arange(4000) * 0.25])
    found = Workload.of(trace(arrival))
    assert found.variation < 0.05
    assert found.arrivals[-1] == pytest.approx(4 * found.arrivals[0], rel=0.1)


@given(
    st.lists(
        st.tuples(st.floats(0.0, 1e5), st.integers(1, 10**5), st.integers(1, 10**4)), min_size=1
    ),
    st.floats(0.0, 1.0),
)
def test_whatever_the_trace_all_requests_are_counted_and_every_number_is_usable(rows, hits):
    frame = pd.DataFrame(rows, columns=["arrival", "prompt_tokens", "output_tokens"])
    found = Workload.of(frame, cached_share=hits)
    assert found.num_requests == len(frame)
    assert found.duration > 0
    assert np.all(found.prompts >= 1)
    assert found.prompts.max() <= frame["prompt_tokens"].max()
    assert 1 <= found.output <= frame["output_tokens"].max()
    assert np.isfinite([found.variation, found.output_variation, found.last_output]).all()
    assert found.variation >= 0
    longest = frame["prompt_tokens"] + frame["output_tokens"]
    assert found.context <= longest.max()


def test_cached_prompts_are_shorter():
    whole, half = (Workload.of(trace(np.arange(9.0)), cached_share=s) for s in (0.0, 0.5))
    assert np.allclose(half.prompts, whole.prompts / 2)


def test_blocks_that_a_replica_has_seen_are_cached():
    frame = trace(np.arange(4.0), [1024, 1024, 1024, 600])
    frame["hash_ids"] = [[1, 2], [1, 3], [1, 2], [1, 2]]
    # One cache: 512 of the second, all but a token of the third, the whole block of the fourth.
    assert cached_share(frame, 1) == pytest.approx((512 + 1023 + 512) / 3672)
    # Two: the third comes to the first one's cache, the fourth to the second one's.
    assert cached_share(frame, 2) == pytest.approx((1023 + 512) / 3672)
    assert cached_share(frame.drop(columns="hash_ids"), 1) == 0.0
