"""Nouns of an export: what is served, its nearest configuration of an engine, what is lost."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from codesign.config import Serving

Method = Literal["plain", "draft", "ngram", "eagle", "eagle3"]

PROMPT_LOOKUP = 3  # longest n-gram of the drafter without a model, as this engine's


@dataclass(frozen=True, slots=True)
class Loss:
    """Something the plan does that an engine cannot.

    Attributes:
        what: Of the plan.
        instead: What the configuration does in its place.
    """

    what: str
    instead: str


@dataclass(frozen=True, slots=True)
class BatchRange:
    """A speculative length for batches of ``first`` to ``last`` requests, both included."""

    first: int
    last: int
    length: int


@dataclass(frozen=True, slots=True)
class Setup:
    """The nearest configuration, in words that all engines share.

    Attributes:
        target: As the engine is to load it: a Hugging Face name or a directory.
        draft: Draft model or head, likewise; "" if the method has none.
        method: How tokens are proposed.
        depth: Draft forwards per round: the length of a chain, the depth of a tree.
        width: Leaves expanded per draft forward; 1 for chains.
        rows: Rows of one request that the target verifies, root included.
        schedule: Lengths by batch size, where the engine takes them; empty for ``depth`` always.
        tensor_parallel: GPUs of one copy of the models.
        replicas: Copies.
        prefill_gpus: GPUs of the one group that only runs prompts; 0 without.
        max_batch: Most requests at once on a copy.
        longest_prompt: Tokens of the longest prompt of the plan's trace.
        longest_request: Tokens of the longest prompt with its answer.
        serving: How the plan shares memory and steps.
        is_vocab_padded: Target and draft have one tokenizer and tables of different lengths.
        positions: Tokens of the longest request that the target can serve; None if unknown.
        draft_positions: The same of a draft model.
    """

    target: str
    draft: str
    method: Method
    depth: int
    width: int
    rows: int
    schedule: tuple[BatchRange, ...]
    tensor_parallel: int
    replicas: int
    prefill_gpus: int
    max_batch: int
    longest_prompt: int
    longest_request: int
    serving: Serving
    is_vocab_padded: bool = False
    positions: int | None = None
    draft_positions: int | None = None

    @property
    def is_tree(self) -> bool:
        """Whether more than a chain is verified."""
        return self.width > 1

    @property
    def decode_rows(self) -> int:
        """Rows of a step in which a full batch decodes."""
        return self.max_batch * self.rows

    @property
    def decode_gpus(self) -> tuple[tuple[int, ...], ...]:
        """GPUs of each copy; those of the prompt group come first."""
        size = self.tensor_parallel
        firsts = [self.prefill_gpus + number * size for number in range(self.replicas)]
        return tuple(tuple(range(first, first + size)) for first in firsts)

    @property
    def num_gpus(self) -> int:
        """GPUs in all."""
        return self.prefill_gpus + self.replicas * self.tensor_parallel


@dataclass(frozen=True, slots=True)
class Command:
    """One process to start.

    Attributes:
        role: "server", "replica 1", "prefill", "decode 1", "router".
        argv: Its words.
        environment: Variables to set for it.
    """

    role: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def shell(self) -> str:
        """As typed in a shell, a flag with its value on each line."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines = [words]
        for word in self.argv:
            if word.startswith("--"):
                lines.append([])
            lines[-1].append(shlex.quote(word))
        return " \\\n    ".join(" ".join(line) for line in lines if line)


@dataclass(frozen=True, slots=True)
class Configuration:
    """What an engine is given.

    Attributes:
        arguments: Of one serving process, as the engine's Python interface names them.
        commands: Processes to start, in this order.
        files: Texts that the commands read, by name.
        losses: What the engine cannot do, beside the policy's.
        notes: What a reader must know.
    """

    arguments: dict[str, Any]
    commands: tuple[Command, ...]
    files: dict[str, str] = field(default_factory=dict)
    losses: tuple[Loss, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine can do, by its documentation.

    Attributes:
        name: On the command line.
        title: In prose.
        version: Of the documentation that this was checked against.
        sources: Pages and files of it.
        methods: Ways to propose tokens that it has.
        trees: Of these, the ones that it verifies trees for.
        schedules: Of these, the ones that take a length by batch size.
        write: From a setup to its configuration.
    """

    name: str
    title: str
    version: str
    sources: tuple[str, ...]
    methods: frozenset[Method]
    trees: frozenset[Method]
    schedules: frozenset[Method]
    write: Callable[[Setup], Configuration]


def flags(arguments: Mapping[str, Any], *, negated: bool = False) -> list[str]:
    """Command-line words of arguments whose flags are their names with dashes.

    Args:
        arguments: Values by name; dictionaries become JSON, True a flag alone.
        negated: False is written as ``--no-NAME``; otherwise it is left out.
    """
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is True:
            words.append(f"--{flag}")
        elif value is False:
            words += [f"--no-{flag}"] if negated else []
        elif isinstance(value, dict):
            words += [f"--{flag}", json.dumps(value)]
        else:
            words += [f"--{flag}", str(value)]
    return words


def visible(gpus: tuple[int, ...]) -> dict[str, str]:
    """The variable that shows a process these GPUs only."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
