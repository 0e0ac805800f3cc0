"""A target's ranks run the next step of plain decoding while the host still reads the last one.

Between two steps the host reads tokens, commits them, sees who comes and who goes, and writes the
next message: up to a tenth of a small model's step, and more of many requests. Where a round of
plain decoding is sure to be followed by another one of the same requests, its ranks have all that
the next step needs: they enqueue it behind the one that runs, and its rows take their tokens from
the answer before, on the device (next_steps.py).

The next step is asked for as late as can be, ``LEAD`` before the one that runs will end by what the
last one took: whoever comes until then is in the next round as ever. The host still decides: it
looks at every answer, and takes the next one only for rows that are what it would have asked for.
Requests that end with this round's token go no further. One that has ended before anybody could
know leaves a row in the step under way, which is in nobody's way. The next step has a message again
where a row that goes on is behind one that does not, as attention takes padding to come last, and
where those that go on fit a smaller bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

from codesign.engine.gpu.next_steps import next_message
from codesign.engine.gpu.paging import PageTable
from codesign.engine.gpu.rank_group import GroupLeader, see_to_pages
from codesign.engine.gpu.step_rows import BUCKET, Words, bucket_of
from codesign.policy.ahead import LEAD
from codesign.policy.protocol import VerifyRows


class DecodeAhead:
    """What the ranks of a target run ahead of its host.

    A request's *place* is the index of its row among those of a step, and so in its answer.

    Args:
        leader: Of the ranks.
        slots: Page tables of the requests.
        smallest_bucket: Fewest rows of a forward.

    Attributes:
        num_ahead: Steps that were run ahead.
        num_used: Those whose answers were taken.
    """

    def __init__(self, leader: GroupLeader, slots: PageTable, smallest_bucket: int) -> None:
        self._leader = leader
        self._slots = slots
        self._smallest_bucket = smallest_bucket
        # Of the step under way: each request's place in its answer, and KV rows before it.
        self._rows: dict[int, tuple[int, int]] = {}
        self._bucket = 0
        self._num_begun = 0  # of the leader's messages
        self._began = 0.0
        self._seconds: dict[int, float] = {}  # of the last step of a bucket
        self.num_ahead = self.num_used = 0

    @property
    def is_under_way(self) -> bool:
        """Whether a step is, with a row of a request that is not over."""
        return bool(self._rows)

    def leave(self, request_id: int) -> None:
        """A request is over."""
        self._rows.pop(request_id, None)

    def places(self, rows: Sequence[VerifyRows]) -> list[int] | None:
        """Where the answer of the step under way has these rows; None if another must be run."""
        if not self._rows:
            return None
        places = []
        for request in rows:
            place, context = self._rows.get(request.request_id, (0, -1))
            if context != request.context or len(request.tokens) > 1:
                break
            places.append(place)
        if len(places) == len(rows) and self._leader.num_begun == self._num_begun:
            self.num_used += 1
            return places
        self._rows = {}
        self._leader.settle()
        return None

    def run(
        self,
        message: Words,
        rows: Sequence[VerifyRows],
        meanwhile: Callable[[], None],
        goes_on: Callable[[], bool],
        is_last: Callable[[int], bool],
    ) -> Words:
        """Run a step of plain decoding, and maybe begin the next one; the answer of the first.

        Args:
            message: Of the step.
            rows: The same, one of each request.
            meanwhile: Called while it runs.
            goes_on: Asked when it is about to end: whether the next round will be plain decoding of
                the same requests, but for those that end.
            is_last: Whether a request ends with this round.
        """
        self._leader.settle()
        self._bucket = int(message[BUCKET])
        self._began = perf_counter()
        self._leader.begin(message)
        return self.go_on(range(len(rows)), rows, meanwhile, goes_on, is_last)

    def go_on(
        self,
        places: Sequence[int],
        rows: Sequence[VerifyRows],
        meanwhile: Callable[[], None],
        goes_on: Callable[[], bool],
        is_last: Callable[[int], bool],
    ) -> Words:
        """The same of a step that is under way, with rows in these places."""
        meanwhile()
        self._rows = {}
        going = {
            request.request_id: (place, request.context + 1)
            for place, request in zip(places, rows, strict=True)
            if not is_last(request.request_id)
        }
        if self._may_go(going) and self._is_about_to_end() and goes_on():
            self._begin_next(going)
        answer = self._leader.take()
        now = perf_counter()
        self._seconds[self._bucket] = now - self._began
        self._began = now  # of the next one, if it is under way
        return answer

    def _may_go(self, rows: Mapping[int, tuple[int, int]]) -> bool:
        """Whether a step of these rows can follow the one that runs without a message."""
        are_first = all(place == i for i, (place, _) in enumerate(rows.values()))
        return are_first and bucket_of(len(rows), self._smallest_bucket) == self._bucket

    def _is_about_to_end(self) -> bool:
        """Wait until the step has ``LEAD`` to run, or has ended before; False if none can follow.

        A step that took less than the one before is followed a little late. Where steps run within
        ``begin``, on a CPU, none is run ahead: its answer would be there later.
        """
        seconds = self._seconds.get(self._bucket)
        if seconds is None or not self._leader.rank.has_next(self._bucket):
            return False
        is_there = self._leader.answers_by(self._began + seconds - LEAD)
        return self._leader.rank.runs_beside or not is_there

    def _begin_next(self, rows: dict[int, tuple[int, int]]) -> None:
        needed = {number: context + 1 for number, (_, context) in rows.items()}
        see_to_pages(self._leader, self._slots, needed)
        self._leader.begin(next_message(self._bucket, dict(rows.values())))
        self._num_begun = self._leader.num_begun
        self._rows = rows
        self.num_ahead += 1
