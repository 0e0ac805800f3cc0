"""Acceptance measured elsewhere: every format, every refusal, and what a round trip gives."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codesign.acceptance import AcceptanceProfile
from codesign.candidate import Candidate
from codesign.config import Deployment, Serving
from codesign.errors import InputError
from codesign.fit import Fit
from codesign.fit.shipped import DEFAULT_FIT
from codesign.importers import agreement_model, imported_fit, read_summary
from codesign.importers.run_model import RunModel, template_shape
from codesign.importers.summary import from_histogram
from codesign.metrics import summarise
from codesign.policy.speculation import parse_policy
from codesign.sim import simulate

CHAINS = (1, 2, 3, 5, 8)


@pytest.fixture(scope="module")
def shipped() -> Fit:
    return Fit.load(DEFAULT_FIT)


def histogram_of(profile: AcceptanceProfile, chain: int) -> dict[int, int]:
    """Rounds by accepted tokens when chains replay the recordings, from every place in them."""
    counts = dict.fromkeys(range(chain + 1), 0)
    for group in profile.recordings.values():
        for recording in group:
            hits = (recording.ranks == 0).tolist()
            for first in range(chain + 1):
                at = first
                while at + chain < len(hits):
                    run = 0
                    while run < chain and hits[at + run]:
                        run += 1
                    counts[run] += 1
                    at += run + 1
    return counts


def length_of(histogram: dict[int, int]) -> float:
    return 1 + sum(k * n for k, n in histogram.items()) / sum(histogram.values())


def vllm_text(histogram: dict[int, int], *, name="m", engine=0, total="_total") -> str:
    chain, rounds = max(histogram), sum(histogram.values())
    labels = f'engine="{engine}",model_name="{name}"'
    prefix = "vllm:spec_decode_num_"
    lines = [
        "# HELP vllm:num_requests_running Number of requests in model execution batches.",
        f"vllm:num_requests_running{{{labels}}} 0.0",
        f"# TYPE {prefix}drafts{total} counter",
        f"{prefix}drafts{total}{{{labels}}} {rounds:.1f}",
        f"{prefix}drafts_created{{{labels}}} 1.7e+09",
        f"{prefix}draft_tokens{total}{{{labels}}} {chain * rounds:.1f}",
    ]
    for position in range(chain):
        count = sum(n for accepted, n in histogram.items() if accepted > position)
        labelled = f'{labels},position="{position}"'
        lines.append(f"{prefix}accepted_tokens_per_pos{total}{{{labelled}}} {count:.1f}")
    return "\n".join(lines) + "\n"


def save(folder, content: object, name="file"):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_vllm_counters_say_how_often_each_position_was_accepted(tmp_path):
    summary = read_summary(save(tmp_path, vllm_text({0: 25, 1: 25, 2: 10, 3: 40})))
    assert summary.survival == (0.75, 0.5, 0.4)
    assert (summary.chain, summary.num_rounds, summary.notes) == (3, 100, ())
    assert summary.length == pytest.approx(2.65)


def test_engines_of_one_model_are_added_and_old_names_without_total_are_read(tmp_path):
    text = vllm_text({0: 10, 1: 0, 2: 0}, total="") + vllm_text({0: 0, 1: 0, 2: 30}, engine=1)
    assert read_summary(save(tmp_path, text)).survival == (0.75, 0.75)


def test_rounds_with_fewer_draft_tokens_are_said(tmp_path):
    text = vllm_text({0: 10, 1: 10, 2: 0, 3: 0}).replace("draft_tokens_total{engine", "x{engine")
    text += 'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30\n'
    assert "1.50 tokens on average, not 3" in read_summary(save(tmp_path, text)).notes[0]


def test_aiperf_scrapes_of_vllm_are_the_same_counters(tmp_path):
    def series(total, **labels):
        return {"endpoint_url": "x", "labels": labels, "stats": {"total": total, "rate": 1.0}}

    name = "vllm:spec_decode_num_"
    metrics = {
        f"{name}drafts": {"type": "counter", "series": [series(100.0, model_name="m")]},
        f"{name}draft_tokens": {"type": "counter", "series": [series(200.0, model_name="m")]},
        f"{name}accepted_tokens_per_pos": {
            "type": "counter",
            "series": [
                series(60.0, model_name="m", position="0"),
                series(30.0, model_name="m", position="1"),
            ],
        },
    }
    summary = read_summary(save(tmp_path, {"schema_version": "1.0", "metrics": metrics}))
    assert summary.survival == (0.6, 0.3)
    assert "scraped by AIPerf" in summary.source


def test_aiperf_pooled_histogram_is_read(tmp_path):
    histogram = {"0": 6400, "1": 4608, "2": 3840, "3": 3328, "4": 3072, "5": 4352}
    export = {"schema_version": "1.5", "pooled_spec_decode_acceptance_histogram": histogram}
    summary = read_summary(save(tmp_path, export))
    assert summary.chain == 5
    assert summary.num_rounds == 25600
    assert summary.survival[0] == pytest.approx(0.75)
    assert "the most that were ever accepted" in summary.notes[0]


def test_aiperf_records_are_pooled_over_their_requests(tmp_path):
    def line(histogram, drafted):
        record = {"acceptance_histogram": histogram, "num_draft_tokens": drafted}
        return json.dumps({"spec_decode_acceptance": {**record, "num_spec_tokens": 4}})

    lines = [line({"0": 5, "4": 5}, 40), line({"1": 10}, 40), json.dumps({"metrics": {}})]
    summary = read_summary(save(tmp_path, "\n".join(lines) + "\n"))
    assert summary.survival == (0.75, 0.25, 0.25, 0.25)
    assert "2 requests" in summary.source
    assert summary.notes == ()


def test_sglang_server_info_gives_the_mean_and_the_steps(tmp_path):
    info = {"speculative_num_steps": 3, "speculative_eagle_topk": 1}
    idle = {"avg_spec_accept_length": 0.0}  # a rank that has had no round
    states = {"internal_states": [{"avg_spec_accept_length": 2.5}, idle]}
    for content in ({**info, **states}, {"decode": [{**info, **states}], "prefill": []}):
        summary = read_summary(save(tmp_path, content))
        assert (summary.chain, summary.length, summary.survival) == (3, 2.5, None)
        assert "only the mean is known" in summary.notes[0]


def test_sglang_histograms_of_responses_are_added(tmp_path):
    lines = [
        json.dumps({"text": "a", "meta_info": {"spec_accept_histogram": [4, 0, 6]}}),
        json.dumps({"text": "b", "meta_info": {"spec_accept_histogram": [6, 4]}}),
    ]
    for content in ("\n".join(lines), f"[{','.join(lines)}]"):
        summary = read_summary(save(tmp_path, content), chain=2)
        assert summary.survival == (0.5, 0.3)


def test_sglang_accept_lengths_of_responses_are_weighted_by_their_rounds(tmp_path):
    metas = [{"spec_accept_length": 2.0, "spec_verify_ct": 30}, {"spec_accept_length": 3.0}]
    metas[1]["spec_verify_ct"] = 10
    content = [{"meta_info": meta} for meta in metas]
    assert read_summary(save(tmp_path, content), chain=4).length == pytest.approx(2.25)


def test_sglang_log_lines_and_gauge_are_averaged(tmp_path):
    line = "[2026-01-01 00:00:00] Decode batch, #running-req: 4, accept len: {}, accept rate: 0.5"
    lines = [line.format("2.00"), line.format("3.00")]
    for log in ("\n".join(lines), "\n".join(["starting", *lines])):  # "[" begins no JSON there
        assert read_summary(save(tmp_path, log), chain=3).length == 2.5
    gauge = 'sglang:spec_accept_length{tp_rank="%d"} %g\n'
    for idle in ("", gauge % (1, 0.0)):  # a rank that has had no round
        found = read_summary(save(tmp_path, gauge % (0, 2.25) + idle), chain=3)
        assert found.length == 2.25


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("hello\n", "no acceptance figures of a known kind"),
        ({"a": 1}, "no acceptance figures of a known kind"),
        ('{"a": 1}\n{"b"', "line 2: not JSON"),
        (vllm_text({0: 0, 1: 0}), "no speculative rounds were counted"),
        (vllm_text({0: 5, 1: 5}) + vllm_text({0: 5, 1: 5}, name="n"), "metrics of 2 models"),
        (vllm_text({0: 5, 1: 5}).replace("drafts_total", "d_total"), "num_drafts is missing"),
        (vllm_text({0: 5, 1: 5}).replace('"0"}', '"1"}'), "every position is missing"),
        (vllm_text({0: 5, 1: 5}).replace('"0"} 5.0', '"0"} 50'), "do not fit 10 rounds"),
        (vllm_text({0: 5, 1: 5}).replace("position", "place"), "unknown form"),
        ({"pooled_spec_decode_acceptance_histogram": {"a": 1}}, "unknown form"),
        ({"pooled_spec_decode_acceptance_histogram": {}}, "no speculative rounds"),
        ({"pooled_spec_decode_acceptance_histogram": {"9" * 9: 1}}, "more than any server drafts"),
        ({"pooled_spec_decode_acceptance_histogram": {"1": math.nan}}, "no finite number"),
        ([{"spec_decode_acceptance": None}], "no request has spec_decode_acceptance"),
        ([{"meta_info": {"id": "x"}}], "no response has spec_accept_length"),
        ({"internal_states": [{}]}, "no avg_spec_accept_length"),
        ({"internal_states": [{"avg_spec_accept_length": 0.0}]}, "no avg_spec_accept_length"),
        ({"decode": []}, "unknown form"),
        ({"internal_states": [{"avg_spec_accept_length": 2.0}]}, "Add --chain N"),
        ({"speculative_eagle_topk": 4, "internal_states": []}, "the server drafted trees"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_that_names_it(tmp_path, content, reason):
    with pytest.raises(InputError, match="file") as refused:
        read_summary(save(tmp_path, content))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_missing_and_binary_files_are_input_errors(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        read_summary(tmp_path / "nowhere")
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00\x80PAR1")
    with pytest.raises(InputError, match="no acceptance figures"):
        read_summary(tmp_path / "x")


def test_a_chain_shorter_than_what_was_accepted_is_refused():
    with pytest.raises(InputError, match="accepted 3 draft tokens, more than the 2"):
        from_histogram("here", {0: 1, 3: 1}, chain=2)


@pytest.mark.parametrize(("length", "chain"), [(0.9, 3), (4.1, 3), (2.0, 0)])
def test_an_impossible_length_is_refused(length, chain):
    with pytest.raises(InputError, match="is not possible"):
        RunModel.from_length(length, chain=chain, shape=RunModel((0.5,)))


@pytest.mark.parametrize("survival", [(), (0.5, 0.6), (1.2,), (0.5, -0.1)])
def test_shares_that_do_not_fall_are_refused(survival):
    with pytest.raises(InputError, match="must fall from at most 1"):
        RunModel.from_survival(survival)


def test_without_runs_every_chance_is_the_same():
    model = RunModel.from_survival([0.7, 0.7**2, 0.7**3])
    assert model.hits == pytest.approx((0.7,) * 4, abs=1e-3)
    assert model.acceptance_length(6) == pytest.approx(sum(0.7**i for i in range(7)), rel=1e-3)


@given(
    falls=st.lists(st.floats(0.05, 0.99), min_size=2, max_size=8),
)
def test_the_model_gives_back_the_shares_that_it_was_made_from(falls):
    survival = np.cumprod(falls)
    model = RunModel.from_survival(survival.tolist())
    assert model.survival(len(falls)) == pytest.approx(tuple(survival), abs=1e-5)


@given(
    hits=st.lists(st.floats(0.05, 0.95), min_size=2, max_size=5),
    length=st.floats(1.05, 3.9),
)
def test_a_mean_alone_is_met_with_the_shape_of_another_model(hits, length):
    model = RunModel.from_length(length, chain=3, shape=RunModel(tuple(hits)))
    assert model.acceptance_length(3) == pytest.approx(length, abs=1e-6)


@given(hits=st.lists(st.floats(0.05, 0.95), min_size=1, max_size=4), chain=st.integers(1, 6))
def test_closed_form_and_drawn_recordings_agree(shipped, hits, chain):
    model = RunModel(tuple(hits))
    drawn = length_of(histogram_of(model.recordings(shipped.acceptance, seed=1), chain))
    # About 15,000 tokens: five standard errors of the mean of rounds that last up to chain + 1.
    assert drawn == pytest.approx(model.acceptance_length(chain), rel=0.08)


def test_nothing_or_everything_accepted_is_a_model_too(shipped):
    never = RunModel.from_survival([0.0, 0.0])
    always = RunModel.from_survival([1.0, 1.0])
    assert never.acceptance_length(4) == 1
    assert always.acceptance_length(4) == pytest.approx(5, abs=1e-3)
    assert never.recordings(shipped.acceptance, seed=0).hit_rate(1) == 0
    assert always.recordings(shipped.acceptance, seed=0).hit_rate(1) == pytest.approx(1, abs=1e-3)


def test_recordings_without_agreement_cannot_lend_confidences(shipped):
    group = next(iter(shipped.acceptance.recordings.values()))
    hits = [replace(r, ranks=np.zeros_like(r.ranks)) for r in group]
    with pytest.raises(InputError, match="only agreement or none"):
        RunModel((0.5,)).recordings(AcceptanceProfile({"": tuple(hits)}), seed=0)


@pytest.mark.parametrize("chain", [2, 3, 5, 7])
def test_counters_of_a_known_profile_tell_every_other_chain_within_3_percent(
    tmp_path, shipped, chain
):
    text = vllm_text(histogram_of(shipped.acceptance, chain))
    fit = imported_fit(shipped, read_summary(save(tmp_path, text)))
    for other in CHAINS:
        known = length_of(histogram_of(shipped.acceptance, other))
        assert length_of(histogram_of(fit.acceptance, other)) == pytest.approx(known, rel=0.03)


def test_a_mean_of_another_pair_tells_every_other_chain_within_4_percent(shipped):
    # 50 % more odds at every position, which the importer is not told.
    other_pair = template_shape(shipped.acceptance, 8).shifted(np.log(1.5))
    info = {"meta_info": {"spec_accept_length": other_pair.acceptance_length(4)}}
    for chain in CHAINS:
        model = agreement_model(shipped, read_summary_of(info, chain=4))
        known = other_pair.acceptance_length(chain)
        assert model.acceptance_length(chain) == pytest.approx(known, rel=0.04)


def read_summary_of(content, **options):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        return read_summary(save(Path(folder), content), **options)


def test_one_position_takes_its_runs_from_the_fit(tmp_path, shipped):
    text = vllm_text(histogram_of(shipped.acceptance, 1))
    fit = imported_fit(shipped, read_summary(save(tmp_path, text)))
    known = length_of(histogram_of(shipped.acceptance, 8))
    assert length_of(histogram_of(fit.acceptance, 8)) == pytest.approx(known, rel=0.03)


def simulated(fit: Fit, policy: str, *, max_batch: int = 1):
    arrival, output = np.zeros(40), np.full(40, 400)
    requests = pd.DataFrame(
        {"arrival": arrival, "prompt_tokens": np.full(40, 8), "output_tokens": output}
    )
    candidate = Candidate(Deployment(2), parse_policy(policy), max_batch)
    return simulate(requests, candidate, fit, serving=Serving(max_kv_tokens=10**6), seed=1)


def test_a_simulated_servers_counters_come_back_as_its_acceptance_lengths(tmp_path, machine_fit):
    accepted = simulated(machine_fit, "chain-3").rounds.column("num_accepted_tokens").astype(int)
    histogram = dict(enumerate(np.bincount(accepted, minlength=4).tolist()))
    summary = read_summary(save(tmp_path, vllm_text(histogram)))
    fit = imported_fit(machine_fit, summary)
    for policy in ("chain-1", "chain-3", "chain-5"):
        known = summarise(simulated(machine_fit, policy)).acceptance_length
        assert summarise(simulated(fit, policy)).acceptance_length == pytest.approx(known, rel=0.05)


def test_an_imported_fit_says_so_and_comes_back_from_its_file(tmp_path, shipped):
    summary = read_summary(save(tmp_path, vllm_text({0: 250, 1: 250, 2: 500})))
    fit = imported_fit(shipped, summary)
    assert fit.acceptance_origin == "imported from vLLM counters (file)"
    assert fit.costs == shipped.costs
    assert fit.errors["acceptance"] == pytest.approx(math.hypot(1.645 * summary.error, 0.02))
    parts = replace(shipped, parts_covariance=((1e-4, 0.0), (0.0, 1e-3)))
    assert imported_fit(parts, summary).parts_covariance == ()
    fit.save(tmp_path / "fit.json")
    again = Fit.load(tmp_path / "fit.json")
    assert again.acceptance_origin == fit.acceptance_origin
    assert again.acceptance.hit_rate(1) == fit.acceptance.hit_rate(1)


def test_further_ranks_share_the_misses_as_in_the_recordings(shipped):
    profile = RunModel((0.5,)).recordings(shipped.acceptance, seed=0)

    def second_of_misses(p):
        return (p.hit_rate(2) - p.hit_rate(1)) / (1 - p.hit_rate(1))

    assert second_of_misses(profile) == pytest.approx(
        second_of_misses(shipped.acceptance), abs=0.03
    )
