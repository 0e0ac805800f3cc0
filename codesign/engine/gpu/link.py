"""The pair link: verdicts and candidates between the leaders of target and draft.

The messages are those of wire.py, in a mailbox each way. The host decides both of them, so they go
from host to host; on one machine that is shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, sleep

from codesign.engine.draft_worker import DraftWorker
from codesign.engine.garbage import collected_beside
from codesign.engine.gpu.mailbox import Mailbox, Words
from codesign.engine.gpu.wire import (
    WireLimits,
    decode_candidates,
    decode_verdict,
    encode_candidates,
    encode_verdict,
)
from codesign.engine.partner import Answer, DraftLostError
from codesign.policy.protocol import Verdict


def verdict_mailbox_words(limits: WireLimits, max_prompt_tokens: int) -> int:
    """Words of the longest verdict, prompts of two whole batches behind it."""
    return limits.verdict_words + 2 * limits.max_batch * max_prompt_tokens


class LinkedDraft:
    """The target's end: a ``Partner`` whose draft runs on other ranks.

    Args:
        verdicts: To the draft's leader.
        candidates: From there.
        limits: Message sizes.
        on_close: Called once when the draft is no longer needed, with whether it was lost.
    """

    is_async = True

    def __init__(
        self,
        verdicts: Mailbox,
        candidates: Mailbox,
        limits: WireLimits,
        on_close: Callable[[bool], None],
    ) -> None:
        self._verdicts = verdicts
        self._candidates = candidates
        self._limits = limits
        self._on_close = on_close
        self._is_open = True
        self._is_lost = False
        self._sent = 0.0

    def send(self, verdict: Verdict) -> None:
        """See ``Partner.send``."""
        words = encode_verdict(verdict, self._limits)
        self._sent = perf_counter()
        with self._noted():
            self._verdicts.send(words)

    def receive(self) -> Answer:
        """See ``Partner.receive``."""
        with self._noted():
            words = self._candidates.receive()
        received = perf_counter()
        candidates, times = decode_candidates(words)
        return Answer(candidates, self._sent, times, received)

    def run_prompts(self) -> None:
        """The draft runs them after it has answered."""

    def catch_up(self) -> None:
        """The draft does so after it has answered."""

    def rests_on(self) -> bool:
        """Nobody knows before it has answered."""
        return False

    def close(self) -> None:
        """See ``Partner.close``."""
        if self._is_open:
            self._is_open = False
            self._on_close(self._is_lost)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except DraftLostError:
            self._is_lost = True
            raise


@collected_beside()
def serve_verdicts(
    worker: DraftWorker,
    verdicts: Mailbox,
    candidates: Mailbox,
    limits: WireLimits,
    delay: Callable[[int], float] | None = None,
) -> None:
    """Be the draft's leader: answer verdicts until the last one.

    Args:
        worker: Grows the trees.
        verdicts: From the target's leader.
        candidates: To it.
        limits: Message sizes.
        delay: Seconds to sleep before each answer, by round; for tests of timing.
    """
    while True:
        verdict = decode_verdict(verdicts.receive())
        if verdict.is_last:
            return
        if delay is not None:
            sleep(delay(verdict.round))
        answer, times = worker.answer(verdict)
        candidates.send(encode_candidates(answer, times, limits))
        worker.overlap()


def last_verdict_words(limits: WireLimits) -> Words:
    """The message that ends the draft's leader."""
    return encode_verdict(Verdict(0, is_last=True), limits)
