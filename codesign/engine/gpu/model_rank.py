"""One model on one rank: takes step messages, answers with a few words.

On a GPU each row bucket is one CUDA graph from the copy of the message to the device to the copy
of the answer back; a step is one launch, and so is a prompt that a bucket holds. On a CPU the same
calls run one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from codesign.engine.gpu.ahead_steps import AheadSteps
from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.graphs import Due, Graphs, Step
from codesign.engine.gpu.heads import DraftHead, StepHead, TargetHead
from codesign.engine.gpu.prompt_rows import (
    COUNT_WORD,
    HIGH_WORD,
    LOW_WORD,
    SLOT_WORD,
    START_WORD,
    WRITTEN_WORD,
    DevicePrompt,
    bucket_for,
    prompt_message,
)
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
from codesign.kernels import prompt_linear

COMPILED_LENGTHS = (1, 16, 17)  # of prompts: Triton tells one, multiples of 16 and others apart


class ModelRank:
    """A model's part on this rank, with its slabs.

    Args:
        forward: The model's part.
        slabs: Its keys and values.
        head: What follows a forward.
        max_moves: Most slab rows that a message may move.
    """

    def __init__(
        self, forward: RankForward, slabs: Slabs, head: StepHead, *, max_moves: int = 0
    ) -> None:
        self.forward = forward
        self.slabs = slabs
        self.head = head
        self._max_moves = max_moves
        self._graphs = Graphs(forward.group, forward.device)
        words = max_step_words(max_moves)
        self._staging = self._graphs.host_words(words)
        self._words = self._staging.numpy()  # the same memory
        self._buffer = torch.zeros(words, dtype=torch.int32, device=forward.device)
        self._done = self._graphs.event()
        self._due: deque[Due] = deque()
        self._steps: dict[tuple[int, bool], Step] = {}  # of a bucket, attended in pairs or not
        self._prompts: dict[int, Step] = {}
        self._ahead: AheadSteps | None = None
        if isinstance(head, DraftHead):
            self._ahead = AheadSteps(forward, slabs, head, self._buffer, self._graphs)

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
        up to ``requests`` requests may be attended faster in pairs also like that. Longer prompts
        than ``prompt_buckets`` hold are run into the scratch slab before, so that no request waits
        for a compiler.
        """
        on_gpu = self._graphs.on_gpu
        for bucket in sorted(prompt_buckets, reverse=True):  # the others fit into its memory
            self._prompts[bucket] = self._make_prompt(bucket)
        largest = max(prompt_buckets, default=0)
        for count in (*COMPILED_LENGTHS, *(prompt_linear.LENGTHS if on_gpu else ())):
            is_launched = count > min(largest, prompt_linear.DENSE_ROWS)
            if is_launched and max(count, largest + 1) <= self.slabs.max_tokens:
                message = prompt_message(
                    (0,) * count, self.slabs.scratch_slot, 0, first_written=count
                )
                self._run_any_prompt(message, None)
        self.slabs.num_faults_1.zero_()  # the longest one's rows lay over each other
        for bucket in buckets:
            self._prepare_step(bucket, is_followed=bucket in ahead_buckets)
            most = min(requests, bucket)
            if self.forward.pairs_may_do_more(bucket, most, self.slabs.max_tokens):
                self._prepare_step(bucket, in_pairs=True)

    def _make_step(self, bucket: int, *, in_pairs: bool) -> Step:
        answer = self._graphs.host_words(self.head.words(bucket))
        scratch = self.forward.scratch(bucket, self.slabs.max_tokens)
        words = step_words(bucket, self._max_moves)
        rows = DeviceRows.of(self._buffer[:words], bucket)

        def run() -> None:
            self._buffer[:words].copy_(self._staging[:words], non_blocking=True)
            if self._max_moves:
                self.slabs.move(rows.moves, rows.num_moves_1)
            self.slabs.label(rows)
            hidden_TD = self.forward.hidden(rows, self.slabs, scratch, in_pairs=in_pairs)
            out = self.head.finish(self.forward, rows, self.slabs, hidden_TD)
            answer.copy_(out, non_blocking=True)

        idle = pack_step((), bucket=bucket, scratch_slot=self.slabs.scratch_slot)
        return Step(self._captured(run, idle), answer.numpy(), scratch)

    def _make_prompt(self, bucket: int) -> Step:
        """Prompts of one bucket; only a target answers, with the token after the last row."""
        answer = self._graphs.host_words(1)
        words = HEADER + bucket
        prompt = DevicePrompt.of(self._buffer, bucket)

        def run() -> None:
            self._buffer[:words].copy_(self._staging[:words], non_blocking=True)
            start_1, count_1, written_1 = prompt.start_1, prompt.count_1, prompt.first_written_1
            self.slabs.label_prompt(
                prompt.tokens_T,
                prompt.slot_1,
                start=start_1,
                first_written=written_1,
                count=count_1,
            )
            hidden_1D = self.forward.padded_prompt_hidden(prompt, self.slabs)
            if isinstance(self.head, TargetHead):
                keys = prompt.key_low_1, prompt.key_high_1, start_1 + count_1 - 1
                answer.copy_(self._sample(hidden_1D, prompt.slot_1, *keys), non_blocking=True)

        idle = prompt_message((0,), self.slabs.scratch_slot, 0)
        return Step(self._captured(run, idle), answer.numpy(), None)

    def _sample(self, hidden_1D: Tensor, slot_1: Tensor, *keys: Tensor) -> Tensor:
        """The token after a prompt, (1,) int32."""
        assert isinstance(self.head, TargetHead), "a draft answers nothing"
        if isinstance(self.head, RowTargetHead):
            self.head.slots_T = slot_1
        return self.head.sample(self.forward, hidden_1D, *keys).to(torch.int32)

    def _captured(self, run: Callable[[], None], idle: Words) -> Callable[[], None]:
        """A graph of what runs, captured with a message that writes to scratch alone."""
        if self._graphs.on_gpu:
            self._staging.zero_()
            self._staging[: len(idle)] = torch.from_numpy(idle)
        return self._graphs.captured(run)

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
            found = [Due(None, self._answer_other(kind, message, watch))]
        self._due.extend(found)
        return len(found)

    def _start_step(self, message: Words, bucket: int) -> Due:
        in_pairs = self.forward.pairs_do_more(crowd_of(message))
        step = self._steps.get((bucket, in_pairs))
        is_followed = bool(message[FOLLOWED])
        if step is None or (is_followed and not (self._ahead and self._ahead.has(bucket))):
            step = self._prepare_step(bucket, in_pairs=in_pairs, is_followed=is_followed)
        self._words[: len(message)] = message
        step.run()  # of a graph: no mode of PyTorch's to enter, which takes as long as a copy
        if self._done is not None:
            self._done.record()
        return Due(self._done, step.answer)

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
        self._graphs.wait(due.event, watch)
        return due.words.copy()

    @torch.inference_mode()
    def _answer_other(self, kind: int, message: Words, watch: Watch | None) -> Words:
        if kind in (PROMPT, PIECE):
            return self._run_prompt(message, watch)
        self._note(message)
        return np.zeros(0, np.int32)

    def _wait(self, watch: Watch | None) -> None:
        if self._done is not None:
            self._done.record()
        self._graphs.wait(self._done, watch)

    def _note(self, message: Words) -> None:
        """Take what steps will read: pages, or how a request samples."""
        if message[KIND] == PAGES:
            self.slabs.enter(message[HEADER:].reshape(-1, 3))
        else:
            assert isinstance(self.head, RowTargetHead), "all requests sample as the run does"
            self.head.note(int(message[SLOT_WORD]), message[HEADER:])

    def _run_prompt(self, message: Words, watch: Watch | None) -> Words:
        """Run a prompt; the target answers with the token after it, the draft with nothing."""
        bucket = bucket_for(self._prompts, int(message[COUNT_WORD]), int(message[START_WORD]))
        if bucket is None:
            return self._run_any_prompt(message, watch)
        step = self._prompts[bucket]
        self._words[: len(message)] = message
        self._words[len(message) : HEADER + bucket] = 0  # any token
        step.run()
        self._wait(watch)
        is_answered = message[KIND] == PROMPT and isinstance(self.head, TargetHead)
        return step.answer[: int(is_answered)].copy()

    def _run_any_prompt(self, message: Words, watch: Watch | None) -> Words:
        """``_run_prompt`` kernel by kernel, without padding."""
        device, count = self.forward.device, int(message[COUNT_WORD])
        words = torch.from_numpy(message).to(device)
        tokens_N, slot = words[HEADER : HEADER + count].long(), int(message[SLOT_WORD])
        start, first_written = int(message[START_WORD]), int(message[WRITTEN_WORD])
        self.slabs.label_prompt(tokens_N, slot, start=start, first_written=first_written)
        with self.forward.group.patient():  # every length may be the first that compiles a kernel
            hidden_1D = self.forward.prompt_hidden(
                tokens_N, slot, self.slabs, start=start, first_written=first_written
            )
        if message[KIND] == PIECE or not isinstance(self.head, TargetHead):
            self._wait(watch)
            return np.zeros(0, np.int32)
        last_1 = torch.tensor([start + count - 1], device=device)
        keys = words[LOW_WORD, None], words[HIGH_WORD, None], last_1
        token_1 = self._sample(hidden_1D, words[SLOT_WORD, None], *keys)
        self._wait(watch)
        return token_1.cpu().numpy()

    def close(self) -> None:
        """Drop the graphs: NCCL's communicators do not end while one of them holds a collective."""
        self._steps.clear()
        self._prompts.clear()
        if self._ahead is not None:
            self._ahead.close()

    def num_faults(self) -> int:
        """Rows that a checked step saw in the wrong place; 0 without ``check``."""
        return int(self.slabs.num_faults_1)
