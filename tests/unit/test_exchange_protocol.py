"""Every interleaving of the exchange of cuda/exchange.cuh, in a small model of it.

A rank's call sends a packet per slot to every other rank, takes theirs and empties the slots; its
next call begins when all its threads have ended. A model thread serves one slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import pytest

EMPTY = -1
State = tuple[tuple[int, ...], tuple[int, ...]]  # steps done by each thread; what each cell holds


class ProtocolError(Exception):
    """What the protocol must exclude."""


@dataclass(frozen=True)
class Model:
    """Ranks that make calls.

    Attributes:
        world: Ranks.
        calls: Slots that each call uses: shapes change.
        halves: Buffers used in turn.
        clears: Whether a reader empties what it has taken.
        half_of_shape: Count calls of each shape apart: what a counter per graph or block does.
    """

    world: int
    calls: tuple[int, ...]
    halves: int = 2
    clears: bool = True
    half_of_shape: bool = False

    @property
    def threads(self) -> list[tuple[int, int]]:
        """Rank and slot of each thread."""
        return list(product(range(self.world), range(max(self.calls))))

    def program(self, rank: int) -> list[tuple[str, int]]:
        """What a thread does in a call: step and other rank."""
        others = [other for other in range(self.world) if other != rank]
        kinds = ("send", "take", "empty") if self.clears else ("send", "take")
        return [(kind, other) for kind in kinds for other in others]

    def cell(self, call: int, owner: int, source: int, slot: int) -> int:
        """Index of the cell in ``owner``'s memory that ``source`` fills."""
        alike = sum(count == self.calls[call] for count in self.calls[:call])
        half = (alike if self.half_of_shape else call) % self.halves
        return ((half * self.world + owner) * self.world + source) * max(self.calls) + slot

    def start(self) -> State:
        """All threads at their first step, all cells empty."""
        cells = self.halves * self.world**2 * max(self.calls)
        return (0,) * len(self.threads), (EMPTY,) * cells

    def moves(self, state: State) -> Iterator[State]:
        """States that one step of one thread leads to."""
        places, cells = state
        for index, (rank, slot) in enumerate(self.threads):
            program = self.program(rank)
            call, step = divmod(places[index], len(program))
            if call == len(self.calls) or self.slowest(rank, places) // len(program) < call:
                continue  # done, or its kernel has not started
            place, changed = (call + 1) * len(program), cells
            if slot < self.calls[call]:
                place = places[index] + 1
                changed = self.after(cells, program[step], rank, slot, call)
            if changed is not None:
                yield (*places[:index], place, *places[index + 1 :]), changed

    def slowest(self, rank: int, places: tuple[int, ...]) -> int:
        """Steps that a rank's last thread has done."""
        return min(p for p, (r, _) in zip(places, self.threads, strict=True) if r == rank)

    def after(
        self, cells: tuple[int, ...], step: tuple[str, int], rank: int, slot: int, call: int
    ) -> tuple[int, ...] | None:
        """The cells after a step; None if it must wait.

        Raises:
            ProtocolError: If it does what must not happen.
        """
        kind, other = step
        owner, source = (other, rank) if kind == "send" else (rank, other)
        at = self.cell(call, owner, source, slot)
        found = cells[at]
        if kind == "take" and found == EMPTY:
            return None
        if found != call and kind != "send":
            raise ProtocolError(f"call {call} found a packet of call {found}")
        if found != EMPTY and kind == "send" and self.clears:
            raise ProtocolError(f"call {call} overwrote a packet of call {found}")
        if kind == "take":
            return cells
        return (*cells[:at], call if kind == "send" else EMPTY, *cells[at + 1 :])

    def explore(self) -> int:
        """Return the number of states, all of them sound.

        Raises:
            ProtocolError: If a packet can be lost or mistaken, or all can wait for each other.
        """
        seen, waiting = {self.start()}, [self.start()]
        while waiting:
            state = waiting.pop()
            following = list(self.moves(state))
            ends = [len(self.calls) * len(self.program(rank)) for rank, _ in self.threads]
            if not following and list(state[0]) != ends:
                raise ProtocolError("all wait for each other")
            fresh = set(following) - seen
            seen |= fresh
            waiting.extend(fresh)
        return len(seen)


@pytest.mark.parametrize(
    "model",
    [
        Model(2, (1, 1, 1, 1, 1)),
        Model(2, (2, 1, 2, 2)),
        Model(2, (2, 2, 1, 2)),
        Model(2, (3, 3)),
        Model(3, (1, 1, 1)),
    ],
    ids=str,
)
def test_two_halves_used_in_turn_are_sound(model: Model):
    assert model.explore() > 50


def test_one_half_loses_packets():
    with pytest.raises(ProtocolError):
        Model(2, (1, 1, 1), halves=1).explore()


def test_slots_that_are_not_emptied_give_old_packets():
    with pytest.raises(ProtocolError, match="call 2 found a packet of call 0"):
        Model(2, (1, 1, 1), clears=False).explore()


def test_a_counter_per_shape_loses_packets():
    """Why one counter serves all shapes: two calls in a row would use the same half."""
    with pytest.raises(ProtocolError):
        Model(2, (2, 1, 2, 1), half_of_shape=True).explore()
