"""Requests that a replica has admitted and that do not decode yet: prompts run, or just ran."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from codesign.sim.requests import SimulatedRequest
from codesign.sim.work import Entering


@dataclass(slots=True)
class Chunk:
    """Prompt tokens that one step runs.

    Attributes:
        prompts: Rows of each, and KV rows before them.
        read: Those of them that the draft runs, too.
        complete: Requests whose prompt ends with it.
    """

    prompts: list[tuple[int, int]] = field(default_factory=list)
    read: list[tuple[int, int]] = field(default_factory=list)
    complete: list[SimulatedRequest] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Of all prompts."""
        return sum([rows for rows, _ in self.prompts])


class Prefill:
    """Prompts in order of admission, and the requests that join the next round.

    Args:
        round_rows: Most KV rows of a request in a round.

    Attributes:
        kv_tokens: KV rows of all these requests, prefix cache not counted.
    """

    def __init__(self, round_rows: int) -> None:
        self.kv_tokens = 0
        self._round_rows = round_rows
        self._prompts: deque[SimulatedRequest] = deque()
        self._entering: list[tuple[SimulatedRequest, int]] = []  # with its cached tokens

    @property
    def is_empty(self) -> bool:
        """Whether everybody who has been admitted decodes."""
        return not (self._prompts or self._entering)

    @property
    def num_prompts(self) -> int:
        """Prompts that are not complete."""
        return len(self._prompts)

    @property
    def rows_left(self) -> int:
        """Prompt tokens that are still to be run."""
        return sum([request.prompt_left for request in self._prompts])

    def add(self, request: SimulatedRequest) -> None:
        """A request is admitted; one without ``prompt_left`` is to ``enter`` at once."""
        self.kv_tokens += self._own_rows(request)
        if request.prompt_left:
            self._prompts.append(request)

    def take(self, budget: int, *, at: float, is_read: bool) -> Chunk:
        """The next prompt tokens, ``budget`` at most; ``is_read``: the draft runs new prompts.

        Their requests wait no more ``at`` that time.
        """
        chunk, left = Chunk(), budget
        for request in self._prompts:
            count = min(request.prompt_left, left)
            if not count:
                break
            request.leave_queue(at)
            chunk.prompts.append((count, request.prompt_tokens - request.prompt_left))
            if request.is_read is None:
                request.is_read = is_read and request.is_drafted_for
            if request.is_read:
                chunk.read.append(chunk.prompts[-1])
            left -= count
            request.prompt_left -= count
            if not request.prompt_left:
                chunk.complete.append(request)
        for _ in chunk.complete:
            self._prompts.popleft()
        return chunk

    def enter(self, request: SimulatedRequest, cached_tokens: int) -> None:
        """A prompt is complete: the request decodes from the next round on."""
        self._entering.append((request, cached_tokens))

    def take_entering(self) -> list[Entering]:
        """The requests that decode from now on."""
        entering, self._entering = self._entering, []
        for request, _ in entering:
            self.leave(request)
        return [_as_entering(request, cached_tokens) for request, cached_tokens in entering]

    def leave(self, request: SimulatedRequest) -> None:
        """Its rows are counted elsewhere, or not needed any more."""
        self.kv_tokens -= self._own_rows(request)

    def drop(self, request: SimulatedRequest) -> bool:
        """Evict a request if it is here."""
        if request in self._prompts:
            self._prompts.remove(request)
            self.leave(request)
            return True
        others = [pair for pair in self._entering if pair[0] is not request]
        if len(others) == len(self._entering):
            return False
        self._entering = others
        self.leave(request)
        request.emitted += 1  # came with its prompt
        return True

    def _own_rows(self, request: SimulatedRequest) -> int:
        return request.prompt_tokens + self._round_rows - request.shared_tokens


def _as_entering(request: SimulatedRequest, cached_tokens: int) -> Entering:
    record = request.record
    return Entering(
        record.request_id,
        record.category,
        request.prompt_tokens,
        request.output_tokens - request.emitted,
        cached_tokens=cached_tokens,
        emitted_before=request.emitted,
        shared_tokens=request.shared_tokens,
        speculates=request.speculates,
        slo_tpot=record.slo_tpot,
    )
