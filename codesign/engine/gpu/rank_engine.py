"""A plan's models on rank groups: a process a GPU, started here or by torchrun."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from codesign import Progress
from codesign.candidate import Candidate
from codesign.engine.feed import Feed
from codesign.engine.gpu.launch import TorchrunProcess, check_on_cpu
from codesign.engine.gpu.rank_setup import RankSetup, rank_setup
from codesign.engine.gpu.ranks import serve_rank
from codesign.engine.gpu.run import run_on_ranks
from codesign.engine.gpu.watch import is_broken_collective
from codesign.engine.partner import TargetLostError
from codesign.engine.replay import Replay, draft_of
from codesign.engine.run import EngineRun, ServeOptions
from codesign.errors import HardwareError, counted
from codesign.kernels.symmetric import PeerLostError
from codesign.models import NGRAM, resolve_model
from codesign.models.shape import model_shape
from codesign.plan import Plan
from codesign.prompts import BoundRequest

DTYPES = {"cuda": "bfloat16", "cpu": "float32"}


class RankEngine:
    """Serves a plan's candidates, one after another; an ``Engine`` for ``Replay``.

    Args:
        plan: Which models.
        device: "cuda", or "cpu": the same code over gloo, a process a worker.
        padded_rows: Fewest rows of a target's forward; at equal rows runs round alike.

    Attributes:
        process: This process, if torchrun started it.

    Raises:
        InputError: If a model is not there, or is of a kind that is not supported.
    """

    def __init__(self, plan: Plan, *, device: str, padded_rows: int = 8) -> None:
        self._target = resolve_model(plan.target)
        self._draft: Path | str | None = draft_of(plan) if plan.draft else None
        for directory in (self._target, self._draft):  # ranks would say it one after another
            if directory is not None and directory != NGRAM:
                model_shape(Path(directory))
        self._device = device
        self._padded_rows = padded_rows
        self._number = 0
        self.process = TorchrunProcess.this()

    def check(self, candidates: Sequence[Candidate]) -> None:
        """See ``Engine.check``.

        Raises:
            HardwareError: If there are fewer GPUs, or processes of torchrun, than ranks.
        """
        needed = max(candidate.deployment.num_workers for candidate in candidates)
        if self.process is not None and any(c.deployment.replicas > 1 for c in candidates):
            raise HardwareError(
                "replicas start their own ranks on one host. Start without torchrun: codesign "
                "run --plan PLAN"
            )
        if self.process is not None and self.process.count < needed:
            raise HardwareError(
                f"the plan needs {needed} ranks, torchrun started {self.process.count}. "
                f"Start again: torchrun --nproc-per-node {needed} -m codesign run --plan PLAN"
            )
        if self._device == "cpu":
            if self.process is None:
                check_on_cpu(needed, "Plan again: codesign plan --trace TRACE --workers 4")
            return
        found = torch.cuda.device_count()
        here = needed if self.process is None else int(os.environ["LOCAL_WORLD_SIZE"])
        if found < here:
            fix = f"Plan again: codesign plan --trace TRACE --workers {found}"
            if not found:
                fix = "Try it on this machine's CPU: codesign run --plan PLAN --device cpu-ranks"
            raise HardwareError(
                f"the plan needs {counted(here, 'GPU')} on this machine, found {found}. {fix}"
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
        setup = self._setup(candidate, requests, options)
        try:
            return run_on_ranks(
                setup,
                candidate,
                requests,
                max_kv_tokens=options.max_kv_tokens,
                serving=options.serving,
                max_waiting=options.max_waiting,
                progress=progress,
                feed=feed,
            )
        except torch.cuda.OutOfMemoryError as error:
            raise HardwareError(
                f"{candidate.label} does not fit on these GPUs. Plan with more of them, or with "
                "fewer KV rows: codesign plan --trace TRACE --max-kv-tokens N"
            ) from error

    def follow(self, replay: Replay, candidates: Sequence[Candidate]) -> None:
        """Be another of torchrun's processes while its first one runs the same candidates.

        Raises:
            TargetLostError: If the leader is lost.
            DraftLostError: If this process leads the draft and loses a rank of it.
        """
        assert self.process is not None, "only processes of torchrun follow"
        for candidate in candidates:
            setup = self._setup(candidate, replay.requests, replay.options(candidate))
            rank = self.process.rank(setup)
            if rank is None:
                continue
            try:
                serve_rank(setup, rank)
            except (RuntimeError, PeerLostError) as error:
                if not is_broken_collective(error):
                    raise
                raise TargetLostError(f"rank {rank} lost the others of its group") from error

    def _setup(
        self, candidate: Candidate, requests: Sequence[BoundRequest], options: ServeOptions
    ) -> RankSetup:
        setup = rank_setup(
            candidate,
            requests,
            target=self._target,
            draft=self._draft,
            policy=options.policy,
            sampling=options.sampling,
            max_kv_tokens=options.max_kv_tokens,
            serving=options.serving,
            device=self._device,
            dtype=DTYPES[self._device],
            smallest_bucket=self._padded_rows,
        )
        self._number += 1
        return replace(setup, number=self._number)
