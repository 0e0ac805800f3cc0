"""vLLM: ``vllm serve`` and its ``--speculative-config``.

Chains only; draft model and target share the same GPUs; a length by batch size.
"""

from __future__ import annotations

from typing import Any

from codesign.export.setup import (
    PROMPT_LOOKUP,
    Command,
    Configuration,
    Engine,
    Loss,
    Setup,
    flags,
    visible,
)

BLOCK = 16  # KV rows of a block, the default
_PORT, _PREFILL_PORT, _SIDE_PORT = 8000, 8100, 5600
# vLLM's second model runner drafts the longest length in every step (vllm issue 51510).
_FIRST_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


def configure(setup: Setup) -> Configuration:
    """What vLLM is given."""
    arguments = _arguments(setup)
    losses, notes = _losses(setup), []
    is_apart = bool(setup.schedule) and setup.replicas > 1
    if setup.replicas > 1 and not (is_apart or setup.prefill_gpus):
        arguments["data_parallel_size"] = setup.replicas
    if is_apart:
        notes.append(
            "each copy is a separate server: with --data-parallel-size vLLM ignores the lengths "
            "by batch size. Put a load balancer in front of them"
        )
    if setup.schedule:
        notes.append(
            "VLLM_USE_V2_MODEL_RUNNER=0, as vLLM's second model runner ignores the lengths by "
            "batch size (vllm issue 51510)"
        )
    if setup.schedule and setup.method in ("draft", "ngram"):
        notes.append(
            "vLLM states that it has tested lengths by batch size with EAGLE and DFlash, not with "
            "this drafter; the speed may fall where the length changes (vllm issue 49548)"
        )
    if setup.prefill_gpus:
        notes.append(
            "requests go through a proxy that asks the prompt server first, then a decoder; vLLM "
            "leaves it to you (its repository has an example)"
        )
        return Configuration(
            arguments, tuple(_disaggregated(setup, arguments)), {}, tuple(losses), tuple(notes)
        )
    servers = setup.replicas if is_apart else 1
    commands = [
        Command(
            f"replica {number + 1}" if is_apart else "server",
            _serve(arguments, {"port": _PORT + number} if is_apart else {}),
            (visible(setup.decode_gpus[number]) if is_apart else {}) | _runner(setup),
        )
        for number in range(servers)
    ]
    return Configuration(arguments, tuple(commands), {}, tuple(losses), tuple(notes))


def _arguments(setup: Setup) -> dict[str, Any]:
    serving = setup.serving
    slots = 1 if setup.method == "draft" else 0  # a draft model's input keeps one more token each
    prompts = serving.prefill_chunk or setup.longest_prompt
    arguments: dict[str, Any] = {
        "model": setup.target,
        "tensor_parallel_size": setup.tensor_parallel,
        "max_model_len": setup.longest_request,
        "max_num_seqs": setup.max_batch,
        "max_num_batched_tokens": prompts + setup.max_batch * (setup.rows + slots),
        "enable_prefix_caching": serving.prefix_cache,
    }
    if serving.max_kv_tokens is not None:
        # One block is a placeholder that no request gets.
        arguments["num_gpu_blocks_override"] = -(-serving.max_kv_tokens // BLOCK) + 1
    if setup.method != "plain":
        arguments["speculative_config"] = _speculative(setup)
    return arguments


def _speculative(setup: Setup) -> dict[str, Any]:
    if setup.method == "ngram":
        config: dict[str, Any] = {
            "method": "ngram",
            "num_speculative_tokens": setup.depth,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": PROMPT_LOOKUP,
        }
    else:
        config = {
            "method": "draft_model" if setup.method == "draft" else setup.method,
            "model": setup.draft,
            "num_speculative_tokens": setup.depth,
        }
    if setup.method == "draft":
        config["draft_tensor_parallel_size"] = setup.tensor_parallel
    if setup.is_vocab_padded:
        config["use_heterogeneous_vocab"] = True
    if setup.schedule:
        config["num_speculative_tokens_per_batch_size"] = [
            [part.first, part.last, part.length] for part in setup.schedule
        ]
    return config


def _serve(arguments: dict[str, Any], more: dict[str, Any]) -> tuple[str, ...]:
    rest = {name: value for name, value in arguments.items() if name != "model"} | more
    return ("vllm", "serve", arguments["model"], *flags(rest, negated=True))


def _runner(setup: Setup) -> dict[str, str]:
    return _FIRST_RUNNER if setup.schedule else {}


def _disaggregated(setup: Setup, arguments: dict[str, Any]) -> list[Command]:
    def server(role: str, kind: str, number: int, gpus: tuple[int, ...]) -> Command:
        more = {
            "port": (_PREFILL_PORT if kind == "kv_producer" else _PORT) + number,
            "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": kind},
        }
        side = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(_SIDE_PORT + gpus[0])}
        own = arguments | {"tensor_parallel_size": len(gpus)}
        if setup.method == "draft":
            config = _speculative(setup) | {"draft_tensor_parallel_size": len(gpus)}
            own["speculative_config"] = config
        return Command(role, _serve(own, more), visible(gpus) | side | _runner(setup))

    pool = tuple(range(setup.prefill_gpus))
    return [
        server("prefill", "kv_producer", 0, pool),
        *(
            server(f"decode {number + 1}", "kv_consumer", number, gpus)
            for number, gpus in enumerate(setup.decode_gpus)
        ),
    ]


def _losses(setup: Setup) -> list[Loss]:
    losses = []
    if setup.serving.prefill_chunk is None:
        losses.append(
            Loss(
                "whole prompts run between rounds",
                "a step has room for the longest prompt in addition to decoding; of "
                "several that arrive together some are split",
            )
        )
    if not setup.serving.preemption:
        losses.append(
            Loss(
                "KV rows of a whole answer are reserved when a request is admitted",
                "rows are taken as requests grow; the youngest is evicted when they run out",
            )
        )
    if setup.replicas > 1 and setup.serving.routing != "least-loaded":
        losses.append(Loss(f"{setup.serving.routing} routing", "the balancer's own, by load"))
    if setup.is_vocab_padded:
        losses.append(
            Loss(
                "a draft whose vocabulary is padded to another length",
                "use_heterogeneous_vocab, which maps the tokens that both have",
            )
        )
    return losses


ENGINE = Engine(
    name="vllm",
    title="vLLM",
    version="documentation 0.25.0 and latest, source of main at 002e77c1f0 and 14b450ca59, read "
    "2026-11-23",
    sources=(
        "docs.vllm.ai/en/latest/features/speculative_decoding/dynamic_speculative_decoding",
        "docs.vllm.ai/en/latest/features/speculative_decoding/draft_model",
        "github.com/vllm-project/vllm issues 49548 and 51510 (lengths by batch size)",
        "docs.vllm.ai/en/stable/features/nixl_connector_usage",
        "docs.vllm.ai/en/latest/serving/data_parallel_deployment",
        "github.com/vllm-project/vllm vllm/config/speculative.py at 002e77c1f0",
        "github.com/vllm-project/vllm vllm/v1/spec_decode/dynamic/utils.py at 14b450ca59",
    ),
    methods=frozenset(("plain", "draft", "ngram", "eagle", "eagle3")),
    trees=frozenset(),
    schedules=frozenset(("draft", "ngram", "eagle", "eagle3")),
    write=configure,
)
