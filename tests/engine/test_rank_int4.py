"""An int4 target on rank groups: its maps run, and speculation changes no token."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.random_pair import random_tensors
from codesign.candidate import Candidate
from codesign.config import Deployment
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.gpu.run import run_on_ranks
from codesign.engine.quantize import quantize_model
from codesign.models import NGRAM
from codesign.models.shape import model_shape
from codesign.policy.speculation import parse_policy
from codesign.prompts import BoundRequest

TEXT = "the quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture(scope="module")
def int4_target(tiny_models, tmp_path_factory):
    """An AutoAWQ directory of a tiny model."""
    root = tmp_path_factory.mktemp("int4")
    source = root / "source"
    source.mkdir()
    for file in tiny_models[0].glob("*.json"):
        (source / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    config |= {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
    (source / "config.json").write_text(json.dumps(config))
    state = random_tensors(model_shape(source).tensors(), 0)
    state = {k: v * (4.0 if "lm_head" in k else 1.0) for k, v in state.items()}
    save_file(state, source / "model.safetensors")
    (root / "text").write_text(TEXT)
    quantize_model(str(source), root / "int4", group=32, text=root / "text")
    return root / "int4"


def outputs(target, policy, target_ranks):
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 31, (n,), generator=generator).tolist() for n in (3, 20, 11)]
    requests = [BoundRequest(i, 0.0, "chat", tuple(p), 24) for i, p in enumerate(prompts)]
    candidate = Candidate(Deployment(target_ranks), parse_policy(policy), 2)
    setup = rank_setup(
        candidate, requests, target=target, draft=NGRAM, device="cpu", dtype="float32"
    )
    return run_on_ranks(setup, candidate, requests).outputs


def test_an_int4_target_serves_alike_on_one_rank_and_on_two(int4_target):
    plain = outputs(int4_target, "plain", 1)
    assert outputs(int4_target, "chain-3", 1) == plain
    assert outputs(int4_target, "chain-3", 2) == plain
