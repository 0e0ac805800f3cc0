"""TensorRT-LLM: ``trtllm-serve`` with a YAML file, PyTorch backend.

Chains of a draft model with a length by batch size; trees of EAGLE-3 heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from codesign.export.setup import (
    PROMPT_LOOKUP,
    Command,
    Configuration,
    Engine,
    Loss,
    Setup,
    visible,
)

_PORT, _PREFILL_PORT, _FRONT_PORT = 8001, 8101, 8000
_CONFIG, _PROMPTS, _FRONT = "trtllm.yaml", "trtllm-prefill.yaml", "trtllm-front.yaml"


def configure(setup: Setup) -> Configuration:
    """What TensorRT-LLM is given."""
    config = _config(setup)
    arguments = _limits(setup) | config
    losses, notes = _losses(setup), []
    if setup.method == "draft":
        notes.append(
            "decoding_type is Draft_Target, as the class of main and 1.4.0rc1 has it; the guide "
            "and older releases write DraftTarget"
        )
    if setup.is_vocab_padded:
        notes.append(
            "target and draft pad their vocabulary to different lengths; the guide asks for one "
            "tokenizer and does not say whether the length matters"
        )
    if setup.schedule:
        notes.append(
            "draft_len_schedule is marked as a developer's interface. Its keys are the largest "
            "batches, as in main; earlier releases took them for the smallest and asked for key 1"
        )
    if setup.replicas > 1 and not setup.prefill_gpus:
        notes.append("each copy is a separate server: put a load balancer in front of them")
    if setup.prefill_gpus and setup.method == "draft":
        notes.append("the guide does not say whether a draft model works with prompts apart")
    if setup.prefill_gpus:
        commands, files = _disaggregated(setup, config)
    else:
        is_one = setup.replicas == 1
        commands = [
            Command(
                "server" if is_one else f"replica {number + 1}",
                _serve(setup, _CONFIG, {} if is_one else {"port": _PORT + number}),
                {} if is_one else visible(gpus),
            )
            for number, gpus in enumerate(setup.decode_gpus)
        ]
        files = {_CONFIG: to_yaml(config)}
    return Configuration(arguments, tuple(commands), files, tuple(losses), tuple(notes))


def _limits(setup: Setup) -> dict[str, Any]:
    prompts = setup.serving.prefill_chunk or setup.longest_prompt
    return {
        "model": setup.target,
        "tensor_parallel_size": setup.tensor_parallel,
        "max_batch_size": setup.max_batch,
        "max_num_tokens": prompts + setup.decode_rows,
        "max_seq_len": setup.longest_request,
    }


def _config(setup: Setup) -> dict[str, Any]:
    """The YAML file: what ``trtllm-serve`` has no flags for."""
    serving = setup.serving
    memory: dict[str, Any] = {"enable_block_reuse": serving.prefix_cache}
    if serving.max_kv_tokens is not None:
        memory["max_tokens"] = serving.max_kv_tokens
    policy = "MAX_UTILIZATION" if serving.preemption else "GUARANTEED_NO_EVICT"
    config: dict[str, Any] = {
        "enable_chunked_prefill": serving.prefill_chunk is not None,
        "kv_cache_config": memory,
        "scheduler_config": {"capacity_scheduler_policy": policy},
    }
    if setup.method in ("draft", "ngram"):
        config["disable_overlap_scheduler"] = True
    if setup.method != "plain":
        config["speculative_config"] = _speculative(setup)
    return config


def _speculative(setup: Setup) -> dict[str, Any]:
    if setup.method == "ngram":
        config: dict[str, Any] = {
            "decoding_type": "NGram",
            "max_draft_len": setup.depth,
            "max_matching_ngram_size": PROMPT_LOOKUP,
            "is_public_pool": False,
        }
    else:
        config = {
            "decoding_type": "Draft_Target" if setup.method == "draft" else "Eagle3",
            "max_draft_len": setup.depth,
            "speculative_model": setup.draft,
        }
    if setup.is_tree:
        most = setup.width * setup.depth
        config |= {
            "use_dynamic_tree": True,
            "dynamic_tree_max_topK": setup.width,
            "max_total_draft_tokens": min(max(setup.rows - 1, setup.depth), most),
        }
    if setup.schedule:
        config["draft_len_schedule"] = {part.last: part.length for part in setup.schedule}
    return config


def _serve(setup: Setup, file: str, more: Mapping[str, Any], *, gpus: int = 0) -> tuple[str, ...]:
    limits = _limits(setup)
    rest = {
        "tp_size": gpus or setup.tensor_parallel,
        "max_batch_size": limits["max_batch_size"],
        "max_num_tokens": limits["max_num_tokens"],
        "max_seq_len": limits["max_seq_len"],
        **more,
        "config": file,
    }
    words = []
    for name, value in rest.items():  # its flags keep their underscores
        words += [f"--{name}", str(value)]
    return ("trtllm-serve", setup.target, *words)


def _disaggregated(setup: Setup, config: dict[str, Any]) -> tuple[list[Command], dict[str, str]]:
    transfer = {
        "cache_transceiver_config": {
            "backend": "NIXL",
            "max_tokens_in_buffer": setup.longest_prompt,
        }
    }
    pool = tuple(range(setup.prefill_gpus))
    words = _serve(setup, _PROMPTS, {"port": _PREFILL_PORT}, gpus=len(pool))
    commands = [Command("prefill", words, visible(pool))]
    urls = []
    for number, gpus in enumerate(setup.decode_gpus):
        words = _serve(setup, _CONFIG, {"port": _PORT + number})
        commands.append(Command(f"decode {number + 1}", words, visible(gpus)))
        urls.append(f"localhost:{_PORT + number}")
    commands.append(Command("router", ("trtllm-serve", "disaggregated", "-c", _FRONT)))
    front = {
        "hostname": "localhost",
        "port": _FRONT_PORT,
        "backend": "pytorch",
        "context_servers": {"num_instances": 1, "urls": [f"localhost:{_PREFILL_PORT}"]},
        "generation_servers": {"num_instances": len(urls), "urls": urls},
    }
    files = {
        _PROMPTS: to_yaml(config | {"disable_overlap_scheduler": True} | transfer),
        _CONFIG: to_yaml(config | transfer),
        _FRONT: to_yaml(front),
    }
    return commands, files


def _losses(setup: Setup) -> list[Loss]:
    losses = []
    if setup.serving.prefill_chunk is None:
        losses.append(
            Loss(
                "whole prompts run between rounds",
                "a step has room for the longest prompt in addition to decoding",
            )
        )
    if setup.replicas > 1 and setup.serving.routing != "round-robin":
        losses.append(Loss(f"{setup.serving.routing} routing", "the load balancer's own"))
    if setup.is_tree and setup.rows - 1 > setup.width * setup.depth:
        most = setup.width * setup.depth + 1
        losses.append(Loss(f"{setup.rows} rows are verified", f"{most}, the most that it takes"))
    return losses


def to_yaml(value: Mapping[str, Any], indent: int = 0) -> str:
    """Nested mappings, lists of words, numbers and booleans as YAML."""
    lines = []
    for key, item in value.items():
        head = f"{'  ' * indent}{key}:"
        if isinstance(item, Mapping):
            lines.append(f"{head}\n{to_yaml(item, indent + 1).rstrip()}")
        elif isinstance(item, list):
            lines += [head, *(f"{'  ' * (indent + 1)}- {_scalar(word)}" for word in item)]
        else:
            lines.append(f"{head} {_scalar(item)}")
    return "\n".join(lines) + "\n"


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


ENGINE = Engine(
    name="trtllm",
    title="TensorRT-LLM",
    version="documentation of 1.4.0rc1 and main, source of main at 0004396720, read 2026-11-23",
    sources=(
        "nvidia.github.io/TensorRT-LLM/features/speculative-decoding.html",
        "nvidia.github.io/TensorRT-LLM/features/disagg-serving.html",
        "nvidia.github.io/TensorRT-LLM/commands/trtllm-serve",
        "github.com/NVIDIA/TensorRT-LLM tensorrt_llm/llmapi/llm_args.py at 0004396720",
        "github.com/NVIDIA/TensorRT-LLM pull request 10860 (lengths by batch size)",
    ),
    methods=frozenset(("plain", "draft", "ngram", "eagle3")),
    trees=frozenset(("eagle3",)),
    schedules=frozenset(("draft", "eagle3")),
    write=configure,
)
