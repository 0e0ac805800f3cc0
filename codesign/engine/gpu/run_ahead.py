"""A draft's ranks run the next expansions while the host still reads the last one.

Between two expansions of one request the host takes as long as a sixth of a small model's forward.
Where it knows that more expansions follow (``Speculation.following``), it sends behind a step all
that their leaves are chosen from (growth.py): each rank enqueues the steps that follow at once, and
each of these chooses its rows from the answer before it, on the device (ahead_steps.py).

The host still decides. It reads the answers one by one, names the next expansion as ever and
compares: equal rows have been run already, others are sent as a step of their own. Rows that were
run in vain lie behind the tree's in the slab and are written over; nothing else has changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from codesign.engine.drafter import Grow
from codesign.engine.gpu.growth import ahead_message, steps_that_fit
from codesign.engine.gpu.rank_group import GroupLeader
from codesign.engine.gpu.request_rows import RequestRows
from codesign.engine.gpu.step_rows import FOLLOWED, Words, bucket_of
from codesign.kernels.leaf_choices import fits
from codesign.policy.protocol import ExpansionRows
from codesign.policy.speculation import MAX_TREE_ROWS


class RunAhead:
    """What the ranks of a draft run ahead of its host.

    Args:
        leader: Of the ranks.
        choices: Tokens per row in an answer.

    Attributes:
        num_guesses: Steps whose rows ranks chose and the host then looked at.
        num_confirmed: Those that were what the host chose.
    """

    def __init__(self, leader: GroupLeader, choices: int) -> None:
        self._leader = leader
        self._choices = choices
        self._steps, self._width, self._fanout = 0, 0, 0  # that are expected
        self._grow: Grow | None = None
        self._begun = 0
        self._request_id = -1
        self._context = 0  # slab rows before the next guess
        self._left = 0  # guesses that were not looked at
        self._chosen = 0  # words of an answer before those of its rows
        self.num_guesses = self.num_confirmed = 0

    def expect(self, steps: int, *, width: int, fanout: int, grow: Grow) -> None:
        """See ``AheadDrafter.expect``."""
        self._steps, self._width, self._fanout, self._grow = steps, width, fanout, grow

    def confirmed(self, expansion: Sequence[ExpansionRows]) -> Words | None:
        """The answer of an expansion that the ranks have run already; None if they have not."""
        if not self._left:
            return None
        rows = expansion[0]
        if (
            len(expansion) > 1
            or (rows.request_id, rows.context) != (self._request_id, self._context)
            or self._leader.num_begun != self._begun  # somebody else has asked
        ):
            self.drop()
            return None
        answer = self._leader.take()
        self._left -= 1
        self.num_guesses += 1
        if not _are_chosen(rows, answer[self._chosen :]):
            self.drop()
            return None
        self.num_confirmed += 1
        self._context += len(rows.tokens)
        self._steps = 0
        return answer

    def drop(self) -> None:
        """Forget what was not looked at: trees or slabs are about to change."""
        if self._left:
            self._left = 0
            self._leader.settle()

    def rows_needed(self, expansion: Sequence[ExpansionRows]) -> int:
        """Slab rows that a request must have for the steps behind its expansion; 0 without any."""
        if not self._steps:
            return 0
        rows = expansion[0]
        bucket, num_nodes = bucket_of(self._width), len(rows.nodes)
        self._steps = steps_that_fit(
            self._steps, num_rows=num_nodes, width=self._width, fanout=self._fanout
        )
        if not fits(bucket, self._choices):
            self._steps = 0
        if not self._steps:
            return 0
        num_slots = num_nodes if rows.visible is None else rows.visible[-1][-1] + 1
        prefix = rows.context + len(rows.tokens) - num_slots
        return prefix + min(num_slots + self._steps * self._width, MAX_TREE_ROWS)

    def ask(self, message: Words, rows: ExpansionRows, part: RequestRows) -> Words:
        """Run an expansion, and behind it the steps that are expected; the first answer.

        Args:
            message: Of the expansion.
            rows: The same.
            part: Its rows that are not in the slab yet, as the message has them; all of its nodes.
        """
        num_rows = len(part.tokens)
        bucket = bucket_of(num_rows)
        steps, self._steps = self._steps, 0
        if not steps or bucket != bucket_of(self._width) or self._grow is None:
            return self._leader.ask(message)
        self._leader.settle()
        message[FOLLOWED] = 1
        self._leader.begin(message)
        growth = self._grow(steps)  # while the step runs
        first_row = num_rows - len(rows.nodes)
        self._left = self._leader.begin(
            ahead_message(growth, bucket=bucket, slab=part.slot, first_row=first_row)
        )
        self._begun = self._leader.num_begun
        self._request_id = rows.request_id
        self._context = rows.context + len(rows.tokens)
        self._chosen = 2 * bucket * self._choices
        return self._leader.take()


def _are_chosen(rows: ExpansionRows, chosen: Words) -> bool:
    """Whether the ranks chose these nodes: a token below a slot is one node.

    Args:
        rows: What the host chose.
        chosen: See ``leaf_choices.chosen_words``.
    """
    count, half = len(rows.tokens), len(chosen) // 2
    if rows.visible is None or chosen[-1] != count:
        return False
    tokens, parents = chosen[:count].tolist(), chosen[half : half + count].tolist()
    return tokens == list(rows.tokens) and parents == [path[-2] for path in rows.visible]
