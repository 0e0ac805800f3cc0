"""Simulations that answer what the papers leave open: each a table, and what was assumed."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from benchmarks.pages import markdown
from benchmarks.scenarios import closed_batch, decode_alone, dialled, fit_of, serve
from codesign.fit import Fit
from codesign.fit.devices import load_device
from codesign.fit.priced_model import PricedModel, parse_model
from codesign.fit.roofline import roofline_fit

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


def fastest_alone(fit: Fit, candidates: list[tuple[str, str]]) -> Best:
    """The fastest (policy, deployment) for one request at a time."""
    found = []
    for policy, deployment in candidates:
        speed = decode_alone(fit, policy, deployment, requests=8)
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
