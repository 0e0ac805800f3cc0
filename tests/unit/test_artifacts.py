from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from codesign import __version__, artifacts
from codesign.artifacts import machine, parquet
from codesign.errors import InputError


def test_json_comes_back_as_it_was_written(tmp_path):
    payload = {**artifacts.header("plan", seed=7), "policy": {"k": 3}, "steps": [0.5, 1.5]}
    artifacts.write_json(tmp_path / "new" / "plan.json", payload)
    assert artifacts.read_json(tmp_path / "new" / "plan.json", kind="plan") == payload


def test_table_comes_back_with_its_meta_and_without_its_index(tmp_path):
    frame = pd.DataFrame({"ttft": [0.1, 0.2], "text": ["a", "b"], "n": [1, 2]}, index=[5, 9])
    meta = {**artifacts.header("requests", seed=None), "note": "two rows"}
    artifacts.write_table(tmp_path / "requests.parquet", frame, meta)
    found, found_meta = artifacts.read_table(tmp_path / "requests.parquet", kind="requests")
    pd.testing.assert_frame_equal(found, frame.reset_index(drop=True))
    assert found_meta == meta


def test_header_says_who_made_the_file_and_from_what(tmp_path):
    source = tmp_path / "trace.csv"
    source.write_bytes(b"0,10,20\n")
    header = artifacts.header("fit", seed=3, inputs={"trace": source})
    assert header["kind"] == "fit"
    assert header["schema_version"] == artifacts.SCHEMA_VERSION
    assert header["codesign_version"] == __version__
    assert header["seed"] == 3
    assert header["inputs"]["trace"] == {
        "path": str(source),
        "sha256": hashlib.sha256(b"0,10,20\n").hexdigest(),
    }
    assert header["hardware"]["cores"] >= 1
    assert header["created"].endswith("+00:00")


@pytest.mark.parametrize(
    ("script", "module", "typed"),
    [
        ("/x/bin/codesign", None, "codesign"),
        ("/x/codesign/__main__.py", "codesign.__main__", "codesign"),
        ("/x/campaign/__main__.py", "a.campaign.__main__", "python -m a.campaign"),
        ("/x/a/sim.py", "a.sim", "python -m a.sim"),
        ("/x/mine.py", None, "mine.py"),
    ],
)  # fmt: skip
def test_header_records_the_command_as_it_can_be_typed_again(script, module, typed, monkeypatch):
    spec = None if module is None else SimpleNamespace(name=module)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    monkeypatch.setattr("sys.argv", [script, "--trace", "my trace.csv"])
    command = artifacts.header("plan", seed=0)["command"]
    assert command == f"{typed} --trace 'my trace.csv'"


def test_header_of_a_missing_input_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*gone\.csv"):
        artifacts.header("fit", seed=0, inputs={"trace": tmp_path / "gone.csv"})


@pytest.mark.parametrize("where", [".", "folder"])
def test_a_folder_is_not_written_in_place_of_a_file(tmp_path, monkeypatch, where):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=rf"write {re.escape(where)}: it is a folder\. Name"):
        artifacts.write_text(where, "text")


def test_a_folder_in_place_of_a_file_is_an_error_that_names_the_command(tmp_path):
    with pytest.raises(InputError, match=r"Is a directory\. Make one: codesign plan"):
        artifacts.read_json(tmp_path, kind="plan")


def test_a_file_in_place_of_a_folder_is_an_error_that_names_the_command(tmp_path):
    (tmp_path / "steps").touch()
    with pytest.raises(InputError, match=r"steps is not a folder, as a run is\. Make one: co"):
        artifacts.read_json(tmp_path / "steps" / "run.json", kind="run")


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_file_is_called_that(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=r"a\.json is empty\. Make one: codesign plan"):
        artifacts.read_json(tmp_path / "a.json", kind="plan")


@pytest.mark.parametrize(
    ("kind", "command"),
    [("plan", "codesign plan"), ("trace", "codesign trace synth"), ("rounds", "codesign run")],
)
def test_missing_file_names_the_command_that_makes_it(tmp_path, kind, command):
    with pytest.raises(InputError, match=rf"does not exist\. Make one: {command}"):
        artifacts.read_json(tmp_path / "missing", kind=kind)
    with pytest.raises(InputError, match=rf"does not exist\. Make one: {command}"):
        artifacts.read_table(tmp_path / "missing", kind=kind)


def test_file_of_another_kind_is_refused(tmp_path):
    artifacts.write_json(tmp_path / "a.json", artifacts.header("fit", seed=0))
    with pytest.raises(InputError, match="is a fit file, not a plan file"):
        artifacts.read_json(tmp_path / "a.json", kind="plan")


def test_file_of_another_schema_version_is_refused(tmp_path):
    header = {**artifacts.header("plan", seed=0), "schema_version": 999}
    artifacts.write_json(tmp_path / "a.json", header)
    with pytest.raises(InputError, match="schema version 999"):
        artifacts.read_json(tmp_path / "a.json", kind="plan")


@pytest.mark.parametrize("text", ["{", "[1]", "{}", "null", "[" * 10**5])
def test_foreign_json_is_an_input_error(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=r"Make one: codesign plan"):
        artifacts.read_json(tmp_path / "a.json", kind="plan")


def test_foreign_tables_are_an_input_error(tmp_path):
    (tmp_path / "text.parquet").write_text("not parquet")
    pd.DataFrame({"x": [1]}).to_parquet(tmp_path / "plain.parquet")
    with pytest.raises(InputError, match="not a Parquet file"):
        artifacts.read_table(tmp_path / "text.parquet", kind="rounds")
    with pytest.raises(InputError, match="was not written by codesign"):
        artifacts.read_table(tmp_path / "plain.parquet", kind="rounds")


@pytest.mark.parametrize(
    ("name", "value"),
    [("inputs", []), ("inputs", {"plan": {"path": 3}}), ("hardware", True), ("created", 5)],
)
def test_a_header_that_no_writer_makes_is_an_input_error(tmp_path, name, value):
    damaged = {**artifacts.header("plan", seed=0), name: value}
    artifacts.write_json(tmp_path / "a.json", damaged)
    with pytest.raises(InputError, match=rf"damaged header \({name}.*Make one: codesign plan"):
        artifacts.read_json(tmp_path / "a.json", kind="plan")


def test_a_table_whose_header_was_cut_is_an_input_error(tmp_path):
    parquet.write(tmp_path / "a.parquet", pd.DataFrame({"x": [1]}), '{"kind": "rounds", ')
    with pytest.raises(InputError, match=r"damaged header .*Make one: codesign run"):
        artifacts.read_table(tmp_path / "a.parquet", kind="rounds")


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "rounds.parquet"
    meta = artifacts.header("rounds", seed=0)
    artifacts.write_table(path, pd.DataFrame({"x": [1]}), meta)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        artifacts.write_table(path, pd.DataFrame({"x": [2]}), {**meta, "bad": object()})
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="cannot write"):
        artifacts.write_json(tmp_path / "folder", meta)
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "rounds.parquet"]


def test_two_writers_of_one_file_in_one_process_do_not_share_its_sibling(tmp_path):
    path = tmp_path / "plan.json"
    with artifacts.replacing(path) as first:
        with artifacts.replacing(path) as second:
            first.write_text("first")
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"


def test_interrupted_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    artifacts.write_json(path, artifacts.header("plan", seed=0))
    before = path.read_bytes()
    half = Path.write_text

    def interrupted(self, text, **kwargs):
        half(self, text[:10], **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        artifacts.write_json(path, artifacts.header("plan", seed=1))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_json_is_strict_and_knows_numpy_paths_and_dataclasses():
    @dataclasses.dataclass(frozen=True, slots=True)
    class Point:
        x: np.float64
        where: Path

    value = {
        "nan": float("nan"),
        "inf": np.float32("inf"),
        "array": np.arange(3),
        "flag": np.bool_(True),
        "point": Point(np.float64(0.5), Path("a") / "b"),
        2: (1, None),
    }
    assert json.loads(artifacts.to_json(value)) == {
        "nan": None,
        "inf": None,
        "array": [0, 1, 2],
        "flag": True,
        "point": {"x": 0.5, "where": "a/b"},
        "2": [1, None],
    }


def test_cache_follows_codesign_home_then_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert artifacts.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("CODESIGN_HOME")
    assert artifacts.cache_dir() == tmp_path / "xdg" / "codesign"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert artifacts.cache_dir() == Path.home() / ".cache" / "codesign"


def test_gpus_are_read_from_nvidia_smi(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'NVIDIA H200, 143771, 570.1'\necho 'NVIDIA H200, 1024, 570.1'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    machine.hardware.cache_clear()
    gpus = machine.hardware()["gpus"]
    machine.hardware.cache_clear()
    assert [gpu["memory_bytes"] for gpu in gpus] == [143771 * 2**20, 2**30]
    assert gpus[0] | {"memory_bytes": 0} == {
        "name": "NVIDIA H200",
        "memory_bytes": 0,
        "driver": "570.1",
    }


def test_a_folder_that_is_a_file_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        artifacts.write_json(tmp_path / "file" / "plan.json", {})


def test_no_two_files_share_what_goes_with_them():
    names = ("x.json", "x.plan", "x", "x.plan.json", "x.json.json", "x-.json", "x.JSON", ".json")
    what = ("search.jsonl", "trace.parquet")
    found = [artifacts.beside(Path("plans", name), each) for name in names for each in what]
    assert found[:2] == [Path("plans/x.search.jsonl"), Path("plans/x.trace.parquet")]
    assert found[2] == Path("plans/x.plan-search.jsonl")
    assert len(set(found)) == len(found)
