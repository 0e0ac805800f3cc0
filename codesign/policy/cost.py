"""What a round costs in one deployment: its forwards, messages and what the host does.

Must not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

from codesign.policy.host_cost import Drafting, HostCost, Number
from codesign.policy.step_time import StepTime


@lru_cache(maxsize=256)
def _without_root(prompt: StepTime, draft: StepTime, choice: float) -> StepTime:
    """A prompt's time without a forward of one row behind all others and the choice that follows.

    It is never less than nothing.
    """
    rows = (1, 2, *[knot for knot in prompt.rows if knot > 2], max(prompt.rows[-1], 2) + 1)
    seconds = [max(prompt(count) - draft(1, count - 1) - choice, 0.0) for count in rows[1:]]
    alpha = max(prompt.alpha - (draft(1, 1) - draft(1)), 0.0)
    return replace(prompt, alpha=alpha, rows=rows, seconds=(0.0, *seconds), gamma=0.0)


@dataclass(frozen=True, slots=True)
class RoundCost(HostCost):
    """What a round costs in one deployment (a split of the machine between draft and target).

    Attributes:
        target: One target forward, sampling and walk included.
        draft: One draft forward, tree bookkeeping included, but for what ``child`` says.
        prefill: Target forward over prompt rows.
        draft_prefill: Draft forward over prompt rows, as profiles time it; see ``draft_prompt``.
        link: Seconds of one message about one request, one way; 0 when both models share a process.
        link_each: The same for every request beyond the first.
        slowdown: Seconds that the target loses for each second in which the draft model runs beside
            it (shared memory bandwidth); 0 on separate GPUs.
        kv_tokens: KV rows that fit one replica, the smaller of target's and draft's side with the
            weights of both counted; None where nobody knows.
        plain_kv_tokens: KV rows that fit without a draft; None for as many as ``kv_tokens``.
        kv_transfer: Seconds per prompt token that moves from a prefill pool to this deployment.
        joining: Seconds that the target's step takes more in a round before which prompts ran; 0
            where unknown.
        shares_forwards: A chunk of prompts beside a round is run in the target's one forward; else
            in a forward of its own.
    """

    target: StepTime
    draft: StepTime
    prefill: StepTime
    draft_prefill: StepTime
    link: float = 0.0
    link_each: float = 0.0
    slowdown: float = 0.0
    kv_tokens: int | None = None
    plain_kv_tokens: int | None = None
    kv_transfer: float = 0.0
    joining: float = 0.0
    shares_forwards: bool = True

    def drafting(self, how: Drafting) -> Self:
        """See ``HostCost``; with the draft's forward."""
        return replace(self, draft=self.draft_step(self.draft, how), **self._counted(how))

    @property
    def draft_prompt(self) -> StepTime:
        """The draft over a prompt, as whoever prices one takes it: its root runs with all others'.

        Where prompts run apart a profile has in each the forward of its root, and the choice of two
        candidates, which a round makes once for all requests.
        """
        prompt = self.draft_prefill
        if not prompt.apart:
            return prompt
        besides = self.choices(1.0, 2.0) + self.first_alone
        return _without_root(prompt, self.draft, besides)

    def message(self, requests: Number) -> Number:
        """Seconds of one message about so many requests, one way: a number, or an array."""
        return self.link + self.link_each * (requests - 1.0)

    def kv_room(self, limit: int | None, *, has_draft: bool) -> int | None:
        """KV rows of one replica: what fits, at most ``limit``; None if neither is known."""
        fit = self.kv_tokens
        if not has_draft and self.plain_kv_tokens is not None:
            fit = self.plain_kv_tokens
        known = [rows for rows in (limit, fit) if rows is not None]
        return min(known, default=None)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Chance that the target agrees, from the draft model's own probability.

    P(accept) = sigmoid(slope * logit(confidence) + intercept); the identity by default.
    """

    slope: float = 1.0
    intercept: float = 0.0

    @property
    def is_identity(self) -> bool:
        """Whether confidences are taken at face value."""
        return self.slope == 1.0 and self.intercept == 0.0
