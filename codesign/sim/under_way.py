"""Whether a replica's next step is under way before its host has read the last one.

As the engine has it (engine/gpu/decode_ahead.py): where a round of plain decoding is sure to be
followed by another one of the same requests, its ranks begin that step by themselves. Whoever comes
when they have been told joins a round later. All other steps wait for the host.
"""

from __future__ import annotations

from collections.abc import Sequence

from codesign.policy.ahead import LEAD, runs_ahead
from codesign.policy.batching import Batcher
from codesign.policy.step_time import BUCKETS, StepTime, filled_up
from codesign.sim.work import Work


class UnderWay:
    """What is sure to follow, round by round.

    Args:
        step: Of the target.
        batcher: Who runs and who waits.

    Attributes:
        is_possible: Steps of this replica may be: its target has a price for them.
    """

    def __init__(self, step: StepTime, batcher: Batcher) -> None:
        self._batcher = batcher
        self.is_possible = runs_ahead(step)
        self._may_follow = False
        self._start = 0.0  # of the last round

    def has_begun(self, now: float, kv_in_use: int | None) -> bool:
        """Whether the next step has, at the end of a round.

        Args:
            now: When that is.
            kv_in_use: KV rows, where they are taken as requests grow.
        """
        if not self._may_follow:
            return False
        batcher = self._batcher
        if kv_in_use is not None and batcher.would_be_over(kv_in_use):
            return False
        return not batcher.admits(self._told(now), kv_in_use=kv_in_use)

    def _told(self, now: float) -> float:
        """When ranks are told what follows the round that ends now."""
        return max(now - LEAD, self._start)

    def ended(
        self,
        work: Work,
        running: Sequence[int],
        finished: Sequence[int],
        *,
        start: float,
        now: float,
    ) -> None:
        """A round is over, the queue is as before.

        The rows that go on must be the first ones, as attention takes padding to come last, and
        must not fit a smaller bucket. Where someone waits for a place, an end makes room for it.

        Args:
            work: What the round did.
            running: Its requests, in order of admission.
            finished: Those of them that end with it.
            start: When it began.
            now: When it is over.
        """
        self._start = start
        left = len(running) - len(finished)
        fits_one = len(running) <= BUCKETS[-1]  # of several forwards a round none runs ahead
        is_sure = self.is_possible and work.rests_on and left > 0 and fits_one
        if is_sure and finished:
            arrival = self._batcher.next_arrival
            someone_waits = arrival is not None and arrival <= self._told(now)
            are_last = set(running[left:]) == set(finished)
            is_sure = are_last and not someone_waits and filled_up(left) == filled_up(len(running))
        self._may_follow = is_sure
