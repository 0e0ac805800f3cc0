"""One session: profile a deployment on its ranks and serve the grid's runs on the same ones.

    python -m benchmarks.campaign.ranks NUM_RANKS < task.json

A process of its own, so that a lost GPU ends one session. It loads what takes long before it reads
its task, so that the next one can be started while this one still measures.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import replace
from time import monotonic, perf_counter
from typing import Any

import pandas as pd

from benchmarks.campaign.blind import keep_blind
from benchmarks.campaign.expected_seconds import RECORDING, unit_seconds
from benchmarks.campaign.questions import recorded_prompts
from benchmarks.campaign.requests import bound, load_requests
from benchmarks.campaign.schedule import note_session, phase_file
from benchmarks.campaign.task import Task
from benchmarks.campaign.units import BATCH, Unit, unit
from codesign.acceptance import AcceptanceProfile
from codesign.artifacts import header, read_table, write_table, write_text
from codesign.candidate import Candidate
from codesign.config import Deployment, parse_deployment
from codesign.engine.gpu.launch import keep_waiting
from codesign.engine.run import EngineRun, PolicySetup
from codesign.errors import CodesignError
from codesign.fit.calibration import fit_calibration
from codesign.fit.drift import VISIT
from codesign.fit.round_costs import fit_costs
from codesign.metrics import summarise
from codesign.models import resolve_model
from codesign.policy.speculation import SpeculationSpec
from codesign.profiler.draft_steps import made_up_tokens
from codesign.profiler.rank_acceptance import rank_outputs
from codesign.profiler.rank_bench import RankBench
from codesign.profiler.rank_parts import RankMeasurer
from codesign.profiler.store import ACCEPTANCE_PART, PartStore, ProfileSettings, unseen
from codesign.prompts import BoundRequest
from codesign.run_directory import write_run

MAX_KV_TOKENS = 8 * 2048
ALPHABET = 32  # tokens that every model has


class Measuring:
    """A session on running ranks.

    Args:
        task: What to do.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._session = task.session
        self._folder = task.folder
        target, draft = self._session.pair.models
        settings = ProfileSettings(
            target=target,
            draft=draft,
            workers=0,  # parts of any deployment may be added; join.py says which there are
            is_quick=task.is_quick,
            device=task.device,  # type: ignore[arg-type]
        )
        self._store = PartStore(self._folder / "profile", settings)
        self._store.open(resume=True)
        own = replace(settings, deployments=(task.label,))
        self._measurer = RankMeasurer(own, visits=1)  # whose ranks serve the runs, too
        self._seconds: dict[str, float] = {}
        self._parts: dict[str, float] = {}
        self._blind = ""
        self._changed: float | None = None
        self._served = 0

    def run(self) -> None:
        """Measure what is missing, as far as the time goes."""
        start = self._enter("start")
        deployment = parse_deployment(self._task.label)
        with self._measurer.bench(deployment) as bench:
            self._seconds["start"] = perf_counter() - start
            self._parts = bench.start_seconds
            self._profile(bench, deployment)
            start = self._enter("runs")
            self._serve_all(bench)
            self._seconds["runs"] = perf_counter() - start
            try:
                self._enter("look back")
                self._look_back(bench, deployment)
            finally:
                self._note()

    def _enter(self, phase: str) -> float:
        """Leave word of what begins, for whoever has to end the session in it; the time now."""
        file = phase_file(self._folder, self._task.label)
        write_text(file, json.dumps({**self._line(), "cut": phase}))
        return perf_counter()

    def _profile(self, bench: RankBench, deployment: Deployment) -> None:
        """A visit, acceptance and a warm-up, then another look at the host's pace."""
        start = self._enter("profile")
        part, earlier = None, self._earlier(deployment.label)
        visits = 0 if earlier is None else len(set(earlier[VISIT]))
        if self._session.lacks_visit(self._folder) and visits < self._measurer.most_visits:
            part = self._measurer.time(bench, deployment, unseen)
            self._put(deployment.label, earlier, part)  # also if what follows is cut
        self._seconds["profile"] = perf_counter() - start
        start = self._enter("acceptance")
        if deployment.draft_workers == 0 and not self._store.has(ACCEPTANCE_PART):
            self._store.put(ACCEPTANCE_PART, self._record(bench, deployment))
        self._seconds["acceptance"] = perf_counter() - start
        start = self._enter("check")
        self._warm_up(bench)
        if part is not None:
            part = self._measurer.steadied(bench, deployment, part)
            self._put(deployment.label, earlier, part)
        self._seconds["check"] = perf_counter() - start

    def _earlier(self, label: str) -> pd.DataFrame | None:
        """What earlier starts have measured of a deployment."""
        if not self._store.has(label):
            return None
        part = self._kept(label)
        return part if VISIT in part else part.assign(**{VISIT: 1})

    def _kept(self, name: str) -> pd.DataFrame:
        """A part of the profile that is there."""
        file = self._folder / "profile" / "parts" / f"{name}.parquet"
        return read_table(file, kind="profile")[0]

    def _put(self, label: str, earlier: pd.DataFrame | None, part: pd.DataFrame) -> None:
        """Keep a deployment's part: this start's visit behind earlier ones."""
        if earlier is not None:
            this = part.assign(**{VISIT: earlier[VISIT].max() + 1})
            part = pd.concat([earlier, this], ignore_index=True)
        self._store.put(label, part)

    def _record(self, bench: RankBench, deployment: Deployment) -> pd.DataFrame:
        """Acceptance on prompts like those that the runs serve, and none of them."""
        target, plain = resolve_model(self._session.pair.models[0]), SpeculationSpec()
        frames, start = [], perf_counter()
        for requests in recorded_prompts(target, seed=self._task.seed, share=self._task.recorded):
            if frames and perf_counter() - start > RECORDING:
                break
            run = bench.serve(
                Candidate(deployment, plain, BATCH.batch),
                requests,
                PolicySetup(plain),
                max_kv_tokens=MAX_KV_TOKENS,
            )
            frames.append(rank_outputs(bench, requests, run.outputs))
        return pd.concat(frames, ignore_index=True)

    def _serve_all(self, bench: RankBench) -> None:
        if not self._session.units:
            return
        if not self._store.has(ACCEPTANCE_PART):
            print("  no runs before a deployment of one group has recorded acceptance", flush=True)
            return
        cost = fit_costs(self._kept(self._task.label), on_ranks=True)[0][self._task.label]
        acceptance = AcceptanceProfile.from_table(self._kept(ACCEPTANCE_PART))
        calibration = fit_calibration(acceptance).calibration
        self._blind = keep_blind(self._folder, self._task.label, cost, calibration)
        budget = monotonic() + self._task.run_seconds
        end = min(self._task.deadline, budget)
        guessed, taken = 0.0, 0.0
        for work in self._session.left(self._folder):
            guess = unit_seconds(work, self._session.pair)
            due = monotonic() + guess * (taken / guessed if guessed else 1.0)
            if due > end:
                print(f"  {work.folder}: no time left", flush=True)
                if due > budget:  # it had its seconds: a schedule goes on to other sessions
                    (self._folder / f"{self._task.label}.spent").touch()
                continue
            target, seed = self._session.pair.models[0], self._task.seed
            try:
                requests = load_requests(self._folder, work.workload, target, cost, seed=seed)
            except CodesignError as error:  # the other runs need not go with it
                print(f"  {work.folder}: {error}", flush=True)
                continue
            policy = PolicySetup(
                work.candidate.speculation, cost, calibration, confidence=acceptance.hit_rate(1)
            )
            start = self._enter(f"runs: {work.folder}")
            run = bench.serve(
                work.candidate,
                bound(requests, target, work.workload, seed=seed)[: work.requests],
                policy,
                max_kv_tokens=MAX_KV_TOKENS,
            )
            self._write(work, run)
            self._served, seconds = self._served + 1, perf_counter() - start
            if not work.workload.seconds:  # a segment takes its time
                guessed, taken = guessed + guess, taken + seconds
            print(f"  {work.folder}: {seconds:.1f} s", flush=True)
            if work.candidate.speculation.kind == "plain":
                self._rank(bench, work, requests, run)

    def _warm_up(self, bench: RankBench) -> None:
        """Compile what prompts of a new kind of length compile: multiples of 16, and others."""
        policy = "tree-4x2x1" if bench.draft is not None else "async-tree-4x2x1"
        work = unit(parse_deployment(self._task.label), policy, BATCH)
        requests = [
            BoundRequest(number, 0.0, "", made_up_tokens(number, length, ALPHABET), 4)
            for number, length in enumerate((32, 33, 63, 64, 65))
        ]
        setup = PolicySetup(work.candidate.speculation)
        bench.serve(work.candidate, requests, setup, max_kv_tokens=MAX_KV_TOKENS)

    def _write(self, work: Unit, run: EngineRun) -> None:
        target, draft = self._session.pair.models
        write_run(
            self._folder / "runs" / work.folder,
            run.records,
            origin="measured",
            summary={
                "label": work.candidate.label,
                "candidate": work.candidate.to_dict(),
                "metrics": summarise(run.records).to_dict(),
                "target": target,
                "draft": draft,
            },
            seed=self._task.seed,
            outputs=run.outputs,
        )

    def _rank(self, bench: RankBench, work: Unit, requests: pd.DataFrame, run: EngineRun) -> None:
        """Record the acceptance of these very requests, too: what a prediction could know."""
        file = self._folder / "runs" / f"{work.workload.name}.acceptance.parquet"
        if work.workload.batch == 1 or file.exists():
            return  # a stream's requests are the batch's
        target, seed = self._session.pair.models[0], self._task.seed
        served = bound(requests, target, work.workload, seed=seed)
        served = served[: work.requests]
        if any(len(run.outputs.get(r.request_id, ())) < r.max_new_tokens for r in served):
            return
        write_table(file, rank_outputs(bench, served, run.outputs), header("profile", seed=seed))

    def _look_back(self, bench: RankBench, deployment: Deployment) -> None:
        """How the host's pace is now, beside the profile's; for readers, no prediction sees it."""
        if monotonic() < self._task.deadline:
            part = self._kept(deployment.label)
            self._changed = round(self._measurer.changed(bench, deployment, part), 4)

    def _line(self) -> dict[str, Any]:
        """What there is to note so far."""
        seconds, parts = (
            {name: round(value, 2) for name, value in taken.items()}
            for taken in (self._seconds, self._parts)
        )
        line = {"label": self._task.label, "served": self._served, **seconds, "start_parts": parts}
        line |= {"blind": self._blind, "changed": self._changed, "notes": self._measurer.notes}
        return line

    def _note(self) -> None:
        line = self._line()
        note_session(self._folder, self._task.label, line)
        print(f"  {line}", flush=True)


def main(num_ranks: int) -> None:
    """Read the task, do it, and leave without waiting for kernels that hang."""
    keep_waiting(num_ranks - 1)
    line = sys.stdin.readline()
    if not line:
        return  # the campaign is over
    task = Task(**json.loads(line))
    try:
        Measuring(task).run()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
