"""Ids, chat templates and streaming, against transformers where it has an answer."""

from __future__ import annotations

import datetime
import json
import lzma
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from codesign.errors import InputError
from codesign.models.tokenizer import Tokenizer

EVALUATION = Path(__file__).parents[2] / "../shared/data/model/eval_gen.jsonl.xz"
TEMPLATE = """\
{%- if messages[0]['role'] == 'system' %}
    <s>{{ messages[0].content | trim }}</s>
{%- endif %}
{% for message in messages %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
<s>{{ message.role }}: {{ message | tojson }}</s>
{% endfor %}
{{- bos_token }}{{ strftime_now('%Y') }}
{%- if add_generation_prompt %}
<s>assistant
{% endif %}
"""
CHAT = [
    {"role": "system", "content": "  Be <brief> & kind.\n"},
    {"role": "user", "content": "Wie geht's, 日本?"},
    {"role": "tool", "content": "unseen"},
    {"role": "assistant", "content": 'I am "fine".'},
]


def write_tokenizer(folder: Path, **config) -> Path:
    """Write a tokenizer of single bytes with the special tokens <s> (256) and </s> (257)."""
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = RawTokenizer(models.BPE(vocab=alphabet, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", "</s>")])
    raw.save(str(folder / "tokenizer.json"))
    entries = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(entries))
    return folder


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", [CHAT, CHAT[1:]])
def test_chat_equals_transformers_with_blocks_filters_loops_and_dates(
    tmp_path, messages, add_generation_prompt
):
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path, chat_template=TEMPLATE)
    theirs = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    ours = Tokenizer(folder).chat(messages, add_generation_prompt=add_generation_prompt)
    assert ours == theirs
    assert str(datetime.date.today().year) in Tokenizer(folder).decode(ours)
    assert "unseen" not in Tokenizer(folder).decode(ours)


def test_a_template_in_its_own_file_wins_over_the_entry(tmp_path):
    folder = write_tokenizer(tmp_path, chat_template="entry")
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer(folder).chat_text([]) == "file"


def test_the_default_of_several_named_templates_is_used(tmp_path):
    named = [{"name": "tools", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert Tokenizer(write_tokenizer(tmp_path, chat_template=named)).chat_text([]) == "plain"


def test_a_refusal_by_the_template_is_one_line(tmp_path):
    folder = write_tokenizer(
        tmp_path, chat_template="{{ raise_exception('roles must alternate') }}"
    )
    with pytest.raises(InputError, match="roles must alternate"):
        Tokenizer(folder).chat(CHAT)


def test_a_template_cannot_reach_python(tmp_path):
    folder = write_tokenizer(tmp_path, chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(InputError, match="unsafe"):
        Tokenizer(folder).chat(CHAT)


def test_a_model_without_a_template_says_where_it_was_looked_for(tmp_path):
    tokenizer = Tokenizer(write_tokenizer(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(InputError, match=r"chat_template\.jinja"):
        tokenizer.chat(CHAT)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": [7, 9], "config.json": 3}, (7, 9)),
        ({"config.json": 3}, (3,)),
        ({}, (257,)),
    ],
)
def test_ending_ids_come_from_the_generation_config_first(tmp_path, files, expected):
    folder = write_tokenizer(tmp_path, eos_token={"content": "</s>"})
    for name, entry in files.items():
        (folder / name).write_text(json.dumps({"eos_token_id": entry}))
    assert Tokenizer(folder).eos_ids == expected


def test_encoding_adds_nothing_and_decoding_leaves_special_tokens_out(tmp_path):
    tokenizer = Tokenizer(write_tokenizer(tmp_path))
    ids = tokenizer.encode("<s>né</s>")
    assert (ids[0], ids[-1], len(ids)) == (256, 257, 5)
    assert tokenizer.decode(ids) == "né"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>né</s>"


def test_a_character_of_four_bytes_comes_out_once_and_whole(tmp_path):
    tokenizer = Tokenizer(write_tokenizer(tmp_path))
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in tokenizer.encode("a🥞b")]
    assert pieces == ["a", "", "", "", "🥞", "b"]
    assert stream.flush() == ""


def test_a_character_cut_short_is_replaced_only_at_the_end(tmp_path):
    tokenizer = Tokenizer(write_tokenizer(tmp_path))
    stream = tokenizer.stream()
    assert [stream.push(token) for token in tokenizer.encode("é🥞")[:4]] == ["", "é", "", ""]
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"


def test_the_vocabulary_checksum_tells_permuted_ids_apart(tmp_path):
    (tmp_path / "other").mkdir()
    one, same = Tokenizer(write_tokenizer(tmp_path)), Tokenizer(tmp_path)
    raw = RawTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    raw.add_tokens(["new"])
    raw.save(str(tmp_path / "other" / "tokenizer.json"))
    assert one.vocabulary_sha256() == same.vocabulary_sha256()
    assert Tokenizer(tmp_path / "other").vocabulary_sha256() != one.vocabulary_sha256()


@pytest.mark.parametrize("content", [None, "{"])
def test_a_missing_or_broken_tokenizer_file_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


# The default target's own tokenizer, rebuilt from its GGUF file.


@pytest.mark.slow
def test_the_default_target_chats_as_transformers_does(target_dir):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(target_dir)
    ours = Tokenizer(target_dir)
    assert ours.eos_ids == (theirs.eos_token_id,)
    assert ours.vocab_size == len(theirs)
    for messages in (CHAT, CHAT[1:2], CHAT[:2]):
        for add in (True, False):
            expected = theirs.apply_chat_template(
                messages, add_generation_prompt=add, return_dict=False
            )
            assert ours.chat(messages, add_generation_prompt=add) == expected


@pytest.mark.slow
def test_the_default_target_reads_published_prompts_as_they_were_recorded(target_dir):
    if not EVALUATION.is_file():
        pytest.skip("the published evaluation file is not there")
    tokenizer = Tokenizer(target_dir)
    with lzma.open(EVALUATION, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    assert rows
    for row in rows:
        text = tokenizer.decode(row["prompt_ids"], skip_special_tokens=False)
        user = text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        assert "named SmolLM" in text
        assert tokenizer.chat([{"role": "user", "content": user}]) == row["prompt_ids"]
        stream = tokenizer.stream()
        pieces = "".join(map(stream.push, row["out_ids"])) + stream.flush()
        assert pieces == tokenizer.decode(row["out_ids"])
