"""Random requests, policies and ways of sharing: tokens of plain decoding, and nothing left over.

Plain decoding is one row after another here, by the model alone. Drafts of asynchronous policies
take their turn in this process, so that each case is the same each time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch

import codesign.engine.run as engine_run
from codesign.candidate import Candidate
from codesign.config import SCHEDULINGS, Deployment, Serving
from codesign.engine import DraftSource, PolicySetup, run_candidate
from codesign.engine.kv_cache import KVCache
from codesign.engine.model import Decoder
from codesign.engine.partner import DraftLostError, LocalDraft
from codesign.engine.rows import causal_rows
from codesign.engine.run import EngineRun
from codesign.models import NGRAM
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.options import RequestOptions
from codesign.policy.speculation import SpeculationSpec, parse_policy
from codesign.policy.walk import Sampling, sample_token
from codesign.prompts import BoundRequest

CASES = 32  # two of each label
# Of five requests four at a time decode faster.
STAIRS = StepTime(alpha=1e-7, rows=(1, 4, 5, 6), seconds=(0.01, 0.01, 0.02, 0.02))
LABELS = (
    "plain", "chain-4", "threshold-5@0.3", "turbospec-4", "specserve-5", "static-tree-3x2x1",
    "tree-6x3x3", "batch-tree-8x2x4", "adaserve-4x2x9", "async-tree-5x2x3", "pearl-3", "amusd-4",
    "inflight-tree-5x2x3", "async-batch-tree-8x2x4", "pipeinfer-4x2x2", "ssd-3x2",
)  # fmt: skip
LETTERS = "abcd"  # a token's text


class DraftBeside(LocalDraft):
    """An asynchronous draft in this process, which may be lost in some round."""

    is_async = True

    def __init__(self, worker, lost_in: int) -> None:
        super().__init__(worker)
        self._left = lost_in
        self._is_due = False

    def send(self, verdict) -> None:
        self._left -= 1
        if self._left == 0:
            raise DraftLostError("on purpose")
        self._overlap()
        super().send(verdict)

    def receive(self):
        self._is_due = True
        return super().receive()

    def run_prompts(self) -> None: ...

    def catch_up(self) -> None: ...

    def close(self) -> None:
        self._overlap()

    def _overlap(self) -> None:
        if self._is_due:
            self.worker.overlap()
        self._is_due = False


@dataclass(frozen=True)
class Case:
    """Requests and how they are served."""

    spec: SpeculationSpec
    requests: list[BoundRequest]
    sampling: Sampling
    serving: Serving
    max_batch: int
    max_kv_tokens: int
    setup: PolicySetup
    look_up: bool
    lost_in: int


def step_time(chance: random.Random, seconds: float) -> StepTime:
    return StepTime.linear(
        alpha=1e-7, gamma=seconds * chance.choice([0.0, 0.01, 0.3]), delta=seconds
    )


def sampling_of(chance: random.Random) -> Sampling:
    return Sampling(
        temperature=chance.choice([0.0, 0.0, 0.7, 1.2]), top_k=chance.choice([0, 0, 5]),
        top_p=chance.choice([1.0, 0.8]), seed=chance.randrange(1 << 64),
    )  # fmt: skip


def options_of(chance: random.Random, vocab: int) -> RequestOptions:
    texts = ("".join(chance.choices(LETTERS, k=chance.randint(2, 5))) for _ in range(2))
    return RequestOptions(
        sampling=chance.choice([None, sampling_of(chance)]),
        stop_tokens=frozenset(chance.sample(range(vocab), chance.choice([0, 0, 3]))),
        stop_strings=chance.choice([(), tuple(texts)]),
        speculates=chance.random() < 0.8,
    )


def case_of(chance: random.Random, label: str, vocab: int) -> Case:
    def tokens(count: int) -> tuple[int, ...]:
        return tuple(chance.choices(range(vocab), k=count))

    spec, start = parse_policy(label), tokens(1024)
    starts = chance.choice([[()], [(), (), start[:512], start]])
    prompts = [
        chance.choice(starts) + tokens(chance.choice([1, 2, 9, 33]))
        for _ in range(chance.choice([2, 5, 8]))
    ]
    requests = [
        BoundRequest(
            i, 0.0, "", prompt, chance.choice([1, 2, 7, 20, 45]),
            slo_tpot=chance.choice([None, 1e-6, 1e6]), options=options_of(chance, vocab),
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip
    longest = max(len(r.prompt_ids) + r.max_new_tokens for r in requests) + spec.kv_rows
    target, draft = 0.01, 0.01 * 10 ** chance.uniform(-2.5, 0.3)
    times = [step_time(chance, seconds) for seconds in (target, draft, target, draft)]
    calibration = Calibration(chance.choice([0.0, 0.5, 1.0]), chance.uniform(-1.0, 1.0))
    return Case(
        spec, requests, sampling_of(chance),
        Serving(
            prefill_chunk=chance.choice([None, 7, 100]), prefix_cache=chance.random() < 0.5,
            preemption=chance.random() < 0.6, scheduling=chance.choice(SCHEDULINGS),
        ),
        chance.choice([1, 3, 6]),
        longest + chance.choice([0, 11, 4000]),
        PolicySetup(
            spec, RoundCost(*times), calibration, slo_tpot=chance.choice([None, 0.02]),
            slo_ttft=chance.choice([0.03, 1.0]),
        ),
        chance.random() < 0.25,
        chance.choice([0, 0, 3, 9]),
    )  # fmt: skip


def plain(target: Decoder, request: BoundRequest, sampling: Sampling) -> list[int]:
    """Decode one row after another."""
    sampling, prompt = request.options.sampling or sampling, request.prompt_ids
    cache = KVCache(target.shape, num_slots=1, max_tokens=len(prompt) + request.max_new_tokens)
    slot, rows, start, found, text = cache.take(), prompt, 0, [], ""
    while len(found) < request.max_new_tokens:
        hidden = target.forward(causal_rows(slot, rows, start=start), cache)
        start += len(rows)
        logits = target.logits(hidden[-1:]).numpy()[0]
        token = sample_token(logits, sampling, request_id=request.request_id, position=start)
        found.append(token)
        text += LETTERS[token % 4]
        ends = any(string in text for string in request.options.stop_strings)
        if ends or token in request.options.stop_tokens:
            break
        rows = (token,)
    return found


@pytest.mark.parametrize("seed", range(CASES))
def test_any_way_of_serving_gives_the_tokens_of_plain_decoding(pair, seed):
    check(pair, case_of(random.Random(seed), LABELS[seed % len(LABELS)], pair.target.shape.vocab))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "label", ["plain", "specserve-5", "batch-tree-8x2x4", "async-batch-tree-8x2x4"]
)
def test_turns_change_no_token(pair, label, seed):
    run = check(pair, turns_case_of(random.Random(100 + seed), label, pair.target.shape.vocab))
    assert any(each.running > each.batch for each in run.records.rounds)


def turns_case_of(chance: random.Random, label: str, vocab: int) -> Case:
    """Nine requests with room for five at once, or for a few less, and drafts that seldom pay."""
    case = case_of(chance, label, vocab)
    requests = [
        replace(
            case.requests[i % len(case.requests)], request_id=i,
            max_new_tokens=chance.choice([30, 45, 60]), options=options_of(chance, vocab),
        )
        for i in range(9)
    ]  # fmt: skip
    longest = max(len(r.prompt_ids) + r.max_new_tokens for r in requests) + case.spec.kv_rows
    draft = StepTime.linear(alpha=1e-7, gamma=0.0, delta=chance.choice([0.002, 0.003]))
    looks = chance.choice([0.0, 6e-4])  # some are made beside the step before
    cost = replace(case.setup.cost, target=STAIRS, draft=draft, deciding=looks)
    room = longest * (3 if case.serving.preemption else 5)
    return replace(
        case, requests=requests, max_batch=6, max_kv_tokens=room,
        serving=replace(case.serving, prefill_chunk=chance.choice([None, None, 256])),
        setup=replace(case.setup, cost=cost), look_up=chance.random() < 0.5,
        lost_in=chance.choice([0, 0, 30]),
    )  # fmt: skip


def check(pair, case: Case) -> EngineRun:
    """Serve a case, and compare it with plain decoding."""
    caches = []
    cache_of, partner_of = engine_run._Memory.cache, engine_run._partner

    def kept(memory, shape, *, more=0):
        caches.append((memory.num_slots, cache_of(memory, shape, more=more)))
        return caches[-1][1]

    def beside(candidate, draft, build, target, *, loaded, delay):
        if not case.spec.is_async:
            return partner_of(candidate, draft, build, target, loaded=loaded, delay=delay)
        return DraftBeside(build(draft, target=target), case.lost_in)

    draft = DraftSource(NGRAM if case.look_up else pair.draft_dir, pair.target_dir)
    with (
        mock.patch.object(engine_run._Memory, "cache", kept),
        mock.patch.object(engine_run, "_partner", beside),
    ):
        run = run_candidate(
            Candidate(Deployment(1, int(case.spec.is_async)), case.spec, case.max_batch),
            case.requests, target=pair.target, draft=draft, setup=case.setup,
            sampling=case.sampling, new_text=lambda: lambda token: LETTERS[token % 4],
            max_kv_tokens=case.max_kv_tokens, serving=case.serving, check=True,
        )  # fmt: skip
    with torch.inference_mode():
        expected = {r.request_id: plain(pair.target, r, case.sampling) for r in case.requests}
    assert run.outputs == expected
    assert all("on purpose" in note for note in run.records.notes)
    (num_slots, of_target), *_ = caches
    assert of_target.num_free == num_slots
    for told in run.records.requests:
        assert told.output_tokens == len(expected[told.request_id])
        assert told.num_accepted_tokens <= told.num_draft_tokens
        assert told.arrival <= told.admitted <= told.first_token <= told.finish
        emitted = 1 + told.num_rounds + told.num_accepted_tokens
        assert emitted <= told.output_tokens <= emitted + told.num_preemptions
    return run
