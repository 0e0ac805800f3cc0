"""Requests whose acceptance is recorded, and others like them that every run of a pair serves.

Both ask the same questions with other prompts in front of them as earlier material, as a trace's
requests have them, but never behind the same material. Of a small pair's rounds per request the
standard deviation is 15 % between questions of a kind and 15 % between materials of a question, at
48 tokens: 24 questions recorded behind four materials tell those of 24 requests within 3 % on
average; behind sixteen, those of 375 requests of a replay within 1.5 %. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd

from benchmarks.campaign.units import Workload
from codesign.acceptance import AcceptanceProfile, Recording
from codesign.artifacts import header, read_table, write_table
from codesign.errors import HardwareError, InputError
from codesign.models import resolve_model
from codesign.models.shape import model_shape
from codesign.models.tokenizer import Tokenizer
from codesign.planner.prepared_trace import prepare_trace
from codesign.policy.cost import RoundCost
from codesign.prompts import (
    CATEGORIES,
    BoundRequest,
    bind_prompts,
    encode_user_turn,
    every_prompt,
    load_prompts,
)
from codesign.prompts.pool import EncodeChat
from codesign.traces import Trace, load_trace

# Of a segment: prompts of a median of 150 tokens, cut to what runs as a graph (how far the host
# slows longer ones, 12 % of these, is luck), and answers as long as those that are recorded.
TRACE, PROMPT_SCALE, MAX_PROMPT, MAX_OUTPUT = "conv-twin", 0.15, 240, 48
LOAD = 0.3  # of what plain decoding bears on all GPUs: where they are split, more than twice that
# Tokens of material in front of a question, of requests that are served; the same of those that are
# recorded, and with which other question that material begins: each with each, in a Latin square.
SERVED_MATERIAL = (40, 56)
RECORDED_MATERIAL, FILLERS = (16, 32, 48, 64), (1, 7, 13, 19)
# The same of those that are served, by their seed: beyond 0, texts that nothing is recorded behind.
SERVED_FILLERS = (1, *(number for number in range(2, 23) if number not in FILLERS))
MATERIALS = [
    (amount, FILLERS[(column + row) % len(FILLERS)])
    for row in range(len(FILLERS))
    for column, amount in enumerate(RECORDED_MATERIAL)
]
LONG, LONG_TOKENS, LONG_FROM = "long", 600, 300  # a kind of its own: prompts of a trace
RECORDED_TOKENS, LONG_ANSWER = 48, 192
NUM_LONG = 2  # of the first materials' answers to each question have LONG_ANSWER tokens

_Item = TypeVar("_Item")


def load_requests(
    folder: Path, workload: Workload, target: str, cost: RoundCost | None, *, seed: int
) -> pd.DataFrame:
    """The prepared requests of a workload; made once per pair.

    Args:
        folder: The pair's.
        workload: Which.
        target: The pair's target.
        cost: Step times of the first deployment that serves it, for the rate of a segment.
        seed: Which of ``SERVED_FILLERS``, and of a segment's prompts.

    Raises:
        InputError: If those that are there are of another seed.
    """
    file = request_file(folder, workload)
    if not file.exists():
        trace = _segment(workload, cost) if workload.seconds else _at_once(workload, target, seed)
        prepared = trace
        if workload.seconds:
            prepared = prepare_trace(trace, target, seed=seed, max_requests=workload.requests)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_table(file, prepared.requests, header("trace", seed=seed))
    requests, meta = read_table(file, kind="trace")
    if (found := meta["seed"] or 0) != seed:
        raise InputError(
            f"{file} has the requests of seed {found}, not {seed}: those that a pair serves are "
            f"made once. Fix: --seed as before, or --out with another folder"
        )
    return requests


def seed_of(folder: Path) -> int:
    """Of the requests that a pair serves, below whose folder they are; 0 if there are none yet."""
    files = sorted((folder / "requests").glob("*.parquet"))
    return read_table(files[0], kind="trace")[1]["seed"] or 0 if files else 0


def request_file(folder: Path, workload: Workload) -> Path:
    """Where the requests of a workload are kept."""
    return folder / "requests" / f"{workload.name}.parquet"


def bound(
    requests: pd.DataFrame, target: str, workload: Workload, *, seed: int
) -> list[BoundRequest]:
    """Requests with token ids; those of a segment as ``codesign run`` binds them."""
    directory = resolve_model(target)
    if not workload.seconds:
        return served_prompts(directory, workload, seed=seed)
    return bind_prompts(
        requests,
        load_prompts("run"),
        encode_user_turn(Tokenizer(directory)),
        seed=seed,
        max_positions=model_shape(directory).max_positions,
    )


def alike(
    requests: pd.DataFrame, target: str, workload: Workload, *, seed: int
) -> dict[str, float]:
    """How many requests have the mean one's very prompt, itself counted, by kind.

    Those of a trace that are shorter than their question all ask it bare. Nothing is known of it
    where the target is not on this machine.
    """
    if not workload.seconds:
        return {}
    with contextlib.suppress(InputError, HardwareError):
        asked = bound(requests, target, workload, seed=seed)
        times = Counter(request.prompt_ids for request in asked)
        found: dict[str, list[int]] = {}
        for request in asked:
            found.setdefault(request.category, []).append(times[request.prompt_ids])
        return {category: float(np.mean(copies)) for category, copies in found.items()}
    return {}


def served_prompts(target: Path, workload: Workload, *, seed: int) -> list[BoundRequest]:
    """Each kind of question in turn, all there from the start, and again behind more material."""
    turns = -(-workload.requests // len(load_prompts("run")))
    encode = _encoder(target)
    tokens, filler = workload.output_tokens, SERVED_FILLERS[seed]
    asked = [_behind(encode, amount, tokens, filler) for amount in SERVED_MATERIAL[:turns]]
    found = [request for group in asked for request in _mixed(group)]
    return _numbered(found[: workload.requests])


def recorded_prompts(target: Path, *, share: float = 1.0) -> Iterator[list[BoundRequest]]:
    """All questions behind each of ``MATERIALS``, and half of them behind much: a kind apart.

    Of the answers behind the first few materials half are long, in turn. The first list is what is
    recorded at least; the others are as long as there is time for them.
    Requests are numbered question after question.

    Args:
        target: Directory of the target.
        share: Of the first list; with less than all of it there are no others.
    """
    fewest = max(round(share * len(RECORDED_MATERIAL)), 1)
    count, encode = len(load_prompts("run")), _encoder(target)

    def asked(number: int) -> list[BoundRequest]:
        amount, filler = MATERIALS[number]
        group = [
            dataclasses.replace(request, max_new_tokens=LONG_ANSWER)
            if _is_long(number, question)
            else request
            for question, request in enumerate(_behind(encode, amount, RECORDED_TOKENS, filler))
        ]
        return _numbered(group, first=number * count)

    long = _numbered(_behind(encode, LONG_TOKENS, RECORDED_TOKENS)[::2], len(MATERIALS) * count)
    first = [request for number in range(fewest) for request in asked(number)]
    yield [*first, *(dataclasses.replace(request, category=LONG) for request in long)]
    if share >= 1.0:
        yield from map(asked, range(fewest, len(MATERIALS)))


def _is_long(material: int, question: int) -> bool:
    """Half of those behind each of the first: the luck of two would be in every campaign."""
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


def tokens_of(workload: Workload) -> int:
    """Most tokens of an answer."""
    return MAX_OUTPUT if workload.seconds else workload.output_tokens


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


def _at_once(workload: Workload, target: str, seed: int) -> Trace:
    """What is served, as a trace; of as many tokens as asked for where the target is not here."""
    count = workload.requests
    lengths, kinds = [1] * count, [CATEGORIES[i % len(CATEGORIES)] for i in range(count)]
    with contextlib.suppress(InputError, HardwareError):  # the target is not on this machine
        asked = served_prompts(resolve_model(target), workload, seed=seed)
        lengths, kinds = [r.prompt_tokens for r in asked], [r.category for r in asked]
    requests = pd.DataFrame(
        {
            "arrival": np.zeros(count),
            "prompt_tokens": np.array(lengths, np.int64),
            "output_tokens": np.full(count, workload.output_tokens, np.int64),
            "category": kinds,
        }
    )
    return Trace(workload.name, requests, "campaign", (), "")


def _segment(workload: Workload, cost: RoundCost | None) -> Trace:
    """A stretch of a trace, at a rate that loads plain decoding by ``LOAD``."""
    assert cost is not None, "the first deployment is profiled"
    trace = load_trace(TRACE).scale_lengths(
        prompt=PROMPT_SCALE, max_prompt=MAX_PROMPT, max_output=MAX_OUTPUT
    )
    prompts = trace.requests["prompt_tokens"].to_numpy()
    output, rows = float(np.mean(trace.requests["output_tokens"])), workload.batch
    step = cost.target(rows, rows * (prompts.mean() + output / 2))
    prefill = float(cost.prefill.of_arrays(prompts, 0.0).mean())
    rate = LOAD / (prefill + output * step / rows)
    found = (len(trace) - 1) / trace.duration
    return trace.scale_rate(rate / found).slice(0.0, workload.seconds)
