"""Statistics of the published traces that have synthetic twins, measured once; nobody's data.

Sources: Azure LLM inference traces 2023 (CC-BY-4.0; Splitwise, ISCA 2024); Mooncake traces
(Apache-2.0; FAST 2025, arXiv:2407.00079).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Levels, in percent, of the length quantiles below.
LENGTH_LEVELS = (
    *(0, 1, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90, 95),
    *(98, 99, 99.5, 99.9, 100),
)


@dataclass(frozen=True, slots=True)
class Preset:
    """Statistics of one published trace.

    Attributes:
        about: What the twin imitates.
        arrivals: ``renewal``: independent gaps; ``bursts``: silence, calm and bursts; ``ticks``:
            time stamps in steps of 3 s.
        rate: Requests a second.
        cv: Standard deviation over mean of the gaps; None where ticks decide it.
        prompt: Quantiles of prompt tokens at ``LENGTH_LEVELS``.
        output: Quantiles of output tokens at ``LENGTH_LEVELS``.
        weights: Weight of each of ``CATEGORIES``. An assumption: the traces do not say.
        prefix_hit_rate: Share of prompt blocks seen before; None for no hash_ids.
    """

    about: str
    arrivals: Literal["renewal", "bursts", "ticks"]
    rate: float
    cv: float | None
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    weights: tuple[float, ...]
    prefix_hit_rate: float | None = None


PRESETS = {
    "steady": Preset(
        "Azure 2023 conversation",
        "renewal",
        5.53,
        1.09,
        (
            *(2, 29, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097, 1130),
            *(1189, 1315, 1877, 2735, 4083, 4098, 4142, 4831, 6212, 14050),
        ),
        (
            *(7, 16, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400),
            *(411, 424, 451, 540, 601, 644, 954, 1000),
        ),
        (0.5, 0.1, 0.1, 0.1, 0.1, 0.1),
    ),
    "bursty": Preset(
        "Azure 2023 coding",
        "bursts",
        2.57,
        13.15,
        (
            *(3, 17, 75, 147, 232, 385, 578, 770, 938, 1075, 1261, 1469, 1690, 1909, 2164, 2433),
            *(2745, 3193, 3923, 5194, 7315, 7436, 7436, 7436, 7437, 7437),
        ),
        (
            *(6, 6, 6, 7, 7, 8, 9, 9, 10, 11, 12, 13, 14, 16, 18, 20, 24, 29, 39, 55, 90, 172),
            *(252, 361, 831, 1899),
        ),
        (0.05, 0.9, 0.05, 0.0, 0.0, 0.0),
    ),
    "low": Preset(
        "Mooncake conversation at a third of its rate",
        "ticks",
        3.4012 / 3,
        None,
        (
            *(891, 894, 901, 964, 1261, 1662, 2306, 3263, 4250, 4993, 5870, 6909, 8187, 9570),
            *(11239, 13196, 15368, 17869, 21467, 27367, 39552, 66484, 85401, 100886, 121301),
            126195,
        ),
        (
            *(1, 3, 10, 24, 46, 100, 156, 213, 256, 291, 322, 350, 375, 399, 423, 447, 472, 504),
            *(543, 597, 698, 893, 1120, 1570, 2000, 2000),
        ),
        (0.4, 0.05, 0.05, 0.05, 0.25, 0.2),
        0.3664,
    ),
}
