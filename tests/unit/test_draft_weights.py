"""The shipped draft's file format: rounding error, round trip, refusal of broken files."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file  # noqa: E402

from codesign.engine.draft_weights import (  # noqa: E402
    dequantize_rows,
    load_draft_state,
    quantize_rows,
    save_draft_state,
)
from codesign.errors import InputError  # noqa: E402
from codesign.models.importing import SINGLE  # noqa: E402

SHIPPED = Path(str(resources.files("codesign"))) / "data" / "drafts" / "smollm2-135m-draft"


def random_matrix(rows: int = 7, columns: int = 33) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 2, rows)[:, None]


def small_state() -> dict[str, torch.Tensor]:
    return {
        "lm_head.weight": random_matrix(5, 8),
        "model.norm.weight": torch.linspace(0.5, 1.5, 8),
        "draft_to_target": torch.tensor([0, 2, 3, 40000, 49151]),
    }


def test_each_entry_is_within_half_a_step_of_its_row() -> None:
    weight = random_matrix()
    quantized, scale = quantize_rows(weight)
    error = (dequantize_rows(quantized, scale) - weight).abs()
    # Half a step, and the rounding of the largest entry's scale to float16 (2**-11 of 127 steps).
    assert (error <= scale.float()[:, None] * (0.5 + 127 * 2**-11)).all()


def test_the_scale_of_a_row_ignores_the_other_rows() -> None:
    weight = random_matrix()
    alone = quantize_rows(weight[:1])
    together = quantize_rows(weight)
    assert torch.equal(alone[0], together[0][:1])
    assert torch.equal(alone[1], together[1][:1])


def test_int8_rows_use_the_whole_range_and_never_minus_128() -> None:
    quantized, scale = quantize_rows(random_matrix())
    assert quantized.dtype == torch.int8
    assert scale.dtype == torch.float16
    assert (quantized.int().abs().amax(dim=1) == 127).all()
    assert int(quantized.min()) >= -127


def test_integer_rows_come_back_exactly() -> None:
    weight = torch.tensor([[-127.0, 3.0, 0.0], [254.0, -2.0, 64.0]])
    quantized, scale = quantize_rows(weight)
    assert torch.equal(dequantize_rows(quantized, scale), weight)


def test_a_row_of_zeros_stays_zero() -> None:
    weight = torch.tensor([[0.0, 0.0], [1.0, -1.0]])
    back = dequantize_rows(*quantize_rows(weight))
    assert torch.equal(back[0], torch.zeros(2))
    assert torch.isfinite(back).all()


def test_a_saved_state_loads_as_rounded_matrices_and_exact_vectors(tmp_path: Path) -> None:
    state = small_state()
    save_draft_state(tmp_path, state)
    loaded = load_draft_state(tmp_path)
    assert set(loaded) == set(state)
    expected = dequantize_rows(*quantize_rows(state["lm_head.weight"]))
    assert torch.equal(loaded["lm_head.weight"], expected)
    assert torch.equal(loaded["model.norm.weight"], state["model.norm.weight"])
    assert torch.equal(loaded["draft_to_target"], state["draft_to_target"])
    assert loaded["draft_to_target"].dtype == torch.int64


def test_a_missing_file_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read draft weights"):
        load_draft_state(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    save_draft_state(tmp_path, small_state())
    path = tmp_path / SINGLE
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match="cannot read draft weights"):
        load_draft_state(tmp_path)


def test_int8_rows_without_scales_are_refused(tmp_path: Path) -> None:
    save_draft_state(tmp_path, small_state())
    stored = load_file(tmp_path / SINGLE)
    del stored["lm_head.weight_scale"]
    save_file(stored, tmp_path / SINGLE)
    with pytest.raises(InputError, match=r"lm_head\.weight has no row scales"):
        load_draft_state(tmp_path)


def test_a_token_map_of_another_length_than_the_head_is_refused(tmp_path: Path) -> None:
    state = small_state()
    state["draft_to_target"] = state["draft_to_target"][:-1]
    save_draft_state(tmp_path, state)
    with pytest.raises(InputError, match="names 4 tokens, the head has 5 rows"):
        load_draft_state(tmp_path)


def test_the_shipped_draft_fits_its_config_and_its_size_limit() -> None:
    config = json.loads((SHIPPED / "config.json").read_text())
    state = load_draft_state(SHIPPED)
    width, head_dim = config["hidden_size"], config["head_dim"]
    head_rows = config["codesign_draft"]["draft_vocab_size"]
    assert state["lm_head.weight"].shape == (head_rows, width)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        keys = state[prefix + "self_attn.k_proj.weight"]
        assert keys.shape == (config["num_key_value_heads"] * head_dim, width)
        down = state[prefix + "mlp.down_proj.weight"]
        assert down.shape == (width, config["intermediate_size"])
    token_map = state["draft_to_target"]
    assert token_map.unique().numel() == head_rows
    assert 0 <= int(token_map.min()) < int(token_map.max()) < config["vocab_size"]
    assert 2 in token_map.tolist()  # the end of a turn must be draftable
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= 16_000_000
