"""What every rank of a run must know: which models, on which ranks, how large; picklable.

Ranks 0 to k - x - 1 draft, the next x are the target's. Without draft ranks the target's hold both
models and take turns (serial), or one model (plain).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from codesign.engine.gpu.paging import Paging
from codesign.engine.gpu.watch import SILENCE
from codesign.engine.gpu.wire import WireLimits
from codesign.engine.run import NGRAM, PolicySetup
from codesign.policy.walk import Sampling

if TYPE_CHECKING:
    from codesign.engine.gpu.mailbox import Mailbox
    from codesign.engine.gpu.rank_group import GroupLeader
    from codesign.engine.gpu.ranks import Rank


@dataclass(frozen=True, slots=True)
class RankSetup:
    """A run on several ranks.

    Attributes:
        target: Directory of the target.
        draft: Directory of the draft, NGRAM, or None for plain decoding.
        target_ranks: Tensor parallel degree of the target.
        draft_ranks: The draft's own ranks; 0 if it shares the target's.
        policy: What the draft's leader builds its policy from.
        sampling: How logits become tokens.
        num_slots: Requests at once.
        target_tokens: Rows of a slab of the target.
        draft_tokens: Rows of a slab of the draft.
        target_paging: Pages that the target's slabs lie in; None for whole slabs.
        draft_paging: The same of the draft's.
        samplings: Ways of sampling, where requests have their own; with the run's.
        keeps_prefixes: Prompt blocks stay for later requests.
        max_rows: Most rows of one request in a verification.
        smallest_bucket: Fewest rows of a target forward.
        device: "cuda", or "cpu" to run the same code over gloo.
        dtype: "bfloat16" or "float32".
        folder: Where ranks of one host meet; None if started by torchrun.
        check: Carry (position, token) with every KV row and count rows in wrong places.
        silence: Seconds without an answer after which a rank counts as lost.
        fused: Use the kernels that were made for this GPU; False to compare with.
        number: Of this run among those that the same processes serve.
        shares_gpus: Ranks take turns on fewer GPUs, for tests: each wait for another costs a turn.
        lead_draft: What the draft's leader does instead of answering verdicts; for measurements.
        delay: Seconds that the draft sleeps before each answer, by round; for tests of timing.
    """

    target: Path
    draft: Path | str | None
    target_ranks: int
    draft_ranks: int
    policy: PolicySetup
    sampling: Sampling
    num_slots: int
    target_tokens: int
    draft_tokens: int
    max_rows: int
    target_paging: Paging | None = None
    draft_paging: Paging | None = None
    samplings: tuple[Sampling, ...] = ()
    keeps_prefixes: bool = False
    smallest_bucket: int = 8
    device: str = "cuda"
    dtype: str = "bfloat16"
    folder: Path | None = None
    check: bool = False
    silence: float = SILENCE
    fused: bool = True
    number: int = 0
    shares_gpus: bool = False
    lead_draft: Callable[[Rank, GroupLeader | None, Mailbox, Mailbox], None] | None = None
    delay: Callable[[int], float] | None = None

    @property
    def num_ranks(self) -> int:
        """Processes in all."""
        return self.target_ranks + self.draft_ranks

    @property
    def leader(self) -> int:
        """Rank that leads the target and owns the requests."""
        return self.draft_ranks

    @property
    def limits(self) -> WireLimits:
        """Sizes of the pair link's messages."""
        return WireLimits(self.num_slots, self.max_rows)

    @property
    def page_words(self) -> int:
        """int32 words of all entries of a model's page tables."""
        tables = ((self.target_paging, self.target_tokens), (self.draft_paging, self.draft_tokens))
        entries = [self.num_slots * paging.pages_of(rows) for paging, rows in tables if paging]
        return 3 * max(entries, default=0)

    @property
    def has_draft_model(self) -> bool:
        """Whether the draft is a model."""
        return self.draft not in (None, NGRAM)

    def drafts(self, rank: int) -> bool:
        """Whether a rank belongs to the draft alone."""
        return rank < self.draft_ranks

    def group_ranks(self, *, draft: bool) -> range:
        """Global ranks that hold the draft or the target."""
        if draft and self.draft_ranks:
            return range(self.draft_ranks)
        return range(self.draft_ranks, self.num_ranks)
