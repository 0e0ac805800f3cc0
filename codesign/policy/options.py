"""What a request may ask for itself, beside its prompt and its length.

Must not import torch or read a clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from codesign.errors import InputError
from codesign.policy.walk import Sampling


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How one request is decoded.

    Attributes:
        sampling: How its logits become tokens; None for the run's.
        stop_tokens: Tokens that end it, besides the run's.
        stop_strings: Texts that end it, none of them empty. The last token is the one that
            completes one of them; plain decoding ends there, too.
        speculates: Whether anyone drafts for it; its tokens are the same without.
    """

    sampling: Sampling | None = None
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    speculates: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop_strings, str):
            text = self.stop_strings
            raise InputError(f"stop_strings is {text!r}; give a tuple of texts: ({text!r},)")
        if "" in self.stop_strings:
            raise InputError("a stop string must not be empty, got ''")


AS_THE_RUN = RequestOptions()
