"""A tiny random pair of models, saved as Hugging Face directories: the draft is a noisy target."""

from __future__ import annotations

import itertools
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import codesign.engine.run as engine_run
from benchmarks.random_pair import TINY, write_random_pair
from codesign.candidate import Candidate
from codesign.config import Deployment, Serving
from codesign.engine import DraftSource, EngineRun, run_candidate
from codesign.engine.model import Decoder, load_decoder
from codesign.policy.options import RequestOptions
from codesign.policy.speculation import Speculation, parse_policy
from codesign.policy.trees import BestTree
from codesign.policy.walk import Sampling
from codesign.prompts import BoundRequest

sys.path.append(str(Path(__file__).parent))  # of processes that a fork server starts, too
import forked

multiprocessing.set_forkserver_preload([*forked.LOADED])


@pytest.fixture(autouse=True)
def loaded_processes(monkeypatch) -> None:
    """The engine's processes begin with what the fork server has loaded."""
    monkeypatch.setattr(subprocess, "Popen", forked.popen)


VOCABULARY = TINY["vocab_size"]


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
    write_random_pair(root, TINY, noise=0.15, dtype=torch.float32)
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


@pytest.fixture(scope="module")
def kept_runs() -> dict[object, EngineRun]:
    return {}


@pytest.fixture
def serve_plain(serve: Serve, kept_runs) -> Callable[..., EngineRun]:
    """``serve("plain", ...)``, once in a module for the same requests and options."""

    def run(requests: Sequence[BoundRequest], **options) -> EngineRun:
        key = (tuple(requests), *sorted(options.items()))
        if key not in kept_runs:
            kept_runs[key] = serve("plain", requests, **options)
        return kept_runs[key]

    return run


class RestingTree(BestTree):
    """Begins to draft late, draws a breath that is longer than a forward has rows, and goes on."""

    def leaves(self, trees, done):
        return self._unless_resting(trees, super().leaves(trees, done))

    def overlap_leaves(self, trees):
        return self._unless_resting(trees, super().overlap_leaves(trees))

    def _unless_resting(self, trees, leaves):
        left = [tree.max_depth for tree in trees]  # tokens to come; requests want 230
        rest = [depth > 210 or 40 < depth <= 190 for depth in left]
        return [[] if rests else nodes for rests, nodes in zip(rest, leaves, strict=True)]


@pytest.fixture
def resting(monkeypatch) -> int:
    """Every tree policy is a RestingTree; how many tokens requests must ask for."""
    build = engine_run.PolicySetup.build

    def resting_tree(setup):
        return (
            RestingTree(setup.spec, setup.calibration)
            if setup.spec.kind == "tree"
            else build(setup)
        )

    monkeypatch.setattr(engine_run.PolicySetup, "build", resting_tree)
    return 230


@pytest.fixture
def at_rest(monkeypatch) -> None:
    """Every policy looks at its trees in one round of four alone."""
    rounds = itertools.count()
    monkeypatch.setattr(Speculation, "stays_at_rest", lambda _: next(rounds) % 4 > 0)


# Sharing memory and steps: test_paged_serving.py (ranks) and test_shared_serving.py (CPU).

OUTPUT = 20
SERVINGS = {
    "pages": (Serving(preemption=True), 1 << 16),
    "preemption": (Serving(preemption=True), 1670),
    "prefixes": (Serving(prefix_cache=True), 4000),
    "chunks": (Serving(prefill_chunk=100), 1 << 16),
    "all": (Serving(prefill_chunk=200, prefix_cache=True, preemption=True), 1150),
}
OWN_WAYS = (
    RequestOptions(),
    RequestOptions(sampling=Sampling(temperature=0.8, seed=5)),
    RequestOptions(sampling=Sampling(temperature=1.1, top_k=7, seed=6), speculates=False),
    RequestOptions(sampling=Sampling(temperature=1.0, top_p=0.7, seed=7)),
    RequestOptions(stop_tokens=frozenset(range(0, VOCABULARY, 4))),
    RequestOptions(stop_strings=("cab", "adaa")),
    RequestOptions(stop_strings=("aadad", "dac"), speculates=False),
)


@pytest.fixture(scope="session")
def new_text() -> Callable[[], Callable[[int], str]]:
    """A letter per token of the tiny models, so that stop strings lie across tokens."""
    return lambda: lambda token: "abcd"[token % 4]


@pytest.fixture(params=SERVINGS)
def serving(request) -> tuple[Serving, int]:
    """A way of sharing, and a limit of KV rows that makes it matter."""
    return SERVINGS[request.param]


@pytest.fixture
def all_at_once() -> tuple[Serving, int]:
    """Chunks, prefix cache and preemption together."""
    return SERVINGS["all"]


def _prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist())


@pytest.fixture(scope="session")
def mixed_requests() -> list[BoundRequest]:
    """Shared prefixes of one and two blocks, a prompt of whole blocks, twice, and short ones."""
    shared = _prompt(1024, 0)
    prompts = [
        (*shared, *_prompt(40, 1)),
        _prompt(7, 2),
        (*shared[:512], *_prompt(60, 3)),
        shared,
        _prompt(90, 4),
        (*shared, *_prompt(3, 5)),
        shared,
        (5,),
    ]
    return [BoundRequest(i, 0.0, "chat", ids, OUTPUT) for i, ids in enumerate(prompts)]


@pytest.fixture(scope="session")
def own_requests(mixed_requests) -> list[BoundRequest]:
    """The same requests, each with its own sampling, stops or without speculation."""
    return [replace(r, options=OWN_WAYS[r.request_id % len(OWN_WAYS)]) for r in mixed_requests]


@pytest.fixture(scope="session")
def plain_outputs(pair, new_text) -> Callable[..., dict[int, list[int]]]:
    """``plain_outputs(requests, sampling)``: plain decoding, one request at a time; kept."""
    kept: dict[object, dict[int, list[int]]] = {}

    def outputs(requests, sampling=None):
        key = (tuple(requests), sampling)
        if key not in kept:
            candidate = Candidate(Deployment(1, 0), parse_policy("plain"), 1)
            kept[key] = run_candidate(
                candidate, requests, target=pair.target, draft=None, sampling=sampling,
                max_kv_tokens=1 << 16, new_text=new_text,
            ).outputs  # fmt: skip
        return kept[key]

    return outputs
