"""Controls that the pages which predict share. Every one of them is in the link."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from codesign.config import ROUTINGS, SCHEDULINGS, SLO, Serving
from codesign.dashboard.choices import (
    SYNTHETIC,
    Machine,
    Traffic,
    fits_here,
    traces_here,
)
from codesign.dashboard.files import keep_upload
from codesign.fit.devices import devices
from codesign.fit.priced_model import WEIGHTS, known_models
from codesign.traces.presets import PRESETS

FILE, UPLOAD = "file on this machine", "upload"
SHEETS = "GPUs by name"
LINK = "query-params"


_SHARED = (
    "trace", "path", "rate_scale", "max_prompt", "max_output", "preset", "rate", "cv",
    "prompt_mean", "output_mean", "minutes", "ttft", "tpot", "percentile", "fit", "device", "gpus",
    "target", "target_weights", "draft", "draft_weights", "set_acceptance", "acceptance",
    "max_kv_tokens", "preemption", "prefix_cache", "prefill_chunk", "routing", "scheduling",
)  # fmt: skip
_UPLOADED = "uploaded"  # which file, and where it is
_CHOSEN = "chosen"  # when these controls were last on a page


@dataclass(frozen=True, slots=True)
class Shared:
    """What the pages that predict have in common; no traffic while a file is still to be named."""

    traffic: Traffic | None
    slo: SLO
    machine: Machine
    serving: Serving


def choose_shared() -> Shared:
    """The controls. The router draws them, so that they and the link outlive a change of page."""
    for key, value in st.session_state.get(_CHOSEN, {}).items():
        if key not in st.session_state and key not in st.query_params:
            st.session_state[key] = value
    with st.sidebar:
        traffic = choose_traffic()
        slo = choose_slo()
        machine = choose_machine()
        shared = Shared(traffic, slo, machine, choose_serving(machine))
    kept = {key: st.session_state[key] for key in _SHARED if key in st.session_state}
    st.session_state[_CHOSEN] = {**st.session_state.get(_CHOSEN, {}), **kept}
    return shared


def keep_within(key: str, least: int, most: int) -> None:
    """What was chosen for another plan, request or policy may not be there in this one."""
    value = st.session_state.get(key)
    if value is not None and not least <= value <= most:  # what is set Streamlit warns of
        st.session_state[key] = min(max(value, least), most)


def choose_traffic() -> Traffic | None:
    """The trace; None while a file is still to be named or uploaded."""
    st.subheader("Traffic")
    source = st.selectbox(
        "Trace", [*traces_here(), SYNTHETIC, FILE, UPLOAD], key="trace", bind=LINK
    )
    if source == SYNTHETIC:
        return _synthetic()
    if source == FILE:
        named = st.text_input("Path", key="path", bind=LINK, placeholder="conv.csv")
        source = str(Path(named).expanduser()) if named else ""
    elif source == UPLOAD:
        source = _uploaded()
    rate = st.slider("Rate, times", 0.1, 5.0, 1.0, 0.1, key="rate_scale", bind=LINK)
    limits = _longest()
    return Traffic(source, rate_scale=rate, **limits) if source else None


def _uploaded() -> str:
    """Where the upload is kept; it is looked at once, not at every change of the page."""
    file = st.file_uploader("Azure, BurstGPT, Mooncake or codesign format")
    most = st.get_option("server.maxUploadSize")
    st.caption(
        f"Up to {most} MB, about {most / 35:.0f} million requests. Larger ones need no upload: "
        f'choose "{FILE}" above.'
    )
    if file is None:
        return ""
    known, path = st.session_state.get(_UPLOADED, ("", ""))
    if known != file.file_id:
        path = keep_upload(file.name, file.getbuffer())
        st.session_state[_UPLOADED] = file.file_id, path
    return path


def _synthetic() -> Traffic:
    preset = st.selectbox(
        "Statistics of", list(PRESETS), key="preset", bind=LINK,
        format_func=lambda name: f"{name}: {PRESETS[name].about}",
    )  # fmt: skip
    known = PRESETS[preset]
    rate = st.slider("Requests per second", 0.1, 50.0, 5.0, 0.1, key="rate", bind=LINK)
    cv = None
    if known.cv is not None:
        cv = st.slider(
            "Burstiness", 0.2, 6.0, 1.0, 0.1, key="cv", bind=LINK,
            help="Standard deviation of the gaps between requests over their mean; 1 is random.",
        )  # fmt: skip
    prompt = st.slider("Mean prompt tokens", 16, 8192, 1024, 16, key="prompt_mean", bind=LINK)
    output = st.slider("Mean output tokens", 8, 2048, 200, 8, key="output_mean", bind=LINK)
    minutes = st.slider("Minutes", 1, 30, 10, key="minutes", bind=LINK)
    return Traffic(
        SYNTHETIC, preset=preset, rate=rate, cv=cv, prompt_mean=prompt, output_mean=output,
        seconds=60.0 * minutes, **_longest(),
    )  # fmt: skip


def _longest() -> dict[str, int | None]:
    with st.expander("Cut long requests"):
        return {
            "max_prompt": st.number_input(
                "Longest prompt, tokens", 1, None, None, key="max_prompt", bind=LINK
            ),
            "max_output": st.number_input(
                "Longest answer, tokens", 1, None, None, key="max_output", bind=LINK
            ),
        }


def choose_machine() -> Machine:
    """A fit, or GPUs and a pair of models."""
    st.subheader("Machine and models")
    fits = fits_here(Path.cwd())
    fit = st.selectbox(
        "Step times", [SHEETS, *fits], key="fit", bind=LINK,
        format_func=lambda name: fits.get(name, name),
        help="GPUs by name: as measured on such GPUs, if the package has them with these models, "
        "extrapolated if these are more than were measured, else from data sheets.",
    )  # fmt: skip
    if fit != SHEETS:
        return Machine(fit=fit)
    names = list(devices())
    left, right = st.columns(2)
    device = left.selectbox(
        "GPU", names, index=names.index("h100"), key="device", bind=LINK,
    )  # fmt: skip
    gpus = right.number_input("How many", 1, 16, 8, key="gpus", bind=LINK)
    target = _model("Target", "llama-3.1-70b", "target")
    draft = _model("Draft", "llama-3.2-1b", "draft")
    acceptance = None
    if st.toggle(
        "Set the acceptance", key="set_acceptance", bind=LINK,
        help="Otherwise the recordings of the shipped pair are used.",
    ):  # fmt: skip
        acceptance = st.slider(
            "Acceptance of the first draft token",
            0.05,
            0.95,
            0.7,
            0.05,
            key="acceptance",
            bind=LINK,
        )
    return Machine(device=device, gpus=gpus, target=target, draft=draft, acceptance=acceptance)


def _model(title: str, default: str, key: str) -> str:
    models = list(known_models())
    left, right = st.columns([3, 2])
    name = left.selectbox(title, models, index=models.index(default), key=key, bind=LINK)
    weights = right.selectbox("Weights", WEIGHTS, key=f"{key}_weights", bind=LINK)
    return name if weights == "bf16" else f"{name}:{weights}"


def choose_slo() -> SLO:
    """Targets; none where a field is 0."""
    st.subheader("SLO")
    left, middle, right = st.columns(3)
    ttft = left.number_input(
        "TTFT, ms", 0, None, 1000, 50, key="ttft", bind=LINK, help="0: no target."
    )
    tpot = middle.number_input(
        "TPOT, ms", 0, None, 50, 5, key="tpot", bind=LINK, help="0: no target."
    )
    percent = right.number_input("Percentile", 1, 100, 90, key="percentile", bind=LINK)
    return SLO(
        ttft=ttft / 1000.0 or None,
        tpot=tpot / 1000.0 or None,
        percentile=float(percent),
    )


def choose_serving(machine: Machine) -> Serving:
    """How memory and steps are shared between requests; by default as the machine's engine does."""
    with st.expander("Serving"):
        rows = st.number_input(
            "KV rows of a replica", 1, None, None, key="max_kv_tokens", bind=LINK,
            placeholder="what the fit says",
        )  # fmt: skip
        preemption = st.toggle(
            "Take KV rows as requests grow", not machine.fit, key="preemption", bind=LINK,
            help="Otherwise the rows of the whole answer are reserved at admission.",
        )  # fmt: skip
        cache = st.toggle("Prefix cache", key="prefix_cache", bind=LINK)
        chunk = st.number_input(
            "Prompt tokens that share a step", 1, None, None, key="prefill_chunk", bind=LINK,
            placeholder="whole prompts between steps",
        )  # fmt: skip
        routing = st.selectbox("Routing", ROUTINGS, key="routing", bind=LINK)
        scheduling = st.selectbox(
            "Scheduling", SCHEDULINGS, key="scheduling", bind=LINK,
            help="Who joins the batch next: first come, first served, or by the targets.",
        )  # fmt: skip
    return Serving(
        max_kv_tokens=rows,
        prefill_chunk=chunk,
        prefix_cache=cache,
        preemption=preemption,
        routing=routing,
        scheduling=scheduling,
    )
