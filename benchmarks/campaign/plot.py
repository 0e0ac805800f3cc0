"""Confidence against acceptance as small pictures side by side, in SVG without any library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

SIDE, GAP, TOP = 120, 26, 34  # pixels of a square, between two, and above
FEWEST = 10  # tokens of a tenth that is drawn
Bins = Sequence[Sequence[float]]  # [mean chance, share accepted, tokens]

_STYLE = (
    "text{font:11px sans-serif;fill:#7a828b}rect,line{stroke:#7a828b;fill:none;opacity:.6}"
    "circle{fill:#3b82c4;fill-opacity:.75}line{stroke-dasharray:3 3}"
)


def calibration_svg(rows: Mapping[str, Mapping[str, Bins]]) -> str:
    """One row of squares per name, one square per kind of prompt; on the diagonal chances hold.

    Args:
        rows: By name and kind, tenths of the chance. The area of a dot goes by its tokens.
    """
    most = max(len(kinds) for kinds in rows.values())
    width, high = GAP + most * (SIDE + GAP), SIDE + GAP + TOP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{len(rows) * high}">',
        f"<style>{_STYLE}</style>",
    ]
    for number, (name, kinds) in enumerate(rows.items()):
        top = number * high + TOP
        parts.append(f'<text x="{GAP}" y="{top - 20}">{escape(name)}</text>')
        for place, (kind, bins) in enumerate(kinds.items()):
            parts += _square(GAP + place * (SIDE + GAP), top, kind, bins)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _square(left: int, top: int, kind: str, bins: Bins) -> list[str]:
    total = sum(count for *_, count in bins)
    parts = [
        f'<text x="{left}" y="{top - 5}">{escape(kind)}</text>',
        f'<rect x="{left}" y="{top}" width="{SIDE}" height="{SIDE}"/>',
        f'<line x1="{left}" y1="{top + SIDE}" x2="{left + SIDE}" y2="{top}"/>',
    ]
    for chance, share, count in bins:
        if count >= FEWEST:
            x, y = left + SIDE * chance, top + SIDE * (1.0 - share)
            radius = 2.0 + 12.0 * (count / total) ** 0.5
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>')
    return parts
