"""The scheduler: requests and a pool of pages in, shares of the next step out.

Policy only: no clock, no tokens, no device.

Each step, in this order: running requests that decode bring one token each; prompts, in order, bring whole chunks, cut
at multiples of `chunk_size`, while `max_num_tokens` lasts: each as many as there is room for, but while others decode
at most `long_prefill_token_threshold` tokens, and all together `max_prefill_tokens`, unless prompts pile up. The first
prompt in order always brings a chunk.

The order is by priority, lower first, then arrival; a request gains one level of priority on those that come `AGEING`
steps after it, so none waits for ever. Waiting requests are admitted in this order, when a slot and pages are free: for
all tokens that the request may come to ("guaranteed": what runs ends), or for its prompt and a little more
("optimistic": when the pool runs out the youngest request is swapped out, and comes back before others are admitted).

A request whose adapter has no slot lets those behind it pass, for they need none, or one that is there. Once it has
waited for a slot for `PATIENCE` steps, no request with an adapter passes it any more, so that a slot becomes free.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lockstep.errors import InputError
from lockstep.step.pages import PAGE_SIZE, PageTables
from lockstep.step.residency import Residency

AGEING = PATIENCE = 256  # steps
_PILE = 3  # times `max_prefill_tokens`: with more tokens of prompts to compute, steps are filled
LOOKAHEAD = 256  # tokens behind those that a request holds, for which an optimistic admission wants pages
Admission = Literal["guaranteed", "optimistic"]


class Status(enum.Enum):
    """Where a request stands.

    HELD: not to be admitted yet. FORKING: a further choice of a prompt that is not computed to its end, or not begun.
    """

    HELD = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FORKING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False, slots=True)
class Scheduled:
    """A request as the scheduler sees it; of several choices, one of them.

    num_prompt_tokens: must be computed before its first new token. max_tokens: held at most, prompt and answer.
    num_computed: tokens that the cache holds. prefix: keys of its whole chunks. siblings: its further choices.
    published: chunks of its prompt that others can reuse. adapter: what it is computed with, None for the base alone.
    blocked: the step from which on it was first in order but for a place for its adapter, 0 for none.
    """

    num_prompt_tokens: int
    max_tokens: int
    priority: int = 0
    prefix: Sequence[bytes] = ()
    siblings: Sequence[Scheduled] = ()
    status: Status = Status.WAITING
    slot: int = -1  # none
    num_computed: int = 0
    published: int = 0
    order: tuple[int, int] = (0, 0)
    adapter: str | None = None
    blocked: int = 0

    @property
    def decodes(self) -> bool:
        """Return whether its next share of a step is one token behind its prompt.

        Not so of one that holds all that it may: it ends once the tokens of the step before are known.
        """
        return self.num_prompt_tokens <= self.num_computed < self.max_tokens

    @property
    def in_prompt(self) -> bool:
        """Return whether tokens of its prompt are still to be computed."""
        return self.num_computed < self.num_prompt_tokens

    @property
    def slots(self) -> list[int]:
        """Return the slots of the request and its siblings."""
        return [each.slot for each in (self, *self.siblings) if each.slot >= 0]


@dataclass(slots=True)
class SchedulerOutput:
    """What goes into one step.

    admitted: requests that enter, each with pages of a prefix that it reuses. swapped_in: requests whose content comes
    back. shares: (request, number of tokens) behind those that it holds. drafts: of requests that decode, tokens to
    verify behind their share.
    """

    admitted: list[tuple[Scheduled, list[int]]] = field(default_factory=list)
    swapped_in: list[Scheduled] = field(default_factory=list)
    shares: list[tuple[Scheduled, int]] = field(default_factory=list)
    drafts: Mapping[Scheduled, Sequence[int]] = field(default_factory=dict)


class Scheduler:
    """Schedules requests; takes their slots and pages from `tables`."""

    def __init__(
        self,
        tables: PageTables,
        num_slots: int,
        max_num_tokens: int,
        chunk_size: int,
        admission: Admission = "guaranteed",
        long_prefill_token_threshold: int | None = None,
        residency: Residency | None = None,
        max_prefill_tokens: int | None = None,
        compacts: bool = False,
        lookahead: int | None = None,
    ):
        """Make a scheduler without requests.

        max_num_tokens: of one step. residency: of the adapters; None where there are none. max_prefill_tokens: of all
        prompts together in a step beside requests that decode, at least a chunk, unless prompts pile up (`_PILE`);
        None: whatever there is room for. long_prefill_token_threshold: tokens that one prompt brings at most to a step
        beside requests that decode, rounded down to whole chunks, at least one; None: whatever there is room for.
        compacts: requests may be moved to lower slots, for a step computes all rows up to the highest slot. lookahead:
        tokens after those that a request holds for which an optimistic admission wants pages; None: `LOOKAHEAD`.

        Raises InputError where a step has no room for a token of each request, or, if all others decode, for a chunk,
        and for a threshold below 1.
        """
        if max_num_tokens < num_slots:
            raise InputError(f"max_num_tokens: expected at least max_batch_size ({num_slots}), found {max_num_tokens}")
        if not 1 <= chunk_size <= max_num_tokens - num_slots + 1:
            raise InputError(
                f"chunk_size: expected 1 to {max_num_tokens - num_slots + 1}, which a step of {max_num_tokens} tokens "
                f"(max_num_tokens) has room for beside {num_slots - 1} other requests, found {chunk_size}"
            )
        if long_prefill_token_threshold is not None and long_prefill_token_threshold < 1:
            raise InputError(
                f"long_prefill_token_threshold: expected at least 1, found {long_prefill_token_threshold}; "
                "leave it out for no limit"
            )
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.tables = tables
        self.max_num_tokens = max_num_tokens
        self._residency = residency
        self.chunk_size = chunk_size
        self.admission = admission
        self._max_prefill_tokens = max_prefill_tokens
        self.num_swaps = 0
        self._compacts = compacts
        self._lookahead = LOOKAHEAD if lookahead is None else lookahead
        self._free_slots = list(range(num_slots))  # a heap: low slots first, so that rows that decode lie together
        self._num_slots = num_slots
        self._waiting: dict[str | None, list[tuple[tuple[int, int], Scheduled]]] = {}  # by adapter, a heap
        self._num_waiting = 0
        self._running: list[Scheduled] = []  # in order
        self._swapped: list[Scheduled] = []  # in order
        # By the first page of a chunk that is to be copied: the pages of the chunks before it, held until then.
        self._parents: dict[int, list[int]] = {}
        self._steps = self._arrivals = 0

    @property
    def num_running(self) -> int:
        """Return how many requests, or choices of them, hold a slot."""
        return self._num_slots - len(self._free_slots)

    @property
    def num_waiting(self) -> int:
        """Return how many requests are not admitted yet, or swapped out."""
        return self._num_waiting + len(self._swapped)

    def add(self, request: Scheduled, held: bool = False) -> None:
        """Queue a request.

        held: it takes its place in the order, but is not admitted before `unhold`. Raises InputError for one that no
        empty pool, or no number of slots, could ever take.
        """
        needed = self._pages_for(request, request.max_tokens)
        there = self.tables.pool.num_pages
        if needed > there:
            raise InputError(
                f"request: expected at most {there * PAGE_SIZE} tokens of KV cache ({there} pages of {PAGE_SIZE}), "
                f"found a need for {needed * PAGE_SIZE}: {request.num_prompt_tokens} prompt tokens and up to "
                f"{request.max_tokens - request.num_prompt_tokens} more, {1 + len(request.siblings)} times; "
                f"ask for less, or give kv_bytes {needed * self.tables.pool.page_nbytes} or more"
            )
        if len(request.siblings) >= self._num_slots:
            raise InputError(
                f"n: expected at most {self._num_slots} choices (max_batch_size), found {1 + len(request.siblings)}"
            )
        request.order = (request.priority * AGEING + self._steps, self._arrivals)
        for sibling in request.siblings:
            # it waits with the request, not by itself
            sibling.order = request.order
            sibling.status = Status.FORKING
        self._arrivals += 1
        self._num_waiting += 1
        if held:
            request.status = Status.HELD
        else:
            self._wait(request)

    def unhold(self, request: Scheduled) -> None:
        """Admit a request that was held as soon as there is room."""
        request.status = Status.WAITING
        self._wait(request)

    def finish(self, request: Scheduled) -> None:
        """Forget a request, wherever it stands: its slot and pages are free.

        A prompt with further choices takes these along while it is not computed to its end.
        """
        status = request.status
        request.status = Status.FINISHED
        if status in (Status.WAITING, Status.HELD):
            self._num_waiting -= 1  # it leaves the heap when its turn comes
        elif status is Status.SWAPPED:
            self._swapped.remove(request)
        elif status in (Status.RUNNING, Status.FORKING):
            if status is Status.RUNNING:
                self._running.remove(request)
            self._leave(request)
        for sibling in request.siblings:
            if sibling.status is Status.FORKING:
                sibling.status = Status.FINISHED
                self._leave(sibling)

    def victim(self) -> Scheduled | None:
        """Return the request to swap out before the next step, or None.

        Bring its content to the host, then call `swapped_out`, and ask again.
        """
        if self.admission == "guaranteed":
            return None
        tables = self.tables
        ends = self._ends_behind_pages()
        needed = sum(max(0, tables.pages_for(end) - len(tables[slot])) for slot, end in ends.items())
        if needed <= tables.pool.num_available:
            return None
        # The youngest; one alone always has room, and what waits for forks moves with nobody.
        return next((each for each in reversed(self._running) if not _is_forking(each)), None)

    def swapped_out(self, request: Scheduled) -> None:
        """Free the slot and pages of a `victim` whose content was copied."""
        self._running.remove(request)
        self._leave(request)
        request.status = Status.SWAPPED
        self._swapped.append(request)
        self._swapped.sort(key=_order)
        self.num_swaps += 1

    @property
    def is_spread(self) -> bool:
        """Return whether requests lie in so high slots that a step computes twice as many rows as there are, or more.

        Not while others wait, which take the slots between.
        """
        count = len(self._running)
        if not self._compacts or not count or len(self._free_slots) < count or self.num_waiting:
            return False
        highest = max(request.slot for request in self._running)
        return highest >= 1 << (count - 1).bit_length() and not any(_is_forking(each) for each in self._running)

    def compact(self) -> list[tuple[Scheduled, int]]:
        """Move requests to the lowest slots; return each that moved, and the slot that it left."""
        moved = []
        for request in self._running:
            if request.slot >= len(self._running):
                slot = request.slot
                request.slot = heapq.heappop(self._free_slots)
                heapq.heappush(self._free_slots, slot)
                self.tables.move(slot, request.slot)
                if self._residency is not None:
                    self._residency.move(slot, request.slot)
                moved.append((request, slot))
        return moved

    def schedule(self) -> SchedulerOutput:
        """Decide the next step.

        What it says is computed, unless `finish` says otherwise before the next call. The tokens of the step before
        need not be known yet, if `computed` was called for it: what ends with them, if only its tokens can say so,
        brings a token whose result is dropped.
        """
        self._steps += 1
        step = SchedulerOutput()
        if self.admission == "optimistic":  # what runs goes before what comes: `victim` has seen to the pages
            self.tables.reserve(self._ends_behind_pages())
        all_in, held = self._swap_in(step)
        if all_in:
            self._admit(step, held)
        step.shares = [(each, 1) for each in self._running if each.decodes]
        left = self.max_num_tokens - len(step.shares)
        decoding = bool(step.shares)
        if len(step.shares) < len(self._running):
            if decoding:
                left = self._beside_decoding(left)
            for request in self._running:
                if request.in_prompt:
                    count = self._chunks(request, left, decoding)
                    if count:
                        step.shares.append((request, count))
                        left -= count
                    if left <= 0:
                        break
        return step

    def _ends_behind_pages(self) -> dict[int, int]:
        """Return by slot the tokens behind a step of requests that may lack a page.

        Others decode within pages that they have: these are full at multiples of `PAGE_SIZE` only.
        """
        return {
            each.slot: each.num_computed + 1
            for each in self._running
            if not each.num_computed % PAGE_SIZE and each.decodes
        }

    def _beside_decoding(self, left: int) -> int:
        """Return the tokens of prompts for a step beside requests that decode.

        The step has room for `left`; the requests that decode wait for all of it.
        """
        limit = self._max_prefill_tokens
        if limit is None or self._num_waiting:
            return left
        limit = max(limit, self.chunk_size)
        prompts = sum(each.num_prompt_tokens - each.num_computed for each in self._running if each.in_prompt)
        return min(left, limit) if prompts <= _PILE * limit else left

    def computed(self, step: SchedulerOutput) -> list[tuple[Scheduled, int, list[int]]]:
        """Note that a step was taken; return what must be copied for reuse.

        Gives (request, first token, pages) of each chunk that can be reused from now on, where its content must be
        copied into these pages: see `stored`.
        """
        copies = []
        for request, count in step.shares:
            request.num_computed += count
            if request.prefix and request.published < len(request.prefix):
                copies += self._publish(request)
        return copies

    def forked(self, request: Scheduled) -> list[Scheduled]:
        """Let the further choices of a request whose prompt is computed run.

        Returns these, each to have a copy of the request's content.
        """
        siblings = [each for each in request.siblings if each.status is Status.FORKING]
        for sibling in siblings:
            if self.tables.shares:
                self.tables.fork(request.slot, sibling.slot, request.num_computed)
            sibling.num_computed = request.num_computed
            sibling.status = Status.RUNNING
            self._insert(sibling)
        request.siblings = ()
        return siblings

    def stored(self, pages: Sequence[int]) -> None:
        """Release pages into which what `computed` asked for was copied.

        Or from which a prefix was. A prefix that was copied goes before those that it hangs on.
        """
        if pages:
            self.tables.pool.release([*self._parents.pop(pages[0], ()), *pages])

    def check(self) -> None:
        """Check that no slot or page is lost.

        Raises AssertionError: for tests, and for an idle engine.
        """
        held = [slot for request in self._running for slot in request.slots]
        assert sorted([*held, *self._free_slots]) == list(range(self._num_slots))
        assert all(not self.tables[slot] for slot in self._free_slots)
        self.tables.pool.check()

    def _chunks(self, request: Scheduled, left: int, decoding: bool) -> int:
        """Return the tokens of a prompt for this step.

        They are whole chunks, or up to its end. A last chunk of one token comes in a step of its own, whatever room
        there is: one token decodes, several are a prompt, and which of the two computes a token must not depend on the
        others.
        """
        start = request.num_computed
        end = request.num_prompt_tokens
        first = min(end, (start // self.chunk_size + 1) * self.chunk_size)
        if first - start > left:
            return 0
        if end - start == 1:
            return 1
        if decoding and self.long_prefill_token_threshold is not None:
            left = min(left, max(self.long_prefill_token_threshold, first - start))
        stop = min(end, (start + left) // self.chunk_size * self.chunk_size) if end - start > left else end
        if stop == end and end % self.chunk_size == 1:
            stop = end - 1
        return max(first, stop) - start

    def _wait(self, request: Scheduled) -> None:
        heapq.heappush(self._waiting.setdefault(request.adapter, []), (request.order, request))

    def _first_waiting(self, but: Collection[str | None]) -> Scheduled | None:
        """Return the first waiting request in order, but for those of some adapters."""
        firsts = []
        for adapter in [*self._waiting]:
            queue = self._waiting[adapter]
            while queue and queue[0][1].status is not Status.WAITING:  # it was aborted
                heapq.heappop(queue)
            if not queue:
                del self._waiting[adapter]
            elif adapter not in but:
                firsts.append(queue[0])
        return min(firsts)[1] if firsts else None

    def _admit(self, step: SchedulerOutput, held: bool) -> None:
        """Admit waiting requests while there is room.

        held: a request has waited for a place for so long that no further one may take or keep any.
        """
        passed: set[str | None] = set()
        while (request := self._first_waiting(passed)) is not None:
            request.siblings = [each for each in request.siblings if each.status is Status.FORKING]  # others have ended
            if len(self._free_slots) <= len(request.siblings):
                return
            if held and request.adapter is not None or not self._has_adapter_slot(request):
                passed.add(request.adapter)
                held |= self._is_blocked_for_long(request)
                continue
            found = self.tables.pool.find(request.prefix) if self.tables.shares is not None else []
            if not self._take(request, found):
                # Where a prefix is copied, it may be the prefix itself that is in the way.
                if not found or self.tables.shares or not self._take(request, found := []):
                    return
            heapq.heappop(self._waiting[request.adapter])
            self._num_waiting -= 1
            request.published = len(found) // self.tables.chunk_pages(self.chunk_size) if found else 0
            request.num_computed = request.published * self.chunk_size
            step.admitted.append((request, found))

    def _is_blocked_for_long(self, request: Scheduled) -> bool:
        """Note that only a slot for its adapter is missing; return if for long."""
        request.blocked = request.blocked or self._steps
        return self._steps - request.blocked >= PATIENCE

    def _take(self, request: Scheduled, found: list[int]) -> bool:
        """Give a request its slots and pages, if there are enough.

        Else release what was found for it, and return False.
        """
        tables = self.tables
        tokens = request.max_tokens
        if self.admission == "optimistic":
            tokens = min(tokens, request.num_prompt_tokens + self._lookahead)
        needed = self._pages_for(request, tokens) - (len(found) if tables.shares else 0)
        if needed > tables.pool.num_available:
            tables.pool.release(found)
            return False
        for number, each in enumerate((request, *request.siblings)):
            each.slot = heapq.heappop(self._free_slots)
            self._claim(each)
            if number:
                tables.reserve({each.slot: tokens - self._shared_tokens(request)})
            else:
                each.status = Status.RUNNING
                if tables.shares:
                    tables.share(each.slot, found)
                tables.reserve({each.slot: tokens})
        self._insert(request)
        return True

    def _pages_for(self, request: Scheduled, tokens: int) -> int:
        """Return the pages of a request that holds `tokens`, its choices together."""
        pages_for = self.tables.pages_for
        return pages_for(tokens) + len(request.siblings) * pages_for(tokens - self._shared_tokens(request))

    def _shared_tokens(self, request: Scheduled) -> int:
        """Return the tokens of a prompt whose pages its choices share."""
        return request.num_prompt_tokens // PAGE_SIZE * PAGE_SIZE if self.tables.shares else 0

    def _swap_in(self, step: SchedulerOutput) -> tuple[bool, bool]:
        """Bring requests back while there is room.

        Returns whether none is left that others have to wait for, and whether one has waited for long for a slot for
        its adapter, before which others may not pass.
        """
        held = False
        passed = set[str | None]()
        for request in [*self._swapped]:
            # As when it was admitted: the steps of a prompt ask for no pages.
            tokens = min(request.max_tokens, max(request.num_prompt_tokens, request.num_computed) + self._lookahead)
            if not self._free_slots or self.tables.pages_for(tokens) > self.tables.pool.num_available:
                return False, held
            if request.adapter in passed or held and request.adapter is not None or not self._has_adapter_slot(request):
                passed.add(request.adapter)
                held |= self._is_blocked_for_long(request)
                continue
            self._swapped.remove(request)
            request.slot = heapq.heappop(self._free_slots)
            request.status = Status.RUNNING
            self._claim(request)
            self.tables.reserve({request.slot: tokens})
            self._insert(request)
            step.swapped_in.append(request)
        return True, held

    def _has_adapter_slot(self, request: Scheduled) -> bool:
        """Return whether the request's adapter is resident, or can be."""
        return self._residency is None or self._residency.can_claim(self._free_slots[0], request.adapter)

    def _claim(self, request: Scheduled) -> None:
        if self._residency is not None:
            claimed = self._residency.claim(request.slot, request.adapter)
            assert claimed  # `_has_place` was asked

    def _publish(self, request: Scheduled) -> list[tuple[Scheduled, int, list[int]]]:
        tables = self.tables
        copies = []
        per_chunk = self.tables.chunk_pages(self.chunk_size)
        through = min(request.num_computed // self.chunk_size, len(request.prefix))
        for number in range(request.published, through):
            key = request.prefix[number]
            if tables.shares:
                tables.pool.publish(key, tables[request.slot][number * per_chunk : (number + 1) * per_chunk])
            elif not tables.pool.holds(key):
                # Without a chunk before it nobody would find it, so it must not push one out.
                parents = tables.pool.find(request.prefix[:number])
                if len(parents) < number * per_chunk or tables.pool.num_available < per_chunk:
                    tables.pool.release(parents)
                    continue
                pages = tables.pool.allocate(per_chunk)
                tables.pool.publish(key, pages)
                self._parents[pages[0]] = parents
                copies.append((request, number * self.chunk_size, pages))
        request.published = through
        return copies

    def _insert(self, request: Scheduled) -> None:
        self._running.append(request)
        if len(self._running) > 1 and self._running[-2].order > request.order:
            self._running.sort(key=_order)

    def _leave(self, request: Scheduled) -> None:
        if request.slot >= 0:
            self.tables.release(request.slot)
            if self._residency is not None:
                self._residency.release(request.slot)
            heapq.heappush(self._free_slots, request.slot)
            request.slot = -1


def _order(request: Scheduled) -> tuple[int, int]:
    return request.order


def _is_forking(request: Scheduled) -> bool:
    return any(each.status is Status.FORKING for each in request.siblings)
