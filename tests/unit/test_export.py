from __future__ import annotations

import dataclasses
import functools
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import codesign
from codesign.acceptance import AcceptanceProfile
from codesign.artifacts import header, to_json, write_table
from codesign.candidate import Candidate, Interval, ScoredCandidate
from codesign.config import SLO, Serving, parse_deployment
from codesign.errors import InputError
from codesign.export import ENGINES, Checkpoints, export_plan
from codesign.export.lengths import Lengths, schedule_of
from codesign.export.models import EngineModel
from codesign.export.prediction import runs_as_is
from codesign.export.problem import Problem
from codesign.export.setup import BatchRange, Command, flags
from codesign.export.trtllm import to_yaml
from codesign.export.wishes import wish_of
from codesign.file_ref import FileRef
from codesign.fit import Fit
from codesign.fit.priced_model import parse_model
from codesign.fit.what_if import device_fit, what_if_fit
from codesign.planner.predict import simulate_outcome
from codesign.planner.screen import screen
from codesign.policy.cost import Calibration, RoundCost, StepTime
from codesign.policy.labels import FAMILIES
from codesign.policy.spec import KINDS
from codesign.policy.speculation import parse_policy

HEAD = Checkpoints(head="me/head")
SHAPES = Path(codesign.__file__).parent / "data" / "shapes"
EXAMPLES = [family.example for family in FAMILIES]


@pytest.fixture(scope="module")
def fit(gpu_fit):
    return gpu_fit


@pytest.fixture(scope="module")
def make(gpu_plan, tmp_path_factory):
    """A plan of one candidate or more for four short requests."""
    requests = {"prompts": [900, 400, 700, 100], "outputs": [20, 30, 10, 25]}
    return functools.partial(gpu_plan, tmp_path_factory.mktemp("plan"), **requests)


def scored(policy, split="", *, max_batch=16, batch=3.0, tpot=0.02) -> ScoredCandidate:
    spec = parse_policy(policy)
    deployment = parse_deployment(split or ("6+2" if spec.is_async else "8"))
    figures = {"mean_batch": batch, "tpot_mean": tpot, "goodput": 2.0, "acceptance_length": 2.4}
    predicted = {name: Interval(value, value, value) for name, value in figures.items()}
    return ScoredCandidate(
        Candidate(deployment, spec, max_batch), predicted, {}, "roofline", is_feasible=True
    )


_EXPORTED: dict[object, object] = {}


def exported(make, fit, policy, engine, split="", *, serving=None, slo=None, **changes):
    """An export of a plan of one candidate; made once where several tests look at the same."""
    changes = {"checkpoints": HEAD, **changes}
    serving, slo = serving or Serving(), slo or SLO()
    key = (id(fit), policy, engine, split, serving, slo, *sorted(changes.items()))
    if key not in _EXPORTED:
        plan = make(scored(policy, split), serving=serving, slo=slo)
        _EXPORTED[key] = export_plan(plan, fit, ENGINES[engine], **changes)
    return _EXPORTED[key]


def speculative(found) -> dict:
    """What each engine is told of speculation, in one dictionary."""
    arguments = found.configuration.arguments
    if "speculative_config" in arguments:
        return arguments["speculative_config"]
    return {name: v for name, v in arguments.items() if name.startswith("speculative_")}


def test_every_kind_of_policy_is_exported_in_these_tests():
    assert {parse_policy(example).kind for example in EXAMPLES} == set(KINDS)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("policy", EXAMPLES)
def test_every_family_becomes_commands_that_name_both_models_or_is_refused(
    make, fit, policy, engine
):
    spec = parse_policy(policy)
    if spec.kind == "eagle" and engine == "trtllm":
        with pytest.raises(InputError, match="EAGLE-3 heads only"):
            exported(make, fit, policy, engine)
        return
    found = exported(make, fit, policy, engine)
    [command] = found.configuration.commands
    everything = " ".join(command.argv) + "".join(found.configuration.files.values())
    draft = "me/head" if spec.kind == "eagle" else "meta-llama/Llama-3.2-1B-Instruct"
    assert "meta-llama/Llama-3.1-70B-Instruct" in everything
    assert (draft in everything) == spec.has_draft
    assert bool(speculative(found)) == spec.has_draft
    setup = found.nearest.setup
    assert setup.num_gpus <= 8
    assert (setup.depth > 0) == spec.has_draft
    assert setup.rows <= 1 + setup.width * setup.depth * setup.width
    own_gpus = [loss for loss in found.losses if "of its own" in loss.what]
    assert bool(own_gpus) == spec.is_async
    assert found.forecast is not None
    assert found.forecast.exported["tpot_mean"].value > 0
    to_json(found.configuration)


@pytest.mark.parametrize("policy", [p for p in EXAMPLES if p != "plain"])
def test_vllm_is_only_asked_for_chains(make, fit, policy):
    config = speculative(exported(make, fit, policy, "vllm"))
    assert config["num_speculative_tokens"] >= 1
    names = {"method", "model", "num_speculative_tokens", "draft_tensor_parallel_size",
             "num_speculative_tokens_per_batch_size"}  # fmt: skip
    assert set(config) <= names


@pytest.mark.parametrize(
    ("policy", "steps", "topk", "tokens"),
    [
        ("chain-3", 3, 1, 4),
        ("tree-8x4x2", 2, 4, 8),
        ("tree-4x1x2", 3, 1, 4),  # of four rows, a chain is as fast as any tree
        ("tree-8x1x4", 4, 2, 8),  # one leaf has siblings too, SGLang's only from two on
        ("tree-3x1x6", 2, 2, 3),
        ("tree-2x1x1", 1, 1, 2),  # a chain by another name
        ("tree-16x2x2", 2, 2, 7),  # 1 + 2 + 2 * 2 nodes are found
        ("tree-4x4x4", 3, 4, 4),  # no path of four rows is longer than three
        ("static-tree-3x2x1", 4, 3, 16),
        ("static-tree-1x1", 2, 1, 3),
        ("async-tree-8x4x2", 4, 4, 8),  # in turn one or two forwards more pay
        ("inflight-tree-8x4x2", 4, 4, 8),
        ("pipeinfer-4x2x3", 3, 1, 4),
        ("adaserve-4x2x32", 4, 2, 9),  # 32 rows for three requests; no level more than pays
        ("eagle-8x4x3@1", 3, 4, 8),
    ],
)
def test_sglang_steps_topk_and_tokens_are_depth_width_and_rows(
    make, fit, policy, steps, topk, tokens
):
    config = speculative(exported(make, fit, policy, "sglang"))
    assert config["speculative_num_steps"] == steps
    assert config["speculative_eagle_topk"] == topk
    assert config["speculative_num_draft_tokens"] == tokens
    method = "EAGLE3" if policy.startswith("eagle") else "STANDALONE"
    assert config["speculative_algorithm"] == method


@pytest.mark.parametrize("policy", ["async-tree-16x4x4", "batch-tree-16x4x4"])
def test_trees_that_were_drafted_otherwise_get_the_size_that_decodes_fastest(make, fit, policy):
    """Where each draft forward is waited for, the plan's size may be far too large."""
    costs = {
        label: dataclasses.replace(c, draft=c.draft.scaled(9.0)) for label, c in fit.costs.items()
    }
    slow = dataclasses.replace(fit, costs=costs)
    found = export_plan(make(scored(policy)), slow, ENGINES["sglang"])
    setup = found.nearest.setup
    assert (setup.depth, setup.width, setup.rows) < (4, 4, 16)
    [loss] = [
        loss for loss in found.losses if loss.what == "trees of 16 rows, 4 forwards of 4 leaves"
    ]
    assert loss.instead.endswith(
        "the fastest of up to as many rows by arithmetic at the plan's batch"
    )
    asked = export_plan(make(scored("tree-16x4x4")), slow, ENGINES["sglang"])  # serial: it is kept
    assert asked.nearest.candidate == asked.scored.candidate
    requests = make(asked.scored).requests()
    ours, theirs = (
        simulate_outcome(requests, c, slow, slo=SLO(), serving=Serving(), seed=0)[0]
        for c in (found.nearest.candidate, asked.nearest.candidate)
    )
    assert ours.figures["tpot_mean"] < 0.9 * theirs.figures["tpot_mean"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("policy", ["tree-5x1x4", "tree-8x1x4", "async-tree-8x1x4"])
def test_a_tree_of_one_leaf_a_forward_verifies_siblings_that_a_chain_loses(
    make, fit, policy, engine
):
    found = exported(make, fit, policy, engine)
    rows = parse_policy(policy).rows
    [loss] = [loss for loss in found.losses if loss.what.startswith(f"trees of {rows} rows")]
    assert loss.instead.startswith("trees" if engine == "sglang" else "chains")
    assert found.nearest.setup.is_tree == (engine == "sglang")
    assert found.nearest.candidate != found.scored.candidate
    assert not runs_as_is(found.scored.candidate, ENGINES[engine])


def test_what_stands_for_the_chain_of_an_eagle_head_is_said(make, fit):
    """The simulator has no head without siblings."""
    found = exported(make, fit, "eagle-4x1x3@0.9", "vllm")
    assert found.nearest.candidate == found.scored.candidate
    assert ("trees of 4 rows, 3 forwards deep", "chains of 3") in [
        (loss.what, loss.instead) for loss in found.losses
    ]
    assert "stands for the chain" in found.forecast.note
    assert exported(make, fit, "chain-3", "vllm").forecast.note == ""


def test_a_chain_is_what_it_is_on_all_engines_and_is_predicted_as_planned(make, fit):
    for engine in ENGINES:
        found = exported(make, fit, "chain-3", engine)
        assert found.nearest.candidate == found.scored.candidate
        assert found.forecast.slower == 0
    assert speculative(exported(make, fit, "chain-3", "vllm")) == {
        "method": "draft_model",
        "model": "meta-llama/Llama-3.2-1B-Instruct",
        "num_speculative_tokens": 3,
        "draft_tensor_parallel_size": 8,
    }
    assert speculative(exported(make, fit, "chain-3", "trtllm")) == {
        "decoding_type": "Draft_Target",
        "max_draft_len": 3,
        "speculative_model": "meta-llama/Llama-3.2-1B-Instruct",
    }


def test_trees_of_eagle_3_are_trees_on_tensorrt_llm_and_chains_on_vllm(make, fit):
    tree = speculative(exported(make, fit, "eagle-8x4x3@1", "trtllm"))
    assert tree["decoding_type"] == "Eagle3"
    assert (tree["max_draft_len"], tree["dynamic_tree_max_topK"]) == (3, 4)
    assert tree["max_total_draft_tokens"] == 7
    found = exported(make, fit, "eagle-8x4x3@1", "vllm")
    assert speculative(found)["method"] == "eagle3"
    assert found.nearest.candidate.speculation.label.startswith("eagle-")
    assert speculative(exported(make, fit, "eagle-8x4x3@0.9", "vllm"))["method"] == "eagle"


def test_a_length_by_batch_size_falls_and_covers_every_batch(make, fit):
    found = exported(make, fit, "specserve-5", "vllm")
    config = speculative(found)
    schedule = config["num_speculative_tokens_per_batch_size"]
    assert schedule[0][0] == 1
    assert schedule[-1][1] == 16
    assert all(a[1] + 1 == b[0] and a[2] > b[2] for a, b in pairwise(schedule))
    assert config["num_speculative_tokens"] == schedule[0][2]
    kept = speculative(exported(make, fit, "specserve-5", "trtllm"))
    assert kept["draft_len_schedule"] == {last: length for _, last, length in schedule}
    assert kept["max_draft_len"] == schedule[0][2]
    assert "by batch" not in str(exported(make, fit, "specserve-5", "sglang").configuration)


def test_lengths_by_batch_size_keep_vllm_from_the_runner_that_ignores_them(make, fit):
    """vllm issue 51510; the examples of its guide set the same variable."""
    for policy, wanted in (("specserve-5", "0"), ("chain-3", None)):
        (server,) = exported(make, fit, policy, "vllm").configuration.commands
        assert server.environment.get("VLLM_USE_V2_MODEL_RUNNER") == wanted


def test_rows_for_all_requests_bound_the_length_at_each_batch(make, fit):
    schedule = exported(make, fit, "adaserve-4x2x32", "vllm").nearest.setup.schedule
    assert schedule[0].length > schedule[-1].length
    assert all(part.last * (part.length + 1) <= 32 for part in schedule)


def test_no_round_of_a_schedule_takes_longer_than_the_tpot_target(make, fit):
    free = exported(make, fit, "specserve-5", "vllm").nearest.setup.schedule
    held = exported(make, fit, "specserve-5", "vllm", slo=SLO(tpot=0.0215)).nearest.setup.schedule
    without = exported(make, fit, "specserve-5-no-slo", "vllm", slo=SLO(tpot=0.0215))
    assert without.nearest.setup.schedule == free
    assert held == () or held[-1].length < free[-1].length


def test_a_tree_becomes_the_chain_that_decodes_fastest(make, tmp_path):
    """A target forward takes 10 ms, a draft forward 2, and 70 % of the tokens are accepted."""
    cost = RoundCost(
        target=StepTime.linear(alpha=0.0, gamma=0.0, delta=0.01),
        draft=StepTime.linear(alpha=0.0, gamma=0.0, delta=0.002),
        prefill=StepTime.linear(alpha=0.0, gamma=0.0, delta=0.01),
        draft_prefill=StepTime.linear(alpha=0.0, gamma=0.0, delta=0.001),
    )
    profile = AcceptanceProfile.independent([0.7], num_tokens=20_000, seed=1)
    costs = {"2": cost, "1+1": cost}
    made = Fit("llama-2-7b", "llama-2-7b", 0.0, costs, Calibration(), profile, {})
    made.save(tmp_path / "fit.json")
    plan = make(
        scored("async-tree-8x4x2", "1+1"),
        target=made.target,
        draft=made.draft,
        fit=FileRef.of(tmp_path / "fit.json"),
        serving=Serving(max_kv_tokens=10**6),
    )
    speeds = [sum(0.7**i for i in range(n + 1)) / (10 + 2 * n) for n in range(1, 9)]
    found = export_plan(plan, made, ENGINES["vllm"])
    assert found.nearest.setup.depth == 1 + int(np.argmax(speeds)) == 3
    assert any(loss.instead == "chains of 3" for loss in found.losses)


def test_a_tree_becomes_a_chain_even_where_plain_decoding_is_faster(make, fit):
    """Whoever exports a plan that speculates is told of the better one, not given another."""
    slow = dataclasses.replace(
        fit, costs={"8": dataclasses.replace(fit.costs["8"], draft=fit.costs["8"].prefill)}
    )
    found = exported(make, slow, "async-tree-8x4x2", "vllm")
    assert speculative(found)["num_speculative_tokens"] == 1


def test_a_length_never_rises_with_the_batch_even_if_the_arithmetic_says_so(make, fit):
    class Odd:
        def best(self, running, **_):
            return [4, 2, 3, 1][int(running) % 4]  # 2, 3, 1, 4, ... for 1, 2, 3, 4, ...

    plan = make(scored("specserve-5", max_batch=6))
    problem = Problem(
        plan, plan.chosen, fit, plan.requests(), ENGINES["vllm"], "draft", EngineModel("t"), None
    )
    wish = wish_of(plan.chosen.candidate.speculation, batch=3)
    found = schedule_of(problem, wish, Odd())
    assert found == (BatchRange(1, 2, 2), BatchRange(3, 6, 1))


def test_a_split_that_cannot_be_cut_loses_gpus_and_says_so(make, fit):
    found = exported(make, fit, "async-tree-8x4x2", "vllm", "5+1")
    assert found.nearest.setup.tensor_parallel == 4
    assert {("6 GPUs for each copy", "4"), ("all 6 GPUs work", "2 idle")} <= {
        (loss.what, loss.instead) for loss in found.losses
    }
    found = exported(make, fit, "chain-3", "vllm", "7")
    assert found.nearest.setup.tensor_parallel == 4


def test_copies_are_one_server_unless_the_lengths_would_be_ignored(make, fit):
    one = exported(make, fit, "chain-3", "vllm", "2x4")
    assert one.configuration.arguments["data_parallel_size"] == 2
    assert one.configuration.arguments["enable_prefix_caching"] is False
    assert "--no-enable-prefix-caching" in one.configuration.commands[0].argv
    assert len(one.configuration.commands) == 1
    two = exported(make, fit, "specserve-5", "vllm", "2x4")
    assert "data_parallel_size" not in two.configuration.arguments
    gpus = [c.environment["CUDA_VISIBLE_DEVICES"] for c in two.configuration.commands]
    assert gpus == ["0,1,2,3", "4,5,6,7"]
    routed = exported(
        make, fit, "chain-3", "sglang", "2x4", serving=Serving(routing="prefix-aware")
    )
    [command] = routed.configuration.commands
    assert "sglang_router.launch_server" in command.argv
    assert command.argv[-1] == "cache_aware"
    assert len(exported(make, fit, "chain-3", "trtllm", "2x4").configuration.commands) == 2


def test_no_engine_lets_requests_join_by_their_targets(make, fit, monkeypatch):
    ways = []

    def noted(*args, serving, **options):
        ways.append(serving.scheduling)
        return simulate_outcome(*args, serving=serving, **options)

    monkeypatch.setattr("codesign.export.prediction.simulate_outcome", noted)
    slo = SLO(ttft=0.05, tpot=0.05)
    plan = make(scored("chain-3"), serving=Serving(scheduling="slo"), slo=slo)
    found = export_plan(plan, fit, ENGINES["vllm"])
    told = [(loss.what, loss.instead) for loss in found.losses]
    assert ("requests join the batch so that targets are kept", "first come, first served") in told
    assert set(ways) == {"fcfs"}
    plan = make(scored("chain-3"), slo=slo)
    plain = export_plan(plan, fit, ENGINES["vllm"])
    assert not any("targets" in loss.what for loss in plain.losses)


@pytest.mark.parametrize(
    ("policy", "instead"),
    [
        ("chain-3", "the engine is told of no target"),
        ("specserve-5", "lengths by batch size that keep to the common target"),
    ],
)
def test_no_engine_is_told_what_requests_ask_for_themselves(make, fit, tmp_path, policy, instead):
    plan = make(scored(policy), slo=SLO(tpot=0.05))
    what = "requests have TPOT targets of their own (slo_tpot)"
    assert what not in [loss.what for loss in export_plan(plan, fit, ENGINES["vllm"]).losses]
    own = plan.requests().assign(slo_tpot=[0.02, np.nan, np.nan, 0.1])
    write_table(tmp_path / "own.parquet", own, header("trace", seed=None))
    plan = dataclasses.replace(plan, trace=FileRef.of(tmp_path / "own.parquet"))
    found = export_plan(plan, fit, ENGINES["vllm"])
    assert (what, instead) in [(loss.what, loss.instead) for loss in found.losses]
    found = export_plan(plan, fit, ENGINES["sglang"])  # which has no lengths by batch size
    assert (what, "the engine is told of no target") in [(x.what, x.instead) for x in found.losses]


def test_predictions_by_extrapolated_steps_are_said_to_be(make):
    fit = device_fit("h200", 8, "llama-3-70b:int4", "llama-3.2-1b:int4")
    words = "measured on up to 4 GPUs, other groups extrapolated by data sheets"
    for split, policy, said in (
        ("8", "chain-3", True), ("2x4", "chain-3", False), ("6+2", "async-tree-8x4x2", True),
    ):  # fmt: skip
        found = export_plan(
            make(scored(policy, split), target=fit.target, draft=fit.draft), fit, ENGINES["vllm"],
            checkpoints=Checkpoints("me/target", "me/draft"),
        )  # fmt: skip
        assert any(note.endswith(words) for note in found.notes) == said


@pytest.mark.parametrize("engine", ENGINES)
def test_a_pool_for_prompts_is_a_server_of_its_own_on_gpus_of_its_own(make, fit, engine):
    found = exported(make, fit, "chain-3", engine, "4/p4")
    roles = [command.role for command in found.configuration.commands]
    assert roles[:2] == ["prefill", "decode 1"]
    assert found.nearest.setup.decode_gpus == ((4, 5, 6, 7),)
    assert found.nearest.setup.num_gpus == 8
    if engine == "trtllm":
        assert set(found.configuration.files) == {
            "trtllm.yaml", "trtllm-prefill.yaml", "trtllm-front.yaml"
        }  # fmt: skip


def test_prompts_on_gpus_that_hold_no_copy_of_the_weights_are_refused(make, fit):
    with pytest.raises(InputError, match="no group of at most so many"):
        exported(make, fit, "chain-3", "vllm", "4/p3")


def test_gpus_that_the_copies_leave_over_join_the_group_for_prompts(make, fit):
    found = exported(make, fit, "async-tree-8x4x2", "vllm", "4+1/p3")
    assert found.nearest.setup.prefill_gpus == 4
    assert found.nearest.setup.decode_gpus == ((4, 5, 6, 7),)
    assert found.nearest.candidate.deployment.label == "4/p4"
    assert not any("idle" in loss.instead for loss in found.losses)


def test_flags_of_serving_are_the_engines_words_for_them(make, fit):
    serving = Serving(max_kv_tokens=32_000, prefill_chunk=512, prefix_cache=True, preemption=True)
    arguments = exported(make, fit, "chain-3", "vllm", serving=serving).configuration.arguments
    assert arguments["num_gpu_blocks_override"] == 2001  # of 16 rows, and its placeholder
    assert arguments["max_num_batched_tokens"] == 512 + 16 * 5  # rows and a draft slot each
    assert arguments["enable_prefix_caching"] is True
    assert arguments["max_model_len"] == 920
    found = exported(make, fit, "chain-3", "sglang", serving=serving)
    arguments = found.configuration.arguments
    assert arguments["max_total_tokens"] == 32_000
    assert arguments["chunked_prefill_size"] == 512
    assert arguments["disable_radix_cache"] is False
    assert any("chunks" in loss.what for loss in found.losses)
    plain = exported(make, fit, "plain", "sglang", serving=serving)
    assert plain.configuration.arguments["enable_mixed_chunk"] is True
    arguments = exported(make, fit, "chain-3", "trtllm", serving=serving).configuration.arguments
    assert arguments["kv_cache_config"] == {"enable_block_reuse": True, "max_tokens": 32_000}
    assert arguments["scheduler_config"]["capacity_scheduler_policy"] == "MAX_UTILIZATION"
    assert arguments["max_num_tokens"] == 512 + 16 * 4


@pytest.mark.parametrize("rows", [920, 921, 935, 936])
def test_blocks_of_vllm_hold_all_rows_beside_the_block_that_no_request_gets(make, fit, rows):
    serving = Serving(max_kv_tokens=rows + 10)
    arguments = exported(make, fit, "plain", "vllm", serving=serving).configuration.arguments
    usable = 16 * (arguments["num_gpu_blocks_override"] - 1)
    assert rows + 10 <= usable < rows + 10 + 16


@pytest.mark.parametrize("policy", ["plain", "chain-1", "chain-3", "tree-8x4x2"])
@pytest.mark.parametrize("outputs", [20, 1])
def test_sglang_admits_the_longest_request_and_does_not_cut_its_answer(
    gpu_plan, tmp_path, fit, policy, outputs
):
    """By the checks of its tokenizer manager and its scheduler."""
    plan = gpu_plan(tmp_path, scored(policy), prompts=[900, 40], outputs=[outputs, 30])
    arguments = export_plan(plan, fit, ENGINES["sglang"]).configuration.arguments
    context, rows = arguments["context_length"], arguments.get("speculative_num_draft_tokens", 0)
    assert 900 + rows < context
    assert 900 + rows + outputs <= context
    assert outputs <= (context - 1) - 900 - 1
    assert (context - 1) - 5 > 900
    assert context <= 900 + max(rows + outputs, outputs + 2, rows + 1, 7)


def long_plan(gpu_plan, folder, answer):
    """Llama-2-7b has 4,096 positions, 4,000 of which are the prompt's."""
    return gpu_plan(
        folder, scored("chain-3"), prompts=[4000], outputs=[answer], target="llama-2-7b",
        draft="llama-2-7b",
    )  # fmt: skip


def test_requests_beyond_the_targets_positions_are_refused(gpu_plan, tmp_path, fit):
    for engine in ENGINES.values():
        plan = long_plan(gpu_plan, tmp_path, 97)
        with pytest.raises(InputError, match=r"needs 4,097 positions.* has 4,096.*--max-prompt N"):
            export_plan(plan, fit, engine)
    plan = long_plan(gpu_plan, tmp_path, 96)
    found = export_plan(plan, fit, ENGINES["vllm"])
    assert found.configuration.arguments["max_model_len"] == 4096


def test_what_sglang_keeps_of_the_last_positions_is_said(gpu_plan, tmp_path, fit):
    found = export_plan(long_plan(gpu_plan, tmp_path, 96), fit, ENGINES["sglang"])
    assert found.configuration.arguments["context_length"] == 4096
    assert any(loss.instead.startswith("4 fewer") for loss in found.losses)
    found = export_plan(long_plan(gpu_plan, tmp_path, 92), fit, ENGINES["sglang"])
    assert found.configuration.arguments["context_length"] == 4096
    assert not any("fewer" in loss.instead for loss in found.losses)


def test_a_draft_with_too_few_positions_is_said(gpu_plan, tmp_path, fit):
    plan = gpu_plan(
        tmp_path, scored("chain-3"), prompts=[9000], outputs=[10], draft="llama-3-70b"
    )  # 8,192 positions
    assert any("8,192 positions" in note for note in export_plan(plan, fit, ENGINES["vllm"]).notes)
    with pytest.raises(InputError, match="8,192, and SGLang does not start"):
        export_plan(plan, fit, ENGINES["sglang"])
    plan = gpu_plan(tmp_path, scored("chain-3"), prompts=[9000], outputs=[10])
    assert not any("positions" in note for note in export_plan(plan, fit, ENGINES["vllm"]).notes)


def test_sglangs_context_is_within_a_drafts_positions(gpu_plan, tmp_path, fit):
    """SGLang gives the draft the same context, and does not start with one that has less."""
    plan = gpu_plan(
        tmp_path, scored("chain-3"), prompts=[8180], outputs=[10], draft="llama-3-70b"
    )  # 8,190 tokens and a round's rows
    found = export_plan(plan, fit, ENGINES["sglang"])
    assert found.configuration.arguments["context_length"] == 8192
    assert any("all that the models have" in loss.what for loss in found.losses)


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_lost_where_nothing_is(make, fit, engine):
    serving = Serving(prefill_chunk=512, preemption=engine != "trtllm")
    found = exported(make, fit, "plain", engine, serving=serving)
    assert found.losses == ()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_drafter_without_a_model_is_each_engines_own(make, fit, engine):
    plan = make(scored("chain-4"), draft="ngram")
    found = export_plan(plan, fit, ENGINES[engine])
    config = json.loads(to_json(speculative(found)))
    named = {"vllm": "ngram", "sglang": "NGRAM", "trtllm": "NGram"}[engine]
    assert named in config.values()
    assert "meta-llama/Llama-3.2-1B" not in str(config)


@pytest.mark.parametrize(
    ("policy", "changes", "words"),
    [
        ("eagle-8x4x3@1", {"checkpoints": None}, "--head NAME"),
        ("chain-3", {"tensor_parallel": 16}, "more than the plan has"),
        ("chain-3", {"tensor_parallel": 16}, "one copy .8.: --tensor-parallel 1 or 2 or 4 or 8$"),
        ("chain-3", {"tensor_parallel": 3}, "--tensor-parallel 1 or 2 or 4 or 8"),
    ],
)
def test_nonsense_is_refused_with_the_flag_that_mends_it(make, fit, policy, changes, words):
    with pytest.raises(InputError, match=words):
        exported(make, fit, policy, "vllm", **changes)


def test_a_checkpoint_in_place_of_a_stand_in_must_have_its_weights(make, fit):
    given = Checkpoints("meta-llama/Meta-Llama-3-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct")
    plan = make(
        scored("chain-3"), target="inflated-llama-3-70b", draft="inflated-draft-llama-3.2-1b"
    )
    found = export_plan(plan, fit, ENGINES["vllm"], checkpoints=given)
    assert sum("timed with int4 weights" in note for note in found.notes) == 2
    assert any(str(given.target) in note for note in found.notes)
    named = export_plan(make(scored("chain-3")), fit, ENGINES["vllm"], checkpoints=given)
    assert not any("timed with int4" in note for note in named.notes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": "my-model"}, "--target-model NAME"),
        ({"draft": "my-model"}, "--draft-model NAME"),
        ({"draft": ""}, "--draft-model NAME"),
        ({"draft": "smollm2-135m-draft"}, "borrows its target's embedding"),
        ({"draft": "qwen2-1.5b"}, "vocabularies differ"),
        ({"draft": "llama-2-7b"}, "vocabularies differ"),
        ({"target": "llama-3.1-70b:int4"}, "int4 weights"),
    ],
)
def test_models_that_an_engine_cannot_load_together_are_refused(
    make, fit, changes, words, tmp_path, monkeypatch
):
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path))
    plan = make(scored("chain-3"), **changes)
    with pytest.raises(InputError, match=words) as caught:
        export_plan(plan, fit, ENGINES["vllm"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "target", "draft", "given", "words"),
    [
        (
            "chain-3", "llama-3-70b:int4", "llama-3.2-1b:int4", None,
            "name a checkpoint of llama-3-70b with int4 weights, as the plan serves it; and of "
            "llama-3.2-1b with int4 weights, as the plan serves it; as Hugging Face names or "
            "folders: --target-model NAME --draft-model NAME",
        ),
        (
            "chain-3", "llama-3-70b:int4", "llama-3.2-1b:int4", "some/llama-awq",
            "name a checkpoint of llama-3.2-1b with int4 weights, as the plan serves it; as a "
            "Hugging Face name or a folder: --draft-model NAME",
        ),
        (
            "chain-3", "my-model", "smollm2-135m-draft", None,
            "name a checkpoint of the target 'my-model', whose place is unknown; and of a draft "
            "that other engines load (smollm2-135m-draft borrows its target's embedding: "
            "codesign_draft in its config.json); as Hugging Face names or folders: "
            "--target-model NAME --draft-model NAME",
        ),
        (
            "eagle-8x4x3@1", "llama-3-70b:int4", "", None,
            "name a checkpoint of llama-3-70b with int4 weights, as the plan serves it; and of a "
            "head that was trained for llama-3-70b:int4; as Hugging Face names or folders: "
            "--target-model NAME --head NAME",
        ),
        ("plain", "llama-3-70b:int4", "my-model", None, "--target-model NAME"),
    ],
)  # fmt: skip
def test_all_names_that_are_missing_are_asked_for_at_once(
    make, fit, policy, target, draft, given, words, tmp_path, monkeypatch
):
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path))
    plan = make(scored(policy), target=target, draft=draft)
    with pytest.raises(InputError) as caught:
        export_plan(plan, fit, ENGINES["vllm"], checkpoints=Checkpoints(given))
    assert str(caught.value).endswith(words)
    assert str(caught.value).count(" NAME") == words.count(" NAME")


def checkpoint(folder, **entries):
    """A folder with the configuration of Llama-3.1-70B."""
    folder.mkdir()
    config = json.loads((SHAPES / "llama-3.1-70b" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))
    return str(folder)


def test_a_checkpoint_that_is_not_quantised_as_planned_is_refused(make, fit, tmp_path):
    plan = make(scored("plain"), target="llama-3.1-70b:int4")
    plain = checkpoint(tmp_path / "plain")
    with pytest.raises(InputError, match=r"are not quantised.*--target-model NAME"):
        export_plan(plan, fit, ENGINES["vllm"], checkpoints=Checkpoints(plain))
    awq = checkpoint(tmp_path / "awq", quantization_config={"quant_method": "awq", "bits": 4})
    found = export_plan(plan, fit, ENGINES["vllm"], checkpoints=Checkpoints(awq))
    assert found.configuration.arguments["model"] == awq
    (tmp_path / "plain" / "hf_quant_config.json").write_text("{}")  # of TensorRT-LLM's quantiser
    export_plan(plan, fit, ENGINES["trtllm"], checkpoints=Checkpoints(plain))


def test_an_int4_vocabulary_matrix_is_named_as_what_no_other_engine_reads(make, fit, tmp_path):
    ours = checkpoint(tmp_path / "ours", codesign_int4_head=True)
    with pytest.raises(InputError, match="has an int4 vocabulary matrix"):
        export_plan(make(scored("plain")), fit, ENGINES["vllm"], checkpoints=Checkpoints(ours))


def test_a_pair_that_was_planned_with_two_vocabularies_is_mended_by_the_flag_that_is_named(
    make, fit
):
    plan = make(scored("chain-3"), draft="qwen2-1.5b")
    mended = Checkpoints(draft="me/llama-draft")
    found = export_plan(plan, fit, ENGINES["vllm"], checkpoints=mended)
    assert speculative(found)["model"] == "me/llama-draft"
    worse = Checkpoints(draft="Qwen/Qwen2-72B-Instruct")
    with pytest.raises(InputError, match="vocabularies differ"):
        export_plan(plan, fit, ENGINES["vllm"], checkpoints=worse)


def test_a_draft_whose_kv_rows_do_not_fit_is_refused(make, fit):
    plan = make(scored("chain-3"), serving=Serving(max_kv_tokens=900))
    with pytest.raises(InputError, match="900 KV rows, the longest request needs 920"):
        export_plan(plan, fit, ENGINES["vllm"])
    plan = make(scored("chain-3", "1"))
    with pytest.raises(InputError, match="do not fit 1 GPU"):
        export_plan(plan, fit, ENGINES["vllm"])


def test_a_target_that_does_not_fit_alone_is_not_told_to_leave_out_its_draft(make, fit):
    plan = make(scored("plain"), serving=Serving(max_kv_tokens=900))
    with pytest.raises(InputError, match=r"the target on .* 900 KV .* Plan again with more GPUs"):
        export_plan(plan, fit, ENGINES["vllm"])


def test_a_measured_fit_says_nothing_of_the_memory_of_sizes_that_it_lacks(make, fit):
    plan = make(scored("chain-3", "1"))
    found = export_plan(plan, dataclasses.replace(fit, origin="fitted"), ENGINES["vllm"])
    assert found.nearest.setup.tensor_parallel == 1


def test_paddings_of_one_vocabulary_are_no_different_ones(make):
    fit = what_if_fit("h200", 4, "qwen2-72b", "qwen2-1.5b")
    plan = make(scored("chain-3", "4"), target=fit.target, draft=fit.draft)
    found = export_plan(plan, fit, ENGINES["vllm"])
    assert speculative(found)["use_heterogeneous_vocab"] is True
    assert any("padded" in loss.what for loss in found.losses)
    assert any("vocabulary" in note for note in export_plan(plan, fit, ENGINES["trtllm"]).notes)


def test_a_group_must_divide_heads_key_value_heads_and_feed_forward():
    """Qwen2-1.5B: 12 heads, 2 of keys and values, 8,960 channels."""
    draft = EngineModel("Qwen/Qwen2-1.5B", parse_model("qwen2-1.5b").shape)
    assert [n for n in range(1, 13) if draft.runs_on(n)] == [1, 2, 4]
    assert [n for n in range(1, 9) if EngineModel("nobody/knows").runs_on(n)] == [1, 2, 4, 8]


def test_a_plan_of_cpu_threads_becomes_one_gpu_without_the_cpus_memory(make, machine_fit, tmp_path):
    machine_fit.save(tmp_path / "fit.json")
    plan = make(
        scored("async-tree-4x4x4", "1+1", max_batch=1),
        target=machine_fit.target,
        draft=machine_fit.draft,
        fit=FileRef.of(tmp_path / "fit.json"),
        serving=Serving(max_kv_tokens=4096),
    )
    given = Checkpoints(draft="me/draft")
    found = export_plan(plan, machine_fit, ENGINES["vllm"], checkpoints=given)
    assert found.nearest.setup.tensor_parallel == 1
    assert "num_gpu_blocks_override" not in found.configuration.arguments
    assert any("threads of a CPU" in loss.what for loss in found.losses)
    assert found.nearest.candidate.deployment.label == "2"
    assert found.forecast.slower is not None


def test_without_step_times_for_the_joined_group_the_plans_own_length_is_expected(
    make, machine_fit, tmp_path
):
    split = dataclasses.replace(machine_fit, costs={"1+1": machine_fit.costs["1+1"]})
    split.save(tmp_path / "fit.json")
    plan = make(
        scored("async-tree-4x4x4", "1+1"),
        target=split.target,
        draft=split.draft,
        fit=FileRef.of(tmp_path / "fit.json"),
        serving=Serving(max_kv_tokens=4096),
    )
    given = Checkpoints(draft="me/draft")
    found = export_plan(plan, split, ENGINES["vllm"], checkpoints=given)
    assert found.forecast is None
    assert found.nearest.setup.depth == 2  # of 2.4 tokens a round


def test_a_candidate_that_runs_as_it_is_and_serves_better_is_named(make, fit):
    tree = scored("async-tree-8x4x2", tpot=0.02)
    fast = dataclasses.replace(scored("chain-3"), predicted=scored("chain-3", tpot=1e-4).predicted)
    slow = scored("chain-2", tpot=1.0)
    engine = ENGINES["vllm"]
    plan = make(tree, fast, objective="latency")
    assert export_plan(plan, fit, engine).better == fast.label
    as_good = export_plan(plan, fit, engine).forecast.exported["tpot_mean"].value * 0.995
    plan = make(tree, scored("chain-3", tpot=as_good), objective="latency")
    assert export_plan(plan, fit, engine).better == ""
    large = dataclasses.replace(fast, candidate=scored("chain-3", "2x8").candidate)
    assert export_plan(make(tree, large, objective="latency"), fit, engine).better == ""
    plan = make(tree, slow, objective="latency")
    assert export_plan(plan, fit, engine).better == ""
    uncut = dataclasses.replace(scored("chain-3", "7"), predicted=fast.predicted)
    assert export_plan(make(tree, uncut, objective="latency"), fit, engine).better == ""


@pytest.mark.parametrize(
    ("engine", "policy", "split"),
    [
        ("vllm", "tree-8x1x4", "8"),  # becomes a chain
        ("vllm", "tree-2x1x1", "8"),  # becomes another name, whose figures the plan lacks
        ("sglang", "tree-8x1x4", "8"),
        ("sglang", "tree-16x2x2", "8"),  # more rows than are found
        ("vllm", "chain-3", "4/p3"),  # no such group for prompts
    ],
)
def test_a_candidate_whose_own_export_is_another_is_not_named(make, fit, engine, policy, split):
    fast = dataclasses.replace(
        scored(policy, split), predicted=scored("plain", tpot=1e-4).predicted
    )
    plan = make(scored("async-tree-8x4x2"), fast, objective="latency")
    assert export_plan(plan, fit, ENGINES[engine]).better == ""


@pytest.mark.parametrize(
    ("scheduling", "num_seeds", "is_named"),
    [("fcfs", 1, True), ("slo", 1, False), ("fcfs", 2, False)],
)
def test_a_candidate_is_measured_as_the_export_is(make, fit, scheduling, num_seeds, is_named):
    """What a plan says of another way to join, or of other seeds, is no word on the export."""
    said = scored("plain", tpot=1e-4)  # it is slower than any chain
    plan = make(
        *(scored("async-tree-8x4x2"), said),
        objective="latency", num_seeds=num_seeds, serving=Serving(scheduling=scheduling),
    )  # fmt: skip
    assert (export_plan(plan, fit, ENGINES["vllm"]).better == said.label) == is_named


@pytest.mark.parametrize("slo", [SLO(), SLO(tpot=1e-6)])
def test_one_that_serves_as_many_is_named_if_its_requests_are_done_sooner(make, fit, slo):
    """Goodput says nothing where the machine keeps up with all, or where nobody meets the SLO."""
    tree = scored("async-tree-8x4x2")
    served = export_plan(make(tree, slo=slo), fit, ENGINES["vllm"]).forecast.exported
    assert (served["goodput"].value == 0.0) == (slo.tpot is not None)

    def other(times: float) -> ScoredCandidate:
        value = times * served["latency_mean"].value
        predicted = {**served, "latency_mean": Interval(value, value, value)}
        return dataclasses.replace(scored("chain-3"), predicted=predicted)

    for times, named in ((0.9, "chain-3 on 8, batch 16"), (1.1, "")):
        plan = make(tree, other(times), slo=slo)
        assert export_plan(plan, fit, ENGINES["vllm"]).better == named


def test_another_candidate_is_found_by_its_label_and_its_models_by_their_flags(make, fit):
    plan = make(scored("async-tree-8x4x2"), scored("chain-2"))
    found = export_plan(
        plan, fit, ENGINES["vllm"], candidate="chain", checkpoints=Checkpoints("a/b", "c/d")
    )
    assert found.configuration.commands[0].argv[:3] == ("vllm", "serve", "a/b")
    assert speculative(found)["model"] == "c/d"
    assert speculative(found)["num_speculative_tokens"] == 2


def test_words_of_a_command_are_quoted_and_its_flags_stand_on_lines_of_their_own():
    words = flags({"a_b": True, "c": False, "d": {"e": 1}, "f": "g h"}, negated=True)
    assert words == ["--a-b", "--no-c", "--d", '{"e": 1}', "--f", "g h"]
    assert "--c" not in flags({"c": False})
    shell = Command("server", ("run", *words), {"X": "1"}).shell
    assert shell.splitlines()[0] == "X=1 run \\"
    assert "--f 'g h'" in shell
    assert len(shell.splitlines()) == 5


def test_yaml_reads_back_as_what_was_written():
    yaml = pytest.importorskip("yaml")
    values = {
        "a": True,
        "b": {"c": {4: 2, 8: 0}, "d": 'x "y" \\ #z'},
        "urls": ["localhost:8001"],
        "e": 3,
    }
    assert yaml.safe_load(to_yaml(values)) == values


def test_arithmetic_of_a_schedule_is_that_of_the_screen(make, fit):
    """The length at each batch is the one that the planner's own arithmetic ranks first."""
    plan = make(scored("specserve-5"))
    requests = plan.requests()
    problem = Problem(
        plan, plan.chosen, fit, requests, ENGINES["vllm"], "draft", EngineModel("t"), None
    )
    seconds = Lengths(problem, 8, 5).seconds(1.0)
    chains = [
        Candidate(parse_deployment("8"), parse_policy(f"chain-{n}" if n else "plain"), 1)
        for n in range(6)
    ]
    tpot = screen(chains, requests, fit, slo=SLO(), serving=Serving()).tpot
    assert np.argsort(seconds).tolist() == np.argsort(tpot).tolist()
