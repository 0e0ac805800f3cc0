"""Run a plan: load models once, replay its requests by the wall clock, write run directories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from codesign import Progress
from codesign.artifacts import sha256
from codesign.candidate import Candidate, ScoredCandidate
from codesign.engine.feed import Feed
from codesign.engine.measured_run import MeasuredRun
from codesign.engine.model import Decoder, load_decoder
from codesign.engine.run import DraftSource, EngineRun, PolicySetup, ServeOptions, run_candidate
from codesign.errors import HardwareError, InputError
from codesign.fit import Fit
from codesign.fit.step_pace import pace_of_run
from codesign.metrics import summarise
from codesign.models import NGRAM, resolve_model
from codesign.models.shape import model_shape
from codesign.models.tokenizer import Tokenizer
from codesign.plan import Plan
from codesign.prompts import BoundRequest, bind_prompts, encode_user_turn, load_prompts
from codesign.records import RunRecords
from codesign.run_directory import read_run, write_run


class Engine(Protocol):
    """Models of a plan on the hardware that serves them."""

    def check(self, candidates: Sequence[Candidate]) -> None:
        """Refuse what this machine cannot run, before anything is loaded.

        Raises:
            HardwareError: If a candidate needs more than this machine has.
        """
        ...

    def serve(
        self,
        candidate: Candidate,
        requests: Sequence[BoundRequest],
        options: ServeOptions,
        *,
        progress: Progress | None = None,
        feed: Feed | None = None,
    ) -> EngineRun:
        """Serve ``requests`` with a candidate; an interrupted run ends with a note.

        With a ``feed`` only those that come through it, as one of several replicas.

        Args:
            candidate: Deployment, policy and batch limit.
            requests: With token ids and arrivals in seconds.
            options: How they are served.
            progress: Called as ``progress("serve", finished, total)``.
            feed: Where requests come from; by default they come when they are due.

        Raises:
            HardwareError: If hardware or another process fails.
        """
        ...


class CpuEngine:
    """The threads of this machine's CPU.

    Args:
        plan: Which models.
        num_workers: CPU cores that may be used.

    Raises:
        InputError: If a model is not there.
    """

    def __init__(self, plan: Plan, *, num_workers: int) -> None:
        self._num_workers = num_workers
        self._target_dir = resolve_model(plan.target)
        self._target: Decoder | None = None
        self._draft: DraftSource | None = None
        if plan.draft:
            self._draft = DraftSource(draft_of(plan), self._target_dir)
        self._local_draft: Decoder | None = None

    def check(self, candidates: Sequence[Candidate]) -> None:
        """See ``Engine.check``."""
        needed = max(candidate.deployment.num_workers for candidate in candidates)
        if needed > self._num_workers:
            raise HardwareError(
                f"the plan needs {needed} CPU cores, found {self._num_workers}. "
                f"Plan again: codesign plan --trace TRACE --workers {self._num_workers}"
            )

    def serve(
        self,
        candidate: Candidate,
        requests: Sequence[BoundRequest],
        options: ServeOptions,
        *,
        progress: Progress | None = None,
        feed: Feed | None = None,
    ) -> EngineRun:
        """See ``Engine.serve``."""
        self._target = self._target or load_decoder(self._target_dir)
        if self._draft is not None and candidate.deployment.draft_workers == 0:
            self._local_draft = self._local_draft or self._draft.load(self._target)
        return run_candidate(
            candidate,
            requests,
            target=self._target,
            draft=self._draft,
            setup=options.policy,
            sampling=options.sampling,
            max_kv_tokens=options.max_kv_tokens,
            serving=options.serving,
            max_waiting=options.max_waiting,
            local_draft=self._local_draft,
            progress=progress,
            feed=feed,
        )


class Replay:
    """A plan's requests, to be served by an engine.

    Args:
        plan: What to run.
        plan_path: Its file, named in the records.
        settings: How the plan is run, where that is not the plan's to say: plain values, noted in
            the records.

    Raises:
        InputError: If the target is not there, or the plan's files have changed.
    """

    def __init__(
        self, plan: Plan, plan_path: Path, *, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.plan = plan
        self.plan_path = plan_path
        self._settings = dict(settings or {})
        self.fit = Fit.load(plan.fit.check())
        self.requests = bound_requests(plan, resolve_model(plan.target))

    def policy(self, candidate: Candidate) -> tuple[PolicySetup, int]:
        """What a candidate's policy is built from, and the KV rows that it may use.

        Raises:
            InputError: If the engines cannot run it.
        """
        deployment, plan = candidate.deployment, self.plan
        if deployment.prefill_workers:
            raise InputError(
                f"{candidate.label} has a pool for prompts, which the engine does not run yet. "
                "Run another: codesign run --plan PLAN --candidate LABEL"
            )
        cost = self.fit.costs.get(deployment.unit.label)
        policy = PolicySetup(
            candidate.speculation,
            cost,
            self.fit.calibration,
            slo_tpot=plan.slo.tpot,
            slo_ttft=plan.slo.ttft,
            confidence=self.fit.acceptance.hit_rate(1),
            answer_tokens=plan.serving.answer_tokens,
        )
        return policy, plan.max_kv_tokens(cost, has_draft=candidate.speculation.has_draft)

    def options(self, candidate: Candidate, *, max_waiting: int | None = None) -> ServeOptions:
        """How an engine serves the plan's requests with a candidate; see ``policy``."""
        policy, max_kv_tokens = self.policy(candidate)
        plan = self.plan
        return ServeOptions(policy, plan.sampling, max_kv_tokens, plan.serving, max_waiting)

    def run(
        self,
        scored: ScoredCandidate,
        engine: Engine,
        directory: Path,
        *,
        max_waiting: int | None = None,
        progress: Progress | None = None,
    ) -> MeasuredRun:
        """Serve the plan's requests with one candidate and write its run directory.

        An interrupted run is written too, with what is finished and a note.

        Args:
            scored: The candidate, and what was predicted for it.
            engine: That serves it.
            directory: Of the run.
            max_waiting: Requests that may wait, None for any; later ones are refused.
            progress: Called as ``progress("serve", finished, total)``.
        """
        options = self.options(scored.candidate, max_waiting=max_waiting)
        run = engine.serve(scored.candidate, self.requests, options, progress=progress)
        return self._write(scored, run, directory)

    def _write(self, scored: ScoredCandidate, run: EngineRun, directory: Path) -> MeasuredRun:
        write_run(
            directory,
            run.records,
            origin="measured",
            summary={
                "label": scored.label,
                "candidate": scored.candidate.to_dict(),
                "metrics": summarise(run.records, self.plan.slo).to_dict(),
                "target": self.plan.target,
                "draft": self.plan.draft,
                "plan": str(self.plan_path),
                "settings": self._settings,
            },
            seed=self.plan.sampling.seed,
            inputs={"plan": self.plan_path},
            outputs=run.outputs,
        )
        return self._measured(scored, run.records, run.outputs, directory)

    def stored(self, scored: ScoredCandidate, directory: Path) -> MeasuredRun | None:
        """The whole run of this plan and candidate, with the same settings, in ``directory``."""
        if not (directory / "run.json").exists():
            return None
        stored = read_run(directory)
        plan_hash = stored.summary.get("inputs", {}).get("plan", {}).get("sha256")
        if stored.summary.get("label") != scored.label or plan_hash != sha256(self.plan_path):
            return None
        told = [stored.summary.get(name) for name in ("target", "draft", "settings")]
        if told != [self.plan.target, self.plan.draft, self._settings]:
            return None
        # Beside one for each refusal: interrupted, or its draft was lost.
        if stored.outputs is None or len(stored.records.notes) > len(stored.records.refused):
            return None
        run = self._measured(scored, stored.records, stored.outputs, directory)
        return run if run.is_complete else None

    def _measured(
        self,
        scored: ScoredCandidate,
        records: RunRecords,
        outputs: dict[int, list[int]],
        directory: Path,
    ) -> MeasuredRun:
        deployment = scored.candidate.deployment
        cost = self.fit.costs.get(deployment.unit.label)
        is_apart = deployment.draft_workers > 0
        pace = pace_of_run(cost, records.rounds, self._settings, is_apart=is_apart)
        metrics = summarise(records, self.plan.slo)
        notes = tuple(records.notes)
        return MeasuredRun(scored, metrics, notes, outputs, directory, records.refused, pace)


def draft_of(plan: Plan) -> Path | str:
    """A plan's draft: a directory, or NGRAM."""
    return plan.draft if plan.draft == NGRAM else resolve_model(plan.draft)


def bound_requests(plan: Plan, target_dir: Path) -> list[BoundRequest]:
    """The plan's requests with the token ids that its seed gives them."""
    tokenizer = Tokenizer(target_dir)
    return bind_prompts(
        plan.requests(),
        load_prompts("run"),
        encode_user_turn(tokenizer),
        seed=plan.seed,
        max_positions=model_shape(target_dir).max_positions,
    )
