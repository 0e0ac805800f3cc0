"""Messages survive the wire unchanged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from codesign.engine.draft_worker import DraftTimes
from codesign.engine.gpu.wire import (
    WireLimits,
    decode_candidates,
    decode_verdict,
    encode_candidates,
    encode_verdict,
)
from codesign.policy.protocol import (
    Admission,
    Candidates,
    PromptRows,
    RequestCandidates,
    RequestVerdict,
    Verdict,
)

LIMITS = WireLimits(max_batch=3, max_rows=5)
INT = st.integers(0, 2**31 - 1)
TARGETS = st.none() | st.floats(0, 1e300, exclude_min=True)  # seconds per token
TOKENS = st.lists(INT, min_size=1, max_size=5).map(tuple)


def rows(tokens: tuple[int, ...]) -> st.SearchStrategy[RequestCandidates]:
    parents = st.tuples(st.just(-1), *(st.integers(0, i) for i in range(len(tokens) - 1)))
    chance = st.integers(0, 2**20).map(lambda units: units / 2**20)
    chances = st.tuples(st.just(1.0), *[chance] * (len(tokens) - 1)) | st.just(())
    return st.builds(RequestCandidates, INT, INT, st.just(tokens), parents, chances)


@given(
    st.builds(
        Verdict,
        round=INT,
        requests=st.lists(
            st.builds(RequestVerdict, INT, INT, TOKENS, st.booleans()), max_size=3
        ).map(tuple),
        admitted=st.lists(st.builds(Admission, INT, TOKENS, INT, TARGETS), max_size=3).map(tuple),
        # One request may have any number: a chunk is cut into pieces.
        prompts=st.lists(st.builds(PromptRows, INT, TOKENS | st.just(()), INT), max_size=60).map(
            tuple
        ),
        dropped=st.lists(INT, max_size=3).map(tuple),
        is_last=st.booleans(),
        now=st.floats(0, 1e9),
        beside=st.tuples(INT, INT),
        sharing=st.tuples(INT, INT),
    )
)
def test_verdicts_round_trip(verdict):
    assert decode_verdict(encode_verdict(verdict, LIMITS)) == verdict


@given(
    st.builds(
        Candidates, round=INT, requests=st.lists(TOKENS.flatmap(rows), max_size=3).map(tuple)
    ),
    st.builds(
        DraftTimes,
        *[st.floats(0, 1e9) for _ in range(4)],
        *[st.integers(0, 2**40) for _ in range(2)],
    ),
)
def test_candidates_round_trip(candidates, times):
    message = encode_candidates(candidates, times, LIMITS)
    assert len(message) <= LIMITS.candidate_words
    assert decode_candidates(message) == (candidates, times)
