"""Traces written as Mooncake JSON Lines: other tools read them, and so do we."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal

import codesign
from codesign.errors import InputError
from codesign.traces import Trace, load_trace, summarise, write_csv
from codesign.traces.mooncake import write_mooncake

PUBLISHED_FILES = Path(codesign.__file__).parents[2] / "shared" / "data" / "traces"


def make_trace(arrival, prompt, output=None, category="", **more) -> Trace:
    requests = pd.DataFrame(
        {
            "arrival": np.array(arrival, float),
            "prompt_tokens": np.array(prompt, np.int64),
            "output_tokens": np.array(output or [3] * len(prompt), np.int64),
            "category": np.array([category] * len(prompt), dtype=object),
            **more,
        }
    )
    return Trace("made", requests, "made", (), "0" * 64)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_one_request_with_milliseconds_and_ids_of_512_token_blocks(tmp_path):
    file = tmp_path / "x.jsonl"
    write_mooncake(make_trace([0, 1.5, 1.5], [1, 512, 1030], [7, 8, 9]), file)
    assert lines_of(file) == [
        {"timestamp": 0, "input_length": 1, "output_length": 7, "hash_ids": [0]},
        {"timestamp": 1500, "input_length": 512, "output_length": 8, "hash_ids": [1]},
        {"timestamp": 1500, "input_length": 1030, "output_length": 9, "hash_ids": [2, 3, 4]},
    ]


def test_made_up_ids_are_never_a_prefix_hit(tmp_path):
    write_mooncake(make_trace([0, 1, 2], [700, 600, 4000]), tmp_path / "x.jsonl")
    assert summarise(load_trace(tmp_path / "x.jsonl")).prefix_hit_rate == 0


def test_known_blocks_and_categories_come_back(tmp_path):
    trace = make_trace([0, 1], [700, 600], category="code", hash_ids=[[4, 5], [4, 9]])
    write_mooncake(trace, tmp_path / "x.jsonl")
    again = load_trace(tmp_path / "x.jsonl").requests
    assert_frame_equal(again, trace.requests, check_dtype=False)


def test_any_category_comes_back_and_one_that_breaks_a_csv_is_refused_there(tmp_path):
    line = '{"timestamp": %d, "input_length": 9, "output_length": 1, "category": %s}\n'
    (tmp_path / "x.jsonl").write_text(line % (0, '"a, b"') + line % (1, "null"))
    trace = load_trace(tmp_path / "x.jsonl")
    assert trace.requests["category"].tolist() == ["a, b", ""]
    write_mooncake(trace, tmp_path / "y.jsonl")
    assert load_trace(tmp_path / "y.jsonl").requests["category"].tolist() == ["a, b", ""]
    with pytest.raises(InputError, match=r"'a, b' cannot stand in a CSV.*parquet"):
        write_csv(trace, tmp_path / "y.csv")


def test_a_trace_without_categories_is_written_with_mooncakes_own_keys_only(tmp_path):
    write_mooncake(make_trace([0], [10]), tmp_path / "x.jsonl")
    assert set(lines_of(tmp_path / "x.jsonl")[0]) == {
        "timestamp",
        "input_length",
        "output_length",
        "hash_ids",
    }


@given(gaps=st.lists(st.integers(0, 10**13), min_size=1, max_size=30))
def test_arrivals_come_back_to_a_nanosecond_and_whole_microseconds_exactly(tmp_path_factory, gaps):
    file = tmp_path_factory.mktemp("mooncake") / "x.jsonl"
    arrival = np.cumsum([0, *gaps[1:]]) / 1e9
    write_mooncake(make_trace(arrival, [5] * len(arrival)), file)
    assert load_trace(file).requests["arrival"].to_numpy() == pytest.approx(
        arrival, rel=1e-15, abs=1e-9
    )
    stamped = np.round(arrival, 6)
    write_mooncake(make_trace(stamped, [5] * len(arrival)), file)
    assert load_trace(file).requests["arrival"].round(6).tolist() == stamped.tolist()


@pytest.mark.parametrize("name", ["conv-twin", "code-twin", "mooncake-twin"])
def test_a_bundled_trace_comes_back_as_it_was(tmp_path, name):
    trace = load_trace(name)
    write_mooncake(trace, tmp_path / "x.jsonl")
    again = load_trace(tmp_path / "x.jsonl").requests
    assert_frame_equal(again[trace.requests.columns], trace.requests, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", sorted(p.name for p in PUBLISHED_FILES.glob("*_c*")))
def test_a_published_trace_comes_back_as_it_was(tmp_path, name):
    trace = load_trace(PUBLISHED_FILES / name)
    write_mooncake(trace, tmp_path / "x.jsonl")
    again = load_trace(tmp_path / "x.jsonl").requests
    assert_frame_equal(again[trace.requests.columns], trace.requests, rtol=0, atol=1e-9)


def test_a_folder_that_is_a_file_is_an_input_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        write_mooncake(make_trace([0], [10]), tmp_path / "file" / "x.jsonl")
