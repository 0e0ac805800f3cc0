"""What was predicted against what was measured."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from codesign.dashboard.files import plan_files, plan_of_run, run_folders, unzipped
from codesign.dashboard.validation import (
    calibration_sentence,
    cause_of,
    compared,
    comparison_table,
    request_chart,
    residual_chart,
)
from codesign.errors import CodesignError
from codesign.fit import Fit
from codesign.plan import Plan
from codesign.run_directory import read_run
from codesign.validate import Validation, charts
from codesign.validate.words import SHOWN, ranking_text, verdict

PLACES = ("runs", "demo/runs")
FIGURES = ("tpot_mean", "throughput", "acceptance_length")


@st.cache_data(max_entries=8, show_spinner=False)
def fit_of(plan_path: str, changed: float) -> Fit:
    return Fit.load(Plan.load(plan_path).fit.check())


def choose_runs() -> tuple[str, list[str]]:
    """The plan's file and the folders of the runs."""
    place = st.text_input(
        "Folder of runs",
        next((place for place in PLACES if Path(place).is_dir()), ""),
        key="folder",
        bind="query-params",
        placeholder="runs",
        help="A folder that codesign run wrote, or one that holds several.",
    )
    with st.expander("Upload runs instead"):
        upload = st.file_uploader("ZIP of runs and their plan", type="zip")
    if upload is not None:
        place = str(unzipped(upload.getvalue()))
    if not place:
        st.info("No measured runs in this folder yet. These two commands make some")
        st.code(
            "codesign run --plan plan.json --baselines --out runs\n"
            "codesign validate --plan plan.json --run runs/*",
            language="shell",
            wrap_lines=True,
        )
        st.caption("For a whole example on a laptop, models included: make demo")
        st.stop()
    folders = run_folders(Path(place))
    names = {str(folder): folder.name for folder in folders}
    chosen = st.multiselect("Runs", list(names), list(names), format_func=names.__getitem__)
    if not chosen:
        st.info("Choose a run.")
        st.stop()
    found = plan_of_run(Path(chosen[0]), plan_files(Path()))
    plan = st.text_input(
        "Their plan",
        "" if found is None else shown_path(found),
        help="The plan that was run; it names the requests and the fit.",
    )
    if not plan:
        st.info("These runs do not say which plan they served. Name its file above, or run again")
        st.code("codesign run --plan plan.json", language="shell")
        st.stop()
    return plan, chosen


def shown_path(path: Path) -> str:
    """As short as it can be named from this folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def show() -> None:
    plan_path, runs = choose_runs()
    tolerance = st.slider(
        "Tolerance, %", 1, 50, 15, key="tolerance", bind="query-params", width=320
    )
    share = tolerance / 100.0
    place = st.empty()
    validation = compared(
        plan_path,
        runs,
        progress=lambda _, done, total: place.progress(
            done / total, f"Simulating what the runs served: {done} of {total}"
        ),
    )
    place.empty()
    is_good, sentence = verdict(validation, share)
    (st.success if is_good else st.warning)(
        sentence, icon=":material/check_circle:" if is_good else ":material/error:"
    )
    if reason := cause_of(validation, plan_path, share):
        st.info(f"Cause: {reason}")
    show_residuals(validation, share)
    show_scatters(validation)
    show_requests(validation)
    show_calibration(plan_path, Path(plan_path).stat().st_mtime)
    show_details(validation, share)


def show_residuals(validation: Validation, tolerance: float) -> None:
    st.subheader("Residuals")
    st.altair_chart(
        residual_chart(validation.runs, tolerance=tolerance),
        width="stretch",
        alt="Relative error of each figure by run, on its predicted interval",
    )
    st.caption(
        "Right of 0: predicted too high. Bars are prediction intervals; where a bar crosses 0, "
        f"it contains the measurement. Shaded: the tolerance. Means of {validation.num_seeds} "
        "simulations of exactly the requests that were served."
    )


def show_scatters(validation: Validation) -> None:
    st.subheader("Predicted and measured")
    with st.container(horizontal=True):
        for name in FIGURES:
            title, unit, factor = SHOWN[name]
            chart = charts.predicted_against_measured(
                validation.runs, name, title=f"{title}, {unit}", factor=factor, with_legend=False
            ).properties(height=300)
            with st.container(width=360):
                st.altair_chart(
                    charts.on_page(chart), width="stretch", alt=f"{title}, predicted and measured"
                )
    st.caption(
        "On the dashed line both are equal. Horizontal bars are predicted intervals; colours and "
        "shapes as above."
    )


def show_requests(validation: Validation) -> None:
    st.subheader("Single requests")
    figure = st.segmented_control(
        "Time of each request",
        ["tpot", "ttft"],
        default="tpot",
        required=True,
        format_func=str.upper,
        key="figure",
        bind="query-params",
    )
    st.altair_chart(
        request_chart(validation.runs, figure),
        width="stretch",
        alt="Relative error of each request by its measured time",
    )


def show_calibration(plan_path: str, changed: float) -> None:
    fit = fit_of(plan_path, changed)
    if fit.draft == "ngram":
        return
    st.subheader("Calibration of the draft model")
    chart = charts.calibration(fit.acceptance, fit.calibration).properties(height=340)
    st.altair_chart(
        charts.on_page(chart),
        width=520,
        alt="Share of tokens that the target agreed with, by the draft's confidence",
    )
    found = fit.calibration_fit
    if found is not None:
        st.caption(
            calibration_sentence(found.error_before, found.error_after, found.num_tokens)
            + " A dot is a bin of confidences, its size the number of tokens."
        )


def show_details(validation: Validation, tolerance: float) -> None:
    st.subheader("Run by run")
    for ranking in validation.rankings:
        st.markdown(f"Ranking by {SHOWN[ranking.figure][0]}: {ranking_text(ranking)}.")
    for run in validation.runs:
        with st.expander(f"{run.label}, {run.origin}"):
            st.caption(str(run.path))
            table = comparison_table(run, tolerance)
            st.dataframe(table, hide_index=True, width="stretch")
            for note in run.notes:
                st.caption(note)
    with st.expander("Show one folder without a prediction"):
        path = st.selectbox("Run", [str(run.path) for run in validation.runs])
        summary = read_run(path).summary
        st.json({k: summary.get(k) for k in ("created", "command", "hardware", "metrics")})


st.caption("Predictions compared with measurements, for any folder of runs.")
try:
    show()
except CodesignError as error:
    st.error(str(error))
