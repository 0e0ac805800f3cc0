"""Invariants of trace changes and of our files, for any trace."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codesign.errors import InputError
from codesign.traces import Trace, load_trace, summarise, write_csv, write_parquet
from codesign.traces.catalog import TWINS
from codesign.traces.synth import synthesise

BLOCK = 512


@st.composite
def traces(draw) -> Trace:
    count = draw(st.integers(1, 30))
    micros = draw(st.lists(st.integers(0, 5_000_000), min_size=count, max_size=count))
    prompt = draw(st.lists(st.integers(1, 5000), min_size=count, max_size=count))
    output = draw(st.lists(st.integers(1, 5000), min_size=count, max_size=count))
    arrival = np.cumsum(np.array(micros)) - micros[0]
    requests = pd.DataFrame(
        {
            "arrival": arrival / 1e6,
            "prompt_tokens": np.array(prompt, np.int64),
            "output_tokens": np.array(output, np.int64),
            "category": draw(
                st.lists(st.sampled_from(["", "chat", "code"]), min_size=count, max_size=count)
            ),
        }
    )
    if draw(st.booleans()):
        requests["hash_ids"] = [
            draw(st.lists(st.integers(0, 9), min_size=-(-p // BLOCK), max_size=-(-p // BLOCK)))
            for p in prompt
        ]
    return Trace("t", requests, "synthetic:test", ("a note",), "0" * 64)


def check_invariants(trace: Trace) -> None:
    arrival = trace.requests["arrival"].to_numpy()
    assert arrival[0] == 0
    assert (np.diff(arrival) >= 0).all()
    for name in ("prompt_tokens", "output_tokens"):
        assert trace.requests[name].dtype == np.int64
        assert trace.requests[name].min() >= 1
    assert trace.requests.index.tolist() == list(range(len(trace)))
    if "hash_ids" in trace.requests:
        expected = -(-trace.requests["prompt_tokens"] // BLOCK)
        assert trace.requests["hash_ids"].map(len).tolist() == expected.tolist()


@pytest.mark.parametrize(("write", "suffix"), [(write_csv, ".csv"), (write_parquet, ".parquet")])
@given(trace=traces())
def test_what_is_written_is_what_is_read(write, suffix, trace):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"trace{suffix}"
        write(trace, path)
        again = load_trace(path)
    assert again.requests.to_dict("list") == trace.requests.to_dict("list")
    assert again.notes == trace.notes
    check_invariants(again)


@given(traces(), st.floats(0.01, 100), st.floats(0.01, 10), st.floats(0.01, 10), st.data())
def test_every_change_keeps_a_trace_a_trace_and_adds_to_its_notes(
    trace, rate, prompt, output, data
):
    limits = st.none() | st.integers(1, 4000)
    changed = (
        trace.spread_ticks(data.draw(st.integers(0, 9)))
        .scale_rate(rate)
        .scale_lengths(
            prompt=data.draw(st.sampled_from([1.0, prompt])),
            output=output,
            max_prompt=data.draw(limits),
            max_output=data.draw(limits),
        )
        .head(data.draw(st.integers(1, 40)))
    )
    check_invariants(changed)
    assert changed.notes[: len(trace.notes)] == trace.notes
    changes = [name for name in changed.requests if name in trace.requests]
    same = len(changed) == len(trace) and all(
        changed.requests[name].tolist() == trace.requests[name].tolist() for name in changes
    )
    assert same or len(changed.notes) > len(trace.notes)


@given(traces(), st.integers(1, 9))
def test_slices_that_touch_share_no_request_and_lose_none(trace, parts):
    width = (trace.duration + 1) / parts
    taken = []
    for part in range(parts + 1):
        try:
            piece = trace.slice(part * width, width)
        except InputError:
            continue
        check_invariants(piece)
        taken += piece.requests["prompt_tokens"].tolist()
    assert taken == trace.requests["prompt_tokens"].tolist()


@given(traces(), st.floats(0.1, 10))
def test_scaling_the_rate_scales_the_rate_and_leaves_the_cv(trace, factor):
    before, after = summarise(trace), summarise(trace.scale_rate(factor))
    assert after.rate == pytest.approx(before.rate * factor)
    assert after.interarrival_cv == pytest.approx(before.interarrival_cv)
    assert after.prompt == before.prompt


@given(traces())
def test_hit_rate_agrees_with_a_cache_that_stores_whole_prefixes(trace):
    """Oracle: look at each block after a walk from the prompt's start, one at a time."""
    summary = summarise(trace)
    if "hash_ids" not in trace.requests:
        assert summary.prefix_hit_rate is None
        return
    seen: set[int] = set()
    hits = 0
    for ids in trace.requests["hash_ids"]:
        is_open = True
        for block in ids:
            is_open = is_open and block in seen
            hits += is_open
        seen |= set(ids)
    assert summary.prefix_hit_rate == pytest.approx(
        hits / trace.requests["hash_ids"].map(len).sum()
    )


@given(st.sampled_from(sorted(TWINS)), st.integers(1, 400), st.floats(0.1, 50), st.integers(0, 99))
def test_every_synthetic_trace_is_a_trace_of_the_size_asked_for(preset, count, rate, seed):
    trace = synthesise(preset, num_requests=count, rate=rate, seed=seed)
    assert len(trace) == count
    check_invariants(trace)
