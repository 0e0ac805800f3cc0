"""``codesign trace`` as a user types it."""

from __future__ import annotations

import argparse
import json

import pytest

from codesign import cli as command_line
from codesign.cli.trace_argument import add_trace_arguments, trace_from_args
from codesign.errors import UsageError
from codesign.traces.catalog import TWINS, bundled_path

OFFLINE = {"https_proxy": "http://127.0.0.1:1", "HTTPS_PROXY": "http://127.0.0.1:1"}
SMALL = "arrival,prompt_tokens,output_tokens\n0,10,20\n0,600,30\n2,50,40\n2,60,50\n"


@pytest.fixture
def cli(cli_here):
    return cli_here


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.csv"
    path.write_text(SMALL, encoding="ascii")
    return path


def test_list_says_what_is_bundled_cached_and_fetchable(cli, tmp_path):
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "AzureLLMInferenceTrace_conv.csv").write_bytes(b"123")
    answer = json.loads(cli("trace", "list", "--json", CODESIGN_HOME=str(tmp_path)).stdout)
    states = {row["name"]: row["state"] for row in answer["traces"]}
    assert [name for name, state in states.items() if state == "bundled"] == list(TWINS)
    assert states["azure-conv"] == "cached"
    assert {states[n] for n in ("azure-code-week", "mooncake-arxiv", "burstgpt-1")} == {"fetchable"}
    text = cli("trace", "list", CODESIGN_HOME=str(tmp_path)).stdout
    assert all(name in text for name in states)
    assert max(map(len, text.splitlines())) <= 100


def test_show_prints_statistics_and_every_note(cli, small):
    result = cli(
        "trace",
        "show",
        small,
        "--slice",
        "0:1",
        "--rate-scale",
        "2",
        "--length-scale",
        "0.5:2",
        "--max-prompt",
        "100",
        "--max-output",
        "50",
    )
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert "requests    2 in 0.0 s" in lines
    notes = [line[12:] for line in lines if line.startswith("note ")]
    assert notes == [
        "only the 2 of 4 requests from 0 s for 1 s, moved to start at 0",
        "arrival rate times 2",
        "prompt_tokens times 0.5: mean 305.0 became 152.5",
        "prompt_tokens of 1 request cut to 100",
        "output_tokens times 2: mean 25.0 became 50.0",
        "output_tokens of 1 request cut to 50",
    ]


def test_show_draws_requests_over_time_and_never_hides_one(cli, tmp_path):
    rows = "0,1,1\n" * 100 + "1,1,1\n" * 50 + "2,1,1\n"
    (tmp_path / "a.csv").write_text(SMALL[:36] + rows, encoding="ascii")
    drawn = cli("trace", "show", "a.csv").stdout.splitlines()[5].strip()
    assert drawn == f"[@{' ' * 29}+{' ' * 28}.]"


def test_show_json_is_one_object(cli):
    result = cli("trace", "show", "mooncake-twin", "--json")
    payload = json.loads(result.stdout)
    assert payload["name"] == "mooncake-twin"
    assert payload["summary"]["num_requests"] == 680
    assert payload["summary"]["prefix_hit_rate"] == pytest.approx(0.366, abs=0.01)
    assert payload["notes"][0].startswith("synthetic, seed 1")


def test_show_out_does_not_write_over_what_it_shows(cli, small, tmp_path):
    before = small.read_bytes()
    (tmp_path / "link.csv").symlink_to(small)
    for out in (small, tmp_path / "link.csv"):
        result = cli("trace", "show", small, "--max-requests", "1", "--out", out)
        assert result.returncode == 2
        assert "is a file that is read. Name another: --out trace.parquet" in result.stderr
    assert small.read_bytes() == before


def test_show_out_writes_a_trace_that_is_read_again(cli, small, tmp_path):
    for name in ("a.parquet", "a.csv"):
        cli("trace", "show", small, "--max-requests", "3", "--jitter", "1", "--out", name)
        payload = json.loads(cli("trace", "show", name, "--json").stdout)
        assert payload["summary"]["num_requests"] == 3
        assert payload["notes"][0] == f"made from {small}"
        assert payload["notes"][1].startswith("requests with equal time stamps spread over 2 s")
        assert payload["notes"][2] == "only the first 3 of 4 requests"


def test_the_documented_command_rebuilds_the_bundled_file(cli, tmp_path):
    result = cli("trace", "synth", "bursty", "--out", "traces/code-twin.csv")
    assert (result.returncode, result.stderr) == (0, "")
    made = tmp_path / "traces" / "code-twin.csv"
    assert made.read_bytes() == bundled_path("code-twin").read_bytes()
    documented = (bundled_path("code-twin").parent / "README.md").read_text(encoding="utf-8")
    for twin, preset in TWINS.items():
        assert f"codesign trace synth {preset} --out traces/{twin}.csv" in documented


def test_synth_takes_seed_rate_duration_and_cv(cli, tmp_path):
    flags = ("--seed", "4", "--duration", "50", "--rate", "3", "--cv", "2", "--json")
    result = cli("trace", "synth", "steady", *flags, "--out", "a.parquet")
    summary = json.loads(result.stdout)["summary"]
    assert summary["num_requests"] == 150
    assert summary["rate"] == pytest.approx(3)
    shown = json.loads(cli("trace", "show", "a.parquet", "--json").stdout)
    assert shown["summary"] == summary
    assert "seed 4" in shown["notes"][0]
    assert (
        json.loads(cli("trace", "synth", "low", "--requests", "7", "--json").stdout)["summary"][
            "num_requests"
        ]
        == 7
    )


def test_synth_without_out_says_that_nothing_was_written(cli, tmp_path):
    result = cli("trace", "synth", "steady")
    assert "nothing was written" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_out_with_jsonl_writes_mooncake_lines_and_says_that_prefixes_are_not_known(cli, tmp_path):
    result = cli("trace", "show", "conv-twin", "--max-requests", "2", "--out", "a.jsonl")
    assert result.returncode == 0
    assert "no prefix blocks" in result.stderr
    first = json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])
    assert {"timestamp", "input_length", "output_length", "hash_ids"} <= set(first)
    shown = json.loads(cli("trace", "show", "a.jsonl", "--json").stdout)
    assert shown["summary"]["num_requests"] == 2


def test_a_bad_row_is_exit_4_and_one_line(cli, tmp_path):
    (tmp_path / "bad.csv").write_text(SMALL + "3,0,1\n", encoding="ascii")
    result = cli("trace", "show", "bad.csv")
    assert (result.returncode, result.stdout) == (4, "")
    assert result.stderr.startswith("codesign trace: bad.csv, line 6: prompt_tokens is 0, not")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (("show", "no-such"), 4, "no file and no trace is named 'no-such'"),
        (("show", "small.csv", "--slice", "5"), 2, "--slice takes START:DURATION in numbers"),
        (("show", "small.csv", "--slice", "9:1"), 4, "it lasts 2.0 s"),
        (("show", "small.csv", "--length-scale", "a:b"), 2, "--length-scale takes X or X:Y"),
        (("show", "small.csv", "--rate-scale", "0"), 2, "--rate-scale: must be a number above 0"),
        (
            ("show", "small.csv", "--length-scale", "1:0"),
            2,
            "--length-scale must be above 0 and finite",
        ),
        (
            ("show", "small.csv", "--max-prompt", "0"),
            2,
            "--max-prompt: must be a whole number of 1",
        ),
        (("show", "small.csv", "--max-requests", "0"), 2, "--max-requests: must be a whole"),
        (("show", "small.csv", "--out", "x.txt"), 2, "ends in .parquet, .csv or .jsonl"),
        (("show", "small.csv", "--length-scale", "nan"), 2, "X or X:Y in numbers, not 'nan'"),
        (("show", "small.csv", "--length-scale", "inf"), 2, "must be above 0 and finite"),
        (("show", "x" * 300 + ".csv"), 4, "File name too long"),
        (("show", "two\nlines"), 4, r"is named 'two\nlines'"),
        (
            ("show", "small.csv", "--out", "d.csv"),
            2,
            "is a folder. Name a file: --out d.csv/trace.p",
        ),
        (("synth", "steady", "--out", "d.csv"), 2, "--out d.csv is a folder. Name a file"),
        (("synth", "stormy", "--out", "x.txt"), 2, "ends in .parquet, .csv or .jsonl, not 'x.txt'"),
        (("synth", "stormy"), 4, "one of steady, bursty, low"),
        (("synth", "low", "--duration", "-1"), 2, "--duration: must be a number above 0, not '-1'"),
        (("synth", "low", "--requests", "0"), 2, "--requests: must be a whole number of 1 or"),
        (("synth", "low", "--rate", "nan"), 2, "--rate: must be a number above 0, not 'nan'"),
        (
            ("synth", "low", "--cv", "0"),
            2,
            "--cv: must be a number above 0, at most 10,000, not '0'",
        ),
        (("synth", "steady", "--cv", "1e200"), 2, "--cv: must be a number above 0, at most 10,000"),
        (
            ("synth", "conv-twin", "--requests", "5", "--rate", "1e-300", "--out", "a.parquet"),
            4,
            "5 requests would last 10,000,000,000 s or more. Fix: a larger --rate",
        ),
        (("fetch", "no-such"), 4, "no published trace 'no-such'"),
        ((), 2, "ACTION"),
    ],
)
def test_mistakes_are_one_line_with_their_exit_code(cli_here, small, arguments, code, reason):
    (small.parent / "d.csv").mkdir()
    result = cli_here("trace", *arguments)
    assert (result.returncode, result.stdout) == (code, "")
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1


def test_fetch_without_a_network_names_address_and_place_and_exits_5(cli, tmp_path):
    result = cli("trace", "fetch", "azure-conv", CODESIGN_HOME=str(tmp_path), **OFFLINE)
    assert (result.returncode, result.stdout) == (5, "")
    assert "https://raw.githubusercontent.com/Azure/AzurePublicDataset/" in result.stderr
    place = tmp_path / "traces" / "AzureLLMInferenceTrace_conv.csv"
    assert f"put the file at {place} by hand" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("action", ["list", "show", "synth", "fetch"])
def test_help_of_every_action_names_its_flags(cli, action):
    result = cli("trace", action, "--help")
    assert result.returncode == 0
    assert "--json" in result.stdout


def parse(*words: str) -> argparse.Namespace:
    parser = command_line.Parser()
    add_trace_arguments(parser)
    return parser.parse_args(words)


def test_other_verbs_take_the_same_changes_and_say_every_note(small, capsys):
    trace = trace_from_args(
        parse("--trace", str(small), "--rate-scale", "4", "--max-requests", "3")
    )
    assert trace.requests["arrival"].tolist() == [0.0, 0.0, 0.5]
    assert capsys.readouterr() == ("", "".join(f"trace small: {note}\n" for note in trace.notes))
    assert len(trace.notes) == 2


def test_notes_describe_the_requests_that_are_left(small):
    """They told of the rate and of the lengths of requests that were then cut off."""
    words = ("--trace", str(small), "--rate-scale", "4", "--length-scale", "2")
    three = trace_from_args(parse(*words, "--max-requests", "3"))
    assert three.notes == (
        "only the first 3 of 4 requests",
        "arrival rate times 4: 1 became 4 requests/s",
        "prompt_tokens times 2: mean 220.0 became 440.0",
        "output_tokens times 2: mean 30.0 became 60.0",
    )
    by_default = trace_from_args(parse(*words), most=3)
    assert by_default.notes == three.notes
    assert by_default.requests.equals(three.requests)
    assert len(trace_from_args(parse(*words, "--max-requests", "4"), most=3)) == 4


def test_one_length_scale_holds_for_prompts_and_outputs(small):
    trace = trace_from_args(parse("--trace", str(small), "--length-scale", "0.5"))
    assert trace.requests["prompt_tokens"].tolist() == [5, 300, 25, 30]
    assert trace.requests["output_tokens"].tolist() == [10, 15, 20, 25]


def test_a_trace_is_required_unless_the_verb_says_otherwise():
    with pytest.raises(UsageError, match="--trace"):
        parse()
    parser = command_line.Parser()
    add_trace_arguments(parser, required=False)
    assert parser.parse_args([]).trace is None
