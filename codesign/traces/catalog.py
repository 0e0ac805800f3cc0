"""Which traces there are: the twins that ship with codesign, and the published files.

Knows names, addresses, checksums and folders; reads nothing and downloads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from codesign.artifacts import cache_dir
from codesign.errors import InputError

# Name of the twin to the preset of traces.synth that makes it.
TWINS = {"conv-twin": "steady", "code-twin": "bursty", "mooncake-twin": "low"}

# Both are pinned: a commit of the repository, a tag of the releases.
_AZURE_2023 = (
    "https://raw.githubusercontent.com/Azure/AzurePublicDataset/"
    "790921015d50dd6aae7f7e47f39ba0e235ad6b08/data/"
)
_AZURE_2024 = "https://github.com/Azure/AzurePublicDataset/releases/download/dataset-llm-2024/"
_MOONCAKE = (
    "https://raw.githubusercontent.com/kvcache-ai/Mooncake/"
    "3cca71daccf2a7afb8fe3f0295358f70e3a69fdb/FAST25-release/traces/"
)
_MOONCAKE_ARXIV = (
    "https://raw.githubusercontent.com/kvcache-ai/Mooncake/"
    "d21da178bae8db9651cf18a76824c084145fc725/"
)
_BURSTGPT = "https://github.com/HPMLL/BurstGPT/releases/download/v2.0/"

Origin = Literal["measured", "publisher", "third party"]


@dataclass(frozen=True, slots=True)
class PublishedTrace:
    """A trace file that others publish.

    Attributes:
        name: What ``codesign trace fetch`` calls it.
        url: Address of the file.
        about: One line: whose traffic, how long, how many requests.
        licence: Licence of the data.
        sha256: Checksum.
        checksum_from: ``measured`` on the file itself for this catalogue; ``publisher``: stated
            by the publisher (Git LFS pointer); ``third party``: the same value in two or more
            independent public projects that use the file.
        size: Bytes, None if not known.
    """

    name: str
    url: str
    about: str
    licence: str
    sha256: str
    checksum_from: Origin
    size: int | None = None

    @property
    def filename(self) -> str:
        """Name of the file, as published."""
        return self.url.rpartition("/")[2]


_CC = "CC-BY-4.0"
_APACHE = "Apache-2.0"

PUBLISHED = (
    PublishedTrace(
        "azure-code",
        _AZURE_2023 + "AzureLLMInferenceTrace_code.csv",
        "Azure 2023, coding, 1 hour, 8,819 requests, bursty",
        _CC,
        "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
        "measured",
        320_117,
    ),
    PublishedTrace(
        "azure-conv",
        _AZURE_2023 + "AzureLLMInferenceTrace_conv.csv",
        "Azure 2023, conversation, 1 hour, 19,366 requests",
        _CC,
        "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
        "measured",
        719_188,
    ),
    PublishedTrace(
        "azure-code-week",
        _AZURE_2024 + "AzureLLMInferenceTrace_code_1week.csv",
        "Azure 2024, coding, 1 week, 16.8 M requests",
        _CC,
        "71de5c55cbc35f8f1ed0b6b7806b4cd1e9764b0058469725a6aac98023a1448f",
        "third party",
        691_989_454,
    ),
    PublishedTrace(
        "azure-conv-week",
        _AZURE_2024 + "AzureLLMInferenceTrace_conv_1week.csv",
        "Azure 2024, conversation, 1 week, 27.3 M requests",
        _CC,
        "a0cc9b969a9bbf0fd811802cbf4323edd3a209ace791e3799ad4f9207f213941",
        "third party",
        1_135_195_393,
    ),
    PublishedTrace(
        "mooncake-conversation",
        _MOONCAKE + "conversation_trace.jsonl",
        "Mooncake FAST'25, conversation, 1 hour, 12,031 requests, prefix blocks",
        _APACHE,
        "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
        "measured",
        3_029_533,
    ),
    PublishedTrace(
        "mooncake-toolagent",
        _MOONCAKE + "toolagent_trace.jsonl",
        "Mooncake FAST'25, tool and agent, 1 hour, 23,608 requests, prefix blocks",
        _APACHE,
        "48a2db1a13d3bc05e6330140c64f604ba366df20d3c9e128b5c35a01c1fa5f71",
        "third party",
    ),
    PublishedTrace(
        "mooncake-arxiv",
        _MOONCAKE_ARXIV + "mooncake_trace.jsonl",
        "Mooncake arXiv:2407.00079, 1 hour, 23,608 requests, prefix blocks",
        _APACHE,
        "b434f1816a707f4bac697235588184ebc374c9907cb981bb65fb0643471fe711",
        "third party",
    ),
    PublishedTrace(
        "burstgpt-1",
        _BURSTGPT + "BurstGPT_1.csv",
        "BurstGPT, months 1-2, 1.43 M requests, failures included",
        _CC,
        "4bb3783693d0a435686fbfc885615d2349bd067239079fa4b749f2e679e12122",
        "publisher",
        52_283_111,
    ),
    PublishedTrace(
        "burstgpt-2",
        _BURSTGPT + "BurstGPT_2.csv",
        "BurstGPT, months 3-4, 3.86 M requests, failures included",
        _CC,
        "44bf5942b03fca42c01a226a545ad3a750ec62688faecd67b6831c56a8928bf7",
        "publisher",
        144_819_209,
    ),
    PublishedTrace(
        "burstgpt-3",
        _BURSTGPT + "BurstGPT_3.csv",
        "BurstGPT, later months with session ids, 5.34 M requests",
        _CC,
        "2299986a07388aa303ec2c41d1131e756db650a39ed6ef9dfe7cc3d7f9a43b8f",
        "third party",
        231_682_327,
    ),
)


def find_twin(name: str) -> str | None:
    """Return the twin with this name or preset."""
    return next((twin for twin, preset in TWINS.items() if name in (twin, preset)), None)


def find_published(name: str) -> PublishedTrace | None:
    """Return the published trace with this name or file name."""
    return next((known for known in PUBLISHED if name in (known.name, known.filename)), None)


def cached_path(published: PublishedTrace) -> Path:
    """Return where a fetched file lies, or would lie."""
    return cache_dir() / "traces" / published.filename


def bundled_path(twin: str) -> Path:
    """Return the file of a bundled twin: the repository's, or the installed copy.

    Raises:
        InputError: If neither is there.
    """
    package = Path(__file__).parents[1]
    for folder in (package.parent / "traces", package / "_traces"):
        path = folder / f"{twin}.csv"
        if path.is_file():
            return path
    raise InputError(
        f"the bundled trace {twin} is missing. Fix: codesign trace synth {TWINS[twin]} "
        f"--out {twin}.csv, then name that file"
    )
