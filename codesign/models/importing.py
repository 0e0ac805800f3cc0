"""Bring a local Hugging Face directory into the cache, after checking that it is whole.

The check reads config.json, the list of shards and the headers of the safetensors files: every
tensor that the shape calls for must be there with the right size, and none that the engine
would not use, because a skipped tensor gives wrong text and no error. Of the weights only the
scales of int4 matrices are read.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from codesign.errors import InputError
from codesign.models import models_dir
from codesign.models.quantization import TensorSpec, expected_tensors, read_quantization
from codesign.models.scales import check_scales
from codesign.models.shape import ModelShape, model_shape

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
INTEGER_TYPES = ("I32", "I64")
_FLOAT_TYPES = ("F32", "BF16", "F16")
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_ABANDONED_AFTER = 3600.0  # seconds; an installation takes a minute


def import_model(directory: Path, *, name: str, copy: bool = False) -> Path:
    """Check a Hugging Face directory and enter it into the cache under ``name``.

    Args:
        directory: Holds config.json, tokenizer.json and the safetensors files.
        name: Letters, digits, dots, dashes and underscores.
        copy: Copy the files; otherwise the cache gets a symbolic link.

    Returns:
        The path in the cache.

    Raises:
        InputError: If the name is taken or the directory is not a whole, supported model.
    """
    check_checkpoint(directory)
    if copy:
        with installing(name) as partial:
            for file in sorted(directory.iterdir()):
                if file.is_file():
                    shutil.copyfile(file, partial / file.name)
        return models_dir() / name
    link = _free_place(name)
    link.symlink_to(directory.resolve(), target_is_directory=True)
    return link


def check_checkpoint(directory: Path) -> ModelShape:
    """Return the shape of the model in ``directory`` once every tensor's header agrees with it.

    Raises:
        InputError: If something is missing, of another size or type, truncated, or unknown, or a
            scale of an int4 matrix is one that kernels do not take.
    """
    shape = model_shape(directory)
    if not (directory / "tokenizer.json").is_file():
        raise InputError(f"{directory} holds no tokenizer.json, which the tokenizer is read from")
    headers = {file: read_header(file) for file in _weight_files(directory)}
    found = {name: entry for entries in headers.values() for name, entry in entries.items()}
    quantization = read_quantization(directory, shape)
    expected = expected_tensors(shape, quantization)
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise InputError(
            f"{directory} lacks {len(missing)} of {len(expected)} tensors, first {missing[0]}"
        )
    for name, entry in found.items():
        if name in expected:
            _check_tensor(name, entry, spec=expected[name], directory=directory)
        elif not _is_redundant(name, shape=shape):
            raise InputError(f"{directory} holds a tensor {name} that a {shape.family} lacks")
    if quantization is not None:
        for file, entries in headers.items():
            check_scales(file, entries)
    return shape


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Return the entries (dtype, shape, data_offsets) of a safetensors file by tensor name.

    Raises:
        InputError: If the file is missing, damaged or shorter than its header says.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= _MAX_HEADER_BYTES:
                raise InputError(f"{file} is no safetensors file: header of {length} bytes")
            entries = dict(json.loads(stream.read(length)))
        num_bytes = file.stat().st_size
        entries.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except OSError as err:
        raise InputError(f"{file} cannot be read: {err.strerror}") from err
    except (ValueError, TypeError, LookupError) as err:
        raise InputError(f"{file} is no safetensors file: {err!r}") from err
    if num_bytes != end:
        raise InputError(f"{file} has {num_bytes:,} bytes, its header says {end:,}: copy it again")
    return entries


@contextmanager
def installing(name: str) -> Iterator[Path]:
    """Yield an empty directory that becomes the model ``name`` if the block succeeds.

    The model appears in one rename. If the block fails or is interrupted, nothing stays. If
    another process was faster, its result stays.

    Raises:
        InputError: If the name is malformed or taken.
    """
    final = _free_place(name)
    _remove_abandoned(final)
    partial = Path(tempfile.mkdtemp(prefix=f".{name}.partial-", dir=final.parent))
    try:
        yield partial
        partial.chmod(0o755)
        try:
            partial.rename(final)
        except OSError:
            if not (final / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _free_place(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise InputError(
            f"model name {name!r} may hold only letters, digits, dots, dashes and underscores"
        )
    place = models_dir() / name
    if place.is_symlink() and not place.exists():
        place.unlink()  # what it led to is gone, and so is the model
    if place.exists():
        raise InputError(f"a model called {name} is there already: {place}. Choose another name")
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def _remove_abandoned(final: Path) -> None:
    """Remove what a killed process could not: an interrupted one cleans up after itself."""
    for partial in final.parent.glob(f".{final.name}.partial-*"):
        if time.time() - partial.stat().st_mtime > _ABANDONED_AFTER:
            shutil.rmtree(partial, ignore_errors=True)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if not index.is_file():
        return [directory / SINGLE]
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (ValueError, KeyError, AttributeError) as err:
        raise InputError(f"{index} cannot be read: {err!r}") from err
    return [directory / shard for shard in sorted(set(shards))]


def _check_tensor(name: str, entry: dict[str, Any], *, spec: TensorSpec, directory: Path) -> None:
    if tuple(entry["shape"]) != spec.size:
        raise InputError(
            f"{directory}: tensor {name} has shape {entry['shape']}, config.json asks for "
            f"{list(spec.size)}"
        )
    types = INTEGER_TYPES if spec.is_integer else _FLOAT_TYPES
    if entry["dtype"] not in types:
        raise InputError(
            f"{directory}: tensor {name} is stored as {entry['dtype']}; supported: "
            f"{', '.join(types)}"
        )


def _is_redundant(name: str, *, shape: ModelShape) -> bool:
    """Tied heads and rotary tables are written by some exporters and follow from the rest."""
    return (shape.tie and name == "lm_head.weight") or name.endswith("rotary_emb.inv_freq")
