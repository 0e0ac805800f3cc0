"""Run a candidate on rank groups: the same loop, policy and records as on a CPU.

Way of one round: serve.py (loop) -> group_target.GroupTarget -> rank_group.GroupLeader ->
model_rank (one graph) on every rank of the target; link.LinkedDraft <-> the draft's leader
(ranks.serve_rank) -> group_drafter.GroupDrafter -> the draft's ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from codesign.config import Serving
from codesign.engine.feed import Feed
from codesign.engine.gpu.group_target import GroupTarget
from codesign.engine.gpu.launch import LocalRanks, TorchrunProcess, TorchrunRanks
from codesign.engine.gpu.link import LinkedDraft, last_verdict_words
from codesign.engine.gpu.mailbox import Mailbox
from codesign.engine.gpu.paging import PAGE_ROWS, Paging
from codesign.engine.gpu.rank_group import GroupLeader
from codesign.engine.gpu.rank_setup import RankSetup
from codesign.engine.gpu.ranks import DRAFT_MODEL, TARGET_MODEL, Rank, draft_worker, load_rank
from codesign.engine.gpu.watch import SILENCE
from codesign.engine.partner import DraftLostError, LocalDraft, NoDraft, Partner
from codesign.engine.refusals import check_stop_strings, served_requests
from codesign.engine.run import EngineRun, PolicySetup
from codesign.engine.serve import Progress, Server
from codesign.errors import HardwareError, InputError, counted
from codesign.models.shape import model_shape
from codesign.plan import Candidate
from codesign.policy.interface import MAX_TREE_ROWS
from codesign.policy.kv_memory import PREFIX_BLOCK
from codesign.policy.stop_text import Push
from codesign.policy.walk import Sampling
from codesign.prompts import BoundRequest

Ranks = LocalRanks | TorchrunRanks
ABORT_SECONDS = 3.0
_NUMBERS = itertools.count()  # of runs that this process starts


def rank_setup(
    candidate: Candidate,
    requests: Sequence[BoundRequest],
    *,
    target: Path,
    draft: Path | str | None,
    policy: PolicySetup | None = None,
    sampling: Sampling | None = None,
    max_kv_tokens: int = 4096,
    serving: Serving | None = None,
    page_rows: int = PAGE_ROWS,
    device: str = "cuda",
    dtype: str = "bfloat16",
    smallest_bucket: int = 8,
    check: bool = False,
    silence: float = SILENCE,
    fused: bool = True,
    number: int = 0,
    shares_gpus: bool = False,
    draft_delay: Callable[[int], float] | None = None,
) -> RankSetup:
    """What the ranks of a candidate's run must know.

    Raises:
        InputError: If no request can be served, or a draft is needed and missing.
    """
    spec, deployment = candidate.speculation, candidate.deployment
    served = served_requests(requests, spec, model_shape(target), max_kv_tokens)
    longest, num_slots = served.longest, candidate.max_batch
    serving, sampling = serving or Serving(), sampling or Sampling()
    pages = partial(Paging.for_rows, max_kv_tokens, num_slots, page_rows=page_rows)
    pagings = _pagings(pages, serving, num_slots * longest > 2 * max_kv_tokens)
    draft = _draft_of(candidate, draft)
    return RankSetup(
        target=target,
        draft=draft,
        target_ranks=deployment.target_workers,
        draft_ranks=deployment.draft_workers if draft is not None else 0,
        policy=policy or PolicySetup(spec),
        sampling=sampling,
        num_slots=num_slots,
        target_tokens=longest,
        draft_tokens=longest + MAX_TREE_ROWS,
        target_paging=pagings[0],
        draft_paging=pagings[1],
        samplings=_samplings(served.requests, sampling),
        keeps_prefixes=serving.prefix_cache,
        max_rows=spec.max_rows,
        smallest_bucket=smallest_bucket,
        device=device,
        dtype=dtype,
        check=check,
        silence=silence,
        fused=fused,
        number=number,
        shares_gpus=shares_gpus,
        delay=draft_delay,
    )


def _draft_of(candidate: Candidate, draft: Path | str | None) -> Path | str | None:
    """The draft that a candidate runs with; none of plain decoding."""
    if candidate.speculation.kind == "plain":
        return None
    if draft is None:
        raise InputError(f"{candidate.label} needs a draft. Choose one: codesign models list")
    return draft


def _pagings(
    pages: Callable[..., Paging], serving: Serving, are_sparse: bool
) -> tuple[Paging | None, Paging | None]:
    """The target's and the draft's, if rows are shared or taken back, or most would be empty."""
    if not (serving.prefix_cache or serving.preemption or are_sparse):
        return None, None
    # A draft writes the row of a prompt's last token itself, and so shares no block with it.
    unshared = PREFIX_BLOCK if serving.prefix_cache else 0
    return pages(), pages(spare_rows=MAX_TREE_ROWS + unshared)


def _samplings(requests: Sequence[BoundRequest], sampling: Sampling) -> tuple[Sampling, ...]:
    """All ways in which requests sample; () if all sample as the run does, but for the seed."""
    own = {r.options.sampling for r in requests} - {None}
    different = [s for s in own if s and replace(s, seed=sampling.seed) != sampling]
    return (sampling, *different) if different else ()


def run_on_ranks(
    setup: RankSetup,
    candidate: Candidate,
    requests: Sequence[BoundRequest],
    *,
    stop_tokens: frozenset[int] = frozenset(),
    new_text: Callable[[], Push] | None = None,
    max_kv_tokens: int = 4096,
    serving: Serving | None = None,
    max_waiting: int | None = None,
    progress: Progress | None = None,
    feed: Feed | None = None,
    inspect: Callable[[Rank], None] | None = None,
) -> EngineRun:
    """Serve ``requests`` as the target's leader, in this process.

    Under torchrun every other rank calls ``ranks.serve_rank`` with the same setup (see
    ``launch.TorchrunProcess``); otherwise the other ranks are started here.

    Args:
        setup: From ``rank_setup``.
        candidate: Its policy and batch limit.
        requests: With token ids and arrivals in seconds.
        stop_tokens: Tokens that end a request.
        new_text: Makes what turns a request's tokens into text; see ``run_candidate``.
        max_kv_tokens: KV rows of all running requests, as ``serving`` counts them.
        serving: How memory and steps are shared, as it was given to ``rank_setup``.
        max_waiting: Requests that may wait, None for any; later ones are refused.
        progress: Called as ``progress("serve", finished, total)``.
        feed: Where requests come from; by default they come when they are due.
        inspect: Called with this rank after the run; for tests and benchmarks.

    Raises:
        HardwareError: If there are fewer GPUs than ranks, or a rank does not start.
    """
    check_stop_strings(requests, new_text)
    target = model_shape(setup.target)
    served = served_requests(requests, candidate.speculation, target, max_kv_tokens)
    schedule = served.schedule(
        candidate,
        serving or Serving(),
        max_kv_tokens=max_kv_tokens,
        emitted_rows=setup.smallest_bucket,
        max_waiting=max_waiting,
        is_fed=feed is not None,
    )
    with started(setup) as (ranks, setup):
        this = load_rank(setup, setup.leader, before_join=ranks.wait_until_loaded)
        followers = this.group_mailbox(draft=False, watch=ranks.of_target)
        leader = this.leader(TARGET_MODEL, followers, ranks.of_target)
        server = Server(
            _target_of(setup, leader, stop_tokens, new_text),
            partner_of(this, ranks, followers),
            schedule,
            requests,
            refused=served.refused,
            progress=progress,
            ended=ranks.let_write,
            feed=feed,
        )
        records = server.run()
        if inspect is not None:
            inspect(this)
        _leave(this, leader, ranks)
    return EngineRun(records, server.outputs, server.calibration)


def _target_of(
    setup: RankSetup,
    leader: GroupLeader,
    stop_tokens: frozenset[int],
    new_text: Callable[[], Push] | None,
) -> GroupTarget:
    return GroupTarget(
        leader,
        num_slots=setup.num_slots,
        sampling=setup.sampling,
        stop_tokens=stop_tokens,
        new_text=new_text,
        smallest_bucket=setup.smallest_bucket,
        paging=setup.target_paging,
        samples_by_row=bool(setup.samplings),
    )


def _leave(this: Rank, leader: GroupLeader, ranks: Ranks) -> None:
    """Tell the target's ranks that no step follows, and leave their group."""
    leader.end()
    if leader.is_in_step:
        ranks.close(at_once=True)
    this.leave()


@contextlib.contextmanager
def started(setup: RankSetup) -> Iterator[tuple[Ranks, RankSetup]]:
    """The other ranks, running; they are gone at the end, whatever happened."""
    if TorchrunProcess.this() is not None:
        ranks = TorchrunRanks(setup)
        try:
            yield ranks, setup
        finally:
            _abandon()
            ranks.close()
        return
    needed = setup.num_ranks if setup.device == "cuda" and not setup.shares_gpus else 0
    if torch.cuda.device_count() < needed:
        raise HardwareError(
            f"the plan needs {counted(needed, 'GPU')}, found {torch.cuda.device_count()}. "
            f"Plan again: codesign plan --workers {torch.cuda.device_count()}"
        )
    # Shared memory: the mailboxes are files in this folder.
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() else None
    with own_gpu(), tempfile.TemporaryDirectory(prefix="codesign-", dir=parent) as folder:
        setup = replace(setup, folder=Path(folder), number=next(_NUMBERS))
        ranks = LocalRanks(setup)
        try:
            yield ranks, setup
        finally:
            ranks.close()
            _abandon()


@contextlib.contextmanager
def own_gpu() -> Iterator[None]:
    """The leader's GPU is current only within; a process begins on GPU 0."""
    before = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    try:
        yield
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.set_device(before)


def _abandon() -> None:
    """After a rank was lost: do not wait for what it left undone, nor long for NCCL to see it."""
    if dist.is_initialized():
        thread = Thread(target=_abort_process_group, daemon=True)
        thread.start()
        thread.join(ABORT_SECONDS)


def partner_of(this: Rank, ranks: Ranks, followers: Mailbox | None) -> Partner:
    """Whoever drafts for this rank, the target's leader; to be made once, with all mailboxes."""
    setup = this.setup
    if setup.draft is None:
        return NoDraft()
    if setup.draft_ranks == 0:
        leader: GroupLeader | None = None
        if setup.has_draft_model:
            leader = this.leader(DRAFT_MODEL, followers, ranks.of_target)
        return LocalDraft(draft_worker(setup, leader))
    verdicts, candidates = this.pair_mailboxes(ranks.of_draft)

    def end(is_lost: bool) -> None:
        if not is_lost:
            with contextlib.suppress(DraftLostError):
                verdicts.send(last_verdict_words(setup.limits))
                verdicts.flush()
        ranks.end_draft(at_once=is_lost)

    return LinkedDraft(verdicts, candidates, setup.limits, end)
