"""``codesign models quantize`` and ``codesign models inflate``: make a model of another one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from codesign.cli.argument_types import from_0, non_negative, positive
from codesign.cli.output import add_output_arguments, emit, progress, say

if TYPE_CHECKING:
    from pathlib import Path

    from codesign.engine.quantize import QuantizedModel
    from codesign.models.recipe import Recipe

_QUANTIZE_EXAMPLES = """\
examples:
  codesign models quantize ./Llama-3.2-1B-Instruct --out ./Llama-3.2-1B-int4
  codesign models quantize smollm2-135m --out ./smollm2-int4 --group 64
"""
_INFLATE_EXAMPLES = """\
examples:
  codesign models inflate --target --shape llama-3-70b
  codesign models inflate --draft --shape llama-3.2-1b
  codesign models inflate --draft --shape llama-3.2-3b --source smollm2-135m \\
      --drop-layers 28,29 --noise 0.1 --name noisy-3b
"""


def add_quantize(actions: Any) -> None:
    """Add ``codesign models quantize``."""
    parser = actions.add_parser(
        "quantize",
        help="convert a bfloat16 checkpoint to int4",
        description="Write an int4 checkpoint (AutoAWQ's format) of a floating-point one, scaled "
        "by the activations of a small calibration text, and report what it costs in perplexity.",
        epilog=_QUANTIZE_EXAMPLES,
    )
    parser.add_argument("model", metavar="DIR", help="a directory, or a name from models list")
    parser.add_argument("--out", required=True, metavar="DIR", help="new directory to write")
    parser.add_argument(
        "--group",
        type=int,
        choices=(32, 64, 128),
        default=128,
        help="input columns that share a scale (default 128, which GPU kernels need)",
    )
    parser.add_argument(
        "--int4-head",
        action="store_true",
        help="for a draft: the engine also rounds its head when it loads it",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="calibration text; its last fifth measures perplexity (default: a shipped one)",
    )
    add_output_arguments(parser)
    parser.set_defaults(func=quantize)


def add_inflate(actions: Any) -> None:
    """Add ``codesign models inflate``."""
    parser = actions.add_parser(
        "inflate",
        help="make a model of another size that behaves like a small one",
        description="Write the recipe of a model of a large shape in which a small model sits "
        "among random weights that cannot change its choices. The engine makes the weights.",
        epilog=_INFLATE_EXAMPLES,
    )
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument("--target", action="store_true", help="inflate a target")
    role.add_argument("--draft", action="store_true", help="inflate a draft")
    parser.add_argument(
        "--shape",
        required=True,
        metavar="SHAPE",
        help="llama-3-70b, llama-3-8b, llama-3.2-3b, llama-3.2-1b, qwen2-72b or qwen2-1.5b",
    )
    parser.add_argument(
        "--source",
        metavar="NAME",
        help="small model (default: smollm2-135m, or its shipped draft with --draft)",
    )
    parser.add_argument("--name", help="name in the cache (default: SOURCE-as-SHAPE)")
    parser.add_argument("--seed", type=non_negative, default=0, help="seed of the random weights")
    parser.add_argument(
        "--int4-head",
        action="store_true",
        help="for a draft: also round the head, half of a 1B's bytes (default: bfloat16)",
    )
    worse = parser.add_argument_group("degrading the small model on purpose")
    worse.add_argument("--bits", type=positive, metavar="N", help="round its weights to N bits")
    worse.add_argument(
        "--noise", type=from_0, default=0.0, metavar="X", help="add noise of X standard deviations"
    )
    worse.add_argument(
        "--drop-layers", type=_indices, default=(), metavar="I,J", help="leave these layers out"
    )
    worse.add_argument(
        "--drop-kv-heads",
        type=non_negative,
        default=0,
        metavar="N",
        help="leave N key-value heads, with their query heads, out of every layer",
    )
    add_output_arguments(parser)
    parser.set_defaults(func=inflate)


def quantize(args: argparse.Namespace) -> None:
    """Write an int4 checkpoint and report the change of perplexity."""
    from pathlib import Path

    from codesign.engine.quantize import quantize_model

    text = None if args.text is None else Path(args.text)
    with progress(args) as report:
        made = quantize_model(
            args.model,
            Path(args.out),
            group=args.group,
            int4_head=args.int4_head,
            text=text,
            progress=report,
        )
    emit(args, {"model": made}, _quantized_text(made))


def inflate(args: argparse.Namespace) -> None:
    """Write the recipe of an inflated model."""
    from pathlib import Path

    from codesign.models import DEFAULT_TARGET, DRAFTS, lasting_name
    from codesign.models.recipe import Degradation, Recipe, create_inflated, weights_sha256

    shipped = DRAFTS[DEFAULT_TARGET] if args.draft else DEFAULT_TARGET
    source = lasting_name(args.source or shipped)
    recipe = Recipe(
        shape=args.shape,
        role="draft" if args.draft else "target",
        source=source,
        source_sha256=weights_sha256(source),
        seed=args.seed,
        degradation=Degradation(
            bits=args.bits,
            noise=args.noise,
            drop_layers=args.drop_layers,
            drop_kv_heads=args.drop_kv_heads,
        ),
        int4_head=args.int4_head,
    )
    name = args.name or f"{Path(source).name}-as-{args.shape}"
    path = create_inflated(recipe, name=name)
    if not args.quiet:
        say("weights are made where the model runs; nothing large was written")
    emit(args, {"name": name, "path": path, "recipe": recipe}, _recipe_text(name, path, recipe))


def _indices(text: str) -> tuple[int, ...]:
    return tuple(sorted({non_negative(part) for part in text.split(",")}))


def _quantized_text(made: QuantizedModel) -> str:
    change = made.perplexity_after / made.perplexity_before - 1
    return "\n".join(
        [
            f"int4, groups of {made.group}: {made.path}",
            f"size        {made.num_bytes / 1e6:,.1f} MB",
            f"perplexity  {made.perplexity_before:.3f} before, {made.perplexity_after:.3f} after "
            f"({change:+.1%}; {made.plain_change:+.1%} without activation-aware scales), "
            f"{made.num_tokens:,} tokens held out",
        ]
    )


def _recipe_text(name: str, path: Path, recipe: Recipe) -> str:
    loss = recipe.degradation
    lost = [
        text
        for text, is_so in (
            (f"rounded to {loss.bits} bits", loss.bits is not None),
            (f"noise {loss.noise:g}", loss.noise > 0),
            (f"without layers {', '.join(map(str, loss.drop_layers))}", bool(loss.drop_layers)),
            (f"without {loss.drop_kv_heads} key-value heads", loss.drop_kv_heads > 0),
            ("int4 head", recipe.int4_head),
        )
        if is_so
    ]
    return "\n".join(
        [
            f"{name}: {recipe.role} of {recipe.shape} shape, {path}",
            f"inside  {recipe.source}" + "".join(f", {text}" for text in lost),
            f"seed    {recipe.seed}",
        ]
    )
