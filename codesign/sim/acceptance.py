"""A draft model and a target model that agree as often as the recorded ones did.

The token that the target emits next is always ``TRUE_TOKEN``, for every request and position. When
the draft model runs on a node whose path is the true one, the recorded vector of that output
position is replayed: the child at the recorded rank carries ``TRUE_TOKEN``, the others carry other
tokens. Elsewhere a random recorded vector is taken, and no child carries ``TRUE_TOKEN``. So the
policy sees real confidences, and the target's walk accepts what the recorded target would have.
Behind wrong tokens draft models are less sure than along answers (docs/prediction-errors.md#deep-
trees), so there half of the vectors are the less sure one of two.

What is drawn depends on the seed, the request and the output position alone, never on the schedule
or the policy: two plans are compared on the same draws. Which recorded tokens a request plays says
codesign.sim.stretches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from codesign.acceptance import ABSENT_LOG_PROB, AcceptanceProfile
from codesign.answer_parts import part_of_all
from codesign.policy.cost import Calibration
from codesign.policy.protocol import ExpansionRows
from codesign.policy.walk import noise_key

TRUE_TOKEN = 1
PROMPT_TOKEN = 0
_FIRST_WRONG_TOKEN = 2
_OFF_PATH = 1  # spawn key of the draws for nodes off the true path
_OFF_PATH_DRAWS = 256  # drawn at once, per request
_LESS_SURE = 0.5  # of the draws: the less sure one of two (python -m benchmarks.off_path)
_EMPTY_DRAWS = 32  # until then an off-path draw without any proposal is drawn again


@dataclass(frozen=True, slots=True)
class Recordings:
    """An acceptance profile as Python lists, for a loop without NumPy.

    Attributes:
        log_probs: Per recorded token, all categories one after another, the log probabilities of
            the tokens that were named, K or fewer.
        tokens: Per recorded token, as many tokens for a node on the true path.
        sureness: Per recorded token the log probability of the likeliest one, 0 if none was named.
        wrong_tokens: K tokens for a node off the true path.
        spans: Per category, and under "" for all, its recordings as (first, end) of ``log_probs``;
            of a profile in parts also what follows "" in answers.
    """

    log_probs: list[list[float]]
    tokens: list[tuple[int, ...]]
    sureness: NDArray[np.float64]
    wrong_tokens: tuple[int, ...]
    spans: dict[str, tuple[tuple[int, int], ...]]


@functools.lru_cache(maxsize=4)
def load_recordings(profile: AcceptanceProfile) -> Recordings:
    """The profile as lists; made once per profile, since a planner simulates many plans."""
    log_probs: list[list[float]] = []
    tokens: list[tuple[int, ...]] = []
    spans: dict[str, tuple[tuple[int, int], ...]] = {}
    wrong = tuple(range(_FIRST_WRONG_TOKEN, _FIRST_WRONG_TOKEN + profile.top_k))
    by_rank = [(*wrong[:rank], TRUE_TOKEN, *wrong[rank + 1 :]) for rank in range(profile.top_k)]
    by_rank.append(wrong)  # rank -1: the true token is not drafted
    for category, group in profile.recordings.items():
        of_category = []
        for recording in group:
            of_category.append((len(log_probs), len(log_probs) + len(recording.ranks)))
            num_named = (recording.log_probs > ABSENT_LOG_PROB).sum(axis=1).tolist()
            rows = np.minimum(recording.log_probs, 0.0).tolist()
            log_probs += [row[:count] for row, count in zip(rows, num_named, strict=True)]
            ranks = recording.ranks.tolist()
            tokens += [by_rank[r][:count] for r, count in zip(ranks, num_named, strict=True)]
        spans[category] = tuple(of_category)
    of_all: dict[str, tuple[tuple[int, int], ...]] = {}
    for category, of_category in spans.items():
        name = part_of_all(category)
        of_all[name] = of_all.get(name, ()) + of_category
    spans |= of_all
    sureness = np.array([row[0] if row else 0.0 for row in log_probs])
    return Recordings(log_probs, tokens, sureness, wrong, spans)


@dataclass(slots=True)
class _Replay:
    """Draws of one request.

    Attributes:
        prompt_tokens: Its prompt's length: output position 0 is this absolute position.
        path: Recorded token that each output position replays.
        spans: Recordings of its category.
        off_path: Generator of the recorded tokens for nodes off the true path; None until the
            first.
        drawn: Recorded tokens already drawn from ``off_path``.
    """

    prompt_tokens: int
    path: list[int]
    spans: tuple[tuple[int, int], ...]
    off_path: np.random.Generator | None = None
    drawn: list[int] = field(default_factory=list)


@functools.lru_cache(maxsize=4)
def weighed_profile(profile: AcceptanceProfile, calibration: Calibration) -> AcceptanceProfile:
    """The recordings with calibrated chances, so that no policy has to weigh the same ones again.

    ``Speculation.weigh`` does the same one vector at a time; that is half of a round's work.
    """
    if calibration.is_identity:
        return profile
    recordings = {
        kind: tuple(
            replace(r, log_probs=_weighed(r.log_probs, calibration).reshape(r.log_probs.shape))
            for r in group
        )
        for kind, group in profile.recordings.items()
    }
    return AcceptanceProfile(recordings)


def _weighed(log_probs: NDArray[np.float64], calibration: Calibration) -> NDArray[np.float64]:
    confidence = np.clip(np.exp(log_probs), 1e-6, 1.0 - 1e-6)
    logit = np.log(confidence) - np.log1p(-confidence)
    chances = -np.logaddexp(0.0, -(calibration.slope * logit + calibration.intercept))
    return np.where(log_probs > ABSENT_LOG_PROB, chances, log_probs)


Paths = Callable[[int, int, int], list[int]]  # (request, length, emitted before) -> recorded tokens


class SyntheticDrafter:
    """Answers expansions as the recorded draft model would.

    Args:
        profile: What was recorded.
        seed: Of the draws off the true path.
        paths: What each request replays on it.
    """

    def __init__(self, profile: AcceptanceProfile, seed: int, paths: Paths) -> None:
        self._recordings = load_recordings(profile)
        self._seed = seed
        self._paths = paths
        self._requests: dict[int, _Replay] = {}

    def admit(
        self,
        request_id: int,
        *,
        category: str,
        prompt_tokens: int,
        output_tokens: int,
        emitted_before: int = 0,
    ) -> None:
        """Look up what a request replays.

        Args:
            request_id: Key of its path and its draws.
            category: Recordings of this kind; of all kinds if there are none.
            prompt_tokens: Length of its prompt.
            output_tokens: Tokens that it will emit.
            emitted_before: Tokens that it had emitted before it was evicted.
        """
        spans = self._recordings.spans.get(category, self._recordings.spans[""])
        path = self._paths(request_id, output_tokens, emitted_before)
        self._requests[request_id] = _Replay(prompt_tokens, path, spans)

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        del self._requests[request_id]

    def answer(self, rows: ExpansionRows) -> tuple[list[tuple[int, ...]], list[list[float]]]:
        """Tokens and log probabilities below each node of an expansion, K or fewer each."""
        request = self._requests[rows.request_id]
        recordings = self._recordings
        tokens: list[tuple[int, ...]] = []
        log_probs: list[list[float]] = []
        i = len(rows.tokens) - len(rows.nodes)
        for node in rows.nodes:
            # Only nodes on the true path have a child with the true token, and the root is on it.
            if node == 0 or rows.tokens[i] == TRUE_TOKEN:
                at = request.path[rows.positions[i] + 1 - request.prompt_tokens]
                found = recordings.tokens[at]
                if rows.trust and self._is_lost(rows, i, rows.trust[len(tokens)]):
                    found = recordings.wrong_tokens[: len(found)]
                tokens.append(found)
            else:
                at = self._next_off_path(rows.request_id, request)
                tokens.append(recordings.wrong_tokens[: len(recordings.log_probs[at])])
            log_probs.append(recordings.log_probs[at])
            i += 1
        return tokens, log_probs

    def _is_lost(self, rows: ExpansionRows, row: int, trust: float) -> bool:
        """Whether a draft head has lost the true token to features of its own.

        One draw per position: with more trust it is found wherever it was with less.
        """
        return noise_key(self._seed, rows.request_id, rows.positions[row]) >= trust * 2.0**64

    def _next_off_path(self, request_id: int, request: _Replay) -> int:
        """A recorded token of the category with a proposal, rather one where the draft was unsure.

        A draft model always proposes something. Look-up does not, but the node is here because it
        copies earlier text, and that text goes on.
        """
        at = self._draw_off_path(request_id, request)
        for _ in range(_EMPTY_DRAWS):
            if self._recordings.log_probs[at]:
                break
            at = self._draw_off_path(request_id, request)
        return at

    def _draw_off_path(self, request_id: int, request: _Replay) -> int:
        if not request.drawn:
            if request.off_path is None:
                seed = np.random.SeedSequence(self._seed, spawn_key=(_OFF_PATH, request_id))
                request.off_path = np.random.default_rng(seed)
            request.drawn = self._off_path_places(request.off_path, request.spans).tolist()
        return request.drawn.pop()

    def _off_path_places(
        self, generator: np.random.Generator, spans: tuple[tuple[int, int], ...]
    ) -> NDArray[np.int64]:
        """Recorded tokens, _OFF_PATH_DRAWS of them, for nodes behind wrong tokens."""
        firsts, ends = np.array(spans).T
        sizes = np.cumsum(ends - firsts)
        drawn = generator.integers(0, sizes[-1], size=(2, _OFF_PATH_DRAWS))
        # Between its recordings there may be those of other kinds.
        at = np.searchsorted(sizes, drawn, side="right")
        first, second = drawn - sizes[at] + ends[at]
        sureness = self._recordings.sureness
        less_sure = np.where(sureness[second] < sureness[first], second, first)
        return np.where(generator.random(_OFF_PATH_DRAWS) < _LESS_SURE, less_sure, first)
