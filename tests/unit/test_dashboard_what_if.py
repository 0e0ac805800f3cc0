"""What-if answers without a browser: choices, coarse and whole answers, words and charts."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace

import numpy as np
import pytest

from codesign.config import SLO, Serving
from codesign.dashboard import what_if_charts as charts
from codesign.dashboard.choices import (
    SYNTHETIC,
    Machine,
    Traffic,
    fits_here,
    load_machine,
    load_traffic,
    splits,
    traces_here,
)
from codesign.dashboard.commands import simulate_command
from codesign.dashboard.files import keep_upload
from codesign.dashboard.kept import Kept
from codesign.dashboard.policies import families, first_label, label_of, sizes_of
from codesign.dashboard.records_frames import BOTH, frames_of
from codesign.dashboard.warm_up import warm_up
from codesign.dashboard.what_if import COARSE, Asked, first_question, known, predict
from codesign.dashboard.words import against_plain, hint, scope, tiles, verdict
from codesign.errors import InputError
from codesign.policy.speculation import parse_policy
from codesign.records import RequestRecord, RoundLog, RoundRecord, RunRecords

SMALL = Traffic(SYNTHETIC, rate=4.0, seconds=30.0, prompt_mean=300, output_mean=40)
ASKED = Asked(
    SMALL, Machine(), "tree-8x4x2", "8", 32, SLO(ttft=1.0, tpot=0.05), Serving(preemption=True)
)


def value(asked: Asked, figure: str) -> float:
    return predict(asked, is_coarse=False).scored.predicted[figure].value


def test_bundled_traces_come_first_and_all_of_them_load():
    assert traces_here()[:3] == ["conv-twin", "code-twin", "mooncake-twin"]
    assert len(load_traffic(Traffic("conv-twin"))) > 3000


def test_a_synthetic_trace_has_the_means_that_were_asked_for():
    trace = load_traffic(Traffic(SYNTHETIC, rate=10.0, seconds=60.0, prompt_mean=500))
    assert trace.requests["prompt_tokens"].mean() == pytest.approx(500, rel=0.01)
    assert len(trace) == 600


def test_a_file_that_was_written_anew_is_read_again(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("arrival,prompt_tokens,output_tokens\n0,10,5\n")
    assert len(load_traffic(Traffic(str(file)))) == 1
    file.write_text("arrival,prompt_tokens,output_tokens\n0,10,5\n1,10,5\n")
    assert len(load_traffic(Traffic(str(file)))) == 2


def test_an_upload_keeps_its_name_and_its_error_is_one_line_with_it():
    good = keep_upload("conv.csv", b"arrival,prompt_tokens,output_tokens\n0,10,5\n")
    assert good == keep_upload("conv.csv", b"arrival,prompt_tokens,output_tokens\n0,10,5\n")
    assert len(load_traffic(Traffic(good))) == 1
    wrong = keep_upload("../../holiday.csv", b"\x89PNG not a trace")
    with pytest.raises(InputError) as error:
        load_traffic(Traffic(wrong))
    assert str(error.value).startswith("holiday.csv")
    assert "\n" not in str(error.value)


def test_an_error_about_a_file_of_this_machine_names_its_folder(tmp_path):
    with pytest.raises(InputError, match=f"^{tmp_path}/gone.csv does not exist"):
        load_traffic(Traffic(str(tmp_path / "gone.csv")))


def test_fits_of_the_folder_come_before_the_shipped_one(tmp_path):
    (tmp_path / "laptop").mkdir()
    (tmp_path / "laptop" / "fit.json").write_text("{}")
    assert next(iter(fits_here(tmp_path).values())) == "laptop/fit.json"
    assert list(fits_here(tmp_path).values())[-1].startswith("shipped: ")


@pytest.mark.parametrize("name", families())
def test_every_family_has_sliders_that_start_at_its_example(name):
    assert parse_policy(first_label(name)) == families()[name].spec
    largest = label_of(name, {size.key: size.high for size in sizes_of(name)})
    assert parse_policy(largest).family == name
    assert bool(sizes_of(name)) == (name != "plain")


def test_a_policy_with_a_draft_apart_gets_splits_and_others_get_groups():
    machine = Machine()
    assert splits(machine, "async-tree-8x4x2")[0] == "7+1"
    assert splits(machine, "chain-3")[0] == "8"
    assert all("+" in label for label in splits(machine, "pearl-4"))


def test_the_coarse_answer_is_of_a_stretch_and_the_other_of_the_whole_trace():
    asked = replace(ASKED, traffic=replace(SMALL, seconds=200.0))
    coarse = predict(asked, is_coarse=True)
    assert (coarse.num_requests, coarse.num_in_trace) == (COARSE, 800)
    assert not coarse.is_whole
    whole = predict(asked, is_coarse=False)
    assert whole.is_whole
    near = whole.scored.predicted["tpot_mean"]
    assert near.low < coarse.scored.predicted["tpot_mean"].value < near.high


def test_an_answer_is_remembered_and_a_stopped_one_is_not():
    asked = replace(ASKED, max_batch=17)

    class Stopped(BaseException):
        pass

    def stop(stage, done, total):
        raise Stopped

    with pytest.raises(Stopped):
        predict(asked, is_coarse=False, progress=stop)
    assert known(asked, is_coarse=False) is None
    answer = predict(asked, is_coarse=False)
    assert known(asked, is_coarse=False) is answer
    assert known(asked, is_coarse=True) is None


def test_an_answer_is_still_known_when_another_file_was_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = predict(ASKED, is_coarse=True)
    os.utime(tmp_path, (1.0, 1.0))
    assert known(ASKED, is_coarse=True) is answer


def test_plain_decoding_is_simulated_once_for_all_policies_and_splits():
    told = []
    for policy, split in (("chain-2", "8"), ("async-tree-8x4x2", "6+2")):
        asked = replace(ASKED, max_batch=19, policy=policy, split=split)
        plain = predict(
            asked, is_coarse=False, progress=lambda stage, done, total: told.append(total)
        ).plain
        assert plain is not None
    assert set(told) == {4 * 120, 3 * 120}
    other = replace(asked, slo=SLO(ttft=0.1, tpot=0.01))
    assert predict(other, is_coarse=False).plain is not plain


def test_progress_counts_requests_of_all_simulations():
    told = []
    predict(
        replace(ASKED, max_batch=18),
        is_coarse=False,
        progress=lambda stage, done, total: told.append((done, total)),
    )
    assert {total for _, total in told} == {4 * 120}  # three seeds, and plain decoding once
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_more_requests_wait_longer_and_better_drafts_answer_faster():
    busier = replace(ASKED, traffic=replace(SMALL, rate=40.0))
    assert value(busier, "ttft_slo") > value(ASKED, "ttft_slo")
    luckier = [
        replace(ASKED, machine=Machine(acceptance=rate), policy="chain-4") for rate in (0.3, 0.9)
    ]
    assert value(luckier[1], "tpot_mean") < value(luckier[0], "tpot_mean")
    assert value(luckier[1], "acceptance_length") > value(luckier[0], "acceptance_length")


def test_the_first_view_is_answered_before_anybody_asks():
    with socket.socket() as server:
        server.bind(("localhost", 0))
        server.listen()
        warm_up("localhost", server.getsockname()[1])
    answer = known(first_question(), is_coarse=True)
    assert answer is not None
    assert answer.num_requests == COARSE


def test_every_tile_has_a_range_around_its_value_and_an_origin():
    prediction = predict(ASKED, is_coarse=False)
    shown = tiles(prediction, ASKED.slo)
    assert len(shown) == 11
    for tile in shown:
        low, high = (float(end.replace(",", "")) for end in tile.range.split(" to "))
        assert low <= float(tile.value.replace(",", "")) <= high
        assert tile.origin in ("measured", "fitted", "extrapolated", "roofline", "rough")
    without = {tile.label for tile in tiles(prediction, SLO())}
    assert {tile.label for tile in shown} - without == {"In SLO, %"}
    assert "Step times roofline (data sheets, not measured); acceptance " in scope(prediction)
    (remark,) = prediction.remarks
    assert "measured ones of this pair with int4 weights ship" in remark


def test_what_must_be_known_of_step_times_is_said_as_plan_and_simulate_do():
    machine = Machine(gpus=16, target="llama-3-70b:int4", draft="llama-3.2-1b:int4")
    wide = predict(replace(ASKED, machine=machine, policy="plain", split="16"), is_coarse=True)
    assert wide.times_origin in scope(wide)
    assert wide.times_origin.startswith("measured on up to 4 GPUs, other groups extrapolated")
    assert any("a group of 16 GPUs crosses hosts of 8" in remark for remark in wide.remarks)
    assert any("a step of one row takes" in remark for remark in wide.remarks)


def test_the_verdict_says_by_figure_whether_the_slo_is_met():
    easy, hard = SLO(ttft=60.0, tpot=1.0), SLO(ttft=0.001, tpot=1.0)
    for slo, word in ((easy, "Meets"), (hard, "Misses")):
        said = verdict(predict(replace(ASKED, slo=slo), is_coarse=False), slo)
        assert said.startswith(f"{word} the SLO: TTFT p90 ")
    assert verdict(predict(ASKED, is_coarse=False), SLO()) == "No SLO set."


def test_answers_of_one_token_miss_no_target_of_the_tokens_that_follow():
    asked = replace(ASKED, traffic=replace(SMALL, max_output=1))
    said = verdict(predict(asked, is_coarse=False), asked.slo)
    assert said.startswith("Meets the SLO: TTFT p90 ")
    assert "no answer has a TPOT" in said


def test_speculation_is_held_against_plain_decoding_on_all_workers():
    assert against_plain(predict(ASKED, is_coarse=False)).startswith("Against plain on 8, batch 32")
    plain = replace(ASKED, policy="plain")
    assert against_plain(predict(plain, is_coarse=False)) == ""
    missed = replace(ASKED, slo=SLO(ttft=0.001))
    words = "Against plain on 8, batch 32 (misses the SLO): "
    assert against_plain(predict(missed, is_coarse=False)).startswith(words)


def rounds_of(**values: float) -> RoundLog:
    zero = dict.fromkeys(
        ("round", "start", "batch", "rows", "context", "num_expansions", "draft_rows",
         "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens", "prefill",
         "prefill_tokens", "target", "link_there", "link_back", "reroot", "draft"), 0
    )  # fmt: skip
    return RoundLog([RoundRecord(**{**zero, **values})])


def test_draft_forwards_beside_the_verification_count_as_the_drafts_work(machine_fit):
    rounds = rounds_of(batch=1, rows=4, num_expansions=3, draft_rows=3, target=0.03)
    records = RunRecords([RequestRecord(0, "", 0.0, 5)], rounds, 0.06, [])
    from codesign.config import parse_deployment

    cost = machine_fit.costs["1+1"]
    apart = frames_of(records, parse_deployment("1+1"), cost).busy
    assert apart == {"target": pytest.approx(0.5), "draft": pytest.approx(3 * cost.draft(1) / 0.06)}
    together = frames_of(records, parse_deployment("2"), cost).busy
    assert together == {BOTH: pytest.approx(0.5)}


def test_who_sits_a_round_out_is_running(machine_fit):
    from codesign.config import parse_deployment

    rounds = rounds_of(batch=2, running=3, rows=2, num_emitted_tokens=2, target=0.06)
    records = RunRecords([RequestRecord(0, "", 0.0, 5)], rounds, 0.06, [])
    table = frames_of(records, parse_deployment("2"), machine_fit.costs["2"]).over_time
    shown = table.groupby("series")["value"].sum()
    assert shown["running"] == pytest.approx(3 * 90)  # of the 90 stretches the first has it all
    assert shown["emitted"] == 1.0


@pytest.mark.parametrize(("limit", "align"), [(0.001, "left"), (1000.0, "right")])
def test_the_words_of_a_target_are_on_the_side_that_has_room(limit, align):
    """At the left end they would cover the numbers of the axis."""
    frames = predict(ASKED, is_coarse=True).frames
    words = charts.latency_chart(frames.latency, "ttft", limit, 90.0).to_dict()["layer"][-1]["mark"]
    assert words["align"] == align


def test_charts_are_specifications_with_all_the_points():
    frames = predict(ASKED, is_coarse=False).frames
    chart = charts.latency_chart(frames.latency, "ttft", 1.0, 90.0).to_dict()
    assert len(chart["layer"]) == 5
    running = charts.running_chart(frames.over_time, 32).to_dict()
    assert "limit" not in json.dumps(running["layer"][-1])
    for made in (
        charts.tokens_chart(frames.over_time),
        charts.busy_chart(frames.over_time),
        charts.spans_chart(frames.spans),
    ):
        assert "Infinity" not in json.dumps(made.to_dict(), allow_nan=False)
    assert np.isfinite(frames.over_time["value"]).all()
    for name in ("ttft", "tpot"):
        values = frames.latency.loc[frames.latency["figure"] == name, "value"]
        assert values.is_monotonic_increasing


def test_the_command_line_does_the_same():
    shown = simulate_command(replace(ASKED, traffic=Traffic("my trace.csv", rate_scale=2.0)))
    assert shown.startswith("codesign simulate --trace 'my trace.csv' --rate-scale 2 --device h100")
    assert "--policy tree-8x4x2 --deployment 8" in shown.replace(" \\\n   ", "")
    synthetic = simulate_command(ASKED)
    assert synthetic.startswith("codesign trace synth steady --rate 4 --duration 30 --out ")
    assert "--length-scale 0." in synthetic


def test_the_least_recently_used_answer_goes_first():
    kept: Kept[int] = Kept(2)
    kept.put("a", 1)
    kept.put("b", 2)
    assert kept.get("a") == 1
    kept.put("c", 3)
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (1, None, 3)


def test_a_machine_without_room_for_the_models_is_one_line():
    with pytest.raises(InputError) as error:
        load_machine(Machine(device="rtx-4090", gpus=1))
    assert "\n" not in str(error.value)


def test_an_error_that_names_a_flag_gets_the_control_of_the_page():
    said = hint("request 3 needs 9,000 KV rows. Fix: --max-prompt and --max-output, or "
                "--max-kv-tokens")  # fmt: skip
    assert said == (
        '. On this page: "Cut long requests" or "KV rows of a replica" under "Serving", on the '
        "left."
    )
    assert hint("no file is named x") == ""
