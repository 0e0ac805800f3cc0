"""What ``bench_rank_groups`` serves: a random pair of models, a plan for it, random prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.bench_gpu_engine import RandomState
from benchmarks.common import SHAPES
from benchmarks.random_pair import TINY, random_tensors, write_letters
from codesign.candidate import Candidate
from codesign.config import Deployment, Serving
from codesign.models.shape import model_shape
from codesign.policy.speculation import parse_policy
from codesign.policy.walk import Sampling
from codesign.prompts import BoundRequest

NOISE = 0.03  # of a draft's weights, in standard deviations


def make_pair(target: Path, draft: Path, device: str) -> None:
    """Write a random target, of the shape that its folder is named for, and a draft with noise."""
    from safetensors.torch import save_file

    name = target.name
    config = TINY if name == "tiny" else json.loads((SHAPES / name / "config.json").read_text())
    for folder in (target, draft):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        write_letters(folder)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = model_shape(target)
    sizes = shape.tensors()
    torch.manual_seed(0)
    drawn = RandomState(shape)
    state = random_tensors(sizes, seed=0) if device == "cpu" else {k: drawn[k] for k in sizes}
    spread = "embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    state = {k: (v * (4.0 if spread in k else 1.0)).to(device, dtype) for k, v in state.items()}
    noisy = {
        k: v + NOISE * v.float().std().to(dtype) * torch.randn_like(v) if v.ndim == 2 else v
        for k, v in state.items()
    }
    for folder, part in ((target, state), (draft, noisy)):
        save_file({k: v.cpu().contiguous() for k, v in part.items()}, folder / "model.safetensors")


def make_plan(models: Path, target: Path, draft: Path) -> None:
    """Write a plan with every split of two ranks, by hand: no machine was fitted for it."""
    import pandas as pd

    from codesign.artifacts import header, write_table
    from codesign.candidate import ScoredCandidate
    from codesign.config import SLO
    from codesign.file_ref import FileRef
    from codesign.fit import Fit
    from codesign.fit.shipped import FITS
    from codesign.plan import Plan

    shipped = Fit.load(FITS / "smollm2-135m-cpu" / "fit.json")
    fit = replace(shipped, target=str(target), draft=str(draft))
    fit.save(models / "fit.json")
    trace = pd.DataFrame(
        {"arrival": 0.0, "prompt_tokens": [40, 90, 150, 60] * 2, "output_tokens": [100] * 8,
         "category": "chat"}
    )  # fmt: skip
    write_table(models / "trace.parquet", trace, header("trace", seed=0))
    splits = [("plain", 1, 0), ("plain", 2, 0), ("tree-8x4x2", 2, 0), ("async-tree-8x4x3", 1, 1)]
    scored = [
        ScoredCandidate(
            Candidate(Deployment(target, draft), parse_policy(policy), 2), {}, {}, "fitted",
            is_feasible=True,
        )
        for policy, target, draft in splits
    ]  # fmt: skip
    Plan(
        target=fit.target, draft=fit.draft, slo=SLO(), objective="latency", sampling=Sampling(),
        serving=Serving(max_kv_tokens=4096), trace=FileRef.of(models / "trace.parquet"),
        num_requests=len(trace), fit=FileRef.of(models / "fit.json"), seed=0, num_seeds=1,
        chosen=scored[0], alternatives=tuple(scored[1:]),
    ).save(models / "plan.json")  # fmt: skip


def random_requests(target: Path, count: int, tokens: int) -> list[BoundRequest]:
    """Prompts of random tokens, all there at once."""
    generator = torch.Generator().manual_seed(2)
    vocabulary = model_shape(target).vocab
    lengths = [1 + 37 * i % 200 for i in range(count)]
    prompts = [torch.randint(0, vocabulary, (n,), generator=generator) for n in lengths]
    return [BoundRequest(i, 0.0, "", tuple(p.tolist()), tokens) for i, p in enumerate(prompts)]
