"""What the host does around the steps of a round, timed on any CPU: its models answer at once.

    python -m benchmarks.bench_host [--policy tree-8x4x3] [--batch 8] [--repeat 4] [--profile last]

The code is that of a run on one rank group with a follower that is always ready, but forwards are
a hash: a draft's likeliest tokens and what the target emits follow from (token, position) alone.
A window is the host's time from an answer to the next launch; what runs within launches does not
count, nor what the host does while it would wait for a GPU anyway:

    plain   from the target's answer to its own next step
    first   from the target's answer to the draft's first expansion
    next    between two expansions; where ranks run ahead, a GPU is busy meanwhile
    last    from the last expansion's answer to the target's step
    beside  between two expansions beside the target's step: the GPU waits that drafts

Asynchronous policies answer within the same process, with messages as between two. Several runs do
the same; of each window the quickest is told.

Policies that decide by step times are told some by which no draft forward pays: they rest; with
``--pays`` others by which many do. With ``--cold`` the caches are filled with other numbers during
each step, as time does on a real host.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pstats
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.host_windows import VOCABULARY, WARM_UP, Windows
from benchmarks.random_pair import small_config, write_random_pair
from codesign.candidate import Candidate
from codesign.config import Deployment
from codesign.engine import EngineRun
from codesign.engine.gpu import run as gpu_run
from codesign.engine.gpu.rank_setup import rank_setup
from codesign.engine.run import PolicySetup
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.spec import SpeculationSpec
from codesign.policy.speculation import parse_policy
from codesign.prompts import BoundRequest

CALIBRATION = Calibration(0.85, 0.25)
OUTPUT = 512
TARGET = StepTime.linear(alpha=1e-9, gamma=2e-5, delta=1.5e-3)
DRAFT = StepTime.linear(alpha=1e-9, gamma=1e-5, delta=1.4e-3)
AT_REST = RoundCost(target=TARGET, draft=DRAFT, prefill=TARGET, draft_prefill=DRAFT, deciding=9e-5)
CHEAP = StepTime.linear(alpha=1e-9, gamma=1e-6, delta=1e-4)


def serve(
    folder: Path, spec: SpeculationSpec, windows: Windows, *, requests: int, batch: int, pays: bool
) -> EngineRun:
    """Serve requests of random prompts."""
    cost = replace(AT_REST, draft=CHEAP, draft_prefill=CHEAP) if pays else AT_REST
    prompts = torch.randint(VOCABULARY, (requests, 40), generator=torch.Generator().manual_seed(0))
    asked = [BoundRequest(i, 0.0, "", tuple(p), OUTPUT) for i, p in enumerate(prompts.tolist())]
    candidate = Candidate(Deployment(1, int(spec.is_async)), spec, batch)
    setup = rank_setup(
        candidate, asked, target=folder / "target", draft=folder / "draft", device="cpu",
        dtype="float32", policy=PolicySetup(spec, cost=cost, calibration=CALIBRATION),
    )  # fmt: skip
    with windows.patched():
        return gpu_run.run_on_ranks(replace(setup, draft_ranks=0), candidate, asked)


def decided(run: EngineRun) -> dict[str, Any]:
    """A digest of what was decided, and how much that was."""
    rounds = run.records.rounds
    names = ("rows", "num_expansions", "draft_rows", "num_emitted_tokens")
    told = repr((run.outputs, [rounds.column(name).tolist() for name in names]))
    emitted, batch = rounds.column("num_emitted_tokens").sum(), rounds.column("batch").sum()
    return {
        "decided": hashlib.blake2b(told.encode(), digest_size=6).hexdigest(),
        "rounds": len(rounds),
        "tokens_a_round": round(float(emitted / batch), 2),
    }


def quickest(runs: Sequence[Windows]) -> dict[str, dict[str, float]]:
    """Microseconds of each kind of window, of each window the least: runs do the same."""
    found = {}
    for name in runs[0].seconds:
        least_N = np.min([run.seconds[name] for run in runs], axis=0)[WARM_UP:]
        if len(least_N) > WARM_UP:
            figures = [*np.quantile(least_N, (0.1, 0.5, 0.9)), least_N.mean()]
            names = ("p10", "median", "p90", "mean")
            found[f"{name}_us"] = {
                kind: round(1e6 * float(figure), 1)
                for kind, figure in zip(names, figures, strict=True)
            }
    return found


def main() -> None:
    """Time the windows of a policy."""
    parser = argparse.ArgumentParser(description="Time the host's part of rounds.")
    parser.add_argument("--policy", default="tree-8x4x3")
    parser.add_argument("--requests", type=int, help="by default 16, or four of a batch's")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--profile", choices=("plain", "first", "next", "last", "beside"))
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--pays", action="store_true")
    options = parser.parse_args()
    spec = parse_policy(options.policy)
    expansions = spec.expansions if spec.kind == "tree" else spec.max_depth
    requests = options.requests or max(16, 4 * options.batch)
    how = {"requests": requests, "batch": options.batch, "pays": options.pays}
    runs: dict[str, list[Windows]] = {}  # by what was decided: a policy may time its own looks
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_random_pair(Path(folder), small_config(layers=1, vocabulary=VOCABULARY))
        for _ in range(options.repeat):
            windows = Windows(expansions, options.profile, is_cold=options.cold)
            found = decided(serve(Path(folder), spec, windows, **how))
            runs.setdefault(found["decided"], []).append(windows)
            if options.profile:
                pstats.Stats(windows.profile).sort_stats("tottime").print_stats(45)
    print(json.dumps(found | quickest(runs[found["decided"]])))


if __name__ == "__main__":
    main()
