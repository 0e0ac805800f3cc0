"""Every interleaving of the roles of cuda/gemm_core.cuh, in a small model of them.

A producer fills a ring with a copy engine of its own pace, consumers read a stage and hand their
sum to a reducer through a slot. Barriers count arrivals and have a phase bit; a wait compares it. A
load from the ring is issued at one time and has its value at a later one, unless something that
needs the value lies between. test_gemm_all_reduce_protocol.py has what comes behind the reducers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

STALE = -1
UNITS = -1  # where a consumer stands before the first step of a chunk


class ProtocolError(Exception):
    """What the protocol must exclude."""


@dataclass(frozen=True)
class Model:
    """One block.

    Attributes:
        steps: Tiles of each chunk.
        stages: Of the ring.
        consumers: Warps that read each stage.
        slots: Of partial sums.
        reducers: Warps that take turns at the slots; as many as slots is one each.
        frees_early: A consumer frees a stage behind its load and not behind a use of it.
        unit_sets: Chunks whose units there is room for; consumers leave them for reducers before
            the first load of a chunk.
        norm: Behind the first step of the last chunk consumers give their squares; the last reducer
            adds them up before its part of that chunk, and the others need them behind theirs.
    """

    steps: tuple[int, ...]
    stages: int = 2
    consumers: int = 2
    slots: int = 2
    reducers: int = 2
    frees_early: bool = False
    unit_sets: int = 2
    norm: bool = False

    @property
    def chunks(self) -> list[int]:
        """The chunk of each step."""
        return [chunk for chunk, count in enumerate(self.steps) for _ in range(count)]

    @property
    def last_chunk(self) -> int:
        """The first step of the last chunk."""
        return sum(self.steps[:-1])

    @property
    def uses(self) -> list[int]:
        """The slot of each step: every chunk begins with the first."""
        return [step % self.slots for count in self.steps for step in range(count)]

    @property
    def parities(self) -> list[int]:
        """What consumers wait for at the slot of each step: a bit for each slot in a register that
        turns, so that the next slot's is the lowest.
        """
        taken, top, found = (1 << self.slots) - 1, self.slots - 1, []
        for count in self.steps:
            for _ in range(count):
                found.append(taken & 1)
                taken = taken >> 1 | (~taken & 1) << top
            for _ in range(-count % self.slots):  # past slots without a step in this chunk
                taken = taken >> 1 | (taken & 1) << top
        return found

    def start(self) -> State:
        """Nothing has happened."""
        return State(
            filled=0,
            landed=0,
            consumer=((0, UNITS),) * self.consumers,
            loads=((STALE, STALE),) * self.consumers,
            ring=(STALE,) * self.stages,
            units=((STALE,) * self.consumers,) * self.unit_sets,
            partial=((STALE,) * self.consumers,) * self.slots,
            full=(0,) * self.stages,
            empty=(0,) * self.stages,
            partial_full=(0,) * self.slots,
            partial_empty=(0,) * self.slots,
            reducer=(0,) * self.reducers,
            squared=0,
            shared=not self.norm,
        )

    def moves(self, state: State) -> Iterator[State]:
        """States that one step of one role leads to."""
        yield from self.producer_moves(state)
        for warp in range(self.consumers):
            yield from self.consumer_moves(state, warp)
        for warp in range(self.reducers):
            yield from self.reducer_moves(state, warp)

    def producer_moves(self, state: State) -> Iterator[State]:
        """Ask for a copy; a copy lands."""
        step, total = state.filled, len(self.uses)
        stage, lap = step % self.stages, step // self.stages
        if step < total and passes(state.empty[stage], self.consumers, (lap + 1) % 2):
            yield replace(state, filled=step + 1)
        if state.landed < state.filled:
            stage = state.landed % self.stages
            yield replace(
                state,
                landed=state.landed + 1,
                ring=put(state.ring, stage, state.landed),
                full=put(state.full, stage, state.full[stage] + 1),
            )

    def consumer_moves(self, state: State, warp: int) -> Iterator[State]:
        """-1: leave a chunk's units; 0: load a stage; 1: free it early; 2: store; 3: hand over."""
        step, at = state.consumer[warp]
        loading, pending = state.loads[warp]
        if pending != STALE:  # the value of a load arrives
            value = state.ring[pending]
            yield replace(state, loads=put(state.loads, warp, (value, STALE)))
        if step == len(self.uses):
            return
        stage, lap, slot = step % self.stages, step // self.stages, self.uses[step]
        after = replace(state, consumer=put(state.consumer, warp, (step, at + 1)))
        freed = put(state.empty, stage, state.empty[stage] + 1)
        chunk = self.chunks[step]
        if at == UNITS:
            units = put(state.units[chunk % self.unit_sets], warp, chunk)
            yield replace(after, units=put(state.units, chunk % self.unit_sets, units))
        elif at == 0 and passes(state.full[stage], 1, lap % 2):
            yield replace(after, loads=put(state.loads, warp, (STALE, stage)))
        elif at == 1:
            yield replace(after, empty=freed) if self.frees_early else after
        elif at == 2 and pending == STALE:
            if passes(state.partial_empty[slot], 1, self.parities[step]):
                sums = put(state.partial[slot], warp, loading)
                yield replace(after, partial=put(state.partial, slot, sums))
        elif at == 3:
            handed = put(state.partial_full, slot, state.partial_full[slot] + 1)
            empty = state.empty if self.frees_early else freed
            is_first = step + 1 == len(self.uses) or self.chunks[step + 1] != chunk
            place = put(state.consumer, warp, (step + 1, UNITS if is_first else 0))
            squared = state.squared + (self.norm and step == self.last_chunk)
            yield replace(after, partial_full=handed, empty=empty, consumer=place, squared=squared)

    def reducer_moves(self, state: State, warp: int) -> Iterator[State]:
        """Add a slot's sums."""
        mine = [
            step
            for step, slot in enumerate(self.uses)
            if (slot if self.reducers == self.slots else step) % self.reducers == warp
        ]
        done = state.reducer[warp]
        ahead = sum(step < self.last_chunk for step in mine)  # steps of the chunks before
        if not state.shared and warp == self.reducers - 1 and done == ahead:
            if passes(state.squared, self.consumers, 0):
                yield replace(state, shared=True)
            return
        if done == len(mine) or (not state.shared and done > ahead):
            return
        step = mine[done]
        slot = self.uses[step]
        if passes(state.partial_full[slot], self.consumers, self.uses[:step].count(slot) % 2):
            if any(value != step for value in state.partial[slot]):
                raise ProtocolError(f"step {step} was added from {state.partial[slot]}")
            units = state.units[self.chunks[step] % self.unit_sets]
            if any(chunk != self.chunks[step] for chunk in units):
                raise ProtocolError(f"step {step} was added in units of chunks {units}")
            yield replace(
                state,
                reducer=put(state.reducer, warp, done + 1),
                partial_empty=put(state.partial_empty, slot, state.partial_empty[slot] + 1),
            )

    def explore(self) -> int:
        """Return the number of states, all of them sound.

        Raises:
            ProtocolError: If a wrong value is added, or all can wait for each other.
        """
        seen, waiting = {self.start()}, [self.start()]
        while waiting:
            state = waiting.pop()
            following = set(self.moves(state))
            ended = sum(state.reducer) == len(self.uses) and state.shared
            if not following and not ended:
                raise ProtocolError("all wait for each other")
            fresh = following - seen
            seen |= fresh
            waiting.extend(fresh)
        return len(seen)


@dataclass(frozen=True)
class State:
    """Progress of every role, what memory holds, and the arrivals that each barrier has seen."""

    filled: int
    landed: int
    consumer: tuple[tuple[int, int], ...]
    loads: tuple[tuple[int, int], ...]  # value; stage of a load under way
    ring: tuple[int, ...]
    units: tuple[tuple[int, ...], ...]
    partial: tuple[tuple[int, ...], ...]
    full: tuple[int, ...]
    empty: tuple[int, ...]
    partial_full: tuple[int, ...]
    partial_empty: tuple[int, ...]
    reducer: tuple[int, ...]
    squared: int  # consumers that have given their squares
    shared: bool  # or there are none


def passes(arrivals: int, count: int, parity: int) -> bool:
    """Whether a wait for the phase of that parity ends, as mbarrier.try_wait.parity decides."""
    return (arrivals // count) % 2 != parity


def put(values: tuple, index: int, value: object) -> tuple:
    """The tuple with one value replaced."""
    return (*values[:index], value, *values[index + 1 :])


@pytest.mark.parametrize(
    "model",
    [
        Model((3,)),
        Model((3, 3)),
        Model((4, 2), stages=3),
        Model((5,), consumers=1, slots=3, reducers=3),
        Model((1, 1, 1)),
        Model((2, 2, 2), consumers=1, slots=3, reducers=3),
        Model((4, 4, 4), consumers=1, slots=3, reducers=3),
        Model((3, 2), norm=True),
        Model((1,), norm=True),
        Model((4,), consumers=1, slots=3, reducers=3, norm=True),
    ],
    ids=str,
)
def test_the_roles_are_sound(model: Model):
    assert model.explore() > 50


def test_parities_tell_how_often_a_slot_was_used():
    for slots in (1, 2, 3):
        for steps in itertools.product(range(1, 5), repeat=3):
            model = Model(steps, slots=slots)
            uses = model.uses
            assert model.parities == [
                (uses[:step].count(slot) + 1) % 2 for step, slot in enumerate(uses)
            ]


def test_a_stage_freed_right_behind_its_loads_gives_the_next_records():
    """What gave a wrong tile in three launches out of four with one tile a step."""
    with pytest.raises(ProtocolError, match="step 0 was added from"):
        Model((3,), frees_early=True).explore()


def test_one_set_of_units_is_overwritten_while_a_reducer_needs_it():
    with pytest.raises(ProtocolError, match="in units of chunks"):
        Model((2, 2), unit_sets=1).explore()


def test_reducers_in_turn_at_a_slot_take_an_old_phase():
    """Why each slot has one reducer: a phase bit cannot tell a phase from the one before last."""
    with pytest.raises(ProtocolError, match="was added from"):
        Model((4,), slots=1, reducers=2).explore()
