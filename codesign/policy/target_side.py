"""The target's side of the round protocol: it owns the requests and decides every token.

See codesign/policy/protocol.py. Must not import torch or read a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from codesign.policy.messages import (
    Admission,
    Candidates,
    KVMove,
    RequestCandidates,
    RequestVerdict,
    VerifyRows,
    depths_of,
)
from codesign.policy.stop_text import Push, StopText
from codesign.policy.turns import Turns
from codesign.policy.walk import Walk, walk


@dataclass(slots=True)
class _Verified:
    """Target state of one request."""

    committed: list[int]
    prompt_len: int
    max_new_tokens: int
    stop_tokens: frozenset[int]


class TargetSide:
    """Owns the requests and decides every token.

    Args:
        new_text: Makes what turns a request's tokens into text; for stop strings.
        turns: Who takes part in a round of plain decoding; None if all do.
    """

    def __init__(
        self, new_text: Callable[[], Push] | None = None, turns: Turns | None = None
    ) -> None:
        self._turns = turns
        self._num_sitting = 0  # of the round at hand
        self._requests: dict[int, _Verified] = {}
        self._new_text = new_text
        self._stops: dict[int, StopText] = {}  # kept while a request is evicted

    @property
    def request_ids(self) -> tuple[int, ...]:
        """Running requests, in order of admission."""
        return tuple(self._requests)

    def output(self, request_id: int) -> tuple[int, ...]:
        """Tokens emitted so far."""
        request = self._requests[request_id]
        return tuple(request.committed[request.prompt_len :])

    def is_last(self, request_id: int) -> bool:
        """Whether a request ends with one token more, whatever it is."""
        request = self._requests[request_id]
        return len(request.committed) - request.prompt_len + 1 >= request.max_new_tokens

    def admit(self, admission: Admission, stop_tokens: frozenset[int] = frozenset()) -> None:
        """Start a request; its prompt must be prefilled and its first token committed next."""
        self._requests[admission.request_id] = _Verified(
            list(admission.tokens),
            len(admission.tokens),
            admission.max_new_tokens,
            stop_tokens | admission.options.stop_tokens,
        )
        strings = admission.options.stop_strings
        if strings and admission.request_id not in self._stops:
            assert self._new_text is not None, "stop strings without a tokenizer"
            self._stops[admission.request_id] = StopText(strings, self._new_text())

    def evict(self, request_id: int) -> None:
        """Forget a request that loses its KV rows; it may come back with a longer prompt."""
        self._forget(request_id)

    def commit_first(self, request_id: int, token: int) -> RequestVerdict:
        """Commit the token that the prefill's last row gave."""
        request = self._requests[request_id]
        is_finished = token in request.stop_tokens or request.max_new_tokens == 1
        _, is_stopped = self._until_stop(request_id, (token,))
        return self._commit(request_id, (token,), is_finished=is_finished or is_stopped)

    def verify_rows(self, candidates: Candidates | None) -> list[VerifyRows]:
        """Rows of the next target forward: each request's tree, or its last token alone.

        Where there is no tree, requests may take turns. Entries whose base length is not the
        request's own are stale and ignored.
        """
        sent = {} if candidates is None else {c.request_id: c for c in candidates.requests}
        requests = self._requests
        taking = self._taking_turns(sent.values()) or requests
        self._num_sitting = len(requests) - len(taking)
        return [self._request_rows(number, requests[number], sent.get(number)) for number in taking]

    def _taking_turns(self, sent: Iterable[RequestCandidates]) -> list[int] | None:
        """Who takes part in a round without trees; None for all."""
        turns, requests = self._turns, self._requests
        if turns is None or len(requests) < turns.prices.fewest:
            return None
        if any(len(entry.tokens) > 1 for entry in sent):
            return None
        return turns.take({number: len(r.committed) - 1 for number, r in requests.items()})

    def all_go_on(self) -> bool:
        """Whether a round of plain decoding is followed by another one of the same requests.

        But for those that end with it: all who are left take part in both.
        """
        turns = self._turns
        if self._num_sitting:
            return False
        if turns is None or len(self._requests) < turns.prices.fewest:
            return True
        left = [len(r.committed) for n, r in self._requests.items() if not self.is_last(n)]
        return turns.prices.count(len(left), sum(left)) == len(left)

    def _request_rows(
        self, request_id: int, request: _Verified, entry: RequestCandidates | None
    ) -> VerifyRows:
        base_len = len(request.committed)
        tokens: tuple[int, ...] = (request.committed[-1],)
        parents: tuple[int, ...] = (-1,)
        chances: tuple[float, ...] = ()
        if entry is not None and entry.base_len == base_len:
            assert entry.tokens[0] == request.committed[-1], "root is not the last committed token"
            tokens, parents, chances = entry.tokens, entry.parents, entry.chances
        context = base_len - 1
        positions = tuple([context + depth for depth in depths_of(parents)])
        return VerifyRows(request_id, tokens, parents, positions, context, chances)

    def judge(
        self, rows: VerifyRows, sample: Callable[[int], int]
    ) -> tuple[RequestVerdict, KVMove]:
        """Walk one request's tree and commit what it yields.

        Args:
            rows: As named by ``verify_rows``.
            sample: Token that the target emits after a row.

        Returns:
            The verdict, and the rows of the target's slab that survive.
        """
        request = self._requests[rows.request_id]
        emitted = len(request.committed) - request.prompt_len
        walked: Walk = walk(
            rows.tokens,
            rows.parents,
            sample,
            stop_tokens=request.stop_tokens,
            limit=request.max_new_tokens - emitted,
        )
        tokens, is_stopped = self._until_stop(rows.request_id, walked.tokens)
        is_finished = walked.is_stopped or is_stopped
        verdict = self._commit(rows.request_id, tokens, is_finished=is_finished)
        return verdict, KVMove(rows.request_id, rows.context, walked.accepted[: len(tokens)])

    def _until_stop(self, request_id: int, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """The tokens up to the end of a stop string, and whether there is one."""
        stop = self._stops.get(request_id)
        count = None if stop is None else stop.end(tokens)
        return tokens[:count], count is not None

    def _commit(
        self, request_id: int, tokens: tuple[int, ...], *, is_finished: bool
    ) -> RequestVerdict:
        request = self._requests[request_id]
        verdict = RequestVerdict(request_id, len(request.committed), tokens, is_finished)
        request.committed += tokens
        if is_finished:
            self._forget(request_id)
            self._stops.pop(request_id, None)
        return verdict

    def _forget(self, request_id: int) -> None:
        del self._requests[request_id]
        if self._turns is not None:
            self._turns.leave(request_id)
