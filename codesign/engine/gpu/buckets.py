"""Which graphs the ranks of a run capture when they start; others are when they turn up."""

from __future__ import annotations

from codesign.engine.gpu.forward import RankForward
from codesign.engine.gpu.prompt_rows import buckets_up_to, long_buckets
from codesign.engine.gpu.rank_setup import RankSetup
from codesign.engine.gpu.step_rows import bucket_of
from codesign.kernels.leaf_choices import fits
from codesign.policy.resting import Resting
from codesign.policy.step_time import BUCKETS


def target_buckets(setup: RankSetup) -> list[int]:
    """Buckets of the target's steps."""
    rows = min(setup.num_slots * setup.max_rows, BUCKETS[-1])
    return _up_to(bucket_of(rows, setup.smallest_bucket), setup.smallest_bucket)


def draft_buckets(setup: RankSetup) -> list[int]:
    """Buckets of the draft's steps."""
    rows = min(setup.num_slots * max(setup.policy.spec.width, 2), BUCKETS[-1])
    return _up_to(bucket_of(rows), BUCKETS[0])


def ahead_buckets(setup: RankSetup) -> list[int]:
    """Buckets of a draft's steps that choose their rows themselves; a profile has narrow ones."""
    policy = setup.policy.build()
    if not policy.grown:
        return []
    found = _up_to(bucket_of(policy.grown), BUCKETS[0])
    return [bucket for bucket in found if fits(bucket, policy.fanout)]


def next_buckets(setup: RankSetup) -> list[int]:
    """Buckets of plain decoding's steps that need no message: where it may go on by itself.

    That is without a draft, or while a policy rests that drafts on the same ranks; a profile times
    plain decoding, whatever its policy.
    """
    is_timed = setup.lead_draft is not None
    rests = setup.draft is None or isinstance(setup.policy.build(), Resting)
    if setup.draft_ranks or not (is_timed or rests):
        return []
    return _up_to(bucket_of(setup.num_slots, setup.smallest_bucket), setup.smallest_bucket)


def prompt_buckets(setup: RankSetup, forward: RankForward) -> tuple[int, ...]:
    """Buckets that prompts of a run can take, here and on the other ranks of the group."""
    if not forward.pads_prompts:
        return ()
    # More rows than an exchange takes go over gloo where GPUs are shared, which no graph holds.
    longest = BUCKETS[-1] if setup.shares_gpus else setup.target_tokens
    long = long_buckets(forward.shape.layer_weights, adds_ranks=forward.group.size > 1)
    return buckets_up_to(min(setup.target_tokens, longest), long)


def _up_to(largest: int, smallest: int) -> list[int]:
    return [bucket for bucket in BUCKETS if smallest <= bucket <= largest]
