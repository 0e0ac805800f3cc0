"""The papers' printed results, at a smaller size than docs/papers.md has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.papers import specserve, swiftspec
from benchmarks.questions import QUESTIONS
from benchmarks.reproduce_papers import SECTIONS

ROOT = Path(__file__).parents[2]


def test_parallel_trees_reach_swiftspecs_275_tokens_a_second_where_serial_ones_reach_less(
    monkeypatch,
):
    monkeypatch.setattr(swiftspec, "EXPANSIONS", (4,))
    found = swiftspec.read_table_6(1.0, requests=6, steps=5)
    serial, parallel = found.serial, found.parallel[found.expansions[1]]
    assert serial.compression == pytest.approx(swiftspec.SERIAL_COMPRESSION + 1.0, rel=0.03)
    assert parallel.tokens_per_second == pytest.approx(swiftspec.PARALLEL_SPEED, rel=0.08)
    assert serial.tokens_per_second == pytest.approx(swiftspec.SERIAL_SPEED, rel=0.16)
    ratio = parallel.tokens_per_second / serial.tokens_per_second
    assert ratio == pytest.approx(swiftspec.PARALLEL_SPEED / swiftspec.SERIAL_SPEED, rel=0.18)
    assert parallel.compression < serial.compression


def test_no_round_emits_more_than_its_draft_forwards_and_a_bonus_token():
    """Why the printed compression, step times and speeds cannot all hold."""
    for expansions in (2, 4):
        speed = swiftspec._table_6_speed(False, expansions, 0.98, requests=3)
        assert expansions < speed.compression <= expansions + 1


@pytest.mark.parametrize("index", [1, 2, 4])
def test_the_best_split_is_figure_9s_where_we_say_so(index):
    pair, best = list(swiftspec.BEST_SPLIT.items())[index]
    software = swiftspec.fitted_software()
    speeds = {
        split: swiftspec.split_speed(pair, split, software, 0.9, requests=6).tokens_per_second
        for split in ("2+6", "4+4", "6+2")
    }
    assert max(speeds, key=speeds.__getitem__) == best


@pytest.mark.parametrize("index", [0, 3])
def test_where_our_split_is_another_both_are_within_the_error_of_step_times(index):
    pair, best = list(swiftspec.BEST_SPLIT.items())[index]
    software = swiftspec.fitted_software()
    ours, theirs = (
        swiftspec.split_speed(pair, split, software, 0.9, requests=6).tokens_per_second
        for split in ("6+2", best)
    )
    assert 1.0 < ours / theirs < 1.06


def test_specserves_methods_keep_their_order_and_drafts_shorten_as_the_batch_grows():
    found = specserve.methods_on("code-twin", seconds=60.0)
    threshold, without, whole = (found[method] for method in specserve.METHODS)
    assert threshold.speedup < without.speedup < whole.speedup
    assert whole.drafted < without.drafted
    assert whole.accepted / whole.drafted > without.accepted / without.drafted
    lengths = [length for length in whole.by_batch if length is not None]
    assert len(lengths) >= 3
    assert lengths == sorted(lengths, reverse=True)
    assert whole.correlation < -0.4 < -0.1 < threshold.correlation


def test_the_document_has_every_section_and_names_the_command():
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    assert "python -m benchmarks.reproduce_papers" in text
    for title, _ in SECTIONS.values():
        assert f"## {title}" in text


def test_every_open_question_is_answered_with_the_command_that_answers_it():
    text = (ROOT / "docs" / "questions.md").read_text(encoding="utf-8")
    assert len(QUESTIONS) == 4
    for name, question in QUESTIONS.items():
        assert f"## {question.title}" in text
        assert f"python -m benchmarks.questions {name}" in text
        assert question.found[:40] in " ".join(text.split())
