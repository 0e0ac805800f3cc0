"""An inflated directory opens as weights: the shipped draft inside a Llama-3.2-1B shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from codesign.engine.checkpoint import open_rank, open_reader  # noqa: E402
from codesign.errors import InputError  # noqa: E402
from codesign.kernels.int4 import Int4Weight  # noqa: E402
from codesign.models.recipe import Recipe, create_inflated, weights_sha256  # noqa: E402


@pytest.fixture
def inflated(target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "smollm2-135m").symlink_to(target_dir)
    monkeypatch.setenv("CODESIGN_HOME", str(tmp_path))
    source = "smollm2-135m-draft"
    recipe = Recipe("llama-3.2-1b", "draft", source, weights_sha256(source))
    return create_inflated(recipe, name="big-draft")


@pytest.mark.slow
def test_a_rank_of_an_inflated_draft_has_int4_layers_and_a_token_map(inflated: Path):
    weights = open_rank(inflated, size=4, rank=1)
    layer = weights.layer(0)
    assert isinstance(layer.down, Int4Weight)
    assert (layer.down.rows, layer.down.columns, layer.down.group) == (2048, 2048, 128)
    last = weights.layer(15)
    assert isinstance(last.qkv, Int4Weight)
    assert last.qkv.rows == (8 + 2 + 2) * 64
    ends = weights.ends()
    assert ends.num_tokens == 8960
    assert ends.num_real == 0, "the draft's tokens fill the first rank's rows alone"
    assert ends.token_map is not None
    assert ends.token_map.shape == (8960,)


def test_an_inflated_model_of_other_weights_is_refused(inflated: Path):
    path = inflated / "config.json"
    config = json.loads(path.read_text())
    config["codesign_inflated"]["source_sha256"] = "0" * 64
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match="inflated from another smollm2-135m-draft"):
        open_reader(inflated)
