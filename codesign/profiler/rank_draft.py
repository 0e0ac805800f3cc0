"""The draft's leader of a profile, which takes orders instead of verdicts, from both ends.

Two files in the ranks' folder say that one side is to keep busy while the other is timed, and a
third holds the policy of requests that are served in between.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import get_args

import numpy as np

from codesign.engine.draft_worker import DraftWorker
from codesign.engine.drafter import Drafter, NgramDrafter
from codesign.engine.gpu.group_drafter import GroupDrafter
from codesign.engine.gpu.link import LinkedDraft, last_verdict_words, serve_verdicts
from codesign.engine.gpu.mailbox import Mailbox, Words
from codesign.engine.gpu.rank_group import GroupLeader
from codesign.engine.gpu.rank_setup import RankSetup
from codesign.engine.gpu.ranks import Rank
from codesign.engine.gpu.watch import Watch
from codesign.engine.partner import Partner
from codesign.engine.run import PolicySetup
from codesign.profiler.kept_trees import Kept, NotingWorker
from codesign.profiler.rank_steps import draft_steps, kv_room
from codesign.profiler.steps import Op, StepShape

_OPS: tuple[Op, ...] = get_args(Op)
_TIME, _KEEP, _MEMORY, _SERVE, _END = range(5)  # orders
_BUSY, _DONE, _POLICY, _KEPT = "draft-busy", "draft-done", "draft-policy", "draft-kept"  # files
BUSY_DRAFT = StepShape("draft", 2, 4, 64)
# Of a step's repetitions the median counts, and of several not the first: in a round the host has
# just run the same code, and the target is under way.
_STEPS, _PROMPT_STEPS, _BESIDE_STEPS = 2, 1, 4
_VERDICT_SECONDS = 2e-3  # that a draft waits before a step: the target's rounds take 2 ms and more


def lead_draft(
    rank: Rank, leader: GroupLeader | None, verdicts: Mailbox, candidates: Mailbox
) -> None:
    """Be the draft's leader for measurements: do as ``RankBench`` says."""
    folder, limits = rank.setup.folder, rank.setup.limits
    assert folder is not None, "ranks of a profile are on one host"
    steps, parent = draft_steps(rank.setup, leader), os.getppid()
    candidates.send(_seconds_words(0.0))
    while (order := verdicts.receive())[0] != _END:
        if order[0] == _SERVE:
            policy = pickle.loads((folder / _POLICY).read_bytes()).build()
            kind = NotingWorker if order[1] else DraftWorker
            worker = kind(policy, drafter_of(rank.setup, leader))
            serve_verdicts(worker, verdicts, candidates, limits)
            if isinstance(worker, NotingWorker):
                (folder / _KEPT).write_bytes(pickle.dumps(worker.kept))
            continue
        if order[0] == _MEMORY:
            room = kv_room(rank)[0]
            candidates.send(_seconds_words(-1.0 if room is None else float(room)))
            continue
        shape = _shape(order)
        count = int(order[-1])
        before = partial(spin, _VERDICT_SECONDS) if order[0] == _TIME else None
        seconds = [steps.seconds(shape, before=before) for _ in range(count)]
        if order[0] == _TIME:
            (folder / _DONE).touch()
        candidates.send(_seconds_words(median(seconds[1:] or seconds)))
        # Nobody takes the file away where the profile was killed.
        while order[0] == _KEEP and (folder / _BUSY).exists() and os.getppid() == parent:
            steps.seconds(shape)


def spin(seconds: float) -> None:
    """Wait without sleeping, as a mailbox does for a verdict."""
    start = perf_counter()
    while perf_counter() - start < seconds:
        pass


class Link:
    """The draft's leader in its process, from the target's.

    Args:
        verdicts: To it; here they are orders.
        candidates: From it.
        folder: Of the ranks.
        watch: Of its process.
    """

    def __init__(self, verdicts: Mailbox, candidates: Mailbox, folder: Path, watch: Watch) -> None:
        self._verdicts = verdicts
        self._candidates = candidates
        self._folder = folder
        self._watch = watch
        self._is_kept = False

    def wait(self) -> float:
        """The next answer."""
        return float(self._candidates.receive().view(np.float64)[0])

    def step_seconds(self, shape: StepShape, busy_step: Callable[[], None] | None) -> float:
        """Time a step of the draft, while this process runs ``busy_step`` again and again."""
        done = self._folder / _DONE
        done.unlink(missing_ok=True)
        count = _PROMPT_STEPS if "prefill" in shape.op else _STEPS
        self._verdicts.send(_order(_TIME, shape, count if busy_step is None else _BESIDE_STEPS))
        start = perf_counter()
        while busy_step is not None and not done.exists():
            busy_step()
            self._watch.look(perf_counter() - start)
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

    def partner(self, setup: RankSetup, policy: PolicySetup, *, notes: bool = False) -> Partner:
        """The draft's leader as one that serves a policy until the partner is closed.

        Args:
            setup: The ranks'.
            policy: To serve.
            notes: It notes what re-roots keep, for ``kept``.
        """
        (self._folder / _POLICY).write_bytes(pickle.dumps(policy))
        self._verdicts.send(np.array([_SERVE, notes], np.int32))
        limits = setup.limits

        def end(is_lost: bool) -> None:
            if not is_lost:
                self._verdicts.send(last_verdict_words(limits))

        return LinkedDraft(self._verdicts, self._candidates, limits, end)

    def kept(self) -> Kept:
        """What re-roots kept while a policy was last served with notes."""
        self.kv_room()  # its answer says that it is written
        return pickle.loads((self._folder / _KEPT).read_bytes())

    def kv_room(self) -> int | None:
        """KV rows that fit on the draft's ranks."""
        self._verdicts.send(np.array([_MEMORY], np.int32))
        room = self.wait()
        return None if room < 0 else int(room)

    def end(self) -> None:
        """Let it go."""
        self._verdicts.send(np.array([_END], np.int32))
        self._verdicts.flush()


def drafter_of(setup: RankSetup, leader: GroupLeader | None) -> Drafter:
    """A drafter on the draft's ranks, or without a model, for any policy."""
    if leader is None:
        return NgramDrafter()
    choices = setup.policy.build().fanout  # what its graphs answer, whatever a policy asks for
    return GroupDrafter(leader, num_slots=setup.num_slots, choices=choices)


def _order(kind: int, shape: StepShape, count: int) -> Words:
    place = _OPS.index(shape.op)
    return np.array([kind, place, shape.requests, shape.rows, shape.context, count], np.int32)


def _shape(order: Words) -> StepShape:
    _, place, requests, rows, context, _ = order.tolist()
    return StepShape(_OPS[place], requests, rows, context)


def _seconds_words(seconds: float) -> Words:
    return np.array([seconds], np.float64).view(np.int32)
