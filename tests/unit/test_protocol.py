"""Messages worked out by hand. tests/property/test_protocol.py runs the whole protocol."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codesign.errors import InputError
from codesign.policy.options import RequestOptions
from codesign.policy.protocol import (
    Admission,
    Candidates,
    DraftSide,
    ExpansionRows,
    KVMove,
    RequestCandidates,
    RequestVerdict,
    TargetSide,
    Verdict,
    VerifyRows,
)
from codesign.policy.speculation import build_speculation, parse_policy
from codesign.policy.stop_text import StopText, text_before


def draft_side(policy: str = "tree-4x2x1") -> DraftSide:
    return DraftSide(build_speculation(parse_policy(policy)))


def target_side(*, prompt=(5, 6, 7), max_new_tokens=9, stop_tokens=frozenset()) -> TargetSide:
    target = TargetSide()
    target.admit(Admission(1, tuple(prompt), max_new_tokens), stop_tokens)
    return target


def stopping_side(*strings: str, max_new_tokens: int = 9) -> TargetSide:
    target = TargetSide(new_text=lambda: "abcdefghij".__getitem__)
    target.admit(Admission(1, (5,), max_new_tokens, options=RequestOptions(stop_strings=strings)))
    return target


def run_once(draft: DraftSide, rows: list[ExpansionRows], *choices: list[int]) -> None:
    for entry in rows:
        log_probs = [[math.log(0.5 / 2**i) for i in range(len(c))] for c in choices]
        draft.expanded(entry, list(choices), log_probs)


def test_first_expansion_runs_the_whole_prompt():
    draft = draft_side()
    draft.admit(Admission(1, (5, 6, 7), 9))
    assert draft.next_expansion(0) == [
        ExpansionRows(
            request_id=1,
            tokens=(5, 6, 7),
            positions=(0, 1, 2),
            nodes=(0,),
            visible=None,
            context=0,
        )
    ]
    assert draft.tree(1).prefix_len == 2


def test_prompt_of_one_token_is_just_the_root():
    draft = draft_side()
    draft.admit(Admission(1, (5,), 9))
    (rows,) = draft.next_expansion(0)
    assert (rows.tokens, rows.positions, rows.nodes, rows.context) == ((5,), (0,), (0,), 0)


def test_tree_rows_see_their_path_behind_the_prefix():
    draft = draft_side("tree-4x2x2")
    draft.admit(Admission(1, (5, 6, 7), 9))
    run_once(draft, draft.next_expansion(0), [8, 9])
    (rows,) = draft.next_expansion(1)
    assert rows.tokens == (8, 9)
    assert rows.positions == (3, 3)
    assert rows.visible == ((0, 1), (0, 2))
    assert rows.context == 3


def test_candidates_are_the_best_nodes_with_the_committed_length():
    draft = draft_side("tree-3x2x1")
    draft.admit(Admission(1, (5, 6, 7), 9))
    run_once(draft, draft.next_expansion(0), [8, 9, 4])
    assert draft.candidates(17) == Candidates(
        17, (RequestCandidates(1, 3, (7, 8, 9), (-1, 0, 0), chances=(1.0, 0.5, 0.25)),)
    )


def test_at_most_fanout_choices_are_taken():
    draft = draft_side("chain-2")
    draft.admit(Admission(1, (5,), 9))
    run_once(draft, draft.next_expansion(0), [8, 9, 4])
    assert draft.tree(1).tokens == [5, 8]


def test_verdict_moves_promoted_then_kept_rows_behind_the_prefix():
    draft = draft_side("tree-4x2x2")
    draft.admit(Admission(1, (5, 6, 7), 9))
    run_once(draft, draft.next_expansion(0), [8, 9])
    run_once(draft, draft.next_expansion(1), [1, 2], [3, 4])
    moves, finished = draft.receive(Verdict(0, (RequestVerdict(1, 3, (9,)),)))
    assert moves == [KVMove(1, base=2, rows=(0, 2))]
    assert finished == []
    assert draft.committed(1) == (5, 6, 7, 9)
    assert draft.tree(1).prefix_len == 3
    assert draft.tree(1).tokens == [9, 3, 4]


def test_after_a_miss_the_tokens_without_kv_rows_are_caught_up():
    draft = draft_side()
    draft.admit(Admission(1, (5, 6, 7), 9))
    run_once(draft, draft.next_expansion(0), [8, 9])
    draft.receive(Verdict(0, (RequestVerdict(1, 3, (8, 1, 2)),)))
    (rows,) = draft.next_expansion(0)
    # Token 8 was a leaf and 1 is not in the tree: neither has a KV row; 2 is the new root.
    assert rows == ExpansionRows(
        request_id=1, tokens=(8, 1, 2), positions=(3, 4, 5), nodes=(0,), visible=None, context=3
    )


def test_finished_request_leaves_the_draft_without_a_move():
    draft = draft_side()
    draft.admit(Admission(1, (5,), 9))
    first, last = RequestVerdict(1, 1, (3,)), RequestVerdict(1, 2, (4,), is_finished=True)
    moves, finished = draft.receive(Verdict(0, (first, last)))
    assert (moves, finished) == ([], [1])
    assert draft.request_ids == ()


def test_two_verdicts_of_one_request_in_one_message_move_twice():
    draft = draft_side()
    draft.admit(Admission(1, (5, 6, 7), 9))
    run_once(draft, draft.next_expansion(0), [8, 9])
    entries = (RequestVerdict(1, 3, (8,)), RequestVerdict(1, 4, (2,)))
    moves, _ = draft.receive(Verdict(0, entries))
    assert moves == [KVMove(1, base=2, rows=(0,)), KVMove(1, base=3, rows=())]
    assert draft.committed(1) == (5, 6, 7, 8, 2)


def test_verdict_out_of_step_is_our_bug():
    draft = draft_side()
    draft.admit(Admission(1, (5, 6, 7), 9))
    with pytest.raises(AssertionError, match="out of step"):
        draft.receive(Verdict(0, (RequestVerdict(1, 2, (8,)),)))


def test_requests_join_with_the_message_that_admits_them():
    draft = draft_side()
    moves, finished = draft.receive(
        Verdict(0, (RequestVerdict(1, 2, (8,)),), admitted=(Admission(1, (5, 6), 9),))
    )
    assert (moves, finished) == ([KVMove(1, base=0, rows=())], [])
    (rows,) = draft.next_expansion(0)
    assert (rows.tokens, rows.positions, rows.context) == ((5, 6, 8), (0, 1, 2), 0)


def test_draft_never_goes_deeper_than_the_request_may_emit():
    draft = draft_side("chain-5")
    draft.admit(Admission(1, (5,), 3))  # emits at positions 1, 2 and 3; the last is a bonus token
    done = 0
    while rows := draft.next_expansion(done):
        run_once(draft, rows, [8])
        done += 1
    assert done == 2
    (entry,) = draft.candidates(0).requests
    assert entry.tokens == (5, 8, 8)


def test_plain_policy_sends_roots_only():
    draft = DraftSide(build_speculation(parse_policy("plain")))
    draft.admit(Admission(1, (5, 6), 9))
    draft.begin()
    assert draft.next_expansion(0) == []
    assert draft.overlap_expansion() == []
    assert draft.candidates(0).requests == (RequestCandidates(1, 2, (6,), (-1,)),)


def test_chain_stays_within_its_rows_after_a_verdict_that_ignored_it():
    # The answer came too late; the target's own token happens to be in the chain.
    draft = draft_side("chain-3")
    draft.admit(Admission(1, (5,), 30))
    for _ in range(4):
        done = 0
        while rows := draft.next_expansion(done):
            run_once(draft, rows, [8])
            done += 1
        (entry,) = draft.candidates(0).requests
        assert entry.tokens[1:] == (8, 8, 8)
        draft.receive(Verdict(0, (RequestVerdict(1, entry.base_len, (8,)),)))


def test_target_verifies_root_only_without_candidates():
    target = target_side()
    target.commit_first(1, 4)
    root = VerifyRows(1, tokens=(4,), parents=(-1,), positions=(3,), context=3)
    assert target.verify_rows(None) == [root]
    assert target.verify_rows(Candidates(0)) == [root]
    stale = RequestCandidates(1, base_len=3, tokens=(7, 8), parents=(-1, 0))
    other = RequestCandidates(9, base_len=4, tokens=(4, 8), parents=(-1, 0))
    assert target.verify_rows(Candidates(0, (stale, other))) == [root]


def test_target_rows_carry_absolute_positions_and_see_their_ancestors():
    target = target_side()
    target.commit_first(1, 4)
    entry = RequestCandidates(1, 4, tokens=(4, 8, 9, 1), parents=(-1, 0, 0, 2))
    (rows,) = target.verify_rows(Candidates(0, (entry,)))
    assert rows.positions == (3, 4, 4, 5)
    assert rows.context == 3
    assert rows.ancestors() == [[0], [0, 1], [0, 2], [0, 2, 3]]


def test_judge_keeps_the_accepted_rows_and_commits_the_emitted_tokens():
    target = target_side()
    target.commit_first(1, 4)
    entry = RequestCandidates(1, 4, tokens=(4, 8, 9, 1), parents=(-1, 0, 0, 2))
    (rows,) = target.verify_rows(Candidates(0, (entry,)))
    verdict, move = target.judge(rows, {0: 9, 2: 1, 3: 5}.__getitem__)
    assert verdict == RequestVerdict(1, base_len=4, tokens=(9, 1, 5))
    assert move == KVMove(1, base=3, rows=(0, 2, 3))
    assert target.output(1) == (4, 9, 1, 5)


def test_wrong_root_is_our_bug():
    target = target_side()
    target.commit_first(1, 4)
    wrong = RequestCandidates(1, base_len=4, tokens=(5, 8), parents=(-1, 0))
    with pytest.raises(AssertionError, match="not the last committed token"):
        target.verify_rows(Candidates(0, (wrong,)))


@pytest.mark.parametrize(
    ("max_new_tokens", "stop_tokens", "is_finished"),
    [(9, frozenset(), False), (1, frozenset(), True), (9, frozenset({4}), True)],
)
def test_the_first_token_may_end_a_request(max_new_tokens, stop_tokens, is_finished):
    target = target_side(max_new_tokens=max_new_tokens, stop_tokens=stop_tokens)
    assert target.commit_first(1, 4) == RequestVerdict(1, 3, (4,), is_finished)
    assert target.request_ids == (() if is_finished else (1,))


def test_limit_counts_the_first_token_too():
    target = target_side(max_new_tokens=3)
    target.commit_first(1, 4)
    entry = RequestCandidates(1, 4, tokens=(4, 8, 9), parents=(-1, 0, 1))
    (rows,) = target.verify_rows(Candidates(0, (entry,)))
    verdict, _ = target.judge(rows, {0: 8, 1: 9}.__getitem__)
    assert verdict == RequestVerdict(1, 4, (8, 9), is_finished=True)
    assert target.request_ids == ()


def test_stop_token_inside_an_accepted_run_ends_the_request_there():
    target = target_side(stop_tokens=frozenset({8}))
    target.commit_first(1, 4)
    entry = RequestCandidates(1, 4, tokens=(4, 8, 9), parents=(-1, 0, 1))
    (rows,) = target.verify_rows(Candidates(0, (entry,)))
    verdict, move = target.judge(rows, {0: 8, 1: 9}.__getitem__)
    assert verdict == RequestVerdict(1, 4, (8,), is_finished=True)
    assert move.rows == (0,)


# Stop strings.


def test_a_string_that_lies_across_tokens_ends_a_request_and_drops_what_was_accepted_behind_it():
    target = stopping_side("bcd")
    assert not target.commit_first(1, 1).is_finished
    rows = VerifyRows(1, (1, 2, 3, 4), (-1, 0, 1, 2), (1, 2, 3, 4), 1)
    verdict, move = target.judge(rows, sample=lambda row: (2, 3, 4, 5)[row])
    assert verdict == RequestVerdict(1, 2, (2, 3), is_finished=True)
    assert move == KVMove(1, 1, (0, 1))
    assert target.request_ids == ()


def test_a_string_may_begin_before_an_eviction_and_end_with_the_first_token_after_it():
    target = stopping_side("bc")
    target.commit_first(1, 1)
    target.evict(1)
    target.admit(Admission(1, (5, 1), 8, options=RequestOptions(stop_strings=("bc",))))
    assert target.commit_first(1, 2) == RequestVerdict(1, 2, (2,), is_finished=True)


def test_text_of_the_prompt_or_of_half_a_string_ends_nothing():
    target = stopping_side("fb", "bca")
    assert not target.commit_first(1, 1).is_finished  # "f", "b": the prompt's text is not looked at
    rows = VerifyRows(1, (1, 2), (-1, 0), (1, 2), 1)
    verdict, _ = target.judge(rows, sample=lambda row: (2, 1)[row])
    assert verdict == RequestVerdict(1, 2, (2, 1))


@given(
    st.text("ab", min_size=1, max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_strings_are_found_however_the_text_is_cut_into_tokens(text, strings, rng):
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, len(text))))
    tokens = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    found = StopText(strings, tokens.__getitem__).end(range(len(tokens)))
    ends = [text.find(s) + len(s) for s in strings if s in text]
    if not ends:
        assert found is None
        assert text_before(text, strings) == text
    else:
        assert found is not None
        assert len("".join(tokens[: found - 1])) < min(ends) <= len("".join(tokens[:found]))
        kept = text_before(text, strings)
        assert not any(s in kept for s in strings)
        assert any(text.startswith(kept + s) for s in strings)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(InputError, match="stop string must not be empty"):
        RequestOptions(stop_strings=("\n", ""))
