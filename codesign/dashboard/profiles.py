"""What is known of which machine: fits with their points, floors of a forward, data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from codesign.artifacts import cache_dir, read_json, read_table
from codesign.config import parse_deployment
from codesign.errors import InputError, counted
from codesign.fit import STEPS_FILE
from codesign.fit.children import without_children
from codesign.fit.devices import devices
from codesign.fit.roofline import Forward, kv_rows, plain_kv_rows
from codesign.fit.round_costs import FORWARDS
from codesign.fit.shipped import DEFAULT_FIT, is_of_gpus, machines_of

if TYPE_CHECKING:
    from codesign.fit import Fit
    from codesign.policy.cost import RoundCost, StepTime

OP_TITLES = {
    "target": "target verifies",
    "draft": "draft runs",
    "prefill": "target reads a prompt",
    "draft_prefill": "draft reads a prompt",
}
FLOOR_PARTS = ("weights at full bandwidth", "bandwidth lost", "layers, fixed", "all-reduces")
CONTEXTS = ("no context", "up to 256", "up to 1,024", "more")
_CONTEXT_ENDS = (0, 256, 1024)


@dataclass(frozen=True, slots=True)
class FitEntry:
    """A fit that lies around.

    Attributes:
        path: Its file.
        header: Its JSON.
        is_shipped: It came with the package.
    """

    path: Path
    header: Mapping[str, Any]
    is_shipped: bool

    @property
    def machine(self) -> str:
        """What its times are of; of a data sheet, its file says."""
        if self._is_sheet:
            return self.path.stem.partition("-")[0]
        name = " and ".join(machines_of(self.path))
        if is_of_gpus(self.header):
            # A fit of several profiles was written on the machine of one of them.
            most = max(parse_deployment(label).num_workers for label in self.header["costs"])
            return f"{most} x {name}"
        found = self.header["hardware"]
        return f"{name}, {counted(found['cores'], 'core')}" if name == found["cpu"] else name

    @property
    def _is_sheet(self) -> bool:
        return self.header["origin"] == "roofline"

    @property
    def label(self) -> str:
        """One line for a choice, unlike any other fit's."""
        models = f"{self.header['target']} with {self.header['draft']}"
        place = "shipped" if self.is_shipped else self.path.name if self._is_sheet else self.path
        return f"{models} on {self.machine} ({self.header['origin']}, {place})"


def known_fits(folder: Path) -> list[FitEntry]:
    """Fits in a folder and the folders in it, the shipped ones, and data sheets asked for before.

    Files that are no fit of this version are passed over.
    """
    shipped = sorted(DEFAULT_FIT.parents[1].glob("*/fit.json"))
    places = [*sorted(folder.glob("fit*.json")), *sorted(folder.glob("*/fit*.json")), *shipped]
    places += sorted((cache_dir() / "rooflines").glob("*.json"))
    entries = []
    for path in dict.fromkeys(places):
        try:
            entries.append(FitEntry(path, read_json(path, kind="fit"), path in shipped))
        except InputError:
            continue
    return entries


def coverage_table(entries: list[FitEntry]) -> pd.DataFrame:
    """One row per fit: machine, models, where its numbers come from, splits, error."""
    rows = []
    for entry in entries:
        head = entry.header
        errors = [e for name, e in head["errors"].items() if name.endswith("/target")]
        rows.append(
            {
                "machine": entry.machine,
                "target": head["target"],
                "draft": head["draft"],
                "step times": head["origin"],
                "acceptance": head.get("acceptance_origin", "recorded"),
                "splits": ", ".join(head["costs"]),
                "error of a target forward": f"{np.median(errors):.1%}" if errors else "",
                "made": head["created"][:10],
                "file": "shipped" if entry.is_shipped else str(entry.path),
            }
        )
    return pd.DataFrame(rows)


def profile_folder(entry: FitEntry) -> Path | None:
    """The folder of timings that a fit was made from, if it is still there."""
    named = entry.header.get("inputs", {}).get("steps", {}).get("path")
    tries = [entry.path.parent / "profile"]
    if named:
        tries = [Path(named).parent, entry.path.parent / Path(named).parent.name, *tries]
    return next((folder for folder in tries if (folder / STEPS_FILE).is_file()), None)


def measured_points(folder: Path, deployment: str, op: str, cost: RoundCost) -> pd.DataFrame:
    """Timings of one kind of step, a row per shape.

    Args:
        folder: Of the profile.
        deployment: Label, for example "1+1".
        op: One of FORWARDS.
        cost: The fit, whose prices of the context and of a draft's children are taken off.

    Returns:
        Columns rows, requests, context, group (of contexts, in words), repetitions, seconds in ms:
        ms, fastest, slowest (as measured), without_context (the median less the context's price).

    Raises:
        InputError: If the folder holds no timings.
    """
    steps, _ = read_table(folder / STEPS_FILE, kind="profile")
    # As the fit does: a draft with workers of its own is timed beside the target.
    beside = "+" in deployment and op.startswith("draft")
    mine = steps.loc[
        (steps["deployment"] == deployment) & (steps["op"] == op) & (steps["beside"] == beside)
    ]
    if op == "draft":
        mine = without_children(mine, cost.child)
    time: StepTime = getattr(cost, op)
    shapes = mine.groupby(["rows", "requests", "context"])["seconds"]
    table = shapes.agg(["median", "min", "max", "count"]).reset_index()
    rows, context = table["rows"].to_numpy(np.float64), table["context"].to_numpy(np.float64)
    paid = context * (time.alpha + time.cross * rows)
    return table.assign(
        group=[CONTEXTS[i] for i in np.searchsorted(_CONTEXT_ENDS, context)],
        ms=1e3 * table["median"],
        fastest=1e3 * table["min"],
        slowest=1e3 * table["max"],
        repetitions=table["count"],
        without_context=1e3 * (table["median"].to_numpy(np.float64) - paid),
    ).drop(columns=["median", "min", "max", "count"])


def most_rows(time: StepTime, points: pd.DataFrame | None) -> int:
    """How far to draw a line: to the last measured shape, or the last knot."""
    if points is not None and len(points):
        return int(points["rows"].to_numpy().max())
    return min(max(time.rows[-1], 64), 4096)


def held_out_table(fit: Fit, deployment: str) -> pd.DataFrame:
    """One row per forward and form that was tried: error on shapes it had not seen."""
    rows = [
        {
            "forward": OP_TITLES[op],
            "form": form,
            "taken": "yes" if form == step.form else "",
            "mean error": f"{error.mean:.1%}",
            "median": f"{error.median:.1%}",
            "largest": f"{error.max:.1%}",
            "shapes": step.num_shapes,
        }
        for op in FORWARDS
        if (step := fit.steps.get(f"{deployment}/{op}")) is not None
        for form, error in step.held_out.items()
    ]
    return pd.DataFrame(rows)


def forward_parts(forward: Forward) -> dict[str, float]:
    """Seconds of a one-row forward without context, by FLOOR_PARTS; they add up to its delta."""
    per_weight = forward.model.weight_bytes(forward.gpus)
    floor = sum(per_weight.values()) / forward.device.memory_bandwidth
    read = sum(size / forward.software.weight_share[kind] for kind, size in per_weight.items())
    lost = read / forward.device.memory_bandwidth - floor
    layers = forward.model.shape.layers * forward.software.layer
    rest = forward.delta - floor - lost - layers if forward.gpus > 1 else 0.0
    return dict(zip(FLOOR_PARTS, (floor, lost, layers, rest), strict=True))


def floor_table(forwards: list[Forward]) -> pd.DataFrame:
    """One row per forward and part: gpus, part, order, ms; forwards that fit in memory alone."""
    rows = [
        {"gpus": forward.gpus, "part": part, "order": order, "ms": 1e3 * seconds}
        for forward in forwards
        if plain_kv_rows(forward)
        for order, (part, seconds) in enumerate(forward_parts(forward).items())
    ]
    return pd.DataFrame(rows, columns=["gpus", "part", "order", "ms"])


def device_table() -> pd.DataFrame:
    """Data sheets, one row per GPU."""
    rows = [
        {
            "name": name,
            "GPU": device.gpu,
            "memory, GB": round(device.memory_bytes / 1e9),
            "memory, TB/s": round(device.memory_bandwidth / 1e12, 2),
            "bf16, TFLOPS": round(device.bf16_flops / 1e12),
            "fp8, TFLOPS": None if device.fp8_flops is None else round(device.fp8_flops / 1e12),
            "link": device.link,
            "link, GB/s one way": round(device.link_bandwidth / 1e9),
            "source": device.source,
        }
        for name, device in devices().items()
    ]
    return pd.DataFrame(rows)


def range_text(value: float, fit: Fit, split: str, part: str) -> str:
    """Where a fitted time lies, by its error on shapes left out."""
    error = fit.errors.get(f"{split}/{part}")
    if error is None:
        return "no range"
    return f"{value / (1.0 + error):.3g} to {value * (1.0 + error):.3g}"


def room(target: Forward, draft: Forward) -> str:
    """KV rows that the weights leave, with and without a draft on the same GPUs, in words."""
    plain, both = plain_kv_rows(target), kv_rows(target, draft, is_apart=False)
    if not plain:
        return "the weights do not fit"
    return f"{plain:,} KV rows alone, {both:,} together with the draft"
