"""What an engine is to load: the plan's models as Hugging Face names or directories.

Models that no other engine can load, and pairs that cannot work together, are refused here. Imports
no torch and asks no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from codesign.errors import InputError
from codesign.fit.priced_model import PADDING, find_shape
from codesign.fit.what_if import INFLATED
from codesign.models import resolve_model
from codesign.models.quantization import INT4_HEAD
from codesign.models.shape import ModelShape, model_shape, read_config

# Shapes that come with the package, by the checkpoints on the Hugging Face hub that have them.
HUB_NAMES = {
    "deepseek-coder-1.3b": "deepseek-ai/deepseek-coder-1.3b-instruct",
    "deepseek-coder-33b": "deepseek-ai/deepseek-coder-33b-instruct",
    "deepseek-r1-distill-llama-70b": "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
    "deepseek-r1-distill-llama-8b": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    "deepseek-r1-distill-qwen-1.5b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "deepseek-r1-distill-qwen-32b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
    "llama-2-13b": "meta-llama/Llama-2-13b-chat-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-chat-hf",
    "llama-2-7b": "meta-llama/Llama-2-7b-chat-hf",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B-Instruct",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B-Instruct",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "qwen2-1.5b": "Qwen/Qwen2-1.5B-Instruct",
    "qwen2-72b": "Qwen/Qwen2-72B-Instruct",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "vicuna-33b": "lmsys/vicuna-33b-v1.3",
    "vicuna-7b": "lmsys/vicuna-7b-v1.3",
}

# Entries of config.json that only this package reads, and what they say.
_OWN_FORMS = {
    "codesign_draft": "borrows its target's embedding",
    "codesign_inflated": "is made from a recipe",
    INT4_HEAD: "has an int4 vocabulary matrix",
}


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A model as an engine is told of it.

    Attributes:
        name: Hugging Face name or directory.
        shape: Its sizes, if they are known here.
        note: What was taken for granted; "" if nothing was.
        is_assumed: The sizes are those of the model that was planned with.
    """

    name: str
    shape: ModelShape | None = None
    note: str = ""
    is_assumed: bool = False

    @property
    def positions(self) -> int | None:
        """Tokens of the longest request that it can serve; None if its own sizes are unknown."""
        return None if self.shape is None or self.is_assumed else self.shape.max_positions

    def runs_on(self, gpus: int) -> bool:
        """Whether so many GPUs can share one copy, as these engines cut it."""
        shape = self.shape
        if shape is None:
            return gpus.bit_count() == 1
        shares_kv = shape.kv_heads % gpus == 0 or gpus % shape.kv_heads == 0
        return shape.heads % gpus == 0 and shares_kv and shape.intermediate % gpus == 0


class MissingNameError(InputError):
    """A checkpoint that the plan does not name, or that no other engine loads.

    Args:
        what: Of what one is wanted.
        flag: What names it.
    """

    def __init__(self, what: str, flag: str) -> None:
        self.what, self.flag = what, flag
        super().__init__(ask_for([self]))


def ask_for(missing: Sequence[MissingNameError]) -> str:
    """One line that asks for all that is missing."""
    wanted = "; and of ".join(each.what for each in missing)
    how = "as a Hugging Face name or a folder" if len(missing) == 1 else (
        "as Hugging Face names or folders")  # fmt: skip
    flags = " ".join(f"{each.flag} NAME" for each in missing)
    return f"name a checkpoint of {wanted}; {how}: {flags}"


def engine_model(role: str, planned: str, given: str | None) -> EngineModel:
    """The target or the draft.

    Args:
        role: "target" or "draft": names the flag that gives another checkpoint.
        planned: As the plan names it: a name, with its kind of weights ("NAME:int4"), or a folder.
        given: What the flag says.

    Raises:
        MissingNameError: If no other engine can load what is planned, or nobody knows where it is.
        InputError: If none can load what is given.
    """
    flag = f"--{role}-model"
    name, _, weights = planned.partition(":") if not Path(planned).is_dir() else (planned, "", "")
    is_quantised = weights not in ("", "bf16")
    if given is not None:
        if (Path(given) / "config.json").is_file():
            if own := _own_form(Path(given)):
                raise InputError(f"no other engine loads {given}, which {own}: {flag} NAME")
            if is_quantised and not _holds_quantised(Path(given)):
                raise InputError(
                    f"the plan serves {name} with {weights} weights, those of {given} are not "
                    f"quantised: name a checkpoint that is, {flag} NAME, or plan without :{weights}"
                )
            return EngineModel(given, model_shape(Path(given)), _weights_note(name, given))
        ours = next((name for name, hub in HUB_NAMES.items() if hub == given), None)
        shape, note = find_shape(ours or planned), _weights_note(name, given)
        return EngineModel(given, shape, note, is_assumed=ours is None)
    if not name:
        raise MissingNameError(f"a {role}, which the plan does not name", flag)
    if is_quantised:
        raise MissingNameError(f"{name} with {weights} weights, as the plan serves it", flag)
    if name in HUB_NAMES:
        note = f"the plan's {name} is taken as {HUB_NAMES[name]}; another checkpoint: {flag} NAME"
        return EngineModel(HUB_NAMES[name], find_shape(name), note)
    try:
        folder = resolve_model(name)
    except InputError:
        raise MissingNameError(f"the {role} {name!r}, whose place is unknown", flag) from None
    if own := _own_form(folder):
        raise MissingNameError(f"a {role} that other engines load ({name} {own})", flag)
    return EngineModel(str(folder), model_shape(folder))


def _weights_note(planned: str, given: str) -> str:
    """What a stand-in was timed with; "" of any other model."""
    if not planned.startswith(INFLATED):
        return ""
    return (
        f"{planned} was timed with int4 weights: the prediction is not of {given} unless that is "
        "quantised to 4 bits"
    )


def check_pair(target: EngineModel, draft: EngineModel) -> bool:
    """Whether the vocabularies are one with paddings of different lengths; False if equal.

    Also False where a checkpoint took the place of the planned one and nothing is known of it.

    Raises:
        InputError: If they are different ones.
    """
    if target.shape is None or draft.shape is None or target.shape.vocab == draft.shape.vocab:
        return False
    ours, theirs = target.shape.vocab, draft.shape.vocab
    if target.shape.family == draft.shape.family and abs(ours - theirs) <= PADDING * ours:
        return True
    if target.is_assumed or draft.is_assumed:
        return False
    raise InputError(
        f"{target.name} has {ours:,} tokens, {draft.name} {theirs:,}: their "
        "vocabularies differ. Use a draft of the target's family: --draft-model NAME, or plan again"
    )


def check_positions(target: EngineModel, longest: int) -> None:
    """Refuse requests that the target has no positions for.

    Args:
        target: What the engine is to load.
        longest: Tokens of the longest prompt with its answer.

    Raises:
        InputError: If there is one; of a checkpoint whose sizes are assumed nothing is known.
    """
    if target.positions is None or longest <= target.positions:
        return
    raise InputError(
        f"the longest request needs {longest:,} positions, {target.name} has "
        f"{target.positions:,}, and no engine serves more. Plan for shorter ones: "
        "codesign plan --trace TRACE --max-prompt N --max-output N"
    )


def position_note(draft: EngineModel, longest: int) -> str:
    """One line if the draft has too few positions for the longest request; else ""."""
    if draft.positions is None or longest <= draft.positions:
        return ""
    return (
        f"{draft.name} has {draft.positions:,} positions, the longest request needs "
        f"{longest:,}: beyond them nothing useful is drafted, which the prediction does not count"
    )


def _holds_quantised(folder: Path) -> bool:
    """Whether a checkpoint says of itself that it is quantised, by either usual file."""
    config = read_config(folder / "config.json")
    return "quantization_config" in config or (folder / "hf_quant_config.json").is_file()


def _own_form(folder: Path) -> str:
    """What makes a checkpoint one of this package's own, which no other engine loads; else ""."""
    config = read_config(folder / "config.json")
    own = next((key for key in config if key.startswith("codesign_")), None)
    if own is None:
        return ""
    return f"{_OWN_FORMS.get(own, 'has a form of its own')}: {own} in its config.json"
