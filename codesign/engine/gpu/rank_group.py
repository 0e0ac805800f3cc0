"""Leader and followers of a rank group: the leader decides, the followers replay.

A follower holds no policy, no requests and no clock. It takes the leader's messages one after
another and runs the same steps, so that the collectives inside them meet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import NoReturn

import numpy as np

from codesign.engine.garbage import collect, collected_beside
from codesign.engine.gpu.mailbox import Mailbox
from codesign.engine.gpu.model_rank import ModelRank
from codesign.engine.gpu.paging import PageTable
from codesign.engine.gpu.slot_messages import pages_message
from codesign.engine.gpu.step_rows import END, HEADER, KIND, MODEL, Words
from codesign.engine.gpu.watch import Watch, is_broken_collective
from codesign.engine.partner import DraftLostError, TargetLostError
from codesign.engine.target import nothing
from codesign.kernels.symmetric import PeerLostError


def end_message() -> Words:
    """Message that ends a follower."""
    message = np.zeros(HEADER, np.int32)
    message[KIND] = END
    return message


class GroupLeader:
    """The leader's handle of one model on all ranks of its group.

    Args:
        rank: The leader's own part.
        mailbox: To the followers; None in a group of one.
        model: Which of the ranks' models this is.
        watch: Of the followers.

    Attributes:
        num_begun: Messages so far.
        is_in_step: A message was not answered in the end: ranks may wait for each other for ever.
    """

    def __init__(
        self,
        rank: ModelRank,
        mailbox: Mailbox | None = None,
        *,
        model: int = 0,
        watch: Watch | None = None,
    ) -> None:
        self.rank = rank
        self._mailbox = mailbox
        self._model = model
        self._watch = watch
        self._num_due = 0
        self.num_begun = 0
        self.is_in_step = False

    @property
    def scratch_slot(self) -> int:
        """Slab of padding rows."""
        return self.rank.slabs.scratch_slot

    def ask(self, message: Words, meanwhile: Callable[[], None] = nothing) -> Words:
        """Run a message on every rank and return the leader's answer.

        Args:
            message: For ``ModelRank``.
            meanwhile: Called while it runs.
        """
        self.settle()
        self.begin(message)
        meanwhile()
        return self.take()

    def begin(self, message: Words) -> int:
        """Run a message on every rank; how many answers there will be to ``take``."""
        message[MODEL] = self._model
        self.is_in_step = True
        if self._mailbox is not None:
            self._mailbox.send(message)
        try:
            count = self.rank.start(message, self._watch)
        except (RuntimeError, PeerLostError) as error:
            self._lost(error)
        self._num_due += count
        self.num_begun += 1
        self.is_in_step = False
        return count

    def tell(self, message: Words) -> None:
        """Give every rank what steps will read that are not under way yet; there is no answer."""
        message[MODEL] = self._model
        self.is_in_step = True
        if self._mailbox is not None:
            self._mailbox.send(message)
        self.rank.note(message)
        self.is_in_step = False

    def answers_by(self, moment: float) -> bool:
        """Wait for the next answer, by ``perf_counter`` until a moment; whether it is there."""
        self.is_in_step = True
        try:
            is_there = self.rank.is_there(self._watch, lambda: perf_counter() >= moment)
        except (RuntimeError, PeerLostError) as error:
            self._lost(error)
        self.is_in_step = False
        return is_there

    def take(self) -> Words:
        """Wait for the next answer."""
        self.is_in_step = True
        try:
            answer = self.rank.take(self._watch)
        except (RuntimeError, PeerLostError) as error:
            self._lost(error)
        self._num_due -= 1
        self.is_in_step = False
        return answer

    def settle(self) -> None:
        """Wait for all answers that were not taken, if no rank was lost."""
        while self._num_due and not self.is_in_step:
            self.take()

    def _lost(self, error: RuntimeError | PeerLostError) -> NoReturn:
        """A step failed: raise what is the cause of it."""
        if self._watch is None or not is_broken_collective(error):
            raise error
        self._watch.broken(error)

    def end(self) -> None:
        """Let the followers go, unless one of them is lost already."""
        if self._mailbox is not None and not self.is_in_step:
            with contextlib.suppress(TargetLostError, DraftLostError):
                self.settle()
                self._mailbox.send(end_message())
                self._mailbox.flush()


def see_to_pages(leader: GroupLeader, slots: PageTable, num_rows: Mapping[int, int]) -> None:
    """Tell the ranks of the pages that requests need for so many rows, and of all new ones.

    Args:
        leader: Of the group.
        slots: Page tables, which grow.
        num_rows: KV rows that each of these requests needs, by number.
    """
    for request_id, rows in num_rows.items():
        slots.grow(request_id, rows)
    entries = slots.take_entries()
    if entries:
        leader.tell(pages_message(entries))


@collected_beside()
def follow(mailbox: Mailbox, models: Mapping[int, ModelRank], watch: Watch | None = None) -> None:
    """Be a follower until the leader says that it is over.

    Args:
        mailbox: From the leader.
        models: This rank's part of each model, by number.
        watch: Of the leader.
    """
    while (message := mailbox.receive())[KIND] != END:
        models[int(message[MODEL])].replay(message, watch, mailbox.has_message, collect)
