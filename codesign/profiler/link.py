"""Seconds of a message between the target's process and the draft's."""

from __future__ import annotations

from time import perf_counter

import pandas as pd

from codesign.engine.draft_worker import DraftWorker
from codesign.engine.drafter import NgramDrafter
from codesign.engine.partner import Partner
from codesign.engine.remote_draft import DraftSetup, RemoteDraft
from codesign.policy.protocol import Admission, RequestVerdict, Verdict
from codesign.policy.speculation import Speculation

_REQUESTS, _EMITTED = 4, (1, 2, 3)  # of each round
_ROUNDS, _WARM_UP = 60, 10


def link_seconds(num_threads: int) -> list[float]:
    """Seconds of one message between the processes, one way, once per round trip.

    The draft process drafts nothing. Half of what is left of a round trip without its own time:
    coding, sending and waking up, there and back.
    """
    partner = RemoteDraft(DraftSetup(idle_worker, num_threads))
    try:
        return message_seconds(partner)
    finally:
        partner.close()


def single_timings(op: str, seconds: list[float]) -> pd.DataFrame:
    """Rows of steps.parquet, but for the deployment, of what has no shape."""
    nothing = {"rows": 0, "requests": 0, "context": 0, "beside": False}
    return pd.DataFrame({"seconds": seconds}).assign(op=op, **nothing)


def message_seconds(partner: Partner) -> list[float]:
    """Seconds of one message, one way, to a partner that answers with ``idle_worker``."""
    admitted = tuple([Admission(i, (0,), 1 << 30) for i in range(_REQUESTS)])
    partner.send(Verdict(0, admitted=admitted))
    partner.receive()
    seconds = []
    for number in range(_ROUNDS):
        base_len = 1 + number * len(_EMITTED)
        entries = [RequestVerdict(i, base_len, _EMITTED) for i in range(_REQUESTS)]
        start = perf_counter()
        partner.send(Verdict(1 + number, tuple(entries)))
        times = partner.receive().times
        assert times is not None, "a draft process always says its times"
        own = times.answered - times.received
        seconds.append((perf_counter() - start - own) / 2)
    return seconds[_WARM_UP:]


def idle_worker() -> DraftWorker:
    """A draft that drafts nothing."""
    return DraftWorker(Speculation(), NgramDrafter())
