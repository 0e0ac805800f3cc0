"""One rank of a run: join the others, load this rank's models, serve or follow.

The same function runs in the target leader's process, in ranks that it starts itself on one host,
and in ranks that torchrun starts on several.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from codesign.engine.checkpoint import (
    is_shipped_draft,
    open_draft,
    open_rank,
    open_reader,
    read_embedding,
)
from codesign.engine.draft_worker import DraftWorker
from codesign.engine.drafter import Drafter, NgramDrafter
from codesign.engine.gpu.buckets import (
    ahead_buckets,
    draft_buckets,
    next_buckets,
    prompt_buckets,
    target_buckets,
)
from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.group_drafter import GroupDrafter
from codesign.engine.gpu.groups import join, select_device, tensor_groups
from codesign.engine.gpu.heads import DraftHead, StepHead, TargetHead
from codesign.engine.gpu.link import serve_verdicts, verdict_mailbox_words
from codesign.engine.gpu.mailbox import (
    GlooMailbox,
    Mailbox,
    SharedMailbox,
    shared_memory_is_ordered,
)
from codesign.engine.gpu.model_rank import ModelRank
from codesign.engine.gpu.quick_core import QuickCore, core_beside
from codesign.engine.gpu.rank_group import GroupLeader, follow
from codesign.engine.gpu.rank_setup import RankSetup
from codesign.engine.gpu.row_sampling import RowTargetHead
from codesign.engine.gpu.slabs import Slabs
from codesign.engine.gpu.step_rows import (
    BUCKETS,
    HEADER,
    MAX_PATH,
    max_step_words,
)
from codesign.engine.gpu.watch import Watch
from codesign.engine.partner import DraftLostError, TargetLostError
from codesign.engine.rank_weights import RankWeights
from codesign.errors import HardwareError

TARGET_MODEL, DRAFT_MODEL = 0, 1
SPARE_SPIN, SHARED_SPIN = 0.05, 0.0005  # seconds


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a run, with its models loaded.

    Attributes:
        setup: The run.
        rank: Global number.
        models: Its part of each model, by TARGET_MODEL and DRAFT_MODEL.
        leaders: What this rank leads.
        weight_bytes: GPU memory that each model's weights take here; 0 on a CPU.
        start_seconds: What the start took, by part.
    """

    setup: RankSetup
    rank: int
    models: dict[int, ModelRank]
    leaders: list[GroupLeader] = field(default_factory=list)
    weight_bytes: dict[int, int] = field(default_factory=dict)
    start_seconds: dict[str, float] = field(default_factory=dict)

    def mailbox(
        self, name: str, writer: int, readers: range, max_words: int, watch: Watch | None
    ) -> Mailbox:
        """This rank's end of a mailbox; every end must be made, in the same order."""
        folder = self.setup.folder
        if folder is None or not shared_memory_is_ordered():
            return GlooMailbox(writer=writer, readers=tuple(readers), watch=watch)
        reader = None if self.rank == writer else readers.index(self.rank)
        crowded = (os.cpu_count() or 1) <= 2 * self.setup.num_ranks
        return SharedMailbox(
            folder / name,
            max_words=max_words,
            num_readers=len(readers),
            reader=reader,
            spin=SHARED_SPIN if crowded else SPARE_SPIN,
            watch=watch,
        )

    def leader(self, model: int, followers: Mailbox | None, watch: Watch | None) -> GroupLeader:
        """Lead one of this rank's models."""
        leader = GroupLeader(self.models[model], followers, model=model, watch=watch)
        self.leaders.append(leader)
        return leader

    def group_mailbox(self, *, draft: bool, watch: Watch | None) -> Mailbox | None:
        """From the leader of this rank's group to its followers; None in a group of one."""
        ranks = self.setup.group_ranks(draft=draft)
        if len(ranks) == 1:
            return None
        tokens = max(self.setup.target_tokens, self.setup.draft_tokens)
        most = HEADER + max(tokens, self.setup.page_words)
        words = max(max_step_words(self._max_moves), most)
        name = "draft-group" if draft else "target-group"
        return self.mailbox(name, ranks[0], ranks[1:], words, watch)

    def pair_mailboxes(self, watch: Watch | None) -> tuple[Mailbox, Mailbox]:
        """Verdicts and candidates, for the leaders of target and draft."""
        setup, limits = self.setup, self.setup.limits
        to_draft = verdict_mailbox_words(limits, setup.draft_tokens)
        target, draft = range(setup.leader, setup.leader + 1), range(1)
        verdicts = self.mailbox("verdicts", target[0], draft, to_draft, watch)
        candidates = self.mailbox("candidates", 0, target, limits.candidate_words, watch)
        return verdicts, candidates

    def leave(self) -> None:
        """Part from the other ranks, unless one of them was lost within a step."""
        if any(leader.is_in_step for leader in self.leaders):
            return
        try:
            for leader in self.leaders:
                leader.settle()
        except HardwareError:  # lost in a step whose answer was not awaited
            return
        for model in self.models.values():
            model.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def _max_moves(self) -> int:
        return self.setup.num_slots * MAX_PATH


def load_weights(setup: RankSetup, rank: int, device: torch.device) -> dict[int, RankWeights]:
    """Open this rank's part of each of its models."""
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[setup.dtype]
    weights: dict[int, RankWeights] = {}
    if not setup.drafts(rank):
        ranks = setup.group_ranks(draft=False)
        weights[TARGET_MODEL] = open_rank(
            setup.target, size=len(ranks), rank=ranks.index(rank), device=device, dtype=dtype
        )
    if setup.has_draft_model and rank in (ranks := setup.group_ranks(draft=True)):
        assert setup.draft is not None
        draft = Path(setup.draft)
        reader = (
            open_draft(draft, read_embedding(setup.target))
            if is_shipped_draft(draft)
            else open_reader(draft, device=device)
        )
        weights[DRAFT_MODEL] = RankWeights(
            reader, size=len(ranks), rank=ranks.index(rank), device=device, dtype=dtype
        )
    return weights


def load_rank(
    setup: RankSetup,
    rank: int,
    *,
    before_join: Callable[[], None] | None = None,
    watch: Watch | None = None,
) -> Rank:
    """Load this rank's models, join the others, and capture graphs together with them.

    Args:
        setup: The run.
        rank: Global number.
        before_join: Called once this rank's files are open.
        watch: On the others, while they join.
    """
    device = select_device(setup, rank)
    marks = [("", perf_counter())]
    weights = load_weights(setup, rank, device)
    marks.append(("open", perf_counter()))
    if setup.folder is not None:
        (setup.folder / f"ready-{rank}").touch()
    if before_join is not None:
        before_join()
    marks.append(("wait", perf_counter()))
    joined = join(setup, rank, watch)
    hidden = max((part.shape.hidden for part in weights.values()), default=0)
    groups = tensor_groups(setup, joined, rank, hidden, device)
    marks.append(("join", perf_counter()))
    models, weight_bytes = {}, {}
    core = core_beside(device, rank, setup.num_ranks)
    for model, part in weights.items():
        before = _allocated(device)
        group = groups[setup.group_ranks(draft=model == DRAFT_MODEL)]
        forward = RankForward(part, group, fused=setup.fused)
        weight_bytes[model] = _allocated(device) - before
        models[model] = _model_rank(setup, model, forward, core)
    if dist.is_initialized() and device.type == "cpu":
        dist.all_reduce(torch.zeros(1))  # loading may take longer than a rank may be silent
    marks.append(("weights", perf_counter()))
    if TARGET_MODEL in models:
        target = models[TARGET_MODEL]
        prompts = prompt_buckets(setup, target.forward)
        ways = target_buckets(setup), prompts, (), next_buckets(setup)
        target.prepare(*ways, requests=setup.num_slots)
    if DRAFT_MODEL in models:
        draft = models[DRAFT_MODEL]
        prompts = prompt_buckets(setup, draft.forward)
        ahead = ahead_buckets(setup)
        draft.prepare(draft_buckets(setup), prompts, ahead, requests=setup.num_slots)
    marks.append(("capture", perf_counter()))
    seconds = {name: end - start for (_, start), (name, end) in itertools.pairwise(marks)}
    return Rank(setup, rank, models, weight_bytes=weight_bytes, start_seconds=seconds)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _model_rank(
    setup: RankSetup, model: int, forward: RankForward, core: QuickCore | None
) -> ModelRank:
    is_draft = model == DRAFT_MODEL
    tokens = setup.draft_tokens if is_draft else setup.target_tokens
    head: StepHead = TargetHead(setup.sampling)
    if setup.samplings:
        head = RowTargetHead(setup.num_slots, forward.device, setup.samplings)
    if is_draft:
        head = DraftHead(setup.policy.build().fanout)
    slabs = Slabs(
        forward.shape,
        num_slots=setup.num_slots,
        max_tokens=max(tokens, BUCKETS[-1]),  # scratch holds a row of padding each
        dtype=forward.dtype,
        device=forward.device,
        paging=setup.draft_paging if is_draft else setup.target_paging,
        check=setup.check,
    )
    most = setup.num_slots * MAX_PATH * is_draft
    return ModelRank(forward, slabs, head, max_moves=most, core=core)


def draft_worker(setup: RankSetup, leader: GroupLeader | None) -> DraftWorker:
    """The draft's half of a round, on a rank group or without a model."""
    policy = setup.policy.build()
    drafter: Drafter = NgramDrafter()
    if leader is not None:
        drafter = GroupDrafter(
            leader,
            num_slots=setup.num_slots,
            choices=policy.fanout,
            paging=setup.draft_paging,
            keeps_prefixes=setup.keeps_prefixes,
        )
    return DraftWorker(policy, drafter)


def serve_rank(setup: RankSetup, rank: int) -> None:
    """Be any rank but the target's leader, until the run is over.

    Args:
        setup: The run.
        rank: Global number.

    Raises:
        DraftLostError: If a rank of the draft's group is lost.
        TargetLostError: If the leader is.
    """
    this = load_rank(setup, rank)
    is_draft = setup.drafts(rank)
    # Between two messages a trace may be silent for long.
    of_leader = Watch("the leader", TargetLostError)
    if is_draft and rank == 0:
        of_group = Watch("draft ranks", DraftLostError, setup.silence)
        followers = this.group_mailbox(draft=True, watch=of_group)
        verdicts, candidates = this.pair_mailboxes(of_leader)
        leader = this.leader(DRAFT_MODEL, followers, of_group) if this.models else None
        if setup.lead_draft is not None:
            setup.lead_draft(this, leader, verdicts, candidates)
        else:
            worker = draft_worker(setup, leader)
            serve_verdicts(worker, verdicts, candidates, setup.limits, setup.delay)
        if leader is not None:
            leader.end()
    else:
        messages = this.group_mailbox(draft=is_draft, watch=of_leader)
        if messages is not None:
            follow(messages, this.models, of_leader)
    this.leave()
