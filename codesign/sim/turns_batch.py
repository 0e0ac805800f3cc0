"""A batch of plain decoding whose requests take turns.

Rounds of a tape are one a round of the batch; here a request may sit one out. So each round asks
whose turn it is, as the engine does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codesign.policy.turns import Turns
from codesign.sim.work import Entering, Tally, Work


@dataclass(slots=True)
class _Decoding:
    """A request: tokens that it still emits, rounds so far, and its prefix-cache rows."""

    left: int
    shared: int
    rounds: int = 0


class TurnsBatch:
    """See Batch.

    Args:
        turns: Who takes part in a round.
        round_rows: Most KV rows of a request in a round.
    """

    def __init__(self, turns: Turns, *, round_rows: int) -> None:
        self._turns = turns
        self._round_rows = round_rows
        self._requests: dict[int, _Decoding] = {}
        self._contexts: dict[int, int] = {}
        self._taking: list[int] = []
        self._tallies: dict[int, Tally] = {}

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def reads_prompts(self) -> bool:
        """There is no draft that might not."""
        return True

    @property
    def kv_tokens(self) -> int:
        shared = sum([request.shared for request in self._requests.values()])
        rows = self._round_rows * len(self._requests)
        return sum(self._contexts.values()) + rows - shared

    def begin(self, entering: Sequence[Entering], now: float) -> Work:
        for request in entering:
            number, left = request.request_id, request.output_tokens - 1
            self._requests[number] = _Decoding(left, request.shared_tokens)
            self._contexts[number] = request.prompt_tokens
        contexts = self._contexts
        self._taking = taking = self._turns.take(contexts)
        context = sum([contexts[number] for number in taking])
        work = Work(len(taking), len(taking), context, rests=True)
        work.num_sitting = len(contexts) - len(taking)
        work.rests_on = not work.num_sitting
        return work

    def end(self) -> tuple[int, list[int]]:
        finished = []
        for number in self._taking:
            request = self._requests[number]
            request.left -= 1
            request.rounds += 1
            self._contexts[number] += 1
            if not request.left:
                finished.append(number)
                self._forget(number)
        return len(self._taking), finished

    def drop(self, request_id: int) -> int:
        return 1 + self._forget(request_id)  # the first token came with the prompt

    def _forget(self, request_id: int) -> int:
        """A request leaves; its rounds."""
        rounds = self._requests.pop(request_id).rounds
        del self._contexts[request_id]
        self._turns.leave(request_id)
        self._tallies[request_id] = Tally(rounds)
        return rounds

    def tally(self, request_id: int) -> Tally:
        return self._tallies.pop(request_id)
