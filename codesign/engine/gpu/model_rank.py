"""One model on one rank: takes step messages, answers with a few words.

On a GPU each row bucket is one CUDA graph, or two (in pairs), from the copy of the message to the
device until the answer is on the host and accepted rows are in their places; a step is one launch,
and so is a prompt that a bucket holds.
On a CPU the same calls run one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from codesign.engine.gpu.ahead_steps import AheadSteps
from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.graphs import Graphs, Step
from codesign.engine.gpu.heads import DraftHead, StepHead, TargetHead
from codesign.engine.gpu.next_steps import MOST_UNDER_WAY, NextSteps
from codesign.engine.gpu.outbox import Due, Outbox, wait
from codesign.engine.gpu.prompt_rows import SLOT_WORD
from codesign.engine.gpu.prompt_steps import PromptSteps
from codesign.engine.gpu.quick_core import QuickCore
from codesign.engine.gpu.row_sampling import RowTargetHead
from codesign.engine.gpu.slabs import Slabs
from codesign.engine.gpu.step_rows import (
    AHEAD,
    BUCKET,
    FOLLOWED,
    HEADER,
    KIND,
    NEXT,
    PAGES,
    PIECE,
    PROMPT,
    STEP,
    DeviceRows,
    Words,
    crowd_of,
    max_step_words,
    pack_step,
    step_words,
)
from codesign.engine.gpu.watch import Watch
from codesign.engine.target import never, nothing
from codesign.policy.step_time import BUCKETS


class ModelRank:
    """A model's part on this rank, with its slabs.

    Args:
        forward: The model's part.
        slabs: Its keys and values.
        head: What follows a forward.
        max_moves: Most slab rows that a message may move.
        core: Of this process, if it may leave its own.
    """

    def __init__(
        self,
        forward: RankForward,
        slabs: Slabs,
        head: StepHead,
        *,
        max_moves: int = 0,
        core: QuickCore | None = None,
    ) -> None:
        self.forward = forward
        self.slabs = slabs
        self.head = head
        self._max_moves = max_moves
        self._core = core
        self._graphs = Graphs(forward.group, forward.device)
        self._inbox = self._graphs.inbox(max_step_words(max_moves))
        self._due: deque[Due] = deque()
        self._steps: dict[tuple[int, bool], Step] = {}  # of a bucket, attended in pairs or not
        self._prompts = PromptSteps(forward, slabs, head, self._inbox, self._graphs)
        self._ahead: AheadSteps | None = None
        if isinstance(head, DraftHead):
            self._ahead = AheadSteps(forward, slabs, head, self._inbox.on_device, self._graphs)
        self._next: NextSteps | None = None
        if isinstance(head, TargetHead):
            self._next = NextSteps(forward, slabs, head, self._inbox.on_device, self._graphs)

    @torch.inference_mode()
    def prepare(
        self,
        buckets: Sequence[int] = BUCKETS,
        prompt_buckets: Sequence[int] = (),
        ahead_buckets: Sequence[int] = (),
        next_buckets: Sequence[int] = (),
        *,
        requests: int = 1,
    ) -> None:
        """Capture the graphs of ``buckets``; every rank of the group does so at the same time.

        Those of ``ahead_buckets`` also as steps of a draft that choose their rows themselves, those
        of ``next_buckets`` as steps of a target that do, and all in which up to ``requests``
        requests may be attended faster in pairs also like that. See ``PromptSteps.prepare`` for
        ``prompt_buckets``.
        """
        self._prompts.prepare(prompt_buckets)
        for bucket in sorted(buckets, reverse=True):  # the others fit into its memory
            self._prepare_step(bucket, is_followed=bucket in ahead_buckets)
            most = min(requests, bucket)
            ways = [False]
            if self.forward.pairs_may_do_more(bucket, most, self.slabs.max_tokens):
                self._prepare_step(bucket, in_pairs=True)
                ways.append(True)
            for in_pairs in ways if bucket in next_buckets else ():
                self._prepare_next(bucket, in_pairs=in_pairs)

    def _prepare_next(self, bucket: int, *, in_pairs: bool) -> None:
        assert self._next is not None, "only a target decodes"
        scratch = self._steps[bucket, in_pairs].scratch
        self._next.prepare(bucket, scratch, in_pairs=in_pairs)

    @property
    def runs_beside(self) -> bool:
        """Whether steps run while the host goes on."""
        return self._graphs.on_gpu

    def has_next(self, bucket: int) -> bool:
        """Whether a bucket's steps may follow one another without a message."""
        return self._next is not None and self._next.has(bucket)

    def _make_step(self, bucket: int, *, in_pairs: bool) -> Step:
        outbox = Outbox(self.head.words(bucket), self.forward.device)
        scratch = self.forward.scratch(bucket, self.slabs.max_tokens)
        words = step_words(bucket, self._max_moves)
        rows = DeviceRows.of(self._inbox.on_device[:words], bucket)
        sampled = None if self._next is None else self._next.sampled[:bucket]

        def run() -> None:
            self._inbox.fetch(words)
            if self._max_moves:
                self.slabs.move(rows.moves, rows.num_moves_1)
            self.slabs.label(rows)
            hidden_TD = self.forward.hidden(rows, self.slabs, scratch, in_pairs=in_pairs)
            answer = self.head.answer(self.forward, rows, hidden_TD)
            outbox.post(answer, kept=sampled)
            self.head.keep(rows, answer, self.slabs)

        idle = pack_step((), bucket=bucket, scratch_slot=self.slabs.scratch_slot)
        return Step(self._inbox.captured(run, idle), outbox, scratch)

    def answer(self, message: Words, watch: Watch | None = None) -> Words:
        """Run a message and wait for its last answer; none of a step that is followed.

        Args:
            message: From ``pack_step``, ``prompt_message``, or one of the others.
            watch: Of the other ranks of the group.
        """
        if not self.start(message, watch):
            return np.zeros(0, np.int32)
        while len(self._due) > 1:
            self.take(watch)
        return self.take(watch)

    def replay(
        self,
        message: Words,
        watch: Watch | None = None,
        is_called: Callable[[], bool] = never,
        meanwhile: Callable[[], None] = nothing,
    ) -> None:
        """Run a message as a follower: wait for its answers, or until another message is there.

        What follows a step must be under way before this is done.

        Args:
            message: Of the leader.
            watch: Of the leader.
            is_called: Whether another message is there.
            meanwhile: Called once a message with an answer was started, unless more must follow at
                once: while the GPU is busy, or, after a prompt, while the leader reads its answer.
        """
        kind = message[KIND]
        if kind not in (AHEAD, PAGES):
            while len(self._due) > (MOST_UNDER_WAY - 1 if kind == NEXT else 0):
                self.take(watch)
        self.start(message, watch)
        if kind == STEP and message[FOLLOWED]:
            return
        if self._due:
            meanwhile()
        while self._due and self.is_there(watch, is_called):
            self._due.popleft()

    def start(self, message: Words, watch: Watch | None = None) -> int:
        """Run a message as ``answer`` does; how many answers there will be to ``take``.

        A step that is followed comes before a message of ``growth.ahead_message``. What steps read
        later has no answer.
        """
        kind, bucket = int(message[KIND]), int(message[BUCKET])
        if kind == AHEAD:
            assert self._ahead is not None, "only a draft runs ahead"
            found = self._ahead.start(message)
        elif kind == NEXT:
            assert self._next is not None, "only a target decodes"
            found = [self._next.start(message)]
        elif kind == STEP:
            found = [self._start_step(message, bucket)]
        elif kind in (PROMPT, PIECE):
            found = [Due(self._answer_prompt(message, watch))]
        else:
            self.note(message)
            found = []
        self._due.extend(found)
        return len(found)

    def _start_step(self, message: Words, bucket: int) -> Due:
        in_pairs = self.forward.pairs_do_more(crowd_of(message))
        step = self._steps.get((bucket, in_pairs))
        is_followed = bool(message[FOLLOWED])
        if step is None or (is_followed and not (self._ahead and self._ahead.has(bucket))):
            step = self._prepare_step(bucket, in_pairs=in_pairs, is_followed=is_followed)
        self._inbox.put(message)
        due = step.outbox.expect()
        step.run()  # of a graph: no mode of PyTorch's to enter, which takes as long as a copy
        return due

    @torch.inference_mode()
    def _prepare_step(
        self, bucket: int, *, in_pairs: bool = False, is_followed: bool = False
    ) -> Step:
        """A bucket's step, made if need be, and the one that chooses its rows from its answer."""
        step = self._steps.get((bucket, in_pairs))
        if step is None:
            step = self._steps[bucket, in_pairs] = self._make_step(bucket, in_pairs=in_pairs)
        if is_followed:
            assert self._ahead is not None, "only a draft runs ahead"
            self._ahead.prepare(bucket, step.scratch)
        return step

    def take(self, watch: Watch | None = None) -> Words:
        """Wait for the next answer of what was started."""
        self.is_there(watch)
        return self._due.popleft().words.copy()

    def is_there(self, watch: Watch | None, is_called: Callable[[], bool] | None = None) -> bool:
        """Wait for the next answer; False if this was called before it was there."""
        forward = self.forward
        return wait(self._due[0], forward.group, forward.device, watch, self._core, is_called)

    @torch.inference_mode()
    def _answer_prompt(self, message: Words, watch: Watch | None) -> Words:
        return self._prompts.answer(message, watch)

    @torch.inference_mode()
    def note(self, message: Words) -> None:
        """Take what steps will read: pages, or how a request samples."""
        if message[KIND] == PAGES:
            self.slabs.enter(message[HEADER:].reshape(-1, 3))
        else:
            assert isinstance(self.head, RowTargetHead), "all requests sample as the run does"
            self.head.note(int(message[SLOT_WORD]), message[HEADER:])

    def close(self) -> None:
        """Drop the graphs: NCCL's communicators do not end while one of them holds a collective."""
        self._steps.clear()
        self._prompts.close()
        if self._ahead is not None:
            self._ahead.close()
        if self._next is not None:
            self._next.close()

    def num_faults(self) -> int:
        """Rows that a checked step saw in the wrong place; 0 without ``check``."""
        return int(self.slabs.num_faults_1)
