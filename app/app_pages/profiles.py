"""What is measured, for which machine and models."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from codesign.config import parse_deployment
from codesign.dashboard.profile_charts import floor_chart, step_chart
from codesign.dashboard.profiles import (
    OP_TITLES,
    FitEntry,
    coverage_table,
    device_table,
    floor_table,
    held_out_table,
    known_fits,
    measured_points,
    most_rows,
    profile_folder,
    range_text,
    room,
)
from codesign.errors import CodesignError
from codesign.fit import Fit
from codesign.fit.devices import load_device
from codesign.fit.priced_model import known_models, parse_model
from codesign.fit.roofline import Forward

MEASURE = "codesign profile --out profile\ncodesign fit profile --out fit.json"
ABOUT = (
    "What predictions rest on: the time of a forward of target and draft (step times), and how "
    "often the target takes the draft's tokens (acceptance). A profile holds measurements of both, "
    "a fit is the model made of them, which What if and Plan take. Listed are the fits in this "
    "folder, those that come with codesign (shipped), and those that were made of data sheets "
    "where nobody has measured (roofline)."
)
MISSING = (
    "Nothing in this folder was measured on your machine: the times listed are of other machines "
    "or from data sheets. These commands measure it, for minutes; name your models by --target and "
    "--draft, and GPUs by --device cuda. Then choose fit.json under Step times on What if or Plan."
)
DRAFT = "llama-3.2-1b"  # beside the model, to count what room is left


@st.cache_data(max_entries=8, show_spinner="Reading the fit ...")
def loaded(path: str, changed: float) -> Fit:
    return Fit.load(path)


def show_coverage() -> None:
    st.subheader("What is known")
    entries = known_fits(Path())
    st.dataframe(coverage_table(entries), hide_index=True, width="stretch")
    if all(entry.is_shipped or entry.header["origin"] == "roofline" for entry in entries):
        st.info(MISSING)
        st.code(MEASURE, language="shell")
    show_fit(entries)


def show_fit(entries: list[FitEntry]) -> None:
    st.subheader("Step times")
    paths = {str(entry.path): entry for entry in entries}
    path = st.selectbox(
        "Fit",
        list(paths),
        format_func=lambda p: paths[p].label,
        key="measured_fit",
        bind="query-params",
    )
    fit = loaded(path, Path(path).stat().st_mtime)
    with st.container(horizontal=True):
        split = st.selectbox("Split", list(fit.costs), key="fit_split", bind="query-params")
        op = st.selectbox(
            "Forward",
            list(OP_TITLES),
            format_func=OP_TITLES.get,
            key="forward",
            bind="query-params",
        )
    cost = fit.costs[split]
    show_floor_row(fit, split)
    time = getattr(cost, op)
    folder = profile_folder(paths[path])
    points = None if folder is None else measured_points(folder, split, op, cost)
    st.altair_chart(
        step_chart(
            time,
            points,
            most_rows=most_rows(time, points),
            error=fit.errors.get(f"{split}/{op}", 0.0),
        ),
        width="stretch",
        alt="Time of a forward by its rows, fitted line and measured shapes",
    )
    if fit.origin == "roofline":
        st.caption("From data sheets: nothing was measured, so there are no points.")
    elif fit.origin_of(parse_deployment(split)) == "extrapolated":
        st.caption(
            "Extrapolated from fewer GPUs: nothing was measured here, so there are no points."
        )
    elif points is None:
        st.caption("Line: the fit. Its measurements are not in this folder; to make some:")
        st.code(MEASURE, language="shell")
    else:
        st.caption(
            f"Line: the fit, and its error shaded. Points: {len(points)} measured shapes, the "
            f"median of their repetitions, from {folder}. The cost of the context, and of a "
            "draft's of its rows' children, is subtracted from both, so a point off the line is an "
            "error of the fit."
        )
    table = held_out_table(fit, split)
    if len(table):
        with st.expander("Forms that were tried, and their held-out errors"):
            st.dataframe(table, hide_index=True, width="stretch")


def show_floor_row(fit: Fit, split: str) -> None:
    cost, origin = fit.costs[split], fit.origin_of(parse_deployment(split))
    figures = [
        ("Target, 1 row", cost.target(1, 0), "target", "Lower bound of a round, with any tree"),
        ("Draft, 1 row", cost.draft(1, 0), "draft", "Lower bound of a draft forward"),
        ("Re-root", cost.reroot, "reroot", "Seconds per round"),
    ]
    if "+" in split:
        figures.append(("Message", cost.link, "link", "One way between draft and target"))
    with st.container(horizontal=True, gap="xsmall"):
        for name, seconds, part, text in figures:
            st.metric(
                name, f"{1e3 * seconds:.3g} ms", range_text(1e3 * seconds, fit, split, part),
                delta_color="off", delta_arrow="off", delta_description=origin,
                help=f"{text}. The range is the fit's held-out error.",
                border=True, width=174,
            )  # fmt: skip
        if cost.slowdown:
            text = "Seconds that the target loses per second of concurrent drafting"
            st.metric(
                "Slowdown", f"{cost.slowdown:.1%}", "no range", delta_color="off",
                delta_arrow="off", delta_description=origin, help=text, border=True, width=174,
            )  # fmt: skip


def show_floors() -> None:
    st.subheader("Lower bounds by data sheet")
    models = list(known_models())
    with st.container(horizontal=True):
        devices = device_table()["name"].tolist()
        gpu = st.selectbox("GPU", devices, devices.index("h100"), key="sheet", bind="query-params")
        target = st.selectbox(
            "Model", models, models.index("llama-3.1-70b"), key="sheet_model", bind="query-params"
        )
        weights = st.selectbox(
            "Weights", ["bf16", "fp8", "int8", "int4"], key="sheet_weights", bind="query-params"
        )
    model, device = parse_model(f"{target}:{weights}"), load_device(gpu)
    forwards = [Forward(model, device, gpus) for gpus in range(1, 9)]
    table = floor_table(forwards)
    if table.empty:
        st.warning(f"{model.label} does not fit on 8 x {gpu}. Choose int4 weights or another GPU.")
        return
    st.altair_chart(
        floor_chart(table),
        width="stretch",
        alt="Parts of a forward of one row, by number of GPUs",
    )
    draft = parse_model(f"{DRAFT}:{weights}")
    eight = room(forwards[-1], Forward(draft, device, 8))
    st.caption(
        "Roofline, not measured: bytes of the weights over the data sheet's bandwidth; the share "
        "of it that kernels reach; fixed times fitted to published speeds of whole engines. Mean "
        f"error for an engine that was not measured: {model.error:.0%}. Numbers of GPUs whose "
        f"memory does not hold the weights are left out. On 8 GPUs: {eight} ({draft.name})."
    )
    with st.expander("Data sheets"):
        st.dataframe(device_table(), hide_index=True, width="stretch")


st.caption(ABOUT)
for part in (show_coverage, show_floors):
    try:
        part()
    except CodesignError as error:
        st.error(str(error))
