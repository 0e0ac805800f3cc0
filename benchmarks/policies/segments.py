"""Traffic for two GPUs, measured and simulated: seconds of a trace, prompts and answers short."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.policies.cases import PAPER_TPOT, Segment, find_segment
from codesign.config import SLO
from codesign.errors import InputError
from codesign.fit.devices import load_device
from codesign.fit.priced_model import parse_model
from codesign.fit.roofline import Forward
from codesign.policy.cost import RoundCost

BATCH, KV_TOKENS, SEED = 8, 2048, 1  # rows of KV cache for each request of a batch
PROMPT, PROMPTS, MAX_OUTPUT, LOAD = 192, (48, 512), 96, 0.7
BURST = 400.0  # seconds into the trace "code", before the burst


def segment(
    name: str,
    folder: Path | None,
    cost: RoundCost,
    seconds: float,
    batch: int = BATCH,
    *,
    read: float | None = None,
) -> pd.DataFrame:
    """So many seconds of a trace, at a rate that loads plain decoding.

    Args:
        name: Of the trace, or NAME@LOAD, a share of what plain decoding bears.
        folder: Of the published traces; None: where ``codesign trace fetch`` puts them.
        cost: Step times of the machine.
        seconds: Of arrivals.
        batch: Most requests at once.
        read: Seconds of the trace that are read; None: as many as are simulated on eight GPUs.
    """
    published, load = read_segment(name)
    if read is not None:
        published = replace(published, seconds=read)
    requests = published.load(folder, seed=SEED).drop(columns="hash_ids", errors="ignore")
    requests = requests.loc[requests["arrival"] >= (BURST if published.name == "code" else 0.0)]
    prompts = requests["prompt_tokens"] * (PROMPT / requests["prompt_tokens"].median())
    requests = requests.assign(
        prompt_tokens=prompts.round().astype(int).clip(*PROMPTS),
        output_tokens=requests["output_tokens"].clip(2, MAX_OUTPUT),
    )
    prompt, output = (float(np.mean(requests[f"{kind}_tokens"])) for kind in ("prompt", "output"))
    step = cost.target(batch, batch * (prompt + output / 2), batch)
    rate = load / (cost.prefill(prompt) + output * step / batch)
    head = requests.iloc[: max(round(rate * seconds), 4)].reset_index(drop=True)
    arrival = head["arrival"] - head["arrival"].iloc[0]
    return head.assign(arrival=arrival * seconds / arrival.iloc[-1])


def read_segment(name: str) -> tuple[Segment, float]:
    """The segment and the load that a name says: conv, or conv@1.2.

    Raises:
        InputError: If there is no such segment, or the load is not a number above 0.
    """
    trace, _, load = name.partition("@")
    number = re.fullmatch(r"\d+\.?\d*|\.\d+", load or str(LOAD))
    if number is None or not float(number[0]):
        raise InputError(f"unknown load in {name!r}; write a number above 0, as in conv@1.2")
    return find_segment(trace), float(number[0])


def target_of(cost: RoundCost) -> SLO:
    """The paper's 30 ms a token, scaled by a plain step; and a prompt that waits for four more."""
    paper = Forward(parse_model("llama-3.1-70b"), load_device("a800"), 8).decode(1, 1000)
    step = cost.target(1, 1000, 1)
    return SLO(ttft=5.0 * cost.prefill(PROMPT), tpot=PAPER_TPOT * step / paper)
