"""What a run does when a rank is killed or hangs."""

from __future__ import annotations

import os
import signal
from time import monotonic
from typing import Any

from benchmarks.rank_groups.inputs import random_requests
from benchmarks.rank_groups.serving import MODELS, Stage
from benchmarks.rank_groups.stage_process import say_row
from codesign.candidate import Candidate
from codesign.config import Deployment
from codesign.engine.gpu import launch
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.gpu.run import run_on_ranks
from codesign.policy.speculation import parse_policy


def lose(stage: Stage, number: int, split: tuple[int, int]) -> None:
    """Kill or stop the rank that this process does not lead, after some rounds."""
    name = MODELS[stage.device][0]
    started: list[launch.LocalRanks] = []
    start_ranks = launch.LocalRanks.__init__

    def kept(self: launch.LocalRanks, setup: Any) -> None:
        started.append(self)
        start_ranks(self, setup)

    calls, at = 0, 0.0

    def progress(_: str, done: int, total: int) -> None:
        nonlocal calls, at
        calls += 1
        if calls == 40:
            at = monotonic()
            for pid in started[-1].pids.values():
                os.kill(pid, number)

    target, draft = stage.pair(name)
    requests = random_requests(target, 4, 200)
    policy = "async-tree-8x4x3" if split[1] else "plain"
    candidate = Candidate(Deployment(*split), parse_policy(policy), 1)
    setup = rank_setup(
        candidate, requests, target=target, draft=draft,
        max_kv_tokens=1 << 16, device=stage.device, dtype=stage.dtype, silence=4.0,
    )  # fmt: skip
    launch.LocalRanks.__init__ = kept
    try:
        run = run_on_ranks(setup, candidate, requests, max_kv_tokens=1 << 16, progress=progress)
    finally:
        launch.LocalRanks.__init__ = start_ranks
    say_row(
        run=f"{name}: {policy} on {candidate.deployment.label}, {signal.Signals(number).name}",
        seconds_to_the_end=round(monotonic() - at, 2),
        finished=sum(r.finish is not None for r in run.records.requests),
        tokens=sum(map(len, run.outputs.values())),
        notes=run.records.notes,
    )
    os._exit(0)  # as the command line does: a kernel may wait for the lost rank
