"""Set up a run: caches, workers and the partner that a candidate asks for, then serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from codesign import Progress
from codesign.calibration_log import CalibrationLog
from codesign.candidate import Candidate
from codesign.config import SLO, Serving
from codesign.engine.checkpoint import is_shipped_draft
from codesign.engine.draft_worker import DraftWorker
from codesign.engine.drafter import Drafter, ModelDrafter, NgramDrafter
from codesign.engine.feed import Feed
from codesign.engine.kv_cache import KVCache
from codesign.engine.model import Decoder, load_decoder, load_draft_decoder
from codesign.engine.partner import LocalDraft, NoDraft, Partner
from codesign.engine.prefix_store import PrefixStore
from codesign.engine.refusals import check_stop_strings, served_requests
from codesign.engine.remote_draft import DraftSetup, RemoteDraft
from codesign.engine.serve import Server
from codesign.engine.target_worker import TargetWorker
from codesign.errors import InputError
from codesign.models import NGRAM
from codesign.models.shape import ModelShape
from codesign.policy.cost import Calibration, RoundCost
from codesign.policy.on_time import OnTime, on_time_of
from codesign.policy.protocol import RequestVerdict
from codesign.policy.speculation import (
    MAX_TREE_ROWS,
    Goodput,
    Speculation,
    SpeculationSpec,
    build_speculation,
    check_runs_in_engine,
)
from codesign.policy.stop_text import Push
from codesign.policy.turns import Turns, turn_prices
from codesign.policy.walk import Sampling
from codesign.prompts import BoundRequest
from codesign.records import RunRecords


@dataclass(frozen=True, slots=True)
class PolicySetup:
    """Everything a policy object is built from; picklable.

    Attributes:
        spec: The policy.
        cost: Step times, for policies that decide by them.
        calibration: Of the draft's confidences.
        slo_tpot: Seconds per token that SpecServe and AdaServe must keep; None for no target.
        slo_ttft: Seconds to the first token, for scheduling by the SLO; None for no target.
        confidence: Mean chance of the draft's likeliest token; None where it is not known.
        answer_tokens: Mean of the traffic to come; None where it is not known.
    """

    spec: SpeculationSpec
    cost: RoundCost | None = None
    calibration: Calibration | None = None
    slo_tpot: float | None = None
    confidence: float | None = None
    answer_tokens: float | None = None
    slo_ttft: float | None = None

    def build(self) -> Speculation:
        """The policy object."""
        goodput = None
        if self.cost is not None:
            goodput = Goodput.of_cost(
                self.cost, slo_tpot=self.slo_tpot, answer_tokens=self.answer_tokens
            )
        return build_speculation(
            self.spec, goodput=goodput, calibration=self.calibration, confidence=self.confidence
        )

    def on_time(self, serving: Serving) -> OnTime | None:
        """Who joins the batch next; None for first come, first served.

        Raises:
            InputError: If the scheduling lacks a target or step times.
        """
        return on_time_of(serving, SLO(self.slo_ttft, self.slo_tpot), self.cost)

    def turns(self) -> Turns | None:
        """Who takes part in rounds of plain decoding; None if all do."""
        if self.cost is None or not self.spec.takes_turns:
            return None
        return Turns(turn_prices(self.cost.target))


@dataclass(frozen=True, slots=True)
class DraftSource:
    """Which drafter to make; picklable, as another process may make it.

    Attributes:
        draft: Directory of a draft model, or NGRAM.
        target: Directory of the target, whose embedding a reduced draft shares.
    """

    draft: Path | str
    target: Path

    def load(self, target: Decoder | None = None) -> Decoder | None:
        """The draft model; None for n-grams. Shares ``target``'s weights where it can."""
        if self.draft == NGRAM:
            return None
        if is_shipped_draft(Path(self.draft)):
            return load_draft_decoder(self.draft, target or self.target)
        return load_decoder(self.draft)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How an engine serves the requests of a plan; picklable.

    Attributes:
        policy: What the candidate's policy is built from.
        sampling: How the target samples.
        max_kv_tokens: KV rows of all running requests of a replica, as ``serving`` counts them.
        serving: How a replica shares memory and steps, and the routing.
        max_waiting: Requests that may wait at a replica, None for any; later ones are refused.
    """

    policy: PolicySetup
    sampling: Sampling
    max_kv_tokens: int
    serving: Serving
    max_waiting: int | None = None


@dataclass(frozen=True, slots=True)
class EngineRun:
    """What a run leaves behind.

    Attributes:
        records: Of requests and rounds.
        outputs: Tokens of each request, complete or not.
        calibration: What the records' calibration errors were summed up from.
    """

    records: RunRecords
    outputs: dict[int, list[int]]
    calibration: CalibrationLog = field(default_factory=CalibrationLog)


def run_candidate(
    candidate: Candidate,
    requests: Sequence[BoundRequest],
    *,
    target: Decoder,
    draft: DraftSource | None,
    setup: PolicySetup | None = None,
    sampling: Sampling | None = None,
    stop_tokens: frozenset[int] = frozenset(),
    new_text: Callable[[], Push] | None = None,
    max_kv_tokens: int = 4096,
    serving: Serving | None = None,
    max_waiting: int | None = None,
    local_draft: Decoder | None = None,
    check: bool = False,
    draft_delay: Callable[[int], float] | None = None,
    progress: Progress | None = None,
    feed: Feed | None = None,
    emitted: Callable[[RequestVerdict], None] | None = None,
) -> EngineRun:
    """Serve ``requests`` as ``candidate`` says.

    Args:
        candidate: Split of the CPU's threads, policy and batch limit.
        requests: With token ids and arrivals in seconds.
        target: The loaded target.
        draft: Where the draft comes from; None is allowed for plain decoding alone.
        setup: Overrides what ``candidate.speculation`` alone would build (step times, an SLO).
        sampling: Greedy by default.
        stop_tokens: Tokens that end a request; none to follow the trace's output lengths.
        new_text: Makes what turns a request's tokens into text: ``Tokenizer.stream().push``.
            Needed where a request has stop strings.
        max_kv_tokens: KV rows of all running requests, as ``serving`` counts them.
        serving: How memory and steps are shared; its own limit of KV rows is not read.
        max_waiting: Requests that may wait, None for any; later ones are refused.
        local_draft: A loaded draft to use in this process, which saves loading it.
        check: Carry (position, token) with every KV row of this process and assert it.
        draft_delay: Seconds by round that the draft process sleeps, to test timing.
        progress: Called as ``progress("serve", finished, total)``.
        feed: Where requests come from; by default they come when they are due.
        emitted: Called with each verdict as soon as its tokens are final.

    Raises:
        InputError: If no request can be served, a draft is needed and missing, the policy runs in
            the simulator only, or a request has stop strings and there is no ``new_text``.
    """
    check_runs_in_engine(candidate.speculation)
    check_stop_strings(requests, new_text)
    served = served_requests(requests, candidate.speculation, target.shape, max_kv_tokens)
    torch.set_num_threads(candidate.deployment.target_workers)
    serving = serving or Serving()
    policy = setup or PolicySetup(candidate.speculation)
    schedule = served.schedule(
        candidate,
        serving,
        on_time=policy.on_time(serving),
        max_kv_tokens=max_kv_tokens,
        max_waiting=max_waiting,
        is_fed=feed is not None,
    )
    keep = max_kv_tokens if serving.prefix_cache else 0
    memory = _Memory(candidate.max_batch, served.longest, keep, check)
    worker = TargetWorker(
        target,
        memory.cache(target.shape),
        sampling=sampling or Sampling(),
        stop_tokens=stop_tokens,
        new_text=new_text,
        store=memory.store(),
        turns=policy.turns(),
    )
    build = partial(_build_worker, policy=policy, memory=memory)
    partner = _partner(candidate, draft, build, target, loaded=local_draft, delay=draft_delay)
    server = Server(
        worker,
        partner,
        schedule,
        requests,
        refused=served.refused,
        progress=progress,
        feed=feed,
        emitted=emitted,
    )
    records = server.run()
    return EngineRun(records, server.outputs, server.calibration)


@dataclass(frozen=True, slots=True)
class _Memory:
    """KV rows of the models of a run: slabs, and prefixes that are kept; picklable."""

    num_slots: int
    longest: int
    keep: int
    check: bool

    def cache(self, shape: ModelShape, *, more: int = 0) -> KVCache:
        """A slab of the longest request, and ``more`` rows, for each that runs."""
        tokens = self.longest + more
        return KVCache(shape, num_slots=self.num_slots, max_tokens=tokens, check=self.check)

    def store(self) -> PrefixStore | None:
        """Room for prefixes, if any are kept."""
        return PrefixStore(self.keep) if self.keep else None


def _partner(
    candidate: Candidate,
    draft: DraftSource | None,
    build: Callable[..., DraftWorker],
    target: Decoder,
    *,
    loaded: Decoder | None,
    delay: Callable[[int], float] | None,
) -> Partner:
    if candidate.speculation.kind == "plain":
        return NoDraft()
    if draft is None:
        raise InputError(f"{candidate.label} needs a draft. Choose one: codesign models list")
    threads = candidate.deployment.draft_workers
    if threads == 0:
        return LocalDraft(build(draft, loaded=loaded, target=target))
    return RemoteDraft(DraftSetup(partial(build, draft), num_threads=threads, delay=delay))


def _build_worker(
    source: DraftSource,
    policy: PolicySetup,
    memory: _Memory,
    *,
    loaded: Decoder | None = None,
    target: Decoder | None = None,
) -> DraftWorker:
    """Make the draft's worker, in whichever process it runs."""
    decoder = loaded or source.load(target)
    drafter: Drafter = NgramDrafter()
    if decoder is not None:
        cache = memory.cache(decoder.shape, more=MAX_TREE_ROWS)
        drafter = ModelDrafter(decoder, cache, memory.store())
    return DraftWorker(policy.build(), drafter)
