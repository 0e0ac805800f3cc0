"""Reading, changing and writing traces: every format, every rejection."""

from __future__ import annotations

import gzip
import os
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import codesign
from codesign.errors import InputError
from codesign.traces import Trace, load_trace, summarise, write_csv, write_parquet
from codesign.traces.catalog import PUBLISHED, TWINS, bundled_path, find_published
from codesign.traces.files import csv_text
from codesign.traces.summary import prefix_hit_rate

PUBLISHED_FILES = Path(codesign.__file__).parents[2] / "shared" / "data" / "traces"

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
AZURE_1 = "2023-11-16 18:17:03.9799600,4808,10"
AZURE_2 = "2023-11-16 18:17:04.0319601,3180,8"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURSTGPT_3 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
)
MOONCAKE = '{"timestamp": %d, "input_length": %d, "output_length": %s, "hash_ids": %s}\n'
OURS = "arrival,prompt_tokens,output_tokens"


def azure(*rows: str) -> str:
    return AZURE + "\r\n".join(rows)


def save(folder: Path, content: str | bytes, name: str = "x.csv") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def load_text(folder: Path, content: str | bytes, name: str = "x.csv") -> Trace:
    return load_trace(save(folder, content, name))


def make_trace(arrival=(0.0, 1.0, 3.0), prompt=(10, 600, 1030), output=(5, 6, 7), **more) -> Trace:
    requests = pd.DataFrame(
        {
            "arrival": np.array(arrival, float),
            "prompt_tokens": np.array(prompt, np.int64),
            "output_tokens": np.array(output, np.int64),
            "category": [""] * len(arrival),
        }
    )
    return Trace("t", requests.assign(**more), "t.csv", (), "0" * 64)


def columns(trace: Trace) -> list[list]:
    names = ["arrival", "prompt_tokens", "output_tokens"]
    return [trace.requests[name].tolist() for name in names]


def test_azure_2023_is_read_to_the_seventh_digit_without_a_last_newline(tmp_path):
    trace = load_text(tmp_path, azure(AZURE_1, AZURE_2))
    assert columns(trace) == [[0.0, 0.0520001], [4808, 3180], [10, 8]]
    assert trace.requests["arrival"].dtype == np.float64
    assert trace.requests["prompt_tokens"].dtype == np.int64
    assert trace.requests["category"].tolist() == ["", ""]
    assert trace.notes == ()


def test_a_file_that_may_not_be_read_says_how_to_allow_it(tmp_path, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "trace.csv"
    path.write_text(AZURE + AZURE_1)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=f"Permission denied. Fix: chmod u\\+r {path}"):
        load_trace(path)


def test_azure_2024_is_read_with_offsets_and_whole_seconds(tmp_path):
    text = azure("2024-05-10 00:00:00.009930+00:00,2162,5", "2024-05-10 00:00:01+00:00,2399,6")
    trace = load_text(tmp_path, text.replace("\r", "") + "\n")
    assert columns(trace) == [[0.0, 0.99007], [2162, 2399], [5, 6]]


def test_burstgpt_drops_failed_requests_and_says_how_many(tmp_path):
    rows = (
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n"
        "50,GPT-4,0,0,0,API log\n118,GPT-4,417,276,693,API log\n"
    )
    trace = load_text(tmp_path, BURSTGPT + rows)
    assert columns(trace) == [[0.0, 113.0], [472, 417], [18, 276]]
    assert trace.notes == (
        "2 failed requests (0 Response tokens, as the dataset documents) were dropped",
    )


def test_burstgpt_columns_are_found_by_name_not_by_place(tmp_path):
    rows = "19440110.0,,3.5,GPT-4,30,4,34,API log\n19440111.5,ab-c,1.0,ChatGPT,5,6,11,x\n"
    trace = load_text(tmp_path, BURSTGPT_3 + rows)
    assert columns(trace) == [[0.0, 1.5], [30, 5], [4, 6]]


def test_mooncake_and_toolagent_are_read_in_seconds_with_their_blocks(tmp_path):
    text = MOONCAKE % (27482, 6955, 52, list(range(14))) + MOONCAKE % (30535, 512, 26, [46])
    trace = load_text(tmp_path, text, "toolagent_trace.jsonl")
    assert columns(trace) == [[0.0, pytest.approx(3.053)], [6955, 512], [52, 26]]
    assert trace.requests["hash_ids"].tolist() == [list(range(14)), [46]]
    assert trace.name == "mooncake-toolagent"


def test_mooncake_without_blocks_has_no_blocks(tmp_path):
    text = '{"timestamp": 0, "input_length": 9, "output_length": 1}\n'
    assert "hash_ids" not in load_text(tmp_path, text).requests


def test_a_hand_written_csv_needs_three_columns_and_is_moved_to_start_at_0(tmp_path):
    trace = load_text(tmp_path, f"{OURS},category\n0.3,1,2,\n0.4,3,4,chat\n")
    assert columns(trace) == [[0.0, 0.1], [1, 3], [2, 4]]
    assert trace.requests["category"].tolist() == ["", "chat"]


def test_columns_of_a_hand_written_csv_that_mean_nothing_are_named(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(
        "arrival,prompt_tokens,output_tokens,category,slo_ttft,specultes\n0,9,3,chat,1,1\n"
    )
    assert load_trace(path).notes == ("columns not used: slo_ttft, specultes",)
    path.write_text("arrival,prompt_tokens,output_tokens,category,speculates\n0,9,3,chat,1\n")
    assert load_trace(path).notes == ()


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + azure(AZURE_1, AZURE_2).encode(),
        gzip.compress(azure(AZURE_1, AZURE_2).encode()),
        azure(AZURE_1, AZURE_2).replace("\r", "").encode() + b"\n",
    ],
    ids=["byte order mark", "gzip", "LF and a last newline"],
)
def test_the_same_rows_come_out_of_every_wrapping(tmp_path, content):
    assert columns(load_text(tmp_path, content)) == columns(
        load_text(tmp_path, azure(AZURE_1, AZURE_2))
    )


REJECTED_LINES = {
    "token count is text": (azure(AZURE_1, AZURE_2.replace("3180", "abc")), 3, "'abc', not a who"),
    "token count is half": (azure(AZURE_1, AZURE_2.replace("3180", "1.5")), 3, "'1.5', not a who"),
    "token count is a truth value": (azure(AZURE_1.replace("4808", "True")), 2, "'True', not a"),
    "token count is infinite": (azure(AZURE_1, AZURE_2.replace("3180", "inf")), 3, "'inf', not a"),
    "token count is huge": (azure(AZURE_1, AZURE_2.replace("3180", "9" * 30)), 3, "not between 1"),
    "prompt is empty": (azure(AZURE_1, AZURE_2.replace("3180", "0")), 3, "ContextTokens is 0, not"),
    "output is empty": (azure(AZURE_1, AZURE_2[:-1] + "0"), 3, "GeneratedTokens is 0, not"),
    "output is negative": (azure(AZURE_1, AZURE_2[:-1] + "-8"), 3, "GeneratedTokens is -8, not"),
    "last line is cut off": (azure(AZURE_1, AZURE_2[:-2]), 3, "GeneratedTokens is missing"),
    "line is empty": (azure(AZURE_1, "", AZURE_2), 3, "TIMESTAMP is missing"),
    "field too many": (azure(AZURE_1, AZURE_2 + ",9"), 3, "4 fields, the header has 3"),
    "field too many at once": (azure(AZURE_1 + ",9", AZURE_2), 2, "4 fields, the header has 3"),
    "no such date": (azure(AZURE_1, AZURE_2.replace("11-16", "13-16")), 3, "not a date such as"),
    "date is a number": (azure("5,1,2", "6,1,2"), 2, "TIMESTAMP is '5', not a date"),
    "time goes back": (azure(AZURE_2, AZURE_1), 3, "rows must be in order of arrival"),
    "column is missing": (f"{AZURE[:23]}\n1,2\n", 1, "column 'GeneratedTokens' of the Azure"),
    "columns are unknown": ("a,b\n1,2\n", 1, "'a,b' is not the header of a known trace"),
    "columns are quoted": (
        '"arrival","prompt_tokens","output_tokens"\n',
        1,
        "the columns are quoted. Fix: write the file without",
    ),
    "column occurs twice": (f"{OURS},arrival\n0,1,1,0\n", 1, "a column occurs twice"),
    "prompt of 0 with an answer": (
        f"{BURSTGPT}5,a,4,0,4,x\n6,a,0,3,3,x\n",
        3,
        "Request tokens is 0, not",
    ),
    "prompt missing after a failure": (
        f"{BURSTGPT}5,a,4,0,4,x\n6,a,,3,3,x\n",
        3,
        "Request tokens is missing",
    ),
    "negative response": (f"{BURSTGPT}5,a,4,-1,3,x\n", 2, "Response tokens is -1, not"),
    "seconds are text": (f"{BURSTGPT}5,a,4,1,5,x\nx,a,4,1,5,x\n", 3, "Timestamp is 'x', not a num"),
    "seconds are infinite": (f"{OURS}\n0,1,1\ninf,1,1\n", 3, "arrival is 'inf', not a number"),
    "seconds go back": (f"{OURS}\n1,1,1\n0.5,1,1\n", 3, "arrival 0.5 is before 1.0"),
    "blocks are text": (f"{OURS},hash_ids\n0,1,1,5\n1,513,1,5 x\n", 3, "hash_ids '5 x' are not"),
    "too few blocks": (f"{OURS},hash_ids\n0,1,1,5\n1,513,1,5\n", 3, "1 hash_ids for 513 prompt"),
    "note line is damaged": ("# codesign trace {\n" + OURS + "\n0,1,1\n", 1, "is damaged"),
    "bad row below a note line": (
        '# codesign trace {"schema_version": 1}\n' + OURS + "\n0,1,1\n1,x,1\n",
        4,
        "prompt_tokens is 'x'",
    ),
}


def test_milliseconds_since_1970_are_refused_as_such(tmp_path):
    with pytest.raises(InputError, match=r"line 2: arrival is 1700000000000, .* by 1000"):
        load_text(tmp_path, f"{OURS}\n1700000000000,1,1\n1700000001000,1,1\n")
    trace = load_text(tmp_path, f"{OURS}\n1700000000,1,1\n1700000001,1,1\n")
    assert trace.requests["arrival"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("header", [OURS, "Timestamp,Request tokens,Response tokens"])
def test_dates_where_seconds_belong_name_the_header_that_takes_dates(tmp_path, header):
    with pytest.raises(InputError, match=r"line 2: .* a date.* TIMESTAMP,ContextTokens,Gen"):
        load_text(tmp_path, f"{header}\n2026-10-25T02:59:03.4+02:00,1,1\n")


def test_dates_across_a_change_of_the_clock_need_their_offsets(tmp_path):
    summer, winter = "2026-10-25T02:59:59+02:00,9,9", "2026-10-25T02:00:00+01:00,9,9"
    assert load_text(tmp_path, azure(summer, winter)).requests["arrival"].tolist() == [0.0, 1.0]
    with pytest.raises(InputError, match=r"line 3: .* has no offset from UTC, the first"):
        load_text(tmp_path, azure(summer, "2026-10-25T02:59:59.5,9,9"))
    with pytest.raises(InputError, match=r"line 3: .* has an offset from UTC, the first"):
        load_text(tmp_path, azure(AZURE_1, AZURE_2.replace(",", "Z,", 1), AZURE_2))


def test_rows_without_an_answer_are_counted(tmp_path):
    rows = "".join(f"{i},5,{i % 3}\n" for i in range(9))
    with pytest.raises(InputError, match=r"line 2: output_tokens is 0, .*; 2 more such rows"):
        load_text(tmp_path, f"{OURS}\n{rows}")


@pytest.mark.parametrize(("content", "line", "reason"), REJECTED_LINES.values(), ids=REJECTED_LINES)
def test_a_bad_csv_row_is_refused_with_file_line_reason_and_fix(tmp_path, content, line, reason):
    with pytest.raises(InputError) as caught:
        load_text(tmp_path, content)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'x.csv'}, line {line}: ")
    assert reason in message
    assert ". Fix: " in message
    assert "\n" not in message
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("content", "column"),
    [(azure(AZURE_2, AZURE_1), "TIMESTAMP"), (f"{OURS}\n0,1,1\n5,1,1\n3,1,1\n", "arrival")],
)
def test_rows_out_of_order_are_to_be_sorted_not_deleted(tmp_path, content, column):
    with pytest.raises(InputError, match=rf"Fix: sort the lines by {column}, or "):
        load_text(tmp_path, content)


GOOD = MOONCAKE % (5, 513, 5, [0, 1])
REJECTED_JSON = {
    "line is cut off": (GOOD + GOOD[:-20], "not JSON, or cut off"),
    "line is empty": (GOOD + "\n" + GOOD, "the line is empty"),
    "line is a list": (GOOD + "[1]\n", "the line is not a JSON object"),
    "two objects on a line": (GOOD + GOOD.strip() + "," + GOOD, "not JSON, or cut off"),
    "key is missing": (GOOD + GOOD.replace('"output_length": 5, ', ""), "'output_length' is missi"),
    "blocks are missing once": (
        GOOD + '{"timestamp": 5, "input_length": 1, "output_length": 1}\n',
        "'hash_ids' is missing",
    ),
    "too many blocks": (GOOD + MOONCAKE % (5, 512, 5, [0, 1]), "2 hash_ids for 512 prompt tokens"),
    "too few blocks": (GOOD + MOONCAKE % (5, 1025, 5, [0, 1]), "2 hash_ids for 1025 prompt tokens"),
    "block is half": (GOOD + MOONCAKE % (5, 513, 5, [0, 1.5]), "not a whole number"),
    "blocks are a number": (GOOD + MOONCAKE % (5, 513, 5, 3), "hash_ids is 3, not a list"),
    "time goes back": (GOOD + MOONCAKE % (4, 513, 5, [0, 1]), "timestamp 4 is before 5"),
    "length is text": (GOOD + MOONCAKE % (5, 513, '"5"', [0, 1]), 'output_length is "5", not a n'),
    "length is a truth value": (
        GOOD + MOONCAKE % (5, 513, "true", [0, 1]),
        "is true, not a number",
    ),
    "length is null": (GOOD + MOONCAKE % (5, 513, "null", [0, 1]), "is null, not a number"),
    "length is not a number": (GOOD + MOONCAKE % (5, 513, "NaN", [0, 1]), "output_length is miss"),
    "length is half": (GOOD + MOONCAKE % (5, 513, "2.5", [0, 1]), "'2.5', not a whole number"),
    "length is 0": (GOOD + MOONCAKE % (5, 513, "0", [0, 1]), "output_length is 0, not between"),
}


@pytest.mark.parametrize(("content", "reason"), REJECTED_JSON.values(), ids=REJECTED_JSON)
def test_a_bad_json_line_is_refused_with_file_line_reason_and_fix(tmp_path, content, reason):
    with pytest.raises(InputError) as caught:
        load_text(tmp_path, content, "x.jsonl")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'x.jsonl'}, line 2: ")
    assert reason in message
    assert ". Fix: " in message
    assert "\n" not in message


GZIPPED = gzip.compress(azure(AZURE_1, AZURE_2).encode())
REJECTED_FILES = {
    "empty": (b"", "is empty"),
    "blank": (b" \n", "is empty"),
    "only a header": (AZURE.encode(), "has a header but no request"),
    "only failures": (f"{BURSTGPT}5,a,4,0,4,x\n".encode(), "has only failed requests"),
    "another encoding": (azure(AZURE_1).encode("utf-16"), "is not UTF-8 text"),
    "a bad byte below the header": (
        azure(AZURE_1, "\N{POUND SIGN}").encode("latin-1"),
        "not UTF-8",
    ),
    "gzip cut off": (GZIPPED[:-12], "is a damaged gzip file"),
    "gzip with a wrong sum": (GZIPPED[:-8] + b"\0" * 8, "is a damaged gzip file"),
    "Parquet cut off": (b"PAR1 and then nothing", "is not a Parquet file"),
    "a newer schema": (b'# codesign trace {"schema_version": 99}\n', "has schema version 99"),
}


@pytest.mark.parametrize(("content", "reason"), REJECTED_FILES.values(), ids=REJECTED_FILES)
def test_a_file_that_is_no_trace_is_refused_in_one_line(tmp_path, content, reason):
    with pytest.raises(InputError) as caught:
        load_text(tmp_path, content)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "(byte " not in str(caught.value)  # within a field: nobody finds it by that


def test_noise_that_is_called_parquet_is_not_said_to_be_text(tmp_path):
    save(tmp_path, b"\x80\x81 no PAR1", "noise.parquet")
    with pytest.raises(InputError, match="is not a Parquet file, or damaged"):
        load_trace(tmp_path / "noise.parquet")


def test_what_is_not_a_file_is_refused_with_the_command_that_lists(tmp_path):
    for name in (tmp_path, tmp_path / "missing.csv", "missing.csv", "no-such-trace"):
        with pytest.raises(InputError, match="codesign trace list"):
            load_trace(name)


def test_a_pipe_is_refused_before_it_is_read(tmp_path):
    """As of ``<(command)``: it can be read once, and a trace is read twice."""
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(InputError, match=r"no regular file.*Fix: write it to a file first"):
        load_trace(tmp_path / "pipe.csv")


@pytest.mark.parametrize(("separator", "name"), [(";", "';'"), ("\t", "tabs")])
def test_columns_that_are_not_separated_by_commas_are_said_to_be_that(tmp_path, separator, name):
    """As spreadsheets write them, where a comma is the decimal point."""
    text = "arrival,prompt_tokens,output_tokens\n0,5,5\n".replace(",", separator)
    with pytest.raises(InputError, match=f"separated by {name}. Fix: separate them by commas"):
        load_text(tmp_path, text)


def test_an_enormous_time_is_shown_in_a_few_digits(tmp_path):
    with pytest.raises(InputError, match=r"arrival is 1e\+300, which is no time in seconds"):
        load_text(tmp_path, "arrival,prompt_tokens,output_tokens\n1e300,5,5\n")


def test_a_published_trace_that_was_not_fetched_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path))
    with pytest.raises(InputError, match="codesign trace fetch azure-conv"):
        load_trace("azure-conv")


def test_a_fetched_trace_is_found_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path))
    (tmp_path / "traces").mkdir()
    save(tmp_path / "traces", azure(AZURE_1), "AzureLLMInferenceTrace_conv.csv")
    trace = load_trace("azure-conv")
    assert (trace.name, len(trace)) == ("azure-conv", 1)


@pytest.mark.parametrize("name", [*TWINS, *TWINS.values()])
def test_bundled_twins_are_found_by_name_and_by_preset_from_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace = load_trace(name)
    assert trace.name in TWINS
    assert name in (trace.name, TWINS[trace.name])
    assert trace.notes[0].startswith("synthetic, seed 1: ")


def test_bundled_twins_are_found_in_a_wheel(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "codesign"
    (package / "_traces").mkdir(parents=True)
    save(package / "_traces", f"{OURS}\n0,1,1\n", "conv-twin.csv")
    monkeypatch.setattr("codesign.traces.catalog.__file__", str(package / "traces" / "catalog.py"))
    assert bundled_path("conv-twin") == package / "_traces" / "conv-twin.csv"
    with pytest.raises(InputError, match="codesign trace synth bursty"):
        bundled_path("code-twin")


def test_a_million_rows_load_in_seconds(tmp_path):
    lines = "".join(
        f"2024-05-10 00:00:{i // 20000:02d}.{i % 20000:06d}+00:00,5,6\n" for i in range(1_000_000)
    )
    path = save(tmp_path, AZURE.replace("\r", "") + lines)
    start = time.process_time()  # not the wall's: others may be at work
    assert len(load_trace(path)) == 1_000_000
    assert time.process_time() - start < 15  # measured 0.5 s; row by row takes minutes


def test_slice_keeps_the_window_with_its_start_and_without_its_end():
    trace = make_trace(arrival=(0, 1, 3, 4)[:3]).slice(1, 2)
    assert columns(trace) == [[0.0], [600], [6]]
    assert trace.notes == ("only the 1 of 3 requests from 1 s for 2 s, moved to start at 0",)


def test_slice_without_requests_says_how_long_the_trace_is():
    with pytest.raises(InputError, match=r"it lasts 3\.0 s"):
        make_trace().slice(1.5, 1)


def test_scale_rate_divides_arrivals_and_says_both_rates():
    trace = make_trace().scale_rate(2)
    assert columns(trace)[0] == [0.0, 0.5, 1.5]
    assert trace.notes == ("arrival rate times 2: 0.667 became 1.33 requests/s",)


def test_scale_lengths_rounds_never_below_1_and_then_cuts():
    trace = make_trace(prompt=(10, 600, 2), output=(5, 60, 7)).scale_lengths(
        prompt=0.1, output=2, max_prompt=50, max_output=100
    )
    assert columns(trace)[1:] == [[1, 50, 1], [10, 100, 14]]
    assert trace.notes == (
        "prompt_tokens times 0.1: mean 204.0 became 20.7",
        "prompt_tokens of 1 request cut to 50",
        "output_tokens times 2: mean 24.0 became 48.0",
        "output_tokens of 1 request cut to 100",
    )


def test_rescaled_prompts_lose_their_blocks_and_cut_prompts_keep_the_first():
    blocks = make_trace(hash_ids=[[0], [0, 1], [0, 1, 2]])
    scaled = blocks.scale_lengths(prompt=0.5)
    assert "hash_ids" not in scaled.requests
    assert "prefix hashes dropped" in scaled.notes[0]
    cut = blocks.scale_lengths(max_prompt=513)
    assert cut.requests["hash_ids"].tolist() == [[0], [0, 1], [0, 1]]
    assert "hash_ids" in blocks.scale_lengths(output=0.5).requests


def test_head_keeps_the_first_requests():
    trace = make_trace().head(2)
    assert columns(trace) == [[0.0, 1.0], [10, 600], [5, 6]]
    assert trace.notes == ("only the first 2 of 3 requests",)


def test_categories_follow_their_weights_and_their_seed():
    trace = make_trace(arrival=range(4000), prompt=[1] * 4000, output=[1] * 4000)
    drawn = trace.with_categories(["chat", "code", "summary"], [3, 1, 0], seed=7)
    share = (drawn.requests["category"] == "chat").mean()
    assert abs(share - 0.75) < 4 * np.sqrt(0.75 * 0.25 / 4000)
    assert set(drawn.requests["category"]) == {"chat", "code"}
    again = trace.with_categories(["chat", "code", "summary"], [3, 1, 0], seed=7)
    other = trace.with_categories(["chat", "code", "summary"], [3, 1, 0], seed=8)
    assert drawn.requests["category"].tolist() == again.requests["category"].tolist()
    assert drawn.requests["category"].tolist() != other.requests["category"].tolist()
    assert "seed 7" in drawn.notes[0]
    assert "chat 75%, code 25%" in drawn.notes[0]


def test_spread_ticks_moves_requests_within_their_tick_in_file_order():
    arrival = [0, 0, 0, 3, 3, 60, 60, 60]
    trace = make_trace(arrival=arrival, prompt=range(1, 9), output=[1] * 8)
    spread = trace.spread_ticks(seed=3)
    moved = spread.requests["arrival"].to_numpy()
    assert spread.requests["prompt_tokens"].tolist() == list(range(1, 9))
    assert (np.diff(moved) > 0).all()
    offset = moved - np.array(arrival)
    assert offset.max() - offset.min() < 3
    assert "spread over 3 s with seed 3" in spread.notes[0]
    assert moved.tolist() != trace.spread_ticks(seed=4).requests["arrival"].tolist()


def test_traces_without_ticks_are_not_spread():
    trace = make_trace()
    assert trace.spread_ticks(seed=1) is trace


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.scale_rate(0),
        lambda t: t.scale_rate(float("nan")),
        lambda t: t.scale_rate(1e-300),
        lambda t: t.scale_lengths(prompt=-1),
        lambda t: t.scale_lengths(output=float("inf")),
        lambda t: t.scale_lengths(output=1e30),
        lambda t: t.scale_lengths(max_prompt=0),
        lambda t: t.head(0),
        lambda t: t.with_categories(["a"], [1, 2], seed=0),
        lambda t: t.with_categories(["a"], [0], seed=0),
        lambda t: t.with_categories(["a,b"], [1], seed=0),
    ],
)
def test_changes_with_impossible_values_are_refused(change):
    with pytest.raises(InputError):
        change(make_trace())


def test_changes_leave_the_original_as_it_was():
    trace = make_trace(hash_ids=[[0], [0, 1], [0, 1, 2]])
    before = trace.requests.copy(deep=True)
    trace.slice(1, 9).scale_rate(3).scale_lengths(max_prompt=5).head(1)
    trace.with_categories(["chat"], [1], seed=0)
    pd.testing.assert_frame_equal(trace.requests, before)
    assert trace.notes == ()


def test_summary_of_a_small_trace_is_what_one_computes_by_hand():
    requests = {"category": ["chat", "", "chat"], "hash_ids": [[0], [0, 1], [0, 1, 2]]}
    summary = summarise(make_trace(arrival=(0.0, 0.5, 3.0), **requests))
    assert (summary.num_requests, summary.duration) == (3, 3.0)
    assert summary.rate == pytest.approx(2 / 3)
    assert summary.interarrival_cv == pytest.approx(1.0 / 1.5)  # gaps 0.5 and 2.5
    assert summary.peak_requests == 2
    assert (summary.prompt.mean, summary.prompt.p50) == (pytest.approx(1640 / 3), 600.0)
    assert (summary.prompt.max, summary.prompt.total) == (1030, 1640)
    assert summary.prompt.p90 == pytest.approx(600 + 0.8 * 430)
    assert (summary.output.mean, summary.output.total) == (6.0, 18)
    assert summary.prefix_hit_rate == pytest.approx((0 + 1 + 2) / 6)
    assert summary.categories == {"chat": 2}


def test_summary_of_one_request_has_no_rate():
    summary = summarise(make_trace(arrival=[0], prompt=[1], output=[1]))
    assert (summary.rate, summary.interarrival_cv, summary.peak_requests) == (0.0, 0.0, 1)
    assert summary.prefix_hit_rate is None


def test_only_blocks_from_the_start_of_a_prompt_are_hits():
    assert prefix_hit_rate([[0, 1], [5, 1], [0, 1]]) == pytest.approx(2 / 6)


def test_parquet_keeps_rows_notes_and_where_they_came_from(tmp_path):
    trace = make_trace(hash_ids=[[0], [0, 1], [0, 1, 2]]).scale_rate(0.5)
    write_parquet(trace, tmp_path / "a.parquet")
    again = load_trace(tmp_path / "a.parquet")
    pd.testing.assert_frame_equal(again.requests, trace.requests, check_dtype=False)
    assert again.notes == ("made from t.csv", *trace.notes)
    assert again.source == str(tmp_path / "a.parquet")


def test_parquet_says_which_version_wrote_it_from_which_bytes(tmp_path):
    from codesign.artifacts import SCHEMA_VERSION, read_table

    write_parquet(make_trace(), tmp_path / "a.parquet")
    _, meta = read_table(tmp_path / "a.parquet", kind="trace")
    assert meta["schema_version"] == SCHEMA_VERSION
    assert meta["codesign_version"] == codesign.__version__
    assert (meta["source"], meta["sha256"], meta["notes"]) == ("t.csv", "0" * 64, [])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"prompt_tokens": [1, 0, 1]}, "row 2: prompt_tokens is 0"),
        ({"output_tokens": [1, 1, -4]}, "row 3: output_tokens is -4"),
        ({"arrival": [0.0, 2.0, 1.0]}, "row 3: arrival 1.0 is before 2.0"),
        ({"arrival": [0.0, 1e30, 2e30]}, r"row 2: arrival 1e\+30 is 10,000,000,000 s or more"),
        ({"hash_ids": [[0], [0], [0, 1, 2]]}, "row 2: 1 hash_ids for 600 prompt tokens"),
    ],
)
def test_bad_rows_in_parquet_are_refused_by_number(tmp_path, changed, reason):
    write_parquet(make_trace(**changed), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=reason):
        load_trace(tmp_path / "a.parquet")


def test_parquet_without_a_column_or_without_rows_is_refused(tmp_path):
    from codesign.artifacts import header, write_table

    path, meta = tmp_path / "a.parquet", header("trace", seed=None)
    write_table(path, make_trace().requests.drop(columns="output_tokens"), meta)
    with pytest.raises(InputError, match="column 'output_tokens' is missing"):
        load_trace(path)
    write_table(path, make_trace().requests.iloc[:0], meta)
    with pytest.raises(InputError, match="has no request"):
        load_trace(path)


def test_csv_that_cannot_be_written_is_an_input_error(tmp_path):
    save(tmp_path, "", "file")
    with pytest.raises(InputError, match="cannot write"):
        write_csv(make_trace(), tmp_path / "file" / "x.csv")


def test_csv_has_one_line_a_request_below_the_note_line_and_the_names(tmp_path):
    trace = make_trace(hash_ids=[[0], [0, 1], [0, 1, 2]])
    lines = csv_text(trace).split("\n")
    assert lines[0].startswith('# codesign trace {"schema_version": 1, ')
    assert lines[1:] == [
        f"{OURS},category,hash_ids",
        "0.000000,10,5,,0",
        "1.000000,600,6,,0 1",
        "3.000000,1030,7,,0 1 2",
        "",
    ]
    write_csv(trace, tmp_path / "a.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv"]


def test_catalogue_names_and_files_are_unique_and_addresses_are_pinned():
    assert len({known.name for known in PUBLISHED}) == len(PUBLISHED)
    assert len({known.filename for known in PUBLISHED}) == len(PUBLISHED)
    for known in PUBLISHED:
        assert known.url.startswith("https://")
        assert not any(f"/{branch}/" in known.url for branch in ("main", "master", "latest"))
        assert len(known.sha256) == 64
        assert int(known.sha256, 16) > 0


REAL = {
    "AzureLLMInferenceTrace_code.csv": ("azure-code", 8819, 2.566, 13.151, 67, 2047.8, 27.9, None),
    "AzureLLMInferenceTrace_conv.csv": ("azure-conv", 19366, 5.530, 1.094, 16, 1154.7, 211.1, None),
    "mooncake_conversation_trace.jsonl": (
        *("mooncake_conversation_trace", 12031, 3.401, 3.034, 28, 12035.1, 342.6),
        0.3664,
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_published_files_have_their_published_statistics_and_checksums(name):
    path = PUBLISHED_FILES / name
    if not path.is_file():
        pytest.skip("the published trace file is not here")
    trace = load_trace(path)
    summary = summarise(trace)
    short, requests, rate, cv, peak, prompt, output, hits = REAL[name]
    assert (trace.name, summary.num_requests, summary.peak_requests) == (short, requests, peak)
    assert summary.rate == pytest.approx(rate, abs=0.001)
    assert summary.interarrival_cv == pytest.approx(cv, abs=0.001)
    assert summary.prompt.mean == pytest.approx(prompt, abs=0.1)
    assert summary.output.mean == pytest.approx(output, abs=0.1)
    assert summary.prefix_hit_rate == (None if hits is None else pytest.approx(hits, abs=0.0001))
    published = find_published(name.removeprefix("mooncake_"))
    assert published is not None
    assert (published.sha256, published.size) == (trace.sha256, path.stat().st_size)
