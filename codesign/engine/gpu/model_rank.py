"""One model on one rank: takes step messages, answers with a few words.

On a GPU each row bucket is one CUDA graph, or two (in pairs), from the copy of the message to the
device until the answer is on the host and accepted rows are in their places; a step is one launch,
and so is a prompt that a bucket holds.
On a CPU the same calls run one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from codesign.engine.gpu.ahead_steps import AheadSteps
from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.graphs import Graphs, Step
from codesign.engine.gpu.heads import DraftHead, StepHead
from codesign.engine.gpu.outbox import Due, Outbox, wait
from codesign.engine.gpu.prompt_rows import SLOT_WORD
from codesign.engine.gpu.prompt_steps import PromptSteps
from codesign.engine.gpu.quick_core import QuickCore
from codesign.engine.gpu.row_sampling import RowTargetHead
from codesign.engine.gpu.slabs import Slabs
from codesign.engine.gpu.step_rows import (
    AHEAD,
    BUCKET,
    BUCKETS,
    FOLLOWED,
    HEADER,
    KIND,
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

    @torch.inference_mode()
    def prepare(
        self,
        buckets: Sequence[int] = BUCKETS,
        prompt_buckets: Sequence[int] = (),
        ahead_buckets: Sequence[int] = (),
        *,
        requests: int = 1,
    ) -> None:
        """Capture the graphs of ``buckets``; every rank of the group does so at the same time.

        Those of ``ahead_buckets`` also as steps that choose their rows themselves, and all in which
        up to ``requests`` requests may be attended faster in pairs also like that. See
        ``PromptSteps.prepare`` for ``prompt_buckets``.
        """
        self._prompts.prepare(prompt_buckets)
        for bucket in sorted(buckets, reverse=True):  # the others fit into its memory
            self._prepare_step(bucket, is_followed=bucket in ahead_buckets)
            most = min(requests, bucket)
            if self.forward.pairs_may_do_more(bucket, most, self.slabs.max_tokens):
                self._prepare_step(bucket, in_pairs=True)

    def _make_step(self, bucket: int, *, in_pairs: bool) -> Step:
        outbox = Outbox(self.head.words(bucket), self.forward.device)
        scratch = self.forward.scratch(bucket, self.slabs.max_tokens)
        words = step_words(bucket, self._max_moves)
        rows = DeviceRows.of(self._inbox.on_device[:words], bucket)

        def run() -> None:
            self._inbox.fetch(words)
            if self._max_moves:
                self.slabs.move(rows.moves, rows.num_moves_1)
            self.slabs.label(rows)
            hidden_TD = self.forward.hidden(rows, self.slabs, scratch, in_pairs=in_pairs)
            answer = self.head.answer(self.forward, rows, hidden_TD)
            outbox.post(answer)
            self.head.keep(rows, answer, self.slabs)

        idle = pack_step((), bucket=bucket, scratch_slot=self.slabs.scratch_slot)
        return Step(self._inbox.captured(run, idle), outbox, scratch)

    def answer(self, message: Words, watch: Watch | None = None) -> Words:
        """Run a message and wait for its last answer; none of a step that is followed.

        Args:
            message: From ``pack_step``, ``prompt_message``, or one of the others.
            watch: Of the other ranks of the group.
        """
        self.start(message, watch)
        if message[KIND] == STEP and message[FOLLOWED]:
            return np.zeros(0, np.int32)  # what follows must be under way before this is done
        while len(self._due) > 1:
            self.take(watch)
        return self.take(watch)

    def start(self, message: Words, watch: Watch | None = None) -> int:
        """Run a message as ``answer`` does; how many answers there will be to ``take``.

        A step that is followed comes before a message of ``growth.ahead_message``.
        """
        kind, bucket = int(message[KIND]), int(message[BUCKET])
        if kind == AHEAD:
            assert self._ahead is not None, "only a draft runs ahead"
            found = self._ahead.start(message)
        elif kind == STEP:
            found = [self._start_step(message, bucket)]
        else:
            found = [Due(self._answer_other(kind, message, watch))]
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
        due = self._due.popleft()
        wait(due, self.forward.group, self.forward.device, watch, self._core)
        return due.words.copy()

    @torch.inference_mode()
    def _answer_other(self, kind: int, message: Words, watch: Watch | None) -> Words:
        if kind in (PROMPT, PIECE):
            return self._prompts.answer(message, watch)
        self._note(message)
        return np.zeros(0, np.int32)

    def _note(self, message: Words) -> None:
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

    def num_faults(self) -> int:
        """Rows that a checked step saw in the wrong place; 0 without ``check``."""
        return int(self.slabs.num_faults_1)
