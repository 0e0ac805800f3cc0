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
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from codesign import Progress
from codesign.candidate import Candidate
from codesign.config import Serving
from codesign.engine.feed import Feed
from codesign.engine.gpu.group_target import GroupTarget
from codesign.engine.gpu.launch import LocalRanks, TorchrunProcess, TorchrunRanks
from codesign.engine.gpu.link import LinkedDraft, last_verdict_words
from codesign.engine.gpu.mailbox import Mailbox
from codesign.engine.gpu.rank_group import GroupLeader
from codesign.engine.gpu.rank_setup import RankSetup
from codesign.engine.gpu.ranks import DRAFT_MODEL, TARGET_MODEL, Rank, draft_worker, load_rank
from codesign.engine.gpu.watch import is_broken_collective
from codesign.engine.partner import DraftLostError, LocalDraft, NoDraft, Partner
from codesign.engine.refusals import check_stop_strings, served_requests
from codesign.engine.run import EngineRun
from codesign.engine.serve import Server
from codesign.errors import HardwareError, counted
from codesign.models.shape import model_shape
from codesign.policy.step_time import BUCKETS
from codesign.policy.stop_text import Push
from codesign.prompts import BoundRequest

Ranks = LocalRanks | TorchrunRanks
ABORT_SECONDS = 3.0
_NUMBERS = itertools.count()  # of runs that this process starts


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
    serving = serving or Serving()
    schedule = served.schedule(
        candidate,
        serving,
        on_time=setup.policy.on_time(serving),
        max_kv_tokens=max_kv_tokens,
        emitted_rows=setup.smallest_bucket,
        max_waiting=max_waiting,
        is_fed=feed is not None,
    )
    with started(setup) as (ranks, setup):
        this = load_leader(setup, ranks)
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


def load_leader(setup: RankSetup, ranks: Ranks) -> Rank:
    """Load the rank that leads the target, while the others load theirs.

    Raises:
        HardwareError: If one of them ends before all are ready.
    """
    ready, watch = ranks.wait_until_loaded, ranks.of_all
    try:
        return load_rank(setup, setup.leader, before_join=ready, watch=watch)
    except RuntimeError as error:
        if not is_broken_collective(error):
            raise
        watch.broken(error)


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
        # Fits price forwards without more padding than there must be.
        turns=setup.policy.turns() if setup.smallest_bucket == BUCKETS[0] else None,
    )


def _leave(this: Rank, leader: GroupLeader, ranks: Ranks) -> None:
    """Tell the target's ranks that no step follows, and leave their group."""
    leader.end()
    if leader.is_in_step:
        ranks.close(at_once=True)
    this.leave()


@contextlib.contextmanager
def started(setup: RankSetup) -> Iterator[tuple[Ranks, RankSetup]]:
    """The other ranks, running; they are gone at the end, whatever happened.

    Yields:
        The ranks, and the setup that they were started with.

    Raises:
        HardwareError: If there are fewer GPUs than ranks, or a rank does not start.
    """
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
            f"Plan again: codesign plan --trace TRACE --workers {torch.cuda.device_count()}"
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
