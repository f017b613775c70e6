"""KV cache pages: their references, and the prefixes that can be reused.

Policy only: no memory, no device. A page is `PAGE_SIZE` tokens of all layers. `PagePool` counts references to pages and
keeps unreferenced prefixes until their pages are needed; `PageTables` gives each request slot its list of pages. An
executor's cache is made of the pages that its tables name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from lockstep.errors import InputError

PAGE_SIZE = 64  # tokens


class PagePool:
    """Pages 0 to `num_pages`-1, each with a count of references.

    A *prefix* is a run of pages under a key (see `runtime.prefix`). Its pages stay filled after the last reference is
    gone, and are taken back least recently used first; a request references a chain from its root, and releases the
    deepest first, so leaves go before what they hang on.
    """

    def __init__(self, num_pages: int, page_nbytes: int, on_evict: Callable[[Sequence[int]], None] | None = None):
        """Make a pool of free pages.

        page_nbytes: bytes of keys and values of one page, all layers together. on_evict: called with the pages of each
        prefix that is evicted.
        """
        self.num_pages = num_pages
        self.page_nbytes = page_nbytes
        self._on_evict = on_evict
        self._next = 0  # pages from here on were never given out
        self._free: list[int] = []
        self._references: dict[int, int] = {}
        self._prefixes: dict[bytes, tuple[int, ...]] = {}
        self._key_of: dict[int, bytes | None] = {}  # of pages of prefixes; the key stands at the first page
        self._unreferenced: OrderedDict[bytes, None] = OrderedDict()  # prefixes, least recently used first
        self._reclaimable = 0  # pages of unreferenced prefixes

    @property
    def num_available(self) -> int:
        """Return how many pages `allocate` can give out.

        These are free ones, and those of prefixes without a reference.
        """
        return self.num_pages - self._next + len(self._free) + self._reclaimable

    @property
    def num_cached(self) -> int:
        """Return how many pages belong to prefixes without a reference."""
        return self._reclaimable

    def allocate(self, count: int) -> list[int]:
        """Give out `count` pages with one reference each.

        Raises InputError, and changes nothing, when there are not so many.
        """
        if count > self.num_available:
            raise InputError(
                f"KV cache: expected {count} free pages of {PAGE_SIZE} tokens, found {self.num_available} of "
                f"{self.num_pages}; raise kv_bytes, or bring fewer or shorter requests"
            )
        while len(self._free) + self.num_pages - self._next < count:
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
        """Add a reference to each of the pages, which have some."""
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Take back one reference of each page, the last first."""
        for page in reversed(pages):
            left = self._references[page] - 1
            if left:
                self._references[page] = left
                continue
            del self._references[page]
            if page not in self._key_of:
                self._free.append(page)
            elif (key := self._key_of[page]) is not None:  # its other pages went before it
                self._unreferenced[key] = None
                self._reclaimable += len(self._prefixes[key])

    def publish(self, key: bytes, pages: Sequence[int]) -> bool:
        """Let others reuse `pages`, which are filled and referenced.

        Returns False, and changes nothing, where the key has pages already.
        """
        if key in self._prefixes:
            return False
        self._prefixes[key] = tuple(pages)
        self._key_of.update(dict.fromkeys(pages))
        self._key_of[pages[0]] = key
        return True

    def holds(self, key: bytes) -> bool:
        """Return whether the key has pages."""
        return key in self._prefixes

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the pages of the longest run of `keys` that is published.

        The run begins with the first key. Each page has one more reference then.
        """
        found: list[int] = []
        for key in keys:
            pages = self._prefixes.get(key)
            if pages is None:
                break
            if key in self._unreferenced:
                del self._unreferenced[key]
                self._reclaimable -= len(pages)
            for page in pages:
                self._references[page] = self._references.get(page, 0) + 1
            found += pages
        return found

    def forget(self) -> None:
        """Drop all prefixes without a reference: their pages are free."""
        while self._unreferenced:
            self._evict()

    def _evict(self) -> None:
        key, _ = self._unreferenced.popitem(last=False)
        pages = self._prefixes.pop(key)
        self._reclaimable -= len(pages)
        for page in pages:
            del self._key_of[page]
        self._free += pages
        if self._on_evict:
            self._on_evict(pages)

    def check(self) -> None:
        """Check that no page is lost or held twice.

        Raises AssertionError: for tests, and for an idle engine.
        """
        cached = [page for key in self._unreferenced for page in self._prefixes[key]]
        assert len(cached) == self._reclaimable
        everywhere = [*self._free, *self._references, *cached]
        assert set(self._key_of) == {page for pages in self._prefixes.values() for page in pages}
        assert sorted(everywhere) == list(range(self._next)), "every page that was given out is somewhere, once"


class PageTables:
    """The pages of each request slot.

    Page i holds tokens 64 i to 64 i + 63 of the slot's request.
    """

    def __init__(
        self,
        pool: PagePool,
        num_slots: int,
        pages_for: Callable[[int], int] | None = None,
        shares: bool | None = True,
        state_pages: int = 0,
    ):
        """Make empty tables.

        pages_for: the pages that a request of so many tokens takes, where that is more than it fills. shares: a table
        may name pages of a prefix; False: a prefix is copied out of them and into them; None: what a slot holds cannot
        be moved. state_pages: what a copy of a request's states counts as, of which each chunk of a prefix has one.
        """
        self.pool = pool
        self.shares = shares
        self.state_pages = state_pages
        self.pages_for = pages_for or (lambda length: -(-length // PAGE_SIZE))
        self._tables: list[list[int]] = [[] for _ in range(num_slots)]

    def __getitem__(self, slot: int) -> Sequence[int]:
        return self._tables[slot]

    def chunk_pages(self, chunk_size: int) -> int:
        """Return the pages of a chunk of a prefix: those of its tokens, then those that its states count as."""
        return chunk_size // PAGE_SIZE + self.state_pages

    def reserve(self, ends: Mapping[int, int]) -> list[int]:
        """Make room for `ends[slot]` tokens in each slot.

        Returns the slots whose tables grew. Raises InputError, and changes nothing, when there are not so many pages.
        """
        more = {slot: self.pages_for(end) - len(self._tables[slot]) for slot, end in ends.items()}
        grown = [slot for slot, count in more.items() if count > 0]
        if grown:
            pages = self.pool.allocate(sum(more[slot] for slot in grown))
            for slot in grown:
                self._tables[slot] += [pages.pop() for _ in range(more[slot])]
        return grown

    def share(self, slot: int, pages: Sequence[int]) -> None:
        """Begin a slot's empty table with pages that are referenced for it.

        See `PagePool.find`.
        """
        assert not self._tables[slot]
        self._tables[slot] = list(pages)

    def fork(self, slot: int, other: int, length: int) -> None:
        """Put a slot's full pages before those that another slot has reserved.

        length: tokens of the first slot.
        """
        pages = self._tables[slot][: length // PAGE_SIZE]
        self.pool.retain(pages)
        self._tables[other] = pages + self._tables[other]

    def move(self, slot: int, other: int) -> None:
        """Give a slot's table to another slot, whose own is empty."""
        assert not self._tables[other]
        self._tables[other] = self._tables[slot]
        self._tables[slot] = []

    def release(self, slot: int) -> None:
        """Give a slot's pages back."""
        pages = self._tables[slot]
        self._tables[slot] = []
        self.pool.release(pages)
