"""Requests of a trace as the simulator keeps them, and what is refused before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from codesign.errors import InputError
from codesign.policy.kv_memory import PREFIX_BLOCK
from codesign.policy.speculation import SpeculationSpec
from codesign.records import RequestRecord, own_targets

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = ("arrival", "prompt_tokens", "output_tokens")


@dataclass(slots=True)
class SimulatedRequest:
    """A request of the trace and how far it is.

    Attributes:
        record: What is written down about it.
        output_tokens: Tokens that it emits in all.
        blocks: Hash ids of the whole blocks of its prompt; none without a prefix cache.
        prompt_left: Prompt tokens that are still to be run.
        emitted: Tokens emitted before it was last evicted, and the one that came with its prompt
            if that ran elsewhere.
        speculates: It may be drafted for.
        is_read: The draft runs its prompt in the steps in which the target does; None before.
        queued: Seconds that it has waited: for its prompt to begin, behind a pool for a place among
            those that decode, after an eviction for both again.
        queued_since: When it began to wait, if it waits.
    """

    record: RequestRecord
    output_tokens: int
    blocks: tuple[int, ...] = ()
    prompt_left: int = 0
    emitted: int = 0
    speculates: bool = True
    is_read: bool | None = None
    queued: float = 0.0
    queued_since: float | None = None

    def leave_queue(self, at: float) -> None:
        """What it waited for is there; nothing if it waited for nothing."""
        if self.queued_since is not None:
            self.queued += at - self.queued_since
            self.queued_since = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens to run before it decodes: after an eviction, those emitted as well."""
        return self.record.prompt_tokens + self.emitted

    @property
    def is_drafted_for(self) -> bool:
        """Not if it wants no speculation, or ends with the token that its prompt gives."""
        return self.speculates and self.output_tokens - self.emitted > 1

    @property
    def shared_tokens(self) -> int:
        """KV rows of the prefix cache that it uses."""
        return PREFIX_BLOCK * len(self.blocks)


def read_requests(requests: pd.DataFrame, *, with_blocks: bool) -> dict[int, SimulatedRequest]:
    """The rows of a trace by number.

    Raises:
        InputError: If there is none, or one has no prompt, no output or no time of arrival.
    """
    missing = [name for name in _COLUMNS if name not in requests]
    if missing:
        raise InputError(f"the requests to simulate lack the column {missing[0]}")
    if requests.empty:
        raise InputError("there is no request to simulate")
    arrival = np.asarray(requests["arrival"], np.float64).tolist()
    prompt = np.asarray(requests["prompt_tokens"], np.int64).tolist()
    output = np.asarray(requests["output_tokens"], np.int64).tolist()
    category = categories_of(requests)
    speculates = (
        requests["speculates"].tolist() if "speculates" in requests else [True] * len(arrival)
    )
    with_blocks = with_blocks and "hash_ids" in requests
    hash_ids = requests["hash_ids"].tolist() if with_blocks else [()] * len(arrival)
    if min(*prompt, *output) < 1:
        raise InputError("every request needs at least 1 prompt token and 1 output token")
    if not np.isfinite(arrival).all():
        raise InputError("every request needs a time of arrival, in seconds")
    targets = own_targets(requests)
    rows = zip(category, arrival, prompt, output, hash_ids, speculates, targets, strict=True)
    return {
        number: SimulatedRequest(
            RequestRecord(number, kind, at, num_prompt, slo_tpot=target),
            num_output,
            tuple(blocks[: num_prompt // PREFIX_BLOCK]),
            prompt_left=num_prompt,
            speculates=bool(wants),
            queued_since=at,
        )
        for number, (kind, at, num_prompt, num_output, blocks, wants, target) in enumerate(rows)
    }


def categories_of(requests: pd.DataFrame) -> list[str]:
    """Kind of prompt of each request, "" where it is unknown."""
    if "category" not in requests:
        return [""] * len(requests)
    return [kind if isinstance(kind, str) else "" for kind in requests["category"]]


def check_sizes(
    requests: dict[int, SimulatedRequest], spec: SpeculationSpec, max_kv_tokens: int
) -> None:
    """Each request must fit the machine when it is alone.

    Raises:
        InputError: If one does not.
    """
    for number, request in requests.items():
        kv_tokens = request.record.prompt_tokens + request.output_tokens + spec.kv_rows
        if kv_tokens > max_kv_tokens:
            raise InputError(
                f"request {number} needs {kv_tokens} KV rows with {spec.label}, the machine holds "
                f"{max_kv_tokens}. Fix: --max-prompt and --max-output, or --max-kv-tokens"
            )


def check_prompts(requests: dict[int, SimulatedRequest], max_kv_tokens: int) -> None:
    """Each prompt must fit the pool when it is alone.

    Raises:
        InputError: If one does not.
    """
    for number, request in requests.items():
        if request.record.prompt_tokens > max_kv_tokens:
            raise InputError(
                f"request {number} has {request.record.prompt_tokens} prompt tokens, the workers "
                f"for prompts hold {max_kv_tokens}. Fix: --max-prompt, or --deployment X/pN"
            )
