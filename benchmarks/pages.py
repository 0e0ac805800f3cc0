"""How scripts write pages of Markdown: tables, lines of 100 columns, a part between two markers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Put ``text`` between a page's markers, in place of what is there."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; floats with three significant digits."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def reflow(text: str) -> str:
    """Paragraphs and lists within 100 columns; headings, tables and code as they are."""
    blocks = [
        block if block.startswith(("#", "|", "    ")) else "\n".join(map(_filled, _items(block)))
        for block in text.split("\n\n")
    ]
    return "\n\n".join(blocks)


def _items(block: str) -> list[str]:
    """The items of a list, or a paragraph as it is."""
    if not block.startswith("- "):
        return [block]
    return [f"- {item}" for item in block.removeprefix("- ").split("\n- ")]


def _filled(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    line = " ".join(text.split())
    return textwrap.fill(
        line, 100, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)
