"""What a profile measures on rank groups: each visit of a deployment is a part, so is acceptance.

Ranks are started anew for each part, as an 8B's steps took 5 % less in a second start. Of a large
target the host is a small share, and starting takes longer than measuring: it is visited once.
Models that are inflated are made on the ranks, as in a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter

import numpy as np
import pandas as pd
import torch

from codesign.config import Deployment, parse_deployment
from codesign.engine.gpu.launch import check_on_cpu
from codesign.engine.gpu.rank_engine import DTYPES
from codesign.engine.gpu.rank_setup import RankSetup
from codesign.engine.partner import DraftLostError, TargetLostError
from codesign.engine.run import PolicySetup
from codesign.errors import HardwareError, counted
from codesign.fit.round_costs import PACE
from codesign.models import NGRAM, resolve_model
from codesign.models.shape import model_shape
from codesign.policy.speculation import SpeculationSpec
from codesign.profiler.bench import SPARE_ROWS
from codesign.profiler.deciding import deciding_timings
from codesign.profiler.grids import (
    RANK_CONTEXTS,
    RANK_GRID,
    chain_shapes,
    contexts_within,
    draft_shapes,
    target_shapes,
)
from codesign.profiler.host_pace import MATTERS, MORE, HostPace
from codesign.profiler.link import single_timings
from codesign.profiler.rank_acceptance import num_rows, recorded
from codesign.profiler.rank_bench import PLAIN_STEP, RankBench, rank_bench
from codesign.profiler.rank_draft import lead_draft
from codesign.profiler.rank_joins import joining_timings
from codesign.profiler.rank_rounds import batch_timings, loop_timings, stream_timings
from codesign.profiler.rank_steps import NUM_SLOTS
from codesign.profiler.recorder import (
    TOP_K,
    pair_positions,
    recorded_requests,
    shipped_frame,
)
from codesign.profiler.session import splits
from codesign.profiler.steadiness import (
    CHECK,
    TOLERANCE,
    change,
    small_steps,
    without_prompts,
)
from codesign.profiler.steps import Effort, Group, prompts_last, time_groups
from codesign.profiler.store import (
    ACCEPTANCE_PART,
    Part,
    ProfileSettings,
    Tick,
    in_turns,
    unseen,
)

MAX_ROWS = 32  # of a request in a verification
# Wide enough for every expansion that is timed, and for the ranks that are recorded.
_WIDEST = SpeculationSpec(kind="tree", rows=TOP_K + 1, width=TOP_K, expansions=1)
_START = 15.0  # a guess: seconds until ranks are up
_FULL, _QUICK = Effort(18.0, 3, 15), Effort(6.0, 3, 7)
_VISITS, _LARGE = 2, 30e9  # of each deployment, but one with a target of so many parameters


class RankMeasurer:
    """Knows how to measure each deployment and the acceptance.

    Args:
        settings: What to measure.
        visits: Starts of each deployment's ranks; ``most_visits`` by default.

    Attributes:
        deployments: To measure.
        parts: Pieces of the profile.
        notes: What a reader of the profile must know.
        most_visits: Starts that pay with this target.

    Raises:
        InputError: If a model is missing or the pair does not match.
        HardwareError: If there are fewer GPUs than a deployment needs.
    """

    def __init__(self, settings: ProfileSettings, *, visits: int | None = None) -> None:
        self._settings = settings
        self._order = np.random.default_rng(settings.sampling.seed)
        self._target = resolve_model(settings.target)
        self._draft = NGRAM if settings.draft == NGRAM else resolve_model(settings.draft)
        positions = pair_positions(self._target, self._draft)
        self._contexts = contexts_within(positions, SPARE_ROWS, RANK_CONTEXTS)
        self.deployments = _deployments(settings)
        _check_ranks(settings, self.deployments)
        self._requests, self.notes = recorded_requests(
            self._target, positions, is_quick=settings.is_quick
        )
        self.most_visits = 1 if model_shape(self._target).parameters >= _LARGE else _VISITS
        visits = visits or self.most_visits
        self._effort = (_QUICK if settings.is_quick else _FULL).of_each(visits)
        parts = [
            Part(
                deployment.label,
                _START + self._effort.seconds,
                lambda tick, deployment=deployment: self._deployment(deployment, tick),
            )
            for deployment in self.deployments
        ]
        acceptance = Part(ACCEPTANCE_PART, 2 * _START, self._acceptance)
        self.parts = in_turns(parts, [acceptance], visits)

    def close(self) -> None:
        """Nothing stays between parts."""

    @contextmanager
    def bench(self, deployment: Deployment, num_slots: int = NUM_SLOTS) -> Iterator[RankBench]:
        """The ranks of a deployment, running, with errors that say what to do.

        Args:
            deployment: Whose ranks.
            num_slots: Slabs of KV rows: requests at once, and one for a prompt.

        Raises:
            HardwareError: If the models do not fit, or a rank is lost.
        """
        try:
            with rank_bench(replace(self._setup(deployment), num_slots=num_slots)) as bench:
                yield bench
        except torch.cuda.OutOfMemoryError as error:
            raise HardwareError(
                f"{deployment.label} does not fit on these GPUs. Leave it out: codesign profile "
                "--device cuda --deployments LABEL,... --out profile"
            ) from error
        except (DraftLostError, TargetLostError) as error:
            raise HardwareError(
                f"{deployment.label}: {error}. What was measured before is kept; go on with the "
                "same command and --resume"
            ) from error

    def _setup(self, deployment: Deployment) -> RankSetup:
        device = self._settings.device.removesuffix("-ranks")
        longest = max(self._contexts[-1], *map(num_rows, self._requests))
        return RankSetup(
            target=self._target,
            draft=self._draft,
            target_ranks=deployment.target_workers,
            draft_ranks=deployment.draft_workers,
            policy=PolicySetup(_WIDEST),
            sampling=self._settings.sampling,
            num_slots=NUM_SLOTS,
            target_tokens=longest + SPARE_ROWS,
            draft_tokens=longest + SPARE_ROWS,
            max_rows=MAX_ROWS,
            device=device,
            dtype=DTYPES[device],
            lead_draft=lead_draft,
        )

    def _deployment(self, deployment: Deployment, tick: Tick) -> pd.DataFrame:
        with self.bench(deployment) as bench:
            return self.steadied(bench, deployment, self.time(bench, deployment, tick))

    def time(self, bench: RankBench, deployment: Deployment, tick: Tick) -> pd.DataFrame:
        """The part of a deployment, on its ranks."""
        groups = self._groups(bench, is_split=deployment.draft_workers > 0)
        frames = [*self._watched(bench, deployment, groups, tick), joining_timings(bench)]
        frames.append(deciding_timings())
        nothing = {"requests": 0, "context": 0, "beside": False, "seconds": 0.0}
        rooms = [{"op": op, "rows": rows, **nothing} for op, rows in bench.kv_rooms().items()]
        if rooms:
            frames.append(pd.DataFrame(rooms))
        return pd.concat(frames, ignore_index=True).assign(deployment=deployment.label)

    def steadied(
        self, bench: RankBench, deployment: Deployment, part: pd.DataFrame
    ) -> pd.DataFrame:
        """A part after another look: its steps are timed anew if the host was slow meanwhile."""
        changed = self.changed(bench, deployment, part)
        if abs(changed) > TOLERANCE:
            self.notes.append(_pace_note(deployment.label, changed))
        if changed >= -TOLERANCE:
            return part
        groups = without_prompts(self._groups(bench, is_split=deployment.draft_workers > 0))
        anew = pd.concat(self._watched(bench, deployment, groups, unseen), ignore_index=True)
        kept = part.loc[~part["op"].isin(sorted(set(anew["op"])))]
        return pd.concat([anew.assign(deployment=deployment.label), kept], ignore_index=True)

    def changed(self, bench: RankBench, deployment: Deployment, part: pd.DataFrame) -> float:
        """By how much small steps take longer now than in a part, relative to it."""
        groups = small_steps(self._groups(bench, is_split=deployment.draft_workers > 0))
        return change(part, self._timed(bench, groups, CHECK, unseen))

    def _watched(
        self, bench: RankBench, deployment: Deployment, groups: Sequence[Group], tick: Tick
    ) -> list[pd.DataFrame]:
        """Steps, what lies between them at the host's usual pace, and all samples of the pace."""
        least = MATTERS * bench.seconds(PLAIN_STEP)
        host = HostPace(bench.pace, lambda: _between_steps(bench), least)
        start = perf_counter()
        host.take()
        frames = [self._timed(bench, host.watched(groups), self._effort, tick)]
        if host.is_unsettled:
            more = replace(MORE, seconds=MORE.seconds * (perf_counter() - start))
            frames.append(self._timed(bench, host.watched(without_prompts(groups)), more, unseen))
        host.settle()
        if note := host.note():
            self.notes.append(f"{deployment.label}: {note}")
        return [*frames, *host.kept(), single_timings(PACE, host.samples).assign(requests=1)]

    def _timed(
        self, bench: RankBench, groups: Sequence[Group], effort: Effort, tick: Tick
    ) -> pd.DataFrame:
        rows = time_groups(groups, bench.seconds, effort=effort, seed=self._order, tick=tick)
        return pd.DataFrame(list(rows))

    def _groups(self, bench: RankBench, *, is_split: bool) -> list[Group]:
        lean, contexts = self._settings.is_quick, self._contexts
        target = target_shapes(contexts, beside=False, lean=lean, grid=RANK_GRID)
        draft = draft_shapes(contexts, few=False, lean=lean, grid=RANK_GRID)
        if not is_split:
            return prompts_last([Group((*target, *draft), False, lambda: None)])
        both = target_shapes(contexts, beside=True, lean=True, grid=RANK_GRID)
        few = draft_shapes(contexts, few=True, lean=True, grid=RANK_GRID)
        alone = (Group(target, False, bench.rest), Group(few, False, bench.rest))
        draft += chain_shapes(contexts)  # where they take turns, rounds are served that have some
        beside = Group(both, True, bench.keep_drafting), Group(draft, True, bench.keep_verifying)
        return prompts_last([alone[0], *beside, alone[1]])

    def _acceptance(self, tick: Tick) -> pd.DataFrame:
        """Decode on all workers, then let the draft rank what was said."""
        shipped = shipped_frame(self._settings, self.notes)
        if shipped is not None:
            return shipped
        with self.bench(Deployment(max(d.num_workers for d in self.deployments))) as bench:
            return self.record(bench, tick)

    def record(self, bench: RankBench, tick: Tick) -> pd.DataFrame:
        """The part of acceptance, on ranks that hold both models."""
        return recorded(bench, self._requests, self._settings.sampling, tick)


def _between_steps(bench: RankBench) -> list[pd.DataFrame]:
    """Whatever a round has beside its steps."""
    return [*loop_timings(bench), *stream_timings(bench), *batch_timings(bench)]


def _pace_note(label: str, changed: float) -> str:
    if changed < 0:
        what = f"{-changed:.0%} less when timed again, and these times are used"
    else:
        what = f"{changed:.0%} more when timed again; if the host is not slow now, profile again"
    return f"{label}: the speed of the host varies: small steps took {what}"


def _deployments(settings: ProfileSettings) -> list[Deployment]:
    if not settings.deployments:
        return [Deployment(settings.workers), *splits(settings.workers)]
    return [parse_deployment(label) for label in settings.deployments]


def _check_ranks(settings: ProfileSettings, deployments: Sequence[Deployment]) -> None:
    needed = max(deployment.num_workers for deployment in deployments)
    if settings.device == "cpu-ranks":
        fix = "Fix: codesign profile --device cpu-ranks --workers 4 --out profile"
        check_on_cpu(needed, fix)
    if settings.device != "cuda" or needed <= (found := torch.cuda.device_count()):
        return
    fix = f"Fix: codesign profile --device cuda --workers {found} --out profile"
    if not found:
        fix = "Try it on this machine's CPU: codesign profile --device cpu-ranks --out profile"
    raise HardwareError(f"the profile needs {counted(needed, 'GPU')}, found {found}. {fix}")
