"""Which pages a request's KV rows lie in: one page table per request, tree rows included.

Kept by the leader of a rank group; the ranks hold the pages and get the entries of the tables
(``slabs.Slabs``). Prompt blocks are shared by id: a request takes the blocks that are there with
their pages, and never writes to them. They stay when the last request that uses them is gone, until
someone needs their pages, least recently used first.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from codesign.engine.kv_cache import CapacityError
from codesign.errors import counted
from codesign.policy.kv_memory import PREFIX_BLOCK

PAGE_ROWS = 64  # divides a prefix block and the kernels' chunk of keys


@dataclass(frozen=True, slots=True)
class Paging:
    """How many pages a model's ranks hold.

    Attributes:
        page_rows: KV rows of a page; a prefix block is a whole number of pages.
        num_pages: Pages of all requests together.
    """

    page_rows: int
    num_pages: int

    @classmethod
    def for_rows(
        cls, max_kv_tokens: int, num_slots: int, *, page_rows: int, spare_rows: int = 0
    ) -> Paging:
        """Enough pages for requests whose own rows and shared blocks are within a limit.

        Args:
            max_kv_tokens: The limit.
            num_slots: Requests at once; each may leave its last page nearly empty.
            page_rows: KV rows of a page.
            spare_rows: Rows of each request that the limit does not count.
        """
        spare = math.ceil(spare_rows / page_rows)
        return cls(page_rows, math.ceil(max_kv_tokens / page_rows) + num_slots * (1 + spare))

    def pages_of(self, num_rows: int) -> int:
        """Pages that hold ``num_rows`` rows."""
        return math.ceil(num_rows / self.page_rows)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a page table: rows [index * page_rows, ...) of a slot lie in ``page``."""

    slot: int
    index: int
    page: int


@dataclass(slots=True)
class _Held:
    """What a request holds: its slot, its pages, and its blocks, of which the first are shared."""

    slot: int
    num_shared: int
    blocks: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class PageTable:
    """Gives slots and pages to requests.

    Args:
        num_slots: Requests at once.
        paging: Pages that there are; None for a whole slab per slot, as ever.
    """

    def __init__(self, num_slots: int, paging: Paging | None = None) -> None:
        self._paging = paging
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._free = list(range(paging.num_pages - 1, -1, -1)) if paging else []
        self._held: dict[int, _Held] = {}
        self._block_pages: dict[int, tuple[int, ...]] = {}
        self._users: dict[int, int] = {}  # of each block that is there
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._entries: list[Entry] = []

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._held

    def __getitem__(self, request_id: int) -> int:
        return self._held[request_id].slot

    @property
    def num_free(self) -> int:
        """Free pages; those of idle blocks are not counted."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Pages of blocks that no request uses now."""
        return sum(len(self._block_pages[block]) for block in self._idle)

    @property
    def requests(self) -> tuple[int, ...]:
        """Requests that have a slot."""
        return tuple(self._held)

    def pages(self, request_id: int) -> tuple[int, ...]:
        """Pages of a request, in order of its rows."""
        return tuple(self._held[request_id].pages)

    def shared_rows(self, request_id: int) -> int:
        """Leading rows of a request that were there when it came: it must not write them."""
        return self._held[request_id].num_shared * PREFIX_BLOCK

    def take(self, request_id: int, blocks: Sequence[int] = ()) -> int:
        """Give a request a slot, and those of the leading ``blocks`` of its prompt that are there.

        The blocks that are missing get their pages now, and are there for requests that come later:
        their rows must be run before any of a later request.

        Returns:
            Rows of the blocks that are there.

        Raises:
            CapacityError: If no slot, or too few pages, are free.
        """
        if not self._free_slots:
            raise CapacityError(f"all {len(self._held)} slabs are in use")
        blocks = blocks if self._paging else ()
        num_shared = self._num_known(blocks)
        held = self._held[request_id] = _Held(self._free_slots.pop(), num_shared)
        for block in blocks[:num_shared]:
            self._idle.pop(block, None)
            self._users[block] += 1
            held.blocks.append(block)
            self._append(held, self._block_pages[block])
        try:
            for block in blocks[num_shared:]:
                self._add_block(request_id, block)
        except CapacityError:
            self.free(request_id, num_shared * PREFIX_BLOCK)
            raise
        return num_shared * PREFIX_BLOCK

    def _add_block(self, request_id: int, block: int) -> None:
        held, size = self._held[request_id], self._block_size
        start = len(held.blocks) * size
        self.grow(request_id, (len(held.blocks) + 1) * PREFIX_BLOCK)
        self._block_pages[block] = tuple(held.pages[start : start + size])
        self._users[block] = 1
        held.blocks.append(block)

    @property
    def _block_size(self) -> int:
        assert self._paging is not None, "blocks are of pages"
        return PREFIX_BLOCK // self._paging.page_rows

    def _num_known(self, blocks: Sequence[int]) -> int:
        return next((i for i, block in enumerate(blocks) if block not in self._users), len(blocks))

    def _append(self, held: _Held, pages: Sequence[int]) -> None:
        first = len(held.pages)
        held.pages += pages
        self._entries += [Entry(held.slot, i, page) for i, page in enumerate(pages, first)]

    def grow(self, request_id: int, num_rows: int) -> None:
        """See to it that a request has pages for its first ``num_rows`` rows.

        Raises:
            CapacityError: If too few are free: more was admitted than fits.
        """
        if self._paging is None:
            return
        held = self._held[request_id]
        for _ in range(self._paging.pages_of(num_rows) - len(held.pages)):
            self._append(held, (self._free_page(),))

    def _free_page(self) -> int:
        while not self._free:
            if not self._idle:
                raise CapacityError(
                    f"all pages are in use by {counted(len(self._held), 'request')}"
                )
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        return self._free.pop()

    def _forget(self, block: int) -> None:
        del self._users[block]
        self._free += self._block_pages.pop(block)

    def take_entries(self) -> list[Entry]:
        """Entries that are new since the last call, for the ranks."""
        entries, self._entries = self._entries, []
        return entries

    def free(self, request_id: int, num_computed: int | None = None) -> None:
        """Take back what a request holds, if it does; blocks that were run stay for others.

        Args:
            request_id: The request.
            num_computed: Leading rows that have been run; None for all of its prompt.
        """
        held = self._held.pop(request_id, None)
        if held is None:
            return
        self._free_slots.append(held.slot)
        self._entries = [entry for entry in self._entries if entry.slot != held.slot]
        if self._paging is None:
            return
        self._free += held.pages[len(held.blocks) * self._block_size :]
        for number in range(len(held.blocks) - 1, -1, -1):  # the last are evicted first
            block = held.blocks[number]
            self._users[block] -= 1
            if self._users[block]:
                continue
            if num_computed is None or (number + 1) * PREFIX_BLOCK <= num_computed:
                self._idle[block] = None
            else:
                self._forget(block)
