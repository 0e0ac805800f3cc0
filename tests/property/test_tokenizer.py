"""Streaming any text through any split into tokens gives the same text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from codesign.models.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory) -> Tokenizer:
    """One token a byte, and pairs of bytes that join the end of a character to the next."""
    folder = tmp_path_factory.mktemp("tokenizer")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in letters[130:160] for b in letters[:60]]
    words = [*letters, *(a + b for a, b in pairs)]
    raw = RawTokenizer(models.BPE({word: i for i, word in enumerate(words)}, pairs))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    return Tokenizer(folder)


@given(text=st.text().filter(lambda text: REPLACEMENT not in text))
def test_pieces_are_whole_characters_and_add_up_to_the_text(byte_tokenizer, text):
    stream = byte_tokenizer.stream()
    pieces = [stream.push(token) for token in byte_tokenizer.encode(text)]
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == text


@given(data=st.data())
def test_pieces_of_any_ids_add_up_to_what_decoding_them_at_once_gives(byte_tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, byte_tokenizer.vocab_size - 1), max_size=30))
    stream = byte_tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.flush() == byte_tokenizer.decode(ids)
