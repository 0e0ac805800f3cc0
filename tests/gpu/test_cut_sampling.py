"""Rows cut by top-k and top-p on a GPU: the tokens that sorting them gives.

python -m pytest tests/gpu/test_cut_sampling.py
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from codesign.kernels.keyed_sampling import best_tokens, row_keys, sample_rows
from codesign.policy.walk import Sampling

CUDA = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a GPU")]
VOCABULARIES = (128_256, 151_936)
WAYS = [
    Sampling(1.0, top_p=0.9),
    Sampling(),
    Sampling(0.7, top_k=50),
    Sampling(0.7, top_k=50, top_p=0.9),
    Sampling(1.0),
    Sampling(1.0, top_p=0.002),
    Sampling(1.3, top_k=20_000, top_p=0.5),
    Sampling(1.0, top_k=1),
    Sampling(0.3, top_k=1 << 20, top_p=0.999),
]


def normal(rows: int, tokens: int) -> Tensor:
    torch.manual_seed(rows + tokens)
    return torch.randn(rows, tokens, device="cuda")


def padded(rows: int, tokens: int) -> Tensor:
    logits = 3 * normal(rows, tokens)
    logits[:, tokens - 5000 :] = -torch.inf
    return logits


LOGITS = {
    "random": lambda *shape: 3 * normal(*shape),
    "peaked": lambda *shape: normal(*shape).pow(3),
    "ties": lambda *shape: torch.round(normal(*shape)),
    "flat": lambda *shape: 0.01 * normal(*shape),
    "padded": padded,
}


def keys(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """What noise depends on."""
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (2, rows), device="cuda").int()
    return words[0], words[1], torch.arange(rows, device="cuda").int() + 600


@pytest.mark.parametrize("tokens", VOCABULARIES)
@pytest.mark.parametrize("logits", LOGITS)
def test_each_row_has_the_token_of_the_reference(logits, tokens, each_its_own):
    for rows in (1, 8, 64):
        logits_TV, noise = LOGITS[logits](rows, tokens), keys(rows)
        for first in range(len(WAYS)):
            samplings = each_its_own([WAYS[(first + i) % len(WAYS)] for i in range(rows)], "cuda")
            scores_T, tokens_T = sample_rows(logits_TV, *noise, samplings)
            wanted = best_tokens(logits_TV, row_keys(*noise), samplings)
            assert torch.equal(tokens_T.long(), wanted[1])
            assert torch.allclose(scores_T, wanted[0], rtol=1e-12)
            if rows == 64:
                break


@pytest.mark.parametrize("sampling", [way for way in WAYS if way.temperature], ids=str)
def test_all_rows_may_sample_alike(sampling):
    for logits in LOGITS.values():
        logits_TV, noise = logits(8, VOCABULARIES[0]), keys(8)
        found = sample_rows(logits_TV, *noise, sampling)[1]
        assert torch.equal(found.long(), best_tokens(logits_TV, row_keys(*noise), sampling)[1])


def test_graphs_follow_rows_that_change(each_its_own):
    rows, tokens = 64, VOCABULARIES[0]
    logits_TV, noise = torch.zeros(rows, tokens, device="cuda"), keys(rows)
    samplings = each_its_own([WAYS[i % len(WAYS)] for i in range(rows)], "cuda")
    sample_rows(logits_TV, *noise, samplings)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = sample_rows(logits_TV, *noise, samplings)
    for turn, logits in enumerate(LOGITS.values()):
        logits_TV.copy_(logits(rows, tokens).roll(turn, 0))
        samplings.temperature_T.copy_(samplings.temperature_T.roll(1))
        samplings.top_k_T.copy_(samplings.top_k_T.roll(1))
        samplings.top_p_T.copy_(samplings.top_p_T.roll(1))
        noise[2].add_(1)
        graph.replay()
        first = [part.clone() for part in found]
        wanted = best_tokens(logits_TV, row_keys(*noise), samplings)[1]
        assert torch.equal(first[1].long(), wanted)
        for _ in range(20):
            graph.replay()
            assert all(torch.equal(*parts) for parts in zip(first, found, strict=True))


def test_a_row_among_others_has_the_bits_that_it_has_alone(each_its_own):
    rows, tokens = 64, VOCABULARIES[1]
    logits_TV, noise = 2 * normal(rows, tokens), keys(rows)
    ways = [WAYS[i % len(WAYS)] for i in range(rows)]
    scores_T, tokens_T = sample_rows(logits_TV, *noise, each_its_own(ways, "cuda"))
    for i in range(len(WAYS)):
        own = [column[i : i + 1].clone() for column in noise]
        alone = sample_rows(logits_TV[i : i + 1], *own, each_its_own(ways[i : i + 1], "cuda"))
        assert torch.equal(alone[0], scores_T[i : i + 1])
        assert torch.equal(alone[1], tokens_T[i : i + 1])
