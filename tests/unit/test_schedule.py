"""Where prompts are cut, and who runs when: the engine's schedule without an engine."""

from __future__ import annotations

import pytest

from codesign.config import Serving
from codesign.engine.blocks import block_ids
from codesign.engine.pieces import PieceSizes
from codesign.engine.schedule import Schedule
from codesign.policy.batching import BatchLimits
from codesign.prompts import BoundRequest


def requests(*lengths: int, output: int = 10) -> list[BoundRequest]:
    return [BoundRequest(i, 0.0, "", (i + 1,) * n, output) for i, n in enumerate(lengths)]


def nothing_kept(admission, blocks) -> int:
    return 0


@pytest.mark.parametrize(
    ("chunk", "size"),
    [(512, 512), (2048, 512), (256, 256), (100, 32), (700, 128), (5000, 512), (7, 1), (1, 1)],
)
def test_pieces_divide_a_prefix_block_and_nearly_fill_a_chunk(chunk, size):
    sizes = PieceSizes.of(Serving(prefill_chunk=chunk), emitted=8)
    assert sizes.prompt == size
    assert 512 % size == 0
    assert chunk // size * size >= 0.9 * chunk


def test_pieces_end_at_the_same_places_whatever_was_there_before():
    sizes = PieceSizes.of(Serving(prefill_chunk=100), emitted=8)
    ends = []
    for start in (0, 512):
        found = set()
        at = start
        while at < 1000:
            at = sizes.end(at, 900, 1000)
            found.add(at)
        ends.append({end for end in found if end > 512})
    assert ends[0] == ends[1]
    assert 900 in ends[0], "what was emitted is run apart from the prompt"


def test_without_chunks_a_prompt_is_one_piece_and_with_a_cache_its_blocks_are():
    (piece,) = one_step(Serving(), requests(1300))
    assert (piece.start, piece.count, piece.is_last) == (0, 1300, True)
    pieces = one_step(Serving(prefix_cache=True), requests(1300))
    assert [(p.start, p.end) for p in pieces] == [(0, 512), (512, 1024), (1024, 1300)]


def one_step(serving: Serving, asked: list[BoundRequest], opened=nothing_kept):
    schedule = Schedule(asked, BatchLimits(4, 1 << 16), serving, round_rows=1)
    schedule.admit(0.0)
    return schedule.pieces(opened)


def test_a_step_takes_prompts_in_order_up_to_its_chunk():
    schedule = Schedule(
        requests(100, 60, 200), BatchLimits(4, 1 << 16), Serving(prefill_chunk=128), round_rows=1
    )
    schedule.admit(0.0)
    steps = []
    while pieces := schedule.pieces(nothing_kept):
        steps.append([(p.request_id, p.start, p.end) for p in pieces])
        assert sum(p.count for p in pieces) <= 128
        for piece in pieces:
            if piece.is_last:
                schedule.emit(piece.request_id, (7,), now=0.0, is_finished=False)
    assert steps == [[(0, 0, 100)], [(1, 0, 60)], [(2, 0, 128)], [(2, 128, 200)]]


def test_a_prompt_that_is_there_as_a_whole_still_runs_its_last_piece():
    pieces = one_step(Serving(prefix_cache=True), requests(1024), lambda admission, blocks: 1024)
    assert [(p.start, p.end) for p in pieces] == [(512, 1024)]


def test_an_evicted_request_runs_its_prompt_and_then_what_it_had_emitted():
    schedule = Schedule(
        requests(20, 20, output=30), BatchLimits(2, 60), Serving(preemption=True), round_rows=1
    )
    assert schedule.admit(0.0) == [0, 1]
    for piece in schedule.pieces(nothing_kept):
        schedule.emit(piece.request_id, range(5), now=0.0, is_finished=False)
    assert schedule.make_room() == []
    schedule.emit(0, range(6), now=0.0, is_finished=False)
    schedule.emit(1, range(6), now=0.0, is_finished=False)
    assert schedule.make_room() == [1]
    assert schedule.output(1) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]
    schedule.emit(0, range(19), now=0.0, is_finished=True)
    assert schedule.admit(0.0) == [1]
    pieces = schedule.pieces(nothing_kept)
    assert [(p.start, p.end, p.is_emitted) for p in pieces] == [
        (0, 20, False), (20, 28, True), (28, 31, True),
    ]  # fmt: skip
    assert pieces[0].admission.max_new_tokens == 19


def test_idle_prefix_blocks_make_room_for_a_request_alone_that_grows():
    schedule = Schedule(
        requests(520, 20, output=600), BatchLimits(1, 1200),
        Serving(preemption=True, prefix_cache=True), round_rows=1,
    )  # fmt: skip
    cache = schedule.batcher.cache
    for number in (0, 1):
        assert schedule.admit(0.0) == [number]
        schedule.pieces(nothing_kept)
        schedule.emit(number, (7,), now=0.0, is_finished=number == 0)
    assert cache.idle_tokens == 512
    schedule.emit(1, [7] * 700, now=0.0, is_finished=False)
    assert schedule.make_room() == []
    assert cache.idle_tokens == 0


def test_requests_that_come_to_a_full_queue_leave_it_but_not_those_that_ran():
    schedule = Schedule(
        requests(20, 20, 20, 20), BatchLimits(2, 46), Serving(preemption=True), round_rows=1,
        max_waiting=0,
    )  # fmt: skip
    assert schedule.admit(0.0) == [0, 1]
    assert schedule.refuse(0.0) == [2, 3]
    for piece in schedule.pieces(nothing_kept):
        schedule.emit(piece.request_id, range(4), now=0.0, is_finished=False)
    assert schedule.make_room() == [1]
    assert schedule.refuse(0.0) == []


def test_block_ids_tell_prompts_apart_from_their_first_difference_on():
    one, other = (1,) * 2000, (1,) * 600 + (2,) + (1,) * 1399
    assert len(block_ids(one)) == 3
    assert block_ids(one)[0] == block_ids(other)[0]
    assert not set(block_ids(one)[1:]) & set(block_ids(other)[1:])
    assert block_ids(one[:511]) == ()
