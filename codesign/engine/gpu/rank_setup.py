"""What every rank of a run must know: which models, on which ranks, how large; picklable.

Ranks 0 to k - x - 1 draft, the next x are the target's. Without draft ranks the target's hold both
models and take turns (serial), or one model (plain).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from codesign.candidate import Candidate
from codesign.config import Serving
from codesign.engine.gpu.paging import PAGE_ROWS, Paging
from codesign.engine.gpu.watch import SILENCE
from codesign.engine.gpu.wire import WireLimits
from codesign.engine.refusals import served_requests
from codesign.engine.run import PolicySetup
from codesign.errors import InputError
from codesign.models import NGRAM
from codesign.models.shape import model_shape
from codesign.policy.interface import MAX_TREE_ROWS
from codesign.policy.kv_memory import PREFIX_BLOCK
from codesign.policy.step_time import BUCKETS
from codesign.policy.walk import Sampling
from codesign.prompts import BoundRequest

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


def rank_setup(
    candidate: Candidate,
    requests: Sequence[BoundRequest],
    *,
    target: Path,
    draft: Path | str | None,
    policy: PolicySetup | None = None,
    sampling: Sampling | None = None,
    max_kv_tokens: int = 4096,
    serving: Serving | None = None,
    page_rows: int = PAGE_ROWS,
    device: str = "cuda",
    dtype: str = "bfloat16",
    smallest_bucket: int = 8,
    check: bool = False,
    silence: float = SILENCE,
    fused: bool = True,
    shares_gpus: bool = False,
    draft_delay: Callable[[int], float] | None = None,
) -> RankSetup:
    """What the ranks of a candidate's run must know.

    Args:
        candidate: Split of the GPUs, policy and batch limit.
        requests: All that are served; they decide how long slabs are.
        target: Directory of the target.
        draft: Directory of a draft model, or NGRAM; None is allowed for plain decoding alone.
        policy: Overrides what ``candidate.speculation`` alone would build.
        sampling: Greedy by default.
        max_kv_tokens: KV rows of all running requests, as ``serving`` counts them.
        serving: How memory and steps are shared; its own limit of KV rows is not read.
        page_rows: KV rows of a page, where slabs are paged.
        device: As in RankSetup, as are those that follow.
        dtype: Of weights and KV.
        smallest_bucket: Fewest rows of a target forward.
        check: Count KV rows in wrong places.
        silence: Seconds without an answer after which a rank counts as lost.
        fused: Use the kernels that were made for this GPU.
        shares_gpus: Ranks take turns on fewer GPUs.
        draft_delay: Seconds by round that the draft sleeps, to test timing.

    Raises:
        InputError: If no request can be served, a draft is needed and missing, or a tree has more
            rows than a forward.
    """
    spec, deployment = candidate.speculation, candidate.deployment
    _check_rows(candidate)
    served = served_requests(requests, spec, model_shape(target), max_kv_tokens)
    longest, num_slots = served.longest, candidate.max_batch
    serving, sampling = serving or Serving(), sampling or Sampling()
    pages = partial(Paging.for_rows, max_kv_tokens, num_slots, page_rows=page_rows)
    pagings = _pagings(pages, serving, num_slots * longest > 2 * max_kv_tokens)
    draft = _draft_of(candidate, draft)
    return RankSetup(
        target=target,
        draft=draft,
        target_ranks=deployment.target_workers,
        draft_ranks=deployment.draft_workers if draft is not None else 0,
        policy=policy or PolicySetup(spec),
        sampling=sampling,
        num_slots=num_slots,
        target_tokens=longest,
        draft_tokens=longest + MAX_TREE_ROWS,
        target_paging=pagings[0],
        draft_paging=pagings[1],
        samplings=_samplings(served.requests, sampling),
        keeps_prefixes=serving.prefix_cache,
        max_rows=spec.max_rows,
        smallest_bucket=smallest_bucket,
        device=device,
        dtype=dtype,
        check=check,
        silence=silence,
        fused=fused,
        shares_gpus=shares_gpus,
        delay=draft_delay,
    )


def _check_rows(candidate: Candidate) -> None:
    rows = candidate.speculation.max_rows
    if rows > BUCKETS[-1]:
        raise InputError(
            f"{candidate.label} verifies {rows} rows of a request at once, ranks at most "
            f"{BUCKETS[-1]}. Take a smaller shape"
        )


def _draft_of(candidate: Candidate, draft: Path | str | None) -> Path | str | None:
    """The draft that a candidate runs with; none of plain decoding."""
    if candidate.speculation.kind == "plain":
        return None
    if draft is None:
        raise InputError(f"{candidate.label} needs a draft. Choose one: codesign models list")
    return draft


def _pagings(
    pages: Callable[..., Paging], serving: Serving, are_sparse: bool
) -> tuple[Paging | None, Paging | None]:
    """The target's and the draft's, if rows are shared or taken back, or most would be empty."""
    if not (serving.prefix_cache or serving.preemption or are_sparse):
        return None, None
    # A draft writes the row of a prompt's last token itself, and so shares no block with it.
    unshared = PREFIX_BLOCK if serving.prefix_cache else 0
    return pages(), pages(spare_rows=MAX_TREE_ROWS + unshared)


def _samplings(requests: Sequence[BoundRequest], sampling: Sampling) -> tuple[Sampling, ...]:
    """All ways in which requests sample; () if all sample as the run does, but for the seed."""
    own = {r.options.sampling for r in requests} - {None}
    different = [s for s in own if s and replace(s, seed=sampling.seed) != sampling]
    return (sampling, *different) if different else ()
