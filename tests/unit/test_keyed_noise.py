"""Rough noise and scores are never further from the exact ones than they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from codesign.policy.walk import gumbel_row

tl = pytest.importorskip("triton.language")
noise_module = None  # what the kernel below calls; see the fixture
GOLDEN = 0x9E3779B97F4A7C15
WRAP = (1 << 64) - 1
LOGITS = np.array([0.0, -0.0, 1e-42, -3e-39, 0.25, -17.3, 40.0, 2.9e4, -3.3e38, 1e38], np.float32)
TEMPERATURES = [0.0, 1e-300, 1e-42, 1e-38, 1e-5, 0.3, 0.7, 1.0, 1.0000001, 2.5, 1e5, 1e300]


def key_with(bits: int) -> int:
    """The key whose token 0 has these 52 bits: SplitMix64 backwards."""

    def unshifted(x: int, by: int) -> int:
        found = x
        for _ in range(64 // by):
            found = x ^ (found >> by)
        return found

    x = unshifted(bits << 12, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & WRAP
    x = unshifted(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & WRAP
    return (unshifted(x, 30) - GOLDEN) & WRAP


def edges() -> list[int]:
    """Bits at both ends, where the series begins, where noise is 0, and everywhere between."""
    near = [0, 1, 2, 3, 1 << 20, 1 << 44, 1 << 48, 15 << 48, int(2**52 / np.e), 1 << 51]
    found = [n + i for n in near for i in (-2, -1, 0, 1, 2)]
    found += [(1 << 52) - 1 - n for n in found]
    found += np.random.default_rng(0).integers(0, 1 << 52, 1000).tolist()
    found += [(1 << 52) - 1 - int(2**x) for x in np.linspace(0, 51, 800)]
    return [n for n in found if 0 <= n < 1 << 52]


def exact_noise(bits: list[int]) -> np.ndarray:
    uniform = (np.array(bits, np.uint64).astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(-np.log(uniform))


@pytest.fixture
def noise(interpreted):
    """The module, interpreted."""
    return interpreted("keyed_noise_triton")[0]


@pytest.fixture
def rough(noise, monkeypatch):
    """Run ``rough_score`` on arrays: ``rough(logits, bounds, keys, temperature)``."""
    import triton

    monkeypatch.setitem(globals(), "noise_module", noise)
    kernel = triton.jit(_rough)

    def run(logits, bounds, keys, temperature):
        floats = [torch.as_tensor(np.array(x, np.float32)) for x in (logits, bounds)]
        keys = torch.from_numpy(np.array(keys, np.uint64).view(np.int64))
        temperature = torch.tensor([temperature], dtype=torch.float64)
        out = [torch.empty(len(keys), dtype=torch.float32) for _ in range(2)]
        padded = triton.next_power_of_2(len(keys))
        kernel[(1,)](*floats, keys, temperature, *out, len(keys), PADDED=padded)
        return [x.double().numpy() for x in out]

    return run


def _rough(logits, bounds, keys, temperature, scores, errors, number, PADDED: tl.constexpr):
    at = tl.arange(0, PADDED)
    mask = at < number
    logit, bound, key = [tl.load(x + at, mask=mask, other=0) for x in (logits, bounds, keys)]
    score, error = noise_module.rough_score(logit, bound, at * 0, key, tl.load(temperature))
    tl.store(scores + at, score, mask=mask)
    tl.store(errors + at, error, mask=mask)


def test_keys_are_made_for_bits():
    for bits in (0, 1, 12345, (1 << 52) - 1):
        assert gumbel_row(key_with(bits), 1)[0] == pytest.approx(float(exact_noise([bits])[0]))


@pytest.mark.filterwarnings("ignore:overflow encountered")  # int64 wraps on purpose
def test_rough_noise_is_as_near_as_it_says(rough, noise):
    bits = edges()
    found, errors = rough([0.0] * len(bits), [0.0] * len(bits), map_keys(bits), 1.0)
    # NumPy's logarithms are better than a GPU's, of which half is left for them.
    assert np.abs(found - exact_noise(bits)).max() < 0.5 * noise.NOISE_ERROR
    assert (errors >= noise.NOISE_ERROR * 0.999).all()


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_row_s_rough_scores_are_its_scores_but_for_a_factor(rough, temperature):
    bits = edges()[::7]
    logits = np.resize(LOGITS, len(bits))
    bounds = np.resize(np.array([0.0, 0.0, 0.0, 0.4], np.float32), len(bits))
    found, errors = rough(logits, bounds, map_keys(bits), temperature)
    wanted = logits.astype(np.float64) / max(temperature, 1.0)
    wanted += min(temperature, 1.0) * exact_noise(bits)
    assert (np.abs(found - wanted) + bounds / max(temperature, 1.0) <= errors).all()
    # Small enough to leave out nearly all.
    allowed = 1e-4 * min(temperature, 1.0) + 2e-6 * np.abs(logits) + bounds * 1.01 + 1e-35
    assert (errors <= allowed).all()


@pytest.mark.parametrize("infinite", [np.inf, -np.inf])
def test_an_infinite_logit_stays_infinite_to_both_sides(rough, infinite):
    found, errors = rough([infinite], [0.0], map_keys([1 << 50]), 0.7)
    assert found[0] == infinite
    assert np.isfinite(errors[0])


def map_keys(bits: list[int]) -> list[int]:
    return [key_with(b) for b in bits]
