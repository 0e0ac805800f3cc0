"""Roofline step times: their arithmetic, and how far they are from what was measured."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import codesign
from benchmarks.this_device import device_of
from codesign.acceptance import AcceptanceProfile
from codesign.artifacts.machine import short_gpu_name
from codesign.errors import InputError
from codesign.fit import Fit
from codesign.fit.devices import devices, load_device
from codesign.fit.measured_pair import joined
from codesign.fit.priced_model import (
    LARGE_ERROR,
    SMALL_ERROR,
    find_shape,
    known_models,
    parse_model,
)
from codesign.fit.roofline import DEFAULT_SOFTWARE, Forward, round_cost, splits
from codesign.fit.shipped import DEFAULT_FIT
from codesign.fit.what_if import dialled_acceptance, kept_fit, what_if_fit
from codesign.models.recipe import SHAPES
from codesign.policy.cost import RoundCost, StepTime

FOLDERS = Path(codesign.__file__).parent / "data" / "shapes"
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fit_roofline.py"
# Millions of parameters as published; vicuna-68m and -160m by their names only.
PARAMETERS = {
    "deepseek-coder-1.3b": 1346, "deepseek-coder-33b": 33343, "llama-2-13b": 13016,
    "llama-2-70b": 68977, "llama-2-7b": 6738, "llama-3-70b": 70554, "llama-3.1-8b": 8030,
    "llama-3.2-1b": 1236, "llama-3.2-3b": 3213, "qwen2-1.5b": 1544, "qwen2-72b": 72706,
    "smollm2-135m": 134.5, "vicuna-33b": 32529, "deepseek-r1-distill-qwen-32b": 32764,
    "deepseek-r1-distill-qwen-1.5b": 1777,
}  # fmt: skip


@pytest.fixture(scope="module")
def anchors_script():
    spec = importlib.util.spec_from_file_location("fit_roofline", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def forward(model: str, gpus: int = 1, device: str = "h200") -> Forward:
    return Forward(parse_model(model), load_device(device), gpus)


def own_model(folder: Path, **more: object) -> Path:
    """A folder with the shape of a known model, without weights."""
    config = json.loads((FOLDERS / "llama-3.2-1b" / "config.json").read_text(encoding="utf-8"))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | more), encoding="utf-8")
    return folder


def test_a_model_of_the_users_own_is_found_again_by_its_name(tmp_path, monkeypatch):
    folder = own_model(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert parse_model("mine").label == str(folder)
    assert parse_model("./mine:int4").label == f"{folder}:int4"
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path / "home"))
    own_model(tmp_path / "home" / "models" / "imported")
    assert parse_model("imported").label == "imported"
    assert parse_model("imported").shape == parse_model("llama-3.2-1b").shape
    assert find_shape("imported:int4") == find_shape(str(folder)) == find_shape("llama-3.2-1b")
    assert find_shape("nosuch") is None


def test_quantised_weights_in_a_folder_are_not_priced_as_bf16(tmp_path):
    folder = own_model(tmp_path / "awq", quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(InputError, match=rf"Say of which kind: {folder}:int4"):
        parse_model(str(folder))
    assert parse_model(f"{folder}:int4").weights == "int4"


@pytest.mark.parametrize(("name", "millions"), PARAMETERS.items())
def test_known_shapes_have_the_published_number_of_parameters(name, millions):
    assert parse_model(name).shape.parameters / 1e6 == pytest.approx(millions, rel=2e-3)


def test_every_known_shape_and_device_can_be_read_and_names_its_source():
    assert {"llama-3-70b", "qwen2-72b", "deepseek-coder-33b"} < set(known_models())
    for name in known_models():
        assert parse_model(f"{name}:int4").weight_bytes(1)["int4"] > 0
    for device in devices().values():
        assert len(device.source) > 20
        assert 1e11 < device.link_bandwidth * 10 < 1e13
        assert device.memory_bandwidth / device.memory_bytes > 10


def test_every_size_that_can_be_inflated_can_be_planned_for():
    for name in SHAPES:
        assert parse_model(f"{name}:int4").shape.parameters > 1e9


SHEET = {
    "gpu": "NVIDIA H20", "memory_bytes": 96e9, "memory_bandwidth": 4e12, "bf16_flops": 148e12,
    "fp8_flops": 296e12, "link": "nvlink", "link_bandwidth": 450e9, "source": "its data sheet",
}  # fmt: skip


def test_a_device_may_come_from_a_file(tmp_path):
    path = tmp_path / "h20.json"
    path.write_text(json.dumps(SHEET), encoding="utf-8")
    device = load_device(str(path))
    assert (device.name, device.memory_bandwidth, device.link) == (str(path), 4e12, "nvlink")
    fit = what_if_fit(str(path), 8, "llama-3.1-70b", "llama-3.2-1b")
    assert fit.costs["8"].target(1) < what_if_fit("a100", 8, "llama-3.1-70b", "llama-3.2-1b").costs[
        "8"
    ].target(1)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"source": None}, "h20.json lacks source. Give it the keys gpu, memory_bytes"),
        ({"tdp": 400}, "h20.json has tdp"),
        ({"link": "infiniband"}, "link is 'infiniband'; one of nvlink, pcie"),
        (
            {"memory_bandwidth": 4000},
            "memory_bandwidth is 4000, not 1e+10 bytes per second or more",
        ),
        ({"bf16_flops": "148e12"}, "bf16_flops is '148e12', not 1e+12"),
    ],
)
def test_a_data_sheet_with_a_hole_or_another_unit_is_refused(tmp_path, changed, reason):
    sheet = {key: value for key, value in (SHEET | changed).items() if value is not None}
    path = tmp_path / "h20.json"
    path.write_text(json.dumps(sheet), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_device(str(path))
    assert reason in str(caught.value)


def test_a_data_sheet_that_is_no_object_is_refused(tmp_path):
    for content in ("[]", "{"):
        (tmp_path / "x.json").write_text(content, encoding="utf-8")
        with pytest.raises(InputError, match=r"x\.json"):
            load_device(str(tmp_path / "x.json"))
    with pytest.raises(InputError, match="cannot be read"):
        load_device(str(tmp_path / "nosuch.json"))


def test_bytes_of_llama_70b_in_int4_are_those_counted_by_hand():
    # 9.57 GB per GPU and forward at four GPUs, KV rows of a context of 1,000 included.
    model = parse_model("llama-3-70b:int4")
    read = sum(model.weight_bytes(4).values()) + 1000 * model.kv_bytes(4)
    assert read == pytest.approx(9.57e9, rel=0.01)
    assert model.kv_bytes(1) == 2 * 2 * 80 * 8 * 128


def test_six_gpus_fill_up_eight_key_value_heads_to_twelve():
    model = parse_model("llama-3-70b:int4")
    assert model.kv_bytes(6) == model.kv_bytes(4) == 2 * model.kv_bytes(8)


@pytest.mark.parametrize("model", ["llama-3-70b:int4", "qwen2-72b", "llama-3.1-70b:fp8"])
def test_large_models_gain_from_every_gpu_in_time_and_in_memory(model):
    forwards = [forward(model, gpus) for gpus in (1, 2, 4, 8)]
    for few, many in itertools.pairwise(forwards):
        assert many.decode(8, 1000) < few.decode(8, 1000)
        assert many.prefill(4096) < few.prefill(4096)
        assert many.free_bytes > few.free_bytes
        assert many.decode(8, 1000) > 0.5 * few.decode(8, 1000)


def test_a_small_draft_gains_nothing_from_more_gpus():
    assert forward("llama-3.2-1b:int4", 8).delta > forward("llama-3.2-1b:int4", 1).delta


def test_time_grows_with_rows_context_and_bytes():
    wide = forward("llama-3-70b:int4", 4)
    assert wide.decode(1) < wide.decode(9) < wide.decode(9, 5000)
    assert wide.prefill(100) < wide.prefill(1000) < wide.prefill(1000, 50_000)
    for narrow, more in (("int4", "int8"), ("int8", "bf16")):
        cheap, dear = (forward(f"llama-3.1-70b:{kind}", 4) for kind in (narrow, more))
        assert cheap.delta < dear.delta
        assert cheap.free_bytes > dear.free_bytes
    assert forward("llama-3.1-8b", device="a100").delta > forward("llama-3.1-8b").delta


def test_chunks_of_a_prompt_take_at_least_the_time_of_the_whole():
    prefill = forward("llama-3.1-8b").prefill
    chunks = sum(prefill(512, at) for at in range(0, 8192, 512))
    assert chunks > prefill(8192)
    once = 15 * prefill(0) + sum(prefill.alpha * at for at in range(0, 8192, 512))
    assert chunks - once == pytest.approx(prefill(8192), rel=0.02)


def test_no_forward_is_faster_than_its_bytes_at_the_data_sheets_bandwidth():
    for name in ("llama-3-70b:int4", "llama-3.2-1b", "qwen2-1.5b:int4"):
        for device in devices().values():
            for gpus in (1, 3, 8):
                priced = Forward(parse_model(name), device, gpus)
                read = sum(priced.model.weight_bytes(gpus).values())
                assert priced.decode(1, 0) > read / device.memory_bandwidth


def test_shares_of_bandwidth_are_those_of_kernels_measured_on_an_h200():
    shares = DEFAULT_SOFTWARE.weight_share
    # A bf16 product of 8 x 8192 x 8192 in 34.0 us; an int4 gate_up of 70B, 245 MB, in 84.1 us.
    assert shares["bf16"] * 4.8e12 == pytest.approx(2 * 8192 * 8192 / 34.0e-6, rel=0.02)
    assert shares["int4"] * 4.8e12 == pytest.approx(245e6 / 84.1e-6, rel=0.02)
    assert shares["int4"] < shares["fp8"] < shares["bf16"] < 4.17 / 4.8


def test_an_all_reduce_of_four_is_slower_than_a_bare_one_and_near_nccl():
    # Measured on four H200s, 128 KiB: Triton LL 5.6 us, one-shot 8.6 us, NCCL 16.8 us.
    seconds = DEFAULT_SOFTWARE.all_reduce["nvlink"] + 3 * DEFAULT_SOFTWARE.peer
    assert 8.6e-6 < seconds < 1.5 * 16.8e-6


def test_the_constants_are_what_the_published_anchors_give(anchors_script):
    anchors = anchors_script.load_anchors()
    fitted = anchors_script.fit_software(anchors)
    assert len(anchors) > 30
    assert fitted.layer == pytest.approx(DEFAULT_SOFTWARE.layer, rel=0.01)
    assert fitted.peer == pytest.approx(DEFAULT_SOFTWARE.peer, rel=0.02)
    for link, seconds in fitted.all_reduce.items():
        assert seconds == pytest.approx(DEFAULT_SOFTWARE.all_reduce[link], rel=0.01)


def test_the_stated_errors_are_those_at_engines_that_were_left_out(anchors_script):
    anchors = anchors_script.load_anchors()
    errors = anchors_script.held_out_errors(anchors)
    for is_large, stated in ((True, LARGE_ERROR), (False, SMALL_ERROR)):
        measured = anchors_script.mean_error(anchors, errors, is_large=is_large)
        assert measured == pytest.approx(stated, abs=0.01)


def test_swiftspecs_table_1_is_met_within_the_stated_errors_on_average(anchors_script):
    table = [a for a in anchors_script.load_anchors() if a.engine == "SwiftSpec"]
    errors = {a: a.predicted(DEFAULT_SOFTWARE) / a.seconds - 1.0 for a in table}
    assert len(table) == 16
    assert np.mean([abs(e) for a, e in errors.items() if a.model.is_large]) < 0.08
    assert max(map(abs, errors.values())) < 0.30
    large = [e for a, e in errors.items() if a.model.name == "llama-3-70b"]
    assert max(map(abs, large)) < 0.10


def test_a_fit_has_every_split_that_holds_the_weights_and_no_other():
    fit = what_if_fit("h100", 4, "llama-3.1-70b", "llama-3.2-1b")
    assert set(fit.costs) == {"3", "4", "3+1"}  # 141 GB do not lie on two GPUs with 80
    assert fit.origin == "roofline"
    assert "not for this pair" in fit.acceptance_origin
    assert fit.errors["4/target"] == LARGE_ERROR
    assert fit.errors["3+1/draft"] == SMALL_ERROR
    assert len(list(splits(8))) == 36


def test_a_drafts_weights_and_kv_rows_take_room_from_the_target():
    target, draft = forward("llama-3-70b:int4", 4), forward("llama-3.2-3b:int4", 4)
    together = round_cost(target, draft, is_apart=False)
    apart = round_cost(target, draft, is_apart=True)
    alone = target.free_bytes / target.model.kv_bytes(4)
    assert together.kv_tokens < apart.kv_tokens <= alone
    assert together.plain_kv_tokens == apart.plain_kv_tokens == int(alone)
    assert (together.link, apart.link > 0) == (0.0, True)
    assert together.kv_transfer == target.model.kv_bytes(4) / (0.8 * 450e9)


def test_models_that_take_turns_have_the_children_of_the_draft_s_own_timings():
    step = StepTime.linear(alpha=0.0, gamma=0.0, delta=1e-3)
    target, draft = (RoundCost(step, step, step, step, child=child) for child in (5e-6, 1e-6))
    assert joined(target, draft, target).child == draft.child


def test_dialled_acceptance_has_the_dialled_rate_and_comes_in_runs():
    recorded = Fit.load(DEFAULT_FIT).acceptance
    rates = []
    for rate in (0.4, 0.6, 0.8):
        profile = dialled_acceptance(recorded, rate)
        after_miss, after_hit = follow_ups(profile)
        assert after_hit > after_miss
        rates.append(profile.hit_rate(1))
        assert rates[-1] == pytest.approx(rate, abs=0.04)
    assert rates == sorted(rates)


def follow_ups(profile: AcceptanceProfile) -> tuple[float, float]:
    """Shares of hits right after a miss and right after a hit."""
    hits = [r.ranks == 0 for group in profile.recordings.values() for r in group]
    before = np.concatenate([h[:-1] for h in hits])
    after = np.concatenate([h[1:] for h in hits])
    return float(after[~before].mean()), float(after[before].mean())


def test_the_same_what_if_keeps_its_file_and_another_replaces_it(tmp_path, monkeypatch):
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path))
    fit = what_if_fit("h200", 2, "llama-3.1-8b", "llama-3.2-1b")
    kept, file = kept_fit(fit, "a/b: c")
    written = file.read_bytes()
    assert file.parent.parent == tmp_path
    assert kept.costs == Fit.load(file).costs == fit.costs
    assert kept_fit(fit, "a/b: c")[1].read_bytes() == written
    deep = kept_fit(fit, "8xh100-/deep" + "/folder" * 40)[1]
    assert deep != kept_fit(fit, "8xh100-/deep" + "/folder" * 41)[1]
    kept_fit(replace(fit, errors={**fit.errors, "acceptance": 0.5}), "a/b: c")
    assert Fit.load(file).errors["acceptance"] == 0.5
    kept_fit(replace(Fit.load(file), parts_covariance=((0.25,),)), "a/b: c")
    assert Fit.load(file).parts_covariance == ((0.25,),)


def test_two_that_keep_the_same_what_if_at_once_do_not_mix_its_files(tmp_path, monkeypatch):
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path))
    fit, save = what_if_fit("h200", 2, "llama-3.1-8b", "llama-3.2-1b"), Fit.save
    saved = []

    def slow(self, path) -> None:
        saved.append(path)
        time.sleep(0.3)
        save(self, path)

    monkeypatch.setattr(Fit, "save", slow)
    threads = [threading.Thread(target=kept_fit, args=(fit, "mine")) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(saved) == 1
    assert Fit.load(saved[0]).costs == fit.costs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("h1000", 8, "llama-3-70b", "llama-3.2-1b"), "unknown device 'h1000'; known are a100"),
        (("h100", 8, "llama-3-7b", "llama-3.2-1b"), "unknown model 'llama-3-7b'"),
        (("h100", 8, "llama-3-70b:int3", "llama-3.2-1b"), "unknown weights 'int3'"),
        (("h100", 0, "llama-3-70b", "llama-3.2-1b"), "need 1 to 16 GPUs, got 0"),
        (("rtx-4090", 1, "llama-3-70b", "llama-3.2-1b"), "need 144 GB, 1 x rtx-4090 have 24"),
    ],
)
def test_what_cannot_be_is_named_with_what_could(arguments, message):
    with pytest.raises(InputError, match=message):
        what_if_fit(*arguments)


@pytest.mark.parametrize(
    ("gpu", "short", "device"),
    [
        ("NVIDIA H200", "H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "H100", "h100"),
        ("NVIDIA H100 PCIe", "H100-PCIe", None),
        ("NVIDIA H200 NVL", "H200-NVL", None),
        ("NVIDIA A100-SXM4-80GB", "A100", "a100"),
        ("NVIDIA A100-SXM4-40GB", "A100", "a100-40gb"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090", "rtx-4090"),
        ("Tesla T4", "Tesla-T4", None),
    ],
)
def test_a_gpu_is_found_by_the_name_that_its_driver_has(gpu, short, device):
    found = device_of(gpu)
    assert (short_gpu_name(gpu), found and found.name) == (short, device)
