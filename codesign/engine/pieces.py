"""How prompts are cut into pieces, of which each is a forward of its own.

Tokens that a request had emitted when it lost its KV rows are run again behind its prompt, in
pieces as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from codesign.config import Serving
from codesign.policy.kv_memory import PREFIX_BLOCK
from codesign.policy.protocol import Admission


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Some rows of a prompt, to be run in one forward.

    Attributes:
        admission: The request; its tokens are the prompt and what it had emitted when it lost its
            KV rows.
        start: First row.
        count: Rows.
        is_emitted: They are tokens that the request had emitted.
    """

    admission: Admission
    start: int
    count: int
    is_emitted: bool = False

    @property
    def request_id(self) -> int:
        """The request."""
        return self.admission.request_id

    @property
    def tokens(self) -> tuple[int, ...]:
        """The rows' tokens."""
        return self.admission.tokens[self.start : self.end]

    @property
    def end(self) -> int:
        """Row behind the last one."""
        return self.start + self.count

    @property
    def is_last(self) -> bool:
        """Whether the request's next token follows these rows."""
        return self.end == len(self.admission.tokens)


@dataclass(frozen=True, slots=True)
class PieceSizes:
    """Where prompts are cut. Cuts lie at multiples, so that rows are computed in the same company
    whatever else runs, and so rounded alike.

    Attributes:
        prompt: Rows of a piece; None for whole prompts.
        emitted: The same of tokens that were emitted before; they are run as they were decoded.
    """

    prompt: int | None
    emitted: int

    @classmethod
    def of(cls, serving: Serving, *, emitted: int) -> PieceSizes:
        """Sizes for a plan: they divide a prefix block and fill at least nine tenths of a chunk."""
        chunk = serving.prefill_chunk
        if chunk is None:
            return cls(PREFIX_BLOCK if serving.prefix_cache else None, emitted)
        size = PREFIX_BLOCK
        while size > 1 and chunk // size * size < 0.9 * chunk:
            size //= 2
        return cls(size, min(emitted, size))

    def end(self, start: int, prompt_tokens: int, num_tokens: int) -> int:
        """End of the piece that begins at ``start``."""
        if start >= prompt_tokens:
            return min(start + self.emitted, num_tokens)
        if self.prompt is None:
            return prompt_tokens
        return min((start // self.prompt + 1) * self.prompt, prompt_tokens)

    def start(self, num_cached: int, num_tokens: int) -> int:
        """First row to run where ``num_cached`` rows are there: the last one always is run."""
        if num_cached < num_tokens:
            return num_cached
        size = self.prompt or num_tokens
        return (num_tokens - 1) // size * size
