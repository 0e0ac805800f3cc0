"""Measure this machine with one pair of models: step times and acceptance, into a profile folder.

The work is a list of parts. Each is written when it is done, so an interrupted profile goes on
where it stopped. The files are described in codesign.fit, which reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from codesign.artifacts import hardware
from codesign.config import Deployment
from codesign.engine.model import Decoder, load_decoder
from codesign.engine.run import NGRAM, DraftSource
from codesign.errors import HardwareError, InputError
from codesign.fit.shipped import shipped_acceptance
from codesign.models import resolve_model
from codesign.models.shape import model_shape
from codesign.models.tokenizer import Tokenizer
from codesign.profiler.bench import SPARE_ROWS, DraftBench, TargetBench
from codesign.profiler.link import link_seconds
from codesign.profiler.neighbour import Neighbour, NeighbourSetup
from codesign.profiler.recorder import record_acceptance
from codesign.profiler.steps import (
    MAX_REQUESTS,
    Effort,
    Group,
    StepShape,
    contexts_within,
    draft_shapes,
    target_shapes,
    time_groups,
)
from codesign.profiler.store import ACCEPTANCE_PART, PartStore, ProfileSettings
from codesign.prompts import BoundRequest, encode_user_turn, every_prompt, load_prompts

OUTPUT_TOKENS = 48  # recorded after each prompt
RECORDED_LENGTHS = (1, 128, 256)  # prompt tokens; no prompt is cut, so 1 is its own length

Progress = Callable[[str, int, int], None]
Tick = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of the profile that is kept once it is done; ``seconds`` is a guess."""

    name: str
    seconds: float
    measure: Callable[[Tick], pd.DataFrame]


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
        HardwareError: If there are fewer CPU cores than workers.
        KeyboardInterrupt: With a message on what was kept.
    """
    cores = hardware()["cores"]
    if settings.workers > cores:
        raise HardwareError(
            f"{settings.workers} workers were asked for, this process may use {cores} CPU cores. "
            f"Fix: codesign profile --workers {cores}"
        )
    store = PartStore(out, settings)
    if resume and (finished := store.finished()) is not None:
        return finished
    store.open(resume=resume)
    measurer = _Measurer(settings)
    meter = _Meter(measurer.parts, progress)
    try:
        for part in measurer.parts:
            if not store.has(part.name):
                store.put(part.name, part.measure(lambda share, part=part: meter(part, share)))
            meter(part, 1.0)
    except KeyboardInterrupt:
        done = sum(store.has(part.name) for part in measurer.parts)
        raise KeyboardInterrupt(
            f"kept {done} of {len(measurer.parts)} parts in {out}. Go on with the same command "
            "and --resume"
        ) from None
    finally:
        measurer.close()
    return store.finish([part.name for part in measurer.parts], measurer.notes)


class _Meter:
    """Turns finished parts into seconds of work, so that the time left can be shown."""

    def __init__(self, parts: list[_Part], progress: Progress | None) -> None:
        self._seconds = {part.name: part.seconds for part in parts}
        self._done = dict.fromkeys(self._seconds, 0.0)
        self._progress = progress

    def __call__(self, part: _Part, share: float) -> None:
        self._done[part.name] = part.seconds * share
        if self._progress is not None:
            done, total = sum(self._done.values()), sum(self._seconds.values())
            self._progress("profile", round(done), round(total))


class _Measurer:
    """Loads the models and knows how to measure each part."""

    def __init__(self, settings: ProfileSettings) -> None:
        self._settings = settings
        target_dir = resolve_model(settings.target)
        draft = settings.draft if settings.draft == NGRAM else resolve_model(settings.draft)
        self._source = DraftSource(draft, target_dir)
        self._target = load_decoder(target_dir)
        self._draft: Decoder | None = self._source.load(self._target)
        positions = model_shape(target_dir).max_positions
        if self._draft is not None:
            positions = min(positions, self._draft.shape.max_positions)
            _check_vocabulary(self._target, self._draft)
        self._contexts = contexts_within(positions, SPARE_ROWS)
        self.notes: list[str] = []
        self._requests = self._bind(target_dir, positions)
        self._neighbour: Neighbour | None = None
        self.parts = self._list_parts()

    def close(self) -> None:
        """End the second process, if there is one."""
        if self._neighbour is not None:
            self._neighbour.close()

    def _bind(self, target_dir: Path, positions: int) -> list[BoundRequest]:
        bound = _recorded_requests(target_dir, is_quick=self._settings.is_quick)
        short = [r for r in bound if len(r.prompt_ids) + OUTPUT_TOKENS <= positions]
        if not short:
            raise InputError(
                f"{self._settings.target} has {positions} positions, fewer than the shortest "
                "prompt needs. Choose another target: codesign models list"
            )
        if len(short) < len(bound):
            missing = len(bound) - len(short)
            self.notes.append(f"{missing} of {len(bound)} prompts do not fit {positions} positions")
        return short

    def _list_parts(self) -> list[_Part]:
        quick = self._settings.is_quick
        workers = self._settings.workers
        whole = Deployment(workers)
        solo = Effort(15.0 if quick else 26.0, 3, 7)
        target = Effort(15.0 if quick else 24.0, 3, 7)
        draft = Effort(5.0 if quick else 8.0, 3, 9)
        parts = [
            _Part(whole.label, solo.seconds, lambda tick: self._whole(whole, solo, tick)),
        ]
        for split in splits(workers):
            name = split.label
            parts += [
                _Part(
                    f"{name}-target",
                    target.seconds + 5.0,
                    lambda tick, split=split: self._target_part(split, target, tick),
                ),
                _Part(
                    f"{name}-draft",
                    draft.seconds,
                    lambda tick, split=split: self._draft_part(split, draft, tick),
                ),
                _Part(f"{name}-link", 4.0, lambda tick, split=split: self._link(split)),
            ]
        return [*parts, _Part(ACCEPTANCE_PART, 14.0, self._acceptance)]

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
        seed = self._settings.sampling.seed
        rows = time_groups(groups, self._seconds_of, effort=effort, seed=seed, tick=tick)
        return pd.DataFrame(list(rows)).assign(deployment=deployment.label)

    def _whole(self, deployment: Deployment, effort: Effort, tick: Tick) -> pd.DataFrame:
        """Both models in turn in one process."""
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
        nothing = {"rows": 0, "requests": 0, "context": 0, "beside": False}
        frame = pd.DataFrame({"seconds": link_seconds(split.draft_workers)})
        return frame.assign(deployment=split.label, op="link", **nothing)

    def _acceptance(self, tick: Tick) -> pd.DataFrame:
        settings = self._settings
        if settings.is_quick:
            shipped = shipped_acceptance(settings.target, settings.draft, settings.sampling)
            if shipped is not None:
                self.notes.append(
                    f"acceptance: {len(shipped):,} tokens that ship with the package, as they do "
                    "not depend on the machine; to record again: codesign profile without --quick"
                )
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


def _recorded_requests(target_dir: Path, *, is_quick: bool) -> list[BoundRequest]:
    """Each prompt of the profile's half as it is, and in a full profile also in longer contexts."""
    return every_prompt(
        load_prompts("profile"),
        encode_user_turn(Tokenizer(target_dir)),
        lengths=RECORDED_LENGTHS[:1] if is_quick else RECORDED_LENGTHS,
        max_new_tokens=OUTPUT_TOKENS,
    )


def _check_vocabulary(target: Decoder, draft: Decoder) -> None:
    if target.shape.vocab != draft.shape.vocab:
        raise InputError(
            f"the draft has {draft.shape.vocab:,} tokens, its target {target.shape.vocab:,}: it "
            "was made for another target. Choose another: codesign models list, or --draft ngram"
        )
