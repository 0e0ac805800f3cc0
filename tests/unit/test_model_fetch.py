"""The fetched default target: our engine, transformers and published outputs agree on it."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from codesign.errors import InputError
from codesign.models.fetch import check_default_target
from codesign.models.tokenizer import Tokenizer
from codesign.prompts import load_prompts

EVALUATION = Path(__file__).parents[2] / "../shared/data/model/eval_gen.jsonl.xz"
NUM_PUBLISHED = 4  # shortest rows: one forward pass each

pytestmark = pytest.mark.slow


def linked_copy(folder: Path, source: Path) -> Path:
    """Return a directory with links to all files of ``source``; a link can be replaced."""
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def replace_file(file: Path, content: dict) -> None:
    file.unlink()
    file.write_text(json.dumps(content))


def test_known_answers_are_given(target_dir):
    pytest.importorskip("torch")
    check = check_default_target(target_dir)
    assert check == "tokenizer and first greedy tokens of 2 answers checked"


def test_weights_read_with_a_wrong_rotation_are_noticed(target_dir, tmp_path):
    pytest.importorskip("torch")
    folder = linked_copy(tmp_path, target_dir)
    config = json.loads((folder / "config.json").read_text())
    replace_file(folder / "config.json", {**config, "rope_theta": config["rope_theta"] / 10})
    with pytest.raises(InputError, match="converted weights are wrong"):
        check_default_target(folder)


def test_a_tokenizer_that_joins_digits_is_noticed(target_dir, tmp_path):
    folder = linked_copy(tmp_path, target_dir)
    raw = json.loads((folder / "tokenizer.json").read_text())
    steps = raw["pre_tokenizer"]["pretokenizers"]
    steps[:] = [step for step in steps if step["type"] != "Digits"]
    replace_file(folder / "tokenizer.json", raw)
    with pytest.raises(InputError, match="converted tokenizer is wrong"):
        check_default_target(folder)


def test_engine_and_transformers_give_the_same_logits(target_dir):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from codesign.engine.kv_cache import KVCache
    from codesign.engine.model import load_decoder
    from codesign.engine.rows import RowBatch

    text = load_prompts("run")[0].text
    ids = Tokenizer(target_dir).chat([{"role": "user", "content": text}])
    decoder = load_decoder(target_dir)
    cache = KVCache(decoder.shape, num_slots=1, max_tokens=len(ids))
    batch = RowBatch(
        slots=(cache.take(),),
        counts=(len(ids),),
        tokens=torch.tensor(ids),
        positions=torch.arange(len(ids)),
        visible=(None,),
    )
    ours = decoder.logits(decoder.forward(batch, cache))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs.eval()(torch.tensor([ids])).logits[0]
    # Float32 rounding through 30 layers; logits are of order 20.
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


def test_greedy_choices_equal_the_published_outputs(target_dir):
    pytest.importorskip("torch")
    if not EVALUATION.is_file():
        pytest.skip("the published evaluation file is not there")
    from codesign.engine.self_check import greedy_choices

    with lzma.open(EVALUATION, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    rows.sort(key=lambda row: len(row["prompt_ids"]) + len(row["out_ids"]))
    for row in rows[:NUM_PUBLISHED]:
        prompt, answer = row["prompt_ids"], row["out_ids"]
        # Choices after a prefix of the answer are its greedy continuation, all at once.
        chosen = greedy_choices(target_dir, [*prompt, *answer[:-1]])
        assert chosen[len(prompt) - 1 :] == answer
