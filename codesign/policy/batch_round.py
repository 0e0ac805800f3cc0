"""One round of a batch: how long its forwards take, and what it is worth for its tokens.

The value of a round is its expected tokens per second. Tokens: one for each request, and of each
node that is verified its chance. Seconds: the draft forwards that the target waits for, its own
forward, what is moved afterwards, and the stall: prompts that run before the next round.

Must not import torch or read a clock.
"""

from __future__ import annotations

from math import inf
from typing import Any

from codesign.policy.ahead import asked
from codesign.policy.goodput import Goodput
from codesign.policy.light import light
from codesign.policy.row_prices import Floats, RowPrices
from codesign.policy.traffic import Traffic

# Numbers up to which a list and plain loops are about as fast as arrays, and faster where the host
# comes from elsewhere: then numpy's code is far away.
FEW = 96
Worth = list[float] | Floats  # (1 + N,): roots, then N nodes, descending; a list of ``FEW`` at most

LEAST = 1e-9  # tokens or seconds: some are divided by, of some a logarithm is taken
WAITING = 8.0  # running requests that one counts for whose prompt shares the rounds' forwards
FULL = 0.9  # share of time from which prompts are taken to wait for ever
_MOST_POWER = 50.0
SAFELY = 1.0 - 1e-9  # less than a sum's last digits can be off


@light
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
        by_turns: Seconds by which a round without trees takes less, where requests take turns; 0
            where prompts share its forward, which has other stairs. Those beside it are left out:
            of more rounds fewer have any.
        plain: The choice of no draft at all.
        plain_seconds: Of a token of each without any draft, the stall behind it.
        awaited: Seconds so far of draft forwards that the target waits for, with looks that count.
        drafting: The same without looks.
        num_forwards: How many of them.
        first: Seconds of the first one, without its look.
        fixed: Seconds of the round so far, and of what is beside its forwards; the stall behind it.
        behind: Seconds that a forward takes longer for tokens that requests missed; 0 once it ran.
        beside: Seconds so far of draft forwards beside the verification.
        verification: Seconds of the verification; known once its nodes are chosen.
    """

    def __init__(self, goodput: Goodput) -> None:
        self.target = RowPrices(goodput.target, goodput.host.choice_row)
        self.draft = RowPrices(goodput.draft, goodput.host.reroot_row)
        self._goodput = goodput
        # Seconds of a look, and overhead, by requests.
        self._beside: dict[int, tuple[float, float]] = {}

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
        if (beside := self._beside.get(batch)) is None:
            goodput = self._goodput
            self._beside[batch] = beside = goodput.host.look(batch), goodput.overhead(batch)
        self.look = looking * beside[0]
        self.overhead = beside[1] + self.look
        shares = self._goodput.shares_forwards or not prompt_rows
        self.num_base = batch + prompt_rows if shares else batch
        apart = 0.0 if shares else self._goodput.prompt_seconds(prompt_rows)
        self.target.begin(batch, context, self.num_base, apart + self._goodput.messages(batch))
        self.draft.begin(batch, context, 0)
        self.awaited = self.drafting = self.first = self.behind = 0.0
        self.beside = self.verification = 0.0
        self.num_forwards = 0
        self._draft_row: float | None = None
        self.stall, self._power = traffic.stall, 1.0
        if prompt_rows and batch:
            self._power += WAITING * num_waiting / batch / (1.0 - min(traffic.share, FULL))
            self._power = min(self._power, _MOST_POWER)
        self.fixed = self.overhead + self.stall
        shared = self.num_base > batch
        self.by_turns = 0.0 if shared else self._goodput.turns.saved(batch, context)
        seconds = self.target.of(self.num_base, context) + self.stall - self.by_turns
        self.plain_seconds = seconds if seconds > LEAST else LEAST
        value = self.value(self.roots, seconds) if batch else 0.0
        rate = self._power * self.roots / self.plain_seconds
        self.plain = Choice(value, rate, self.roots, 0, 1.0)

    def plain_forward(self) -> float:
        """Seconds of the target's forward without trees: by those who take part in it."""
        batch, context = self.batch, self.context
        seconds = self.target.forward(self.num_base, context)
        if self.by_turns:
            step, taking = self._goodput.target, self._goodput.turns.count(batch, context)
            some = asked(step)(taking, context * taking / batch, taking)
            seconds += some - step(batch, context, batch)
        return seconds

    def value(self, tokens: Any, seconds: Any) -> Any:
        """Tokens per second; the seconds are those of ``fixed`` and of the forwards.

        Where prompts share the forward, each further second of the round is one of those that wait
        for them, too: their number raises the price of time, not that of tokens. ``WAITING`` was
        found by simulation: with 1, 3 and 8 the mean latency of three traces fell each time.
        """
        if self._power == 1.0:
            return tokens / seconds
        return tokens / self.plain_seconds / (seconds / self.plain_seconds) ** self._power

    def best_number(
        self, worth: list[float], prices: list[float], fixed: float, longest: float = inf
    ) -> tuple[int, float, float]:
        """How many nodes are verified with most value, if any are: number, tokens and value.

        A plain loop: where numpy's code is not in the caches, or nodes are few, it is faster.

        Args:
            worth: As for ``best``.
            prices: (1 + N,) or more seconds of the target's forward.
            fixed: Seconds of the round beside it.
            longest: As for ``best``; of a number that takes longer the value is -1.
        """
        tokens, number, most = worth[0], 0, -1.0
        found = tokens
        if self._power == 1.0 and longest == inf:  # most often
            for i in range(1, len(worth)):
                tokens += worth[i]
                value = tokens / (prices[i] + fixed)
                if value > most:
                    number, found, most = i, tokens, value
            return number, found, most
        for i in range(1, len(worth)):
            tokens += worth[i]
            seconds = prices[i] + fixed
            value = self.value(tokens, seconds)
            if value > most and seconds <= longest:
                number, found, most = i, tokens, value
        return number, found, most

    def run_behind(self, num: int, missed: float) -> None:
        """Requests have missed so many tokens, which run with the first forward of ``num``."""
        self.behind = 0.0
        if missed:
            self.behind = self.draft.of(num + missed, self.context) - self.draft.at(num)

    def wait_for(self, seconds: float, look: float = 0.0) -> None:
        """The target waits for a draft forward, and for a look that counts."""
        if not self.num_forwards:
            self.first = seconds
        self.num_forwards += 1
        self.drafting += seconds
        self.awaited += seconds + look
        self.fixed = self.awaited + self.overhead + self.stall
        self.behind = 0.0

    def best(self, worth: Worth, longest: float = inf) -> Choice:
        """How many nodes are verified with most value: the heaviest, as long as it rises.

        Args:
            worth: (1 + N,) tokens that all roots together are worth, then each node, descending.
            longest: Seconds that the round may take if any node is verified.
        """
        if isinstance(worth, list):
            return self._best_of_few(worth, longest)
        tokens = worth.cumsum()
        seconds = self.target(len(worth) - 1) + self.fixed
        seconds[0] -= self.by_turns if self.awaited else self.by_turns + self.overhead
        values = self.value(tokens, seconds)
        if longest < inf:
            values[1:][seconds[1:] > longest] = 0.0
        best = int(values.argmax())
        level = float(worth[best]) if best else inf
        rate = self._power * float(tokens[best]) / float(seconds[best])
        return Choice(float(values[best]), rate, float(tokens[best]), best, level)

    def _best_of_few(self, worth: list[float], longest: float) -> Choice:
        fixed, tokens = self.fixed, worth[0]
        prices = self.target.listed(len(worth) - 1)
        number, level, seconds = 0, inf, prices[0] + fixed - self.by_turns
        if not self.awaited:
            seconds -= self.overhead
        value = self.value(tokens, seconds)
        if len(worth) > 1:
            best, found, most = self.best_number(worth, prices, fixed, longest)
            if most > value:
                number, tokens, value, level = best, found, most, worth[best]
                seconds = prices[best] + fixed
        return Choice(value, self._power * tokens / seconds, tokens, number, level)

    def foresee(self, most: int, num: int) -> None:
        """Work out the prices of a look at up to so many nodes of so many requests."""
        self.target.listed(min(most, FEW) + num)
        if most > FEW:
            self.target(most + num)

    def cannot_gain(self, num_nodes: int, gains: list[float], value: float) -> bool:
        """Whether one look at the gains says that no further forward raises the value.

        A round of the best value v has at most v x its seconds tokens, however many nodes it
        verifies. So what a further forward gains, beyond v x the seconds of its children's rows,
        must be more than v x its own. False if only a closer look can tell.

        Args:
            num_nodes: That are drafted.
            gains: (B,) gain of each request's likeliest leaf.
            value: The best without it.
        """
        num, target, draft = len(gains), self.target, self.draft
        if self._power != 1.0 or self.num_base + num_nodes + num >= target.num_found:
            return False
        row, seconds = value * target.rise, draft.at(1) + self.behind - draft.fall
        if row > 0.0:
            gained = sum([gain - row for gain in gains if gain > row])
        else:
            gained, seconds = sum(gains), seconds - target.fall
        return gained < value * seconds * SAFELY

    def draft_row(self, num: int, rate: float) -> float:
        """Tokens that the seconds of a row of a draft forward would yield elsewhere.

        Args:
            num: Rows by which a forward grows if all requests take part; the same all round long.
            rate: Tokens that a second is worth.
        """
        if self._draft_row is None:
            self._draft_row = (self.draft.at(num + 1) - self.draft.at(1)) / num
        tokens = self._draft_row * rate
        return tokens if tokens > LEAST else LEAST

    def saved(self, seconds_per_token: float) -> float:
        """Seconds per token of each request that drafting for all saves, against plain decoding.

        Args:
            seconds_per_token: Of all requests' tokens together, the stall among them: of fewer
                rounds fewer are stalled.
        """
        return self.plain_seconds - self.roots * seconds_per_token
