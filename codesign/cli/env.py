"""``codesign env``: what a bug report needs to say about the machine."""

from __future__ import annotations

import argparse
from typing import Any

from codesign.cli.output import add_output_arguments, emit
from codesign.errors import counted

_PACKAGES = {
    "core": ("numpy", "pandas", "fastparquet", "simpy", "rich"),
    "fit": ("scipy",),
    "engine": ("torch", "safetensors", "tokenizers", "jinja2", "gguf"),
    "report": ("altair", "vl-convert-python"),
    "ray": ("ray",),
    "app": ("streamlit",),
}

_EXAMPLES = """\
examples:
  codesign env
  codesign env --json > env.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``codesign env`` takes."""
    parser.description = "Show versions, hardware and folders, ready to paste into a bug report."
    parser.epilog = _EXAMPLES
    add_output_arguments(parser)
    parser.set_defaults(func=show_env)


def show_env(args: argparse.Namespace) -> None:
    """Print versions, hardware and folders."""
    from codesign import __version__
    from codesign.artifacts import cache_dir
    from codesign.artifacts.machine import hardware

    packages = {extra: _versions(names) for extra, names in _PACKAGES.items()}
    payload = {
        "codesign": __version__,
        "hardware": hardware(),
        "packages": packages,
        "cache_dir": str(cache_dir()),
    }
    emit(args, payload, lambda: _as_text(payload))


def _versions(names: tuple[str, ...]) -> dict[str, str | None]:
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _as_text(payload: dict[str, Any]) -> str:
    machine = payload["hardware"]
    memory = machine["memory_bytes"]
    lines = [
        f"codesign  {payload['codesign']}",
        f"python    {machine['python']} on {machine['platform']}",
        f"cpu       {machine['cpu']}, {counted(machine['cores'], 'core')} usable",
        f"memory    {'unknown' if memory is None else f'{memory / 2**30:.1f} GiB'}",
        f"cache     {payload['cache_dir']}",
    ]
    lines += [f"gpu       {gpu['name']}, driver {gpu['driver']}" for gpu in machine["gpus"]]
    for extra, versions in payload["packages"].items():
        found = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
        lines.append(f"{extra:<9} {found}")
    return "\n".join(lines)
