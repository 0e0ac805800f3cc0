"""A batch that plays the policy's own objects in every round.

They are those of the engine: DraftSide, TargetSide, the policy, the two messages. Only the models
are missing; codesign.sim.acceptance answers for the draft model, and the target emits TRUE_TOKEN.
"""

from __future__ import annotations

from collections.abc import Sequence

from codesign.calibration_log import CalibrationLog
from codesign.policy.protocol import (
    Admission,
    Candidates,
    DraftSide,
    ExpansionRows,
    RequestVerdict,
    TargetSide,
    Verdict,
    VerifyRows,
)
from codesign.policy.turns import Turns
from codesign.sim.acceptance import PROMPT_TOKEN, TRUE_TOKEN, SyntheticDrafter
from codesign.sim.work import Entering, Tally, Work

# Committed tokens without a KV row that make an expansion a prefill. After a miss there are one or
# two, after an admission there is a prompt.
BULK_ROWS = 16


class PlayedBatch:
    """See Batch.

    Args:
        side: The draft's state.
        drafter: Its model.
        round_rows: Most KV rows of a request in a round; matters to ``kv_tokens`` alone.
        hears_early: The draft hears of a request before its first token is known, and so answers
            for the prompt alone in its first round, as an asynchronous draft does that runs the
            prompt beside the target.
        log: Where to write down how right the draft's chances were.
        turns: Who takes part in a round of plain decoding; None if all do.

    Attributes:
        sharing: As in Verdict, of the next round.
    """

    def __init__(
        self,
        side: DraftSide,
        drafter: SyntheticDrafter,
        *,
        round_rows: int = 0,
        hears_early: bool = False,
        log: CalibrationLog | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.sharing: tuple[int, int] = (0, 0)
        self._log = log
        self._side = side
        self._drafter = drafter
        self._round_rows = round_rows
        self._hears_early = hears_early
        self._target = TargetSide(turns=turns)
        self._requests: dict[int, Entering] = {}
        self._tallies: dict[int, Tally] = {}
        self._news: list[RequestVerdict] = []  # emitted, not yet told to the draft
        self._rows: list[VerifyRows] = []
        self._context = 0
        self._shared = 0
        self._plain: dict[int, int] = {}  # KV rows of requests that the draft is not told of
        self._num_verdicts = 0

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def reads_prompts(self) -> bool:
        return self._side.policy.reads_prompts

    @property
    def kv_tokens(self) -> int:
        return self._context + self._round_rows * len(self._requests) - self._shared

    def begin(self, entering: Sequence[Entering], now: float) -> Work:
        admissions = [self._admission(request) for request in entering]
        if self._hears_early:
            self._tell(admissions, now)
            self._commit_first(admissions)
        else:
            self._commit_first(admissions)
            self._tell(admissions, now)
        work = Work(len(self._requests), 0, self._context)
        candidates = self._draft(work)
        self._side.policy.settle()
        self._rows = self._target.verify_rows(candidates)
        work.rows = sum([len(entry.tokens) for entry in self._rows])
        if len(self._rows) < work.batch:
            work.num_sitting = work.batch - len(self._rows)
            work.batch = len(self._rows)
            work.context = sum([entry.context for entry in self._rows])
        elif work.rests:
            work.rests_on = self._side.policy.rests_on()
        self._grow(work)
        return work

    def end(self) -> tuple[int, list[int]]:
        num_emitted, finished = 0, []
        for rows in self._rows:
            verdict, _ = self._target.judge(rows, _sample)
            emitted = len(verdict.tokens)
            tally = self._tallies[rows.request_id]
            tally.num_rounds += 1
            tally.num_draft_tokens += len(rows.tokens) - 1
            tally.num_accepted_tokens += emitted - 1
            num_emitted += emitted
            self._context += emitted
            request = self._requests[rows.request_id]
            if request.speculates:
                self._news.append(verdict)
            else:
                self._plain[rows.request_id] += emitted
            if self._log is not None:
                self._log.add(request.category, rows, verdict)
            if verdict.is_finished:
                finished.append(rows.request_id)
                self._forget(rows.request_id, verdict.base_len + emitted - 1)
        return num_emitted, finished

    def drop(self, request_id: int) -> int:
        num_emitted = len(self._target.output(request_id))
        base_len = self._requests[request_id].prompt_tokens + num_emitted
        self._target.evict(request_id)
        if self._requests[request_id].speculates:
            # As the engine's message: who has lost its rows is not told what they emitted last.
            self._news = [news for news in self._news if news.request_id != request_id]
            self._news.append(RequestVerdict(request_id, base_len, (), is_finished=True))
        self._forget(request_id, base_len - 1)
        return num_emitted

    def tally(self, request_id: int) -> Tally:
        return self._tallies.pop(request_id)

    def _forget(self, request_id: int, context: int) -> None:
        self._context -= context
        self._shared -= self._requests.pop(request_id).shared_tokens
        self._plain.pop(request_id, None)

    def _admission(self, request: Entering) -> Admission:
        self._requests[request.request_id] = request
        self._tallies[request.request_id] = Tally()
        self._context += request.prompt_tokens
        self._shared += request.shared_tokens
        if not request.speculates:
            self._plain[request.request_id] = request.prompt_tokens
        prompt = (PROMPT_TOKEN,) * request.prompt_tokens
        return Admission(request.request_id, prompt, request.output_tokens, request.slo_tpot)

    def _commit_first(self, admissions: Sequence[Admission]) -> None:
        for admission in admissions:
            self._target.admit(admission)
            verdict = self._target.commit_first(admission.request_id, TRUE_TOKEN)
            if self._requests[admission.request_id].speculates:
                self._news.append(verdict)

    def _tell(self, admissions: Sequence[Admission], now: float) -> None:
        """Send the draft everything that is new."""
        told = [a for a in admissions if self._requests[a.request_id].speculates]
        for admission in told:
            request = self._requests[admission.request_id]
            self._drafter.admit(
                request.request_id,
                category=request.category,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                emitted_before=request.emitted_before,
            )
        verdict = Verdict(
            self._num_verdicts,
            tuple(self._news),
            tuple(told),
            now=now,
            beside=(len(self._plain), sum(self._plain.values())),
            sharing=self.sharing,
        )
        self._news.clear()
        self._num_verdicts += 1
        _, finished = self._side.receive(verdict)
        for request_id in finished:
            self._drafter.finish(request_id)

    def _draft(self, work: Work) -> Candidates:
        """Run the forwards that the candidates need."""
        number, policy = self._num_verdicts - 1, self._side.policy
        if not self._side.begin():
            work.rests, work.looks = True, 0
            self._side.look_ahead()
            return Candidates(number)
        work.kept_trees, work.kept_nodes = self._side.kept
        while rows := self._side.next_expansion(len(work.drafting)):
            work.drafting.append(self._forward(rows, work))
        candidates = self._side.candidates(number)
        work.rests = policy.rests
        looks = policy.decides and not policy.repeats
        work.looks = len(work.drafting) + 1 if looks else 0
        return candidates

    def _grow(self, work: Work) -> None:
        """Run the forwards that overlap the target's verification."""
        before = len(work.prompts)
        for _ in range(self._side.policy.overlap):
            if rows := self._side.overlap_expansion():
                work.overlapped.append(self._forward(rows, work))
        work.looks_beside = len(work.overlapped) if self._side.policy.decides else 0
        work.is_prompt_overlapped = len(work.prompts) > before

    def _forward(self, expansion: Sequence[ExpansionRows], work: Work) -> tuple[int, int]:
        """Answer one draft forward; rows and context without the prompts in it."""
        num_rows = context = 0
        self._side.policy.settle()
        for rows in expansion:
            tokens, log_probs = self._drafter.answer(rows)
            self._side.expanded(rows, tokens, log_probs)
            if len(rows.tokens) - len(rows.nodes) < BULK_ROWS:
                num_rows += len(rows.tokens)
                context += rows.context
            else:
                cached = self._requests[rows.request_id].cached_tokens
                work.prompts.append((max(len(rows.tokens) - cached, 1), rows.context + cached))
        return num_rows, context


def _sample(row: int) -> int:
    return TRUE_TOKEN
