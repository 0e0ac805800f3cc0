"""Successive launches of cuda/gemm_all_reduce.cu on several ranks, in a model of all their roles.

A role is a line of operations in the order of the source. So is a copy into the ring, a store to
another block and a packet to another rank: they land when they like. Machine finds out whether all
orders end well, and must find each fault that is planted into the lines. test_gemm_protocol.py has
every order of one block's loads and sums, test_exchange_protocol.py of packets alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import pytest

EMPTY = -1
CALL = 1 << 16  # as in exchange.cuh
RUNS, ENDED = 0, 1  # a block, whose shared memory is there meanwhile
CHANGES = {"arrive", "put", "send"}


class ProtocolError(Exception):
    """What the protocol must exclude."""


class Op(NamedTuple):
    """One thing that a role does, with what is at ``at``: a barrier or a cell of memory.

    wait: until phase ``value`` of a barrier is over, which counts as so while the next one is.
    mark: note that phase ``value`` is the last that is over. arrive: count ``value`` arrivals.
    put: store. see: read, and find ``value``. take: poll until there is something, and find
    ``value``. send: store where nothing may be.
    """

    kind: str
    at: tuple
    value: int = 0

    def after(self, found: int, count: int) -> int | None:
        """What is there behind it, or None if it has to wait; ``count`` ends a barrier's phase.

        Raises:
            ProtocolError: If it finds what must not be there.
        """
        if self.kind == "arrive":
            return found + self.value
        if self.kind == "put":
            return self.value
        seen, wanted = found, EMPTY if self.kind == "send" else self.value
        if self.kind in {"wait", "mark"}:
            seen = found // count - 1
        if self.kind == "wait" and seen % 2 != wanted % 2:  # as mbarrier.try_wait.parity decides
            return None
        if self.kind == "take" and seen == EMPTY:
            return None
        if seen != wanted:
            raise ProtocolError(f"{self} found {seen}")
        return self.value if self.kind == "send" else found


class Role(NamedTuple):
    """Who runs a line of operations."""

    name: str
    launch: int
    rank: int
    block: int
    number: int = 0


Lines = dict[Role, list[Op]]


@dataclass
class Launches:
    """The lines of all roles.

    Attributes:
        world: Ranks.
        blocks: Of a rank: one cluster.
        consumers: Warps that multiply and, behind that, receive.
        slots: Of partial sums, each with a reducer.
        stages: Of the ring.
        per_step: Tiles that are multiplied at a time.
        chunks: Of every block.
        count: Of arrivals that end a barrier's phase, by its name.
        lines: Of every role.
    """

    world: int = 2
    blocks: int = 2
    tiles: int = 3
    launches: int = 3
    consumers: int = 2
    slots: int = 2
    stages: int = 2
    per_step: int = 1
    chunks: int = 1
    count: dict[str, int] = field(init=False, repr=False)
    lines: Lines = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self):
        """Write all lines."""
        roles = 1 + self.consumers + self.slots
        self.count = dict.fromkeys(("full", "partial_empty", "issued"), 1) | {"calls": CALL}
        self.count |= {"empty": self.consumers, "partial_full": self.consumers}
        self.count |= {"arrived": self.blocks, "started": self.blocks, "sync": roles}
        posted = self.tiles * (self.world - 1)  # packets that land before a launch is complete
        self.count["complete"] = self.blocks * roles + posted
        for launch in range(self.launches):
            for rank in range(self.world):
                for block in range(self.blocks):
                    self.write_block(launch, rank, block)

    @property
    def steps(self) -> int:
        """Steps of a chunk."""
        return -(-self.tiles // self.per_step)

    def write_block(self, *block: int) -> None:
        """Write the lines of a launch, rank and block."""
        self.lines[Role("producer", *block)] = list(self.producer(*block))
        for warp in range(self.consumers):
            self.lines[Role("consumer", *block, warp)] = list(self.consumer(*block, warp=warp))
        for slot in range(self.slots):
            self.lines[Role("reducer", *block, slot)] = list(self.reducer(*block, slot=slot))

    def lands(self, role: Role, *ops: Op) -> Op:
        """Let something land on its own once the operation returned is done."""
        key = Role(*role[:4], number=sum(each[:4] == role[:4] for each in self.lines))
        issued = ("issued", *key)
        self.lines[key] = [Op("wait", issued), *ops]
        return Op("arrive", issued, 1)

    def begins(self, launch: int, rank: int) -> Iterator[Op]:
        """wait_for_previous."""
        if launch > 0:
            yield Op("wait", ("complete", launch - 1, rank))

    def starts(self, *block: int) -> Iterator[Op]:
        """What begins a warp that does not fill the ring."""
        if self.blocks > 1:
            yield Op("wait", ("started", *block[:2]))
        yield from self.begins(*block[:2])

    def ends(self, *block: int, counts: bool = False) -> Iterator[Op]:
        """What ends every warp."""
        yield Op("arrive", ("sync", *block, "end"), 1)
        yield Op("wait", ("sync", *block, "end"))
        if counts:
            yield Op("put", ("memory", *block), ENDED)
            added = 1 if block[2] else CALL - (self.blocks - 1)
            yield Op("arrive", ("calls", block[1]), added)
        yield Op("arrive", ("complete", *block[:2]), 1)

    def producer(self, launch: int, rank: int, block: int) -> Iterator[Op]:
        """``produce``, and then ``send_tiles``."""
        at = launch, rank, block
        yield Op("put", ("memory", *at), RUNS)
        if self.blocks > 1:
            yield Op("arrive", ("started", launch, rank), 1)
        for step in range(self.chunks * self.steps):
            lap, stage = divmod(step, self.stages)
            if step == self.stages:
                yield from self.begins(launch, rank)
            yield Op("wait", ("empty", *at, stage), lap - 1)
            copied = Op("put", ("ring", *at, stage), step)
            full = Op("arrive", ("full", *at, stage), 1)
            yield self.lands(Role("copy", *at), copied, full)
        if self.blocks > 1:
            yield from self.starts(*at)
            yield Op("mark", ("calls", rank), launch - 1)
            for tile in range(block, self.tiles, self.blocks):
                yield from self.taken(*at, tile=tile)
                yield from self.sent(*at, tile=tile)
        else:
            yield Op("arrive", ("sync", *at, "kept"), 1)
        yield from self.ends(*at)

    def taken(self, *block: int, tile: int) -> Iterator[Op]:
        """Wait for the cluster's sums of a tile and read them."""
        if self.blocks == 1:
            yield Op("see", ("kept", *block, tile), self.chunks)
            return
        yield Op("wait", ("arrived", *block, tile))
        for source in range(self.blocks):
            yield Op("see", ("received", *block, tile, source), tile)

    def others(self, rank: int) -> list[int]:
        """The other ranks."""
        return [other for other in range(self.world) if other != rank]

    def sent(self, launch: int, rank: int, block: int, tile: int) -> Iterator[Op]:
        """``send_packet``."""
        for other in self.others(rank):
            packet = Op("send", ("inbox", other, launch % 2, rank, tile), launch)
            complete = Op("arrive", ("complete", launch, rank), 1)
            yield self.lands(Role("packet", launch, rank, block), packet, complete)

    def consumer(self, launch: int, rank: int, block: int, warp: int) -> Iterator[Op]:
        """``consume``, then ``finish_together``, and of the first warp ``count_call``."""
        at = launch, rank, block
        yield from self.starts(*at)
        yield Op("mark", ("calls", rank), launch - 1)
        for step in range(self.chunks * self.steps):
            yield from self.product(*at, warp=warp, step=step)
        mine = range(block + warp * self.blocks, self.tiles, self.consumers * self.blocks)
        if self.blocks == 1:
            yield Op("arrive", ("sync", *at, "kept"), 1)
            yield Op("wait", ("sync", *at, "kept"))
            for tile in mine:
                yield from self.taken(*at, tile=tile)
                yield from self.sent(*at, tile=tile)
        for tile in mine:
            yield from self.taken(*at, tile=tile)
            inbox = [("inbox", rank, launch % 2, other, tile) for other in self.others(rank)]
            yield from (Op("take", cell, launch) for cell in inbox)
            yield from (Op("put", cell, EMPTY) for cell in inbox)
        yield from self.ends(*at, counts=warp == 0)

    def product(self, *block: int, warp: int, step: int) -> Iterator[Op]:
        """One step of a consumer: every chunk begins with the first slot."""
        lap, stage = divmod(step, self.stages)
        place = step % self.steps
        slot = place % self.slots
        yield Op("wait", ("full", *block, stage), lap)
        yield Op("see", ("ring", *block, stage), step)
        yield Op("wait", ("partial_empty", *block, slot), self.uses(step) - 1)
        yield Op("put", ("partial", *block, slot, warp), step)
        yield Op("arrive", ("empty", *block, stage), 1)
        yield Op("arrive", ("partial_full", *block, slot), 1)

    def uses(self, step: int) -> int:
        """How often the slot of a step was used before it."""
        whole, place = divmod(step, self.steps)
        slot = place % self.slots
        return whole * len(range(slot, self.steps, self.slots)) + place // self.slots

    def reducer(self, launch: int, rank: int, block: int, slot: int) -> Iterator[Op]:
        """``reduce``."""
        at = launch, rank, block
        yield from self.starts(*at)
        for chunk in range(self.chunks):
            for place in range(slot, self.steps, self.slots):
                step = chunk * self.steps + place
                yield Op("wait", ("partial_full", *at, slot), self.uses(step))
                for warp in range(self.consumers):
                    yield Op("see", ("partial", *at, slot, warp), step)
                yield Op("arrive", ("partial_empty", *at, slot), 1)
                first = place * self.per_step
                for tile in range(first, min(first + self.per_step, self.tiles)):
                    yield from self.summed(*at, tile=tile, chunk=chunk)
        if self.blocks == 1:
            yield Op("arrive", ("sync", *at, "kept"), 1)
        yield from self.ends(*at)

    def summed(self, launch: int, rank: int, block: int, tile: int, chunk: int) -> Iterator[Op]:
        """Keep a tile's sums, or send them to the tile's owner."""
        kept = ("kept", launch, rank, block, tile)
        if chunk > 0:
            yield Op("see", kept, chunk)
        if chunk < self.chunks - 1 or self.blocks == 1:
            yield Op("put", kept, chunk + 1)
            return
        owner = launch, rank, tile % self.blocks
        runs = Op("see", ("memory", *owner), RUNS)
        stored = Op("put", ("received", *owner, tile, block), tile)
        arrived = Op("arrive", ("arrived", *owner, tile), 1)
        yield self.lands(Role("sum", launch, rank, block), runs, stored, arrived)


@dataclass
class Phase:
    """Of a barrier: what happened before its end, its arrivals, and those who waited for it."""

    past: int = 0
    arrivals: int = 0
    waits: int = 0


class Machine:
    """Runs lines in one order, and checks what makes that order stand for all others.

    No line depends on what was read. So all orders have the same result if, of any two accesses of
    a cell of which one writes, one happens before the other whatever the order: both are one
    role's, or between them lies a wait or a take of what the other role gave. Nor may a phase of a
    barrier be over before the waits for the one in front of it, or take its arrivals.
    """

    def __init__(self, launches: Launches):
        """Nothing has happened. Whatever happens is a bit, and what happened before it are bits."""
        self.count = launches.count
        self.lines = list(launches.lines.values())
        self.done = [0] * len(self.lines)
        self.past = [0] * len(self.lines)  # of each role
        self.happened = 0
        self.memory: dict[tuple, int] = {}
        self.write: dict[tuple, tuple[int, int]] = {}  # the last one of a cell, and its past
        self.reads: dict[tuple, int] = {}  # since then
        self.phases: dict[tuple, Phase] = defaultdict(Phase)

    def run(self, seed: int) -> None:
        """Run all lines, in turns of any order, each as far as it comes.

        Raises:
            ProtocolError: If an order exists in which something is found that must not be, or all
                wait for each other.
        """
        roles, random, before = list(range(len(self.lines))), Random(seed), -1
        while self.happened > before:
            before = self.happened
            random.shuffle(roles)
            for role in roles:
                line = self.lines[role]
                while self.done[role] < len(line) and self.step(role, line[self.done[role]]):
                    self.done[role] += 1
        if any(done < len(line) for done, line in zip(self.done, self.lines, strict=True)):
            raise ProtocolError("all wait for each other")

    def step(self, role: int, op: Op) -> bool:
        """Do one operation, or return that it has to wait."""
        count = self.count.get(op.at[0], 0)
        found = self.memory.get(op.at, 0 if count else EMPTY)
        after = op.after(found, count)
        if after is None:
            return False
        self.memory[op.at] = after
        bit = 1 << self.happened
        self.happened += 1
        self.past[role] |= bit
        if not count:
            self.use_cell(role, op, bit)
        elif op.kind == "arrive":
            self.arrive(role, op, bit, found // count)
        else:
            phase = self.phases[*op.at, op.value]
            phase.waits |= bit
            self.past[role] |= phase.past if op.kind == "wait" else 0
        return True

    def use_cell(self, role: int, op: Op, bit: int) -> None:
        """Check that a read or write comes behind what it must."""
        write, past = self.write.get(op.at, (0, 0))
        if op.kind == "take":
            self.past[role] |= past
        self.must_come_behind(write, role, op)
        if op.kind in CHANGES:
            self.must_come_behind(self.reads.get(op.at, 0), role, op)
            self.write[op.at] = bit, self.past[role]
            self.reads[op.at] = 0
        else:
            self.reads[op.at] = self.reads.get(op.at, 0) | bit

    def arrive(self, role: int, op: Op, bit: int, number: int) -> None:
        """Check that an arrival counts in its own phase, and that nobody misses the one before."""
        phase, before = self.phases[*op.at, number], self.phases[*op.at, number - 1]
        self.must_come_behind(before.arrivals, role, op)
        phase.arrivals |= bit
        phase.past |= self.past[role]
        if self.memory[op.at] // self.count[op.at[0]] > number and before.waits & ~phase.past:
            raise ProtocolError(f"{op} may end a phase before others have seen the last one")

    def must_come_behind(self, events: int, role: int, op: Op) -> None:
        """Raise if some of the events may come later than an operation."""
        if events & ~self.past[role]:
            raise ProtocolError(f"{op} may come too early")


def found_in(launches: Launches, message: str) -> bool:
    """Whether the machine finds that fault in whatever order it runs."""
    for seed in range(3):
        with pytest.raises(ProtocolError, match=message):
            Machine(launches).run(seed)
    return True


def edit(launches: Launches, role: str, change: Callable[[list[Op]], list[Op]]) -> Launches:
    """Change all lines of a role."""
    for key, line in launches.lines.items():
        if key.name == role:
            launches.lines[key] = change(line)
    return launches


def without(launches: Launches, role: str, kind: str, name: str) -> Launches:
    """Leave out what a role does with something."""
    return edit(launches, role, lambda ops: [op for op in ops if not is_one(op, kind, name)])


def is_one(op: Op, kind: str, name: str) -> bool:
    """Whether an operation is of that kind and on something of that name."""
    return (op.kind, op.at[0]) == (kind, name)


@pytest.mark.parametrize(
    "launches",
    [
        Launches(),
        Launches(stages=3),
        Launches(blocks=1, tiles=4, chunks=2, launches=4),
        Launches(world=3, tiles=5, slots=3, consumers=3),
        Launches(blocks=4, tiles=9, stages=3, consumers=1),
        Launches(tiles=7, per_step=2, chunks=3, stages=4),
        Launches(tiles=1),
    ],
    ids=str,
)
def test_launches_end_well_in_every_order(launches: Launches):
    for seed in range(2):
        machine = Machine(launches)
        machine.run(seed)
        assert machine.happened == sum(map(len, launches.lines.values()))


FAULTS = [
    ("producer", "empty", "ring"),
    ("producer", "arrived", "received"),  # a tile sent before the last reducer of its cluster
    ("consumer", "full", "ring"),
    ("consumer", "partial_empty", "partial"),
    ("consumer", "arrived", "received"),
    ("reducer", "partial_full", "partial"),
]


@pytest.mark.parametrize(
    ("role", "name", "message"),
    [*FAULTS, ("producer", "complete", "calls"), ("consumer", "sync", "memory")],
)
def test_no_wait_can_be_left_out(role: str, name: str, message: str):
    launches = Launches(tiles=5, stages=5 if name == "complete" else 2)
    assert found_in(without(launches, role, "wait", name), message)


@pytest.mark.parametrize(("role", "name", "message"), FAULTS)
def test_no_wait_can_skip_a_phase(role: str, name: str, message: str):
    def skipped(op: Op) -> Op:
        late = is_one(op, "wait", name) and op.value >= 0
        return op._replace(value=op.value - 1) if late else op

    launches = edit(Launches(tiles=5), role, lambda ops: [skipped(op) for op in ops])
    assert found_in(launches, f"{message}|all wait")


@pytest.mark.parametrize(
    ("role", "name", "by", "message"),
    [
        ("copy", "full", 1, "ring"),
        ("consumer", "empty", 3, "ring"),
        ("consumer", "partial_full", 2, "partial"),
        ("reducer", "partial_empty", 1, "partial"),
        ("sum", "arrived", 1, "received"),
    ],
)
def test_nothing_can_be_handed_over_before_it_is_stored_or_read(
    role: str, name: str, by: int, message: str
):
    def early(ops: list[Op]) -> list[Op]:
        ops = list(ops)
        for at, op in enumerate(ops):
            if is_one(op, "arrive", name):
                ops.insert(at - by, ops.pop(at))
        return ops

    assert found_in(edit(Launches(tiles=5), role, early), message)


@pytest.mark.parametrize("name", ["arrived", "empty", "partial_full", "sync", "started"])
def test_nobody_can_go_on_before_the_last_of_several(name: str):
    launches = Launches(tiles=5)
    launches.count[name] -= 1
    assert found_in(launches, name.removesuffix("_full"))


def test_sums_cannot_be_sent_to_a_block_before_it_has_started():
    launches = Launches()
    for role in ("producer", "consumer", "reducer"):
        without(launches, role, "wait", "started")
    assert found_in(launches, "memory")


def test_packets_of_two_launches_in_a_row_cannot_share_a_buffer():
    def shared(op: Op) -> Op:
        return op._replace(at=(*op.at[:2], 0, *op.at[3:])) if op.at[0] == "inbox" else op

    launches = Launches()
    for role in ("packet", "consumer"):
        edit(launches, role, lambda ops: [shared(op) for op in ops])
    assert found_in(launches, "inbox")


def test_no_block_can_count_a_launch_for_the_others():
    """Why each counts a part: the sender of a block that lags would look up the other half."""
    launches = Launches()
    for key, ops in launches.lines.items():
        whole = [op._replace(value=CALL) if is_one(op, "arrive", "calls") else op for op in ops]
        launches.lines[key] = [
            op for op in whole if key.block == 0 or op.kind != "arrive" or op.at[0] != "calls"
        ]
    assert found_in(launches, "calls")
