"""Steps of the engine on rank groups, one at a time, at any batch and context, and what fits.

Target and drafter are those that serve (engine/gpu/group_target.py, group_drafter.py). Ranks do not
count rows: a step says where its own go, so staging a context takes nothing but a prompt that was
run once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter

import torch

from codesign.engine.gpu.group_drafter import GroupDrafter
from codesign.engine.gpu.group_target import GroupTarget
from codesign.engine.gpu.prompt_rows import prompt_message
from codesign.engine.gpu.rank_group import GroupLeader
from codesign.engine.gpu.rank_setup import RankSetup
from codesign.engine.gpu.ranks import DRAFT_MODEL, TARGET_MODEL, Rank
from codesign.models.shape import model_shape
from codesign.policy.protocol import Admission, TargetSide
from codesign.profiler.bench import SPARE_ROWS, StagedNgrams, run_prompts, staged_candidates
from codesign.profiler.draft_steps import (
    ALPHABET,
    ENDLESS,
    DraftSteps,
    StagedDrafter,
    made_up_tokens,
)
from codesign.profiler.grids import MAX_REQUESTS
from codesign.profiler.steps import StepShape

NUM_SLOTS = MAX_REQUESTS + 1  # and a prompt
KEPT_FREE = 0.1  # of a GPU's memory: prompts' activations, fragments


class RankTarget(GroupTarget):
    """A target on ranks whose requests can be put at any context.

    Args:
        leader: Of its group.
        setup: The ranks'.
    """

    def __init__(self, leader: GroupLeader, setup: RankSetup) -> None:
        super().__init__(
            leader,
            num_slots=setup.num_slots,
            sampling=setup.sampling,
            smallest_bucket=setup.smallest_bucket,
        )
        self._vocab = model_shape(setup.target).vocab
        longest = setup.target_tokens - SPARE_ROWS
        run_prompts(self, [self._admission(i, longest) for i in range(MAX_REQUESTS)])  # real rows

    def seconds(self, shape: StepShape) -> float:
        """Time one step."""
        if shape.op == "prefill":
            return self._prefill_seconds(shape)
        self._stage(shape)
        true = [verdict.tokens[0] for verdict in self.verify(None)[1]]
        self._stage(shape)
        candidates = staged_candidates(shape, true, self._vocab)
        start = perf_counter()
        self.verify(candidates)
        return perf_counter() - start

    def _admission(self, request_id: int, count: int) -> Admission:
        return Admission(request_id, made_up_tokens(request_id, count, self._vocab), ENDLESS)

    def _stage(self, shape: StepShape) -> None:
        self.side = TargetSide()
        for request_id, context in enumerate(shape.contexts):
            self.side.admit(self._admission(request_id, context + 1))

    def _prefill_seconds(self, shape: StepShape) -> float:
        self.side = TargetSide()
        admission = self._admission(MAX_REQUESTS, shape.rows)
        start = perf_counter()
        run_prompts(self, [admission])
        seconds = perf_counter() - start
        self._slots.free(MAX_REQUESTS)
        return seconds


class _StagedGroup(GroupDrafter):
    """A drafter on ranks that can pretend to have run on any number of rows."""

    def __init__(self, leader: GroupLeader, setup: RankSetup, vocab: int) -> None:
        choices = setup.policy.build().fanout
        super().__init__(leader, num_slots=setup.num_slots, choices=choices)
        for request_id in range(MAX_REQUESTS):
            tokens = made_up_tokens(request_id, setup.draft_tokens - SPARE_ROWS, vocab)
            self._slots.take(request_id)
            leader.ask(prompt_message(tokens, self._slots[request_id], 0))

    def stage(self, request_id: int, tokens: tuple[int, ...]) -> None:
        """Rows are not counted here: a step says where its own go. Forget moves of the last one."""
        self._ahead.drop()
        self._pending.pop(request_id, None)


def draft_steps(setup: RankSetup, leader: GroupLeader | None) -> DraftSteps:
    """The draft's steps, led here."""
    drafter: StagedDrafter = StagedNgrams()
    vocab = ALPHABET
    if leader is not None:
        assert isinstance(setup.draft, Path), "a draft that is led is a model"
        vocab = model_shape(setup.draft).vocab
        drafter = _StagedGroup(leader, setup, vocab)
    is_apart = setup.draft_ranks > 0
    return DraftSteps(drafter, vocab=vocab, num_requests=MAX_REQUESTS, is_apart=is_apart)


def kv_room(rank: Rank) -> tuple[int | None, int | None]:
    """KV rows that fit on this GPU with all models that it holds, and with the target alone.

    Returns:
        None where it is not known: on a CPU, and the second where there is no target.
    """
    if rank.setup.device != "cuda":
        return None, None
    free, total = torch.cuda.mem_get_info()
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    caches = {model: part.slabs.keys_LBGME for model, part in rank.models.items()}
    held = sum(2 * keys.nbytes for keys in caches.values())
    row_bytes = {
        model: 2 * keys.nbytes // (keys.shape[1] * keys.shape[3]) for model, keys in caches.items()
    }
    room = free + cached + held - int(KEPT_FREE * total)
    return rows_that_fit(room, row_bytes, rank.weight_bytes.get(DRAFT_MODEL, 0))


def rows_that_fit(
    room: int, row_bytes: Mapping[int, int], draft_weights: int
) -> tuple[int | None, int | None]:
    """KV rows of all models here, and of the target alone; see ``kv_room``.

    Args:
        room: Bytes for keys and values.
        row_bytes: Bytes of a row by model.
        draft_weights: Bytes that are free without the draft.
    """
    shared = max(room, 0) // sum(row_bytes.values()) if row_bytes else None
    if TARGET_MODEL not in row_bytes:
        return shared, None
    return shared, max(room + draft_weights, 0) // row_bytes[TARGET_MODEL]
