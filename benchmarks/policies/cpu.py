"""The small pair on this CPU: the same comparison, measured, beside what the simulator predicts.

    codesign profile --out profile && codesign fit profile --out fit.json
    python -m benchmarks.compare_policies cpu --fit fit.json

Six requests of six kinds, two at a time, greedy; the policies take turns, and of each request the
shorter latency of two passes counts: a slow spell of the host seldom meets both. Every policy
must emit plain decoding's tokens. The fit's step times steer the policies and are what the
simulator predicts with. On another processor the ranking is another, so the fit
should be this machine's; without --fit it is the one that ships with the package.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from math import inf
from pathlib import Path
from typing import Any

os.environ.pop("OMP_NUM_THREADS", None)  # before torch is imported

import numpy as np
import pandas as pd

from benchmarks.policies.run_figures import figures_of
from codesign.candidate import Candidate
from codesign.config import SLO, Serving, parse_deployment
from codesign.engine import DraftSource, PolicySetup, run_candidate
from codesign.engine.model import Decoder, load_decoder
from codesign.fit import Fit
from codesign.fit.shipped import DEFAULT_FIT, machine_of
from codesign.models import DEFAULT_TARGET, DRAFTS, resolve_model
from codesign.models.tokenizer import Tokenizer
from codesign.policy.speculation import parse_policy
from codesign.prompts import CATEGORIES, BoundRequest, bind_prompts, encode_user_turn, load_prompts
from codesign.sim import simulate

WAYS = (
    "plain on 2",
    "chain-1 on 2",
    "chain-3 on 2",
    "chain-5 on 2",
    "threshold-8@0.4 on 2",
    "specserve-8 on 2",
    "tree-8x4x4 on 2",
    "batch-tree-16x2x8 on 2",
    "async-tree-8x4x4 on 1+1",
    "async-batch-tree-16x2x8 on 1+1",
)
REQUESTS, BATCH, SEED, PASSES = 6, 2, 1, 2
SIMULATED_SEEDS = range(1, 7)  # of acceptance: six requests are few
CLOSE = 1.1  # simulated speedups whose ratio is below this are not ranked
OUTPUTS = [24 + 8 * (5 * i % 7) for i in range(REQUESTS)]
MAX_KV = 8192


def measure(store: Any, fit_path: Path | None = None) -> None:
    """Serve the requests with each policy."""
    fit_path = fit_path or DEFAULT_FIT
    fit = Fit.load(fit_path)
    target_dir = resolve_model(DEFAULT_TARGET)
    target = load_decoder(target_dir)
    draft = DraftSource(resolve_model(DRAFTS[DEFAULT_TARGET]), target_dir)
    local = draft.load(target)
    requests = _requests(target_dir)
    plain: dict[int, list[int]] = {}
    if any(f"cpu/{way}" not in store.results for way in WAYS[1:]):
        plain = _outputs(requests, target)
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for way in [way for way in WAYS if f"cpu/{way}" not in store.results] * PASSES:
        found[way].append(_run(requests, fit, way, target, draft, local, plain))
    for way, runs in found.items():
        figures = _quickest(runs) | {
            "predicted_speedup": _predicted(requests, fit, _candidate(way))
        }
        store.get(f"cpu/{way}", lambda f=figures: f)
    store.get("cpu/about", lambda: {"text": _about(store.results, machine_of(fit_path))})


def _quickest(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run that took least, with the shortest latency that each request had in any of them."""
    latencies = np.min([run.pop("latencies") for run in runs], axis=0)
    best = min(runs, key=lambda run: run["latency_mean"])
    return best | {"latency_mean": float(latencies.mean())}


def _requests(target_dir: Path) -> list[BoundRequest]:
    frame = pd.DataFrame(
        {
            "arrival": 0.0,
            "prompt_tokens": 64,
            "output_tokens": OUTPUTS,
            "category": [CATEGORIES[i % len(CATEGORIES)] for i in range(REQUESTS)],
        }
    )
    pool = [prompt for prompt in load_prompts("run") if len(prompt.text) < 1200]
    return bind_prompts(frame, pool, encode_user_turn(Tokenizer(target_dir)), seed=SEED)


def _outputs(requests: list[BoundRequest], target: Decoder) -> dict[int, list[int]]:
    return run_candidate(
        _candidate(WAYS[0]), requests, target=target, draft=None, max_kv_tokens=MAX_KV
    ).outputs


def _run(
    requests: list[BoundRequest],
    fit: Fit,
    way: str,
    target: Decoder,
    draft: DraftSource,
    local: Decoder | None,
    plain: dict[int, list[int]],
) -> dict[str, Any]:
    candidate = _candidate(way)
    run = run_candidate(
        candidate,
        requests,
        target=target,
        draft=draft,
        setup=PolicySetup(
            candidate.speculation,
            fit.costs[candidate.deployment.label],
            fit.calibration,
            confidence=fit.acceptance.hit_rate(1),
        ),
        local_draft=local if candidate.deployment.draft_workers == 0 else None,
        max_kv_tokens=MAX_KV,
    )
    figures = figures_of(run.records, SLO())
    served = sorted(run.records.requests, key=lambda request: request.request_id)
    figures["latencies"] = [(request.finish or inf) - request.arrival for request in served]
    if plain:
        same = sum(run.outputs[number] == tokens for number, tokens in plain.items())
        print(f"{way}: {same} of {len(plain)} outputs as plain decoding's", file=sys.stderr)
        figures["same_outputs"] = same
    return figures


def _candidate(way: str) -> Candidate:
    policy, _, deployment = way.partition(" on ")
    return Candidate(parse_deployment(deployment), parse_policy(policy), BATCH)


def _predicted(requests: list[BoundRequest], fit: Fit, candidate: Candidate) -> float:
    """Mean latency of plain decoding over the candidate's, simulated."""
    frame = pd.DataFrame(
        {
            "arrival": [r.arrival for r in requests],
            "prompt_tokens": [r.prompt_tokens for r in requests],
            "output_tokens": [r.max_new_tokens for r in requests],
            "category": [r.category for r in requests],
        }
    )
    latency = [
        np.mean([_latency(frame, one, fit, seed) for seed in SIMULATED_SEEDS])
        for one in (_candidate(WAYS[0]), candidate)
    ]
    return float(latency[0] / latency[1])


def _latency(frame: pd.DataFrame, candidate: Candidate, fit: Fit, seed: int) -> float:
    """Simulated mean latency, s."""
    serving = Serving(max_kv_tokens=MAX_KV)
    records = simulate(frame, candidate, fit, serving=serving, slo=SLO(), seed=seed)
    return float(np.mean([r.finish - r.arrival for r in records.requests if r.finish]))


def _about(results: dict[str, Any], machine: str) -> str:
    ways = [way for way in WAYS if f"cpu/{way}" in results]

    def order(name: str) -> list[str]:
        return sorted(ways, key=lambda way: -results[f"cpu/{way}"][name])

    base = results["cpu/plain on 2"]["latency_mean"]
    for way in ways:
        results[f"cpu/{way}"]["speedup"] = base / results[f"cpu/{way}"]["latency_mean"]
    agree = np.corrcoef(
        [order("speedup").index(way) for way in ways],
        [order("predicted_speedup").index(way) for way in ways],
    )[0, 1]
    alike, apart = _pairs_alike([results[f"cpu/{way}"] for way in ways])
    same = all(results[f"cpu/{w}"].get("same_outputs", REQUESTS) == REQUESTS for w in ways)
    return (
        f"{REQUESTS} requests of six kinds, answers of {min(OUTPUTS)} to {max(OUTPUTS)} tokens, "
        f"{BATCH} at a time, of each request the shorter latency of {PASSES} passes, "
        "smollm2-135m with its shipped draft on "
        f"two cores (load average {os.getloadavg()[2]:.1f}); step times from {machine}; simulated: "
        f"the mean of {len(SIMULATED_SEEDS)} acceptance seeds. Outputs "
        f"{'are' if same else 'ARE NOT ALL'} plain decoding's, token for token. "
        f"Of {apart} pairs of policies whose simulated speedups differ by more than "
        f"{CLOSE - 1:.0%}, {alike} are in the same order as measured. Rank correlation of all, "
        f"close ones included: {agree:.2f}. Fastest measured: {order('speedup')[0]}, "
        f"simulated: {order('predicted_speedup')[0]}."
    )


def _pairs_alike(ways: list[dict[str, Any]]) -> tuple[int, int]:
    """Pairs that the simulator holds apart: those measured in the same order, and all."""
    apart = [
        (fast, slow)
        for fast in ways
        for slow in ways
        if fast["predicted_speedup"] > CLOSE * slow["predicted_speedup"]
    ]
    return sum(fast["speedup"] > slow["speedup"] for fast, slow in apart), len(apart)
