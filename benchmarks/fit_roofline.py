"""Fit the fixed times of codesign/fit/roofline.py to published speeds of whole engines.

Each anchor of codesign/data/roofline_anchors.json is one forward that somebody measured and
published. The shares of bandwidth and of operations stay those of measured kernels; what is left of
each time is explained by seconds per layer, per all-reduce and per peer, none below 0. The error
that a roofline prediction states is the mean error at an engine that the fit has not seen.

    python -m benchmarks.fit_roofline            # the fit, and every anchor with its prediction
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from codesign.fit.devices import load_device
from codesign.fit.priced_model import PricedModel, parse_model
from codesign.fit.roofline import DEFAULT_SOFTWARE, Forward, Software

ANCHORS = Path(__file__).parents[1] / "codesign" / "data" / "roofline_anchors.json"
_QUANTIZE_HEAD = ("gpt-fast", "mlc-ai")  # engines whose 8-bit and 4-bit weights include the head
_FREE = Software(layer=0.0, all_reduce={"nvlink": 0.0, "pcie": 0.0}, peer=0.0)


@dataclass(frozen=True)
class Anchor:
    """A published forward: who says so, what ran, and its seconds."""

    engine: str
    model: PricedModel
    device: str
    gpus: int
    rows: int
    context: int
    seconds: float

    def forward(self, software: Software) -> Forward:
        """The same forward, priced."""
        return Forward(self.model, load_device(self.device), self.gpus, software)

    def predicted(self, software: Software) -> float:
        """Its predicted seconds."""
        return self.forward(software).decode(self.rows, self.context)


def load_anchors() -> list[Anchor]:
    """All anchors; the engine is the first words of the source."""
    anchors = []
    for entry in json.loads(ANCHORS.read_text(encoding="utf-8")):
        model = parse_model(f"{entry['model']}:{entry['weights']}")
        quantized = entry["source"].startswith(_QUANTIZE_HEAD)
        model = replace(model, group=entry["group"] or 128, is_head_quantized=quantized)
        anchors.append(
            Anchor(
                engine=entry["source"].split(" ")[0].rstrip(","),
                model=model,
                device=entry["device"],
                gpus=entry["gpus"],
                rows=entry["rows"],
                context=entry["context"],
                seconds=entry["ms"] / 1e3,
            )
        )
    return anchors


def fit_software(anchors: list[Anchor]) -> Software:
    """Non-negative least squares on relative residuals."""
    rest, design = [], []
    for anchor in anchors:
        layers = anchor.model.shape.layers
        reduces = 2 * layers if anchor.gpus > 1 else 0
        rest.append(1.0 - anchor.predicted(_FREE) / anchor.seconds)
        row = np.array([layers, reduces, reduces * (anchor.gpus - 1)], np.float64)
        design.append(row * 1e-6 / anchor.seconds)  # microseconds keep the columns alike
    (layer, all_reduce, peer), _ = nnls(np.array(design), np.array(rest))
    pcie = DEFAULT_SOFTWARE.all_reduce["pcie"]  # no anchor spans PCIe: an assumption
    return replace(
        DEFAULT_SOFTWARE,
        layer=layer * 1e-6,
        all_reduce={"nvlink": all_reduce * 1e-6, "pcie": pcie},
        peer=peer * 1e-6,
    )


def held_out_errors(anchors: list[Anchor]) -> list[float]:
    """Signed relative error of each anchor when its engine is left out of the fit."""
    left_out = {
        engine: fit_software([a for a in anchors if a.engine != engine])
        for engine in {a.engine for a in anchors}
    }
    return [a.predicted(left_out[a.engine]) / a.seconds - 1.0 for a in anchors]


def mean_error(anchors: list[Anchor], errors: list[float], *, is_large: bool) -> float:
    """Mean over engines of the mean absolute error of models above or below 7B."""
    by_engine: dict[str, list[float]] = {}
    for anchor, error in zip(anchors, errors, strict=True):
        if anchor.model.is_large == is_large:
            by_engine.setdefault(anchor.engine, []).append(abs(error))
    return float(np.mean([np.mean(values) for values in by_engine.values()]))


def main() -> None:
    """Print the fit and the errors."""
    anchors = load_anchors()
    software = fit_software(anchors)
    errors = held_out_errors(anchors)
    for anchor, error in zip(anchors, errors, strict=True):
        inside = anchor.predicted(software) / anchor.seconds - 1.0
        print(
            f"{anchor.engine:16} {anchor.device:10} {anchor.model.label:20} x{anchor.gpus} "
            f"{anchor.seconds * 1e3:8.2f} ms  predicted {inside:+6.1%}  held out {error:+6.1%}"
        )
    reduce = software.all_reduce["nvlink"]
    print(
        f"layer {software.layer * 1e6:.1f} us, all-reduce {reduce * 1e6:.1f} us, "
        f"peer {software.peer * 1e6:.2f} us"
    )
    for is_large, name in ((True, "7B and more"), (False, "smaller")):
        print(f"mean held-out error, {name}: {mean_error(anchors, errors, is_large=is_large):.3f}")


if __name__ == "__main__":
    main()
