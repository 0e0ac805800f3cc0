"""The target writes its own training conversations on one GPU.

A user turn is an opening of `prompt_stubs` continued at temperature 1; the answer is the target's
greedy one. Beside each answer token the k likeliest tokens and their log probabilities are kept, so
training needs no second pass of the target. A second run into the same folder adds to the first.

usage: write_conversations.py --target DIRECTORY --out DIRECTORY --seconds 600
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import prompt_stubs
import torch
from decoding import Writer
from prompt_stubs import CATEGORIES, Stub
from target_model import END_OF_TURN, START_OF_TURN, load_target, prompt_ids
from tokenizers import Tokenizer

TOP_K = 16
PASSAGES_OF_A_SUBJECT = 5


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch shape: rows and cache slots, and how many tokens an answer may have."""

    rows: int
    slots: int
    answer: int


SHAPES = {
    "short": Shape(8192, 256, 112),
    "medium": Shape(6144, 448, 128),
    "long": Shape(4096, 640, 100),
    "retrieval": Shape(2560, 1024, 100),
}
SHAPE_OF = {
    "qa": "short",
    "math": "short",
    "translation": "short",
    "chat": "medium",
    "code": "medium",
    "followup": "medium",
    "summary": "long",
    "retrieval": "retrieval",
}
TURN_TOKENS = {"qa": 32, "chat": 144, "math": 104, "code": 176, "translation": 56, "followup": 64}
ARTICLE_TOKENS = (240, 440)
PASSAGE_TOKENS = 128
QUESTION_TOKENS = 26
LONG_ANSWER = 240
TEXT_TEMPERATURE = 0.9


class Templates:
    """Token ids of the chat template around user turns."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        turn = tokenizer.encode("user\n", add_special_tokens=False).ids
        whole = prompt_ids(tokenizer, [""])
        at = len(whole) - 1 - whole[::-1].index(turn[0])
        self.system = whole[:at]
        self.close = whole[at + len(turn) :]
        self.newline = tokenizer.encode("\n", add_special_tokens=False).ids

    def open_turns(
        self, texts: list[str], histories: list[list[int]] | None = None
    ) -> list[list[int]]:
        """Ids up to the end of an unfinished user turn; a history ends with its answer."""
        turns = [f"user\n{text}" for text in texts]
        encoded = self.tokenizer.encode_batch(turns, add_special_tokens=False)
        if histories is None:
            return [self.system + item.ids for item in encoded]
        between = [*self.newline, START_OF_TURN]
        return [old + between + item.ids for old, item in zip(histories, encoded, strict=True)]

    def prompts(
        self, texts: list[str], histories: list[list[int]] | None = None
    ) -> list[list[int]]:
        """Ids of whole prompts, the assistant's turn opened."""
        return [ids + self.close for ids in self.open_turns(texts, histories)]

    def decode(self, rows: list[list[int]]) -> list[str]:
        """Texts of token rows, cut at the end of the turn."""
        cut = [row[: row.index(END_OF_TURN)] if END_OF_TURN in row else row for row in rows]
        return self.tokenizer.decode_batch(cut, skip_special_tokens=False)


class Scribe:
    """Writes batches of one category after another into part files."""

    def __init__(
        self, writer: Writer, templates: Templates, out: Path, rng: random.Random, scale: int
    ) -> None:
        self.writer, self.templates, self.out, self.rng, self.scale = (
            writer,
            templates,
            out,
            rng,
            scale,
        )
        self.num_parts = len(list(out.glob("part_*.npz")))
        self.groups: list[list[str]] = []
        self.num_answer_tokens = dict.fromkeys(CATEGORIES, 0)
        self.histories: list[list[int]] = []
        self.started = time.perf_counter()

    def shape(self, name: str) -> Shape:
        """The named shape, its rows divided by the scale of a smoke test."""
        full = SHAPES[name]
        return Shape(max(2, full.rows // self.scale), full.slots, full.answer)

    def continue_turns(
        self,
        stubs: list[Stub],
        *,
        shape: Shape,
        max_new: int,
        histories: list[list[int]] | None = None,
        may_end: bool = True,
    ) -> list[tuple[str, bool]]:
        """Each opening with the target's continuation, and whether the turn was ended by it.

        Where a turn may not end it is a text to be worked on, written at a lower temperature.
        """
        texts = [stub.text for stub in stubs]
        todo = [i for i, stub in enumerate(stubs) if not stub.is_whole]
        ended = [True] * len(stubs)
        chosen = None if histories is None else [histories[i] for i in todo]
        prompts = self.templates.open_turns([texts[i] for i in todo], chosen)
        written = self.writer.write(
            prompts,
            rows=shape.rows,
            slots=shape.slots,
            max_new=max_new,
            temperature=1.0 if may_end else TEXT_TEMPERATURE,
            stop_share=0.97,
            may_end=may_end,
        )
        rows = written.ids.tolist()
        for i, row, text in zip(todo, rows, self.templates.decode(rows), strict=True):
            texts[i] += text
            ended[i] = END_OF_TURN in row
        return list(zip(texts, ended, strict=True))

    def answer(
        self, category: str, prompts: list[list[int]], *, shape: Shape, max_new: int
    ) -> None:
        """Answer greedily and save tokens and teacher probabilities as one part."""
        prompts = [ids for ids in prompts if len(ids) <= shape.slots - max_new][: shape.rows]
        if not prompts:
            return
        written = self.writer.write(
            prompts,
            rows=shape.rows,
            slots=shape.slots,
            max_new=max_new,
            temperature=0.0,
            keep_hidden=True,
            stop_share=0.995,
        )
        assert written.hidden is not None
        steps = torch.arange(written.ids.shape[1], device=written.ids.device)
        is_written = steps < written.count[:, None]
        top_ids, top_logs = self.writer.top_choices(written.hidden[is_written], k=TOP_K)
        counts = written.count.tolist()
        answers = [row[:n] for row, n in zip(written.ids.tolist(), counts, strict=True)]
        whole = [ids + answer for ids, answer in zip(prompts, answers, strict=True)]
        part = self.out / f"part_{self.num_parts:04d}"
        np.savez(
            part.with_suffix(".tmp.npz"),
            category=np.array(CATEGORIES.index(category), dtype=np.int64),
            tokens=np.concatenate([np.array(ids, dtype=np.uint16) for ids in whole]),
            prompt_length=np.array([len(ids) for ids in prompts], dtype=np.int32),
            answer_length=np.array(counts, dtype=np.int32),
            top_ids=top_ids.cpu().numpy().astype(np.uint16),
            top_logs=top_logs.cpu().numpy(),
        )
        part.with_suffix(".tmp.npz").rename(part.with_suffix(".npz"))
        self.num_parts += 1
        self.num_answer_tokens[category] += sum(counts)
        if category not in ("summary", "retrieval", "followup"):
            self.histories = (whole + self.histories)[: 4 * shape.rows]
        self._report(category, whole, prompts)

    def _report(self, category: str, whole: list[list[int]], prompts: list[list[int]]) -> None:
        seconds = time.perf_counter() - self.started
        total = sum(self.num_answer_tokens.values())
        print(
            f"{seconds:6.1f} s  {category:12s} {len(whole):5d} conversations,"
            f" {total / 1e6:7.2f} M answer tokens in all, {total / seconds / 1e3:6.1f} k/s",
            flush=True,
        )
        if self.rng.random() < 0.1:
            skip = len(self.templates.system)
            print(
                "    "
                + repr(self.templates.tokenizer.decode(whole[0][skip:], skip_special_tokens=False)),
                flush=True,
            )
            mean = np.mean([len(ids) for ids in prompts])
            print(f"    mean prompt {mean:.0f} tokens", flush=True)

    def plain(
        self, category: str, make: Callable[[random.Random], Stub], *, max_answer: int | None = None
    ) -> None:
        """A batch of single-turn conversations."""
        shape = self.shape(SHAPE_OF[category])
        stubs = [make(self.rng) for _ in range(shape.rows)]
        turns = self.continue_turns(stubs, shape=shape, max_new=TURN_TOKENS[category])
        texts = [
            text
            for text, ended in turns
            if (ended or category in ("qa", "code", "translation")) and len(text) > 3
        ]
        if category == "qa":
            texts = [prompt_stubs.cut_question(text) for text in texts]
        if category == "code":
            texts = [prompt_stubs.finish_code(text, self.rng) for text in texts]
        if category == "translation":
            texts = [text.split("\n")[0] for text in texts]
        prompts = self.templates.prompts(texts)
        self.answer(category, prompts, shape=shape, max_new=max_answer or shape.answer)

    def followup(self) -> None:
        """A second question and its answer after conversations of this run that ended."""
        shape = self.shape(SHAPE_OF["followup"])
        room = shape.slots - shape.answer - TURN_TOKENS["followup"] - 16
        usable = [ids for ids in self.histories if ids[-1] == END_OF_TURN and len(ids) <= room]
        if not usable:
            return
        histories = self.rng.sample(usable, k=min(shape.rows, len(usable)))
        stubs = [prompt_stubs.followup(self.rng) for _ in histories]
        turns = self.continue_turns(
            stubs, shape=shape, max_new=TURN_TOKENS["followup"], histories=histories
        )
        kept = [i for i, (text, ended) in enumerate(turns) if ended and len(text) > 3]
        prompts = self.templates.prompts([turns[i][0] for i in kept], [histories[i] for i in kept])
        self.answer("followup", prompts, shape=shape, max_new=shape.answer)

    def summary(self) -> None:
        """Articles under the instruction to summarise them."""
        shape = self.shape(SHAPE_OF["summary"])
        stubs = [prompt_stubs.article(self.rng) for _ in range(shape.rows)]
        turns = self.continue_turns(
            stubs, shape=shape, max_new=self.rng.randint(*ARTICLE_TOKENS), may_end=False
        )
        texts = [
            prompt_stubs.vary_summary(prompt_stubs.cut_sentence(text), self.rng)
            for text, _ in turns
        ]
        self.answer("summary", self.templates.prompts(texts), shape=shape, max_new=shape.answer)

    def _write_passages(self) -> list[list[str]]:
        shape, count = self.shape("short"), PASSAGES_OF_A_SUBJECT
        stubs = [
            stub
            for _ in range(shape.rows // count + 1)
            for stub in prompt_stubs.passages(self.rng, count)
        ][: shape.rows]
        turns = self.continue_turns(stubs, shape=shape, max_new=PASSAGE_TOKENS, may_end=False)
        texts = [
            prompt_stubs.cut_words(" ".join(text.split()), self.rng.randint(75, 105))
            for text, _ in turns
        ]
        return [texts[i : i + count] for i in range(0, len(texts), count)]

    def _with_overlap(self, group: list[str]) -> list[str]:
        """The passages in another order, at times cut across each other, as windows are."""
        group = self.rng.sample(group, k=len(group))
        if self.rng.random() < 0.5:
            first, second = self.rng.choice(group).split(), self.rng.choice(group).split()
            group[0] = " ".join(first[len(first) // 2 :] + second[: len(second) // 2])
        return group

    def retrieval(self) -> None:
        """Several passages, then a question about one of them."""
        # Two batches of questions share a batch of passages.
        groups = self.groups or self._write_passages()
        self.groups = [] if self.groups else groups
        shape, short = self.shape(SHAPE_OF["retrieval"]), self.shape("short")
        picked = [self.rng.choice(groups) for _ in range(shape.rows)]
        own = [self.rng.choice(group) for group in picked]
        stubs = [prompt_stubs.question_after(text, self.rng) for text in own]
        turns = self.continue_turns(stubs, shape=short, max_new=QUESTION_TOKENS)
        texts = []
        for group, passage, (text, ended) in zip(picked, own, turns, strict=True):
            question = prompt_stubs.cut_question(text[len(passage) + 1 :].split("\n")[0])
            if ended or question.endswith("?"):
                texts.append("\n".join([*self._with_overlap(group), question]))
        self.answer("retrieval", self.templates.prompts(texts), shape=shape, max_new=shape.answer)

    def round(self, index: int, deadline: float) -> None:
        """One batch of every category; two of those whose batches are small."""
        chat_answer = LONG_ANSWER if index % 3 == 2 else None
        tasks: list[Callable[[], None]] = [
            lambda: self.plain("qa", prompt_stubs.qa),
            lambda: self.plain("translation", prompt_stubs.translation),
            lambda: self.plain("math", prompt_stubs.math),
            lambda: self.plain("code", prompt_stubs.code),
            lambda: self.plain("chat", prompt_stubs.chat, max_answer=chat_answer),
            self.summary,
            self.retrieval,
            self.followup,
            self.summary,
            self.retrieval,
        ]
        for task in tasks:
            if time.perf_counter() > deadline:
                return
            task()


def main() -> None:
    """Write rounds of conversations until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--target", type=Path, required=True, help="Hugging Face directory of the target"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--scale", type=int, default=1, help="divide batch sizes; 4096 makes a CPU smoke test"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    started = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    seed = args.seed + len(list(args.out.glob("part_*.npz")))  # a second run adds to the first
    torch.manual_seed(seed)
    checkpoint = load_target(args.target)
    slot_bytes = (
        checkpoint.shape.num_layers * 2 * checkpoint.shape.num_kv_heads * checkpoint.shape.head_dim
    )
    item = 2 if args.device == "cuda" else 4
    most = max(max(2, shape.rows // args.scale) * shape.slots for shape in SHAPES.values())
    writer = Writer(checkpoint, device=args.device, cache_bytes=most * slot_bytes * item)
    print(f"target loaded in {time.perf_counter() - started:.1f} s", flush=True)
    scribe = Scribe(
        writer, Templates(checkpoint.tokenizer), args.out, random.Random(seed), args.scale
    )
    index = 0
    while time.perf_counter() < started + args.seconds:
        scribe.round(index, started + args.seconds)
        index += 1
    report = {
        "seconds": round(time.perf_counter() - started, 1),
        "answer_tokens": scribe.num_answer_tokens,
        "top_k": TOP_K,
        "seed": args.seed,
    }
    (args.out / "report.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
