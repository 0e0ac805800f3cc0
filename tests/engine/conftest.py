"""A tiny random pair of models, saved as Hugging Face directories: the draft is a noisy target."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from codesign.config import Deployment
from codesign.engine import DraftSource, EngineRun, run_candidate
from codesign.engine.model import Decoder, load_decoder
from codesign.engine.weights import random_tensors
from codesign.models.shape import model_shape
from codesign.plan import Candidate
from codesign.policy.speculation import parse_policy
from codesign.prompts import BoundRequest

VOCABULARY = 61
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Pair:
    """Directories of a target and a draft, and the loaded target."""

    target_dir: Path
    draft_dir: Path
    target: Decoder

    @property
    def draft(self) -> DraftSource:
        return DraftSource(self.draft_dir, self.target_dir)


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> Pair:
    root = tmp_path_factory.mktemp("pair")
    for name in ("target", "draft"):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(CONFIG))
    state = random_tensors(model_shape(root / "target").tensors(), seed=0)
    # Spread the logits, so that greedy output is neither constant nor decided by rounding.
    state = {k: v * (4.0 if "lm_head" in k else 1.0) for k, v in state.items()}
    generator = torch.Generator().manual_seed(1)
    noisy = {
        name: tensor + 0.15 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        if tensor.ndim == 2
        else tensor
        for name, tensor in state.items()
    }
    save_file(state, root / "target" / "model.safetensors")
    save_file(noisy, root / "draft" / "model.safetensors")
    return Pair(root / "target", root / "draft", load_decoder(root / "target"))


MakeRequests = Callable[..., list[BoundRequest]]


@pytest.fixture
def make_requests() -> MakeRequests:
    """``make_requests(count, max_new_tokens=, seed=)``: see ``_requests``."""
    return _requests


def _requests(count: int, *, max_new_tokens: int = 24, seed: int = 0) -> list[BoundRequest]:
    """Random prompts of 1 to 40 tokens, the first of one token, all there at once."""
    generator = torch.Generator().manual_seed(seed)
    requests = []
    for i in range(count):
        length = 1 if i == 0 else int(torch.randint(2, 40, (1,), generator=generator))
        prompt = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
        requests.append(BoundRequest(i, 0.0, "chat", tuple(prompt), max_new_tokens))
    return requests


Serve = Callable[..., EngineRun]


@pytest.fixture
def serve(pair: Pair) -> Serve:
    """Serve requests with a policy label; disaggregated exactly when the policy is asynchronous."""

    def run(
        policy: str, requests: Sequence[BoundRequest], *, max_batch: int = 4, **options
    ) -> EngineRun:
        spec = parse_policy(policy)
        options.setdefault("draft", pair.draft)
        options.setdefault("check", True)
        deployment = Deployment(target_workers=1, draft_workers=int(spec.is_async))
        candidate = Candidate(deployment, spec, max_batch)
        return run_candidate(candidate, requests, target=pair.target, **options)

    return run
