"""What a request may ask for itself, beside its prompt and its length.

Must not import torch or read a clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from codesign.policy.walk import Sampling


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How one request is decoded.

    Attributes:
        sampling: How its logits become tokens; None for the run's.
        stop_tokens: Tokens that end it, besides the run's.
        speculates: Whether anyone drafts for it; its tokens are the same without.
    """

    sampling: Sampling | None = None
    stop_tokens: frozenset[int] = frozenset()
    speculates: bool = True


AS_THE_RUN = RequestOptions()
