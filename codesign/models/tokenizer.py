"""Text to token ids and back, from the files of a Hugging Face directory.

Reads tokenizer.json with the ``tokenizers`` library and renders the chat template with Jinja in
a sandbox, as transformers does, without transformers and without torch.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codesign.errors import HardwareError, InputError
from codesign.models.shape import read_config

if TYPE_CHECKING:
    import jinja2

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """The tokenizer of one model directory.

    Attributes:
        vocab_size: Ids run from 0 to ``vocab_size - 1``, added tokens included.
        eos_ids: Ids that end a generation, from generation_config.json or config.json.
    """

    def __init__(self, directory: str | Path) -> None:
        """Load the tokenizer.

        Raises:
            InputError: If tokenizer.json is missing or cannot be read.
            HardwareError: If the package ``tokenizers`` is not installed.
        """
        try:
            import tokenizers
        except ImportError as err:
            raise HardwareError(
                "the package tokenizers is not installed. Install it: pip install tokenizers"
            ) from err
        self.directory = Path(directory)
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"{self.directory} holds no tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as err:  # the library raises bare Exception
            raise InputError(f"{path} cannot be read: {err}") from err
        self._config = _read_json(self.directory / "tokenizer_config.json")
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos_ids: tuple[int, ...] = self._read_eos_ids()

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``; nothing is put before or after it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def chat_text(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return the conversation, oldest message first, as the model's chat template writes it.

        Raises:
            InputError: If the model has no chat template, or the template refuses.
        """
        import jinja2

        special = {
            key: _token_text(self._config.get(key))
            for key in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **{key: text for key, text in special.items() if text is not None},
            )
        except jinja2.TemplateError as err:
            raise InputError(f"the chat template of {self.directory} refused: {err}") from err

    def chat(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the ids of a conversation; see ``chat_text``."""
        return self.encode(self.chat_text(messages, add_generation_prompt=add_generation_prompt))

    @property
    def has_chat_template(self) -> bool:
        """Whether ``chat`` can be used."""
        return self._template_source() is not None

    def vocabulary_sha256(self) -> str:
        """Return a checksum of which id means which token; equal for models that can be paired."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        by_id = sorted((index, token) for token, index in vocabulary.items())
        return hashlib.sha256(json.dumps(by_id, ensure_ascii=True).encode()).hexdigest()

    def stream(self) -> TextStream:
        """Return a decoder that takes one id at a time."""
        return TextStream(self)

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        source = self._template_source()
        if source is None:
            raise InputError(
                f"{self.directory} has no chat template: neither chat_template.jinja nor an "
                "entry chat_template in tokenizer_config.json"
            )
        return _environment().from_string(source)

    def _template_source(self) -> str | None:
        beside = self.directory / "chat_template.jinja"
        if beside.is_file():
            return beside.read_text(encoding="utf-8")
        entry = self._config.get("chat_template")
        if isinstance(entry, list):  # several named templates
            entry = {item["name"]: item["template"] for item in entry}.get("default")
        return entry

    def _read_eos_ids(self) -> tuple[int, ...]:
        for name in ("generation_config.json", "config.json"):
            found = _read_json(self.directory / name).get("eos_token_id")
            if found is not None:
                return tuple(found) if isinstance(found, list) else (int(found),)
        text = _token_text(self._config.get("eos_token"))
        token = None if text is None else self._tokenizer.token_to_id(text)
        return () if token is None else (token,)


class TextStream:
    """Turns ids into text as they come, never splitting a character.

    A character of several bytes may span tokens; its text is held back until the last of them
    has come. All pieces and the final ``flush`` together are the text of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_context = 0  # leading ids whose text is out; kept because decoding needs them

    def push(self, token: int) -> str:
        """Return the text that ``token`` completes; empty while a character is incomplete."""
        self._ids.append(token)
        text = self._pending()
        if text.endswith(_REPLACEMENT):
            return ""
        self._forget_emitted()
        return text

    def flush(self) -> str:
        """Return what is held back; incomplete characters become replacement characters."""
        text = self._pending()
        self._forget_emitted()
        return text

    def _pending(self) -> str:
        emitted = self._tokenizer.decode(self._ids[: self._num_context])
        return self._tokenizer.decode(self._ids)[len(emitted) :]

    def _forget_emitted(self) -> None:
        self._ids = self._ids[self._num_context :]
        self._num_context = len(self._ids)


@functools.cache
def _environment() -> jinja2.Environment:
    """Return the sandbox that chat templates are written for: transformers' conventions."""
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as err:
        raise HardwareError(
            "the package jinja2 is not installed. Install it: pip install jinja2"
        ) from err
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which a model has never seen.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _token_text(entry: Any) -> str | None:
    return entry["content"] if isinstance(entry, dict) else entry


def _read_json(path: Path) -> dict[str, Any]:
    return read_config(path) if path.is_file() else {}
