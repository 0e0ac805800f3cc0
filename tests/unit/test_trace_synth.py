"""Synthetic twins have the published statistics, and bytes that depend on the seed alone."""

from __future__ import annotations

import numpy as np
import pytest

from codesign.errors import InputError
from codesign.prompts import CATEGORIES
from codesign.traces import load_trace, summarise
from codesign.traces.catalog import TWINS, bundled_path
from codesign.traces.checks import BLOCK_TOKENS
from codesign.traces.files import csv_text
from codesign.traces.presets import PRESETS
from codesign.traces.synth import synthesise

SEEDS = (1, 2, 3)


def near(expected: float, tolerance: float):
    return pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("seed", SEEDS)
def test_steady_twin_has_the_statistics_of_azure_conversation(seed):
    summary = summarise(synthesise("steady", seed=seed))
    assert summary.rate == near(5.53, 0.005)
    assert summary.interarrival_cv == near(1.09, 0.05)
    assert 11 <= summary.peak_requests <= 20  # 16 in the published hour
    assert summary.prompt.mean == near(1154.7, 0.03)
    assert summary.output.mean == near(211.1, 0.03)
    assert summary.prompt.p50 == near(1020, 0.02)
    assert summary.prompt.p90 == near(2734.5, 0.03)
    assert summary.prompt.p99 == near(4142, 0.03)
    assert summary.output.p50 == near(129, 0.03)
    assert summary.output.p99 == near(601, 0.03)


@pytest.mark.parametrize("seed", SEEDS)
def test_bursty_twin_has_the_statistics_of_azure_coding(seed):
    summary = summarise(synthesise("bursty", seed=seed))
    assert summary.rate == near(2.57, 0.005)
    assert summary.interarrival_cv == near(13.15, 0.005)
    assert summary.peak_requests == near(67, 0.2)
    assert summary.prompt.mean == near(2047.8, 0.03)
    assert summary.output.mean == near(27.88, 0.05)
    assert summary.prompt.p50 == near(1469, 0.02)
    assert summary.output.p50 == near(13, 0.08)
    assert summary.output.p99 == near(251.5, 0.05)


def test_bursty_twin_is_silent_most_of_the_time_as_published():
    arrival = synthesise("bursty", duration=3600).requests["arrival"].to_numpy()
    gaps = np.diff(arrival)
    assert gaps[gaps > 10].sum() / arrival[-1] == near(0.692, 0.05)
    assert (gaps > 10).sum() == near(45 * 3600 / 3436, 0.15)
    assert np.median(gaps) == near(0.064, 0.5)
    assert np.quantile(gaps, 0.25) < 0.005


@pytest.mark.parametrize("seed", SEEDS)
def test_low_twin_has_the_statistics_of_mooncake_at_a_third_of_its_rate(seed):
    trace = synthesise("low", seed=seed)
    summary = summarise(trace)
    assert summary.rate == near(3.4012 / 3, 0.02)
    assert summary.prompt.mean == near(12035, 0.03)
    assert summary.output.mean == near(342.6, 0.03)
    assert summary.prefix_hit_rate == near(0.3664, 0.04)
    assert summary.prompt.p50 == near(6909, 0.02)
    assert summary.prompt.p99 == near(85400, 0.05)
    arrival = trace.requests["arrival"].to_numpy()
    assert (arrival % 3 == 0).all()
    in_a_tick = np.bincount((arrival / 3).astype(int))
    assert in_a_tick.var() / in_a_tick.mean() == near(1.0, 0.35)  # 1.10 published


def test_low_twin_shares_prefixes_as_chains():
    requests = synthesise("low").requests
    chains = requests["hash_ids"].tolist()
    assert [len(ids) for ids in chains] == list(-(-requests["prompt_tokens"] // BLOCK_TOKENS))
    before: dict[int, int] = {}
    for ids in chains:
        assert len(set(ids)) == len(ids)
        for previous, block in zip([-1, *ids], ids, strict=False):
            assert before.setdefault(block, previous) == previous  # a block names all before it
    assert {ids[0] for ids in chains} == {0}
    seen: set[int] = set()
    num_followers = 0
    for ids in chains:
        num_followers += len(ids) > 1 and ids[1] in seen
        seen.update(ids)
    assert num_followers / len(chains) == near(0.387, 0.2)


@pytest.mark.parametrize("preset", PRESETS)
def test_same_seed_same_bytes_other_seed_other_requests(preset):
    first, again = (synthesise(preset, seed=5, duration=60) for _ in range(2))
    other = synthesise(preset, seed=6, duration=60)
    assert csv_text(first) == csv_text(again)
    assert first.sha256 == again.sha256 != other.sha256
    for column in ("prompt_tokens", "output_tokens", "category", "arrival"):
        assert first.requests[column].tolist() != other.requests[column].tolist()


@pytest.mark.parametrize("twin", TWINS)
def test_bundled_files_are_rebuilt_byte_for_byte(twin):
    trace = synthesise(TWINS[twin])
    assert bundled_path(twin).read_bytes() == csv_text(trace).encode()
    assert load_trace(twin).sha256 == trace.sha256


def test_bundled_files_are_small():
    assert sum(bundled_path(twin).stat().st_size for twin in TWINS) < 1_000_000


@pytest.mark.parametrize("preset", PRESETS)
def test_twins_come_back_from_their_file_as_they_were_made(preset, tmp_path):
    trace = synthesise(preset, duration=50, seed=9)
    (tmp_path / "a.csv").write_bytes(csv_text(trace).encode())
    again = load_trace(tmp_path / "a.csv")
    assert again.requests.to_dict("list") == trace.requests.to_dict("list")
    assert (again.notes, again.sha256) == (trace.notes, trace.sha256)


@pytest.mark.parametrize("preset", PRESETS)
def test_categories_follow_the_weights_and_are_called_an_assumption(preset):
    trace = synthesise(preset, num_requests=5000)
    weights = np.array(PRESETS[preset].weights)
    for name, share in zip(CATEGORIES, weights / weights.sum(), strict=True):
        noise = np.sqrt(share * (1 - share) / 5000)
        assert abs((trace.requests["category"] == name).mean() - share) <= 4.5 * noise
    assert any("assumption" in note for note in trace.notes)


def test_rate_duration_and_number_of_requests_are_kept():
    assert len(synthesise("steady", duration=100, rate=2)) == 200
    trace = synthesise("bursty", num_requests=1000, rate=10)
    assert len(trace) == 1000
    assert summarise(trace).rate == near(10, 1e-6)
    assert len(synthesise("low", num_requests=1)) == 1
    assert len(synthesise("steady", num_requests=1)) == 1


def test_another_cv_is_kept():
    assert summarise(synthesise("steady", cv=0.3)).interarrival_cv == near(0.3, 0.05)
    assert summarise(synthesise("steady", cv=3)).interarrival_cv == near(3, 0.15)
    assert summarise(synthesise("bursty", cv=8)).interarrival_cv == near(8, 1e-3)


def test_few_bursty_requests_have_the_cv_they_can_have_and_say_so():
    trace = synthesise("bursty", num_requests=150)
    assert summarise(trace).interarrival_cv == near(0.5 * np.sqrt(149), 1e-3)
    assert any("too few requests for the published cv 13.15" in note for note in trace.notes)
    assert not any("too few" in note for note in synthesise("bursty").notes)


@pytest.mark.parametrize(
    ("preset", "values", "reason"),
    [
        ("stormy", {}, "one of steady, bursty, low"),
        ("steady", {"duration": 0}, "duration must be a positive"),
        ("steady", {"duration": float("inf")}, "duration must be a positive"),
        ("steady", {"rate": -1}, "rate must be a positive"),
        ("steady", {"cv": 0}, "cv must be above 0"),
        ("steady", {"num_requests": 0}, "1 to 100,000,000 requests, not 0"),
        ("steady", {"rate": 1e300}, "1 to 100,000,000 requests"),
        ("steady", {"num_requests": 50, "cv": 1000}, "cannot have a cv of 1000"),
        ("steady", {"num_requests": 5, "duration": 5}, "not both"),
        ("low", {"cv": 2}, "ticks of 3 s"),
        ("bursty", {"cv": 0.5}, "cannot have a cv of 0.5"),
        ("bursty", {"num_requests": 150, "cv": 50}, "cannot have a cv of 50"),
        ("steady", {"num_requests": 150, "cv": 1e200}, "at most 10,000, not 1e\\+200"),
        ("steady", {"num_requests": 5, "rate": 5e-324}, "5 requests would last 10,000,000,000 s"),
        ("bursty", {"num_requests": 500, "rate": 1e-305}, "Fix: a larger --rate"),
        ("low", {"rate": 1e-300}, "1 request would last"),
    ],
)
def test_impossible_wishes_are_refused(preset, values, reason):
    with pytest.raises(InputError, match=reason):
        synthesise(preset, **values)
