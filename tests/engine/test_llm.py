"""``LLM.generate``, the README's Python, on a tiny random pair."""

from __future__ import annotations

import pytest

from codesign.engine.llm import LLM
from codesign.errors import HardwareError, InputError
from codesign.policy.options import RequestOptions
from codesign.policy.walk import Sampling

PROMPTS = ("why is the sky blue", "count the rain", "to")


@pytest.fixture(scope="module")
def llm(tiny_models) -> LLM:
    return LLM(*map(str, tiny_models), num_workers=2)


def answers(llm: LLM, **options):
    return llm.generate(PROMPTS, max_new_tokens=12, max_batch=2, **options)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=3)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("policy", ["tree-8x4x2", "async-tree-4x2x2"])
def test_a_policy_changes_the_rounds_and_not_the_answers(llm, policy, sampling):
    plain = answers(llm, policy="plain", sampling=sampling)
    drafted = answers(llm, policy=policy, sampling=sampling)
    assert drafted.token_ids == plain.token_ids
    assert drafted.texts == plain.texts
    assert all(0 < len(ids) <= 12 for ids in plain.token_ids)
    assert len(drafted.records.rounds) < len(plain.records.rounds)


def test_each_prompt_may_have_options_of_its_own(llm):
    whole = answers(llm)
    stop = whole.texts[1][2:4]
    own = [RequestOptions(), RequestOptions(stop_strings=(stop,)), RequestOptions(speculates=False)]
    cut = answers(llm, options=own)
    assert cut.texts == (whole.texts[0], whole.texts[1].partition(stop)[0], whole.texts[2])


@pytest.mark.parametrize("policy", ["plain", "tree-8x4x2", "async-tree-4x2x2"])
def test_text_is_told_as_it_comes_and_ends_before_a_stop_string(llm, policy):
    whole = answers(llm).texts
    own = [RequestOptions(), RequestOptions(stop_strings=(whole[1][3:6],)), RequestOptions()]
    told: list[tuple[int, str]] = []
    final = answers(llm, policy=policy, options=own, on_text=lambda *news: told.append(news))
    pieces = [[text for number, text in told if number == i] for i in range(len(PROMPTS))]
    assert tuple("".join(texts) for texts in pieces) == final.texts
    assert all("" not in texts for texts in pieces)
    assert len(pieces[0]) > 1


def test_a_reader_that_fails_ends_the_run(llm):
    def gone(number: int, text: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        answers(llm, policy="async-tree-4x2x2", on_text=gone)
    assert answers(llm).texts


def test_each_answer_says_why_it_ended(llm):
    whole = answers(llm)
    assert whole.finish_reasons == ("length",) * 3
    last = whole.token_ids[2][4]
    own = [
        RequestOptions(stop_strings=(whole.texts[0][2:4],)),
        RequestOptions(),
        RequestOptions(stop_tokens=frozenset({last})),
    ]
    ended = answers(llm, options=own)
    assert ended.finish_reasons == ("stop", "length", "stop")
    prompts = [PROMPTS[0], "a word " * 5000]
    refused = llm.generate(prompts, max_new_tokens=12)
    assert refused.finish_reasons == ("length", "abort")
    assert "positions" in refused.records.refused[1]


def test_one_prompt_may_stand_alone(llm):
    alone, listed = (llm.generate(prompts, max_new_tokens=3) for prompts in ("to", ["to"]))
    assert alone.token_ids == listed.token_ids


def test_what_cannot_be_served_is_an_input_error(llm):
    with pytest.raises(InputError, match="unknown policy 'fast'"):
        answers(llm, policy="fast")
    with pytest.raises(InputError, match="no prompt"):
        llm.generate([])
    with pytest.raises(InputError, match="1 options for 3 prompts"):
        answers(llm, options=[RequestOptions()])
    with pytest.raises(InputError, match=r"a tuple of texts: \('end',\)"):
        RequestOptions(stop_strings="end")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="num_workers must be at least 1, got 0"):
        LLM("nosuch", num_workers=0)
    with pytest.raises(HardwareError, match=r"9,?999 workers .* may use .* Leave num_workers out"):
        LLM("nosuch", num_workers=9999)
    with pytest.raises(InputError, match="no model and no directory is called 'nosuch'"):
        LLM("nosuch")
