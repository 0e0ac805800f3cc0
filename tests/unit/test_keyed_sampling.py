"""Sampling and the walk for many rows at once give what codesign/policy/walk.py gives for each."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codesign.kernels.keyed_sampling import (
    accepted_moves,
    accepted_rows,
    best_tokens,
    row_keys,
    sample_rows,
)
from codesign.policy.walk import Sampling, noise_key, request_key, sample_token, walk

REQUESTS = (0, 7, 123456)


def keys_of(seed: int, positions: torch.Tensor) -> torch.Tensor:
    words = np.array([request_key(seed, r) for r in REQUESTS], np.uint64).view(np.int32)
    low, high = torch.from_numpy(words.reshape(-1, 2).copy()).unbind(1)
    return row_keys(low, high, positions)


def test_keys_are_those_of_the_walk():
    positions = torch.tensor([0, 41, 100000], dtype=torch.int32)
    keys = [int(key) % (1 << 64) for key in keys_of(5, positions)]
    assert keys == [noise_key(5, r, int(p) + 1) for r, p in zip(REQUESTS, positions, strict=True)]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(0.7, seed=2),
        Sampling(1.3, top_k=20, seed=3),
        Sampling(1.0, top_p=0.8, seed=4),
        Sampling(0.9, top_k=50, top_p=0.6, seed=5),
    ],
    ids=str,
)
def test_tokens_are_those_of_the_walk(sampling):
    generator = torch.Generator().manual_seed(0)
    for first in range(40):
        logits = 3 * torch.randn(3, 500, generator=generator)
        positions = torch.tensor([first, first + 9, 2 * first], dtype=torch.int32)
        tokens = best_tokens(logits, keys_of(sampling.seed, positions), sampling)[1]
        assert tokens.tolist() == [
            sample_token(logits[i].numpy(), sampling, request_id=r, position=int(positions[i]) + 1)
            for i, r in enumerate(REQUESTS)
        ]


# Alike, or each row in its own way.
WITHOUT_CUTS = [(Sampling(),), (Sampling(0.7),), (Sampling(0.7), Sampling(), Sampling(3.0))]


@pytest.fixture(params=WITHOUT_CUTS, ids=["greedy", "warm", "by row"])
def sampling(request, each_its_own):
    """How three rows sample."""
    one, *others = request.param
    return each_its_own((one, *others)) if others else one


def test_each_row_may_have_a_temperature_of_its_own(each_its_own):
    logits = torch.randn(3, 600, generator=torch.Generator().manual_seed(1))
    keys = keys_of(2, torch.tensor([1, 2, 3], dtype=torch.int32))
    scores, tokens = best_tokens(logits, keys, each_its_own(WITHOUT_CUTS[-1]))
    for i, own in enumerate(WITHOUT_CUTS[-1]):
        score, token = best_tokens(logits[i : i + 1], keys[i : i + 1], own)
        assert (float(score), int(token)) == (float(scores[i]), int(tokens[i]))


def test_parts_of_the_vocabulary_agree_with_the_whole(sampling):
    logits = torch.randn(3, 600, generator=torch.Generator().manual_seed(1))
    logits[0, [10, 599]] = logits[0].max() + 1  # a tie goes to the first
    keys = keys_of(2, torch.tensor([1, 2, 3], dtype=torch.int32))
    whole = best_tokens(logits, keys, sampling)[1]
    parts = [
        best_tokens(logits[:, at : at + 200], keys, sampling, first_token=at)
        for at in (0, 200, 400)
    ]
    scores = torch.stack([score for score, _ in parts], 1)
    tokens = torch.stack([token for _, token in parts], 1)
    assert tokens.gather(1, scores.argmax(1, keepdim=True))[:, 0].tolist() == whole.tolist()


@st.composite
def trees(draw):
    """Tokens and parents of a tree with distinct siblings, and a sample after each row."""
    size = draw(st.integers(1, 12))
    tokens, parents = [0], [-1]
    for row in range(1, size):
        parent = draw(st.integers(0, row - 1))
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        free = sorted(set(range(size + 2)) - taken)
        tokens.append(draw(st.sampled_from(free)))
        parents.append(parent)
    return tokens, parents, [draw(st.integers(0, 4)) for _ in range(size)]


def rows_of(forest):
    """Columns of a step's rows, as the kernels take them, and the rows that the walk accepts."""
    tokens, parents, sampled, firsts, paths, expected = [], [], [], [], [], []
    for tree_tokens, tree_parents, samples in forest:
        first = len(tokens)
        walked = walk(tree_tokens, tree_parents, samples.__getitem__, limit=99)
        expected += [first + row for row in walked.accepted]
        local: list[list[int]] = []
        for row, parent in enumerate(tree_parents):
            local.append([row] if parent < 0 else [*local[parent], row])
        tokens += tree_tokens
        parents += [first + p if p >= 0 else -1 for p in tree_parents]
        sampled += samples
        firsts += [first] * len(tree_tokens)
        paths += local
    path_TP = torch.zeros(len(tokens), 16, dtype=torch.int32)
    for row, path in enumerate(paths):
        path_TP[row, : len(path)] = torch.tensor(path)
    columns = [torch.tensor(c, dtype=torch.int32) for c in (tokens, sampled, parents, firsts)]
    depths_T = torch.tensor([len(path) - 1 for path in paths], dtype=torch.int32)
    return *columns, path_TP, depths_T, expected


@settings(max_examples=200, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=3))
def test_accepted_rows_are_the_walks(forest):
    tokens, sampled, parents, firsts, path_TP, depths_T, expected = rows_of(forest)
    accepted = accepted_rows(
        tokens, sampled, parents_T=parents, firsts_T=firsts, path_TP=path_TP, depths_T=depths_T
    )
    assert accepted.nonzero()[:, 0].tolist() == expected


@pytest.fixture
def kernels(interpreted):
    """The Triton kernels in the interpreter."""
    return interpreted("keyed_noise_triton", "keyed_sampling_triton")[1]


@pytest.mark.filterwarnings("ignore:overflow encountered")  # int64 wraps on purpose
def test_the_kernels_sample_as_the_reference(kernels, sampling):
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1))
    logits[0, [10, 2900, 4999]] = logits[0].max() + 20  # a tie goes to the first
    logits[2, 2048:] = -torch.inf
    words = np.array([request_key(2, r) for r in REQUESTS], np.uint64).view(np.int32)
    low, high = torch.from_numpy(words.reshape(-1, 2).T.copy())
    positions = torch.tensor([1, 2, 70000], dtype=torch.int32)
    scores, tokens = sample_rows(logits, low, high, positions, sampling, first_token=300)
    found = kernels.sample_rows(logits, low, high, positions, sampling, first_token=300)
    assert found[1].tolist() == tokens.tolist()
    assert found[0].tolist() == pytest.approx(scores.tolist(), rel=1e-12)


def test_the_kernel_walks_as_the_reference(kernels):
    choose = random.Random(3)
    for _ in range(20):
        tokens, parents = [0], [-1]
        for row in range(1, 9):
            parents.append(choose.randrange(row))
            tokens.append(row if choose.random() < 0.3 else 10 + row)
        samples = [choose.randrange(1, 9) for _ in tokens]
        tokens, sampled, parents, firsts, path_TP, depths_T, _ = rows_of(
            [(tokens, parents, samples), ([0], [-1], [5])]
        )
        prefixes = torch.tensor([40] * 9 + [0], dtype=torch.int32)
        rows = {
            "positions_T": prefixes + depths_T,
            "prefixes_T": prefixes,
            "slots_T": torch.tensor([1] * 9 + [0], dtype=torch.int32),
            "places_T": torch.tensor([*range(40, 49), 0], dtype=torch.int32),
            "parents_T": parents,
            "firsts_T": firsts,
            "path_TP": path_TP,
            "scratch_slot": 7,
        }
        expected = accepted_moves(tokens, sampled, **rows)
        scratch_slot, path_TP = rows.pop("scratch_slot"), rows.pop("path_TP")
        columns = (tokens, sampled, *rows.values())
        found = kernels.accepted_moves(columns, path_TP, scratch_slot)
        assert found.tolist() == expected.tolist()
