"""The KV cache's pages: reference counts, reusable prefixes and page tables. No memory, no device.

A page is `PAGE_SIZE` tokens of all layers. `PagePool` counts references to pages and keeps unreferenced prefixes until
their pages are needed. `PageTables` has the list of pages of each request slot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from lockstep.errors import InputError

PAGE_SIZE = 64  # tokens


class PagePool:
    """Pages 0 to `num_pages`-1, with reference counts.

    A *prefix* is a run of pages under a key (see `runtime.prefix`). Its pages stay filled after the last reference is
    gone and are evicted in LRU order. A request references a chain of prefixes from its root and releases the deepest
    one first, so leaves are evicted before their parents.
    """

    def __init__(self, num_pages: int, page_nbytes: int, on_evict: Callable[[Sequence[int]], None] | None = None):
        """Create a pool of free pages.

        page_nbytes: bytes of a page's keys and values in all layers. on_evict: called with the pages of each prefix
        that is evicted.
        """
        self.num_pages = num_pages
        self.page_nbytes = page_nbytes
        self._on_evict = on_evict
        self._next = 0  # pages from here on were never allocated
        self._free: list[int] = []
        self._references: dict[int, int] = {}
        self._prefixes: dict[bytes, tuple[int, ...]] = {}
        self._key_of: dict[int, bytes | None] = {}  # by page of a prefix: the key for its first page, else None
        self._unreferenced: OrderedDict[bytes, None] = OrderedDict()  # prefixes, least recently used first
        self.num_cached = 0  # pages of unreferenced prefixes

    @property
    def num_available(self) -> int:
        """Return how many pages can be allocated: free ones, and those of unreferenced prefixes."""
        return self.num_pages - self._next + len(self._free) + self.num_cached

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages with one reference each. Raises InputError if too few are free."""
        if count > self.num_available:
            raise InputError(
                f"KV cache: expected {count} free pages of {PAGE_SIZE} tokens, found {self.num_available} of "
                f"{self.num_pages}; raise kv_bytes, or bring fewer or shorter requests"
            )
        while len(self._free) + self.num_pages - self._next < count:  # free pages, and those never allocated
            self._evict()
        pages = []
        for _ in range(count):
            if self._free:
                pages.append(self._free.pop())
            else:
                pages.append(self._next)
                self._next += 1
        self._references.update(dict.fromkeys(pages, 1))
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove a reference from each page, the last page first."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page]:
                continue
            del self._references[page]
            if page not in self._key_of:  # of no prefix
                self._free.append(page)
                continue
            key = self._key_of[page]
            if key is not None:  # the first page of a prefix, whose other pages were released before
                self._unreferenced[key] = None
                self.num_cached += len(self._prefixes[key])

    def publish(self, key: bytes, pages: Sequence[int]) -> bool:
        """Make filled, referenced pages reusable under a key. Return False if the key has pages already."""
        if key in self._prefixes:
            return False
        self._prefixes[key] = tuple(pages)
        self._key_of.update(dict.fromkeys(pages))
        self._key_of[pages[0]] = key
        return True

    def holds(self, key: bytes) -> bool:
        return key in self._prefixes

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the pages of the longest published run of `keys` from the first one on, and add references to them."""
        shared_pages: list[int] = []
        for key in keys:
            pages = self._prefixes.get(key)
            if pages is None:
                break
            if key in self._unreferenced:
                del self._unreferenced[key]
                self.num_cached -= len(pages)
            for page in pages:  # pages of an unreferenced prefix have no entry
                self._references[page] = self._references.get(page, 0) + 1
            shared_pages += pages
        return shared_pages

    def forget(self) -> None:
        """Evict all unreferenced prefixes."""
        while self._unreferenced:
            self._evict()

    def _evict(self) -> None:
        key, _ = self._unreferenced.popitem(last=False)
        pages = self._prefixes.pop(key)
        self.num_cached -= len(pages)
        for page in pages:
            del self._key_of[page]
        self._free += pages
        if self._on_evict:
            self._on_evict(pages)

    def check(self) -> None:
        """Assert that each page is free, referenced or cached, exactly once: for tests, and for an idle engine."""
        cached: list[int] = []
        for key in self._unreferenced:
            cached += self._prefixes[key]
        assert len(cached) == self.num_cached
        assert set(self._key_of) == set().union(*self._prefixes.values())
        all_pages = [*self._free, *self._references, *cached]
        assert sorted(all_pages) == list(range(self._next)), "every page that was given out is somewhere, once"


class PageTables:
    """The list of pages of each request slot: page i has tokens 64 i to 64 i + 63."""

    def __init__(
        self,
        pool: PagePool,
        num_slots: int,
        pages_for: Callable[[int], int] | None = None,
        shares: bool | None = True,
        state_pages: int = 0,
    ):
        """Create empty tables.

        Args:
            pages_for: The pages that a request of some tokens reserves, if more than it fills.
            shares: Tables may share the pages of a prefix; False: a prefix is copied to and from its pages; None: the
                contents of a slot can't be copied.
            state_pages: The pages that a copy of recurrent states counts as. Each chunk of a prefix has one copy.
        """
        self.pool = pool
        self.shares = shares
        self.state_pages = state_pages
        self.pages_for = pages_for or _pages_filled
        self._tables: list[list[int]] = [[] for _ in range(num_slots)]

    def __getitem__(self, slot: int) -> Sequence[int]:
        return self._tables[slot]

    def chunk_pages(self, chunk_size: int) -> int:
        """Return the pages of a chunk of a prefix: those of its tokens and those of its states."""
        return chunk_size // PAGE_SIZE + self.state_pages

    def reserve(self, ends: Mapping[int, int]) -> None:
        """Reserve pages for `ends[slot]` tokens in each slot.

        Raises InputError, and changes nothing, if too few pages are free.
        """
        missing = {slot: self.pages_for(end) - len(self._tables[slot]) for slot, end in ends.items()}
        grown = [slot for slot, count in missing.items() if count > 0]
        if grown:
            pages = self.pool.allocate(sum(missing[slot] for slot in grown))
            for slot in grown:
                self._tables[slot] += [pages.pop() for _ in range(missing[slot])]

    def share(self, slot: int, pages: Sequence[int]) -> None:
        """Start a slot's empty table with pages that `PagePool.find` referenced for it."""
        assert not self._tables[slot]
        self._tables[slot] = list(pages)

    def fork(self, slot: int, other: int, length: int) -> None:
        """Share a slot's full pages with another slot, before the pages that the other has reserved."""
        pages = self._tables[slot][: length // PAGE_SIZE]
        self.pool.retain(pages)
        self._tables[other] = pages + self._tables[other]

    def move(self, slot: int, other: int) -> None:
        """Move a slot's table to another slot, whose table is empty."""
        assert not self._tables[other]
        self._tables[other] = self._tables[slot]
        self._tables[slot] = []

    def release(self, slot: int) -> None:
        pages = self._tables[slot]
        self._tables[slot] = []
        self.pool.release(pages)


def _pages_filled(length: int) -> int:
    return -(-length // PAGE_SIZE)
