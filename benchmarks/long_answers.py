"""Agreement of draft and target along long answers: 48 answers of 192 tokens, on one GPU.

    python -m benchmarks.long_answers llama-3-8b+llama-3.2-1b --out answers.parquet

The prompts are those that a campaign records answers of that length to. Prints the share of tokens
that are the draft's first choice, by 16 tokens of an answer; the file is as a profile's acceptance.
Needs a GPU and ``codesign models fetch smollm2-135m``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.campaign.__main__ import make_models
from benchmarks.campaign.questions import LONG_ANSWER, recorded_prompts
from benchmarks.campaign.units import find_pair
from benchmarks.common import need_gpus
from codesign.artifacts import header, write_table
from codesign.candidate import Candidate
from codesign.config import Deployment
from codesign.engine.run import PolicySetup
from codesign.models import resolve_model
from codesign.policy.speculation import SpeculationSpec
from codesign.profiler.rank_acceptance import rank_outputs
from codesign.profiler.rank_parts import RankMeasurer
from codesign.profiler.store import ProfileSettings

BATCH, KV_TOKENS = 8, 2048
SHARE_TOKENS = 16


def main() -> None:
    """Record a pair."""
    parser = argparse.ArgumentParser(description="Record long answers of a pair of models.")
    parser.add_argument("pair")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    need_gpus(1)
    pair = find_pair(options.pair)
    make_models(pair)
    target, draft = pair.models
    settings = ProfileSettings(
        target=target, draft=draft, workers=0, is_quick=True, device="cuda", deployments=("1",)
    )
    asked = next(recorded_prompts(resolve_model(target), seed=0))
    asked = [request for request in asked if request.max_new_tokens == LONG_ANSWER]
    plain, deployment = SpeculationSpec(), Deployment(1, 0)
    with RankMeasurer(settings).bench(deployment, BATCH + 1) as bench:
        run = bench.serve(
            Candidate(deployment, plain, BATCH),
            asked,
            PolicySetup(plain),
            max_kv_tokens=BATCH * KV_TOKENS,
        )
        frame = rank_outputs(bench, asked, run.outputs)
    write_table(options.out, frame, header("profile", seed=0))
    hits_RT = (frame["rank"].to_numpy() == 0).reshape(len(asked), LONG_ANSWER)
    agreed = hits_RT.reshape(len(asked), -1, SHARE_TOKENS).mean(axis=(0, 2))
    print(json.dumps({"pair": options.pair, "agreed": [round(float(a), 3) for a in agreed]}))


if __name__ == "__main__":
    main()
