"""The shipped prompts, and binding them to a trace to the token."""

from __future__ import annotations

import zlib
from collections import Counter

import pandas as pd
import pytest

from codesign.engine.blocks import block_ids
from codesign.errors import InputError
from codesign.models.tokenizer import Tokenizer
from codesign.prompts import (
    CATEGORIES,
    SPLITS,
    Prompt,
    bind_prompts,
    binding_note,
    encode_user_turn,
    load_prompts,
)

HEAD, TAIL = [1, 2, 3], [4, 5]


def encode_words(text: str) -> list[int]:
    """A chat template with one id a word; a blank line is a word of its own."""
    words = text.replace("\n\n", " <blank> ").split()
    return [*HEAD, *(100 + zlib.crc32(word.encode()) for word in words), *TAIL]


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(encode_words(text)[len(HEAD) : -len(TAIL)])


def make_trace(*rows: tuple[float, int, int, str]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["arrival", "prompt_tokens", "output_tokens", "category"])


POOL = [
    Prompt("chat-0", "chat", "run", "how do you do today"),
    Prompt("code-0", "code", "run", "write a loop"),
    Prompt("chat-1", "chat", "run", "tell me a long story about rain"),
]


# The shipped prompts.


def test_every_category_has_four_prompts_for_each_split():
    counts = Counter((prompt.category, prompt.split) for prompt in load_prompts())
    assert counts == {(category, split): 4 for category in CATEGORIES for split in SPLITS}


def test_ids_and_texts_are_unique_and_the_splits_share_nothing():
    prompts = load_prompts()
    assert len({prompt.id for prompt in prompts}) == len({p.text for p in prompts}) == 48
    profile, run = load_prompts("profile"), load_prompts("run")
    assert {p.id for p in profile} | {p.id for p in run} == {p.id for p in prompts}
    assert {p.id for p in profile} & {p.id for p in run} == set()
    assert all(int(p.id.rpartition("-")[2]) % 2 == 0 for p in profile)


def test_an_unknown_split_is_refused():
    with pytest.raises(InputError, match="'test' is unknown"):
        load_prompts("test")


@pytest.mark.slow
def test_shipped_prompts_are_between_20_and_220_tokens_long(target_dir):
    tokenizer = Tokenizer(target_dir)
    lengths = {prompt.id: len(tokenizer.encode(prompt.text)) for prompt in load_prompts()}
    assert {name: length for name, length in lengths.items() if not 20 <= length <= 220} == {}


# Binding.


def test_a_request_for_its_prompts_own_length_gets_just_the_prompt():
    trace = make_trace((0.5, len(encode_words("write a loop")), 9, "code"))
    (bound,) = bind_prompts(trace, POOL, encode_words, seed=0)
    assert (bound.request_id, bound.arrival, bound.category) == (0, 0.5, "code")
    assert bound.prompt_ids == tuple(encode_words("write a loop"))
    assert bound.max_new_tokens == 9
    assert binding_note(trace, [bound]) == ""


@pytest.mark.parametrize("wanted", [9, 12, 20, 57, 400])
def test_a_longer_request_is_filled_exactly_with_earlier_material_inside_the_turn(wanted):
    (bound,) = bind_prompts(make_trace((0.0, wanted, 1, "code")), POOL, encode_words, seed=3)
    question = ids_of("write a loop")
    assert len(bound.prompt_ids) == bound.prompt_tokens == wanted
    assert bound.prompt_ids[: len(HEAD)] == tuple(HEAD)
    assert bound.prompt_ids[-len(question) - len(TAIL) :] == (*question, *TAIL)
    material = bound.prompt_ids[len(HEAD) : -len(question) - len(TAIL)]
    # Whole other prompts, each with a blank line, cut at the beginning only.
    first, second = (ids_of(POOL[i].text + "\n\n") for i in (0, 2))
    cycles = [(first + second) * 50, (second + first) * 50]
    assert any(cycle[-len(material) :] == material for cycle in cycles)


def test_a_shorter_request_keeps_the_whole_prompt_and_is_counted():
    trace = make_trace((0.0, 4, 1, "code"), (1.0, 50, 1, "code"), (2.0, 6, 1, "code"))
    bound = bind_prompts(trace, POOL, encode_words, seed=0)
    assert [request.prompt_tokens for request in bound] == [8, 50, 8]
    assert binding_note(trace, bound).startswith("2 of 3 requests have a longer prompt")
    assert "by 3 tokens on average" in binding_note(trace, bound)
    one = binding_note(trace.iloc[:1], bound[:1])
    assert one.startswith("1 of 1 request has a longer prompt than the trace says, by 4 tokens")


def test_prompts_come_from_the_category_uniformly_and_from_all_if_it_is_unknown():
    rows = [(0.0, 1, 1, "chat")] * 600 + [(0.0, 1, 1, "")] * 600
    bound = bind_prompts(make_trace(*rows), POOL, encode_words, seed=1)
    counts = Counter(request.prompt_ids for request in bound[:600])
    assert set(counts) == {tuple(encode_words(POOL[i].text)) for i in (0, 2)}
    # Five standard errors of a fair coin and of a fair three-sided one.
    assert abs(counts[tuple(encode_words(POOL[0].text))] - 300) < 5 * (600 / 4) ** 0.5
    assert abs(Counter(r.category for r in bound[600:])["code"] - 200) < 5 * (600 * 2 / 9) ** 0.5


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others():
    trace = make_trace(*[(float(i), 30 + i, 5, "") for i in range(20)])
    once, again, other = (bind_prompts(trace, POOL, encode_words, seed=s) for s in (7, 7, 8))
    assert once == again
    assert once != other


def test_a_request_keeps_its_prompt_when_the_trace_is_cut_behind_it():
    trace = make_trace(*[(float(i), 30, 5, "") for i in range(20)])
    whole = bind_prompts(trace, POOL, encode_words, seed=7)
    assert bind_prompts(trace.iloc[:5], POOL, encode_words, seed=7) == whole[:5]


def test_an_unknown_category_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match=r"request 1 has category 'poetry'.*chat, code"):
        bind_prompts(
            make_trace((0.0, 9, 1, "chat"), (0.0, 9, 1, "poetry")), POOL, encode_words, seed=0
        )


def test_a_request_beyond_the_models_positions_is_refused():
    trace = make_trace((0.0, 100, 28, "chat"), (0.0, 100, 29, "chat"))
    assert len(bind_prompts(trace.iloc[:1], POOL, encode_words, seed=0, max_positions=128)) == 1
    with pytest.raises(InputError, match=r"1 of 2 requests need more .* 128 .* longest 129"):
        bind_prompts(trace, POOL, encode_words, seed=0, max_positions=128)


@pytest.mark.slow
def test_binding_with_the_default_targets_template_is_exact_and_reads_as_one_turn(target_dir):
    tokenizer = Tokenizer(target_dir)
    trace = make_trace(*[(float(i), 80 + 37 * i, 8, c) for i, c in enumerate((*CATEGORIES, ""))])
    prompts = load_prompts("run")
    bound = bind_prompts(trace, prompts, encode_user_turn(tokenizer), seed=0)
    for request, wanted in zip(bound, trace["prompt_tokens"], strict=True):
        text = tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        turns = text.split("<|im_start|>")
        assert len(turns) == 4  # nothing, system, user, the opened answer
        assert turns[2].startswith("user\n")
        assert turns[3] == "assistant\n"
        assert any(turns[2].endswith(p.text + "<|im_end|>\n") for p in prompts)
        own = len(tokenizer.chat([{"role": "user", "content": turns[2][5:-11]}]))
        assert request.prompt_tokens == wanted or (own == request.prompt_tokens > wanted)
    assert sum(r.prompt_tokens == w for r, w in zip(bound, trace["prompt_tokens"], strict=True)) > 4


def test_requests_with_the_same_blocks_begin_with_the_same_tokens_and_no_others_do():
    """As the simulator counts them: whole blocks of 512 tokens, by their ids."""
    blocks = [[7, 8, 9], [7, 8, 10], [7], [8, 7], [7, 8, 9], []]
    lengths = [1300, 1536, 700, 1100, 1024, 300]
    trace = make_trace(*[(0.0, length, 5, "") for length in lengths]).assign(hash_ids=blocks)
    bound = bind_prompts(trace, POOL, encode_words, seed=2)
    names = [block_ids(request.prompt_ids) for request in bound]
    for request, length, ids in zip(bound, lengths, blocks, strict=True):
        assert request.prompt_ids[:3] == tuple(HEAD)
        longest = max(len(encode_words(prompt.text)) for prompt in POOL)
        assert length <= request.prompt_tokens <= max(length, 512 * (length // 512) + longest)
        assert request.prompt_ids[-2:] == tuple(TAIL), "the question ends the prompt"
        assert len(ids) * 512 > length - 512
    for one in range(6):
        for other in range(6):
            shared = 0
            while (
                shared < min(lengths[one], lengths[other]) // 512
                and blocks[one][shared] == blocks[other][shared]
            ):
                shared += 1
            same = sum(a == b for a, b in zip(names[one], names[other], strict=False))
            whole = min(lengths[one], lengths[other]) // 512
            assert min(same, whole) == shared
