"""Steps of plain decoding whose rows are those of the step before, one token on.

See decode_ahead.py for why. Such a step is a graph like any other, but for its beginning: it reads
from the host which rows go on, and takes their tokens from the answer before. Nothing is walked, as
a root alone stays where it is. Two steps may be under way, which take turns in two slots on the
host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.graphs import Graphs
from codesign.engine.gpu.heads import StepHead
from codesign.engine.gpu.outbox import Due, Outbox
from codesign.engine.gpu.slabs import Slabs
from codesign.engine.gpu.step_rows import (
    BUCKET,
    HEADER,
    KIND,
    NEXT,
    REQUESTS,
    ROWS,
    SPANS,
    DeviceRows,
    Words,
    crowd_of,
    step_words,
)
from codesign.kernels.attention_shares import SPAN
from codesign.kernels.next_rows import next_rows
from codesign.kernels.row_attention import Scratch
from codesign.policy.step_time import BUCKETS

MOST_UNDER_WAY = 2


def next_message(bucket: int, contexts: Mapping[int, int]) -> Words:
    """Message for ``ModelRank`` behind a step of plain decoding: run the next one.

    Args:
        bucket: Of both.
        contexts: Of each row that goes on, the KV rows before it in the next one; by its place.
    """
    message = np.zeros(HEADER + bucket, np.int32)
    message[KIND], message[BUCKET] = NEXT, bucket
    message[ROWS] = message[REQUESTS] = len(contexts)
    message[SPANS] = sum([context // SPAN + 1 for context in contexts.values()])
    message[HEADER:][[*contexts]] = 1
    return message


@dataclass(slots=True)
class _Step:
    """A bucket's step, where its answers lie, which rows go on, and whose turn it is.

    The graph has addresses alone.
    """

    run: Callable[[], None]
    outbox: Outbox
    going_ST: Tensor
    turn_1: Tensor
    turn: int = 0


class NextSteps:
    """The steps of one target on this rank.

    Args:
        forward: The model's part.
        slabs: Its keys and values.
        head: Samples the tokens.
        buffer: Where a step's message lies on the device; its rows are replaced.
        graphs: Of the model.

    Attributes:
        sampled: Tokens that the last step has sampled, on the device.
    """

    def __init__(
        self, forward: RankForward, slabs: Slabs, head: StepHead, buffer: Tensor, graphs: Graphs
    ) -> None:
        self._forward, self._slabs, self._head = forward, slabs, head
        self._buffer, self._graphs = buffer, graphs
        self.sampled = torch.zeros(BUCKETS[-1], dtype=torch.int32, device=forward.device)
        self._steps: dict[tuple[int, bool], _Step] = {}  # of a bucket, attended in pairs or not

    def has(self, bucket: int) -> bool:
        """Whether a bucket's steps are captured."""
        return (bucket, False) in self._steps

    @torch.inference_mode()
    def prepare(self, bucket: int, scratch: Scratch | None, *, in_pairs: bool) -> None:
        """Capture a bucket's step while the buffer holds padding alone.

        Args:
            bucket: Rows of the step.
            scratch: From ``RankForward.scratch``.
            in_pairs: How they are attended.
        """
        rows = DeviceRows.of(self._buffer[: step_words(bucket)], bucket)
        changing = rows.changing(self._slabs.scratch_slot)
        sampled = self.sampled[:bucket]
        going_ST = self._graphs.host_words(MOST_UNDER_WAY * bucket).view(MOST_UNDER_WAY, bucket)
        turn_1 = torch.zeros(1, dtype=torch.int32, device=self._forward.device)
        outbox = Outbox(self._head.words(bucket), self._forward.device, slots=MOST_UNDER_WAY)

        def run() -> None:
            next_rows(sampled, going_ST, turn_1, changing)
            self._slabs.label(rows)
            hidden_TD = self._forward.hidden(rows, self._slabs, scratch, in_pairs=in_pairs)
            answer = self._head.answer(self._forward, rows, hidden_TD)
            outbox.post(answer, turn_1, sampled)

        self._steps[bucket, in_pairs] = _Step(self._graphs.captured(run), outbox, going_ST, turn_1)
        turn_1.zero_()  # before it was captured it ran

    def start(self, message: Words) -> Due:
        """Run the step that a message of ``next_message`` asks for."""
        in_pairs = self._forward.pairs_do_more(crowd_of(message))
        step = self._steps[int(message[BUCKET]), in_pairs]
        due = step.outbox.expect(step.turn)
        step.going_ST.numpy()[step.turn] = message[HEADER:]  # the same memory
        step.turn = (step.turn + 1) % MOST_UNDER_WAY
        step.run()
        return due

    def close(self) -> None:
        """Drop the graphs."""
        self._steps.clear()
