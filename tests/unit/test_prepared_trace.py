from __future__ import annotations

import pandas as pd
import pytest

import codesign.planner.prepared_trace
from codesign.errors import InputError
from codesign.planner.prepared_trace import DEFAULT_MAX_REQUESTS, long_trace_note, prepare_trace
from codesign.prompts import CATEGORIES, bind_prompts, load_prompts
from codesign.traces import Trace, load_trace, write_parquet


class WordTokenizer:
    """A token per word, and a template of two tokens before and one after the user's text."""

    def __init__(self, directory):
        pass

    def chat(self, messages):
        return [1, 2, *(3 + len(word) for word in messages[0]["content"].split()), 0]


@pytest.fixture
def words(monkeypatch):
    monkeypatch.setattr(codesign.planner.prepared_trace, "Tokenizer", WordTokenizer)
    monkeypatch.setattr(codesign.planner.prepared_trace, "resolve_model", lambda name: name)


def made(num=5, *, prompt=400, category="") -> Trace:
    requests = pd.DataFrame(
        {
            "arrival": [0.5 * i for i in range(num)],
            "prompt_tokens": [prompt] * num,
            "output_tokens": [20] * num,
            "category": [category] * num,
        }
    )
    return Trace("made", requests, "made", ("first note",), "0" * 64)


def test_without_the_target_the_lengths_stay_and_the_notes_say_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path))
    prepared = prepare_trace(made(), "smollm2-135m", seed=0)
    assert prepared.requests["prompt_tokens"].tolist() == [400] * 5
    assert "the trace's own" in prepared.notes[-1]
    assert "codesign models fetch smollm2-135m" in prepared.notes[-1]


@pytest.mark.parametrize("target", ["smollm2-135m", "llama-3-70b:int4"])  # 8,192 positions each
def test_requests_beyond_the_targets_context_are_named(monkeypatch, tmp_path, target):
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path))
    fits = prepare_trace(made(2, prompt=8172), target, seed=0)
    assert not any("positions" in note for note in fits.notes)
    note = prepare_trace(made(2, prompt=8173), target, seed=0).notes[-1]
    assert f"2 of 2 requests need more than the 8,192 positions of {target}, up to 8,193" in note
    assert "--max-prompt" in note
    assert "positions" not in prepare_trace(made(prompt=10**6), "nosuch", seed=0).notes[-1]


def test_a_search_that_would_take_hours_names_what_shortens_it():
    assert "--slice 0:3600" in long_trace_note(1_000_000)
    assert long_trace_note(19_366) == ""  # an hour of Azure's conversations


def test_prompts_are_bound_to_lengths_that_the_engine_will_see(words):
    prepared = prepare_trace(made(prompt=2), "any", seed=3)
    assert (prepared.requests["prompt_tokens"] > 2).all()
    assert "longer prompt" in prepared.notes[-1]
    encode = WordTokenizer(None)
    bound = bind_prompts(
        prepared.requests,
        load_prompts("run"),
        lambda text: encode.chat([{"content": text}]),
        seed=3,
    )
    assert [b.prompt_tokens for b in bound] == prepared.requests["prompt_tokens"].tolist()


def test_prefix_blocks_stay_and_the_engine_binds_the_same_lengths_to_them(words, tmp_path):
    """The engine's prefix cache can only find what the plan's trace still says."""
    trace = made(4, prompt=1100, category="chat")
    trace.requests["hash_ids"] = [[5, 6, 7], [5, 6, 8], [5, 9, 10], [11, 12]]
    trace.requests.loc[3, ["prompt_tokens", "category"]] = 1024, ""
    prepared = prepare_trace(trace, "any", seed=3)
    requests = prepared.requests
    assert [ids[:2] for ids in requests["hash_ids"]] == [[5, 6], [5, 6], [5, 9], [11, 12]]
    write_parquet(prepared, tmp_path / "kept.parquet")
    assert load_trace(tmp_path / "kept.parquet").requests["hash_ids"].tolist() == [
        *requests["hash_ids"]
    ]
    encode = WordTokenizer(None)
    prompts, chat = load_prompts("run"), lambda text: encode.chat([{"content": text}])
    bound = bind_prompts(requests, prompts, chat, seed=3)
    assert [b.prompt_tokens for b in bound] == requests["prompt_tokens"].tolist()
    assert bound[0].prompt_ids[:1024] == bound[1].prompt_ids[:1024]
    assert bound[0].prompt_ids[:512] == bound[2].prompt_ids[:512]
    assert bound[0].prompt_ids[512:1024] != bound[2].prompt_ids[512:1024]


def test_blocks_of_prompts_that_got_longer_are_told_apart(words):
    trace = made(2, prompt=512, category="chat")
    trace.requests["hash_ids"] = [[5], [5]]
    requests = prepare_trace(trace, "any", seed=3).requests
    assert (requests["prompt_tokens"] > 512).all()
    first, second = requests["hash_ids"]
    assert first[0] == second[0] == 5
    assert not {*first[1:]} & {*second[1:]}
    assert [len(first), len(second)] == [-(-n // 512) for n in requests["prompt_tokens"]]


def test_requests_without_a_category_get_one_and_others_keep_theirs(monkeypatch, tmp_path):
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path))
    trace = made(30)
    trace.requests.loc[3, "category"] = "code"
    for seed in range(3):
        category = prepare_trace(trace, "smollm2-135m", seed=seed).requests["category"]
        assert set(category) <= set(CATEGORIES)
        assert category[3] == "code"
        assert len(set(category)) > 2


def test_a_trace_with_categories_keeps_them(monkeypatch, tmp_path):
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path))
    prepared = prepare_trace(made(category="code"), "smollm2-135m", seed=0)
    assert set(prepared.requests["category"]) == {"code"}
    assert not any("drawn" in note for note in prepared.notes)


def test_a_long_trace_is_cut_and_the_notes_say_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path))
    long = made(DEFAULT_MAX_REQUESTS + 1)
    prepared = prepare_trace(long, "smollm2-135m", seed=0)
    assert len(prepared) == DEFAULT_MAX_REQUESTS
    assert any(f"only the first {DEFAULT_MAX_REQUESTS}" in note for note in prepared.notes)
    assert len(prepare_trace(long, "smollm2-135m", seed=0, max_requests=7)) == 7


def test_a_category_that_no_prompt_has_is_refused(words):
    with pytest.raises(InputError, match="poetry"):
        prepare_trace(made(category="poetry"), "any", seed=0)
