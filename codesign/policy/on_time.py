"""Requests join the batch so that as many as possible keep their targets.

First come, first served makes everyone late in a burst: whoever waits behind others misses the TTFT
target, and the prompts of those who join stall those who decode. Here a request joins

1. if it can still have its first token in time, before those that cannot;
2. while the prompts that run before the next round leave those who decode the time to keep their
   TPOT targets. One for one would be no gain: whoever joined so would be the next to be given up;
3. into a batch whose tokens come in time for it: one that is too slow would stay full of requests
   that miss their targets from the start, and so hold nobody up. While somebody has waited very
   long this does not hold, or a load that is too much for the target would wait for ever;
4. late, when nobody waits who can be on time, a few prompts at once. Whoever has waited very long
   has a turn now and then, so that nobody waits for ever.

Requests that have missed a target, or will, have nothing to lose and hold nobody up. What one can
spare is what it can if its answer ends soon (answers.py): by a mean answer most short ones, which
are most, would be stalled past their targets. How many tokens a running request has is reckoned
from the mean of all, which costs nothing to know.

Must not import torch or read a clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING

from codesign.config import SLO, Serving
from codesign.errors import InputError, UsageError
from codesign.policy.answers import Answers
from codesign.policy.pace import Pace
from codesign.policy.traffic import START_OUTPUT, START_PROMPT

if TYPE_CHECKING:
    from codesign.policy.batching import QueuedRequest
    from codesign.policy.cost import RoundCost

# Times the TTFT target, or seconds without one, after which a request has turns. After both a batch
# may be slower than targets ask for.
PATIENCE = 30.0
TURN = 8  # requests that join from one such turn to the next
AT_ONCE = 0.2  # of the TTFT target, that prompts of late requests may take before a round
# Of a TPOT target, left as a reserve with a round, as answers end with one: at most half of what
# there is to spare.
SPARED = 0.1


@dataclass(frozen=True, slots=True)
class _Decoding:
    """A request that has its first token.

    Attributes:
        first_token: When it was there.
        before: Mean tokens of a request until then.
        target: Seconds per token; infinite if the first token was late.
    """

    first_token: float
    before: float
    target: float


class OnTime:
    """Who joins next; hears of all that happens to the batch.

    Args:
        ttft: Target of seconds to the first token; None for none.
        tpot: Target of seconds per later token, of requests without one of their own.
        prompt_seconds: ``f(rows, rows before)`` of a prompt.
        step: Seconds of a plain round of so many requests.
        answer_tokens: That a request is expected to emit, until some have finished.
    """

    def __init__(
        self,
        ttft: float | None,
        tpot: float | None,
        *,
        prompt_seconds: Callable[[int, int], float],
        step: Callable[[float], float],
        answer_tokens: float | None = None,
    ) -> None:
        self._ttft = math.inf if ttft is None else ttft
        self._tpot = math.inf if tpot is None else tpot
        self._patience = PATIENCE * (1.0 if ttft is None else ttft)
        self._prompt_seconds = prompt_seconds
        self._pace = Pace(step)
        self._answers = Answers(START_OUTPUT if answer_tokens is None else answer_tokens)
        self._tokens = 0.0  # that a request which was always here would have
        self._decoding: dict[int, _Decoding] = {}
        self._evicted: dict[int, _Decoding] = {}
        self._seconds: dict[int, float] = {}  # of the prompts of those that wait
        self._ahead: dict[int, float] = {}  # of those that have joined and are not complete
        self._turn: int | None = None  # who has one
        self._since_turn = 0

    def joined(self, request_id: int) -> None:
        """A request has left the queue; its prompt runs next."""
        self._ahead[request_id] = self._seconds.pop(request_id, 0.0)
        self._since_turn = 0 if request_id == self._turn else self._since_turn + 1

    def began(self, request: QueuedRequest, now: float) -> None:
        """Its prompt is complete, and its next token there."""
        number = request.request_id
        self._ahead.pop(number, None)
        known = self._evicted.pop(number, None)
        if known is not None:  # ``before`` of an evicted one is less by all that it has missed
            self._decoding[number] = replace(known, before=self._tokens + known.before)
            return
        in_time = now <= request.arrival + self._ttft
        target = self._target(request) if in_time else math.inf
        self._decoding[number] = _Decoding(now, self._tokens, target)

    def ended(self, request_id: int) -> None:
        """Its answer is complete."""
        if (known := self._decoding.get(request_id)) is not None:
            self._answers.ended(self._tokens - known.before)
        self.refused(request_id)

    def refused(self, request_id: int) -> None:
        """It is gone."""
        for known in (self._seconds, self._ahead, self._decoding, self._evicted):
            known.pop(request_id, None)

    def evicted(self, request_id: int) -> None:
        """It has lost its KV rows, and waits again."""
        self._ahead.pop(request_id, None)
        if (known := self._decoding.pop(request_id, None)) is not None:
            self._evicted[request_id] = replace(known, before=known.before - self._tokens)

    def round_over(self, seconds: float, running: int, emitted: int) -> None:
        """A round without its prompts took so long, and so many requests emitted so much."""
        if not emitted:
            return
        self._tokens += emitted / running
        self._pace.round_over(seconds, running, emitted)

    def choose(
        self,
        waiting: Sequence[QueuedRequest],
        now: float,
        cached: Callable[[QueuedRequest], int],
        evicted: Sequence[QueuedRequest] = (),
    ) -> list[QueuedRequest]:
        """Those that join now, in turn, as far as there is room; somebody, if nobody decodes.

        Args:
            waiting: That have come, in order of arrival.
            now: Seconds since the start of the run.
            cached: Rows of a prompt that are there already.
            evicted: That have run before, and go first.
        """
        room, chosen = self._room(now), list(evicted)
        longest = now - waiting[0].arrival if waiting else 0.0
        may_be_slow = longest > max(self._patience, PATIENCE)
        self._turn = None
        if waiting and self._has_turn(waiting[0], now):
            self._turn = waiting[0].request_id
            chosen.append(waiting[0])
            waiting = waiting[1:]
        total = sum(self._ahead.values()) + sum(self._price(r, cached) for r in chosen)
        # Those before are late, whatever their prompts take.
        first = bisect_left(waiting, now - self._ttft, key=attrgetter("arrival"))
        late, first_due = [], math.inf
        running = len(self._decoding) + len(self._ahead) + 1
        least, pace = self._pace.least(), self._pace.of(running + len(chosen))
        for request in waiting[first:]:
            due, seconds = request.arrival + self._ttft, self._price(request, cached)
            target = self._target(request)
            if now + seconds > due or least > target:
                late.append(request)
                continue
            first_due = min(first_due, due)
            if total >= room or now + total >= first_due:
                break  # for all behind it, too
            in_time = now + total + seconds <= first_due and (pace <= target or may_be_slow)
            if in_time and total + seconds <= room:
                chosen.append(request)
                total += seconds
                pace = self._pace.of(running + len(chosen))
        if math.isinf(first_due):
            late_ones = chain(islice(waiting, first), late)
            chosen += self._of_late(late_ones, room - total, cached)
        return chosen

    def _of_late(
        self,
        late: Iterable[QueuedRequest],
        room: float,
        cached: Callable[[QueuedRequest], int],
    ) -> list[QueuedRequest]:
        """Those of the late requests that cost nobody a target, for a fifth of a TTFT target."""
        chosen: list[QueuedRequest] = []
        spent = 0.0
        for request in late:
            spent += self._price(request, cached)
            if spent > room or (chosen and spent > AT_ONCE * self._ttft):
                break
            chosen.append(request)
        return chosen

    def _target(self, request: QueuedRequest) -> float:
        return self._tpot if request.slo_tpot is None else request.slo_tpot

    def _has_turn(self, request: QueuedRequest, now: float) -> bool:
        return now - request.arrival > self._patience and self._since_turn >= TURN

    def _price(self, request: QueuedRequest, cached: Callable[[QueuedRequest], int]) -> float:
        """Seconds of its prompt, as they were when it was first looked at."""
        number = request.request_id
        if number not in self._seconds:
            rows_before = cached(request)
            rows = max(request.prompt_tokens - rows_before, 1)
            self._seconds[number] = self._prompt_seconds(rows, rows_before)
        return self._seconds[number]

    def _room(self, now: float) -> float:
        """How long all may wait that can keep their targets, as fast as lately, ending soon."""
        least, pace = math.inf, self._pace.token
        for each in self._decoding.values():
            if each.target == math.inf:
                continue
            later = self._tokens - each.before  # tokens after the first
            left = self._answers.left_at_least(later)
            spare = each.target * (later + left) - (now - each.first_token) - pace * left
            if spare >= 0.0:
                reserve = SPARED * each.target * (later + left) + self._pace.round
                least = min(least, spare - min(reserve, 0.5 * spare))
        return least


def on_time_of(serving: Serving, slo: SLO | None, cost: RoundCost | None) -> OnTime | None:
    """Who joins next as a plan wants it; None for first come, first served.

    Args:
        serving: Its scheduling.
        slo: Its targets.
        cost: Step times of the deployment.

    Raises:
        UsageError: If there is no target.
        InputError: If nobody knows what prompts take.
    """
    if serving.scheduling == "fcfs":
        return None
    if slo is None or not slo.is_set:
        raise UsageError(
            "scheduling by the SLO needs a target. Fix: --slo-ttft-ms MS, --slo-tpot-ms MS or both"
        )
    if cost is None:
        raise InputError("scheduling by the SLO needs step times. Fix: --scheduling fcfs")
    return OnTime(
        slo.ttft,
        slo.tpot,
        prompt_seconds=cost.prefill,
        step=lambda running: cost.target(running, running * START_PROMPT, running),
        answer_tokens=serving.answer_tokens,
    )
