"""Predicted seconds and tokens per second of a round, for policies that choose by them.

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from codesign.policy.cost import RoundCost, StepTime, more_parts

Floats = NDArray[np.float64]

SHORTEST_DRAFT = 1e-6  # seconds of a draft forward, where a fit says less


class Goodput:
    """SpecServe's estimator: tokens per second of a round.

    Args:
        draft_seconds: ``f(rows, context)`` of one draft forward.
        target_seconds: ``f(rows, context)`` of the target forward.
        overhead: Seconds beside the forwards of a round in which anything is drafted or verified.
        slo_tpot: Target of seconds per token, for policies that look at it; None for none.
        draft_prompt_seconds: ``f(rows)`` of the draft model over rows of a prompt; None where they
            cost what rows of a draft forward do.
        prompt_seconds: The same of the target.
        draft_each: Seconds that a draft forward takes longer for every request beyond the first.
        target_each: The same of the target's.
        draft_tile: As in cost.StepTime; 0 where rows of a request make no difference.
        target_tile: The same of the target's.
        overhead_each: Seconds more for every request of what is beside the forwards.
        shares_forwards: As in cost.RoundCost.
        deciding: Seconds of a look of a policy that decides by the whole batch; 0 where nobody
            has timed it.
        deciding_each: The same for every request that it looks at.

    Source:
        SpecServe, Algorithm 3 and equations 3 to 9, with each request's context read once per step
        and counted as in StepTime's fit: KV rows before the forward.
    """

    def __init__(
        self,
        draft_seconds: Callable[[float, float], float],
        target_seconds: Callable[[float, float], float],
        *,
        overhead: float = 0.0,
        slo_tpot: float | None = None,
        draft_prompt_seconds: Callable[[float], float] | None = None,
        prompt_seconds: Callable[[float], float] | None = None,
        draft_each: float = 0.0,
        target_each: float = 0.0,
        draft_tile: int = 0,
        target_tile: int = 0,
        overhead_each: float = 0.0,
        shares_forwards: bool = True,
        deciding: float = 0.0,
        deciding_each: float = 0.0,
    ) -> None:
        self.draft_seconds = draft_seconds
        self.shared_draft_seconds = draft_seconds
        if isinstance(draft_seconds, StepTime):
            self.shared_draft_seconds = draft_seconds.shared
        self.target_seconds = target_seconds
        self.slo_tpot = slo_tpot
        self._overhead, self._overhead_each = overhead, overhead_each
        self._deciding, self._deciding_each = deciding, deciding_each
        self.draft_prompt_seconds = draft_prompt_seconds or partial(_rows_alone, draft_seconds)
        self.draft_prompts_once = 0.0  # of prompts that share a forward, whatever their rows
        if isinstance(draft_prompt_seconds, StepTime) and not draft_prompt_seconds.apart:
            self.draft_prompts_once = draft_prompt_seconds(0.0)
        self.draft_each, self.target_each = draft_each, target_each
        self.draft_tile, self.target_tile = draft_tile, target_tile
        self.shares_forwards = shares_forwards
        self.prompt_seconds = prompt_seconds or partial(_rows_alone, target_seconds)

    @classmethod
    def of_cost(cls, cost: RoundCost, *, slo_tpot: float | None = None) -> Goodput:
        """The estimator of a deployment."""
        return cls(
            cost.draft,
            cost.target,
            overhead=cost.reroot + cost.choice,
            slo_tpot=slo_tpot,
            draft_prompt_seconds=cost.draft_prompt,
            prompt_seconds=cost.prefill,
            draft_each=cost.draft.each,
            target_each=cost.target.each,
            draft_tile=cost.draft.tile,
            target_tile=cost.target.tile,
            overhead_each=cost.reroot_each + cost.choice_each,
            shares_forwards=cost.shares_forwards and not cost.prefill.apart,
            deciding=cost.deciding,
            deciding_each=cost.deciding_each,
        )

    def paying_prompts(self, rows: Sequence[int], saved: Floats) -> NDArray[np.bool_]:
        """(N,) which of N prompts the draft had better run, as that takes less than it saves.

        Args:
            rows: Of each; those that share a forward pay once for what it takes without any.
            saved: (N,) seconds that drafting saves on the tokens behind each.
        """
        seconds, once = self.draft_prompt_seconds, self.draft_prompts_once
        if isinstance(seconds, StepTime):
            gains = saved + once - seconds.of_arrays(rows, 0.0)
        else:
            gains = saved - np.array([seconds(count) for count in rows])
        paying = gains > 0.0
        return paying & (float(gains[paying].sum()) > once)

    def overhead(self, batch: int) -> float:
        """Seconds beside the forwards of a round of ``batch`` requests."""
        return self._overhead + self._overhead_each * max(batch - 1, 0)

    def look(self, batch: int) -> float:
        """Seconds of a look at ``batch`` requests; 0 where nobody has timed it."""
        return self._deciding + self._deciding_each * batch

    def seconds(self, *, batch: int, context: int, steps: int, draft_tokens: int) -> float:
        """Seconds of a serial round: its arguments are those of a call."""
        seconds = self._verifying(batch, context, draft_tokens)
        if steps or draft_tokens:
            seconds += self.overhead(batch)
        return seconds + self._drafting(batch, context, steps)

    def _verifying(self, batch: int, context: int, draft_tokens: int) -> float:
        rows = batch + draft_tokens
        return self.target_seconds(rows, context) + self._target_more(batch, rows)

    def _target_more(self, batch: int, rows: int) -> float:
        return self.target_each * more_parts(batch, rows, self.target_tile)

    def _drafting(self, batch: int, context: int, steps: int) -> float:
        step = self.draft_seconds if batch == 1 else self.shared_draft_seconds
        seconds = sum([step(batch, context + batch * j) for j in range(steps)])
        return seconds + steps * self.draft_each * more_parts(batch, batch, self.draft_tile)

    def num_beside(self, *, batch: int, context: int, draft_tokens: int) -> int:
        """Draft forwards of one row per request that fit beside the target's forward."""
        verifying = self._verifying(batch, context, draft_tokens)
        drafting = self._drafting(batch, context + draft_tokens, 1)
        return int(verifying / max(drafting, SHORTEST_DRAFT))

    def __call__(
        self, *, batch: int, context: int, steps: int, draft_tokens: int, accepted: float
    ) -> float:
        """Expected tokens per second of a round.

        Args:
            batch: Requests; each emits one token at least.
            context: Sum of the requests' KV rows before the round.
            steps: Draft forwards made.
            draft_tokens: Draft tokens verified, roots not counted.
            accepted: Expected number of accepted draft tokens.
        """
        seconds = self.seconds(batch=batch, context=context, steps=steps, draft_tokens=draft_tokens)
        return (batch + accepted) / seconds


def _rows_alone(seconds: Callable[[float, float], float], rows: float) -> float:
    return seconds(rows, 0.0)
