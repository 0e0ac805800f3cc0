"""The synthetic draft model: what it replays, and that nothing but the seed decides it."""

from __future__ import annotations

import numpy as np

from codesign.acceptance import AcceptanceProfile, Recording
from codesign.policy.protocol import ExpansionRows
from codesign.sim.acceptance import (
    PROMPT_TOKEN,
    TRUE_TOKEN,
    SyntheticDrafter,
    load_recordings,
)
from codesign.sim.stretches import Luck

TOP_K = 3
OFF_PATH_TOKEN = 2


def recording(request: int, ranks: list[int], confidence: float) -> Recording:
    log_probs = np.log(np.tile([confidence, 0.02, 0.01], (len(ranks), 1)))
    return Recording(request, np.array(ranks), log_probs)


def two_categories() -> AcceptanceProfile:
    return AcceptanceProfile(
        {
            "chat": (recording(0, [0, 1, 2, -1], 0.5), recording(1, [1, 1], 0.6)),
            "code": (recording(2, [0, 0, 0], 0.9),),
        }
    )


def expansion(node: int, token: int, position: int, request_id: int = 0) -> ExpansionRows:
    return ExpansionRows(request_id, (token,), (position,), (node,), None, position)


def drafter(seed: int, *, category: str = "chat", request_ids=(0,)) -> SyntheticDrafter:
    ids = sorted(request_ids)
    luck = Luck.of(two_categories(), [category] * (ids[-1] + 1), [50] * (ids[-1] + 1), seed)
    model = SyntheticDrafter(two_categories(), seed, luck.path)
    for request_id in request_ids:
        model.admit(request_id, category=category, prompt_tokens=5, output_tokens=50)
    return model


def replayed(model: SyntheticDrafter, request_id: int, num_tokens: int = 50) -> list[list[int]]:
    """Tokens below the root when the root stands before each output position in turn."""
    answers = []
    for at in range(num_tokens):
        tokens, _ = model.answer(expansion(0, TRUE_TOKEN, 4 + at, request_id))
        answers.append(list(tokens[0]))
    return answers


def test_the_true_token_stands_at_the_recorded_rank_and_nowhere_if_it_was_not_drafted():
    recordings = load_recordings(two_categories())
    ranks = [t.index(TRUE_TOKEN) if TRUE_TOKEN in t else -1 for t in recordings.tokens]
    assert ranks == [0, 1, 2, -1, 1, 1, 0, 0, 0]
    assert all(len(set(tokens)) == TOP_K for tokens in recordings.tokens)
    assert TRUE_TOKEN not in recordings.wrong_tokens
    assert PROMPT_TOKEN not in recordings.wrong_tokens


def test_off_the_true_path_no_child_is_true():
    model = drafter(seed=0, category="code")
    for _ in range(600):  # more than are drawn at once
        tokens, log_probs = model.answer(expansion(1, OFF_PATH_TOKEN, 6))
        assert TRUE_TOKEN not in tokens[0]
        assert len(log_probs[0]) == TOP_K


def test_the_root_is_on_the_true_path_even_if_it_is_a_prompt_token():
    model = drafter(seed=0, category="code")
    tokens, _ = model.answer(expansion(0, PROMPT_TOKEN, 4))
    assert tokens[0][0] == TRUE_TOKEN


def test_a_position_is_replayed_the_same_however_often_and_in_whatever_order_it_is_asked():
    model = drafter(seed=5)
    forward = replayed(model, 0)
    model.answer(expansion(1, OFF_PATH_TOKEN, 9))
    assert replayed(model, 0) == forward


def test_the_draws_of_a_request_do_not_depend_on_when_it_is_admitted():
    early = drafter(seed=5, request_ids=(3, 1, 2))
    late = drafter(seed=5, request_ids=(1, 2, 3))
    assert replayed(early, 3) == replayed(late, 3)
    assert replayed(early, 1) != replayed(early, 3)


def test_another_seed_replays_something_else():
    assert replayed(drafter(seed=5), 0) != replayed(drafter(seed=6), 0)


def test_an_unknown_category_replays_all_recordings_and_a_known_one_only_its_own():
    of_code = {tuple(t) for t in replayed(drafter(seed=1, category="code"), 0)}
    assert of_code == {(TRUE_TOKEN, 3, 4)}
    of_all = {tuple(t) for t in replayed(drafter(seed=1, category="poetry"), 0)}
    assert of_all == {(TRUE_TOKEN, 3, 4), (2, TRUE_TOKEN, 4), (2, 3, TRUE_TOKEN), (2, 3, 4)}


def test_the_draft_models_confidences_are_the_recorded_ones():
    model = drafter(seed=1, category="code")
    _, log_probs = model.answer(expansion(0, TRUE_TOKEN, 4))
    np.testing.assert_allclose(np.exp(log_probs[0]), [0.9, 0.02, 0.01])


def test_behind_wrong_tokens_half_of_the_draws_are_the_less_sure_one_of_two():
    model = drafter(seed=0)
    draws = 20_000
    unsure = 0
    for _ in range(draws):
        _, log_probs = model.answer(expansion(1, OFF_PATH_TOKEN, 6))
        unsure += log_probs[0][0] < np.log(0.55)
    share = 4 / 6  # of the kind's recorded tokens
    either = 1.0 - (1.0 - share) ** 2
    assert abs(unsure / draws - (share + either) / 2) < 0.01
