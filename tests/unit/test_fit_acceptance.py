"""What recordings say of a draft: its calibration, and the luck of the prompts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize

from benchmarks.campaign.prompt_luck import PromptLuck, prompt_luck
from codesign.acceptance import ABSENT_LOG_PROB, AcceptanceProfile, Recording
from codesign.fit.calibration import calibration_error, fit_calibration
from codesign.fit.prompt_luck import acceptance_error, parts_covariance, rounds_per_token


def recorded(
    *, slope: float = 1.0, intercept: float = 0.0, requests: int = 20, tokens: int = 400
) -> AcceptanceProfile:
    """Recordings of a draft whose confidences are worth what slope and intercept say."""
    generator = np.random.default_rng(1)
    by_category: dict[str, list[Recording]] = {"chat": [], "code": []}
    for request in range(requests):
        chance = generator.uniform(0.05, 0.95, tokens)
        score = slope * np.log(chance / (1 - chance)) + intercept
        agreed = generator.random(tokens) < 1 / (1 + np.exp(-score))
        log_probs = np.full((tokens, 4), -25.0)
        log_probs[:, 0] = np.log(chance)
        recording = Recording(request, np.where(agreed, 0, -1), log_probs)
        by_category["chat" if request % 2 else "code"].append(recording)
    return AcceptanceProfile({name: tuple(group) for name, group in by_category.items()})


def test_a_calibration_is_recovered_within_its_standard_error():
    fitted = fit_calibration(recorded(slope=0.6, intercept=-0.8, tokens=500))
    # 10,000 tokens: standard errors are about 0.017 and 0.023 by the Fisher information.
    assert fitted.calibration.slope == pytest.approx(0.6, abs=0.06)
    assert fitted.calibration.intercept == pytest.approx(-0.8, abs=0.08)
    assert fitted.error_before > 0.1
    assert fitted.error_after is not None
    assert fitted.error_after < 0.03


def test_calibrated_confidences_keep_their_calibration():
    fitted = fit_calibration(recorded())
    assert fitted.calibration.slope == pytest.approx(1.0, abs=0.12)
    assert fitted.calibration.intercept == pytest.approx(0.0, abs=0.1)


@pytest.mark.parametrize(("slope", "intercept"), [(0.6, -0.8), (1.0, 0.0), (2.5, 3.0), (-1.0, 0.5)])
def test_a_calibration_is_the_most_likely_one(slope, intercept):
    profile = recorded(slope=slope, intercept=intercept, requests=4)
    requests = [r for group in profile.recordings.values() for r in group]
    log_prob = np.concatenate([r.log_probs[:, 0] for r in requests])
    agreed = np.concatenate([r.ranks == 0 for r in requests]).astype(np.float64)
    score = log_prob - np.log1p(-np.exp(log_prob))

    def loss(found: np.ndarray) -> float:
        logit = found[0] * score + found[1]
        prior = 0.5 * ((found[0] - 1.0) ** 2 + found[1] ** 2)
        return float(np.logaddexp(0.0, logit).sum() - agreed @ logit + prior)

    found = fit_calibration(profile).calibration
    best = minimize(loss, [1.0, 0.0], method="L-BFGS-B", bounds=[(0.0, None), (None, None)])
    assert loss(np.array([found.slope, found.intercept])) <= best.fun + 1e-9
    assert (found.slope, found.intercept) == pytest.approx(best.x, abs=1e-3)


def test_unanimous_answers_do_not_run_away():
    log_probs = np.log(np.tile([0.6, 0.2, 0.1, 0.05], (200, 1)))
    recordings = tuple([Recording(i, np.zeros(200, np.int64), log_probs) for i in range(2)])
    fitted = fit_calibration(AcceptanceProfile({"chat": recordings}))
    assert np.isfinite(fitted.calibration.slope)
    assert fitted.calibration.intercept > 0


def test_positions_where_nothing_was_named_do_not_count_for_the_calibration():
    named = recorded(requests=2, tokens=50)
    absent = Recording(7, np.full(50, -1), np.full((50, 4), ABSENT_LOG_PROB))
    both = AcceptanceProfile({**named.recordings, "summary": (absent,)})
    fitted = fit_calibration(both)
    assert fitted.num_tokens == 100
    assert fitted.calibration == fit_calibration(named).calibration


def test_one_request_leaves_nothing_to_hold_out():
    one = AcceptanceProfile({"chat": recorded().recordings["chat"][:1]})
    assert fit_calibration(one).error_after is None


def test_calibration_error_is_the_gap_between_chance_and_frequency():
    chances = np.array([0.25] * 4 + [0.75] * 4)
    agreed = np.array([1.0, 0, 0, 0, 1, 1, 1, 1])
    assert calibration_error(chances, agreed) == pytest.approx(0.5 * 0.0 + 0.5 * 0.25)


def test_acceptance_error_falls_with_the_number_of_requests():
    few, many = recorded(requests=4, tokens=40), recorded(requests=60, tokens=40)
    assert 0 < acceptance_error(many) < acceptance_error(few) < 0.5


def alike(*agreements: str) -> tuple[Recording, ...]:
    """Recordings in which the draft agrees where there is a 1."""
    return tuple(
        Recording(i, np.array([0 if c == "1" else -1 for c in text]), np.full((len(text), 2), -1.0))
        for i, text in enumerate(agreements)
    )


def test_kinds_of_prompt_that_differ_are_no_luck_if_prompts_of_a_kind_do_not():
    easy, hard = "1111" * 10, "1000" * 10
    profile = AcceptanceProfile({"code": alike(easy, easy, easy), "chat": alike(hard, hard)})
    assert acceptance_error(profile) == 0.0
    assert prompt_luck(profile, {"code": 5, "chat": 1}) == PromptLuck(0.0, 0.0)
    mixed = AcceptanceProfile({"chat": alike(easy, hard, easy, hard)})
    assert acceptance_error(mixed) > 0.1


def test_errors_of_an_answers_parts_are_those_of_its_recordings():
    easy, hard = "1111" * 32, "1000" * 32
    short = (easy[:64], hard[:64]) * 14
    (first, both), (again, last) = parts_covariance(
        AcceptanceProfile({"chat": alike(*(easy, hard) * 2, *short)})
    )
    rates = np.array([1 / 4, 3 / 4]), np.array([1 / 4, 3 / 4])
    whole = [float(np.var(r) / np.mean(r) ** 2) for r in rates]
    assert first == pytest.approx(whole[0] / 31)
    assert last == pytest.approx(whole[1] / 3)
    # What goes together is the four long ones' part of the first part's mean.
    assert both == again == pytest.approx(math.sqrt(32 / 31 * 4 / 3) * whole[0] / 32)
    assert parts_covariance(AcceptanceProfile({"chat": alike(*short)})) == ()


def test_a_kind_that_stays_whole_has_its_error_in_every_part():
    even, uneven = "1110" * 48, ["1" * 60, "0" * 60, "1000" * 15, "1110" * 15, "1010" * 15]
    alone = AcceptanceProfile({"b": alike(*uneven)})
    kinds = {"a": alike(*[even] * 5), "b": alike(*uneven)}
    errors = np.sqrt(np.diag(parts_covariance(AcceptanceProfile(kinds))))
    assert errors == pytest.approx(errors[0], rel=0.02)
    assert 0.0 < errors[0] < acceptance_error(alone)


def test_fewer_served_prompts_have_more_luck_and_that_of_the_recorded_stays():
    profile = recorded(requests=24, tokens=48)
    few, many, most = (prompt_luck(profile, {"chat": n, "code": n}) for n in (2, 12, 400))
    assert few.served > many.served > most.served > 0.0
    assert few.recorded == pytest.approx(most.recorded)
    assert most.recorded == pytest.approx(acceptance_error(profile), rel=0.3)
    one_of_a_kind = AcceptanceProfile({"a": alike("1101"), "b": alike("1000")})
    assert acceptance_error(one_of_a_kind) > 0.0  # a single one tells nothing of its kind
    assert prompt_luck(profile, {"unheard of": 4}).served > 0.0
    assert prompt_luck(AcceptanceProfile({"a": alike("1101")}), {"a": 3}) == PromptLuck(0.0, 0.0)


def test_requests_that_have_one_prompt_have_one_answer():
    profile, served = recorded(requests=24, tokens=48), {"chat": 12, "code": 12}
    luck = prompt_luck(profile, served, alike={"chat": 4.0, "code": 4.0})
    each = prompt_luck(profile, served)
    assert luck.recorded == each.recorded
    known = {request: request % 6 for request in range(24)}
    luck = prompt_luck(
        profile, served, questions=known, in_turn=True, alike=dict.fromkeys(served, 4.0)
    )
    each = prompt_luck(profile, served, questions=known, in_turn=True)
    assert luck.served == pytest.approx(2.0 * each.served)  # the questions are all asked


def test_luck_is_of_the_rounds_that_a_policy_makes():
    profile = recorded(requests=24, tokens=48)
    rates = {r.request: x for g in profile.recordings.values()
             for r, x in zip(g, rounds_per_token(g), strict=True)}  # fmt: skip
    served = {"chat": 12, "code": 12}
    chain = prompt_luck(profile, served)
    assert prompt_luck(profile, served, rounds=rates) == chain
    calm = {request: 0.5 + 0.1 * rate for request, rate in rates.items()}
    assert prompt_luck(profile, served, rounds=calm).recorded < 0.2 * chain.recorded


def test_questions_that_were_recorded_are_no_luck_but_the_words_around_them_are():
    easy, hard = "1111" * 10, "1000" * 10
    pure = AcceptanceProfile({"chat": alike(easy, easy, hard, hard)})
    asked = {0: 7, 1: 7, 2: 8, 3: 8}
    assert prompt_luck(pure, {"chat": 2}).served > 0.1
    known = prompt_luck(pure, {"chat": 2}, questions=asked, in_turn=True)
    assert (known.recorded, known.served) == (0.0, 0.0)
    once, three = (prompt_luck(pure, {"chat": n}, questions=asked, in_turn=True) for n in (1, 3))
    assert 0.0 < three.served == pytest.approx(once.served / 3)  # the third one asks either
    at_random = prompt_luck(pure, {"chat": 2}, questions=asked)
    assert at_random.recorded == 0.0 < at_random.served  # one question may be asked twice
    words = AcceptanceProfile({"chat": alike(easy, hard, easy, hard)})
    anew = prompt_luck(words, {"chat": 2})
    turns = prompt_luck(words, {"chat": 2}, questions=asked, in_turn=True)
    assert turns.served == pytest.approx(anew.served, rel=0.25)
    once_each = dict(enumerate(range(4)))  # then nobody knows what is the question's
    assert prompt_luck(words, {"chat": 2}, questions=once_each) == anew


def test_the_luck_that_is_left_is_what_requests_drawn_from_such_questions_have():
    draws = np.random.default_rng(0)

    def answers(skills: np.ndarray, each: int) -> list[str]:
        chances = np.clip(
            np.repeat(skills, each) + draws.normal(0.0, 0.1, each * len(skills)), 0, 1
        )
        return ["".join("01"[int(hit)] for hit in draws.random(48) < p) for p in chances]

    found, predicted = [], []
    for _ in range(60):
        skills = draws.uniform(0.2, 0.9, 12)
        profile = AcceptanceProfile({"chat": alike(*answers(skills, 4))})
        again = AcceptanceProfile({"chat": alike(*answers(skills, 1))})
        means = [np.mean(rounds_per_token(p.recordings["chat"])) for p in (profile, again)]
        found.append(np.log(means[1] / means[0]))
        asked = {number: number // 4 for number in range(48)}
        luck = prompt_luck(profile, {"chat": 12}, questions=asked, in_turn=True)
        predicted.append(np.hypot(luck.served, luck.recorded))
    assert np.std(found) == pytest.approx(np.mean(predicted), rel=0.3)
