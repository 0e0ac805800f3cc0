"""What the dashboard's charts share: colours, legends, and channels that tell names apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt

from codesign.validate.charts import SPAN_COLOURS

GREY = "#808890"  # can be read on white and on black
COLOURS = {**SPAN_COLOURS, "prefill": "#7f8c1f"}


def named(
    channel: Any, field: str, values: Mapping[str, str], *, columns: int = 1, title: str = ""
) -> Any:
    """A channel that shows each name by a colour or a shape of its own, explained above.

    Args:
        channel: ``alt.Color`` or ``alt.Shape``.
        field: Holds the names.
        values: Colour or shape by name; those that the chart has.
        columns: Of the legend.
        title: Of the legend.
    """
    scale = alt.Scale(domain=list(values), range=list(values.values()))
    return channel(field, title=title or None, legend=legend(columns), scale=scale)


def legend(columns: int = 1) -> alt.Legend:
    """Above the chart, with whole names."""
    return alt.Legend(orient="top", columns=columns, labelLimit=0)
