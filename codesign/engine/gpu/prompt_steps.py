"""Prompts and pieces of them on this rank: graphs of the buckets, the others kernel by kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.graphs import Graphs, Inbox, Step
from codesign.engine.gpu.heads import StepHead, TargetHead
from codesign.engine.gpu.outbox import Due, Outbox, wait
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
from codesign.engine.gpu.step_rows import HEADER, KIND, PIECE, Words
from codesign.engine.gpu.watch import Watch
from codesign.kernels import prompt_linear

COMPILED_LENGTHS = (1, 16, 17)  # Triton tells one, multiples of 16 and others apart


class PromptSteps:
    """The prompts of one model. A target answers with the token after one, a draft with nothing.

    Args:
        forward: The model's part.
        slabs: Its keys and values.
        head: Samples the token.
        inbox: Where messages lie.
        graphs: Of the model.
    """

    def __init__(
        self, forward: RankForward, slabs: Slabs, head: StepHead, inbox: Inbox, graphs: Graphs
    ) -> None:
        self._forward, self._slabs, self._head = forward, slabs, head
        self._inbox, self._graphs = inbox, graphs
        self._launched = Outbox(1, forward.device)
        self._steps: dict[int, Step] = {}

    @torch.inference_mode()
    def prepare(self, buckets: Sequence[int]) -> None:
        """Capture the graphs of buckets; run longer prompts than they hold into the scratch slab.

        So no request waits for a compiler.
        """
        for bucket in sorted(buckets, reverse=True):  # the others fit into its memory
            self._steps[bucket] = self._make_step(bucket)
        largest = max(buckets, default=0)
        for count in (*COMPILED_LENGTHS, *(prompt_linear.LENGTHS if self._graphs.on_gpu else ())):
            is_launched = count > min(largest, prompt_linear.DENSE_ROWS)
            if is_launched and max(count, largest + 1) <= self._slabs.max_tokens:
                slot = self._slabs.scratch_slot
                self._launch(prompt_message((0,) * count, slot, 0, first_written=count), None)
        self._slabs.num_faults_1.zero_()  # the longest one's rows lay over each other

    def _make_step(self, bucket: int) -> Step:
        outbox = Outbox(1, self._forward.device)
        prompt = DevicePrompt.of(self._inbox.on_device, bucket)

        def run() -> None:
            self._inbox.fetch(HEADER + bucket)
            start_1, count_1, written_1 = prompt.start_1, prompt.count_1, prompt.first_written_1
            self._slabs.label_prompt(
                prompt.tokens_T,
                prompt.slot_1,
                start=start_1,
                first_written=written_1,
                count=count_1,
            )
            hidden_1D = self._forward.padded_prompt_hidden(prompt, self._slabs)
            keys = prompt.key_low_1, prompt.key_high_1, start_1 + count_1 - 1
            outbox.post(self._token(hidden_1D, prompt.slot_1, *keys))

        idle = prompt_message((0,), self._slabs.scratch_slot, 0)
        return Step(self._inbox.captured(run, idle), outbox, None)

    @torch.inference_mode()
    def answer(self, message: Words, watch: Watch | None) -> Words:
        """Run a message of ``prompt_message`` and wait for its answer.

        Args:
            message: The prompt, or a piece of one, which is answered with nothing.
            watch: Of the other ranks of the group.
        """
        bucket = bucket_for(self._steps, int(message[COUNT_WORD]), int(message[START_WORD]))
        if bucket is None:
            return self._launch(message, watch)
        step = self._steps[bucket]
        self._inbox.put(message, HEADER + bucket)
        due = step.outbox.expect()
        step.run()
        return self._taken(due, message, watch)

    def _launch(self, message: Words, watch: Watch | None) -> Words:
        """``answer`` kernel by kernel, without padding."""
        forward, count = self._forward, int(message[COUNT_WORD])
        words = torch.from_numpy(message).to(forward.device)
        tokens_N, slot = words[HEADER : HEADER + count].long(), int(message[SLOT_WORD])
        start, first_written = int(message[START_WORD]), int(message[WRITTEN_WORD])
        due = self._launched.expect()
        self._slabs.label_prompt(tokens_N, slot, start=start, first_written=first_written)
        with forward.group.patient():  # every length may be the first that compiles a kernel
            hidden_1D = forward.prompt_hidden(
                tokens_N, slot, self._slabs, start=start, first_written=first_written
            )
        token_1 = slot_1 = words[SLOT_WORD, None]
        if self._is_answered(message):
            last_1 = torch.tensor([start + count - 1], device=forward.device)
            token_1 = self._token(
                hidden_1D, slot_1, words[LOW_WORD, None], words[HIGH_WORD, None], last_1
            )
        self._launched.post(token_1)
        return self._taken(due, message, watch)

    def _token(self, hidden_1D: Tensor, slot_1: Tensor, *keys: Tensor) -> Tensor:
        """The token after a prompt, (1,) an integer type; of a draft a word that nobody reads."""
        head = self._head
        if not isinstance(head, TargetHead):
            return slot_1
        if isinstance(head, RowTargetHead):
            head.slots_T = slot_1
        return head.sample(self._forward, hidden_1D, *keys)

    def _taken(self, due: Due, message: Words, watch: Watch | None) -> Words:
        """The answer, once it is there; no words to a piece, and none from a draft."""
        wait(due, self._forward.group, self._forward.device, watch)
        return due.words[: int(self._is_answered(message))].copy()

    def _is_answered(self, message: Words) -> bool:
        return bool(message[KIND] != PIECE) and isinstance(self._head, TargetHead)

    def close(self) -> None:
        """Drop the graphs."""
        self._steps.clear()
