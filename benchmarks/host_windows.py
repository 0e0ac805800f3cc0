"""A run on one rank group without models: forwards are a hash, and answers and launches are timed.

For bench_host.py.
"""

from __future__ import annotations

import cProfile
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from codesign.engine.draft_worker import DraftWorker
from codesign.engine.gpu import run as gpu_run
from codesign.engine.gpu.ahead_steps import AheadSteps
from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.graphs import Step
from codesign.engine.gpu.heads import DraftHead, TargetHead
from codesign.engine.gpu.mailbox import Mailbox, SharedMailbox
from codesign.engine.gpu.model_rank import ModelRank
from codesign.engine.gpu.prompt_steps import PromptSteps
from codesign.engine.gpu.ranks import Rank
from codesign.engine.gpu.step_rows import DeviceRows, Words
from codesign.engine.gpu.watch import Watch
from codesign.engine.gpu.wire import (
    WireLimits,
    decode_candidates,
    decode_verdict,
    encode_candidates,
    encode_verdict,
)
from codesign.engine.partner import Answer, LocalDraft, Partner

VOCABULARY = 4093
SHARES = torch.tensor((0.62, 0.14, 0.07, 0.04, 0.03, 0.02, 0.01))  # how often a choice is right
WARM_UP = 300
OTHERS = 1 << 22  # numbers that fill the caches: 32 MiB


def likeliest(rows: DeviceRows, choices: int) -> Tensor:
    """Distinct tokens after each row, (T, K)."""
    base_T = rows.tokens_T.long() * 48271 + rows.positions_T.long() * 16807
    return (base_T[:, None] + torch.arange(choices) * 977) % VOCABULARY


def drafted(head: DraftHead, _: object, rows: DeviceRows, *__: object) -> Tensor:
    """``DraftHead.answer`` without a model."""
    count, choices = len(rows.tokens_T), head.choices
    into = head.room(count, rows.tokens_T.device)[: head.words(count)]
    tokens_TK = likeliest(rows, choices)
    spread_T1 = 1.0 + 0.3 * tokens_TK[:, :1] / VOCABULARY
    shares_K = torch.cat([SHARES, 0.005 * 0.9 ** torch.arange(choices)])[:choices]
    into[: count * choices] = tokens_TK.flatten()
    into[count * choices :] = (shares_K.log() * spread_T1).float().view(torch.int32).flatten()
    return into


def sampled(_: object, __: object, rows: DeviceRows, *___: object) -> Tensor:
    """``TargetHead.answer`` without a model."""
    draws_T = (rows.tokens_T.long() * 69621 + rows.positions_T.long() * 40692) % 65537 / 65537
    rank_T1 = (draws_T[:, None] > SHARES.cumsum(0)).sum(dim=1, keepdim=True)
    return likeliest(rows, len(SHARES) + 1).gather(1, rank_T1)[:, 0].int()


class Windows:
    """Collects the host's time between answers and launches.

    Args:
        expansions: Of a round, for the profile of its last window.
        profiled: The window that is profiled, if any.
        is_cold: The caches hold something else when an answer is there.

    Attributes:
        is_beside: The draft works beside the target's step.
    """

    def __init__(
        self, expansions: int = 0, profiled: str | None = None, *, is_cold: bool = False
    ) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.profile = cProfile.Profile()
        self.is_beside = False
        self._expansions, self._profiled = expansions, profiled
        self._done = 0
        self._open: tuple[bool, float] | None = None
        self._others = np.zeros(OTHERS if is_cold else 1)

    def answered(self, rank: ModelRank) -> None:
        """A step's answer is there."""
        is_draft = isinstance(rank.head, DraftHead)
        self._done = self._done + 1 if is_draft else 0
        # What is launched next is not known yet: only of a fixed number of expansions.
        name = self._name(is_draft, self._done < self._expansions)
        self._others += 1.0
        self._open = is_draft, perf_counter()
        if name == self._profiled and len(self.seconds[name]) > WARM_UP:
            self.profile.enable()

    def _name(self, from_draft: bool, to_draft: bool) -> str:
        if self.is_beside:
            return "beside"
        if from_draft:
            return "next" if to_draft else "last"
        return "first" if to_draft else "plain"

    def launched(self, *, is_draft: bool) -> None:
        """The next one is launched."""
        now = perf_counter()
        self.profile.disable()
        if self._open is not None:
            self.seconds[self._name(self._open[0], is_draft)].append(now - self._open[1])
            self._open = None

    def watch(self, run: Callable[[], None], *, is_draft: bool) -> Callable[[], None]:
        """A step that says when it is launched."""

        def launch() -> None:
            self.launched(is_draft=is_draft)
            run()

        return launch

    def patched(self) -> ExitStack:
        """Within, ranks answer by hash and say when."""
        take, make, ahead = ModelRank.take, ModelRank._make_step, AheadSteps._make_step
        partner_of = gpu_run.partner_of

        def taken(rank: ModelRank, watch: Watch | None = None) -> Words:
            self.answered(rank)
            return take(rank, watch)

        def made(rank: ModelRank, *of: Any, **options: Any) -> Step:
            step = make(rank, *of, **options)
            step.run = self.watch(step.run, is_draft=isinstance(rank.head, DraftHead))
            return step

        def made_ahead(steps: AheadSteps, *of: Any, **options: Any) -> Any:
            step = ahead(steps, *of, **options)
            return replace(step, run=self.watch(step.run, is_draft=True))

        def partner(rank: Rank, ranks: gpu_run.Ranks, followers: Mailbox | None) -> Partner:
            local = partner_of(rank, ranks, followers)
            is_async = rank.setup.policy.spec.is_async
            if not is_async:
                return local
            assert isinstance(local, LocalDraft), "drafts are here"
            return Beside(local.worker, rank.setup.limits, self)

        stack = ExitStack()
        for kind, name, call in (
            (RankForward, "hidden", lambda *_, in_pairs=False: torch.empty(0)),
            (DraftHead, "answer", drafted),
            (TargetHead, "answer", sampled),
            (TargetHead, "keep", lambda *_: None),
            (ModelRank, "take", taken),
            (ModelRank, "_make_step", made),
            (PromptSteps, "answer", lambda _, message, __: (message[-1:] + 1) % VOCABULARY),
            (AheadSteps, "_make_step", made_ahead),
            (Rank, "group_mailbox", mailbox),
            (gpu_run, "partner_of", partner),
        ):
            stack.enter_context(mock.patch.object(kind, name, call))
        return stack


class Beside(LocalDraft):
    """An asynchronous draft in this process: it works ahead while the target's step runs."""

    is_async = True

    def __init__(self, worker: DraftWorker, limits: WireLimits, windows: Windows) -> None:
        super().__init__(worker)
        self._limits, self._windows = limits, windows

    def receive(self) -> Answer:
        """As the draft's leader and then the target's do."""
        assert self._verdict is not None, "no verdict was sent"
        verdict = decode_verdict(encode_verdict(self._verdict, self._limits))
        words = encode_candidates(*self.worker.answer(verdict), self._limits)
        candidates, times = decode_candidates(words)
        return Answer(candidates, self._sent, times, perf_counter())

    def run_prompts(self) -> None:
        """Not before the answer."""

    def catch_up(self) -> None:
        """Draft beside the target."""
        self._windows.is_beside = True
        self.worker.overlap()
        self._windows.is_beside = False


class Followed(SharedMailbox):
    """To a follower that takes everything at once."""

    def send(self, words: Words) -> None:
        """See ``Mailbox.send``."""
        self._counts[2] = self._counts[0]
        super().send(words)


def mailbox(_: Rank, *, draft: bool, watch: Watch) -> SharedMailbox:
    """In the place of ``Rank.group_mailbox``."""
    assert not draft, "a draft on ranks of its own"
    with tempfile.TemporaryDirectory() as folder:
        return Followed(Path(folder) / "words", max_words=1 << 16, watch=watch)
