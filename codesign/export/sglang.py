"""SGLang: ``sglang.launch_server``, and its router for copies and for prompts apart.

Trees of a draft model (STANDALONE) or an EAGLE head, one shape for every batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from codesign.errors import InputError
from codesign.export.setup import Command, Configuration, Engine, Loss, Setup, flags

_ALGORITHMS = {"draft": "STANDALONE", "ngram": "NGRAM", "eagle": "EAGLE", "eagle3": "EAGLE3"}
_POLICIES = {"round-robin": "round_robin", "least-loaded": "power_of_two",
             "prefix-aware": "cache_aware"}  # fmt: skip
_PORT, _ROUTER_PORT = 30000, 8000
# Of its context SGLang keeps a round's rows for itself when it admits a request, two tokens when it
# limits the answer, and seven when it admits a prompt.
_OF_ANSWER, _OF_PROMPT = 2, 7


def configure(setup: Setup) -> Configuration:
    """What SGLang is given.

    Raises:
        InputError: If the draft has too few positions: it gets the target's context length, and a
            server whose draft has fewer does not start.
    """
    most = setup.draft_positions
    if most is not None and setup.longest_request > most:
        raise InputError(
            f"the longest request needs {setup.longest_request:,} positions, {setup.draft} has "
            f"{most:,}, and SGLang does not start with such a draft. Name another with "
            "--draft-model NAME, or plan for shorter requests: codesign plan --trace TRACE "
            "--max-prompt N"
        )
    arguments = _arguments(setup)
    policy = _POLICIES[setup.serving.routing]
    losses, notes = _losses(setup), []
    if setup.is_tree:
        able = "flashinfer" if setup.method == "ngram" else "flashinfer, fa3 and triton"
        notes.append(
            "--speculative-eagle-topk above 1 is refused by the attention backend trtllm_mha, and "
            f"with pages of more than one token by all but {able}: where yours is another, "
            "--attention-backend flashinfer or --page-size 1"
        )
    if setup.is_vocab_padded:
        notes.append(
            "target and draft pad their vocabulary to different lengths; SGLang's pages do not say "
            "whether it minds"
        )
    if setup.prefill_gpus:
        notes.append("KV rows move through Mooncake: pip install mooncake-transfer-engine")
        if setup.method == "draft":
            notes.append("SGLang's pages do not say whether STANDALONE works with prompts apart")
        commands = _disaggregated(setup, arguments, policy)
    elif setup.replicas > 1:
        words = flags(arguments | {"dp_size": setup.replicas, "router_policy": policy})
        commands = [Command("server", ("python", "-m", "sglang_router.launch_server", *words))]
    else:
        commands = [Command("server", ("python", "-m", "sglang.launch_server", *flags(arguments)))]
    return Configuration(arguments, tuple(commands), {}, tuple(losses), tuple(notes))


def _arguments(setup: Setup) -> dict[str, Any]:
    serving = setup.serving
    arguments: dict[str, Any] = {
        "model_path": setup.target,
        "tp_size": setup.tensor_parallel,
        "context_length": _context(setup),
        "max_running_requests": setup.max_batch,
        "chunked_prefill_size": serving.prefill_chunk or -1,
        "disable_radix_cache": not serving.prefix_cache,
    }
    if serving.prefill_chunk is not None and setup.method == "plain":
        arguments["enable_mixed_chunk"] = True
    if serving.max_kv_tokens is not None:
        arguments["max_total_tokens"] = serving.max_kv_tokens
    return arguments | _speculative(setup)


def _context(setup: Setup) -> int:
    """Tokens of context with which the longest request is admitted and gets its whole answer."""
    rows = setup.rows if setup.method != "plain" else 0
    needed = max(
        setup.longest_request + max(rows, _OF_ANSWER),
        setup.longest_prompt + max(rows + 1, _OF_PROMPT),
    )
    return min([needed, *filter(None, (setup.positions, setup.draft_positions))])


def _speculative(setup: Setup) -> dict[str, Any]:
    if setup.method == "plain":
        return {}
    algorithm = {"speculative_algorithm": _ALGORITHMS[setup.method]}
    if setup.method == "ngram":
        return algorithm | {
            "speculative_num_draft_tokens": setup.rows,
            "speculative_ngram_max_bfs_breadth": setup.width,
        }
    return algorithm | {
        "speculative_draft_model_path": setup.draft,
        "speculative_num_steps": setup.depth,
        "speculative_eagle_topk": setup.width,
        "speculative_num_draft_tokens": setup.rows,
    }


def _disaggregated(setup: Setup, arguments: dict[str, Any], policy: str) -> list[Command]:
    def server(role: str, mode: str, port: int, gpus: tuple[int, ...]) -> Command:
        own = arguments | {
            "tp_size": len(gpus),
            "disaggregation_mode": mode,
            "port": port,
            "base_gpu_id": gpus[0],
        }
        return Command(role, ("python", "-m", "sglang.launch_server", *flags(own)))

    commands = [server("prefill", "prefill", _PORT, tuple(range(setup.prefill_gpus)))]
    router = ["--pd-disaggregation", "--prefill", f"http://127.0.0.1:{_PORT}"]
    for number, gpus in enumerate(setup.decode_gpus, start=1):
        commands.append(server(f"decode {number}", "decode", _PORT + number, gpus))
        router += ["--decode", f"http://127.0.0.1:{_PORT + number}"]
    router += ["--policy", policy, "--host", "0.0.0.0", "--port", str(_ROUTER_PORT)]
    words = ("python", "-m", "sglang_router.launch_router", *router)
    return [*commands, Command("router", words)]


def _losses(setup: Setup) -> list[Loss]:
    losses = []
    unbounded = dataclasses.replace(setup, positions=None, draft_positions=None)
    short = _context(unbounded) - _context(setup)
    if short:
        losses.append(
            Loss(
                f"requests of up to {setup.longest_request:,} tokens, all that the models have",
                f"{short:,} fewer, which SGLang keeps for a round: longer ones are refused or cut",
            )
        )
    if setup.serving.prefill_chunk is not None and setup.method != "plain":
        losses.append(
            Loss(
                "chunks of prompts share a step with decoding",
                "chunks run between rounds: SGLang does not mix them with speculation",
            )
        )
    if not setup.serving.preemption:
        losses.append(
            Loss(
                "KV rows of a whole answer are reserved when a request is admitted",
                "rows for a part of the answer are (--schedule-conservativeness), and requests are "
                "put back when they run out",
            )
        )
    if setup.method == "ngram":
        losses.append(
            Loss("n-grams of up to 3 tokens of the request's own text", "a trie of all requests")
        )
    return losses


ENGINE = Engine(
    name="sglang",
    title="SGLang",
    version="documentation of main at 16974b80f3, 004813e1dd and 32c764af5f, sources of main at "
    "004c82e07d, 015c872628 and 001067fffe, read 2026-11-23",
    sources=(
        "docs.sglang.io/docs/advanced_features/speculative_decoding",
        "docs.sglang.io/docs/advanced_features/adaptive_speculative_decoding",
        "docs.sglang.io/docs/advanced_features/server_arguments",
        "docs.sglang.io/docs/advanced_features/sgl_model_gateway",
        "docs.sglang.io/docs/advanced_features/pd_disaggregation",
        "github.com/sgl-project/sglang pull request 24054 (nodes that tree drafting finds)",
        "github.com/sgl-project/sglang python/sglang/srt/arg_groups/speculative_hook.py",
        "github.com/sgl-project/sglang python/sglang/srt/speculative/adaptive_spec_params.py",
        "github.com/sgl-project/sglang python/sglang/srt/managers/tokenizer_manager.py",
    ),
    methods=frozenset(("plain", "draft", "ngram", "eagle", "eagle3")),
    trees=frozenset(("draft", "ngram", "eagle", "eagle3")),
    schedules=frozenset(),
    write=configure,
)
