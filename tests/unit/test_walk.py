from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from codesign.errors import InputError
from codesign.policy.walk import (
    Sampling,
    Walk,
    gumbel_row,
    noise_key,
    sample_token,
    shape_logits,
    walk,
)

TREE = {"tokens": (7, 1, 2, 3), "parents": (-1, 0, 0, 1)}  # 7 -> 1 -> 3, and 7 -> 2


def kept(logits, **sampling) -> list[int]:
    shaped = shape_logits(np.array(logits, dtype=float), Sampling(temperature=1.0, **sampling))
    return np.flatnonzero(np.isfinite(shaped)).tolist()


# The walk.


def test_walk_follows_sampled_tokens_to_the_first_that_is_no_child():
    assert walk(**TREE, sample={0: 1, 1: 3, 3: 9}.__getitem__, limit=9) == Walk(
        tokens=(1, 3, 9), accepted=(0, 1, 3), is_stopped=False
    )
    assert walk(**TREE, sample={0: 2, 2: 3}.__getitem__, limit=9) == Walk(
        tokens=(2, 3), accepted=(0, 2), is_stopped=False
    )
    assert walk(**TREE, sample={0: 3}.__getitem__, limit=9) == Walk((3,), (0,), is_stopped=False)


def test_walk_of_a_root_alone_emits_one_token():
    assert walk((7,), (-1,), {0: 7}.__getitem__, limit=9) == Walk((7,), (0,), is_stopped=False)


def test_walk_follows_a_token_that_repeats_the_root():
    assert walk((7, 7, 7), (-1, 0, 1), {0: 7, 1: 7, 2: 7}.__getitem__, limit=9).accepted == (
        0,
        1,
        2,
    )


def test_walk_samples_visited_rows_only_and_each_once():
    visited = []

    def sample(row: int) -> int:
        visited.append(row)
        return {0: 1, 1: 3, 3: 9}[row]

    walk(**TREE, sample=sample, limit=9)
    assert visited == [0, 1, 3]


def test_stop_token_inside_a_run_ends_it_though_its_row_is_there():
    assert walk(**TREE, sample={0: 1}.__getitem__, stop_tokens={1}, limit=9) == Walk(
        (1,), (0,), is_stopped=True
    )
    assert walk(**TREE, sample={0: 1, 1: 3}.__getitem__, stop_tokens={3}, limit=9) == Walk(
        (1, 3), (0, 1), is_stopped=True
    )


def test_a_drafted_stop_token_that_is_not_sampled_stops_nothing():
    walked = walk(**TREE, sample={0: 2, 2: 5}.__getitem__, stop_tokens={1, 3}, limit=9)
    assert walked == Walk((2, 5), (0, 2), is_stopped=False)


@pytest.mark.parametrize(("limit", "tokens"), [(1, (1,)), (2, (1, 3)), (3, (1, 3, 9))])
def test_limit_cuts_the_run_and_stops_the_request(limit, tokens):
    walked = walk(**TREE, sample={0: 1, 1: 3, 3: 9}.__getitem__, limit=limit)
    assert walked.tokens == tokens
    assert len(walked.accepted) == limit
    assert walked.is_stopped


# Keyed noise.


def test_noise_is_a_function_of_seed_request_position_and_token_alone():
    row = gumbel_row(noise_key(3, 4, 5), 100)
    assert np.array_equal(row, gumbel_row(noise_key(3, 4, 5), 100))
    assert np.array_equal(row[:40], gumbel_row(noise_key(3, 4, 5), 40))  # whatever the vocabulary
    assert row.dtype == np.float64


def test_noise_is_the_published_generator_s_output():
    # The first three outputs of SplitMix64 from state 0, as its author's C code prints them.
    outputs = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    uniform = [((x >> 12) + 0.5) / 2**52 for x in outputs]
    assert gumbel_row(0, 3) == pytest.approx([-math.log(-math.log(u)) for u in uniform])


def test_noise_is_finite_at_both_ends_of_the_generator():
    golden = 0x9E3779B97F4A7C15
    assert gumbel_row(2**64 - golden, 1)[0] == pytest.approx(-math.log(53 * math.log(2)))  # from 0
    assert np.isfinite(gumbel_row(0, 1_000_000)).all()


def test_keys_stay_what_they_were_in_earlier_versions():
    # Written down once: a change breaks every comparison with outputs recorded before.
    assert noise_key(0, 0, 0) == 0x6246A58789053B93
    assert gumbel_row(noise_key(1, 2, 3), 2) == pytest.approx([-0.8085733779, 0.5676402694])


def test_keys_of_near_seeds_requests_and_positions_differ():
    keys = {
        noise_key(seed, request, position)
        for seed in (-1, 0, 1, 2, 2**40)
        for request in range(30)
        for position in range(300)
    }
    assert len(keys) == 5 * 30 * 300
    assert max(keys) < 2**64


def test_seed_request_and_position_do_not_stand_in_for_each_other():
    assert len({noise_key(*key) for key in [(1, 2, 3), (1, 3, 2), (2, 1, 3), (3, 2, 1)]}) == 4
    assert len({noise_key(*key) for key in [(0, 0, 1), (0, 1, 0), (1, 0, 0)]}) == 3


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_noise_is_gumbel_along_every_axis_of_its_key(axis):
    # Kolmogorov-Smirnov on 20,000 values; fixed keys, so the p-value is a constant.
    def key(n: int) -> int:
        return noise_key(*[n if i == axis else 5 for i in range(3)])

    first = np.array([gumbel_row(key(n), 1)[0] for n in range(20_000)])
    assert stats.kstest(first, "gumbel_r").pvalue > 0.01
    assert first.mean() == pytest.approx(np.euler_gamma, abs=4 * math.pi / 6**0.5 / 20_000**0.5)


def test_noise_is_gumbel_along_the_vocabulary():
    row = gumbel_row(noise_key(0, 1, 2), 200_000)
    assert stats.kstest(row, "gumbel_r").pvalue > 0.01
    assert np.isfinite(row).all()
    assert len(np.unique(row)) == len(row)


@pytest.mark.parametrize(
    "neighbour", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 2), (1, 0, -1), (0, 1, -1)]
)
def test_neighbouring_rows_are_uncorrelated(neighbour):
    # Of normal scores, at lags of -3 to 3 tokens: below 5 standard errors, 1 / sqrt(n).
    here = np.array([7, 11, 13])
    a = stats.norm.ppf(stats.gumbel_r.cdf(gumbel_row(noise_key(*here.tolist()), 100_003)))
    b = stats.norm.ppf(
        stats.gumbel_r.cdf(gumbel_row(noise_key(*(here + neighbour).tolist()), 100_003))
    )
    for lag in range(-3, 4):
        correlation = np.mean(a[3:-3] * b[3 + lag : 100_000 + lag])
        assert abs(correlation) < 5 / 100_000**0.5, lag


def test_tokens_within_a_row_are_uncorrelated():
    row = stats.norm.ppf(stats.gumbel_r.cdf(gumbel_row(noise_key(7, 11, 13), 100_003)))
    for lag in range(1, 4):
        assert abs(np.mean(row[:100_000] * row[lag : 100_000 + lag])) < 5 / 100_000**0.5


# Sampling.


def frequencies(logits, sampling: Sampling, draws: int) -> np.ndarray:
    counts = np.zeros(len(logits))
    for position in range(draws):
        counts[sample_token(logits, sampling, request_id=3, position=position)] += 1
    return counts / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    logits = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    probs = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    found = frequencies(logits, Sampling(temperature=temperature, seed=8), 20_000)
    # Within 4 standard errors of a binomial count.
    assert np.all(np.abs(found - probs) < 4 * np.sqrt(probs * (1 - probs) / 20_000))


def test_frequencies_follow_the_softmax_over_requests_and_seeds_too():
    logits = np.log([0.5, 0.3, 0.2])
    for vary in ("request", "seed"):
        counts = np.zeros(3)
        for n in range(10_000):
            sampling = Sampling(temperature=1.0, seed=n if vary == "seed" else 0)
            request = n if vary == "request" else 0
            counts[sample_token(logits, sampling, request_id=request, position=4)] += 1
        assert stats.chisquare(counts, 10_000 * np.array([0.5, 0.3, 0.2])).pvalue > 0.01


def test_frequencies_in_the_nucleus_are_renormalised():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    found = frequencies(logits, Sampling(temperature=1.0, top_p=0.65, seed=1), 20_000)
    probs = np.array([4 / 7, 3 / 7, 0, 0])
    assert np.all(np.abs(found - probs) <= 4 * np.sqrt(probs * (1 - probs) / 20_000))


def test_temperature_zero_is_argmax_without_noise():
    logits = np.array([0.0, 3.0, 2.999, 3.0], dtype=np.float32)
    for position in range(50):
        sampling = Sampling(seed=position)
        assert sample_token(logits, sampling, request_id=position, position=position) == 1


def test_low_temperature_comes_close_to_argmax():
    logits = np.array([0.0, 1.0, 0.9])
    found = frequencies(logits, Sampling(temperature=1e-3), 500)
    assert found.tolist() == [0.0, 1.0, 0.0]


def test_logits_are_left_as_they_were():
    logits = np.array([3.0, 2.0, 1.0])
    shape_logits(logits, Sampling(temperature=1.0, top_k=2, top_p=0.5))
    assert logits.tolist() == [3.0, 2.0, 1.0]


def test_all_tokens_stay_by_default():
    assert kept([3.0, 2.0, -50.0]) == [0, 1, 2]
    assert shape_logits(np.array([3.0, 1.0]), Sampling(temperature=0.5)).tolist() == [6.0, 2.0]


def test_top_k_keeps_the_k_likeliest():
    assert kept([1.0, 4.0, 2.0, 3.0], top_k=2) == [1, 3]
    assert kept([1.0, 4.0, 2.0, 3.0], top_k=1) == [1]
    assert kept([1.0, 4.0], top_k=2) == kept([1.0, 4.0], top_k=9) == [0, 1]


def test_top_k_keeps_all_that_tie_with_the_last():
    assert kept([1.0, 2.0, 2.0, 3.0], top_k=2) == [1, 2, 3]


@pytest.mark.parametrize(
    ("top_p", "tokens"),
    [
        (0.05, [0]),
        (0.39, [0]),
        (0.41, [0, 1]),
        (0.69, [0, 1]),
        (0.71, [0, 1, 2]),
        (0.99, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, tokens):
    assert kept(np.log([0.4, 0.3, 0.2, 0.1]), top_p=top_p) == tokens
    # Whatever the order and scale of the logits.
    mixed = np.log([0.1, 0.3, 0.4, 0.2]) + 17
    assert len(kept(mixed, top_p=top_p)) == len(tokens)


@pytest.mark.parametrize(("top_p", "size"), [(0.01, 1), (0.25, 2), (0.5, 4), (0.51, 5), (0.99, 8)])
def test_top_p_of_a_flat_law_keeps_just_enough(top_p, size):
    assert len(kept(np.zeros(8), top_p=top_p)) == size


def test_top_p_of_a_long_flat_law_keeps_the_first_tokens():
    assert kept(np.zeros(1000), top_p=0.25) == list(range(250))
    two_levels = np.where(np.arange(1000) % 2, 0.0, 1.0)  # even tokens are likelier
    mass = 250 * math.e / (500 * math.e + 500)
    assert kept(two_levels, top_p=mass - 1e-6) == list(range(0, 500, 2))


def test_top_p_keeps_the_likeliest_token_of_a_flat_law():
    logits = np.zeros(1000)
    logits[617] = 0.01
    assert kept(logits, top_p=1e-9) == [617]


def test_top_p_acts_on_what_top_k_left():
    # Of 0.5 and 0.3 alone, the first has 5/8: enough for 0.6.
    assert kept(np.log([0.5, 0.3, 0.2]), top_k=2, top_p=0.6) == [0]
    assert kept(np.log([0.5, 0.3, 0.2]), top_p=0.6) == [0, 1]


def test_float32_logits_with_large_offsets_do_not_overflow():
    shaped = shape_logits(np.array([1e4, 1e4 - 1, -1e4], np.float32), Sampling(1.0, top_p=0.9))
    assert np.isfinite(shaped).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or above, got -0.1"),
        ({"temperature": math.nan}, "temperature must be 0 or above"),
        ({"temperature": math.inf}, "temperature must be 0 or above"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, "top_p must be"),
        ({"top_p": math.nan}, "top_p must be"),
    ],
)
def test_sampling_values_without_a_meaning_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        Sampling(**values)
