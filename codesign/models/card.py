"""What there is to know about one model before running it: shape, size, tokenizer, draft."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from codesign.models import DEFAULT_TARGET, DRAFTS, directory_bytes, resolve_model, shipped_draft
from codesign.models.importing import SINGLE, read_header
from codesign.models.recipe import Recipe, read_recipe
from codesign.models.shape import ModelShape, model_shape, read_config
from codesign.models.tokenizer import Tokenizer

# The shipped draft has no embedding of its own: it reads its target's, so it fits every model
# of this width whose ids mean the same.
_DRAFT_HIDDEN = 576
_DRAFT_TABLE = "codesign_draft"  # in the config.json of a draft only
_DRAFT_VOCABULARY = "853b524522cfa3366e3f45b1d03fb4e847c45e78306bf7d41003a65e560393db"


@dataclass(frozen=True, slots=True)
class TokenizerCard:
    """The facts about a tokenizer that decide what a model can be paired with."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    has_chat_template: bool
    vocabulary_sha256: str


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model as ``codesign models show`` prints it.

    Attributes:
        parameters: Values in the checkpoint; for a draft its own, without what it reads of its
            target.
        recipe: What an inflated model is made of; None for an ordinary one.
        tokenizer: None if the directory has none (the shipped draft uses its target's).
        draft: The shipped draft that this model can be the target of, or None.
        draft_note: Why, in words.
    """

    name: str
    path: Path
    num_bytes: int
    shape: ModelShape
    recipe: Recipe | None
    parameters: int
    tokenizer: TokenizerCard | None
    draft: str | None
    draft_note: str


def describe_model(name_or_path: str | Path) -> ModelCard:
    """Return what is known about a model.

    Raises:
        InputError: If there is no such model or its files cannot be read.
    """
    path = resolve_model(name_or_path)
    shape = model_shape(path)
    recipe = read_recipe(path)
    tokenizer = _tokenizer_card(path)
    draft = None
    note = "inflate one of the same small model: codesign models inflate --draft --shape SHAPE"
    if recipe is None:
        draft, note = _find_draft(path, shape=shape, tokenizer=tokenizer)
    return ModelCard(
        name=str(name_or_path),
        path=path,
        num_bytes=directory_bytes(path),
        shape=shape,
        recipe=recipe,
        parameters=_own_parameters(path) if _is_draft(path) else shape.parameters,
        tokenizer=tokenizer,
        draft=draft,
        draft_note=note,
    )


def _is_draft(path: Path) -> bool:
    return _DRAFT_TABLE in read_config(path / "config.json")


def _own_parameters(path: Path) -> int:
    header = read_header(path / SINGLE)
    return sum(math.prod(e["shape"]) for name, e in header.items() if name.endswith(".weight"))


def _tokenizer_card(path: Path) -> TokenizerCard | None:
    if not (path / "tokenizer.json").is_file():
        return None
    tokenizer = Tokenizer(path)
    return TokenizerCard(
        vocab_size=tokenizer.vocab_size,
        eos_ids=tokenizer.eos_ids,
        has_chat_template=tokenizer.has_chat_template,
        vocabulary_sha256=tokenizer.vocabulary_sha256(),
    )


def _find_draft(
    path: Path, *, shape: ModelShape, tokenizer: TokenizerCard | None
) -> tuple[str | None, str]:
    draft = DRAFTS[DEFAULT_TARGET]
    if _is_draft(path):
        return None, "this is a draft; embedding and tokenizer are its target's"
    if tokenizer is None or tokenizer.vocabulary_sha256 != _DRAFT_VOCABULARY:
        return None, f"{draft} has another vocabulary; the n-gram drafter fits every model"
    if shape.hidden != _DRAFT_HIDDEN:
        return None, f"{draft} shares an embedding of width {_DRAFT_HIDDEN}, not {shape.hidden}"
    if not shipped_draft(draft).is_dir():
        return None, f"{draft} would fit, but this installation does not contain it"
    return draft, "same vocabulary and width"
