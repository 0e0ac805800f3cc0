"""Run folders: simulator and engine write the same files, and they come back as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from codesign.artifacts import read_table, write_table
from codesign.errors import InputError
from codesign.records import RequestRecord, RoundLog, RoundRecord, RunRecords
from codesign.run_directory import read_run, write_run


def small_run() -> RunRecords:
    done = RequestRecord(0, "chat", 0.5, 10, 4, 0.5, 0.75, 1.5, 2, 6, 1)
    waiting = RequestRecord(1, "", 0.9, 12)
    first = RoundRecord(0, 0.5, 1, 4, 10, 3, 13, 3, 1, 2, 0.25, 10, 0.2, 0.0, 0.0, 0.1, 0.03)
    second = RoundRecord(1, 1.1, 1, 4, 12, 3, 3, 3, 0, 1, 0.0, 0, 0.3, 0.01, 0.02, 0.1, 0.03)
    return RunRecords(
        [done, waiting], RoundLog([first, second]), 1.5, ["interrupted: 1 of 2 unfinished"]
    )


def write(folder, records=None, **changes):
    values = {"origin": "measured", "summary": {"label": "chain-3 on 2, batch 1"}, "seed": 3}
    write_run(folder, records or small_run(), **{**values, **changes})


def test_a_run_comes_back_as_it_was(tmp_path):
    outputs = {1: [], 0: [5, 1, 9, 2]}
    write(tmp_path / "run", outputs=outputs)
    stored = read_run(tmp_path / "run")
    assert stored.records == small_run()
    assert stored.outputs == outputs
    assert stored.origin == "measured"
    assert stored.summary["label"] == "chain-3 on 2, batch 1"
    assert stored.summary["seed"] == 3


def test_numbers_come_back_as_python_numbers_and_missing_times_as_none(tmp_path):
    write(tmp_path)
    done, waiting = read_run(tmp_path).records.requests
    assert (waiting.admitted, waiting.first_token, waiting.finish) == (None, None, None)
    assert type(done.request_id) is int
    assert type(done.finish) is float


def test_a_table_that_lacks_a_column_is_refused_by_its_name(tmp_path):
    write(tmp_path)
    frame, meta = read_table(tmp_path / "rounds.parquet", kind="rounds")
    write_table(tmp_path / "rounds.parquet", frame.drop(columns="replica"), meta)
    with pytest.raises(InputError, match=r"lacks replica\. Make it again: codesign run"):
        read_run(tmp_path)


def test_in_rounds_of_an_older_run_all_who_run_take_part(tmp_path):
    write(tmp_path)
    frame, meta = read_table(tmp_path / "rounds.parquet", kind="rounds")
    write_table(tmp_path / "rounds.parquet", frame.drop(columns="running"), meta)
    rounds = read_run(tmp_path).records.rounds
    assert rounds.column("running").tolist() == rounds.column("batch").tolist() == [1, 1]


def test_a_run_without_rounds_or_finished_requests_comes_back(tmp_path):
    empty = RunRecords([RequestRecord(0, "", 0.0, 3)], RoundLog(), 0.0, [])
    write(tmp_path, empty)
    assert read_run(tmp_path).records == empty


def test_a_simulation_has_no_outputs_and_does_not_inherit_those_of_an_earlier_run(tmp_path):
    write(tmp_path, outputs={0: [1]})
    write(tmp_path, origin="simulated")
    stored = read_run(tmp_path)
    assert stored.outputs is None
    assert stored.origin == "simulated"


def test_inputs_are_hashed(tmp_path):
    source = tmp_path / "fit.json"
    source.write_text("{}")
    write(tmp_path / "run", inputs={"fit": source})
    assert len(read_run(tmp_path / "run").summary["inputs"]["fit"]["sha256"]) == 64


@pytest.mark.parametrize("name", ["run.json", "requests.parquet", "rounds.parquet"])
def test_a_missing_file_is_named_with_the_command_that_makes_it(tmp_path, name):
    write(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(InputError, match=rf"{name} does not exist.*codesign run"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seconds", None), ("seconds", "long"), ("seconds", float("nan")), ("notes", None),
        ("notes", 3), ("notes", [None]), ("origin", "guessed"),
    ],
)  # fmt: skip
def test_a_damaged_run_json_is_refused_with_the_command_that_makes_it(tmp_path, key, value):
    write(tmp_path)
    file = tmp_path / "run.json"
    written = json.loads(file.read_text())
    for damaged in ({**written, key: value}, {k: v for k, v in written.items() if k != key}):
        file.write_text(json.dumps(damaged))
        with pytest.raises(
            InputError, match=r"run\.json is damaged .* Make it again: codesign run"
        ):
            read_run(tmp_path)


def test_a_folder_of_runs_names_those_in_it(tmp_path):
    for name in ("plain", "chain-3"):
        write(tmp_path / name)
    with pytest.raises(InputError, match=r"is a folder of runs\. Name one, as .*/chain-3, or"):
        read_run(tmp_path)


def test_damaged_outputs_are_refused(tmp_path):
    write(tmp_path, outputs={0: [1, 2]})
    (tmp_path / "outputs.jsonl").write_text('{"request_id": 0, "tok')
    with pytest.raises(InputError, match="damaged"):
        read_run(tmp_path)


def test_a_folder_that_cannot_be_made_is_an_input_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        write(tmp_path / "file" / "run")


def test_a_write_of_the_outputs_that_fails_is_an_input_error_and_leaves_no_part(
    tmp_path, monkeypatch
):
    write_whole = Path.write_text

    def full_disk(path, text, **rest):
        if "outputs" in path.name:
            write_whole(path, text[:5], **rest)
            raise OSError(28, "No space left on device")
        return write_whole(path, text, **rest)

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(InputError, match=r"cannot write .*outputs\.jsonl: No space left"):
        write(tmp_path, outputs={0: [5, 1, 9, 2]})
    assert {path.suffix for path in tmp_path.iterdir()} == {".parquet"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("calibration", 3),
        ("calibration", {"all": "low"}),
        ("refused", []),
        ("refused", {"first": "too long"}),
        ("label", None),
        ("candidate", "chain-3"),
    ],
)
def test_what_a_run_json_need_not_say_is_what_it_must_be_if_it_does(tmp_path, key, value):
    write(tmp_path)
    file = tmp_path / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(InputError, match=r"run\.json is damaged .* Make it again: codesign run"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("rounds", "draft_rows", float("nan")),
        ("rounds", "target", float("inf")),
        ("rounds", "link_there", 2.0**62),
        ("rounds", "batch", -1),
        ("rounds", "num_emitted_tokens", 0.5),
        ("requests", "finish", float("inf")),
        ("requests", "arrival", float("nan")),
        ("requests", "prompt_tokens", float("nan")),
        ("requests", "category", None),
    ],
)
def test_a_value_that_no_run_writes_is_refused_by_its_column(tmp_path, table, column, value):
    write(tmp_path)
    path = tmp_path / f"{table}.parquet"
    frame, meta = read_table(path, kind=table)
    write_table(path, frame.assign(**{column: [value, *frame[column].tolist()[1:]]}), meta)
    with pytest.raises(InputError, match=rf"something else for {column}\. .*codesign run"):
        read_run(tmp_path)


def test_a_request_that_stands_twice_is_refused(tmp_path):
    done = small_run().requests[0]
    write(tmp_path, RunRecords([done, done], RoundLog(), 1.0, []))
    with pytest.raises(InputError, match=r"stands twice in .*requests\.parquet.*codesign run"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "line", ["{", '{"request_id": 2.5, "tokens": [1]}', '{"request_id": 1, "tokens": ["a"]}']
)
def test_an_output_that_is_no_tokens_is_refused(tmp_path, line):
    write(tmp_path, outputs={0: [5]})
    (tmp_path / "outputs.jsonl").write_text(line + "\n")
    with pytest.raises(InputError, match=r"outputs\.jsonl is damaged.*codesign run"):
        read_run(tmp_path)
