"""Plan: the search for the best way to serve a trace, watched, compared and taken away."""

from __future__ import annotations

import time
from pathlib import Path

import streamlit as st
from sidebar import LINK

from codesign.cli.plan_economics import pays_text
from codesign.cli.plan_result import describe, doubt_text, next_command
from codesign.dashboard import plan_charts as charts
from codesign.dashboard.choices import load_machine
from codesign.dashboard.commands import plan_command
from codesign.dashboard.exports import ENGINE_TITLES, export_text
from codesign.dashboard.files import unpacked
from codesign.dashboard.links import OBJECTIVE_TITLES
from codesign.dashboard.plan_tables import (
    AXES,
    TITLES,
    candidate_table,
    convergence_table,
    figures_of,
    inside,
    rival,
    side_by_side,
    span_table,
)
from codesign.dashboard.planning import OBJECTIVES, Found, PlanAsked, find_plan, known_plan
from codesign.dashboard.words import hint
from codesign.errors import CodesignError, counted
from codesign.fit import Fit
from codesign.fit.extrapolated import origin_text
from codesign.fit.profile_command import profile_command

OBJECTIVE_WORDS = {  # a box of the sidebar is too narrow for them
    "goodput": "Most requests per second within the SLO.",
    "latency": "Lowest mean TPOT of the plans that bear the load.",
    "fewest": "Most goodput on the fewest GPUs that bear the load and meet the SLO.",
}
DRAW_EVERY = 0.7  # seconds between two drawings of a search that goes on


def ask() -> PlanAsked | None:
    shared = st.session_state["shared"]
    with st.sidebar:
        st.subheader("Search")
        objective = st.selectbox(
            "Wanted", OBJECTIVES, key="objective", bind=LINK, format_func=OBJECTIVE_TITLES.get
        )
        st.caption(OBJECTIVE_WORDS[objective])
        most = st.number_input(
            "Requests at most", 1, None, None, key="max_requests", bind=LINK,
            placeholder="all; on a CPU 200",
        )  # fmt: skip
        labels = st.text_input(
            "Only these policies", key="policies", bind=LINK, placeholder="plain,chain-3,tree-8x4x2"
        )
        runnable = st.checkbox(
            "Only what the engine here runs", key="runnable", bind=LINK,
            help="Without workers for prompts alone; plans that have them can be exported.",
        )  # fmt: skip
    if shared.traffic is None:
        return None
    policies = tuple(label.strip() for label in labels.split(",") if label.strip())
    return PlanAsked(
        shared.traffic, shared.machine, shared.slo, shared.serving, objective, most, policies,
        runnable,
    )  # fmt: skip


def watch_search(asked: PlanAsked) -> Found:
    place = st.empty()
    with place.container():
        left, right = st.columns([4, 1], vertical_alignment="center")
        bar = left.progress(0.0, "Screen")
        right.button("Stop")
        chart = st.empty()
    drawn = 0.0

    def draw(seen: tuple) -> None:
        nonlocal drawn
        if time.monotonic() - drawn > DRAW_EVERY:
            drawn = time.monotonic()
            show_convergence(seen, asked.objective, chart)

    found = find_plan(
        asked,
        watch=draw,
        progress=lambda stage, done, total: bar.progress(
            min(done / max(total, 1), 1.0), f"{stage.capitalize()}: {done:,} of {total:,}"
        ),
    )
    place.empty()
    return found


def show_convergence(seen: tuple, objective: str, place: st.delta_generator.DeltaGenerator) -> None:
    title = TITLES["tpot_mean" if objective == "latency" else "goodput"].title
    place.altair_chart(
        charts.convergence_chart(convergence_table(seen, objective), title),
        alt="Every simulation of the search, and the best so far",
    )


def show_winner(found: Found, fit: Fit) -> None:
    plan, answer = found.plan, found.answer
    st.markdown(f":material/check_circle: **{plan.chosen.label}**: "
                f"{describe(plan.chosen.candidate)}.")  # fmt: skip
    st.markdown(f"**Why:** {plan.reason}.")
    if plan.runner_up:
        st.markdown(f"**Second:** {plan.runner_up}.")
    if pays := pays_text(plan):
        st.markdown(f"**Does speculation pay?** {pays}.")
    if plan.doubts:
        st.markdown(f"**What could change the choice:** {doubt_text(plan)}; to find out:")
        st.code(profile_command(fit), language="shell")
    if plan.ties:
        st.markdown(f"**Equally good within the uncertainty:** {'; '.join(plan.ties[:4])}.")
    st.caption(
        f"{counted(answer.num_candidates, 'plan')} screened, {answer.num_simulated} simulated, "
        f"{len(plan.scored)} on all {counted(plan.num_requests, 'request')}. Step times "
        f"{origin_text(fit, plan.chosen.origin)}."
    )
    with st.expander(f"Notes ({len(plan.notes)})"):
        st.markdown("\n".join(f"- {note}" for note in plan.notes))


def show_front(found: Found) -> None:
    st.subheader("Trade-offs")
    figures = figures_of(found.plan.slo, has_own=found.has_own)
    table = candidate_table(found.plan, figures)
    axes = [name for name in AXES if name in table]
    left, right = st.columns(2)
    titles = {name: figures[name].title for name in axes}
    x = left.selectbox("Across", axes, key="x", bind=LINK, format_func=titles.get)
    y = right.selectbox(
        "Up", axes, index=min(1, len(axes) - 1), key="y", bind=LINK, format_func=titles.get
    )
    event = st.altair_chart(
        charts.pareto_chart(table, x, y, best=found.plan.chosen.label, figures=figures),
        on_select="rerun",
        alt=f"Plans by {titles[x]} and {titles[y]}, the best trade-offs connected by a line",
    )
    brushed = inside(table, dict(event.selection.get(charts.BRUSH, {})))
    has_slo = found.plan.slo.is_set
    hollow = " Hollow: misses the SLO." if has_slo else ""
    st.caption(
        f"{len(brushed)} of {len(table)} plans below; drag a rectangle in the chart to choose. "
        f"Ringed: the plan's choice.{hollow} Pale: another plan is better in both."
    )
    st.dataframe(
        brushed,
        hide_index=True,
        column_order=[
            "place", "plan", *(["meets"] if has_slo else []), "origin",
            *(name for figure in figures for name in (figure, f"{figure}_range")),
            "load", "simulations",
        ],
        column_config={
            "place": st.column_config.NumberColumn("", width=40),
            "plan": st.column_config.TextColumn("plan", pinned=True),
            "meets": "meets the SLO",
            "origin": "step times",
            **{f"{name}_range": "from .. to" for name in figures},
            **{name: st.column_config.NumberColumn(figure.title, format="%.4g")
               for name, figure in figures.items()},
        },
    )  # fmt: skip


def show_two(found: Found) -> None:
    st.subheader("Compare two")
    labels = [scored.label for scored in found.plan.scored]
    if len(labels) < 2:
        st.caption("The search simulated one plan only.")
        return
    left, right = st.columns(2)
    one = left.selectbox("First", labels, key="first", bind=LINK)
    other = right.selectbox("Second", labels, index=rival(found.plan), key="second", bind=LINK)
    figures = figures_of(found.plan.slo, has_own=found.has_own)
    st.dataframe(side_by_side(found.plan, one, other, figures), hide_index=True)
    st.altair_chart(
        charts.two_rounds_chart(span_table(found.plan, list(dict.fromkeys([one, other])))),
        alt="Where a round's time goes in both plans",
    )


def next_words(found: Found, fit: Fit) -> str:
    """What to type with the plan's files, worked out once: of some plans that takes a second."""
    kept = st.session_state.get("plan_next")
    if kept is None or kept[0] is not found:
        kept = found, next_command(found.plan, Path("plan.json"), fit)
        st.session_state["plan_next"] = kept
    return kept[1]


def show_files(found: Found, fit: Fit) -> None:
    st.subheader("Take it away")
    with st.container(horizontal=True):
        st.download_button(
            "Download plan (zip)", found.bundle(), "plan.zip", on_click="ignore",
            icon=":material/download:", type="primary",
        )  # fmt: skip
        st.download_button(
            "plan.json alone", found.files["plan.json"], "plan.json", on_click="ignore",
            mime="application/json",
        )  # fmt: skip
    st.caption("The ZIP file contains the plan, its trace and its fit.")
    st.code(f"unzip plan.zip\n{next_words(found, fit)}", language="shell")
    st.session_state["plan_file"] = str(unpacked(found.files))
    st.page_link(
        "app_pages/timeline.py", label="Open the plan's timeline", icon=":material/view_timeline:"
    )
    engine = st.selectbox(
        "Other engines", ["", *ENGINE_TITLES], key="engine", bind=LINK,
        format_func=lambda name: ENGINE_TITLES.get(name, "choose one"),
    )  # fmt: skip
    if engine:
        exported = export_text(found, engine)
        st.code(exported.commands, language="shell")
        for name, content in exported.files.items():
            st.caption(name)
            st.code(content)
        for line in exported.losses:
            st.caption(f":material/warning: {line}")


try:
    question = ask()
    if question is None:
        st.info("Name or upload a trace on the left.")
    else:
        wanted = st.button("Search", type="primary", icon=":material/search:")
        plan_found = known_plan(question)
        if plan_found is None and wanted:
            plan_found = watch_search(question)
        if plan_found is None:
            st.info("No plan for this question yet. Search here, or with the command:")
            st.code(plan_command(question), language="shell")
        else:
            machine_fit = load_machine(question.machine)
            show_winner(plan_found, machine_fit)
            show_front(plan_found)
            show_two(plan_found)
            show_files(plan_found, machine_fit)
            with st.expander("How the search went"):
                show_convergence(plan_found.seen, question.objective, st.empty())
                st.code(plan_command(question), language="shell")
except CodesignError as error:
    st.error(f"{error}{hint(str(error))}", icon=":material/error:")
