"""What if: one way to serve one trace, simulated while you watch."""

from __future__ import annotations

import streamlit as st
from sidebar import LINK, keep_within

from codesign.config import SLO
from codesign.dashboard.choices import Machine, splits
from codesign.dashboard.policies import families, label_of, sizes_of
from codesign.dashboard.what_if import (
    FIRST_BATCH,
    FIRST_FAMILY,
    Asked,
    Prediction,
    known,
    predict,
)
from codesign.dashboard.words import against_plain, hint, scope, tiles, verdict
from codesign.errors import CodesignError
from codesign.planner.search_space import BATCH_LIMITS


def choose_policy() -> str:
    st.subheader("Policy")
    known_families = families()
    names = list(known_families)
    family = st.selectbox("Kind", names, index=names.index(FIRST_FAMILY), key="policy", bind=LINK)
    about = known_families[family]
    st.caption(f"{about.summary}. {about.source}".rstrip(" ."))
    sizes = {}
    for size in sizes_of(family):
        keep_within(size.key, size.low, size.high)
        sizes[size.key] = st.slider(
            size.title, size.low, size.high, size.default, key=size.key, bind=LINK
        )
    return label_of(family, sizes)


def choose_split(machine: Machine, policy: str) -> str:
    labels = splits(machine, policy)
    return st.selectbox(
        "Split of the machine", labels, key="split", bind=LINK,
        help="8: one group. 7+1: target on 7, draft on 1. 2x4: two replicas of 4. 6/p2: two GPUs "
        "for prompts alone.",
    )  # fmt: skip


def ask() -> Asked | None:
    shared = st.session_state["shared"]
    with st.sidebar:
        policy = choose_policy()
        split = choose_split(shared.machine, policy)
        max_batch = st.select_slider(
            "Batch limit of a replica", BATCH_LIMITS, FIRST_BATCH, key="batch", bind=LINK
        )
    if shared.traffic is None:
        return None
    return Asked(
        shared.traffic, shared.machine, policy, split, max_batch, shared.slo, shared.serving
    )


def show(prediction: Prediction, slo: SLO, limit: int) -> None:
    meets = prediction.scored.is_feasible
    st.markdown(
        f"{':material/check_circle:' if meets else ':material/cancel:'} "
        f"**{prediction.scored.label}.** {verdict(prediction, slo)} {against_plain(prediction)}"
    )
    with st.container(horizontal=True, gap="xsmall"):
        for tile in tiles(prediction, slo):
            st.metric(
                tile.label, tile.value, tile.range, delta_color="off", delta_arrow="off",
                delta_description=tile.origin, help=tile.explanation, border=True, width=174,
            )  # fmt: skip
    show_charts(prediction, slo, limit)
    st.caption(scope(prediction))
    for remark in prediction.remarks:
        st.caption(f":material/info: {remark[0].upper()}{remark[1:]}.")
    with st.expander(f"Notes about the trace ({len(prediction.notes)})"):
        st.markdown("\n".join(f"- {note}" for note in prediction.notes))


def show_charts(prediction: Prediction, slo: SLO, limit: int) -> None:
    from codesign.dashboard import what_if_charts as charts  # slow, and the numbers are there

    frames, percent = prediction.frames, slo.percentile
    tpot = None if prediction.has_own else slo.tpot
    places = [column for _ in range(3) for column in st.columns(2)]
    shown = (
        ("TTFT of requests", charts.latency_chart(frames.latency, "ttft", slo.ttft, percent),
         "Share of requests by TTFT, with the target"),
        (f"TPOT of requests{'; each has its own target' if prediction.has_own else ''}",
         charts.latency_chart(frames.latency, "tpot", tpot, percent),
         "Share of requests by TPOT, with the target if all have the same"),
        ("Requests running", charts.running_chart(frames.over_time, limit),
         "Requests running over time, and the batch limit"),
        ("Speculative length", charts.tokens_chart(frames.over_time),
         "Draft tokens verified and tokens emitted per round over time"),
        ("GPUs busy", charts.busy_chart(frames.over_time),
         "Share of time in which each group computes, over time"),
        ("Where a round's time goes", charts.spans_chart(frames.spans),
         "Mean time of each part of a round"),
    )  # fmt: skip
    for place, (title, chart, alt) in zip(places, shown, strict=True):
        place.markdown(f"**{title}**")
        place.altair_chart(chart, alt=alt)


def answer(asked: Asked) -> None:
    head, body = st.empty(), st.empty()
    limit = asked.max_batch * asked.candidate.deployment.replicas
    whole = known(asked, is_coarse=False)
    if whole is None:
        coarse = predict(asked, is_coarse=True)
        with body.container():
            show(coarse, asked.slo, limit)
        if coarse.is_whole:
            return
        whole = refined(asked, head)
    if whole is not None:
        head.empty()
        with body.container():
            show(whole, asked.slo, limit)


def refined(asked: Asked, place: st.delta_generator.DeltaGenerator) -> Prediction | None:
    """The answer from the whole trace; None if the visitor has stopped it."""
    with place.container(horizontal=True, vertical_alignment="center"):
        if st.session_state.pop("stopped", False):
            st.caption("Only a part of the trace.")
            st.button("Simulate all of it")
            return None
        bar = st.progress(0.0, "Simulating the whole trace")
        st.button("Stop", on_click=lambda: st.session_state.update(stopped=True))
    return predict(
        asked,
        is_coarse=False,
        progress=lambda _, done, total: bar.progress(
            min(done / total, 1.0), f"Simulating the whole trace: {done:,} of {total:,} requests"
        ),
    )


try:
    question = ask()
    if question is None:
        st.info("Name or upload a trace on the left. To see which there are:")
        st.code("codesign trace list", language="shell")
    else:
        answer(question)
        from codesign.dashboard.commands import simulate_command

        with st.expander("The same on the command line"):
            st.code(simulate_command(question), language="shell")
except CodesignError as error:
    st.error(f"{error}{hint(str(error))}", icon=":material/error:")
