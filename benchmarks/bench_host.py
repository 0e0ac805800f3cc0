"""What the host does around the steps of a round, timed on any CPU: its models answer at once.

    python -m benchmarks.bench_host [--policy tree-8x4x3] [--requests 16] [--profile last] [--cold]

The code is that of a run on one rank group with a follower that is always ready, but forwards are
a hash: a draft's likeliest tokens and what the target emits follow from (token, position) alone.
A window is the host's time from an answer to the next launch; what runs within launches does not
count, nor what the host does while it would wait for a GPU anyway:

    first   from the target's answer to the draft's first expansion, or its own next step
    next    between two expansions; where ranks run ahead, a GPU is busy meanwhile
    last    from the last expansion's answer to the target's step

Policies that decide by step times are told some by which no draft forward pays: they rest. With
``--cold`` the caches are filled with other numbers during each step, as time does on a real host.
"""

from __future__ import annotations

import argparse
import cProfile
import hashlib
import json
import pstats
import statistics
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

from benchmarks.random_pair import small_config, write_random_pair
from codesign.candidate import Candidate
from codesign.config import Deployment
from codesign.engine import EngineRun
from codesign.engine.gpu import run as gpu_run
from codesign.engine.gpu.ahead_steps import AheadSteps
from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.graphs import Step
from codesign.engine.gpu.heads import DraftHead, TargetHead
from codesign.engine.gpu.mailbox import SharedMailbox
from codesign.engine.gpu.model_rank import ModelRank
from codesign.engine.gpu.prompt_steps import PromptSteps
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.gpu.ranks import Rank
from codesign.engine.gpu.step_rows import DeviceRows, Words
from codesign.engine.gpu.watch import Watch
from codesign.engine.run import PolicySetup
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.spec import SpeculationSpec
from codesign.policy.speculation import parse_policy
from codesign.prompts import BoundRequest

VOCABULARY = 4093
CALIBRATION = Calibration(0.85, 0.25)
SHARES = torch.tensor((0.62, 0.14, 0.07, 0.04, 0.03, 0.02, 0.01))  # how often a choice is right
OUTPUT, WARM_UP = 512, 300
OTHERS = 1 << 22  # numbers that fill the caches: 32 MiB
TARGET = StepTime.linear(alpha=1e-9, gamma=2e-5, delta=1.5e-3)
DRAFT = StepTime.linear(alpha=1e-9, gamma=1e-5, delta=1.4e-3)
AT_REST = RoundCost(target=TARGET, draft=DRAFT, prefill=TARGET, draft_prefill=DRAFT, deciding=9e-5)


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
        expansions: Of a round.
        profiled: The window that is profiled, if any.
        is_cold: The caches hold something else when an answer is there.
    """

    def __init__(
        self, expansions: int, profiled: str | None = None, *, is_cold: bool = False
    ) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.profile = cProfile.Profile()
        self._expansions, self._profiled = expansions, profiled
        self._done = 0
        self._open: tuple[str, float] | None = None
        self._others = np.zeros(OTHERS if is_cold else 1)

    def answered(self, rank: ModelRank) -> None:
        """A step's answer is there."""
        self._done = self._done + 1 if isinstance(rank.head, DraftHead) else 0
        name = "first" if not self._done else "next"
        if self._done == self._expansions and self._done:
            name = "last"
        self._others += 1.0
        self._open = name, perf_counter()
        if name == self._profiled and len(self.seconds[name]) > WARM_UP:
            self.profile.enable()

    def launched(self) -> None:
        """The next one is launched."""
        now = perf_counter()
        self.profile.disable()
        if self._open is not None:
            self.seconds[self._open[0]].append(now - self._open[1])
            self._open = None

    def watch(self, run: Callable[[], None]) -> Callable[[], None]:
        """A step that says when it is launched."""

        def launch() -> None:
            self.launched()
            run()

        return launch

    def patched(self) -> ExitStack:
        """Within, ranks answer by hash and say when."""
        take, make, ahead = ModelRank.take, ModelRank._make_step, AheadSteps._make_step

        def taken(rank: ModelRank, watch: Watch | None = None) -> Words:
            self.answered(rank)
            return take(rank, watch)

        def made(rank: ModelRank, *of: Any, **options: Any) -> Step:
            step = make(rank, *of, **options)
            step.run = self.watch(step.run)
            return step

        def made_ahead(steps: AheadSteps, *of: Any, **options: Any) -> Any:
            step = ahead(steps, *of, **options)
            return replace(step, run=self.watch(step.run))

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
        ):
            stack.enter_context(mock.patch.object(kind, name, call))
        return stack


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


def serve(
    folder: Path, spec: SpeculationSpec, windows: Windows, *, requests: int, batch: int
) -> EngineRun:
    """Serve requests of random prompts."""
    prompts = torch.randint(VOCABULARY, (requests, 40), generator=torch.Generator().manual_seed(0))
    asked = [BoundRequest(i, 0.0, "", tuple(p), OUTPUT) for i, p in enumerate(prompts.tolist())]
    candidate = Candidate(Deployment(1, 0), spec, batch)
    setup = rank_setup(
        candidate, asked, target=folder / "target", draft=folder / "draft", device="cpu",
        dtype="float32", policy=PolicySetup(spec, cost=AT_REST, calibration=CALIBRATION),
    )  # fmt: skip
    with windows.patched():
        return gpu_run.run_on_ranks(setup, candidate, asked)


def summary(run: EngineRun, windows: Windows) -> dict[str, Any]:
    """Microseconds of windows, and a digest of what was decided."""
    rounds = run.records.rounds
    names = ("rows", "num_expansions", "draft_rows", "num_emitted_tokens")
    told = repr((run.outputs, [rounds.column(name).tolist() for name in names]))
    emitted, batch = rounds.column("num_emitted_tokens").sum(), rounds.column("batch").sum()
    found: dict[str, Any] = {
        "decided": hashlib.blake2b(told.encode(), digest_size=6).hexdigest(),
        "rounds": len(rounds),
        "tokens_a_round": round(float(emitted / batch), 2),
    }
    for name, seconds in windows.seconds.items():
        if len(seconds) > 2 * WARM_UP:
            tenths = statistics.quantiles([1e6 * s for s in seconds[WARM_UP:]], n=10)
            found[f"{name}_us"] = {
                "p10": round(tenths[0], 1),
                "median": round(tenths[4], 1),
                "p90": round(tenths[8], 1),
                "mean": round(1e6 * statistics.mean(seconds[WARM_UP:]), 1),
            }
    return found


def main() -> None:
    """Time the windows of a policy."""
    parser = argparse.ArgumentParser(description="Time the host's part of rounds.")
    parser.add_argument("--policy", default="tree-8x4x3")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--profile", choices=("first", "next", "last"))
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    spec = parse_policy(options.policy)
    expansions = spec.expansions if spec.kind == "tree" else 0
    windows = Windows(expansions, options.profile, is_cold=options.cold)
    how = {"requests": options.requests, "batch": options.batch}
    with tempfile.TemporaryDirectory() as folder:
        write_random_pair(Path(folder), small_config(layers=1, vocabulary=VOCABULARY))
        found = summary(serve(Path(folder), spec, windows, **how), windows)
    print(json.dumps(found))
    if options.profile:
        pstats.Stats(windows.profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
