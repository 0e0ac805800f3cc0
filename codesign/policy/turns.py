"""Who takes part in a round of plain decoding.

A forward gets dearer where the next bucket of rows begins: 17 rows of a 70B over four GPUs take 1.8
times as long as 16. So of 17 to 27 requests 16 at a time yield more tokens a second than all at
once. They take turns, one queue of all: everyone takes part equally often, and no request's tokens
change. Who drafts does not take turns: a tree's rows have a price of their own. Of turns no step
begins while the one before it runs.

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from math import inf

import numpy as np

from codesign.policy.ahead import asked
from codesign.policy.step_time import StepTime

WORTH = 1.05  # times the tokens a second of all at once that turns must yield
_SPAN = 64.0  # tokens of a request's context between which the best number hardly differs
_MOST, _FAR = 256, 4096.0  # requests, and tokens of context of each, by which ``fewest`` is found


class TurnPrices:
    """How many of a batch decode at a time with most tokens a second.

    Args:
        step: Seconds of the target's forward.

    Attributes:
        fewest: Requests of which turns may be worth their while; infinite where none ever are.
    """

    def __init__(self, step: StepTime) -> None:
        self._step = step
        self._known: dict[tuple[int, int], tuple[int, float]] = {}
        counts = np.arange(1.0, _MOST + 1.0)
        pays = np.zeros(_MOST, bool)
        for context in (0.0, _FAR):
            some, everyone = (
                one.of_arrays(counts, context * counts, counts) / counts
                for one in (asked(step), step)
            )
            pays |= WORTH * np.minimum.accumulate(some) < everyone
        self.fewest = float(counts[pays].min(initial=inf))

    def count(self, num: int, context: int) -> int:
        """How many of so many requests take part, with so many KV rows in all; mostly all do."""
        return num if num < self.fewest else self._best(num, context)[0]

    def saved(self, num: int, context: int) -> float:
        """Seconds by which a token of each of them takes less than in one round of all."""
        return 0.0 if num < self.fewest else self._best(num, context)[1]

    def _best(self, num: int, context: int) -> tuple[int, float]:
        key = num, int(context / (num * _SPAN))
        if (found := self._known.get(key)) is None:
            each = (key[1] + 0.5) * _SPAN
            counts = np.arange(1.0, num + 1.0)
            seconds = num * asked(self._step).of_arrays(counts, each * counts, counts) / counts
            least, everyone = int(seconds.argmin()), self._step(num, each * num, num)
            is_worth = WORTH * float(seconds[least]) < everyone
            found = (least + 1, everyone - float(seconds[least])) if is_worth else (num, 0.0)
            self._known[key] = found
        return found


@lru_cache(maxsize=64)
def turn_prices(step: StepTime) -> TurnPrices:
    """The prices of a target's forward; made once, and what they find out is kept."""
    return TurnPrices(step)


class Turns:
    """Whose turn it is, round by round.

    Args:
        prices: How many take part.
    """

    def __init__(self, prices: TurnPrices) -> None:
        self.prices = prices
        self._queue: dict[int, None] = {}  # requests, whose turn it is next first

    def take(self, contexts: Mapping[int, int]) -> list[int]:
        """Requests of the next round, in their order here.

        Args:
            contexts: KV rows of each request that decodes.
        """
        if len(contexts) < self.prices.fewest:
            return [*contexts]
        count = self.prices.count(len(contexts), sum(contexts.values()))
        if count == len(contexts):
            return [*contexts]
        queue = self._queue
        queue.update(dict.fromkeys(contexts))  # who comes is the last
        taking = list(islice(queue, count))
        for number in taking:
            queue[number] = queue.pop(number)
        chosen = set(taking)
        return [number for number in contexts if number in chosen]

    def leave(self, request_id: int) -> None:
        """A request is over, or loses its KV rows."""
        self._queue.pop(request_id, None)
