"""``LLM.generate``, the README's Python, on a tiny random pair."""

from __future__ import annotations

import pytest

from codesign.engine.llm import LLM
from codesign.errors import InputError
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


def test_what_cannot_be_served_is_an_input_error(llm):
    with pytest.raises(InputError, match="unknown policy 'fast'"):
        answers(llm, policy="fast")
    with pytest.raises(InputError):
        llm.generate([])
    with pytest.raises(InputError, match="no model and no directory is called 'nosuch'"):
        LLM("nosuch")
