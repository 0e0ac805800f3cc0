"""Open questions of the papers, answered by simulation.

    python -m benchmarks.questions eagle|batch|link|inflight   # one answer, to the terminal
    python -m benchmarks.questions all                         # all of them, as docs/questions.md

Each answer names its assumptions. Step times are the roofline's (codesign/fit/roofline.py), so that
an answer is worth what that is: 19 % for large models, 33 % for drafts.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.scenarios import (
    closed_batch,
    decode_alone,
    dialled,
    fit_of,
    markdown,
    reflow,
    serve,
)
from codesign.fit import Fit
from codesign.fit.devices import load_device
from codesign.fit.priced_model import PricedModel, parse_model
from codesign.fit.roofline import roofline_fit

OUT = Path(__file__).parents[1] / "docs" / "questions.md"
DEVICE, GPUS = "h100", 8
TARGET, DRAFT = "llama-3.1-70b:int4", "llama-3.2-1b:int4"
RATES = (0.6, 0.7, 0.8, 0.9)
LENGTHS = (2, 3, 4, 6)
# Links: seconds of a message one way as the host sees it, and bytes per second.
LINKS = {
    "on-device hop, NVLink": (1e-6, 450e9),
    "NCCL, NVLink": (26e-6, 450e9),
    "NCCL, PCIe 4.0": (52e-6, 32e9),
    "RDMA, 100 Gbit/s": (10e-6, 12.5e9),
    "TCP, 10 Gbit/s": (100e-6, 1.25e9),
    "TCP, other building": (1000e-6, 1.25e9),
    "WAN": (10_000e-6, 0.125e9),
}


@dataclass(frozen=True)
class Best:
    """The fastest of some candidates: its label, tokens per second and tokens per round."""

    label: str
    per_second: float
    compression: float = 1.0


def head_of(target: PricedModel) -> PricedModel:
    """An EAGLE-like head: one bf16 layer of the target, its embedding and head."""
    return PricedModel("eagle-head", replace(target.shape, layers=1), "bf16")


@functools.lru_cache(maxsize=16)
def fit_for(draft: str, rate: float) -> Fit:
    """Roofline of the machine with a draft model, or with "eagle" for a head."""
    target = parse_model(TARGET)
    model = head_of(target) if draft == "eagle" else parse_model(draft)
    return roofline_fit(
        load_device(DEVICE),
        GPUS,
        target,
        model,
        dialled(rate),
        acceptance_error=0.0,
        acceptance_origin="dialled",
    )


def fastest_alone(fit: Fit, candidates: list[tuple[str, str]], *, requests: int = 8) -> Best:
    """The fastest (policy, deployment) for one request at a time."""
    found = []
    for policy, deployment in candidates:
        speed = decode_alone(fit, policy, deployment, requests=requests)
        label = f"{policy} on {deployment}"
        found.append(Best(label, speed.tokens_per_second, speed.compression))
    return max(found, key=lambda best: best.per_second)


def eagle() -> str:
    """Serial against asynchronous, for a head that needs the target's features and for a draft."""
    rows: list[tuple[object, ...]] = []
    for rate in (0.7, 0.9):
        for draft, prefix, decays in (
            ("eagle", "eagle", ("@0.96", "@1.0")),
            (DRAFT, "tree", ("",)),
        ):
            fit = fit_for(draft, rate)
            for decay in decays:
                name = f"{prefix}-8x4x"
                serial = fastest_alone(fit, [(f"{name}{d}{decay}", "8") for d in LENGTHS])
                split = [(f"async-{name}{d}{decay}", s) for d in LENGTHS for s in ("7+1", "6+2")]
                apart = fastest_alone(fit, split)
                rows.append(
                    (rate, f"{draft}{decay}", serial.label, serial.per_second, apart.label,
                     apart.per_second, f"{apart.per_second / serial.per_second - 1:+.0%}")
                )  # fmt: skip
    head = (
        "acceptance of first tokens",
        "draft",
        "best serial",
        "tokens/s",
        "best asynchronous",
        "tokens/s",
        "gain",
    )
    return f"""\
{markdown(head, rows)}

One request at a time on {GPUS} x {DEVICE}, {TARGET}. The head is one bf16 layer of the target with
its LM head. "@0.96": each consecutive feature that the head has predicted itself multiplies the
acceptance by 0.96 (EAGLE); "@1.0": no loss (EAGLE-3). The head must run once over the verified
tokens before anything can be sent, so that asynchrony hides only the forwards after that one."""


def _throughput(fit: Fit, policy: str, deployment: str, batch: int) -> float:
    requests = closed_batch(batch, waves=3 if batch < 64 else 2, output=192)
    replicas = 2 if deployment.startswith("2x") else 1
    metrics, _ = serve(requests, fit, policy, deployment, max_batch=max(batch // replicas, 1))
    return metrics.throughput or 0.0


def batch() -> str:
    """Tokens per second of ways to use the same GPUs, by requests that run at once."""
    fit = fit_for(DRAFT, 0.8)
    ways: dict[str, list[tuple[str, str]]] = {
        "plain, 8": [("plain", "8")],
        "plain, 2 x 4": [("plain", "2x4")],
        "serial, 8": [("chain-2", "8"), ("chain-4", "8"), ("tree-8x4x4", "8")],
        "split 7+1": [("async-tree-8x4x4", "7+1"), ("async-tree-4x2x3", "7+1")],
        "split 6+2": [("async-tree-8x4x4", "6+2"), ("async-tree-4x2x3", "6+2")],
    }
    rows: list[tuple[object, ...]] = []
    for size in (1, 2, 4, 8, 16, 32, 64, 128):
        speeds = {
            way: max(_throughput(fit, policy, where, size) for policy, where in candidates)
            for way, candidates in ways.items()
            if not (way == "plain, 2 x 4" and size == 1)
        }
        best = max(speeds, key=speeds.__getitem__)
        rows.append((size, *(speeds.get(way, "-") for way in ways), best))
    return f"""\
{markdown(("running requests", *ways, "best"), rows)}

Output tokens per second on {GPUS} x {DEVICE}, {TARGET} with {DRAFT}; 0.8 of the first draft tokens
accepted, prompts of 512 and answers of 192 tokens, all requests there from the start, time for
prompts included. Serial: the best of chains of 2 and 4 and of a tree of 8 rows; split: the best of
trees of 4 and 8 rows."""


def link() -> str:
    """Up to which link the split pays."""
    fit = fit_for(DRAFT, 0.8)
    rival = fastest_alone(
        fit, [("plain", "8"), *((f"tree-8x4x{d}", "8") for d in LENGTHS), ("chain-4", "8")]
    )
    hidden = parse_model(TARGET).shape.hidden
    vocab = parse_model(TARGET).shape.vocab
    payloads = {  # bytes per round: both ways together, of one request
        "tree": 2 * 8 * 8,
        "features": 4 * hidden * 2 * 3,
        "distributions": 7 * vocab * 2,
    }
    rows: list[tuple[object, ...]] = []
    for name, (latency, bandwidth) in LINKS.items():
        row: list[object] = [name, f"{latency * 1e6:,.0f} us, {bandwidth * 8e-9:,.0f} Gbit/s"]
        for num_bytes in payloads.values():
            one_way = latency + num_bytes / 2 / bandwidth
            speed = fastest_alone(
                _with_link(fit, one_way), [(f"async-tree-8x4x{d}", "7+1") for d in LENGTHS]
            )
            row.append(f"{speed.per_second / rival.per_second - 1:+.0%}")
        rows.append(tuple(row))
    break_even = _break_even(fit, rival.per_second)
    head = ("link", "latency, bandwidth", *(f"{n}, {b:,} B" for n, b in payloads.items()))
    return f"""\
{markdown(head, rows)}

Speedup of the split 7+1 over the best use of the same {GPUS} GPUs without a split ({rival.label},
{rival.per_second:.0f} tokens/s), one request at a time. It breaks even at {break_even * 1e6:,.0f}
us one way. What is sent in a round: "tree", token ids and parents, as in this project; "features",
four tokens' hidden states of three layers, as an EAGLE-3 head needs; "distributions", seven rows of
draft probabilities, as rejection sampling needs. Latencies are assumptions, except for NVLink
(measured on H200: 0.63 us on the device, 51 us for an NCCL ping-pong)."""


def _with_link(fit: Fit, seconds: float) -> Fit:
    costs = {
        name: replace(c, link=seconds if "+" in name else 0.0) for name, c in fit.costs.items()
    }
    return replace(fit, costs=costs)


def _break_even(fit: Fit, wanted: float) -> float:
    """Seconds one way at which the split is as fast as its rival."""
    low, high = 1e-6, 0.05
    for _ in range(10):
        middle = (low * high) ** 0.5
        found = fastest_alone(
            _with_link(fit, middle), [(f"async-tree-8x4x{d}", "7+1") for d in (3, 4, 6)]
        )
        low, high = (middle, high) if found.per_second > wanted else (low, middle)
    return (low * high) ** 0.5


def inflight() -> str:
    """Tokens per round of two orders in which a tree grows during verification."""
    rows: list[tuple[object, ...]] = []
    for rate in RATES:
        fit = fit_of(fit_for(DRAFT, 0.8).costs, dialled(rate))
        for width in (2, 8):
            row: list[object] = [rate, width]
            for length in (2, 4, 6):
                shape = f"8x{width}x{length}"
                first = decode_alone(fit, f"async-tree-{shape}", "7+1", requests=8)
                below = decode_alone(fit, f"inflight-tree-{shape}", "7+1", requests=8)
                gain = below.tokens_per_second / first.tokens_per_second - 1
                row.append(f"{first.compression:.2f} / {below.compression:.2f}, {gain:+.0%}")
            rows.append(tuple(row))
    head = ("acceptance of first tokens", "width", *(f"{d} forwards" for d in (2, 4, 6)))
    return f"""\
{markdown(head, rows)}

Tokens per round with best-first growth / with in-flight nodes first, and the change in speed. 8
rows verified, {TARGET} with {DRAFT} on 7+1 of {GPUS} x {DEVICE}, one request at a time. "In-flight
nodes first" drafts below every node at which the verification may end before it goes deeper
anywhere."""


@dataclass(frozen=True)
class Question:
    """A question, who leaves it open, and what was found on 2026-11-21."""

    title: str
    asked: str
    found: str
    answer: Callable[[], str]


QUESTIONS = {
    "eagle": Question(
        "Does asynchrony pay for drafts that need the target's features?",
        "SwiftSpec leaves EAGLE out (section 6).",
        "No: the asynchronous head is 19 to 36 % slower than the serial one on all GPUs, where an "
        "independent draft model gains 20 to 33 %. The forward that needs the target's features "
        "stays on the critical path, the target has fewer GPUs, and the forwards that are hidden "
        "are cheap for so small a head.",
        eagle,
    ),
    "batch": Question(
        "From which batch size on should the draft share the target's GPUs?",
        "SwiftSpec serves one request; SpecServe shares the target's GPUs.",
        "From about 8 running requests on. Up to 4 the split is faster by 2 to 11 %; at 8 drafting "
        "in turn on all GPUs is faster by 3 %; at 64 the split is no better than plain "
        "decoding, and at 128 two plain replicas are level with the best of drafting.",
        batch,
    ),
    "link": Question(
        "How fast a link does the split need?",
        'SwiftSpec: "NVLink/cross-network interconnect", with figures for NVLink only.',
        "Latency matters, bandwidth hardly does: token ids are small, and the split pays as long "
        "as a message takes less than about 1.4 ms one way. PCIe and data-centre networks are "
        "within 2 % of NVLink; a link to another building still gains a little, a wide-area link "
        "loses half. Sending whole distributions instead of token ids costs 14 % on 10 Gbit/s.",
        link,
    ),
    "inflight": Question(
        "Should a tree grow below the nodes in flight first?",
        "SwiftSpec grows the heaviest leaves, whether or not they are being verified.",
        "No, not as a strict priority: drafting below every possible next root first keeps the "
        "tree at two levels, so that it emits at most two tokens a round and longer "
        "drafting gains nothing. Best-first, which goes deeper below the likeliest root, is "
        "ahead by 13 to 51 % with four forwards and more, and equal with two.",
        inflight,
    ),
}


def main() -> None:
    """Print one answer, or write all of them."""
    parser = argparse.ArgumentParser(description="Open questions, answered by simulation.")
    parser.add_argument("question", choices=[*QUESTIONS, "all"])
    chosen = parser.parse_args().question
    if chosen != "all":
        print(reflow(QUESTIONS[chosen].answer()))
        return
    parts = [
        "# Open questions, answered by simulation\n\nFour questions that the SwiftSpec and "
        "SpecServe papers leave open. Every figure is a prediction; none was measured. Step times "
        "are the roofline's; acceptance is set to the stated rate and is correlated as in the "
        "shipped recordings. Differences below about 10 % are within the uncertainty about a real "
        "engine.\n\nWritten by `python -m benchmarks.questions all`."
    ]
    for name, question in QUESTIONS.items():
        print(name, file=sys.stderr)
        command = f"    python -m benchmarks.questions {name}"
        parts.append(f"## {question.title}\n\n{question.asked} {question.found}\n\n{command}")
        parts.append(question.answer())
    OUT.write_text(reflow("\n\n".join(parts)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
