"""Predicted seconds and tokens per second of a round, for policies that choose by them.

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Self

import numpy as np
from numpy.typing import NDArray

from codesign.policy.cost import RoundCost, StepTime
from codesign.policy.host_cost import NO_HOST, Drafting, HostCost
from codesign.policy.traffic import START_OUTPUT
from codesign.policy.turns import turn_prices

Floats = NDArray[np.float64]

SHORTEST_DRAFT = 1e-6  # seconds of a draft forward, where a fit says less


class Goodput:
    """SpecServe's estimator: tokens per second of a round.

    Args:
        draft: One draft forward.
        target: The target's forward.
        host: What the host takes beside the forwards of a round.
        messages: Seconds of the messages of a round of one request, drafted for or not.
        messages_each: The same for every request beyond the first.
        slo_tpot: Target of seconds per token, for policies that look at it; None for none.
        draft_prompt_seconds: ``f(rows)`` of the draft model over rows of a prompt; None where they
            cost what rows of a draft forward do.
        prompt_seconds: The same of the target.
        shares_forwards: As in cost.RoundCost.
        answer_tokens: Of a request, for policies that weigh what drafting saves it; None if nobody
            knows.

    Attributes:
        turns: How many requests take part in a round of plain decoding.

    Source:
        SpecServe, Algorithm 3 and equations 3 to 9, with each request's context read once per step
        and counted as in StepTime's fit: KV rows before the forward.
    """

    def __init__(
        self,
        draft: StepTime,
        target: StepTime,
        *,
        host: HostCost = NO_HOST,
        messages: float = 0.0,
        messages_each: float = 0.0,
        slo_tpot: float | None = None,
        draft_prompt_seconds: Callable[[float], float] | None = None,
        prompt_seconds: Callable[[float], float] | None = None,
        shares_forwards: bool = True,
        answer_tokens: float | None = None,
    ) -> None:
        self.answer_tokens = START_OUTPUT if answer_tokens is None else answer_tokens
        self.draft, self.target, self.host = draft, target, host
        self.turns = turn_prices(target)
        self._messages, self._messages_each = messages, messages_each
        self.slo_tpot = slo_tpot
        self.draft_prompt_seconds = draft_prompt_seconds or partial(_rows_alone, draft)
        self.draft_prompts_once = 0.0  # of prompts that share a forward, whatever their rows
        if isinstance(draft_prompt_seconds, StepTime) and not draft_prompt_seconds.apart:
            self.draft_prompts_once = draft_prompt_seconds(0.0)
        self.shares_forwards = shares_forwards
        self.prompt_seconds = prompt_seconds or partial(_rows_alone, target)

    @classmethod
    def of_cost(
        cls,
        cost: RoundCost,
        *,
        slo_tpot: float | None = None,
        answer_tokens: float | None = None,
    ) -> Goodput:
        """The estimator of a deployment."""
        return cls(
            cost.draft,
            cost.target,
            host=cost,
            messages=2.0 * cost.link,
            messages_each=2.0 * cost.link_each,
            slo_tpot=slo_tpot,
            draft_prompt_seconds=cost.draft_prompt,
            prompt_seconds=cost.prefill,
            shares_forwards=cost.shares_forwards and not cost.prefill.apart,
            answer_tokens=answer_tokens,
        )

    def drafting(self, how: Drafting) -> Self:
        """The estimator of a policy that drafts so."""
        found = copy(self)
        found.draft = self.host.draft_step(self.draft, how)
        found.host = self.host.drafting(how)
        return found

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

    def messages(self, batch: int) -> float:
        """Seconds of the messages of a round of so many requests."""
        return self._messages + self._messages_each * (batch - 1.0)

    def overhead(self, batch: int) -> float:
        """Seconds beside the forwards of a round, but for those of each row beyond the roots."""
        return self.host.reroots(batch) + self.host.choices(batch, batch)

    def seconds(self, *, batch: int, context: int, steps: int, draft_tokens: int) -> float:
        """Seconds of a serial round: its arguments are those of a call.

        Of plain decoding what a token of each takes, where the requests take turns.
        """
        seconds = self._verifying(batch, context, draft_tokens)
        if steps or draft_tokens:
            seconds += self.overhead(batch) + self.host.choice_row * draft_tokens
        else:
            seconds -= self.turns.saved(batch, context)
        seconds += self.host.reroot_row * batch * steps
        return seconds + self._drafting(batch, context, steps)

    def _verifying(self, batch: int, context: int, draft_tokens: int) -> float:
        return self.target(batch + draft_tokens, context, batch) + self.messages(batch)

    def _drafting(self, batch: int, context: int, steps: int) -> float:
        return sum([self.draft(batch, context + batch * j, batch) for j in range(steps)])

    def num_beside(self, *, batch: int, context: int, draft_tokens: int) -> int:
        """Draft forwards of one row per request that fit beside the target's forward.

        Args:
            batch: Requests that decode.
            context: KV rows of all of them.
            draft_tokens: Nodes that the target verifies, roots not counted.
        """
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


def _rows_alone(step: StepTime, rows: float) -> float:
    return step(rows)
