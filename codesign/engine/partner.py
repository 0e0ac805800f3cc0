"""How the target's loop talks to the drafter: none, in this process, or in another process.

``send`` hands over a verdict, ``receive`` returns the candidates that answer it. The loop does not
know where they come from.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Protocol

from codesign.engine.draft_worker import DraftTimes, DraftWorker
from codesign.errors import HardwareError
from codesign.policy.light import light
from codesign.policy.protocol import Candidates, Verdict


class DraftLostError(HardwareError):
    """The draft process no longer answers; the run goes on without speculation."""


class TargetLostError(HardwareError):
    """A process that holds a part of the target is gone; the run ends with what it has."""


@light
class Answer:
    """Candidates, and where their time went.

    Attributes:
        candidates: To verify; None means every root alone.
        sent: ``perf_counter`` when the verdict left the target.
        times: The draft's own times; None when nothing was drafted.
        received: ``perf_counter`` when the candidates were there.
    """

    candidates: Candidates | None
    sent: float
    times: DraftTimes | None
    received: float


class Partner(Protocol):
    """Whoever answers verdicts with candidates."""

    is_async: bool

    def send(self, verdict: Verdict) -> None:
        """Hand over a verdict. Raises DraftLostError."""
        ...

    def receive(self) -> Answer:
        """The answer to the last verdict. Raises DraftLostError."""
        ...

    def run_prompts(self) -> None:
        """Run the parts of prompts that came with the last verdict, if no other process does."""
        ...

    def catch_up(self) -> None:
        """Do what can wait; the target's step runs meanwhile, where it has a GPU."""
        ...

    def rests_on(self) -> bool:
        """Whether it is sure to answer the next verdict without candidates; after ``catch_up``."""
        ...

    def close(self) -> None:
        """End the partner."""
        ...


class NoDraft:
    """Plain autoregression: every round verifies roots alone."""

    is_async = False

    def __init__(self) -> None:
        self._sent = 0.0

    def send(self, verdict: Verdict) -> None:
        """Forget the verdict."""
        self._sent = perf_counter()

    def receive(self) -> Answer:
        """No candidates."""
        return Answer(None, self._sent, None, perf_counter())

    def run_prompts(self) -> None:
        """None drafts."""

    def catch_up(self) -> None:
        """Nothing has waited."""

    def rests_on(self) -> bool:
        """It never drafts."""
        return True

    def close(self) -> None:
        """Nothing to end."""


class LocalDraft:
    """Serial speculation: the draft model runs in this process, in turn with the target."""

    is_async = False

    def __init__(self, worker: DraftWorker) -> None:
        self.worker = worker
        self._verdict: Verdict | None = None
        self._sent = 0.0

    def send(self, verdict: Verdict) -> None:
        """Keep the verdict until the answer is asked for."""
        self._verdict = verdict
        self._sent = perf_counter()

    def receive(self) -> Answer:
        """Draft now; while drafting rests, answer without candidates."""
        assert self._verdict is not None, "no verdict was sent"
        if self.worker.keeps(self._verdict):
            return Answer(None, self._sent, None, perf_counter())
        candidates, times = self.worker.look(self._verdict)
        return Answer(candidates, self._sent, times, perf_counter())

    def run_prompts(self) -> None:
        """Run them now."""
        self.worker.run_prompts()

    def catch_up(self) -> None:
        """Take in the verdict of a round at rest."""
        self.worker.catch_up()

    def rests_on(self) -> bool:
        """See ``Partner.rests_on``."""
        return self.worker.rests_on()

    def close(self) -> None:
        """Nothing to end."""


class LosablePartner:
    """A partner that may be lost: from then on none drafts, and decoding goes on without.

    Args:
        partner: Whoever drafts at first.
        lost: Told of it, once.
    """

    def __init__(self, partner: Partner, lost: Callable[[DraftLostError], None]) -> None:
        self._partner = partner
        self._lost = lost

    @property
    def is_async(self) -> bool:
        """Whether it drafts while the target works."""
        return self._partner.is_async

    def send(self, verdict: Verdict) -> None:
        """Hand over a verdict."""
        try:
            self._partner.send(verdict)
        except DraftLostError as err:
            self._go_on_without(err)
            self._partner.send(verdict)

    def receive(self) -> Answer:
        """The answer to the last verdict."""
        try:
            return self._partner.receive()
        except DraftLostError as err:
            self._go_on_without(err)
            return self._partner.receive()

    def _go_on_without(self, err: DraftLostError) -> None:
        self._lost(err)
        self._partner.close()
        self._partner = NoDraft()

    def run_prompts(self) -> None:
        """See ``Partner.run_prompts``."""
        self._partner.run_prompts()

    def catch_up(self) -> None:
        """See ``Partner.catch_up``."""
        self._partner.catch_up()

    def rests_on(self) -> bool:
        """See ``Partner.rests_on``."""
        return self._partner.rests_on()

    def close(self) -> None:
        """See ``Partner.close``."""
        self._partner.close()
