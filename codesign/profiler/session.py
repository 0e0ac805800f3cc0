"""Measure this machine with one pair of models: step times and acceptance, into a profile folder.

The work is a list of parts. Each is written when it is done, so an interrupted profile goes on
where it stopped. Deployments take turns, and each is visited several times. The files are described
in codesign.fit, which reads them.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
import torch

from codesign import Progress
from codesign.artifacts.machine import check_cores, hardware
from codesign.config import Deployment
from codesign.engine.model import Decoder, load_decoder
from codesign.engine.run import DraftSource
from codesign.models import NGRAM, resolve_model
from codesign.profiler.bench import SPARE_ROWS, DraftBench, TargetBench
from codesign.profiler.grids import MAX_REQUESTS, contexts_within, draft_shapes, target_shapes
from codesign.profiler.link import link_seconds, single_timings
from codesign.profiler.neighbour import Neighbour, NeighbourSetup
from codesign.profiler.recorder import (
    pair_positions,
    record_acceptance,
    recorded_requests,
    shipped_frame,
)
from codesign.profiler.steps import Effort, Group, StepShape, time_groups
from codesign.profiler.store import (
    ACCEPTANCE_PART,
    Part,
    PartStore,
    ProfileSettings,
    Tick,
    in_turns,
)

_VISITS = 3  # of each deployment; on a slow host one pass each


def make_profile(
    settings: ProfileSettings,
    out: Path,
    *,
    resume: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure, and write the profile into ``out``.

    Args:
        settings: What to measure.
        out: Folder of the profile; what an earlier profile left there is replaced.
        resume: Keep the parts that an interrupted profile with the same settings has measured.
        progress: Called as ``progress("profile", seconds of work done, seconds in all)``.

    Returns:
        The payload of profile.json.

    Raises:
        InputError: If a model is missing, the pair does not match, or the parts to resume from
            were measured with other settings.
        HardwareError: If there are fewer CPU cores, or GPUs, than workers.
        KeyboardInterrupt: With a message on what was kept.
    """
    if settings.device == "cpu":
        cores = hardware()["cores"]
        fix = f"Fix: codesign profile --workers {cores} --out profile"
        check_cores(settings.workers, fix)
    store = PartStore(out, settings)
    if resume and (finished := store.finished()) is not None:
        return finished
    store.open(resume=resume)
    measurer = _measurer(settings)
    meter = _Meter(measurer.parts, progress)
    try:
        for part in measurer.parts:
            if not store.has(part.name):
                store.put(part.name, part.measure(lambda share, part=part: meter(part, share)))
            meter(part, 1.0)
    except KeyboardInterrupt:
        done = sum(store.has(part.name) for part in measurer.parts)
        if not done:
            raise KeyboardInterrupt("no part was measured yet, nothing is kept") from None
        raise KeyboardInterrupt(
            f"kept {done} of {len(measurer.parts)} parts in {out}. Go on with the same command "
            "and --resume"
        ) from None
    finally:
        measurer.close()
    return store.finish([part.name for part in measurer.parts], measurer.notes)


def _measurer(settings: ProfileSettings) -> Measurer:
    if settings.device != "cpu":
        from codesign.profiler.rank_parts import RankMeasurer

        return RankMeasurer(settings)
    return _CpuMeasurer(settings)


class Measurer(Protocol):
    """Knows how to measure each part; ``notes`` are complete when all parts are."""

    parts: list[Part]
    notes: list[str]

    def close(self) -> None:
        """End what still runs."""
        ...


class _Meter:
    """Turns finished parts into seconds of work, so that the time left can be shown."""

    def __init__(self, parts: list[Part], progress: Progress | None) -> None:
        self._seconds = {part.name: part.seconds for part in parts}
        self._done = dict.fromkeys(self._seconds, 0.0)
        self._progress = progress

    def __call__(self, part: Part, share: float) -> None:
        self._done[part.name] = part.seconds * share
        if self._progress is not None:
            done, total = sum(self._done.values()), sum(self._seconds.values())
            self._progress("profile", round(done), round(total))


class _CpuMeasurer:
    """Loads the models and measures on threads of this machine's CPU."""

    def __init__(self, settings: ProfileSettings) -> None:
        self._settings = settings
        self._order = np.random.default_rng(settings.sampling.seed)
        target_dir = resolve_model(settings.target)
        draft = settings.draft if settings.draft == NGRAM else resolve_model(settings.draft)
        positions = pair_positions(target_dir, draft)
        self._source = DraftSource(draft, target_dir)
        self._target = load_decoder(target_dir)
        self._draft: Decoder | None = self._source.load(self._target)
        self._contexts = contexts_within(positions, SPARE_ROWS)
        self._requests, self.notes = recorded_requests(
            target_dir, positions, is_quick=settings.is_quick
        )
        self._neighbour: Neighbour | None = None
        self.parts = self._list_parts()

    def close(self) -> None:
        """End the second process, if there is one."""
        if self._neighbour is not None:
            self._neighbour.close()
            self._neighbour = None

    def _list_parts(self) -> list[Part]:
        quick = self._settings.is_quick
        workers = self._settings.workers
        whole = Deployment(workers)
        solo = Effort(15.0 if quick else 26.0, 3, 7).of_each(_VISITS)
        target = Effort(15.0 if quick else 24.0, 3, 7).of_each(_VISITS)
        draft = Effort(5.0 if quick else 8.0, 3, 9).of_each(_VISITS)
        once = [Part(ACCEPTANCE_PART, 14.0 if quick else 60.0, self._acceptance)]
        parts = [
            Part(whole.label, solo.seconds, lambda tick: self._whole(whole, solo, tick)),
        ]
        for split in splits(workers):
            name = split.label
            parts += [
                Part(
                    f"{name}-target",
                    target.seconds + 5.0,
                    lambda tick, split=split: self._target_part(split, target, tick),
                ),
                Part(
                    f"{name}-draft",
                    draft.seconds,
                    lambda tick, split=split: self._draft_part(split, draft, tick),
                ),
            ]
            once.append(Part(f"{name}-link", 4.0, lambda tick, split=split: self._link(split)))
        return in_turns(parts, once, _VISITS)

    @cached_property
    def _target_bench(self) -> TargetBench:
        return TargetBench(
            self._target,
            sampling=self._settings.sampling,
            num_requests=MAX_REQUESTS,
            max_context=self._contexts[-1],
        )

    @cached_property
    def _draft_bench(self) -> DraftBench:
        return DraftBench(self._draft, num_requests=MAX_REQUESTS, max_context=self._contexts[-1])

    def _seconds_of(self, shape: StepShape) -> float:
        bench = self._target_bench if shape.op in ("target", "prefill") else self._draft_bench
        return bench.seconds(shape)

    def _time(
        self, deployment: Deployment, groups: list[Group], effort: Effort, tick: Tick
    ) -> pd.DataFrame:
        rows = time_groups(groups, self._seconds_of, effort=effort, seed=self._order, tick=tick)
        return pd.DataFrame(list(rows)).assign(deployment=deployment.label)

    def _whole(self, deployment: Deployment, effort: Effort, tick: Tick) -> pd.DataFrame:
        """Both models in turn in one process; each visit's splits start another one anew."""
        self.close()
        torch.set_num_threads(deployment.target_workers)
        lean = self._settings.is_quick
        shapes = target_shapes(self._contexts, beside=False, lean=lean)
        shapes += draft_shapes(self._contexts, few=False, lean=lean)
        return self._time(deployment, [Group(shapes, False, lambda: None)], effort, tick)

    def _target_part(self, split: Deployment, effort: Effort, tick: Tick) -> pd.DataFrame:
        """The target with its threads, alone and beside a process that keeps drafting."""
        neighbour = self._wake_neighbour()
        torch.set_num_threads(split.target_workers)
        alone = target_shapes(self._contexts, beside=False, lean=True)
        both = target_shapes(self._contexts, beside=True, lean=True)
        groups = [
            Group(alone, False, neighbour.rest),
            Group(both, True, lambda: neighbour.keep("draft", num_threads=split.draft_workers)),
        ]
        frame = self._time(split, groups, effort, tick)
        neighbour.rest()
        return frame

    def _draft_part(self, split: Deployment, effort: Effort, tick: Tick) -> pd.DataFrame:
        """The draft with its threads, beside a process that keeps verifying, and alone."""
        neighbour = self._wake_neighbour()
        torch.set_num_threads(split.draft_workers)
        lean = self._settings.is_quick
        both = draft_shapes(self._contexts, few=False, lean=lean)
        alone = draft_shapes(self._contexts, few=True, lean=lean)
        groups = [
            Group(both, True, lambda: neighbour.keep("target", num_threads=split.target_workers)),
            Group(alone, False, neighbour.rest),
        ]
        frame = self._time(split, groups, effort, tick)
        neighbour.rest()
        return frame

    def _wake_neighbour(self) -> Neighbour:
        if self._neighbour is None:
            setup = NeighbourSetup(
                self._source.target, self._source, self._settings.sampling, self._contexts[:2][-1]
            )
            self._neighbour = Neighbour(setup)
        return self._neighbour

    def _link(self, split: Deployment) -> pd.DataFrame:
        seconds = link_seconds(split.draft_workers)
        return single_timings("link", seconds).assign(deployment=split.label)

    def _acceptance(self, tick: Tick) -> pd.DataFrame:
        shipped = shipped_frame(self._settings, self.notes)
        if shipped is not None:
            return shipped
        return record_acceptance(
            self._requests,
            target=self._target,
            draft=self._draft,
            sampling=self._settings.sampling,
            num_workers=self._settings.workers,
            progress=lambda stage, done, total: tick(done / total),
        )


def splits(workers: int) -> list[Deployment]:
    """Ways to give target and draft workers of their own: all up to 4, else powers of two."""
    return [
        Deployment(workers - draft, draft)
        for draft in range(1, workers)
        if workers <= 4 or draft & (draft - 1) == 0
    ]
