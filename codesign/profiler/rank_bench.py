"""Times steps on rank groups: this process leads the target, another one the draft if it is split.

A draft on ranks of its own is led by ``rank_draft.lead_draft``. What is served on the same ranks:
``rank_serving``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from codesign.engine.gpu.rank_group import GroupLeader
from codesign.engine.gpu.rank_setup import RankSetup
from codesign.engine.gpu.ranks import DRAFT_MODEL, TARGET_MODEL, Rank
from codesign.engine.gpu.run import load_leader, started
from codesign.profiler.draft_steps import DraftSteps
from codesign.profiler.rank_draft import Link, spin
from codesign.profiler.rank_serving import RankServing
from codesign.profiler.rank_steps import RankTarget, draft_steps, kv_room
from codesign.profiler.steps import StepShape

TARGET_OPS = ("target", "prefill")
PLAIN_STEP = StepShape("target", 1, 1, 64)
BUSY_TARGET = StepShape("target", 2, 4, 64)  # a round as busy as one stream's, or two's
_FEW_ROWS, _LONGEST_PAUSE = 16, 0.2  # rows up to which reading weights takes longest; seconds


class RankBench(RankServing):
    """Times steps of one deployment, and serves on its ranks; see ``rank_bench``."""

    def __init__(
        self, this: Rank, target: GroupLeader, draft: GroupLeader | None, link: Link | None
    ) -> None:
        super().__init__(this.setup, target, draft, link)
        self.start_seconds = this.start_seconds
        self._this = this
        self.target_steps = RankTarget(target, this.setup)
        self._draft_steps = None if link else draft_steps(this.setup, draft)
        if link is not None:
            link.wait()
        self._is_target_busy = False

    def seconds(self, shape: StepShape) -> float:
        """Time one step, and let the GPUs rest for as long if it is a heavy one.

        One heavy step after another draws more power than a GPU may, so that its clock falls by a
        tenth. Rounds have a draft, or lighter steps, between heavy ones.
        """
        found = self._seconds(shape)
        is_heavy = shape.op == "prefill" or shape.requests * shape.rows > _FEW_ROWS
        if is_heavy and self.setup.device == "cuda":
            spin(min(2.0 * found, _LONGEST_PAUSE))  # it ran twice
        return found

    def _seconds(self, shape: StepShape) -> float:
        """The second of two, but for prompts.

        In a round the host has just run the same code, and the first of two costs it up to 40 us a
        row more. The draft's comes after one of the target.
        """
        if self._link is not None and shape.op not in TARGET_OPS:
            return self._link.step_seconds(shape, self._busy_step if self._is_target_busy else None)
        steps = self.target_steps if shape.op in TARGET_OPS else self._draft_steps
        assert steps is not None
        if "prefill" not in shape.op:
            steps.seconds(shape)
        if isinstance(steps, DraftSteps):
            return steps.seconds(shape, before=self._busy_step)
        return steps.seconds(shape)

    def rest(self) -> None:
        """Time each side alone from now on."""
        self._is_target_busy = False
        super().rest()

    def keep_drafting(self) -> None:
        """Time the target beside a draft that never pauses."""
        self.rest()
        self._split.keep()

    def keep_verifying(self) -> None:
        """Time the draft beside a target that never pauses."""
        self.rest()
        self._is_target_busy = True

    def kv_rooms(self) -> dict[str, int]:
        """KV rows that fit with the draft and without it; empty where it is not known."""
        shared, plain = kv_room(self._this)
        if shared is None or plain is None:
            return {}
        if self._link is not None:
            beside = self._link.kv_room()
            shared = shared if beside is None else min(shared, beside)
        return {"kv_tokens": shared, "plain_kv_tokens": plain}

    def close(self) -> None:
        """Let the draft's leader go."""
        if self._link is not None:
            self._link.let_rest()
            self._link.end()

    @property
    def _split(self) -> Link:
        assert self._link is not None, "only a split has two sides"
        return self._link

    def _busy_step(self) -> None:
        self.target_steps.seconds(BUSY_TARGET)


@contextmanager
def rank_bench(setup: RankSetup) -> Iterator[RankBench]:
    """Start the ranks of a deployment, and end them.

    Raises:
        HardwareError: If there are fewer GPUs than ranks, or a rank does not start.
    """
    gc.collect()  # the weights of an earlier deployment
    if setup.device == "cuda":
        torch.cuda.empty_cache()
    with started(setup) as (ranks, setup):
        this = load_leader(setup, ranks)
        followers = this.group_mailbox(draft=False, watch=ranks.of_target)
        target = this.leader(TARGET_MODEL, followers, ranks.of_target)
        draft = link = None
        if setup.draft_ranks:
            assert setup.folder is not None, "ranks of a profile are on one host"
            link = Link(*this.pair_mailboxes(ranks.of_draft), setup.folder, ranks.of_draft)
        elif setup.has_draft_model:
            draft = this.leader(DRAFT_MODEL, followers, ranks.of_target)
        bench = RankBench(this, target, draft, link)
        yield bench
        bench.close()
        target.end()
        this.leave()
