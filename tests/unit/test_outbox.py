"""Answers on the host: the words before their flag, each in its slot, and waits that end."""

from __future__ import annotations

import pytest
import torch

from codesign.engine.gpu.outbox import Outbox, wait
from codesign.engine.gpu.tensor_group import SingleRank
from codesign.kernels import host_answer

CPU = torch.device("cpu")


@pytest.fixture(params=["reference", "kernel"])
def post_words(request):
    """The op and its Triton kernel in the interpreter."""
    if request.param == "reference":
        return host_answer.post_words
    kernels = request.getfixturevalue("interpreted")("host_answer_triton")[0]
    return lambda words, slots, turn=None: kernels.post_words(words, slots, turn)


@pytest.mark.parametrize("count", [0, 1, 5, 8, 200])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_answer_and_its_flag(post_words, count, dtype):
    slots = torch.full((2, 206), 7, dtype=torch.int32)
    words = torch.arange(3, 3 + count, dtype=dtype)
    post_words(words, slots)
    assert slots[0, :count].tolist() == words.tolist()
    untouched = torch.cat((slots[0, count:-1], slots[1]))
    assert untouched.eq(7).all(), "nothing else is written"
    assert slots[0, -1] == 1


def test_answers_take_turns(post_words):
    slots, turn = torch.zeros(3, 5, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    for number in range(3):
        post_words(torch.full((4,), 10 + number), slots, turn[1:2])
        assert slots[:, -1].tolist() == [1] * (number + 1) + [0] * (2 - number)
    assert slots[:, :4].tolist() == [[10] * 4, [11] * 4, [12] * 4]
    assert turn.tolist() == [0, 3, 0, 0], "the next word is someone else's"


def test_an_answer_is_there_when_its_step_has_run():
    outbox = Outbox(2, CPU)
    for words in ([4, 5], [6, 7]):
        due = outbox.expect()
        assert not due.is_there(), "the last answer does not count as this one"
        outbox.post(torch.tensor(words))
        wait(due, SingleRank(), CPU, None)
        assert due.words.tolist() == words


def test_a_step_without_an_answer_ends_the_wait():
    due = Outbox(2, CPU).expect()
    with pytest.raises(RuntimeError, match="without its answer"):
        wait(due, SingleRank(), CPU, None)
