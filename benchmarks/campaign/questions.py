"""The questions of a campaign: behind which texts acceptance is recorded, and which are served.

Both ask the same questions with other prompts in front of them as earlier material, as a trace's
requests have them, but never behind the same material (``materials``). Of a small pair's rounds per
request the standard deviation is 15 % between questions of a kind and 15 % between materials of a
question, at 48 tokens: 24 questions recorded behind four materials tell those of 24 requests within
3 % on average; behind sixteen, those of 375 requests of a replay within 1.5 %. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks.campaign.units import Workload
from codesign.acceptance import AcceptanceProfile, Recording
from codesign.models.tokenizer import Tokenizer
from codesign.prompts import CATEGORIES, BoundRequest, encode_user_turn, every_prompt, load_prompts
from codesign.prompts.pool import EncodeChat

# Tokens of material in front of a question, of requests that are served and of those recorded.
SERVED_MATERIAL, RECORDED_MATERIAL = (40, 56), (16, 32, 48, 64)
# How many questions further on the material of served requests begins, by their seed. (Until
# 28 November 2026 recordings were behind 1, 7, 13 and 19, and served ones of seed 0 behind 1.)
SERVED_FILLERS = tuple(number for number in range(1, 23) if number not in (7, 13, 19))
NUM_MATERIALS = 16
MOST_TIMES = 4  # that each question is served
LONG, LONG_TOKENS, LONG_FROM = "long", 600, 300  # a kind of its own: prompts of a trace
RECORDED_TOKENS, LONG_ANSWER = 48, 192
NUM_LONG = 2  # of the first materials' answers to each question have LONG_ANSWER tokens

_Item = TypeVar("_Item")


def served_prompts(target: Path, workload: Workload, *, seed: int) -> list[BoundRequest]:
    """Each kind of question in turn, all there from the start, and again behind other material.

    Half of each kind's questions are behind one of the ``served_texts``, half behind the other, and
    from the third time on the other way round: what a text does to the answers behind it is luck.
    """
    count = len(load_prompts("run"))
    encode, found = _encoder(target), list[BoundRequest]()
    for time in range(-(-workload.requests // count)):
        amount = SERVED_MATERIAL[time % len(SERVED_MATERIAL)]
        behind = [
            _mixed(_behind(encode, amount, workload.output_tokens, text))
            for text in served_texts(seed)
        ]
        turned = time // len(SERVED_MATERIAL)
        found += [
            behind[(number // len(CATEGORIES) + turned) % len(behind)][number]
            for number in range(count)
        ]
    return _numbered(found[: workload.requests])


def served_texts(seed: int) -> tuple[int, int]:
    """How many questions further on the material of served requests begins.

    The second text is another seed's first. It is ten questions away, so that ``materials`` has as
    many texts of each amount left.
    """
    first = SERVED_FILLERS[seed]
    return first, first + 10 if first <= 12 else first - 10


def materials(seed: int) -> list[tuple[int, int]]:
    """Tokens of each recorded material, and how many questions further on it begins.

    Each begins elsewhere, as what a text does to the answers behind it is luck, and none with a
    text that requests of this seed have, or next to the first of these. Neighbours have other
    amounts: material ends with whole texts, so that of one amount they may be the same. Each seed
    has its own order, so that the first four are others in each campaign; all 16 are most of what
    there is.
    """
    count, kinds = len(load_prompts("run")), len(RECORDED_MATERIAL)
    first, second = served_texts(seed)
    others = [n for n in range(1, count) if n not in (first - 1, first, first + 1, second)]
    order = np.random.default_rng(seed).permutation(others).tolist()
    columns = [[n for n in order if n % kinds == kind] for kind in range(kinds)]
    rows = zip(*(column[: NUM_MATERIALS // kinds] for column in columns), strict=True)
    return [pair for row in rows for pair in zip(RECORDED_MATERIAL, row, strict=True)]


def recorded_prompts(
    target: Path, *, seed: int, share: float = 1.0
) -> Iterator[list[BoundRequest]]:
    """All questions behind each of ``materials``, and half of them behind much: a kind apart.

    Of the answers behind the first few materials half are long, in turn. The first list is what is
    recorded at least; the others are as long as there is time for them.
    Requests are numbered question after question.

    Args:
        target: Directory of the target.
        seed: Of the requests that are served.
        share: Of the first list; with less than all of it there are no others.
    """
    fewest = max(round(share * len(RECORDED_MATERIAL)), 1)
    count, encode, found = len(load_prompts("run")), _encoder(target), materials(seed)

    def asked(number: int) -> list[BoundRequest]:
        amount, filler = found[number]
        group = [
            dataclasses.replace(request, max_new_tokens=LONG_ANSWER)
            if _is_long(number, question)
            else request
            for question, request in enumerate(_behind(encode, amount, RECORDED_TOKENS, filler))
        ]
        return _numbered(group, first=number * count)

    long = _numbered(_behind(encode, LONG_TOKENS, RECORDED_TOKENS)[::2], len(found) * count)
    first = [request for number in range(fewest) for request in asked(number)]
    yield [*first, *(dataclasses.replace(request, category=LONG) for request in long)]
    if share >= 1.0:
        yield from map(asked, range(fewest, len(found)))


def _is_long(material: int, question: int) -> bool:
    """Half of those behind each of the first few: late answers of two groups have more luck."""
    first = len(RECORDED_MATERIAL)
    return material < first and (material + question) % first < NUM_LONG


def as_served(profile: AcceptanceProfile, tokens: int) -> AcceptanceProfile:
    """The recordings as far as served answers go: long ones differ less, and in another way.

    Args:
        profile: As it was recorded.
        tokens: Of a served answer; recordings that are shorter are left out, but for kinds of which
            none is that long.
    """
    cut: dict[str, tuple[Recording, ...]] = {}
    for kind, group in profile.recordings.items():
        reach = [r for r in group if len(r.ranks) >= tokens] or group
        cut[kind] = tuple(r.part(0, tokens) for r in reach)
    return AcceptanceProfile(cut)


def recorded_questions(profile: AcceptanceProfile) -> dict[int, int]:
    """Which question each recorded request asks; of those behind much material another one each."""
    count = len(load_prompts("run"))
    return {
        recording.request: recording.request % count
        for kind, group in profile.recordings.items()
        if kind != LONG
        for recording in group
    }


def served_questions(count: int) -> set[int]:
    """The questions that so many requests of ``served_prompts`` ask, by number.

    A large pair serves 18 requests, of all kinds as many, and so leaves out a question of each.
    """
    kinds = [question.category for question in load_prompts("run")]
    groups = [[n for n, found in enumerate(kinds) if found == kind] for kind in CATEGORIES]
    return set(_in_turn(groups)[:count])


def of_questions(profile: AcceptanceProfile, asked: set[int]) -> AcceptanceProfile:
    """The recordings of these questions, and those behind much material; all if there are none."""
    known = recorded_questions(profile)
    kept = {
        kind: tuple(r for r in group if known.get(r.request, -1) in asked or kind == LONG)
        for kind, group in profile.recordings.items()
    }
    found = {kind: group for kind, group in kept.items() if group}
    return AcceptanceProfile(found) if found.keys() - {LONG} else profile


def _encoder(target: Path) -> EncodeChat:
    """From a question to its tokens; the same ones are asked behind many materials."""
    return functools.cache(encode_user_turn(Tokenizer(target)))


def _behind(
    encode: EncodeChat, amount: int, output_tokens: int, first_filler: int = 1
) -> list[BoundRequest]:
    """Every question with so many tokens in front of it."""
    questions = load_prompts("run")

    def asked(length: int) -> list[BoundRequest]:
        return every_prompt(
            questions,
            encode,
            lengths=[length],
            max_new_tokens=output_tokens,
            first_filler=first_filler,
        )

    lengths = [request.prompt_tokens + amount for request in asked(1)]
    return [asked(length)[number] for number, length in enumerate(lengths)]


def kind(category: str, prompt_tokens: int) -> str:
    """Recordings that stand for a request."""
    return LONG if prompt_tokens > LONG_FROM else category


def _mixed(requests: list[BoundRequest]) -> list[BoundRequest]:
    """One of each category in turn, so that any number of them is balanced."""
    groups = [[r for r in requests if r.category == category] for category in CATEGORIES]
    return _in_turn(groups)


def _in_turn(groups: Sequence[Sequence[_Item]]) -> list[_Item]:
    """The first of each group, then the second of each, as long as there are any."""
    return [item for item in chain.from_iterable(zip_longest(*groups)) if item is not None]


def _numbered(requests: list[BoundRequest], first: int = 0) -> list[BoundRequest]:
    return [dataclasses.replace(r, request_id=number) for number, r in enumerate(requests, first)]
