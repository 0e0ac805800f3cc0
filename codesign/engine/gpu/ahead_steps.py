"""Steps of a draft whose rows the rank chooses itself, from the answer of the step before.

See run_ahead.py for why. Such a step is a graph like any other, with the choice in the place of the
copy of a message, and one more in pairs where contexts may be long enough for that. Its answers
take turns in slots on the host, as several may be under way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.graphs import Graphs
from codesign.engine.gpu.growth import MOST_STEPS, NUM_STEPS
from codesign.engine.gpu.heads import DraftHead
from codesign.engine.gpu.outbox import Due, Outbox
from codesign.engine.gpu.slabs import Slabs
from codesign.engine.gpu.step_rows import BUCKET, HEADER, DeviceRows, Words, crowd_of
from codesign.kernels.leaf_choices import POOL_WORDS, TURN, PoolWords, choose_leaves
from codesign.kernels.row_attention import Scratch


@dataclass(frozen=True, slots=True)
class _Step:
    """A bucket's step, and where the answers of a chain lie."""

    run: Callable[[], None]
    outbox: Outbox


class AheadSteps:
    """The steps of one draft on this rank.

    Args:
        forward: The model's part.
        slabs: Its keys and values.
        head: Leaves the answer on the device.
        buffer: Where a step's message lies there; its rows are replaced.
        graphs: Of the model.
    """

    def __init__(
        self, forward: RankForward, slabs: Slabs, head: DraftHead, buffer: Tensor, graphs: Graphs
    ) -> None:
        self._forward, self._slabs, self._head = forward, slabs, head
        self._buffer, self._graphs = buffer, graphs
        self._pool = torch.zeros(POOL_WORDS, dtype=torch.int32, device=forward.device)
        self._staging = graphs.host_words(POOL_WORDS)
        self._words = self._staging.numpy()  # the same memory
        self._steps: dict[tuple[int, bool], _Step] = {}  # of a bucket, attended in pairs or not

    def has(self, bucket: int) -> bool:
        """Whether a bucket's steps are captured."""
        return (bucket, False) in self._steps

    @torch.inference_mode()
    def prepare(self, bucket: int, scratch: Scratch | None) -> None:
        """Capture a bucket's step, in pairs and not if both may run; nothing may be under way.

        Args:
            bucket: Rows of the step.
            scratch: From ``RankForward.scratch``.
        """
        self._steps[bucket, False] = self._make_step(bucket, scratch)
        if self._forward.pairs_may_do_more(bucket, 1, self._slabs.max_tokens):
            self._steps[bucket, True] = self._make_step(bucket, None, in_pairs=True)

    def _make_step(self, bucket: int, scratch: Scratch | None, *, in_pairs: bool = False) -> _Step:
        rows = DeviceRows.of(self._buffer, bucket)
        words = self._head.words(bucket)
        answer = self._head.room(bucket, self._forward.device)
        last, chosen = answer[:words], answer[words:]
        pool = PoolWords.of(self._pool)
        changing = rows.changing(self._slabs.scratch_slot)

        def run() -> None:
            choose_leaves(last, pool, changing, chosen)
            self._slabs.label(rows)
            hidden_TD = self._forward.hidden(rows, self._slabs, scratch, in_pairs=in_pairs)
            self._head.answer(self._forward, rows, hidden_TD)
            outbox.post(answer, pool.scalars[TURN : TURN + 1])

        outbox = Outbox(len(answer), self._forward.device, slots=MOST_STEPS)
        self._pool.zero_()  # of no leaves: padding alone
        return _Step(self._graphs.captured(run), outbox)

    @torch.inference_mode()
    def start(self, message: Words) -> list[Due]:
        """Run the steps that follow the one before this message, from ``growth.ahead_message``."""
        in_pairs = self._forward.pairs_do_more(crowd_of(message))
        step = self._steps[int(message[BUCKET]), in_pairs]
        self._words[:] = message[HEADER:]
        self._pool.copy_(self._staging, non_blocking=True)
        found = [step.outbox.expect(slot) for slot in range(int(message[NUM_STEPS]))]
        for _ in found:
            step.run()
        return found

    def close(self) -> None:
        """Drop the graphs."""
        self._steps.clear()
