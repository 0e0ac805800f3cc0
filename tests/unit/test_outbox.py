"""Answers on the host: every word with its flag, each answer in its slot, and waits that end."""

from __future__ import annotations

import time

import pytest
import torch

from codesign.engine.gpu.outbox import Due, Outbox, wait
from codesign.engine.gpu.tensor_group import SingleRank
from codesign.kernels import host_answer

CPU = torch.device("cpu")
WORDS = (0, 1, -1, -(1 << 31), (1 << 31) - 1, 7)


@pytest.fixture(params=["reference", "kernel"])
def post_words(request):
    """The op and its Triton kernel in the interpreter."""
    if request.param == "reference":
        return host_answer.post_words
    kernels = request.getfixturevalue("interpreted")("host_answer_triton")[0]
    return lambda words, slots, turn=None, kept=None: kernels.post_words(words, slots, turn, kept)


@pytest.mark.parametrize("count", [1, 5, 8, 200])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_word_of_an_answer_has_its_flag(post_words, count, dtype):
    slots = torch.zeros(2, count, 2, dtype=torch.int32)
    words = torch.tensor((WORDS * count)[:count], dtype=dtype)
    post_words(words, slots)
    assert slots[0, :, 0].tolist() == words.tolist()
    assert slots[0, :, 1].eq(1).all()
    assert slots[1].eq(0).all(), "another answer's"


def test_answers_take_turns(post_words):
    slots, turn = torch.zeros(3, 4, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    for number in range(3):
        assert turn.tolist() == [0, number, 0, 0], "the next word is someone else's"
        post_words(torch.full((4,), 10 + number), slots, turn[1:2])
        assert slots[..., 1].tolist() == [[1] * 4] * (number + 1) + [[0] * 4] * (2 - number)
    assert slots[..., 0].tolist() == [[10] * 4, [11] * 4, [12] * 4]
    assert turn.tolist() == [0, 0, 0, 0], "the first slot follows the last"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_answer_stays_on_the_device_where_a_step_begins_with_it(post_words, dtype):
    slots, kept = torch.zeros(1, len(WORDS), 2, dtype=torch.int32), torch.full((9,), 3).int()
    post_words(torch.tensor(WORDS, dtype=dtype), slots, None, kept[: len(WORDS)])
    assert kept.tolist() == [*WORDS, 3, 3, 3]
    assert slots[0, :, 0].tolist() == [*WORDS]


def test_an_answer_is_there_when_its_step_has_run():
    outbox = Outbox(2, CPU)
    for words in ([4, 5], [6, 7]):
        due = outbox.expect()
        assert not due.is_there(), "the last answer does not count as this one"
        outbox.post(torch.tensor(words))
        wait(due, SingleRank(), CPU, None)
        assert due.words.tolist() == words


def test_an_answer_is_not_there_until_all_its_words_are():
    due = Outbox(3, CPU).expect()
    for missing in ((0, 1), (1,), (2,)):
        due.flags[:] = 1
        due.flags[list(missing)] = 0
        assert not due.is_there()
    due.flags[:] = 1
    assert due.is_there()


def test_a_step_without_an_answer_ends_the_wait():
    due = Outbox(2, CPU).expect()
    with pytest.raises(RuntimeError, match="without its answer"):
        wait(due, SingleRank(), CPU, None)


COMPILED = """
import re
from codesign.kernels.host_answer_triton import _post
types = {"words": "*i32", "slots": "*i64", "turn": "*i32", "kept": "*i32"}
made = compiled(_post, types, {"IN_TURN": True, "KEEPS": True, "BLOCK": 256}, num_warps=4)
ptx = made.asm["ptx"]
turn = next(line for line in ptx.splitlines() if "_post_param_2" in line and "ld.param" in line)
names = re.escape(re.search(r"%rd\\d+", turn)[0])
read = re.search(rf"ld\\.global\\.b32[^;]*\\[ ?{names}", ptx).start()
moved = re.search(rf"st\\.global\\.b32 ?\\[ ?{names}", ptx).start()
assert "bar.sync" in ptx[read:moved], "a warp may read the next answer's turn"
assert "st.global.wt.b64" in ptx, "a word and its flag are not one store"
keep(made)
"""


def test_the_kernel_compiles_for_hopper_with_one_store_a_word(assert_keeps_values_in_registers):
    assert_keeps_values_in_registers(COMPILED)


class Core:
    """Notes when it is asked to look; the answer comes with the third look."""

    def __init__(self, due: Due, nap: float = 0.0) -> None:
        self.due, self.nap, self.moments, self.longest = due, nap, [], 0.0

    def was_away(self, now: float, seconds: float) -> None:
        self.longest = max(self.longest, seconds)

    def look(self, now: float) -> None:
        self.moments.append(now)
        if len(self.moments) == 3:
            self.due.flags[:] = 1
            time.sleep(self.nap)


def test_a_core_is_looked_at_while_an_answer_is_awaited():
    outbox = Outbox(4, CPU)
    due = outbox.expect()
    core = Core(due)
    wait(due, SingleRank(), CPU, None, core)
    assert len(core.moments) == 3
    assert core.moments == sorted(core.moments)
    wait(due, SingleRank(), CPU, None, core)
    assert len(core.moments) == 3, "the answer was there"


def test_time_away_counts_too_if_the_answer_came_meanwhile():
    due = Outbox(4, CPU).expect()
    core = Core(due, nap=0.02)
    wait(due, SingleRank(), CPU, None, core)
    assert core.longest >= 0.02
