"""What a round of the batch has to do, before anyone has priced it.

A batch is the requests that decode together. There are three kinds: one plays the policy's objects
in every round (codesign.sim.played), one plays back rounds that these objects have made before
(codesign.sim.tape_batch), which is a hundred times faster and only right for policies that treat
each request by itself, and one decodes plainly by turns (codesign.sim.turns_batch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from codesign.records import RequestRecord

Prompts = Sequence[tuple[int, int]]  # rows of each, and KV rows before them


@dataclass(slots=True)
class Entering:
    """A request whose prompt has been run and that decodes from now on.

    Attributes:
        request_id: Its number in the trace.
        category: Kind of prompt, "" if unknown.
        prompt_tokens: Tokens that were run: the prompt, and after an eviction what was emitted.
        output_tokens: Tokens that it still emits; the first one came with the prompt.
        cached_tokens: Of ``prompt_tokens``, those that the draft finds in its prefix cache, too.
        emitted_before: Tokens emitted before an eviction.
        shared_tokens: KV rows of the prefix cache that it uses.
        speculates: The draft is told of it; else it decodes plainly beside the others.
        slo_tpot: Its own target of seconds per token; None for the run's.
    """

    request_id: int
    category: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    emitted_before: int = 0
    shared_tokens: int = 0
    speculates: bool = True
    slo_tpot: float | None = None


@dataclass(slots=True)
class Work:
    """One round of the batch.

    Attributes:
        batch: Requests in it, without those that sit it out.
        rows: Rows that the target verifies, roots included.
        context: Sum of the requests' KV rows before the round.
        drafting: (rows, context) of each draft forward before the candidates are sent.
        overlapped: The same of the forwards beside the verification.
        prompts: Rows of each prompt that the first draft forward runs besides, and KV rows before
            them.
        is_prompt_overlapped: That forward is one beside the verification.
        kept_trees: Trees of which the re-root kept more than the root.
        kept_nodes: Nodes that it kept, roots left out.
        rests: The policy decodes plainly and has no tree to move.
        rests_on: It is sure to do so in the next round, too.
        is_asked: The target's step waits for the host: none was begun while another one ran.
        looks: Times that the policy decided before the candidates; 0 where that takes no time.
        looks_beside: The same beside the verification.
        num_sitting: Requests that sit it out.
    """

    batch: int
    rows: int
    context: int
    drafting: list[tuple[int, int]] = field(default_factory=list)
    overlapped: list[tuple[int, int]] = field(default_factory=list)
    prompts: list[tuple[int, int]] = field(default_factory=list)
    is_prompt_overlapped: bool = False
    kept_trees: int = 0
    kept_nodes: int = 0
    rests: bool = False
    rests_on: bool = False
    is_asked: bool = False
    looks: int = 0
    looks_beside: int = 0
    num_sitting: int = 0

    @property
    def running(self) -> int:
        """Requests that decode, those that sit it out among them."""
        return self.batch + self.num_sitting


@dataclass(slots=True)
class Tally:
    """What a request has been through: tokens as in records.RequestRecord."""

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def add_to(self, record: RequestRecord) -> None:
        """Write it down; a request that was evicted has several."""
        record.num_rounds += self.num_rounds
        record.num_draft_tokens += self.num_draft_tokens
        record.num_accepted_tokens += self.num_accepted_tokens


class Batch(Protocol):
    """Requests that decode together."""

    def begin(self, entering: Sequence[Entering], now: float) -> Work:
        """Requests join; say what the round does. Only called if there are any afterwards."""
        ...

    def end(self) -> tuple[int, Sequence[int]]:
        """The round is over: tokens emitted, and the requests that are finished."""
        ...

    def drop(self, request_id: int) -> int:
        """Evict a request between rounds; return the tokens that it has emitted since it came."""
        ...

    def tally(self, request_id: int) -> Tally:
        """What a finished or evicted request has been through; forgets it."""
        ...

    @property
    def num_requests(self) -> int:
        """Requests in the batch."""
        ...

    @property
    def reads_prompts(self) -> bool:
        """Whether the draft runs prompts that begin now, a part at a time."""
        ...

    @property
    def kv_tokens(self) -> int:
        """KV rows that the batch needs in its next round, prefix cache not counted."""
        ...
