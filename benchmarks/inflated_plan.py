"""Inflate a small model and a draft, and write a plan for them by hand: no machine was fitted.

    python -m benchmarks.inflated_plan llama-3-70b+llama-3.2-1b --plan plan.json

``bench_engine`` runs the plan. Needs no GPU: weights are made where a model is loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from codesign.artifacts import header, write_table
from codesign.candidate import Candidate, ScoredCandidate
from codesign.config import SLO, Serving, parse_deployment
from codesign.file_ref import FileRef
from codesign.fit import Fit
from codesign.fit.shipped import FITS
from codesign.models import models_dir
from codesign.models.recipe import Degradation, Recipe, create_inflated, weights_sha256
from codesign.plan import Plan
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling
from codesign.prompts import load_prompts


def inflate(
    pair: str, sources: Sequence[str], degradation: Degradation, *, int4_head: bool
) -> tuple[str, str]:
    """Names of an inflated target and draft of small models, made if they are not there.

    Args:
        pair: Shapes, "TARGET+DRAFT".
        sources: The small target and the small draft.
        degradation: Of the draft.
        int4_head: Of the draft.
    """
    names = []
    for shape, role, source in zip(pair.split("+"), ("target", "draft"), sources, strict=True):
        loss = degradation if role == "draft" else Degradation()
        parts = ["bench", shape, role, Path(source).name]
        if loss != Degradation():
            parts += [f"{loss.noise:g}", *map(str, loss.drop_layers), f"h{loss.drop_kv_heads}"]
        int4 = int4_head and role == "draft"
        parts += ["int4-head"] * int4
        names.append("-".join(parts))
        if not (models_dir() / names[-1]).exists():
            recipe = Recipe(
                shape, role, source, weights_sha256(source), degradation=loss, int4_head=int4
            )
            create_inflated(recipe, name=names[-1])
    return names[0], names[1]


def write_plan(
    path: Path, target: str, draft: str, candidates: Sequence[Candidate], *, requests: int,
    tokens: int, sampling: Sampling,
) -> None:  # fmt: skip
    """A plan of these candidates over shipped prompts, all there at once; no machine was fitted.

    Every kind of prompt comes as often as the others, where there are requests enough.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fit = replace(Fit.load(FITS / "smollm2-135m-cpu" / "fit.json"), target=target, draft=draft)
    fit_path, trace_path = path.with_suffix(".fit.json"), path.with_suffix(".trace.parquet")
    fit.save(fit_path)
    kinds = sorted({prompt.category for prompt in load_prompts("run")})
    trace = pd.DataFrame(
        {
            "arrival": 0.0,
            "prompt_tokens": [40 + 17 * i % 160 for i in range(requests)],
            "output_tokens": tokens,
            "category": [kinds[i % len(kinds)] for i in range(requests)],
        }
    )
    write_table(trace_path, trace, header("trace", seed=0))
    scored = [ScoredCandidate(c, {}, {}, "fitted", is_feasible=True) for c in candidates]
    Plan(
        target=target, draft=draft, slo=SLO(), objective="latency", sampling=sampling,
        serving=Serving(max_kv_tokens=1 << 14), trace=FileRef.of(trace_path),
        num_requests=requests, fit=FileRef.of(fit_path), seed=0, num_seeds=1,
        chosen=scored[0], alternatives=tuple(scored[1:]),
    ).save(path)  # fmt: skip


def parse_candidate(words: str, batch: int) -> Candidate:
    """A candidate from "POLICY@DEPLOYMENT"."""
    policy, _, deployment = words.rpartition("@")
    return Candidate(parse_deployment(deployment), parse_policy(policy), batch)


def main() -> None:
    """Write the plan."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pair", metavar="TARGET+DRAFT", help="shapes")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--noise", type=float, default=0.0, help="on the inflated draft's weights")
    parser.add_argument("--drop-layers", nargs="*", type=int, default=(), help="of the draft")
    parser.add_argument("--sources", nargs=2, default=["smollm2-135m", "smollm2-135m-draft"],
                        metavar=("TARGET", "DRAFT"), help="small models")  # fmt: skip
    parser.add_argument("--drop-kv-heads", type=int, default=0, help="of the draft")
    parser.add_argument("--int4-head", action="store_true", help="of the draft")
    parser.add_argument("--policies", nargs="+", default=["tree-8x4x2@1"],
                        help="LABEL@DEPLOYMENT each")  # fmt: skip
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args()
    layers, heads = tuple(args.drop_layers), args.drop_kv_heads
    loss = Degradation(noise=args.noise, drop_layers=layers, drop_kv_heads=heads)
    target, draft = inflate(args.pair, args.sources, loss, int4_head=args.int4_head)
    candidates = [parse_candidate(words, args.batch) for words in args.policies]
    sampling = Sampling(temperature=args.temperature, seed=3)
    write_plan(args.plan, target, draft, candidates, requests=args.requests,
               tokens=args.tokens, sampling=sampling)  # fmt: skip


if __name__ == "__main__":
    main()
