"""One round of a batch: how long its forwards take, and what it is worth for its tokens.

The value of a round is its expected tokens per second. Tokens: one for each request, and of each
node that is verified its chance. Seconds: the draft forwards that the target waits for, its own
forward, what is moved afterwards, and the stall: prompts that run before the next round.

Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codesign.policy.cost import StepTime
from codesign.policy.goodput import Goodput
from codesign.policy.traffic import Traffic

Floats = NDArray[np.float64]

LEAST = 1e-9  # tokens or seconds: some are divided by, of some a logarithm is taken
WAITING = 8.0  # running requests that one counts for whose prompt shares the rounds' forwards
FULL = 0.9  # share of time from which prompts are taken to wait for ever
_MOST_POWER = 50.0
_FAR = 4096.0  # tokens of context by which its price is found
_SPARE = 256  # rows beyond those that are asked for: more will be
_NOTHING: Floats = np.empty(0)


@dataclass(frozen=True, slots=True)
class Choice:
    """The best nodes to verify, of those that are drafted.

    Attributes:
        value: Expected tokens per second; see ``BatchRound.value``.
        rate: Tokens that a second is worth.
        tokens: Expected tokens.
        rows: Nodes beside the roots.
        level: Least weight, urgency times chance, of a chosen node.
    """

    value: float
    rate: float
    tokens: float
    rows: int
    level: float


class RowPrices:
    """Seconds of one model's forwards by their rows, in the round at hand.

    Args:
        step: Seconds of a forward.
        each: Seconds that the host takes for each row above the base.
    """

    def __init__(self, step: StepTime, each: float = 0.0) -> None:
        self._step, self.each = step, each
        self._known: dict[int, tuple[Floats, Floats]] = {}  # see ``_by_rows``; by requests
        self.begin(0, 0, 0)

    def begin(self, batch: int, context: int, base: int, more: float = 0.0) -> None:
        """A round of so many requests and KV rows.

        Args:
            batch: Requests.
            context: KV rows of all of them.
            base: Rows at which lists of prices start.
            more: Seconds of whatever else runs with each forward.
        """
        self._batch, self._more = batch, more
        self._context, self._base = context, base
        self._prices = _NOTHING  # from ``base`` on; worked out when first asked for

    def forward(self, rows: float, context: int) -> float:
        """Seconds of one forward."""
        return self._step(rows, context, self._batch) + self._more

    def of(self, rows: float, context: int) -> float:
        """Seconds of one forward, and what the host takes for its rows."""
        seconds = self._step(rows, context, self._batch) + self._more
        return seconds + self.each * max(rows - self._base, 0.0) if self.each else seconds

    def __call__(self, count: int) -> Floats:
        """(count + 1,) the same of 0, ..., ``count`` rows above the base; read-only."""
        if count >= len(self._prices):
            self._work_out(self._base + count)
        return self._prices[: count + 1]

    def at(self, count: int) -> float:
        """The last price of such a list, without the others."""
        rows = self._base + count
        fixed, per_context = self._by_rows(rows)
        price = self._context * float(per_context[rows]) + self._more
        return price + float(fixed[rows]) + self.each * count

    def _work_out(self, last: int) -> None:
        fixed, per_context = self._by_rows(last)
        self._prices = self._context * per_context[self._base :] + self._more
        self._prices += fixed[self._base :]
        if self.each:
            self._prices += self.each * np.arange(len(self._prices))
        self._prices.flags.writeable = False

    def _by_rows(self, last: int) -> tuple[Floats, Floats]:
        """Seconds without context of 0, 1, 2, .. rows, and those for each token of it."""
        fixed, per_context = self._known.get(self._batch, (_NOTHING, _NOTHING))
        if last >= len(fixed):
            rows = np.arange(2 * last + _SPARE)
            fixed = self._step.of_arrays(rows, 0.0, self._batch)
            per_context = (self._step.of_arrays(rows, _FAR, self._batch) - fixed) / _FAR
            self._known[self._batch] = fixed, per_context
        return fixed, per_context


class BatchRound:
    """The round at hand: its prices, its time so far, and the value of what may be done in it.

    Attributes:
        batch: Requests.
        context: KV rows of all of them.
        num_base: Rows of the target's forward without any draft: roots, and prompts that share it.
            Those that have a forward of their own beside it are seconds of it instead.
        roots: Expected tokens of the roots: one for each request.
        target: Prices of the target's forward, the round's messages among them; its lists begin at
            ``num_base`` rows.
        draft: Prices of a draft forward, with what the re-root takes for its rows.
        look: Seconds of a look at the batch, as far as it counts.
        overhead: Seconds beside the forwards of a round in which anything is drafted or verified,
            one look among them; those of each row are in the forwards' prices.
        stall: Seconds of prompts that run before the next round.
        plain: The choice of no draft at all.
        plain_seconds: Of such a round, the stall behind it.
        awaited: Seconds so far of draft forwards that the target waits for, with looks that count.
        drafting: The same without looks.
        num_forwards: How many of them.
        first: Seconds of the first one, without its look.
        behind: Seconds that a forward takes longer for tokens that requests missed; 0 once it ran.
        beside: Seconds so far of draft forwards beside the verification.
        verification: Seconds of the verification; known once its nodes are chosen.
    """

    def __init__(self, goodput: Goodput) -> None:
        self.target = RowPrices(goodput.target, goodput.host.choice_row)
        self.draft = RowPrices(goodput.draft, goodput.host.reroot_row)
        self._goodput = goodput

    def begin(
        self,
        batch: int,
        context: int,
        *,
        traffic: Traffic,
        sharing: tuple[int, int],
        looking: float = 0.0,
    ) -> None:
        """A round starts.

        Args:
            batch: Requests.
            context: KV rows of all of them.
            traffic: Of this round.
            sharing: As in protocol.Verdict.
            looking: Looks by which a round with drafting is longer than one of plain decoding.
        """
        prompt_rows, num_waiting = sharing
        self.batch, self.context, self.roots = batch, context, float(batch)
        self.look = looking * self._goodput.host.look(batch)
        self.overhead = self._goodput.overhead(batch) + self.look
        shares = self._goodput.shares_forwards or not prompt_rows
        self.num_base = batch + prompt_rows if shares else batch
        apart = 0.0 if shares else self._goodput.prompt_seconds(prompt_rows)
        self.target.begin(batch, context, self.num_base, apart + self._goodput.messages)
        self.draft.begin(batch, context, 0)
        self.awaited = self.drafting = self.first = self.behind = 0.0
        self.beside = self.verification = 0.0
        self.num_forwards = 0
        self._draft_row: float | None = None
        self.stall, self._power = traffic.stall, 1.0
        if prompt_rows and batch:
            self._power += WAITING * num_waiting / batch / (1.0 - min(traffic.share, FULL))
            self._power = min(self._power, _MOST_POWER)
        seconds = self.target.of(self.num_base, context) + self.stall
        self.plain_seconds = max(seconds, LEAST)
        value = self.value(self.roots, seconds) if batch else 0.0
        rate = self._power * self.roots / self.plain_seconds
        self.plain = Choice(value, rate, self.roots, 0, 1.0)

    def value(self, tokens: Any, seconds: Any) -> Any:
        """Tokens per second; the seconds are those of ``fixed`` and of the forwards.

        Where prompts share the forward, each further second of the round is one of those that wait
        for them, too: their number raises the price of time, not that of tokens. ``WAITING`` was
        found by simulation: with 1, 3 and 8 the mean latency of three traces fell each time.
        """
        if self._power == 1.0:
            return tokens / seconds
        return tokens / self.plain_seconds / (seconds / self.plain_seconds) ** self._power

    def values(self, tokens: Sequence[float], seconds: Sequence[float], more: float) -> list[float]:
        """The value of each of these; to all seconds come so many more, and there may be too many.

        In lists: up to some hundred of them are faster so where numpy's code is not in the caches.
        """
        pairs = zip(tokens, seconds, strict=False)
        if self._power == 1.0:
            return [one / (each + more) for one, each in pairs]
        return [self.value(one, each + more) for one, each in pairs]

    def run_behind(self, num: int, missed: float) -> None:
        """Requests have missed so many tokens, which run with the first forward of ``num``."""
        self.behind = self.draft.of(num + missed, self.context) - self.draft.of(num, self.context)

    def wait_for(self, seconds: float, look: float = 0.0) -> None:
        """The target waits for a draft forward, and for a look that counts."""
        if not self.num_forwards:
            self.first = seconds
        self.num_forwards += 1
        self.drafting += seconds
        self.awaited += seconds + look
        self.behind = 0.0

    @property
    def fixed(self) -> float:
        """Seconds of the round so far, and of what is beside its forwards; the stall behind it."""
        return self.awaited + self.overhead + self.stall

    def best(self, worth: Floats, longest: float = np.inf) -> Choice:
        """How many nodes are verified with most value: the heaviest, as long as it rises.

        Args:
            worth: (1 + N,) tokens that all roots together are worth, then each node, descending.
            longest: Seconds that the round may take if any node is verified.
        """
        tokens = worth.cumsum()
        seconds = self.target(len(worth) - 1) + self.fixed
        if not self.awaited:
            seconds[0] -= self.overhead
        values = self.value(tokens, seconds)
        if longest < np.inf:
            values[1:][seconds[1:] > longest] = 0.0
        best = int(values.argmax())
        level = float(worth[best]) if best else np.inf
        rate = self._power * float(tokens[best]) / float(seconds[best])
        return Choice(float(values[best]), rate, float(tokens[best]), best, level)

    def draft_row(self, num: int, rate: float) -> float:
        """Tokens that the seconds of a row of a draft forward would yield elsewhere.

        Args:
            num: Rows by which a forward grows if all requests take part; the same all round long.
            rate: Tokens that a second is worth.
        """
        if self._draft_row is None:
            draft, context = self.draft.of, self.context
            self._draft_row = (draft(num + 1, context) - draft(1, context)) / num
        return max(self._draft_row * rate, LEAST)

    def saved(self, seconds_per_token: float) -> float:
        """Seconds per token of each request that drafting for all saves, against plain decoding.

        Args:
            seconds_per_token: Of all requests' tokens together, the stall among them: of fewer
                rounds fewer are stalled.
        """
        return self.plain_seconds - self.roots * seconds_per_token
