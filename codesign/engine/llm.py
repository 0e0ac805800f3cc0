"""``LLM.generate``: text in, text out, for a notebook or a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from codesign.artifacts.machine import check_cores, hardware
from codesign.candidate import Candidate
from codesign.config import Deployment
from codesign.engine.model import load_decoder
from codesign.engine.run import DraftSource, run_candidate
from codesign.errors import InputError
from codesign.models import DRAFTS, NGRAM, resolve_model
from codesign.models.tokenizer import TextStream, Tokenizer
from codesign.policy.options import AS_THE_RUN, RequestOptions
from codesign.policy.protocol import RequestVerdict
from codesign.policy.speculation import parse_policy
from codesign.policy.stop_text import text_before
from codesign.policy.walk import Sampling
from codesign.prompts import BoundRequest, encode_user_turn
from codesign.records import RunRecords

OnText = Callable[[int, str], None]
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Generation:
    """Answers, in order of the prompts, and the records of how they came about.

    Attributes:
        texts: Answers, up to their stop strings.
        token_ids: Their tokens; the last may be a stop token, or complete a stop string.
        finish_reasons: "stop" after a stop token or string, "length" after ``max_new_tokens``,
            "abort" of a prompt that was refused (``records.refused`` says why) or interrupted.
        records: Times and rounds.
    """

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[FinishReason, ...]
    records: RunRecords


class LLM:
    """A target and a draft on this machine's CPU.

    Args:
        target: Name or directory of the target.
        draft: Name or directory of the draft, "ngram" for prompt look-up; by default the draft
            shipped for the target, or n-grams if there is none.
        num_workers: CPU threads; all cores that this process may use by default.

    Raises:
        InputError: If a model is not there; the message names the command that fetches it.
            Or if there are no threads.
        HardwareError: If there are more threads than cores.
    """

    def __init__(
        self, target: str = "smollm2-135m", draft: str = "", *, num_workers: int | None = None
    ) -> None:
        if num_workers is not None and num_workers < 1:
            raise InputError(f"num_workers must be at least 1, got {num_workers}")
        if num_workers is not None:
            check_cores(num_workers, "Leave num_workers out: LLM(target)")
        target_dir = resolve_model(target)
        draft = draft or DRAFTS.get(target, NGRAM)
        self._draft = DraftSource(NGRAM if draft == NGRAM else resolve_model(draft), target_dir)
        self._target = load_decoder(target_dir)
        self._tokenizer = Tokenizer(target_dir)
        self._num_workers = num_workers or hardware()["cores"]

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        policy: str = "tree-8x4x2",
        sampling: Sampling | None = None,
        options: Sequence[RequestOptions] | None = None,
        max_new_tokens: int = 128,
        max_batch: int = 4,
        on_text: OnText | None = None,
    ) -> Generation:
        """Answer each prompt as a user's turn of a chat.

        Args:
            prompts: Texts of the user, or one of them.
            policy: Label of a speculation policy; it changes the speed, never the answer.
            sampling: Greedy by default.
            options: Of each prompt, where it is not decoded like the others: its sampling, stop
                tokens and stop strings (the text ends before them), and whether anyone drafts for
                it.
            max_new_tokens: Per answer.
            max_batch: Requests that share a step.
            on_text: Called as ``on_text(number of the prompt, text)`` with each further piece of an
                answer once it is final; its pieces together are its text. What it raises ends the
                run.

        Raises:
            InputError: If the policy is unknown, no prompt was given, or all are too long.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        requests = self._requests(prompts, options, max_new_tokens)
        spec = parse_policy(policy)
        draft_workers = max(self._num_workers // 2, 1) if spec.is_async else 0
        target_workers = max(self._num_workers - draft_workers, 1)
        longest = max(len(r.prompt_ids) for r in requests)
        run = run_candidate(
            Candidate(Deployment(target_workers, draft_workers), spec, max_batch),
            requests,
            target=self._target,
            draft=self._draft,
            sampling=sampling,
            stop_tokens=frozenset(self._tokenizer.eos_ids),
            new_text=lambda: self._tokenizer.stream().push,
            max_kv_tokens=max_batch * (longest + max_new_tokens + spec.kv_rows),
            emitted=None if on_text is None else self._teller(requests, on_text),
        )
        token_ids = tuple(tuple(run.outputs[r.request_id]) for r in requests)
        texts, reasons = zip(*map(self._ended, requests, token_ids), strict=True)
        finished = [record.finish is not None for record in run.records.requests]
        return Generation(
            texts,
            token_ids,
            tuple(why if over else "abort" for why, over in zip(reasons, finished, strict=True)),
            run.records,
        )

    def _requests(
        self,
        prompts: Sequence[str],
        options: Sequence[RequestOptions] | None,
        max_new_tokens: int,
    ) -> list[BoundRequest]:
        """The prompts as requests that all arrive at 0, in their order."""
        if not prompts:
            raise InputError("there is no prompt. Give at least one")
        options = options or [AS_THE_RUN] * len(prompts)
        if len(options) != len(prompts):
            raise InputError(
                f"{len(options)} options for {len(prompts)} prompts. Give one for each, or none"
            )
        encode = encode_user_turn(self._tokenizer)
        return [
            BoundRequest(i, 0.0, "", tuple(encode(prompt)), max_new_tokens, options=own)
            for i, (prompt, own) in enumerate(zip(prompts, options, strict=True))
        ]

    def _ended(self, request: BoundRequest, ids: Sequence[int]) -> tuple[str, FinishReason]:
        """The text of a finished answer, and why it ended there."""
        whole, options = self._tokenizer.decode(ids), request.options
        text = text_before(whole, options.stop_strings)
        stops = options.stop_tokens.union(self._tokenizer.eos_ids)
        is_stopped = len(text) < len(whole) or bool(stops.intersection(ids[-1:]))
        return text, "stop" if is_stopped else "length"

    def _teller(
        self, requests: Sequence[BoundRequest], on_text: OnText
    ) -> Callable[[RequestVerdict], None]:
        answers = [_Answer(self._tokenizer.stream(), r.options.stop_strings) for r in requests]

        def tell(verdict: RequestVerdict) -> None:
            if text := answers[verdict.request_id].add(verdict):
                on_text(verdict.request_id, text)

        return tell


class _Answer:
    """The text of one answer as it comes; what may be the beginning of a stop string waits."""

    def __init__(self, stream: TextStream, stop_strings: Sequence[str]) -> None:
        self._stream = stream
        self._strings = stop_strings
        self._num_held = max(map(len, stop_strings), default=1) - 1
        self._held = ""

    def add(self, verdict: RequestVerdict) -> str:
        """The text that is final now and was not before."""
        text = self._held + "".join([self._stream.push(token) for token in verdict.tokens])
        if verdict.is_finished:
            return text_before(text + self._stream.flush(), self._strings)
        count = max(len(text) - self._num_held, 0)
        self._held = text[count:]
        return text[:count]
