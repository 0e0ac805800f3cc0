"""The draft's half of a round: take a verdict, grow trees, answer with candidates.

The same worker runs in the target's process (serial) and in a process of its own (asynchronous).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter

from codesign.engine.drafter import AheadDrafter, Drafter
from codesign.engine.garbage import collect
from codesign.policy.light import light
from codesign.policy.protocol import Candidates, DraftSide, ExpansionRows, PromptRows, Verdict
from codesign.policy.speculation import Speculation


@light
class DraftTimes:
    """When the draft worked on an answer. Seconds of ``perf_counter``, one clock per host.

    Attributes:
        idle_from: It had finished its overlapped forwards and waited.
        received: It had the verdict.
        rerooted: Trees and KV rows were moved.
        answered: Candidates were ready to send.
        num_expansions: Draft forwards since the last answer, overlapped ones included.
        num_rows: Rows of these forwards.
    """

    idle_from: float
    received: float
    rerooted: float
    answered: float
    num_expansions: int
    num_rows: int


class DraftWorker:
    """Drives ``DraftSide`` with a drafter."""

    def __init__(self, policy: Speculation, drafter: Drafter) -> None:
        self.side = DraftSide(policy)
        self._drafter = drafter
        self._ahead = drafter if isinstance(drafter, AheadDrafter) else None
        if self._ahead is not None:
            self._ahead.meanwhile = self._beside_forward
        self._num_expansions = 0
        self._num_rows = 0
        self._prompts: tuple[PromptRows, ...] = ()
        self._unread: set[int] = set()  # requests whose prompts are not run in parts
        self._kept: Verdict | None = None  # that was not taken in yet
        self._idle_from = perf_counter()

    def _beside_forward(self) -> None:
        self.side.policy.settle()
        collect()

    def answer(self, verdict: Verdict) -> tuple[Candidates, DraftTimes]:
        """Candidates for a verdict; none at rest."""
        received = perf_counter()
        if self.keeps(verdict):
            return Candidates(verdict.round), self._times(received, received, received)
        return self.look(verdict)

    def keeps(self, verdict: Verdict) -> bool:
        """Keep a verdict with which a round at rest starts, to be taken in by ``catch_up``.

        Returns:
            Whether it does; otherwise ``look`` must follow.
        """
        self._take_in_kept()
        if not self.side.stays_at_rest(verdict):
            return False
        self._kept = verdict
        return True

    def catch_up(self) -> None:
        """Settle and take in what was kept, and make the look that is due; beside the target."""
        self.side.policy.settle()
        if self._kept is None:
            return
        self._take_in_kept()
        start = perf_counter()
        moves, rests = self.side.look_ahead()
        if moves:
            self._drafter.move(moves)
        if rests:
            self.side.policy.looked(perf_counter() - start)

    def rests_on(self) -> bool:
        """Whether the next round is at rest, too, if a request is left by then."""
        return self._kept is None and self.side.policy.rests_on()

    def _take_in_kept(self) -> None:
        verdict, self._kept = self._kept, None
        if verdict is not None:
            self._take_in(verdict, resting=True)

    def look(self, verdict: Verdict) -> tuple[Candidates, DraftTimes]:
        """Re-root, run the forwards that the policy requires, and name the nodes to verify."""
        received = perf_counter()
        self._take_in(verdict, resting=False)
        rerooted = perf_counter()
        if not self.side.begin():
            return Candidates(verdict.round), self._times(received, rerooted, rerooted)
        candidates = self._draft(verdict.round)
        answered = perf_counter()
        if self.side.policy.rests:
            self.side.policy.looked(answered - received)
        return candidates, self._times(received, rerooted, answered)

    def _take_in(self, verdict: Verdict, *, resting: bool) -> None:
        moves, finished = self.side.receive(verdict, resting=resting)
        self._prompts = verdict.prompts
        if moves or finished:
            self._drafter.release(finished)
            self._unread.difference_update(finished)
            self._drafter.move(moves)

    def _times(self, received: float, rerooted: float, answered: float) -> DraftTimes:
        """Of an answer, with what was run since the last one."""
        num_expansions, num_rows = self._num_expansions, self._num_rows
        self._num_expansions = self._num_rows = 0
        return DraftTimes(self._idle_from, received, rerooted, answered, num_expansions, num_rows)

    def _draft(self, number: int) -> Candidates:
        done = 0
        while rows := self.side.next_expansion(done):
            self._expand(rows, self.side.following(rows, done, overlaps=False))
            done += 1
        return self.side.candidates(number)

    def overlap(self) -> None:
        """Run the forwards that the policy hides behind the target's verification, and prompts."""
        self.catch_up()
        for done in range(self.side.policy.overlap):
            rows = self.side.overlap_expansion()
            if not rows:
                break
            self._expand(rows, self.side.following(rows, done, overlaps=True))
        self.run_prompts()
        collect()
        self._idle_from = perf_counter()

    def run_prompts(self) -> None:
        """Run the parts of prompts that came with the last verdict, if the policy wants them read.

        A prompt whose first part was not run is run as a whole with its first expansion.
        """
        self._take_in_kept()
        begun = {part.request_id for part in self._prompts if part.tokens}
        if self.side.policy.reads_prompts:
            self._unread -= begun
        else:
            self._unread |= begun
        unread = self._unread
        self._drafter.run_prompts([part for part in self._prompts if part.request_id not in unread])
        self._prompts = ()

    def _expand(self, expansion: Sequence[ExpansionRows], following: int) -> None:
        if following and self._ahead is not None:
            side, policy = self.side, self.side.policy
            grow = partial(side.growth, expansion[0])
            self._ahead.expect(following, width=policy.grown, fanout=policy.fanout, grow=grow)
        choices = self._drafter.forward(expansion, self.side.policy.fanout)
        for rows, (tokens, log_probs) in zip(expansion, choices, strict=True):
            self.side.expanded(rows, tokens, log_probs)
        self._num_expansions += 1
        self._num_rows += sum(len(rows.tokens) for rows in expansion)
