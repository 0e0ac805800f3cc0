"""Distil the draft from conversations that the target wrote itself.

The loss is the cross-entropy against the target's likeliest tokens at each answer position, mixed
with the greedy token, plus a little next-token loss on user turns. The matrices of the layers are
trained with Muon, head and norms with AdamW.

usage: train_draft.py --target DIRECTORY --conversations DIRECTORY --out DIRECTORY
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from conversation_store import BATCH_TOKENS, Batch, ConversationStore
from draft_model import Draft, DraftShape
from evaluate_draft import agreement, load_draft, read_rows, table
from prompt_stubs import CATEGORIES
from target_model import NUM_SPECIAL_TOKENS, Checkpoint, LlamaShape, load_target
from torch import Tensor
from write_conversations import Templates

from codesign.engine.draft_weights import save_draft_state

HARD_SHARE = 0.2
PROMPT_WEIGHT = 0.2
WARMUP_STEPS = 200
LAST_LEARNING_RATE = 0.01
REPORT_EVERY_S = 20.0
CHECK_EVERY_S = 120.0


@dataclass(frozen=True, slots=True)
class Objective:
    """What a batch is scored by: the map from target to draft ids (-1: not in the head)."""

    target_to_draft: Tensor

    def soft_targets(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Draft ids [P, k + 1], their weights (rows sum to 1), and the weight of each position."""
        ids = torch.cat(
            [self.target_to_draft[batch.top_ids], self.target_to_draft[batch.token][:, None]], dim=1
        )
        is_known = ids >= 0
        teacher = batch.top_logs.exp() * is_known[:, :-1]
        mass = teacher.sum(dim=1, keepdim=True)
        soft = teacher / mass.clamp(min=1e-6)
        hard = is_known[:, -1:].float()
        share = HARD_SHARE * hard
        targets = torch.cat([(1 - share) * soft, share], dim=1)
        # A position whose likely tokens the head cannot name teaches little.
        return ids.clamp(min=0), targets, batch.weight * mass[:, 0].clamp(0, 1)

    def loss(self, draft: Draft, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed weighted loss, and of each answer position whether the first choice is right."""
        hidden = draft(batch.ids_BS)
        logs = torch.log_softmax(draft.lm_head(hidden[batch.position]).float(), dim=-1)
        ids, targets, weight = self.soft_targets(batch)
        loss = -((targets * logs.gather(1, ids)).sum(1) * weight).sum()
        is_right = logs.detach().argmax(1) == self.target_to_draft[batch.token]
        known = self.target_to_draft[batch.prompt_token]
        position = batch.prompt_position[known >= 0]
        logits = draft.lm_head(hidden[position]).float()
        prompt_loss = torch.nn.functional.cross_entropy(logits, known[known >= 0], reduction="sum")
        return loss + PROMPT_WEIGHT * prompt_loss, is_right


def choose_vocabulary(store: ConversationStore, target: LlamaShape, size: int) -> Tensor:
    """The `size` tokens most frequent in answers, the template's three control tokens included."""
    share, held_out = store.token_frequency(target.vocab_size)
    order = share.argsort(descending=True)
    for candidate in sorted({4096, 6144, 8192, size, 12288, 16384}):
        covered = float(held_out[order[:candidate]].sum())
        print(f"vocabulary of {candidate}: {covered:.4f} of held-out answers", flush=True)
    forced = torch.arange(NUM_SPECIAL_TOKENS, device=order.device)[:3]
    rest = order[~torch.isin(order, forced)][: size - len(forced)]
    return torch.cat([forced, rest]).sort().values


class Schedule:
    """Learning rates over the wall-clock time that training may take."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], seconds: float) -> None:
        self.optimizers, self.seconds = optimizers, seconds
        self.peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        self.started = time.perf_counter()
        self.step = 0

    @property
    def elapsed(self) -> float:
        """Seconds since training began."""
        return time.perf_counter() - self.started

    def advance(self) -> bool:
        """Set the rates of the next step; False when time is up."""
        done = min(1.0, self.elapsed / self.seconds)
        cosine = LAST_LEARNING_RATE + (1 - LAST_LEARNING_RATE) * 0.5 * (
            1 + math.cos(math.pi * done)
        )
        factor = cosine * min(1.0, (self.step + 1) / WARMUP_STEPS)
        for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
        self.step += 1
        return done < 1.0


def make_optimizers(draft: Draft, learning_rate: float, device: str) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for head and norms."""
    matrices = [p for p in draft.layers.parameters() if p.ndim == 2]
    vectors = [p for p in draft.parameters() if p.ndim == 1]
    muon = torch.optim.Muon(
        matrices, lr=learning_rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(
        [{"params": [draft.lm_head.weight]}, {"params": vectors, "weight_decay": 0.0}],
        lr=learning_rate / 2,
        betas=(0.9, 0.98),
        weight_decay=0.01,
        fused=device == "cuda",
    )
    return [muon, adam]


@torch.no_grad()
def held_out_agreement(
    draft: Draft, objective: Objective, store: ConversationStore
) -> dict[str, float]:
    """First-choice agreement by category on conversations kept back."""
    right = torch.zeros(len(CATEGORIES), device=store.device)
    total = torch.zeros(len(CATEGORIES), device=store.device)
    for batch in store.epoch(torch.Generator().manual_seed(1), held_out=True):
        _, is_right = objective.loss(draft, batch)
        right.index_add_(0, batch.category, is_right.float())
        total.index_add_(0, batch.category, torch.ones_like(is_right, dtype=torch.float32))
    shares = (right / total.clamp(min=1)).tolist()
    return {name: round(share, 4) for name, share in zip(CATEGORIES, shares, strict=True)}


def train(
    draft: Draft,
    objective: Objective,
    store: ConversationStore,
    *,
    seconds: float,
    learning_rate: float,
    checkpoint: Path,
) -> dict[str, Any]:
    """Train for `seconds` of wall-clock time; returns step count and the last running figures."""
    device = store.device
    optimizers = make_optimizers(draft, learning_rate, device)
    generator = torch.Generator().manual_seed(0)
    unit = float(store.answer_length.sum()) / max(1.0, float(store.total.sum())) * BATCH_TOKENS
    schedule, epoch = Schedule(optimizers, seconds), 0
    reported = checked = 0.0
    running: dict[str, Any] = {}
    while True:
        for batch in store.epoch(generator):
            if not schedule.advance():
                return {**running, "steps": schedule.step, "epochs": epoch}
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss, is_right = objective.loss(draft, batch)
            (loss / unit).backward()
            torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if schedule.step == WARMUP_STEPS // 10:
                schedule.started = time.perf_counter()  # compilation is over
            if schedule.elapsed > reported + REPORT_EVERY_S:
                reported = schedule.elapsed
                running = {"train_agreement": round(float(is_right.float().mean()), 4)}
                speed = schedule.step * BATCH_TOKENS / schedule.elapsed / 1e6
                print(
                    f"{reported:6.1f} s  epoch {epoch}, step {schedule.step},"
                    f" {speed:.2f} M tokens/s, loss {float(loss.detach()) / len(is_right):.3f},"
                    f" batch agreement {running['train_agreement']:.3f}",
                    flush=True,
                )
            if schedule.elapsed > checked + CHECK_EVERY_S:
                checked = schedule.elapsed
                save_draft_state(checkpoint, draft.state())
                with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                    print("held out:", held_out_agreement(draft, objective, store), flush=True)
        epoch += 1


def draft_config(target: LlamaShape, shape: DraftShape, found: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the draft."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": target.width,
        "intermediate_size": shape.ffn_width,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": round(target.rms_norm_eps, 9),
        "rope_theta": target.rope_theta,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "codesign_draft": {
            "embedding": "target",
            "draft_vocab_size": shape.vocab_size,
            "quantization": "int8-per-row",
            "target": "smollm2-135m",
            "agreement": found,
        },
    }


def build(
    checkpoint: Checkpoint,
    store: ConversationStore,
    shape: DraftShape,
    sources: list[int],
    device: str,
) -> tuple[Draft, Objective]:
    """An untrained draft that starts from target layers, and its objective."""
    target = checkpoint.shape
    vocabulary = choose_vocabulary(store, target, shape.vocab_size)
    embedding = checkpoint.tensors["model.embed_tokens.weight"].to(device)
    draft = Draft(target, shape, embedding=embedding, draft_to_target=vocabulary).to(device)
    draft.start_from(checkpoint, sources)
    inverse = torch.full((target.vocab_size,), -1, device=device)
    inverse[vocabulary] = torch.arange(shape.vocab_size, device=device)
    return draft, Objective(inverse)


def write_draft(draft: Draft, out: Path, found: dict[str, Any]) -> None:
    """Save weights and config.json."""
    save_draft_state(out, draft.state())
    config = draft_config(draft.target, draft.shape, found)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--target", type=Path, required=True, help="Hugging Face directory of the target"
    )
    parser.add_argument("--conversations", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=Path, help="evaluation rows for the figures in config.json")
    parser.add_argument("--seconds", type=float, default=800.0)
    parser.add_argument(
        "--layers", type=int, nargs="+", default=[0, 1, 15, 29], help="target layers to start from"
    )
    parser.add_argument("--ffn-width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=8960)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Train, save, and report the agreement of what was saved."""
    args = parse_arguments()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    checkpoint = load_target(args.target)
    num_system_tokens = len(Templates(checkpoint.tokenizer).system)
    store = ConversationStore(
        args.conversations, device=args.device, num_system_tokens=num_system_tokens
    )
    written = store.answer_tokens()
    print("answer tokens:", written, "all tokens:", int(store.total.sum()), flush=True)
    shape = DraftShape(len(args.layers), args.ffn_width, args.vocabulary)
    draft, objective = build(checkpoint, store, shape, args.layers, args.device)
    if args.device == "cuda" and not args.no_compile:
        draft.compile_parts()
    figures = train(
        draft,
        objective,
        store,
        seconds=args.seconds,
        learning_rate=args.learning_rate,
        checkpoint=args.out,
    )
    figures["held_out"] = held_out_agreement(draft, objective, store)
    write_draft(draft, args.out, {})
    shipped = load_draft(args.out, checkpoint)
    if args.rows:
        found = agreement(shipped, read_rows(args.rows))
        figures["agreement"] = {name: part.as_dict() for name, part in found.items()}
        print(table(found), flush=True)
        write_draft(draft, args.out, {name: round(part.first, 4) for name, part in found.items()})
    figures["answer_tokens"] = written
    figures["seconds"] = args.seconds
    figures["device"] = (
        torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    )
    figures["torch"], figures["python"] = torch.__version__, platform.python_version()
    (args.out / "training.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
