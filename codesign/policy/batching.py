"""Which requests share a step: first come, first served, within batch and KV limits.

Must not import torch or read a clock; the caller passes the time in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds of a batch.

    Attributes:
        max_batch: Most requests that run at once.
        max_kv_tokens: Most KV rows of all running requests, at their longest.
    """

    max_batch: int
    max_kv_tokens: int


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request on its way to the batch.

    Attributes:
        request_id: Its number; breaks ties of arrival.
        arrival: Seconds since the start of the run.
        kv_tokens: KV rows it needs at its longest: prompt, output and one round's tree.
    """

    request_id: int
    arrival: float
    kv_tokens: int


class Batcher:
    """A queue in order of arrival, and the requests that run."""

    def __init__(self, requests: list[QueuedRequest], limits: BatchLimits) -> None:
        self._waiting = deque(sorted(requests, key=lambda r: (r.arrival, r.request_id)))
        self._running: dict[int, int] = {}
        self._limits = limits

    @property
    def is_done(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self._waiting and not self._running

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def next_arrival(self) -> float | None:
        """Arrival of the first request that waits, in seconds since the start of the run."""
        return self._waiting[0].arrival if self._waiting else None

    def admit(self, now: float) -> list[int]:
        """Requests that join the batch at time ``now``.

        A request alone in the batch is admitted whatever it needs: the caller has checked that it
        fits the machine at all.
        """
        admitted = []
        while self._waiting and self._waiting[0].arrival <= now:
            head = self._waiting[0]
            used = sum(self._running.values())
            if len(self._running) >= self._limits.max_batch:
                break
            if self._running and used + head.kv_tokens > self._limits.max_kv_tokens:
                break
            self._waiting.popleft()
            self._running[head.request_id] = head.kv_tokens
            admitted.append(head.request_id)
        return admitted

    def finish(self, request_id: int) -> None:
        """A running request is over; its KV rows are free."""
        del self._running[request_id]
