"""Step times of GPUs that nobody profiled, from bytes, operations and latencies.

One forward of ``rows`` rows over ``context`` KV rows on ``t`` GPUs is priced as a sum, the papers'
own line: weights and KV rows read at a share of the memory's bandwidth, operations at a share of
the data sheet's, a fixed time per layer (launches and hand-offs between dependent kernels), and two
all-reduces per layer that grow with the number of peers. Shares are kernels measured on an H200;
the fixed times are fitted to published speeds of whole engines (data/roofline_anchors.json,
benchmarks/fit_roofline.py), and the error of a prediction is the mean one for an engine that the
fitting left out.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from codesign.acceptance import AcceptanceProfile
from codesign.errors import InputError
from codesign.fit import ROOFLINE, Fit
from codesign.fit.devices import Device, Link
from codesign.fit.priced_model import PricedModel
from codesign.fit.step_forms import prompt_time
from codesign.policy.cost import Calibration, RoundCost, StepTime

KV_SHARE = 0.875  # of the memory's bandwidth: 4.2 of 4.8 TB/s, a pure read on an H200
FLOPS_SHARE = 0.7  # vLLM on an H100 takes 21 us per row of an 8B model (arXiv 2601.11580)
LINK_SHARE = 0.8  # of a link's bandwidth, large messages
MEMORY_SHARE = 0.9  # of the memory that engines use (the default of vLLM)
WORKSPACE_BYTES = 1.5e9  # graphs, activations and logits of one GPU
MAX_GPUS = 16


@dataclass(frozen=True, slots=True)
class Software:
    """How near an engine comes to the hardware.

    Attributes:
        weight_share: Share of the memory's bandwidth at which weights are read, by their kind: a
            bf16 product of 8 rows measured at 0.82 on an H200, an int4 one at 0.61; 8-bit weights
            lie between.
        layer: Seconds of a layer beside its bytes and operations.
        all_reduce: Seconds of an all-reduce, by link, beside those that follow; NVLink's is fitted,
            PCIe's assumed.
        peer: Seconds more for each peer in it.
        host: Seconds of a message one way by link: half of an NCCL ping-pong as the host sees it,
            51 us on NVLink; nobody has measured PCIe, twice as long is assumed.
        reroot: Seconds per round to walk, re-root and move KV rows. SwiftSpec's rounds (Table 6)
            leave 1.7 ms beside the target's forward, about two thirds of it misses.
    """

    weight_share: dict[str, float] = field(
        default_factory=lambda: {"bf16": 0.82, "fp8": 0.75, "int8": 0.75, "int4": 0.607}
    )
    layer: float = 40.0e-6
    all_reduce: dict[Link, float] = field(
        default_factory=lambda: {"nvlink": 17.1e-6, "pcie": 30e-6}
    )
    peer: float = 1.3e-6
    host: dict[Link, float] = field(default_factory=lambda: {"nvlink": 26e-6, "pcie": 52e-6})
    reroot: float = 0.4e-3


DEFAULT_SOFTWARE = Software()


@dataclass(frozen=True, slots=True)
class Forward:
    """Seconds of one model's forward on ``gpus`` GPUs.

    Attributes:
        model: What runs.
        device: On what.
        gpus: Tensor parallel degree.
        software: How well.
    """

    model: PricedModel
    device: Device
    gpus: int
    software: Software = DEFAULT_SOFTWARE

    @property
    def alpha(self) -> float:
        """Seconds per KV row that is read."""
        kv_bytes = self.model.kv_bytes(self.gpus)
        return kv_bytes / (KV_SHARE * self.device.memory_bandwidth)

    @property
    def gamma(self) -> float:
        """Seconds per row: operations, and the row's part of the all-reduces' wire time."""
        flops = self.model.flops_per_row(self.gpus) / (FLOPS_SHARE * self._peak)
        if self.gpus == 1:
            return flops
        sent = 2.0 * (self.gpus - 1) / self.gpus * 2 * self.model.shape.hidden  # ring, bf16
        wire = sent / (LINK_SHARE * self.device.link_bandwidth)
        return flops + self._num_all_reduces * wire

    @property
    def delta(self) -> float:
        """Seconds that do not depend on rows or context: weights, layers, all-reduces."""
        read = sum(
            num_bytes / self.software.weight_share[kind]
            for kind, num_bytes in self.model.weight_bytes(self.gpus).items()
        )
        seconds = read / self.device.memory_bandwidth
        seconds += self.model.shape.layers * self.software.layer
        if self.gpus > 1:
            latency = self.software.all_reduce[self.device.link]
            latency += self.software.peer * (self.gpus - 1)
            seconds += self._num_all_reduces * latency
        return seconds

    @property
    def cross(self) -> float:
        """Seconds per pair of a prompt's row and a token that it attends to."""
        return self.model.attention_flops(self.gpus) / (FLOPS_SHARE * self.device.bf16_flops)

    @property
    def decode(self) -> StepTime:
        """A few rows per request over their contexts."""
        return StepTime.linear(alpha=self.alpha, gamma=self.gamma, delta=self.delta)

    @property
    def prefill(self) -> StepTime:
        """Rows of one prompt."""
        return prompt_time(alpha=self.alpha, gamma=self.gamma, delta=self.delta, cross=self.cross)

    @property
    def free_bytes(self) -> float:
        """Memory of one GPU that this model's weights leave."""
        usable = MEMORY_SHARE * self.device.memory_bytes - WORKSPACE_BYTES
        return usable - self.model.memory_bytes(self.gpus)

    @property
    def _num_all_reduces(self) -> int:
        return 2 * self.model.shape.layers

    @property
    def _peak(self) -> float:
        has_fp8 = self.model.weights == "fp8" and self.device.fp8_flops is not None
        return (
            self.device.fp8_flops if has_fp8 and self.device.fp8_flops else self.device.bf16_flops
        )


def kv_rows(target: Forward, draft: Forward, *, is_apart: bool) -> int:
    """KV rows that fit, both models' weights counted; 0 if the weights do not.

    Args:
        target: On its GPUs.
        draft: On its own.
        is_apart: The draft's GPUs are not the target's.
    """
    target_kv, draft_kv = target.model.kv_bytes(target.gpus), draft.model.kv_bytes(draft.gpus)
    if is_apart:
        return max(int(min(target.free_bytes / target_kv, draft.free_bytes / draft_kv)), 0)
    free = target.free_bytes - draft.model.memory_bytes(draft.gpus)
    return max(int(free / (target_kv + draft_kv)), 0)


def plain_kv_rows(target: Forward) -> int:
    """KV rows that fit without a draft; 0 if the weights do not."""
    return max(int(target.free_bytes / target.model.kv_bytes(target.gpus)), 0)


def round_cost(target: Forward, draft: Forward, *, is_apart: bool) -> RoundCost:
    """Costs of a deployment: each model on GPUs of its own, or both on the same ones.

    Args:
        target: On its GPUs; its device and software are the deployment's.
        draft: On its own.
        is_apart: The draft's GPUs are not the target's.
    """
    device, software = target.device, target.software
    moved = target.model.kv_bytes(target.gpus)  # every GPU sends its share at the same time
    return RoundCost(
        target=target.decode,
        draft=draft.decode,
        prefill=target.prefill,
        draft_prefill=draft.prefill,
        reroot=software.reroot,
        link=software.host[device.link] if is_apart else 0.0,
        kv_tokens=kv_rows(target, draft, is_apart=is_apart),
        plain_kv_tokens=plain_kv_rows(target),
        kv_transfer=moved / (LINK_SHARE * device.link_bandwidth),
    )


def roofline_fit(
    device: Device,
    gpus: int,
    target: PricedModel,
    draft: PricedModel,
    acceptance: AcceptanceProfile,
    *,
    acceptance_error: float,
    acceptance_origin: str,
    software: Software = DEFAULT_SOFTWARE,
) -> Fit:
    """A fit for every split of ``gpus`` GPUs whose memory holds the weights.

    GPUs that hold the target alone are in it, too: plain decoding needs no more.

    Args:
        device: One GPU.
        gpus: How many.
        target: Model that decides.
        draft: Model that proposes.
        acceptance: How often they agree; of whatever pair.
        acceptance_error: Relative error of the tokens per round that it leads to.
        acceptance_origin: Where it comes from, in words.
        software: How near the engine comes to the hardware.

    Raises:
        InputError: If the number of GPUs is none, or the models fit nowhere.
    """
    if not 1 <= gpus <= MAX_GPUS:
        raise InputError(f"need 1 to {MAX_GPUS} GPUs, got {gpus}. Fix: --gpus")
    costs = _costs(device, gpus, target, draft, software)
    of_target, of_draft = target.error, draft.error
    errors = {"acceptance": acceptance_error}
    for label in costs:
        errors |= {f"{label}/{op}": of_target for op in ("target", "prefill")}
        errors |= {f"{label}/{op}": of_draft for op in ("draft", "draft_prefill")}
    return Fit(
        target=target.label,
        draft=draft.label,
        temperature=0.0,
        costs=costs,
        calibration=Calibration(),
        acceptance=acceptance,
        errors=errors,
        origin=ROOFLINE,
        acceptance_origin=acceptance_origin,
    )


def _costs(
    device: Device, gpus: int, target: PricedModel, draft: PricedModel, software: Software
) -> dict[str, RoundCost]:
    """By deployment, of those whose memory holds the weights and KV rows."""
    costs: dict[str, RoundCost] = {}
    for target_gpus, draft_gpus in splits(gpus):
        on_target = Forward(target, device, target_gpus, software)
        on_draft = Forward(draft, device, draft_gpus or target_gpus, software)
        cost = round_cost(on_target, on_draft, is_apart=draft_gpus > 0)
        if cost.kv_room(None, has_draft=draft_gpus > 0):
            costs[f"{target_gpus}+{draft_gpus}" if draft_gpus else str(target_gpus)] = cost
    if not costs:
        needed = (target.memory_bytes(1) + draft.memory_bytes(1)) / 1e9
        raise InputError(
            f"{target.label} and {draft.label} need {needed:.0f} GB, {gpus} x {device.name} have "
            f"{gpus * device.memory_bytes / 1e9:.0f}, which must hold KV rows, too. Fix: "
            "--gpus, or int4 weights (--target NAME:int4)"
        )
    return costs


def splits(gpus: int) -> Iterator[tuple[int, int]]:
    """(target's GPUs, draft's GPUs or 0 if it shares them) that ``gpus`` GPUs hold."""
    for target in range(1, gpus + 1):
        for draft in range(gpus - target + 1):
            yield target, draft
