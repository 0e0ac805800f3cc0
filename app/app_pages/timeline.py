"""Rounds of a run, target and draft, simulated and measured, and the draft tree of a round."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import streamlit as st
from sidebar import keep_within

from codesign.dashboard.files import plan_files, runs_of
from codesign.dashboard.timeline import (
    FIRST_REQUESTS,
    lane_chart,
    lanes,
    request_rounds,
    served_requests,
    window,
)
from codesign.dashboard.trees import round_chart, round_sentence, round_table, tree_chart
from codesign.errors import CodesignError, counted
from codesign.fit import Fit
from codesign.plan import Plan
from codesign.planner.predict import simulate_outcome
from codesign.records import RunRecords
from codesign.run_directory import StoredRun, read_run
from codesign.sim.replay import ReplayedRound, replay

NO_RUN = "none: simulated only"


@st.cache_data(max_entries=8, show_spinner="Simulating the plan ...")
def simulated(plan_path: str, changed: float, label: str, seed: int) -> RunRecords:
    plan = Plan.load(plan_path)
    candidate = plan.find(label).candidate
    _, records = simulate_outcome(
        plan.requests().head(FIRST_REQUESTS),
        candidate,
        Fit.load(plan.fit.check()),
        slo=plan.slo,
        serving=plan.serving,
        seed=seed,
    )
    return records


@st.cache_data(max_entries=8, show_spinner="Reading the run ...")
def measured(folder: str, changed: float) -> StoredRun:
    return read_run(folder)


@st.cache_data(max_entries=16, show_spinner="Replaying the request ...")
def replayed(
    plan_path: str, changed: float, label: str, seed: int, request_id: int
) -> list[ReplayedRound]:
    plan = Plan.load(plan_path)
    return replay(
        plan.requests().head(FIRST_REQUESTS),
        request_id,
        plan.find(label).candidate,
        Fit.load(plan.fit.check()),
        serving=plan.serving,
        slo=plan.slo,
        seed=seed,
    )


def choose_plan() -> str:
    known = [str(path) for path in plan_files(Path())]
    made_here = st.session_state.get("plan_file")
    if made_here and made_here not in known:
        known.insert(0, made_here)
    if not known and not st.query_params.get("plan"):
        st.info("No plan in this folder yet. This command makes one")
        st.code(
            "codesign plan --trace conv-twin --rate-scale 0.1 --out plan.json", language="shell"
        )
        st.caption("For a plan with measured runs: make demo")
        st.stop()
    return st.selectbox(
        "Plan file",
        known,
        accept_new_options=True,
        key="plan",
        bind="query-params",
        help="A file that codesign plan wrote; type a path for one elsewhere.",
    )


def choose_run(plan_path: str, label: str) -> StoredRun | None:
    """A measured run of the candidate, if there is one."""
    fitting = [str(folder) for folder in runs_of(Path(plan_path), label)]
    known = [*fitting, NO_RUN]
    path = st.selectbox(
        "Measured run",
        known,
        accept_new_options=True,
        key=f"run of {label}",
        help="A folder that codesign run wrote. This candidate's runs next to the plan are listed; "
        "type a path for one elsewhere.",
    )
    if path == NO_RUN:
        if not fitting:
            st.caption(f'To measure it: `codesign run --plan {plan_path} --candidate "{label}"`')
        return None
    return run_at(path)


def run_at(path: str) -> StoredRun:
    file = Path(path) / "run.json"
    return measured(path, file.stat().st_mtime if file.exists() else 0.0)


def show() -> None:
    with st.container(horizontal=True):
        plan_path = choose_plan()
        plan = Plan.load(plan_path)
        changed = Path(plan_path).stat().st_mtime
        labels = [scored.label for scored in plan.scored]
        label = st.selectbox("Candidate", labels, key="candidate", bind="query-params")
        run = choose_run(plan_path, label)
    records = simulated(plan_path, changed, label, plan.seed)
    sides = [("simulated", records)] + ([(run.origin, run.records)] if run else [])
    ids = served_requests([each for _, each in sides])
    if not ids:
        st.warning("No request with two tokens or more was served by both. Choose another run.")
        return
    if plan.num_requests > FIRST_REQUESTS:
        st.caption(
            f"The first {FIRST_REQUESTS:,} of {plan.num_requests:,} requests; they are served "
            "as in the whole trace until the next one arrives."
        )
    keep_within("request", ids[0], ids[-1])
    with st.container(horizontal=True):
        request_id = st.number_input(
            "Request", ids[0], ids[-1], ids[0], key="request", bind="query-params"
        )
        count = st.slider(
            "Rounds in view", 3, 60, 8, key="rounds", bind="query-params", help="Then drag or zoom."
        )
    rounds = [
        ("measured" if n else "simulated", request_rounds(each, request_id))
        for n, (_, each) in enumerate(sides)
    ]
    longest = max(len(table) for _, table in rounds)
    chosen = 1
    if longest > 1:
        chosen = st.slider(
            "Round of the request", 1, longest, min(3, longest), key="round", bind="query-params"
        )
    chosen = min(chosen, longest)
    show_lanes(rounds, chosen, count, plan.find(label).origin)
    if plan.find(label).candidate.speculation.has_draft:
        show_tree(replayed(plan_path, changed, label, plan.seed, request_id), chosen)
    else:
        st.subheader("Draft tree")
        st.caption("This candidate decodes without a draft, so there is no tree to show.")


def show_lanes(rounds: list, chosen: int, count: int, step_times: str) -> None:
    st.subheader("Target and draft")
    parts = []
    for side, table in rounds:
        at = min(chosen, len(table)) - 1
        origin = float(table["start"].iloc[at] + 0.0)
        parts.append(lanes(window(table, at, count), side=side, origin=origin))
    shown = pd.concat(parts, ignore_index=True)
    st.altair_chart(
        lane_chart(shown, chosen_round=chosen),
        width="stretch",
        alt="Spans of each round as bars in lanes for target, draft and messages",
    )
    st.caption(
        f"Simulated: one random draw, step times {step_times}. "
        f"Round {chosen} starts at 0 ms on both sides; grey ticks frame it. Pale bars are "
        "simulated, full ones measured; low bars are prompts, re-rooting and verdicts. Drag to "
        "move, scroll or pinch to zoom, double-click to reset. The draft's lane shows the drafting "
        "that the target waited for; drafting during a verification takes no time of its own."
    )


def show_tree(rounds: list[ReplayedRound], chosen: int) -> None:
    st.subheader("Draft tree")
    if not rounds:
        st.caption("This request emits one token, which comes with its prompt: no round, no tree.")
        return
    if chosen > len(rounds):
        st.caption(
            f"Played alone, the request needs {counted(len(rounds), 'round')}; this is the last."
        )
    shown = rounds[min(chosen, len(rounds)) - 1]
    st.markdown(round_sentence(shown, len(rounds)))
    with_proposals = st.toggle(
        "Also show tokens that the draft proposed but did not use",
        key="proposals",
        bind="query-params",
    )
    st.altair_chart(
        tree_chart(shown, with_proposals=with_proposals),
        width="stretch",
        alt="Draft tree by depth, nodes by outcome",
    )
    st.caption(
        "Shape and colour: the outcome of a token; filled: the draft keeps it for the next "
        "round, hollow: dropped. The thick line is the emitted path. Percentages: the "
        "policy's estimate for the path. The policy's own objects replay the request, alone on the "
        "machine, with the draws of the simulation."
    )
    st.altair_chart(
        round_chart(rounds, shown.number + 1),
        width="stretch",
        alt="Tokens emitted in each round of the request, hits and misses",
    )
    with st.expander("Rounds as a table"):
        st.dataframe(round_table(rounds), hide_index=True, width="stretch")


st.caption("What target and draft did in each round, simulated and measured, and the draft trees.")
try:
    show()
except CodesignError as error:
    st.error(str(error))
