"""A GPU's rough noise is as near to the exact one as it says.

python -m pytest tests/gpu/test_keyed_noise.py
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from codesign.kernels.keyed_noise_triton import NOISE_ERROR, noise_of, rough_noise

CUDA = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a GPU")]
BLOCK, PROGRAMS = 1024, 1 << 17
GOLDEN = 0x9E3779B97F4A7C15
UNMIXED = (pow(0xBF58476D1CE4E5B9, -1, 1 << 64), pow(0x94D049BB133111EB, -1, 1 << 64))


@triton.jit
def _furthest(furthest, smallest, largest, BLOCK: tl.constexpr):
    """How far rough noise of a program's tokens is from the exact one, and its least and most."""
    program = tl.program_id(0)
    token = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exact = noise_of(token, token * 0 + 12345)
    rough = rough_noise(token, token * 0 + 12345).to(tl.float64)
    tl.store(furthest + program, tl.max(tl.abs(rough - exact), 0))
    tl.store(smallest + program, tl.min(exact, 0))
    tl.store(largest + program, tl.max(exact, 0))


@triton.jit
def _of_keys(keys, exact, rough, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + at)
    tl.store(exact + at, noise_of(at * 0, key))
    tl.store(rough + at, rough_noise(at * 0, key).to(tl.float64))


def test_134_million_tokens():
    found = [torch.empty(PROGRAMS, dtype=torch.float64, device="cuda") for _ in range(3)]
    _furthest[(PROGRAMS,)](*found, BLOCK=BLOCK)
    furthest, smallest, largest = found
    assert furthest.max() < 0.5 * NOISE_ERROR
    assert smallest.min() < -2.8
    assert largest.max() > 17.0


def key_with(bits: int) -> int:
    """The key, as int64, whose token 0 has these 52 bits."""
    x = bits << 12
    for by, factor in ((31, UNMIXED[1]), (27, UNMIXED[0]), (30, 1)):
        found = x
        for _ in range(64 // by):
            found = x ^ (found >> by)
        x = found * factor % (1 << 64)
    x = (x - GOLDEN) % (1 << 64)
    return x - (1 << 64) if x >> 63 else x


def test_both_ends_and_where_the_series_begins():
    near = [0, 1, 2, 3, 1 << 10, 1 << 20, 1 << 40, (1 << 48) - 1, 1 << 48, (1 << 48) + 1]
    near += [int(2 ** (x / 40)) for x in range(52 * 40)]
    bits = near + [(1 << 52) - 1 - n for n in near]
    bits += bits[: -len(bits) % BLOCK]
    keys = torch.tensor([key_with(n) for n in bits], device="cuda")
    exact, rough = (torch.empty(len(bits), dtype=torch.float64, device="cuda") for _ in range(2))
    _of_keys[(len(bits) // BLOCK,)](keys, exact, rough, BLOCK=BLOCK)
    assert (rough - exact).abs().max() < 0.5 * NOISE_ERROR
    assert exact.max() > 36.0
    assert exact.min() < -3.5
