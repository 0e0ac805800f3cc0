"""The smallest question to a model: which token would it choose after each of these?

Used after a fetch to compare a converted checkpoint with known answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from codesign.engine.kv_cache import KVCache
from codesign.engine.model import load_decoder
from codesign.engine.rows import RowBatch


def greedy_choices(directory: Path, tokens: Sequence[int]) -> list[int]:
    """Return the model's greedy choice after each of ``tokens``, from one forward pass on CPU.

    Args:
        directory: A Hugging Face model directory.
        tokens: (T,) ids, the first at position 0.

    Returns:
        (T,) ids; entry i is the choice for position i + 1.
    """
    decoder = load_decoder(directory)
    cache = KVCache(decoder.shape, num_slots=1, max_tokens=len(tokens))
    batch = RowBatch(
        slots=(cache.take(),),
        counts=(len(tokens),),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.arange(len(tokens)),
        visible=(None,),
    )
    with torch.inference_mode():
        return decoder.logits(decoder.forward(batch, cache)).argmax(dim=-1).tolist()
