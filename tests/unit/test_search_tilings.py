"""The search of tilings with a made-up clock."""

from __future__ import annotations

import importlib
import json
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


def test_maps_are_those_of_the_table(maps):
    assert maps == {(192, 32): "qkv", (256, 16): "o", (896, 32): "gate_up", (256, 56): "down"}


def test_maps_of_one_size_are_one(script):
    shape = model_shape(script.SHAPES / "llama-2-7b")  # 32 heads of keys: qkv is three times o
    assert list(script.cuts(replace(shape, intermediate=shape.hidden)).values())[1] == "o, down"


@pytest.mark.parametrize("cut", [cut for cut in MEASURED if cut[0] != HEADS], ids=str)
def test_what_was_found_before_is_among_the_candidates(script, cut):
    few, many = (replace(tiling, paced=2) for tiling in MEASURED[cut])
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

    found = script.searched(maps, 8, 24, time)
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

    found = script.searched(maps, 8, 24, time)
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
