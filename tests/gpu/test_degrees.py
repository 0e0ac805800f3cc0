"""Three and four ranks, and every split of them, also where there are fewer GPUs than ranks.

With four GPUs every rank has its own, and 64 prompts get 256 tokens each. With fewer, ranks take
turns on the GPUs that are there: the kernels, graphs and exchanges of as many GPUs, but for the
gathering of samples and choices, which NCCL does and then the exchange. A rank that waits for
another on its GPU waits for its turn, some milliseconds, so models have few layers and 8 prompts
get 40 tokens.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from benchmarks.random_pair import inflate_source, small_config, write_source_pair
from codesign.candidate import Candidate
from codesign.config import Deployment
from codesign.engine.gpu.launch import keep_waiting
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.gpu.run import run_on_ranks
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling
from codesign.prompts import BoundRequest, load_prompts

NUM_GPUS = torch.cuda.device_count()
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability(0) == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
]
DEVICE = {"device": "cuda", "dtype": "bfloat16"}
BATCH, ROWS, MAX_KV_TOKENS = 8, 64, 1 << 13
HAS_OWN_GPUS = NUM_GPUS >= 4
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = (64, 300, 256) if HAS_OWN_GPUS else (8, 48, 40)
SOURCE_LAYERS = 12 if HAS_OWN_GPUS else 2
TARGET_LAYERS = 16 if HAS_OWN_GPUS else 3  # those of random weights are behind the small model's
SAMPLINGS = {"greedy": Sampling(), "0.7": Sampling(0.7, seed=3)}
CONFIG = small_config(layers=SOURCE_LAYERS)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Directories of a target as wide as Llama-3.2-1B, int4, and of a small draft: noisy."""
    root = tmp_path_factory.mktemp("degrees")
    write_source_pair(root, CONFIG)
    shutil.move(inflate_source(root, "llama-3.2-1b", prefix=f"test-{root.name}"), root / "target")
    path = root / "target" / "config.json"
    fewer = {"num_hidden_layers": TARGET_LAYERS, "vocab_size": 2 * CONFIG["vocab_size"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | fewer))
    keep_waiting(3)
    return root


def requests() -> list[BoundRequest]:
    prompts = load_prompts()
    texts = [prompts[i % len(prompts)].text.encode() for i in range(PROMPTS)]
    return [
        BoundRequest(i, 0.0, "", tuple(text[: PROMPT_TOKENS - i]), NEW_TOKENS)
        for i, text in enumerate(texts)
    ]


def set_up(pair, policy, ranks, sampling):
    candidate = Candidate(Deployment(*ranks), parse_policy(policy), BATCH)
    setup = rank_setup(
        candidate, requests(), target=pair / "target", draft=pair / "draft", sampling=sampling,
        max_kv_tokens=MAX_KV_TOKENS, smallest_bucket=ROWS, shares_gpus=sum(ranks) > NUM_GPUS,
        **DEVICE,
    )  # fmt: skip
    return setup, candidate


@pytest.fixture(scope="module")
def alone(pair):
    """Plain decoding on one rank, by sampling, each made once."""
    runs = {}

    def run(name):
        if name not in runs:
            setup, candidate = set_up(pair, "plain", (1, 0), SAMPLINGS[name])
            run = run_on_ranks(setup, candidate, requests(), max_kv_tokens=MAX_KV_TOKENS)
            runs[name] = run.outputs
        return runs[name]

    return run


@pytest.mark.parametrize(
    ("name", "policy", "ranks"),
    [
        ("greedy", "tree-8x4x2", (3, 0)),
        ("greedy", "tree-8x4x2", (4, 0)),
        ("greedy", "async-tree-8x4x2", (3, 1)),
        ("greedy", "async-tree-8x4x2", (2, 2)),
        ("greedy", "async-tree-8x4x2", (1, 2)),
        ("0.7", "tree-8x4x2", (3, 0)),
        ("0.7", "tree-8x4x2", (4, 0)),
        ("0.7", "async-tree-8x4x2", (3, 1)),
        ("0.7", "async-tree-8x4x2", (2, 2)),
    ],
    ids=["3", "4", "3+1", "2+2", "1+2", "3 at 0.7", "4 at 0.7", "3+1 at 0.7", "2+2 at 0.7"],
)
def test_no_split_of_more_ranks_changes_a_token(
    pair, serve_both, alone, check_calls, show_runs, name, policy, ranks
):
    setup, candidate = set_up(pair, policy, ranks, SAMPLINGS[name])
    keep_waiting(sum(ranks) - 1)  # for the next run: loading takes as long as a run
    one = alone(name)
    plain, ours = serve_both(setup, candidate, requests(), max_kv_tokens=MAX_KV_TOKENS)
    split = "+".join(str(count) for count in ranks if count)
    show_runs(f"{policy} on {split} ranks, {name}", plain, ours)
    assert ours.outputs == plain.outputs
    assert not plain.records.notes + ours.records.notes
    assert len(ours.records.rounds) < len(plain.records.rounds)
    what = f"{ranks[0]} target ranks for one, {name}"
    check_calls(what, pair / "target", requests(), one, plain.outputs, setup.sampling)
