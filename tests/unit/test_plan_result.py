"""What ``codesign plan`` says in words."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace

import pytest

from codesign.candidate import Candidate, Interval, ScoredCandidate
from codesign.cli import main
from codesign.cli.plan import _kept_text
from codesign.cli.plan_economics import pays_text
from codesign.cli.plan_result import (
    _attainment_note,
    _doubts,
    _family_plans,
    _rows,
    _seeds_note,
    describe,
    next_command,
    ties_text,
)
from codesign.config import SLO, parse_deployment
from codesign.plan import Doubt, Economics
from codesign.policy.speculation import parse_policy

ECONOMICS = Economics(
    null_plan="plain on 2, batch 1",
    speculative="chain-3 on 2, batch 1",
    gain=1.5,
    crossover=None,
    largest_batch=1,
    batch=1.0,
    break_even_length=1.4,
    acceptance_length=2.1,
    break_even_rate=0.35,
    oracle_gain=3.0,
)


@pytest.mark.parametrize(
    ("free", "lost", "words"),
    [
        (30, 0, "30 simulations kept in p.jsonl: with --resume another SLO, objective or choice"),
        (7, 0, "30 simulations kept in p.jsonl, 7 of them for any SLO: with --resume another obj"),
        (0, 0, "30 simulations kept in p.jsonl, for this SLO alone: with --resume another obj"),
        (30, 1200, "30 simulations kept in p.jsonl, 1,200 more could not be"),
    ],
)
def test_another_slo_is_only_promised_where_its_simulations_are_kept(free, lost, words):
    class Cache(list):
        num_of_any_slo = free
        num_lost = lost

    assert _kept_text(Cache(range(30)), Path("p.jsonl")).startswith(words)


@pytest.mark.parametrize(
    ("policy", "deployment", "words"),
    [
        ("chain-1", "2", "chains of 1 draft token; 2 workers, target and draft in turn;"),
        ("plain", "2/p1", "no draft; 2 workers; prompts on 1 worker of its own;"),
        ("async-batch-tree-16x2x8", "3+1", "up to 16 rows a request, up to 8 x 2 leaves drafted;"),
        ("async-tree-8x4x2", "2x3+1", "2 replicas, each: target on 3 and draft on 1 worker, at"),
    ],
)
def test_a_candidate_is_told_with_its_own_numbers(policy, deployment, words):
    candidate = Candidate(parse_deployment(deployment), parse_policy(policy), 1)
    assert words in describe(candidate)
    assert "at most 1 request at once" in describe(candidate)


@pytest.mark.parametrize(
    ("policy", "deployment", "verb", "rest"),
    [
        ("plain", "2", "run", []),
        ("eagle-8x4x2", "2", "export", ["--to", "vllm", "--head", "NAME"]),
    ],
)
def test_the_next_command_can_be_pasted_whatever_the_file_is_called(
    policy, deployment, verb, rest, machine_fit
):
    candidate = Candidate(parse_deployment(deployment), parse_policy(policy), 1)
    chosen = SimpleNamespace(candidate=candidate)
    plan = SimpleNamespace(chosen=chosen, target="smollm2-135m")
    command = next_command(plan, Path("my plans/it's.json"), machine_fit)
    words = shlex.split(command, comments=True)
    assert words == ["codesign", verb, "--plan", "my plans/it's.json", *rest]


@pytest.mark.parametrize(
    ("target", "rest"),
    [("llama-3-70b:int4", " --target FOLDER --draft FOLDER"), ("smollm2-135m", "")],
)
def test_a_plan_for_gpus_by_data_sheet_asks_for_checkpoints_to_run(target, rest, gpu_fit):
    candidate = Candidate(parse_deployment("2"), parse_policy("plain"), 1)
    plan = SimpleNamespace(chosen=SimpleNamespace(candidate=candidate), target=target)
    command = next_command(plan, Path("plan.json"), gpu_fit)
    assert command == f"codesign run --plan plan.json --device cuda{rest}"


def test_a_plan_runs_on_what_its_fit_was_measured_on(machine_fit):
    candidate = Candidate(parse_deployment("2"), parse_policy("plain"), 1)
    plan = SimpleNamespace(chosen=SimpleNamespace(candidate=candidate), target="smollm2-135m")
    for device in ("cuda", "cpu-ranks"):
        fit = dataclasses.replace(machine_fit, device=device)
        command = next_command(plan, Path("plan.json"), fit)
        assert command == f"codesign run --plan plan.json --device {device}"


@pytest.mark.parametrize(
    ("policy", "engine"),
    [("tree-8x4x4", "sglang"), ("specserve-4", "trtllm")],  # trees; a length by batch size
)
def test_what_the_engine_cannot_run_is_exported_to_who_loses_least_of_it(
    policy, engine, gpu_fit, gpu_plan, tmp_path
):
    candidate = Candidate(parse_deployment("5/p3"), parse_policy(policy), 24)
    running = {"mean_batch": Interval(8.0, 8.0, 8.0)}
    scored = ScoredCandidate(candidate, running, {}, "roofline", True)
    plan = gpu_plan(tmp_path, scored, prompts=[100, 200], outputs=[20, 30])
    assert next_command(plan, Path("plan.json"), gpu_fit) == (
        f"codesign export --plan plan.json --to {engine}  # the engine here has no workers for "
        "prompts alone: plan with --runnable"
    )


def test_where_nobody_knows_checkpoints_any_engine_is_named(gpu_fit, gpu_plan, tmp_path):
    candidate = Candidate(parse_deployment("4/p4"), parse_policy("plain"), 24)
    scored = ScoredCandidate(candidate, {}, {}, "roofline", True)
    plan = gpu_plan(tmp_path, scored, prompts=[9], outputs=[2], target="llama-3-70b:int4", draft="")
    assert "--to vllm" in next_command(plan, Path("plan.json"), gpu_fit)


def test_the_second_that_is_told_of_is_in_the_table_and_no_twin_of_the_best():
    places = ("chain-3", 8), ("chain-3", 4), ("chain-2", 8), ("plain", 8)
    split = parse_deployment("2")
    scored = [ScoredCandidate(Candidate(split, parse_policy(policy), batch), {}, {}, "fitted", True)
              for policy, batch in places]  # fmt: skip
    plan = SimpleNamespace(scored=scored, runner_up="chain-2 on 2, batch 8: 3% more mean latency")
    labels = ["chain-3 on 2, batch 8", "chain-2 on 2, batch 8", "plain on 2, batch 8"]
    assert [each.label for each in _family_plans(plan)] == labels


def told(economics: Economics, missing: Collection[str] = (), error: float = 0.1) -> str:
    """What is said of a plan with these economics, where some plans miss the SLO."""
    tpot = Interval(0.02, 0.02 * (1 - error), 0.02 * (1 + error))
    scored = [
        SimpleNamespace(
            label=label, is_feasible=label not in missing, predicted={"tpot_mean": tpot}
        )
        for label in {economics.null_plan, economics.speculative, *missing}
    ]
    return pays_text(SimpleNamespace(economics=economics, scored=scored))


def test_where_speculation_pays_is_said_without_a_plural_of_one():
    start = "chain-3 on 2 pays "
    assert told(ECONOMICS).startswith(
        f"{start}up to 1 running request, the most that can run at any batch limit. "
    )
    some = dataclasses.replace(ECONOMICS, crossover=12, largest_batch=64)
    assert told(some).startswith(f"{start}up to 12 running requests, not above. ")
    assert "With 1 running on each, prompts not counted, it decodes 1.5 times faster" in told(some)
    none = dataclasses.replace(ECONOMICS, gain=0.7, crossover=0)
    assert told(none).startswith(f"{start}at no load. ")


@pytest.mark.parametrize(
    ("gain", "error", "start", "off"),
    [
        (1.5, 0.3, "chain-3 on 2 pays up to 12 ", ""),
        (1.24, 0.3, "chain-3 on 2 may pay up to 12 ", "the prediction may be off (30%)"),
        (1.02, 0.3, "chain-3 on 2 hardly pays, up to 12 ", "may be off (30%)"),
        (1.02, 0.01, "chain-3 on 2 hardly pays, up to 12 ", ""),
        (0.9, 0.3, "chain-3 on 2 pays up to 12 ", "may be off (30%)"),
    ],
)
def test_a_gain_is_worded_by_its_size_and_by_what_the_prediction_may_be_off(
    gain, error, start, off
):
    text = told(dataclasses.replace(ECONOMICS, gain=gain, crossover=12), error=error)
    assert text.startswith(start)
    assert ("may be off" in text) == bool(off)
    assert off in text


def test_a_shorter_draft_that_pays_at_more_load_is_named_beside_the_best():
    other = dataclasses.replace(
        ECONOMICS, crossover=2, lasting="chain-1 on 2, batch 8", lasting_crossover=7
    )
    text = told(other)
    assert "up to 2 running requests, not above; chain-1 on 2 up to 7. " in text
    assert "prompts not counted, chain-3 on 2 decodes" in text


def test_speculation_that_is_held_against_a_plan_that_misses_the_slo_says_so():
    text = told(ECONOMICS, {"plain on 2, batch 1"})
    assert "times faster than plain on 2 (misses the SLO); it breaks even" in text
    assert text.count("misses the SLO") == 1
    text = told(ECONOMICS, {"chain-3 on 2, batch 1", "chain-2 on 2, batch 1"})
    assert text.startswith("chain-3 on 2 (misses the SLO) pays up to 1 running request")
    assert "misses" not in told(ECONOMICS)
    assert pays_text(SimpleNamespace(economics=None, scored=[])) == ""


@pytest.mark.parametrize(
    ("command", "flags"), [("plan", ["--policies", "plain"]), ("simulate", ["--policy", "plain"])]
)
def test_without_targets_nothing_is_shown_of_an_slo(command, flags, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    trace = ["--trace", "conv-twin", "--rate-scale", "0.1", "--max-requests", "5"]
    shown = []
    for slo in ([], ["--slo-tpot-ms", "1000"]):
        assert main([command, *trace, *flags, *slo, "--quiet"]) == 0
        shown.append(" ".join(capsys.readouterr().out.split()))
    without, within = shown
    assert "SLO" not in without.replace("no SLO set", "").replace("no SLO was set", "")
    assert "within every target" not in without
    assert "SLO" in within


def test_plans_of_fewer_simulations_than_the_best_have_a_star_and_it_is_explained():
    def scored(policy: str, num_seeds: int) -> ScoredCandidate:
        candidate = Candidate(parse_deployment("2"), parse_policy(policy), 1)
        return ScoredCandidate(candidate, {}, {}, "fitted", True, num_seeds=num_seeds)

    mixed = [scored("chain-3", 3), scored("plain", 1)]
    assert [row[0] for row in _rows(mixed)] == ["chain-3 on 2, batch 1", "plain on 2, batch 1 *"]
    assert _seeds_note(mixed) == ["* 1 simulation; the others are means of 3"]
    alike = [scored("chain-3", 3), scored("plain", 3)]
    assert [row[0] for row in _rows(alike)] == ["chain-3 on 2, batch 1", "plain on 2, batch 1"]
    assert _seeds_note(alike) == []


def test_a_plan_that_meets_each_target_with_fewer_requests_within_all_is_explained():
    def scored(attained: float, *, is_feasible: bool = True) -> ScoredCandidate:
        candidate = Candidate(parse_deployment("2"), parse_policy("plain"), 1)
        figures = {"slo_attainment": Interval(attained, attained, attained)}
        return ScoredCandidate(candidate, figures, {}, "fitted", is_feasible=is_feasible)

    slo = SLO(ttft=1.0, tpot=0.05)
    line, _ = _attainment_note([scored(0.95), scored(0.89)], slo)
    assert line.startswith("in SLO    requests within every target at once; p90 is asked of each")
    assert _attainment_note([scored(0.95), scored(0.89, is_feasible=False)], slo) == []
    assert _attainment_note([scored(0.9)], slo) == []
    assert _attainment_note([scored(0.5)], SLO()) == []


def test_a_doubt_says_what_would_have_to_be_off_and_what_would_be_best_then(gpu_fit, machine_fit):
    plan = SimpleNamespace(
        doubts=(
            Doubt("draft step of 3+1", -0.2, "tree-8x4x4 on 3+1, batch 8", 0.12, "goodput"),
            Doubt("tokens per round", 0.05, "plain on 4, batch 8", 0.03),
        ),
    )
    text = _doubts(plan, gpu_fit)
    assert text.startswith(
        "if the draft steps on 3+1 are 20% below the fit, tree-8x4x4 on 3+1, batch 8 would be 12% "
        "better in goodput; if tokens per round are 5% above the fit, plain on 4, batch 8 would be "
        "3% better"
    )
    assert text.endswith(
        "to find out, on such a machine: codesign profile --target FOLDER --draft FOLDER "
        "--device cuda --out profile"
    )
    assert _doubts(plan, machine_fit).endswith("to find out: codesign profile --out profile")


def test_ties_name_each_policy_and_split_once():
    labels = [
        "chain-2 on 2, batch 4",
        "chain-2 on 2, batch 8",
        "chain-3 on 2, batch 8",
        "plain on 2, batch 1",
    ]
    plan = SimpleNamespace(
        chosen=SimpleNamespace(label="chain-3 on 2, batch 4"), ties=tuple(labels)
    )
    text = ties_text(plan)  # type: ignore[arg-type]
    assert text == "chain-2 on 2, batch 4; plain on 2, batch 1; the best with other batch limits"
