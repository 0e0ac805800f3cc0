"""Plain decoding of all requests at once and by turns, beside each other.

    python -m benchmarks.bench_turns [--shapes llama-3-70b ...] [--ranks 1 2 4] [--out FOLDER]

Random int4 weights in a published shape, so nothing is downloaded. First rounds of ``KNOTS``
requests at once are timed, with the host in the chain and with ranks that run ahead of it: these
are the step times by which requests take turns (codesign/policy/turns.py). Then ``SIZES`` requests
that are all there at once are served in both ways in turn. Told are the tokens a second of the
rounds, and what the step times had said.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_decode_ahead import AskedTarget, made_up
from benchmarks.bench_serving import CONFIG
from benchmarks.common import need_gpus, write_result
from benchmarks.random_pair import inflate_source, write_source_pair
from codesign.candidate import Candidate
from codesign.config import Deployment, Serving
from codesign.engine.gpu.group_target import GroupTarget
from codesign.engine.gpu.rank_group import GroupLeader
from codesign.engine.gpu.rank_setup import RankSetup, rank_setup
from codesign.engine.gpu.ranks import TARGET_MODEL
from codesign.engine.gpu.run import load_leader, started
from codesign.engine.partner import NoDraft
from codesign.engine.schedule import Schedule
from codesign.engine.serve import Server
from codesign.policy.batching import BatchLimits
from codesign.policy.speculation import parse_policy
from codesign.policy.step_time import StepTime
from codesign.policy.turns import TurnPrices, Turns

KNOTS = (1, 8, 9, 16, 17, 32, 33, 48)
SIZES = (9, 17, 20, 24, 28, 33, 36, 40, 44)
RUNS, WARM_UP = 2, 10
CONTEXT = 128  # KV rows of a request, about: prompts have 64 and answers 128


class Ways:
    """Both ways to serve on ranks that run.

    Args:
        leader: Of the ranks.
        setup: Theirs.
    """

    def __init__(self, leader: GroupLeader, setup: RankSetup) -> None:
        self._leader, self._setup = leader, setup

    def served(
        self, batch: int, kind: type[GroupTarget] = GroupTarget, turns: Turns | None = None
    ) -> tuple[np.ndarray, dict[int, list[int]]]:
        """Seconds of each round after the first ones, and the outputs."""
        requests = made_up(batch)
        setup = self._setup
        worker = kind(self._leader, num_slots=setup.num_slots, sampling=setup.sampling, turns=turns)
        schedule = Schedule(requests, BatchLimits(batch, 1 << 20), Serving(), round_rows=1)
        server = Server(worker, NoDraft(), schedule, requests)
        rounds = server.run().rounds
        return np.diff(rounds.column("start")), server.outputs

    def step_time(self) -> StepTime:
        """Seconds of rounds of all requests, by how many they are."""
        seconds = {
            kind: [float(np.median(self.served(n, kind)[0][WARM_UP:])) for n in KNOTS]
            for kind in (AskedTarget, GroupTarget)
        }
        asked, ahead = (np.array(seconds[kind]) for kind in (AskedTarget, GroupTarget))
        less = max(float(np.median(asked - ahead)), 0.0)
        return StepTime(0.0, KNOTS, tuple(asked.tolist()), ahead=less)


def measure(shape: str, ranks: int, model: Path) -> list[dict[str, Any]]:
    """Rows of the table of one shape on so many GPUs."""
    most = max(*KNOTS, *SIZES)
    candidate = Candidate(Deployment(ranks), parse_policy("plain"), most)
    setup = rank_setup(candidate, made_up(most), target=model, draft=None, max_kv_tokens=1 << 20)
    rows = []
    with started(setup) as (others, setup):
        this = load_leader(setup, others)
        followers = this.group_mailbox(draft=False, watch=others.of_target)
        leader = this.leader(TARGET_MODEL, followers, others.of_target)
        ways = Ways(leader, setup)
        step = ways.step_time()
        print({n: round(1e3 * s, 3) for n, s in zip(KNOTS, step.seconds, strict=True)}, flush=True)
        for size in SIZES:
            rows.append({"shape": shape, "ranks": ranks, **_row(ways, step, size)})
            print(rows[-1], flush=True)
        leader.end()
        this.leave()
    return rows


def _row(ways: Ways, step: StepTime, size: int) -> dict[str, Any]:
    prices = TurnPrices(step)
    at_once = prices.count(size, CONTEXT * size)
    whole = step(size, CONTEXT * size, size)
    found: dict[str, list[float]] = {"all": [], "turns": []}
    outputs = []
    for _ in range(RUNS):
        for way, seconds in found.items():
            turns = Turns(prices) if way == "turns" else None
            rounds, told = ways.served(size, turns=turns)
            seconds.append(float(rounds.sum()))
            outputs.append(told)
    tokens = sum([len(output) - 1 for output in outputs[0].values()])
    rates = {way: tokens / min(seconds) for way, seconds in found.items()}
    return {
        "requests": size,
        "at_once": at_once,
        "all_tokens_s": round(rates["all"], 1),
        "turns_tokens_s": round(rates["turns"], 1),
        "faster": round(rates["turns"] / rates["all"], 3),
        "predicted": round(whole / (whole - prices.saved(size, CONTEXT * size)), 3),
        "runs_that_differ": sum(told != outputs[0] for told in outputs),
    }


def main() -> None:
    """Measure, print and keep the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["llama-3-8b", "llama-3-70b"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    need_gpus(max(args.ranks))
    rows: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_source_pair(Path(folder), CONFIG)
            for shape in args.shapes:
                model = inflate_source(Path(folder), shape, prefix="bench")
                for ranks in args.ranks:
                    rows += measure(shape, ranks, model)
    finally:
        note = f"prompts of 64 tokens, answers of 128, the quicker of {RUNS} runs of each in turn"
        print(write_result("turns", rows, directory=args.out, note=note))


if __name__ == "__main__":
    main()
