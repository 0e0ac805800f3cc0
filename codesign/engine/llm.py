"""``LLM.generate``: text in, text out, for a notebook or a script."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from codesign.config import Deployment
from codesign.engine.model import load_decoder
from codesign.engine.run import NGRAM, DraftSource, run_candidate
from codesign.models import DRAFTS, resolve_model
from codesign.models.tokenizer import Tokenizer
from codesign.plan import Candidate
from codesign.policy.options import AS_THE_RUN, RequestOptions
from codesign.policy.speculation import parse_policy
from codesign.policy.stop_text import text_before
from codesign.policy.walk import Sampling
from codesign.prompts import BoundRequest, encode_user_turn
from codesign.records import RunRecords


@dataclass(frozen=True, slots=True)
class Generation:
    """Answers, in order of the prompts, and the records of how they came about."""

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    records: RunRecords


class LLM:
    """A target and a draft on this machine's CPU.

    Args:
        target: Name or directory of the target.
        draft: Name or directory of the draft, "ngram" for prompt look-up; by default the draft
            shipped for the target, or n-grams if there is none.
        num_workers: CPU threads; all cores by default.

    Raises:
        InputError: If a model is not there; the message names the command that fetches it.
    """

    def __init__(
        self, target: str = "smollm2-135m", draft: str = "", *, num_workers: int | None = None
    ) -> None:
        target_dir = resolve_model(target)
        draft = draft or DRAFTS.get(target, NGRAM)
        self._draft = DraftSource(NGRAM if draft == NGRAM else resolve_model(draft), target_dir)
        self._target = load_decoder(target_dir)
        self._tokenizer = Tokenizer(target_dir)
        self._num_workers = num_workers or os.cpu_count() or 1

    def generate(
        self,
        prompts: Sequence[str],
        *,
        policy: str = "tree-8x4x2",
        sampling: Sampling | None = None,
        options: Sequence[RequestOptions] | None = None,
        max_new_tokens: int = 128,
        max_batch: int = 4,
    ) -> Generation:
        """Answer each prompt as a user's turn of a chat.

        Args:
            prompts: Texts of the user.
            policy: Label of a speculation policy; it changes the speed, never the answer.
            sampling: Greedy by default.
            options: Of each prompt, where it is not decoded like the others: its sampling, stop
                tokens and stop strings (the text ends before them), and whether anyone drafts for
                it.
            max_new_tokens: Per answer.
            max_batch: Requests that share a step.

        Raises:
            InputError: If the policy is unknown, or no prompt was given.
        """
        spec = parse_policy(policy)
        draft_workers = max(self._num_workers // 2, 1) if spec.is_async else 0
        target_workers = max(self._num_workers - draft_workers, 1)
        encode = encode_user_turn(self._tokenizer)
        requests = [
            BoundRequest(i, 0.0, "", tuple(encode(prompt)), max_new_tokens, options=own)
            for i, (prompt, own) in enumerate(
                zip(prompts, options or [AS_THE_RUN] * len(prompts), strict=True)
            )
        ]
        longest = max((len(r.prompt_ids) for r in requests), default=0)
        run = run_candidate(
            Candidate(Deployment(target_workers, draft_workers), spec, max_batch),
            requests,
            target=self._target,
            draft=self._draft,
            sampling=sampling,
            stop_tokens=frozenset(self._tokenizer.eos_ids),
            new_text=lambda: self._tokenizer.stream().push,
            max_kv_tokens=max_batch * (longest + max_new_tokens + spec.kv_rows),
        )
        token_ids = tuple(tuple(run.outputs[r.request_id]) for r in requests)
        texts = tuple(
            text_before(self._tokenizer.decode(ids), request.options.stop_strings)
            for ids, request in zip(token_ids, requests, strict=True)
        )
        return Generation(texts, token_ids, run.records)
