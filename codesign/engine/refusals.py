"""Requests that an engine can serve, and those that it cannot, each with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from codesign.candidate import Candidate
from codesign.config import Serving
from codesign.engine.schedule import Schedule
from codesign.errors import InputError
from codesign.models.shape import ModelShape
from codesign.policy.batching import BatchLimits
from codesign.policy.on_time import OnTime
from codesign.policy.spec import SpeculationSpec
from codesign.policy.stop_text import Push
from codesign.prompts import BoundRequest


def refused_requests(
    requests: Sequence[BoundRequest],
    *,
    round_rows: int,
    max_kv_tokens: int,
    max_positions: int,
    vocab: int,
) -> dict[int, str]:
    """Why requests are refused, by number.

    Args:
        requests: All of them.
        round_rows: KV rows of a request in a round, in addition to its own tokens.
        max_kv_tokens: KV rows that the machine has for one request.
        max_positions: Of the target.
        vocab: Tokens that the target knows.

    Raises:
        InputError: If there are no requests, or all are refused; with the first reason.
    """
    if not requests:
        raise InputError(
            "no requests to serve. Take a longer slice: codesign plan --trace TRACE --slice 0:600"
        )
    refused: dict[int, str] = {}
    for request in requests:
        tokens = len(request.prompt_ids) + request.max_new_tokens
        if not request.prompt_ids:
            why = "its prompt is empty. Give it at least one token"
        elif request.max_new_tokens < 1:
            why = f"it asks for {request.max_new_tokens} tokens. Ask for at least one"
        elif not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocab:
            why = f"its prompt has a token outside 0 to {vocab - 1}. Encode it for this target"
        elif tokens + round_rows > max_kv_tokens:
            why = (
                f"it needs {tokens + round_rows} KV tokens, the limit is {max_kv_tokens}. "
                "Shorten it: codesign plan --trace TRACE --max-prompt N --max-output N"
            )
        elif tokens > max_positions:
            why = f"it needs {tokens} positions, the model has {max_positions}. Shorten it"
        else:
            continue
        refused[request.request_id] = why
    if len(refused) == len(requests):
        number, why = next(iter(refused.items()))
        raise InputError(f"no request can be served; of request {number}: {why}")
    return refused


def check_stop_strings(
    requests: Sequence[BoundRequest], new_text: Callable[[], Push] | None
) -> None:
    """Stop strings need text.

    Raises:
        InputError: If a request has stop strings and nothing makes text of tokens.
    """
    wanting = [r.request_id for r in requests if r.options.stop_strings]
    if wanting and new_text is None:
        raise InputError(
            f"request {wanting[0]} has stop strings and no tokenizer was given. Give one: "
            "new_text=lambda: Tokenizer(DIRECTORY).stream().push"
        )


@dataclass(frozen=True, slots=True)
class ServedRequests:
    """What of a run's requests can be served.

    Attributes:
        requests: Those that can.
        refused: Why the others cannot, by number.
        longest: KV rows of the longest.
    """

    requests: list[BoundRequest]
    refused: dict[int, str]
    longest: int

    def schedule(
        self,
        candidate: Candidate,
        serving: Serving,
        *,
        max_kv_tokens: int,
        on_time: OnTime | None = None,
        emitted_rows: int = 8,
        max_waiting: int | None = None,
        is_fed: bool = False,
    ) -> Schedule:
        """How a candidate serves them; see ``Schedule``.

        Args:
            candidate: Its batch limit and policy.
            serving: How memory and steps are shared; its own limit of KV rows is not read.
            max_kv_tokens: KV rows of all running requests.
            on_time: Who joins next; None for first come, first served.
            emitted_rows: As of ``Schedule``, as are those that follow.
            max_waiting: Requests that may wait.
            is_fed: Requests arrive by ``arrive``.
        """
        return Schedule(
            self.requests,
            BatchLimits(candidate.max_batch, max_kv_tokens),
            serving,
            round_rows=candidate.speculation.kv_rows,
            on_time=on_time,
            emitted_rows=emitted_rows,
            max_waiting=max_waiting,
            is_fed=is_fed,
        )


def served_requests(
    requests: Sequence[BoundRequest], spec: SpeculationSpec, target: ModelShape, max_kv_tokens: int
) -> ServedRequests:
    """Part the requests that can be served from those that cannot.

    Raises:
        InputError: If there is none.
    """
    refused = refused_requests(
        requests,
        round_rows=spec.kv_rows,
        max_kv_tokens=max_kv_tokens,
        max_positions=target.max_positions,
        vocab=target.vocab,
    )
    served = [request for request in requests if request.request_id not in refused]
    longest = max(len(r.prompt_ids) + r.max_new_tokens for r in served)
    return ServedRequests(served, refused, longest + spec.kv_rows)
