"""Page tables and the schedule: no page is lost or has two writers, no row is wrong, all finish."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import codesign.engine.gpu.paging as paging_module
import codesign.engine.pieces as pieces_module
import codesign.engine.schedule as schedule_module
import codesign.policy.batching as batching_module
import codesign.policy.kv_memory as memory_module
import codesign.sim.requests as requests_module
from codesign.candidate import Candidate
from codesign.config import Deployment, Serving
from codesign.engine.blocks import block_ids
from codesign.engine.gpu.paging import PageTable, Paging
from codesign.engine.kv_cache import CapacityError
from codesign.engine.partner import NoDraft
from codesign.engine.pieces import PromptPiece
from codesign.engine.schedule import Schedule
from codesign.engine.serve import Server
from codesign.fit import Fit
from codesign.policy.batching import BatchLimits
from codesign.policy.protocol import RequestVerdict, TargetSide
from codesign.policy.speculation import parse_policy
from codesign.prompts import BoundRequest
from codesign.sim import simulate

BLOCK, PAGE = 8, 4


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Prefix blocks of 8 tokens."""
    modules = (
        paging_module,
        schedule_module,
        pieces_module,
        batching_module,
        memory_module,
        requests_module,
    )
    patches = [mock.patch.object(module, "PREFIX_BLOCK", BLOCK) for module in modules]
    patches.append(mock.patch.object(schedule_module, "block_ids", partial(block_ids, block=BLOCK)))
    for patch in patches:
        patch.start()
    yield
    for patch in patches:
        patch.stop()


def check(table: PageTable, num_pages: int) -> None:
    """Every page is free, kept for later or held; one request at most writes to it."""
    held: set[int] = set()
    written: set[int] = set()
    for number in table.requests:
        pages = table.pages(number)
        own = pages[table.shared_rows(number) // PAGE :]
        assert len(set(pages)) == len(pages)
        assert not written & set(own), "two requests write to a page"
        written |= set(own)
        held |= set(pages)
    assert table.num_free + table.num_idle + len(held) == num_pages


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("take", "grow", "free", "free")),
        st.integers(0, 3),
        st.lists(st.integers(0, 3), max_size=4, unique=True),
        st.integers(0, 60),
    ),
    max_size=60,
)


@given(STEPS, st.integers(12, 60))
@settings(max_examples=150, deadline=None)
def test_pages_taken_are_pages_freed_and_no_page_has_two_writers(steps, num_pages):
    table = PageTable(4, Paging(PAGE, num_pages))
    entered: dict[tuple[int, int], int] = {}
    for action, number, blocks, rows in steps:
        try:
            if action == "take" and number not in table:
                # Ids say all that comes before them, as hashes do.
                chained = [hash(tuple(blocks[: i + 1])) for i in range(len(blocks))]
                assert table.take(number, chained) == table.shared_rows(number)
            elif action == "grow" and number in table:
                table.grow(number, rows)
                assert len(table.pages(number)) * PAGE >= rows
            elif action == "free":
                table.free(number, rows if rows % 2 else None)
                assert number not in table
        except CapacityError:
            assert number not in table or table.num_free == table.num_idle == 0
        check(table, num_pages)
        for entry in table.take_entries():
            entered[entry.slot, entry.index] = entry.page
        for request in table.requests:
            told = [entered[table[request], i] for i in range(len(table.pages(request)))]
            assert tuple(told) == table.pages(request)
    for number in list(table.requests):
        table.free(number)
    assert table.num_free + table.num_idle == num_pages


def token_at(request_id: int, tokens: tuple[int, ...]) -> int:
    """The model: the next token follows from all before it and the request's noise."""
    return hash((request_id, tokens)) % 7


class FakeTarget:
    """A target whose KV rows are what they stand for; a round emits up to ``most`` tokens."""

    def __init__(self, num_slots: int, num_pages: int, most: int) -> None:
        self.side = TargetSide()
        self.table = PageTable(num_slots, Paging(PAGE, num_pages))
        self.num_pages = num_pages
        self.rows: dict[int, list[tuple[int, int] | None]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.done: dict[int, int] = {}  # rows of prompts that have been run
        self.most = most
        self.longest_step = 0
        self.following: dict[int, int] = {}  # KV rows before each row of a step that runs ahead
        self.num_ahead = 0

    @property
    def is_ahead(self) -> bool:
        return any(number in self.side.request_ids for number in self.following)

    def open_prompt(self, admission, blocks):
        num_cached = self.done[admission.request_id] = self.table.take(admission.request_id, blocks)
        return num_cached

    def _write(self, number: int, position: int, token: int) -> None:
        page = self.table.pages(number)[position // PAGE]
        self.rows.setdefault(page, [None] * PAGE)[position % PAGE] = (position, token)

    def _assert_rows(self, number: int, tokens) -> None:
        pages = self.table.pages(number)
        for position, token in enumerate(tokens):
            found = self.rows[pages[position // PAGE]][position % PAGE]
            assert found == (position, token), f"row {position} of {number} holds {found}"

    def run_pieces(self, pieces: list[PromptPiece]):
        verdicts = []
        self.longest_step = max(self.longest_step, sum(piece.count for piece in pieces))
        for piece in pieces:
            number, tokens = piece.request_id, piece.admission.tokens
            self._assert_rows(number, tokens[: piece.start])
            self.table.grow(number, piece.end)
            for position in range(max(piece.start, self.table.shared_rows(number)), piece.end):
                self._write(number, position, tokens[position])
            self.done[number] = piece.end
            if piece.is_last:
                self._assert_rows(number, tokens)
                self.side.admit(piece.admission)
                self.tokens[number] = [*tokens]
                verdicts.append(self.side.commit_first(number, token_at(number, tokens)))
                self._took(verdicts[-1])
        check(self.table, self.num_pages)
        return verdicts

    def _took(self, verdict: RequestVerdict) -> None:
        self.tokens[verdict.request_id] += verdict.tokens
        if verdict.is_finished:
            self.table.free(verdict.request_id)

    def verify(self, candidates, meanwhile, goes_on):
        """Where the next round is said to be of the same requests, their rows have their pages."""
        meanwhile()
        rows = self.side.verify_rows(candidates)
        if self.is_ahead:
            promised = [(r.request_id, self.following.get(r.request_id)) for r in rows]
            assert promised == [(r.request_id, r.context) for r in rows]
        self.following = {}
        if goes_on():
            self.num_ahead += 1
            for request in rows:
                if self.side.is_last(request.request_id):
                    continue
                self.following[request.request_id] = request.context + 1
                self.table.grow(request.request_id, request.context + 2)
        verdicts = []
        for request in rows:
            number = request.request_id
            self.table.grow(number, request.context + self.most)
            self._assert_rows(number, self.tokens[number][:-1])
            self._write(number, request.context, self.tokens[number][-1])
            for place in range(request.context + 1, request.context + self.most):
                self._write(number, place, -1)  # rows of a tree that nobody accepts
            token = token_at(number, tuple(self.tokens[number]))
            verdicts.append(self.side.judge(request, lambda row, token=token: token)[0])
            self._took(verdicts[-1])
        check(self.table, self.num_pages)
        return rows, verdicts

    def evict(self, request_id):
        if request_id in self.side.request_ids:
            self.side.evict(request_id)
        self.table.free(request_id, self.done.get(request_id))


def expected(request: BoundRequest) -> list[int]:
    tokens = request.prompt_ids
    for _ in range(request.max_new_tokens):
        tokens = (*tokens, token_at(request.request_id, tokens))
    return list(tokens[len(request.prompt_ids) :])


STARTS = tuple(range(BLOCK)), tuple(range(BLOCK, 2 * BLOCK))
PROMPTS = st.tuples(
    st.sampled_from(((), STARTS[0], STARTS[1], STARTS[0] + STARTS[1], STARTS[0] * 2)),
    st.lists(st.integers(0, 6), max_size=9).map(tuple),
).map(lambda parts: parts[0] + parts[1] or (3,))
REQUESTS = st.lists(st.tuples(PROMPTS, st.integers(1, 30)), min_size=1, max_size=9)


@given(
    REQUESTS,
    st.booleans(),
    st.sampled_from((True, True, False)),
    st.none() | st.integers(1, 12),
    st.integers(0, 24),
    st.sampled_from((4, 3, 2, 1)),
    st.integers(1, 5),
)
@settings(max_examples=250, deadline=None)
def test_every_request_is_served_from_the_rows_that_were_counted(
    lengths, keeps, preempts, chunk, spare, max_batch, round_rows
):
    requests = [BoundRequest(i, 0.0, "", ids, count) for i, (ids, count) in enumerate(lengths)]
    most = max(len(r.prompt_ids) + r.max_new_tokens for r in requests) + round_rows
    limit = most + spare
    serving = Serving(prefill_chunk=chunk, prefix_cache=keeps, preemption=preempts)
    pages = Paging.for_rows(limit, max_batch, page_rows=PAGE).num_pages
    target = FakeTarget(max_batch, pages, round_rows)
    schedule = Schedule(
        requests, BatchLimits(max_batch, limit), serving, round_rows=round_rows, emitted_rows=2
    )
    with mock.patch("codesign.engine.serve.sleep"):
        server = Server(target, NoDraft(), schedule, requests)
        records = server.run()
    assert server.outputs == {r.request_id: expected(r) for r in requests}
    admitted = [record.admitted for record in records.requests]
    assert admitted == sorted(admitted), "requests join in order of arrival"
    assert all(record.finish is not None for record in records.requests)
    assert chunk is None or target.longest_step <= max(chunk, 1)
    assert not target.table.requests
    oldest = records.requests[0]
    assert oldest.num_preemptions == 0, "the oldest request never loses its rows"


FIT = Fit.load(Path(__file__).parents[2] / "codesign/data/fits/smollm2-135m-cpu/fit.json")
SIMULATED = Candidate(Deployment(2), parse_policy("plain"), 3)


@given(
    REQUESTS,
    st.booleans(),
    st.booleans(),
    st.integers(0, 24),
    st.none() | st.sampled_from((8, 16, 24)),
)
@settings(max_examples=150, deadline=None)
def test_the_engine_runs_the_rounds_that_the_simulator_runs(lengths, preempts, keeps, spare, chunk):
    """Requests that are all there at once: who runs when does not depend on how long steps take."""
    if chunk is not None:  # pieces end where chunks do, unless emitted tokens are run again
        lengths = [((5,) * (BLOCK * (1 + len(ids) // BLOCK)), count) for ids, count in lengths]
        preempts = keeps = False
    requests = [BoundRequest(i, 0.0, "", ids, count) for i, (ids, count) in enumerate(lengths)]
    limit = max(len(r.prompt_ids) + r.max_new_tokens for r in requests) + 1 + spare
    serving = Serving(limit, chunk, prefix_cache=keeps, preemption=preempts)
    target = FakeTarget(3, Paging.for_rows(limit, 3, page_rows=PAGE).num_pages, 1)
    schedule = Schedule(requests, BatchLimits(3, limit), serving, round_rows=1, emitted_rows=BLOCK)
    measured = Server(target, NoDraft(), schedule, requests).run()
    trace = pd.DataFrame(
        {
            "arrival": 0.0,
            "prompt_tokens": [len(r.prompt_ids) for r in requests],
            "output_tokens": [r.max_new_tokens for r in requests],
            "hash_ids": [block_ids(r.prompt_ids, block=BLOCK) for r in requests],
        }
    )
    simulated = simulate(trace, SIMULATED, FIT, serving=serving, seed=0)
    for name in ("num_rounds", "num_preemptions"):
        found = [getattr(record, name) for record in measured.requests]
        assert found == [getattr(record, name) for record in simulated.requests]
    names = ["batch", "context", "num_emitted_tokens"]
    cached = [[r.cached_tokens for r in run.requests] for run in (measured, simulated)]
    assert sum(cached[0]) >= sum(cached[1])  # last pages of requests leave room for some blocks
    if not keeps:
        names.append("prefill_tokens")
    for name in names:
        found = measured.rounds.column(name).tolist()
        assert found == simulated.rounds.column(name).tolist(), name
