"""Logits against transformers' for tiny random models, over every way of feeding rows."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from benchmarks.random_pair import random_tensors  # noqa: E402
from codesign.engine.draft_weights import (  # noqa: E402
    TOKEN_MAP,
    load_draft_state,
    save_draft_state,
)
from codesign.engine.kv_cache import CapacityError, KVCache  # noqa: E402
from codesign.engine.model import (  # noqa: E402
    Decoder,
    load_decoder,
    load_draft_decoder,
    state_decoder,
)
from codesign.engine.rows import RowBatch, causal_rows, join_rows  # noqa: E402
from codesign.engine.weights import read_tensors  # noqa: E402
from codesign.errors import InputError  # noqa: E402
from codesign.models.shape import ModelShape, Rope, model_shape  # noqa: E402

TOLERANCE = 1e-5
SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.14,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama no groups": ("Llama", {"num_key_value_heads": 6}),
    "llama 3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3 untied": ("Qwen3", {"head_dim": 4, "tie_word_embeddings": False}),
}
SHAPE = ModelShape(
    family="llama",
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=48,
    vocab=97,
    rope=Rope(10000.0),
    eps=1e-5,
    tie=True,
    qkv_bias=False,
    qk_norm=False,
    max_positions=128,
)
# A tree after a prefix of five: root, two children, two grandchildren, one of them a leaf's.
PARENTS = [-1, 0, 0, 1, 2, 3]
TREE_TOKENS = [11, 22, 33, 44, 55, 66]
PREFIX = [3, 1, 4, 1, 5]


@lru_cache
def reference(name: str):
    family, changes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    torch.manual_seed(sorted(MODELS).index(name))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for key, parameter in model.named_parameters():
        # Biases start at 0 and norms at 1: a decoder that skips them must not pass.
        if key.endswith(("bias", "norm.weight")):
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture(params=list(MODELS))
def pair(request: pytest.FixtureRequest, tmp_path: Path):
    model = reference(request.param)
    model.save_pretrained(tmp_path)
    return model, load_decoder(tmp_path)


def expected(model, tokens: list[int]):
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def prefilled(decoder: Decoder, tokens: list[int]) -> tuple[KVCache, int]:
    cache = KVCache(decoder.shape, num_slots=3, max_tokens=64, check=True)
    slot = cache.take()
    decoder.forward(causal_rows(slot, tokens), cache)
    return cache, slot


def path_to(node: int, parents: list[int]) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def tree_batch(slot: int, *, first: int, last: int, prefix: int) -> RowBatch:
    """Rows first..last-1 of the tree, those before them in the slab already."""
    visible = torch.zeros(last - first, last, dtype=torch.bool)
    for node in range(first, last):
        visible[node - first, path_to(node, PARENTS)] = True
    depths = [len(path_to(node, PARENTS)) - 1 for node in range(first, last)]
    return RowBatch(
        slots=(slot,),
        counts=(last - first,),
        tokens=torch.tensor(TREE_TOKENS[first:last]),
        positions=torch.tensor(depths) + prefix,
        visible=(visible,),
    )


def assert_close(got, want) -> None:
    assert got.shape == want.shape
    assert float((got - want).abs().max()) <= TOLERANCE


def test_prefill_gives_the_logits_of_transformers(pair):
    model, decoder = pair
    tokens = torch.randint(0, 131, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    cache, slot = prefilled(decoder, tokens[:1])
    cache.truncate(slot, 0)
    hidden = decoder.forward(causal_rows(slot, tokens), cache)
    want = expected(model, tokens)
    assert float(want.std()) > 0.3  # logits that vary, or closeness would mean little
    assert_close(decoder.logits(hidden), want)


def test_prefill_in_pieces_and_single_steps_give_the_same_logits(pair):
    model, decoder = pair
    tokens = [(7 * i + 3) % 131 for i in range(24)]
    cache = KVCache(decoder.shape, num_slots=1, max_tokens=64, check=True)
    slot = cache.take()
    got = []
    for start, end in [(0, 1), (1, 9), (9, 16), *((i, i + 1) for i in range(16, 24))]:
        rows = causal_rows(slot, tokens[start:end], start=start)
        got.append(decoder.logits(decoder.forward(rows, cache)))
    assert cache.length(slot) == 24
    assert_close(torch.cat(got), expected(model, tokens))


def test_a_tree_row_has_the_logits_of_its_path(pair):
    model, decoder = pair
    cache, slot = prefilled(decoder, PREFIX)
    # Twice: the whole tree at once, and grown in two forwards.
    for cuts in ([0, 6], [0, 3, 6]):
        got = [
            decoder.logits(
                decoder.forward(tree_batch(slot, first=a, last=b, prefix=len(PREFIX)), cache)
            )
            for a, b in pairwise(cuts)
        ]
        for node, logits in enumerate(torch.cat(got)):
            path = [TREE_TOKENS[v] for v in path_to(node, PARENTS)]
            assert_close(logits, expected(model, PREFIX + path)[-1])
        cache.truncate(slot, len(PREFIX))


def test_a_gathered_path_serves_as_prefix(pair):
    model, decoder = pair
    cache, slot = prefilled(decoder, PREFIX)
    decoder.forward(tree_batch(slot, first=0, last=6, prefix=len(PREFIX)), cache)
    kept = path_to(5, PARENTS)
    cache.gather(slot, len(PREFIX), [len(PREFIX) + node for node in kept])
    tokens = PREFIX + [TREE_TOKENS[node] for node in kept]
    cache.assert_prefix(slot, tokens)
    hidden = decoder.forward(causal_rows(slot, [9], start=len(tokens)), cache)
    assert_close(decoder.logits(hidden)[0], expected(model, [*tokens, 9])[-1])


def test_requests_side_by_side_get_what_each_gets_alone(pair):
    model, decoder = pair
    prompts = [[5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9], PREFIX]
    cache = KVCache(decoder.shape, num_slots=3, max_tokens=64, check=True)
    slots = [cache.take() for _ in prompts]
    together = [causal_rows(s, p) for s, p in zip(slots, prompts, strict=True)]
    hidden = decoder.forward(join_rows(together), cache)
    want = torch.cat([expected(model, prompt) for prompt in prompts])
    assert_close(decoder.logits(hidden), want)
    # A single token, a chain of three and a tree in one batch, the slabs in another order.
    steps = [
        tree_batch(slots[2], first=0, last=6, prefix=len(PREFIX)),
        causal_rows(slots[0], [70], start=2),
        causal_rows(slots[1], [80, 81, 82], start=9),
    ]
    got = decoder.logits(decoder.forward(join_rows(steps), cache))
    for node in range(6):
        path = [TREE_TOKENS[v] for v in path_to(node, PARENTS)]
        assert_close(got[node], expected(model, PREFIX + path)[-1])
    assert_close(got[6], expected(model, [*prompts[0], 70])[-1])
    assert_close(got[7:], expected(model, [*prompts[1], 80, 81, 82])[-3:])


def test_check_mode_stops_a_forward_after_a_wrong_gather(pair):
    _, decoder = pair
    cache, slot = prefilled(decoder, PREFIX)
    decoder.forward(tree_batch(slot, first=0, last=6, prefix=len(PREFIX)), cache)
    cache.gather(slot, len(PREFIX), [len(PREFIX) + node for node in (0, 1, 4, 5)])
    cache.gather(slot, len(PREFIX), [len(PREFIX), len(PREFIX) + 3])
    with pytest.raises(AssertionError, match="prefix positions"):
        decoder.forward(causal_rows(slot, [9], start=len(PREFIX) + 2), cache)


def test_a_slab_too_short_is_refused_before_anything_changes():
    decoder = state_decoder(SHAPE, random_tensors(SHAPE.tensors(), 0))
    cache = KVCache(SHAPE, num_slots=1, max_tokens=4)
    slot = cache.take()
    decoder.forward(causal_rows(slot, [1, 2, 3]), cache)
    with pytest.raises(CapacityError, match="2 more do not fit"):
        decoder.forward(causal_rows(slot, [4, 5], start=3), cache)
    assert cache.length(slot) == 3


def test_shards_are_read_like_one_file(tmp_path: Path):
    model = reference("qwen2")
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    decoder = load_decoder(tmp_path)
    cache, slot = prefilled(decoder, PREFIX)
    cache.truncate(slot, 0)
    hidden = decoder.forward(causal_rows(slot, PREFIX), cache)
    assert_close(decoder.logits(hidden), expected(model, PREFIX))


def test_weights_in_bfloat16_are_computed_in_float32(tmp_path: Path):
    model = reference("llama")
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    halved = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
    save_file(halved, tmp_path / "model.safetensors")
    got = run(load_decoder(tmp_path), PREFIX)
    want = run(state_decoder(load_decoder(tmp_path).shape, halved), PREFIX)
    assert got.dtype == torch.float32
    assert torch.equal(got, want)
    assert 1e-4 < float((got - expected(model, PREFIX)).abs().max()) < 0.5


def run(decoder: Decoder, tokens: list[int]):
    cache = KVCache(decoder.shape, num_slots=1, max_tokens=64)
    return decoder.logits(decoder.forward(causal_rows(cache.take(), tokens), cache))


MAPPED = [0, 5, 11, 40, 96]


def save_draft(directory: Path, target: Path, **changes: object) -> dict:
    """A draft of the target's shape with few tokens; returns its tensors as they are read.

    ``changes`` are keys of its config, and names of tensors to leave out.
    """
    state = random_tensors(replace(model_shape(target), tie=False).tensors(), 5)
    state["lm_head.weight"] = state["lm_head.weight"][MAPPED].clone()
    del state["model.embed_tokens.weight"]
    state |= {TOKEN_MAP: torch.tensor(MAPPED)}
    save_draft_state(directory, {name: t for name, t in state.items() if name not in changes})
    (directory / "config.json").write_bytes((target / "config.json").read_bytes())
    rewrite(directory, **{name: value for name, value in changes.items() if value is not None})
    return load_draft_state(directory)


def test_a_draft_shares_the_targets_embedding_and_names_few_tokens(saved: Path, tmp_path: Path):
    state = save_draft(tmp_path / "draft", saved)
    target = load_decoder(saved)
    draft = load_draft_decoder(tmp_path / "draft", target)
    assert draft.embedding_VD is target.embedding_VD
    assert draft.token_map is not None
    assert draft.token_map.tolist() == MAPPED
    head = torch.zeros_like(target.embedding_VD)
    head[MAPPED] = state["lm_head.weight"]
    tensors = {"model.embed_tokens.weight": target.embedding_VD, "lm_head.weight": head}
    whole = state_decoder(replace(model_shape(saved), tie=False), state | tensors)
    assert_close(run(draft, PREFIX), run(whole, PREFIX)[:, MAPPED])
    alone = load_draft_decoder(tmp_path / "draft", saved)
    assert torch.equal(run(alone, PREFIX), run(draft, PREFIX))


def test_a_draft_for_another_target_is_refused(saved: Path, tmp_path: Path):
    save_draft(tmp_path / "draft", saved, vocab_size=98)
    with pytest.raises(InputError, match=r"\(98, 48\), its target \(131, 48\)"):
        load_draft_decoder(tmp_path / "draft", saved)


def test_a_draft_without_a_tensor_is_refused(saved: Path, tmp_path: Path):
    name = "model.layers.1.mlp.up_proj.weight"
    save_draft(tmp_path / "draft", saved, **{name: None})
    with pytest.raises(InputError, match=rf"no tensor {name}"):
        load_draft_decoder(tmp_path / "draft", saved)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    reference("llama").save_pretrained(tmp_path)
    return tmp_path


def rewrite(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_an_unsupported_architecture_is_refused_by_name(saved: Path):
    rewrite(saved, architectures=["GPT2LMHeadModel"])
    with pytest.raises(InputError, match="GPT2LMHeadModel; supported: LlamaForCausalLM"):
        load_decoder(saved)


def test_other_weight_formats_are_refused_with_the_way_out(saved: Path):
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"model\.save_pretrained"):
        load_decoder(saved)


def test_a_missing_tensor_is_named(saved: Path):
    rewrite(saved, num_hidden_layers=4)
    with pytest.raises(InputError, match=r"no tensor model\.layers\.3\..*\(9 missing\)"):
        load_decoder(saved)


def test_a_tensor_of_another_shape_is_named(saved: Path):
    rewrite(saved, vocab_size=130)
    with pytest.raises(InputError, match=r"embed_tokens\.weight is \(131, 48\).*\(130, 48\)"):
        load_decoder(saved)


def test_a_cut_off_file_is_refused(saved: Path):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"model\.safetensors cannot be read"):
        load_decoder(saved)


def test_quantised_tensors_are_refused(tmp_path: Path):
    save_file({"w": torch.zeros(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="quantised weights are not supported"):
        read_tensors(tmp_path, {"w": (2,)})


def test_a_missing_shard_and_a_tensor_outside_the_index_are_named(tmp_path: Path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(InputError, match=r"model-00001-of-00002\.safetensors cannot be read"):
        read_tensors(tmp_path, {"w": (2,)})
    with pytest.raises(InputError, match="lists no tensor other"):
        read_tensors(tmp_path, {"other": (2,)})
    index.write_text("[]")
    with pytest.raises(InputError, match="no index of shards"):
        read_tensors(tmp_path, {"w": (2,)})


def test_only_the_tensors_asked_for_are_read(tmp_path: Path):
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "model.safetensors")
    assert list(read_tensors(tmp_path, {"a": (2,)})) == ["a"]
