"""The search of tilings with a made-up clock."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from codesign.kernels.tiling import MEASURED, Tiling
from codesign.models.shape import model_shape
from codesign.models.sharding import Sharding

ROOT = Path(__file__).parents[2]
HEADS = 8016  # tiles of a whole vocabulary


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.search_tilings")


@pytest.fixture
def maps(script):
    shape = model_shape(script.SHAPES / "llama-3.1-8b")
    return script.cuts(Sharding(shape, 2, group=128).shape)


def search(script, maps, rows, time):
    now = script.table_of(maps, rows)
    best, found = script.searched(maps, now, script.tried(now, rows, 24), time, lambda line: None)
    assert [script.short(tiling) for tiling in best.values()] == found["best"]
    return found


def test_maps_are_those_of_the_table(maps):
    assert maps == {(192, 32): "qkv", (256, 16): "o", (896, 32): "gate_up", (256, 56): "down"}


def test_maps_of_one_size_are_one(script):
    shape = model_shape(script.SHAPES / "llama-2-7b")  # 32 heads of keys: qkv is three times o
    assert list(script.cuts(replace(shape, intermediate=shape.hidden)).values())[1] == "o, down"


@pytest.mark.parametrize("cut", [cut for cut in MEASURED if cut[0] != HEADS], ids=str)
def test_what_was_found_before_is_among_the_candidates(script, cut):
    few, many, *_ = (replace(tiling, paced=2) for tiling in MEASURED[cut])
    assert few in script.candidates(cut, 8)[:24]
    of_sixteen = script.candidates(cut, 16, few)
    assert many in of_sixteen
    assert {(each.warps, each.cluster) for each in of_sixteen} == {(few.warps, few.cluster)}


def test_each_map_gets_its_fastest_between_the_others_and_paced_comes_last(script, maps):
    wanted = {cut: script.candidates(cut, 8)[10 + i] for i, cut in enumerate(maps)}
    wanted[896, 32] = replace(wanted[896, 32], paced=4)

    def time(tilings):
        near = [replace(tilings[cut], paced=wanted[cut].paced) == wanted[cut] for cut in maps]
        same = [tilings[cut] == wanted[cut] for cut in maps]
        return 1.4 - 0.05 * (sum(near) + sum(same))

    found = search(script, maps, 8, time)
    assert found["best"] == [script.short(tiling) for tiling in wanted.values()]
    assert found["ms"] == {"now": 1.4, "best": 1.0}
    assert found["num_tried"] <= 4 * (24 + 3) + 1
    assert next(iter(found["fastest"].values())) == 1.0
    assert "Tiling(8, 2, 4, paced=4)" in script.table(found), "what the table has now"


def test_luck_and_what_is_not_worth_it_change_nothing(script, maps):
    lucky = script.candidates((192, 32), 8)[7]
    asked = []

    def time(tilings):
        if tilings[192, 32] == lucky:
            asked.append(lucky)
            return 0.5 if len(asked) == 1 else 1.0
        return 1.0 if tilings[256, 16] == MEASURED[256, 16][0] else 0.999

    found = search(script, maps, 8, time)
    assert len(asked) > 1
    assert found["best"] == found["now"]


def test_a_tiling_is_written_as_the_table_has_it(script):
    for tiling in {each for pair in MEASURED.values() for each in pair}:
        assert eval(script.short(tiling), {"Tiling": Tiling}) == tiling


def test_the_result_goes_where_it_shall(script, monkeypatch, tmp_path):
    common = importlib.import_module("benchmarks.common")
    monkeypatch.setattr(common, "hardware", dict)
    h200 = SimpleNamespace(name="NVIDIA H200")
    monkeypatch.setattr(common.torch.cuda, "get_device_properties", lambda _: h200)
    path = tmp_path / "new" / "found.json"
    assert common.write_result("tilings", [{"rows": 8}], note="", path=path) == path
    assert json.loads(path.read_text())["rows"] == [{"rows": 8}]
    named = common.write_result("tilings", [], note="", directory=tmp_path)
    assert named.name.startswith("tilings_")
    assert named.name.endswith("_h200.json")


def test_with_sums_it_searches_what_is_summed_and_needs_all_gpus(script, monkeypatch, capsys):
    shape = Sharding(model_shape(script.SHAPES / "llama-3.1-70b"), 4, group=128).shape
    assert script.cuts(shape, script.SUMMED_OPS) == {(512, 16): "o", (512, 56): "down"}
    monkeypatch.setattr(script.torch.cuda, "device_count", lambda: 3)
    flags = ["--model", "llama-3.1-70b", "--tensor-parallel", "4", "--sums"]
    monkeypatch.setattr(sys, "argv", ["search_tilings.py", *flags])
    with pytest.raises(SystemExit):
        script.main()
    assert capsys.readouterr().err == "search_tilings.py: needs 4 GPUs, found 3\n"


def test_sixteen_rows_are_cut_as_what_eight_rows_found(script):
    now = script.table_of([(512, 16), (512, 56)], 16)
    few = {(512, 16): Tiling(4, 2, 4, 2, 1), (512, 56): Tiling(14, 4, 4)}
    alike = script.cut_alike(now, few, 16)
    assert alike[512, 56] == now[512, 56], "cut the same already"
    ways = script.tried(alike, 16, 24)
    assert alike[512, 16] == ways[512, 16][0]
    for cut, tilings in ways.items():
        shapes = {(tiling.warps, tiling.cluster) for tiling in tilings}
        assert shapes == {(few[cut].warps, few[cut].cluster)}
