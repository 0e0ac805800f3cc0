"""The written conversations on the training device, cut into batches of equal size.

A batch holds rows of one bucket length and always the same number of tokens in all. Everything
lies on the device, so a batch is index arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from prompt_stubs import CATEGORIES
from torch import Tensor

BATCH_TOKENS = 61440
# Each divides BATCH_TOKENS.
BUCKETS = (64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024)
HELD_OUT_EVERY = 200
# The second turn of a chat counts as chat where categories are balanced.
GROUPS = {name: ("chat" if name == "followup" else name) for name in CATEGORIES}


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch: inputs, and what each loss position should predict.

    Attributes:
        ids_BS: input tokens.
        position: [P] flat positions of answer tokens' predictions in B * S.
        token: [P] the answer token there.
        top_ids, top_logs: [P, k] the teacher's likeliest tokens and log probabilities.
        weight: [P] weight by category.
        prompt_position, prompt_token: [Q] likewise for a sample of user-turn tokens, which were
            written at temperature 1.
        category: [P] category index of each answer token.
    """

    ids_BS: Tensor
    position: Tensor
    token: Tensor
    top_ids: Tensor
    top_logs: Tensor
    weight: Tensor
    prompt_position: Tensor
    prompt_token: Tensor
    category: Tensor


class ConversationStore:
    """All parts of a folder of written conversations.

    Args:
        folder: what write_conversations.py wrote.
        device: where the tensors lie.
        num_system_tokens: leading tokens that every prompt shares and no loss is taken on.
        prompt_share: share of the remaining prompt tokens that a batch trains on.
    """

    def __init__(
        self, folder: Path, *, device: str, num_system_tokens: int, prompt_share: float = 0.25
    ) -> None:
        self.device, self.num_system_tokens, self.prompt_share = (
            device,
            num_system_tokens,
            prompt_share,
        )
        columns: dict[str, list[np.ndarray]] = {}
        for path in sorted(folder.glob("part_[0-9][0-9][0-9][0-9].npz")):
            with np.load(path) as part:
                count = len(part["prompt_length"])
                columns.setdefault("category", []).append(np.full(count, int(part["category"])))
                for name in ("tokens", "prompt_length", "answer_length", "top_ids", "top_logs"):
                    columns.setdefault(name, []).append(part[name])
        joined = {name: np.concatenate(arrays) for name, arrays in columns.items()}
        self.tokens = self._put(joined["tokens"], torch.int32)
        self.top_ids = self._put(joined["top_ids"], torch.int32)
        self.top_logs = torch.from_numpy(joined["top_logs"]).to(device)
        self.prompt_length = self._put(joined["prompt_length"], torch.int64)
        self.answer_length = self._put(joined["answer_length"], torch.int64)
        self.category = self._put(joined["category"], torch.int64)
        self.total = self.prompt_length + self.answer_length
        self.start = self.total.cumsum(0) - self.total
        self.answer_start = self.answer_length.cumsum(0) - self.answer_length
        index = torch.arange(len(self.total), device=device)
        self.is_held_out = index % HELD_OUT_EVERY == 0
        self.category_weight = self._balance()

    def _put(self, array: np.ndarray, dtype: torch.dtype) -> Tensor:
        wide = array.astype(np.int32) if array.dtype == np.uint16 else array
        return torch.from_numpy(wide).to(self.device, dtype)

    def answer_tokens(self) -> dict[str, int]:
        """Answer tokens by category."""
        sums = torch.zeros(len(CATEGORIES), dtype=torch.int64, device=self.device)
        sums.index_add_(0, self.category, self.answer_length)
        return dict(zip(CATEGORIES, sums.tolist(), strict=True))

    def _balance(self) -> Tensor:
        """Weights that bring the categories closer together, none above 2.5 times the lightest."""
        tokens = self.answer_tokens()
        groups: dict[str, int] = {}
        for name, count in tokens.items():
            groups[GROUPS[name]] = groups.get(GROUPS[name], 0) + count
        mean = sum(groups.values()) / len(groups)
        raw = [mean / max(1, groups[GROUPS[name]]) for name in CATEGORIES]
        return torch.tensor(raw, device=self.device).clamp(0.7, 1.75)

    def token_frequency(self, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Share of each token among answers [vocab_size], every category counting the same.

        Returns:
            The shares in the training conversations and in those held out.
        """
        shares = []
        for held_out in (False, True):
            total = torch.zeros(vocab_size, dtype=torch.float64, device=self.device)
            for category in range(len(CATEGORIES)):
                rows = (self.category == category) & (self.is_held_out == held_out)
                counts = self._answer_histogram(rows.nonzero()[:, 0], vocab_size)
                total += counts / counts.sum().clamp(min=1)
            shares.append(total / total.sum())
        return shares[0], shares[1]

    def _answer_histogram(self, rows: Tensor, vocab_size: int) -> Tensor:
        counts = torch.zeros(vocab_size, dtype=torch.float64, device=self.device)
        for part in rows.split(20000):
            if len(part):
                at, _ = self._ragged(
                    self.start[part] + self.prompt_length[part], self.answer_length[part]
                )
                tokens = self.tokens[at].long()
                counts += torch.bincount(tokens, minlength=vocab_size).double()
        return counts

    def _ragged(self, first: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Indices first[i], first[i] + 1, ... for every row i, and the row of each."""
        row = torch.repeat_interleave(torch.arange(len(count), device=self.device), count)
        ahead = count.cumsum(0) - count
        offset = torch.arange(len(row), device=self.device) - ahead[row]
        return first[row] + offset, row

    def epoch(self, generator: torch.Generator, *, held_out: bool = False) -> Iterator[Batch]:
        """Every conversation once, in batches of random order."""
        plan: list[tuple[int, Tensor]] = []
        buckets = torch.tensor(BUCKETS, device=self.device)
        bucket = torch.searchsorted(buckets, self.total - 1)
        for index, length in enumerate(BUCKETS):
            rows = ((bucket == index) & (self.is_held_out == held_out)).nonzero()[:, 0]
            if len(rows) == 0:
                continue
            shuffled = rows[torch.randperm(len(rows), generator=generator).to(self.device)]
            per_batch = BATCH_TOKENS // length
            missing = -len(shuffled) % per_batch
            filler = shuffled[
                torch.randint(len(rows), (missing,), generator=generator).to(self.device)
            ]
            plan += [(length, part) for part in torch.cat([shuffled, filler]).split(per_batch)]
        for i in torch.randperm(len(plan), generator=generator).tolist():
            yield self._batch(*plan[i])

    def _batch(self, length: int, rows: Tensor) -> Batch:
        start, prompt, answer = self.start[rows], self.prompt_length[rows], self.answer_length[rows]
        within = torch.arange(length, device=self.device)
        is_real = within < (prompt + answer)[:, None]
        at = torch.where(is_real, start[:, None] + within, 0)
        ids_BS = torch.where(is_real, self.tokens[at], 0).long()
        base = torch.arange(len(rows), device=self.device) * length
        position, row = self._ragged(base + prompt - 1, answer)
        teacher, _ = self._ragged(self.answer_start[rows], answer)
        answer_at, _ = self._ragged(start + prompt, answer)
        category = self.category[rows][row]
        skip = self.num_system_tokens
        prompt_position, prompt_row = self._ragged(base + skip - 1, (prompt - skip).clamp(min=0))
        drawn = torch.rand(len(prompt_position), device=self.device) < self.prompt_share
        prompt_position, prompt_row = prompt_position[drawn], prompt_row[drawn]
        prompt_at = start[prompt_row] + prompt_position - base[prompt_row] + 1
        return Batch(
            ids_BS=ids_BS,
            position=position,
            token=self.tokens[answer_at].long(),
            top_ids=self.top_ids[teacher].long(),
            top_logs=self.top_logs[teacher].float(),
            weight=self.category_weight[category],
            prompt_position=prompt_position,
            prompt_token=self.tokens[prompt_at].long(),
            category=category,
        )
