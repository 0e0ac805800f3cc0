"""Times steps on rank groups: this process leads the target, another one the draft if it is split.

A draft on ranks of its own is led by ``lead_draft``, which takes orders instead of verdicts. Two
files in the ranks' folder say that one side is to keep busy while the other is timed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import get_args

import numpy as np
import torch

from codesign.engine.gpu.link import LinkedDraft, last_verdict_words, serve_verdicts
from codesign.engine.gpu.mailbox import Mailbox, Words
from codesign.engine.gpu.rank_group import GroupLeader
from codesign.engine.gpu.rank_setup import RankSetup
from codesign.engine.gpu.ranks import DRAFT_MODEL, TARGET_MODEL, Rank, load_rank
from codesign.engine.gpu.run import started
from codesign.profiler.link import idle_worker, message_seconds
from codesign.profiler.rank_steps import RankTarget, draft_steps, kv_room
from codesign.profiler.steps import Op, StepShape

_OPS: tuple[Op, ...] = get_args(Op)
_TIME, _KEEP, _LINK, _MEMORY, _END = range(5)  # orders
_BUSY, _DONE = "draft-busy", "draft-done"  # files
BUSY_TARGET = StepShape("target", 2, 4, 64)  # a round as busy as one stream's, or two's
BUSY_DRAFT = StepShape("draft", 2, 4, 64)
_BESIDE_STEPS = 3  # of which the median counts: the first may meet the target between two steps


def lead_draft(
    rank: Rank, leader: GroupLeader | None, verdicts: Mailbox, candidates: Mailbox
) -> None:
    """Be the draft's leader for measurements: do as ``RankBench`` says."""
    folder, limits = rank.setup.folder, rank.setup.limits
    assert folder is not None, "ranks of a profile are on one host"
    steps = draft_steps(rank.setup, leader)
    candidates.send(_seconds_words(0.0))
    while (order := verdicts.receive())[0] != _END:
        if order[0] == _LINK:
            serve_verdicts(idle_worker(), verdicts, candidates, limits)
            continue
        if order[0] == _MEMORY:
            room = kv_room(rank)[0]
            candidates.send(_seconds_words(-1.0 if room is None else float(room)))
            continue
        shape = _shape(order)
        count = int(order[-1])
        seconds = [steps.seconds(shape) for _ in range(count)]
        if order[0] == _TIME:
            (folder / _DONE).touch()
        candidates.send(_seconds_words(median(seconds)))
        while order[0] == _KEEP and (folder / _BUSY).exists():
            steps.seconds(shape)


class Link:
    """The draft's leader in its process, from the target's.

    Args:
        verdicts: To it; here they are orders.
        candidates: From it.
        folder: Of the ranks.
    """

    def __init__(self, verdicts: Mailbox, candidates: Mailbox, folder: Path) -> None:
        self._verdicts = verdicts
        self._candidates = candidates
        self._folder = folder
        self._is_kept = False

    def wait(self) -> float:
        """The next answer."""
        return float(self._candidates.receive().view(np.float64)[0])

    def step_seconds(self, shape: StepShape, busy_step: Callable[[], None] | None) -> float:
        """Time a step of the draft, while this process runs ``busy_step`` again and again."""
        done = self._folder / _DONE
        done.unlink(missing_ok=True)
        self._verdicts.send(_order(_TIME, shape, 1 if busy_step is None else _BESIDE_STEPS))
        while busy_step is not None and not done.exists():
            busy_step()
        return self.wait()

    def keep(self) -> None:
        """Have it draft without a pause, from now on."""
        (self._folder / _BUSY).touch()
        self._verdicts.send(_order(_KEEP, BUSY_DRAFT, 1))
        self.wait()
        self._is_kept = True

    def let_rest(self) -> None:
        """Have it wait for orders."""
        (self._folder / _BUSY).unlink(missing_ok=True)
        if self._is_kept:
            self._is_kept = False
            self.kv_room()  # its answer says that it has seen it

    def message_seconds(self, setup: RankSetup) -> list[float]:
        """See ``RankBench.message_seconds``."""
        self._verdicts.send(np.array([_LINK], np.int32))
        limits = setup.limits
        seconds = message_seconds(
            LinkedDraft(self._verdicts, self._candidates, limits, lambda is_lost: None)
        )
        self._verdicts.send(last_verdict_words(limits))
        return seconds

    def kv_room(self) -> int | None:
        """KV rows that fit on the draft's ranks."""
        self._verdicts.send(np.array([_MEMORY], np.int32))
        room = self.wait()
        return None if room < 0 else int(room)

    def end(self) -> None:
        """Let it go."""
        self._verdicts.send(np.array([_END], np.int32))
        self._verdicts.flush()


class RankBench:
    """Times steps of one deployment; see ``rank_bench``."""

    def __init__(
        self, this: Rank, target: GroupLeader, draft: GroupLeader | None, link: Link | None
    ) -> None:
        self.setup = this.setup
        self.target = target
        self.draft = draft
        self._this = this
        self._link = link
        self.target_steps = RankTarget(target, this.setup)
        self._draft_steps = None if link else draft_steps(this.setup, draft)
        if link is not None:
            link.wait()
        self._is_target_busy = False

    def seconds(self, shape: StepShape) -> float:
        """Time one step."""
        if shape.op in ("target", "prefill"):
            return self.target_steps.seconds(shape)
        if self._link is None:
            assert self._draft_steps is not None
            return self._draft_steps.seconds(shape)
        return self._link.step_seconds(shape, self._busy_step if self._is_target_busy else None)

    def rest(self) -> None:
        """Time each side alone from now on."""
        self._is_target_busy = False
        self._split.let_rest()

    def keep_drafting(self) -> None:
        """Time the target beside a draft that never pauses."""
        self.rest()
        self._split.keep()

    def keep_verifying(self) -> None:
        """Time the draft beside a target that never pauses."""
        self.rest()
        self._is_target_busy = True

    def message_seconds(self) -> list[float]:
        """Seconds of messages between the leaders, one way."""
        self.rest()
        return self._split.message_seconds(self.setup)

    def kv_rooms(self) -> dict[str, int]:
        """KV rows that fit with the draft and without it; empty where it is not known."""
        shared, plain = kv_room(self._this)
        if shared is None or plain is None:
            return {}
        if self._link is not None:
            beside = self._link.kv_room()
            shared = shared if beside is None else min(shared, beside)
        return {"kv_tokens": shared, "plain_kv_tokens": plain}

    def close(self) -> None:
        """Let the draft's leader go."""
        if self._link is not None:
            self._link.let_rest()
            self._link.end()

    @property
    def _split(self) -> Link:
        assert self._link is not None, "only a split has two sides"
        return self._link

    def _busy_step(self) -> None:
        self.target_steps.seconds(BUSY_TARGET)


@contextmanager
def rank_bench(setup: RankSetup) -> Iterator[RankBench]:
    """Start the ranks of a deployment, and end them.

    Raises:
        HardwareError: If there are fewer GPUs than ranks, or a rank does not start.
    """
    gc.collect()  # the weights of an earlier deployment
    if setup.device == "cuda":
        torch.cuda.empty_cache()
    with started(setup) as (ranks, setup):
        this = load_rank(setup, setup.leader, before_join=ranks.wait_until_loaded)
        followers = this.group_mailbox(draft=False, watch=ranks.of_target)
        target = this.leader(TARGET_MODEL, followers, ranks.of_target)
        draft = link = None
        if setup.draft_ranks:
            assert setup.folder is not None, "ranks of a profile are on one host"
            link = Link(*this.pair_mailboxes(ranks.of_draft), setup.folder)
        elif setup.has_draft_model:
            draft = this.leader(DRAFT_MODEL, followers, ranks.of_target)
        bench = RankBench(this, target, draft, link)
        yield bench
        bench.close()
        target.end()
        this.leave()


def _order(kind: int, shape: StepShape, count: int) -> Words:
    place = _OPS.index(shape.op)
    return np.array([kind, place, shape.requests, shape.rows, shape.context, count], np.int32)


def _shape(order: Words) -> StepShape:
    _, place, requests, rows, context, _ = order.tolist()
    return StepShape(_OPS[place], requests, rows, context)


def _seconds_words(seconds: float) -> Words:
    return np.array([seconds], np.float64).view(np.int32)
