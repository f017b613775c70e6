"""The scheduler: requests and a pool of KV-cache pages in, the token counts of the next step out.

Policy only: it knows no clock, no tokens and no device.

A step holds one token of each request that decodes, then chunks of prompts, in order, cut at multiples of `chunk_size`,
within a budget of `max_num_tokens`. While other requests decode, one prompt gets at most
`long_prefill_token_threshold` tokens and all prompts together `max_prefill_tokens`, unless prompts pile up. The first
prompt always gets a chunk.

Requests are ordered by priority, lower first, then by arrival. A request gains one priority level over those that
arrive `AGEING_STEPS` after it, so none starves. Waiting requests are admitted in this order when a slot and pages are
free: pages for all tokens that the request may reach ("guaranteed": a running request always finishes), or for its
prompt and `lookahead` more ("optimistic": when the pool runs out the youngest request is swapped out; it is swapped in
before others are admitted).

A request whose adapter has no slot does not block those after it that need none, or one that is resident. After
`ADAPTER_WAIT_STEPS`, no request with an adapter overtakes it any more, so that a slot becomes free.

A step holds requests of one checkpoint. The checkpoints whose requests run, and whose weights are there, take turns. A
request whose checkpoint has no network blocks no other for `ADAPTER_WAIT_STEPS` either; after that, no request of the
least recently used checkpoint that has one is admitted, so that it becomes free.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lockstep.errors import InputError
from lockstep.step.advance import next_power_of_two
from lockstep.step.pages import PAGE_SIZE, PageTables
from lockstep.step.residency import Residency

AGEING_STEPS = 256
ADAPTER_WAIT_STEPS = 256
# Prompts pile up when they have more than this many times `max_prefill_tokens` left to compute.
_PILE_FACTOR = 3
# Tokens beyond those that a request holds for which optimistic admission reserves pages.
LOOKAHEAD = 256
Admission = Literal["guaranteed", "optimistic"]
_Needs = tuple[str, str | None]  # a request's checkpoint and adapter


class Status(enum.Enum):
    """The state of a request.

    HELD: not to be admitted yet. FORKING: a further choice (n > 1) whose prompt is not fully computed.
    """

    HELD = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FORKING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False, slots=True)
class Scheduled:
    """A request, or one of its choices, as the scheduler sees it.

    num_prompt_tokens: computed before the first new token. max_tokens: limit of cached tokens, prompt and answer.
    num_computed: cached tokens. prefix: keys of the prompt's whole chunks. siblings: further choices (n > 1).
    published: chunks of the prompt that others can reuse. adapter: None for the base model. checkpoint: its weights.
    blocked_since: the step at which only a place for its adapter or checkpoint was missing, 0 for none.
    """

    num_prompt_tokens: int
    max_tokens: int
    priority: int = 0
    prefix: Sequence[bytes] = ()
    siblings: Sequence[Scheduled] = ()
    status: Status = Status.WAITING
    slot: int = -1
    num_computed: int = 0
    published: int = 0
    order: tuple[int, int] = (0, 0)
    adapter: str | None = None
    blocked_since: int = 0
    checkpoint: str = ""

    @property
    def decodes(self) -> bool:
        """Return whether its next step computes one token of the answer.

        False at `max_tokens`: the request ends once the tokens of the previous step are known.
        """
        return self.num_prompt_tokens <= self.num_computed < self.max_tokens

    @property
    def in_prompt(self) -> bool:
        return self.num_computed < self.num_prompt_tokens

    @property
    def slots(self) -> list[int]:
        return [choice.slot for choice in (self, *self.siblings) if choice.slot >= 0]

    @property
    def needs(self) -> _Needs:
        return self.checkpoint, self.adapter


@dataclass(slots=True)
class SchedulerOutput:
    """The contents of one step.

    admitted: new requests, each with the pages of its cached prefix. swapped_in: requests whose cache is to be copied
    back. shares: (request, number of tokens to compute). drafts: tokens to verify after a decoding request's token.
    """

    admitted: list[tuple[Scheduled, list[int]]] = field(default_factory=list)
    swapped_in: list[Scheduled] = field(default_factory=list)
    shares: list[tuple[Scheduled, int]] = field(default_factory=list)
    drafts: Mapping[Scheduled, Sequence[int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Blocked:
    """The requests that are not admitted to this step, because one that waited too long goes first.

    adapters: all that have one. checkpoint: all of this one.
    """

    adapters: bool = False
    checkpoint: str | None = None


@dataclass(frozen=True)
class SchedulerOptions:
    """How steps are filled.

    max_num_tokens: token budget of one step. long_prefill_token_threshold: limit of tokens of one prompt in a step in
    which others decode, rounded down to whole chunks, at least one; None for no limit. max_prefill_tokens: limit of
    tokens of all prompts in such a step, at least a chunk, unless prompts pile up (`_PILE_FACTOR`); None for no limit.
    compacts: whether requests may be moved to lower slots, as a step computes all rows up to the highest slot.
    lookahead: tokens for which optimistic admission reserves pages beyond those held; None: `LOOKAHEAD`.

    Raises InputError: a step has no room for a token of each request, or for a chunk while all others decode; a
    threshold below 1.
    """

    num_slots: int
    max_num_tokens: int
    chunk_size: int
    admission: Admission = "guaranteed"
    long_prefill_token_threshold: int | None = None
    max_prefill_tokens: int | None = None
    compacts: bool = False
    lookahead: int | None = None

    def __post_init__(self) -> None:
        room = self.max_num_tokens - self.num_slots + 1
        if room < 1:
            raise InputError(
                f"max_num_tokens: expected at least max_batch_size ({self.num_slots}), found {self.max_num_tokens}"
            )
        if not 1 <= self.chunk_size <= room:
            raise InputError(
                f"chunk_size: expected 1 to {room} (max_num_tokens {self.max_num_tokens}, and a token of each of "
                f"{self.num_slots - 1} other requests), found {self.chunk_size}"
            )
        if self.long_prefill_token_threshold is not None and self.long_prefill_token_threshold < 1:
            raise InputError(
                f"long_prefill_token_threshold: expected at least 1, found {self.long_prefill_token_threshold}; "
                "leave it out for no limit"
            )


class Scheduler:
    """Schedules requests, and allocates their slots and pages from `tables`."""

    def __init__(
        self,
        tables: PageTables,
        options: SchedulerOptions,
        residency: Residency | None = None,
        networks: Residency | None = None,
        is_bound: Callable[[str], bool] = lambda checkpoint: True,
    ):
        """Make a scheduler without requests.

        residency: slots of the adapters, None without adapters. networks: those of the checkpoints, None for one
        checkpoint. is_bound: whether the weights of a checkpoint that has a network are there.
        """
        self.options = options
        self.tables = tables
        self.residency = residency
        self._networks = networks
        self._residencies = [entry for entry in (residency, networks) if entry is not None]
        self._is_bound = is_bound
        self._last_turns: dict[str, int] = {}  # by checkpoint: the step that it had last
        self._lookahead = LOOKAHEAD if options.lookahead is None else options.lookahead
        self.num_swaps = 0
        # A heap: low slots first, so that decoding rows are adjacent.
        self.free_slots = list(range(options.num_slots))
        self._waiting: dict[_Needs, list[tuple[tuple[int, int], Scheduled]]] = {}  # heaps
        self._num_waiting = 0
        # Both sorted by `order`.
        self._running: list[Scheduled] = []
        self._swapped: list[Scheduled] = []
        # Pages of the preceding chunks, kept allocated until a chunk is copied, by the chunk's first page.
        self._parents: dict[int, list[int]] = {}
        self._steps = 0
        self._arrivals = 0

    @property
    def num_running(self) -> int:
        """Return how many requests (each choice counts) hold a slot."""
        return self.options.num_slots - len(self.free_slots)

    @property
    def num_waiting(self) -> int:
        """Return how many requests are queued or swapped out."""
        return self._num_waiting + len(self._swapped)

    def add(self, request: Scheduled, is_held: bool = False) -> None:
        """Queue a request.

        is_held: it takes its place in the order, but is not admitted before `unhold`.

        Raises InputError for a request that needs more pages or slots than there are.
        """
        needed = self.pages_for(request, request.max_tokens)
        num_pages = self.tables.pool.num_pages
        if needed > num_pages:
            raise InputError(
                f"request: expected at most {num_pages * PAGE_SIZE} tokens of KV cache ({num_pages} pages of "
                f"{PAGE_SIZE}), found a need for {needed * PAGE_SIZE}: {request.num_prompt_tokens} prompt tokens and "
                f"up to {request.max_tokens - request.num_prompt_tokens} more, {1 + len(request.siblings)} times; ask "
                f"for less, or give kv_bytes {needed * self.tables.pool.page_nbytes} or more"
            )
        if len(request.siblings) >= self.options.num_slots:
            raise InputError(
                f"n: expected at most {self.options.num_slots} choices (max_batch_size), "
                f"found {1 + len(request.siblings)}"
            )
        request.order = (request.priority * AGEING_STEPS + self._steps, self._arrivals)
        for sibling in request.siblings:
            # Siblings are not queued: they wait with the request.
            sibling.order = request.order
            sibling.status = Status.FORKING
        self._arrivals += 1
        self._num_waiting += 1
        if is_held:
            request.status = Status.HELD
        else:
            self._wait(request)

    def unhold(self, request: Scheduled) -> None:
        request.status = Status.WAITING
        self._wait(request)

    def finish(self, request: Scheduled) -> None:
        """End a request in any state, and free its slot and pages.

        Siblings that wait for its prompt end with it.
        """
        status = request.status
        request.status = Status.FINISHED
        if status in (Status.WAITING, Status.HELD):
            self._num_waiting -= 1  # it is removed from the heap when it comes to the front
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

        The caller copies its cache to the host, calls `swapped_out`, and calls this again.
        """
        if self.options.admission == "guaranteed":
            return None
        tables = self.tables
        ends = self._ends_on_new_pages()
        needed = sum(max(0, tables.pages_for(end) - len(tables[slot])) for slot, end in ends.items())
        if needed <= tables.pool.num_available:
            return None
        # The youngest first. A request with siblings to fork cannot be moved; a single request always fits.
        return next((request for request in reversed(self._running) if not _is_forking(request)), None)

    def swapped_out(self, request: Scheduled) -> None:
        """Free the slot and pages of a `victim` whose cache was copied to the host."""
        self._running.remove(request)
        self._leave(request)
        request.status = Status.SWAPPED
        self._swapped.append(request)
        self._swapped.sort(key=_order)
        self.num_swaps += 1

    @property
    def is_spread(self) -> bool:
        """Return whether a step computes at least twice as many rows as there are requests, because of free slots.

        False while requests wait: they will take the free slots.
        """
        count = len(self._running)
        if not self.options.compacts or not count or len(self.free_slots) < count or self.num_waiting:
            return False
        highest = max(request.slot for request in self._running)
        return highest >= next_power_of_two(count) and not any(map(_is_forking, self._running))

    def compact(self) -> list[tuple[Scheduled, int]]:
        """Move requests to the lowest slots; return each moved request with the slot that it left."""
        moved = []
        for request in self._running:
            if request.slot >= len(self._running):
                slot = request.slot
                request.slot = heapq.heappop(self.free_slots)
                heapq.heappush(self.free_slots, slot)
                self.tables.move(slot, request.slot)
                for residency in self._residencies:
                    residency.move(slot, request.slot)
                moved.append((request, slot))
        return moved

    def schedule(self) -> SchedulerOutput:
        """Schedule the next step.

        The caller computes it, but for requests that `finish` before the next call. The tokens of the previous step
        need not be known, if `computed` was called for it: a request that turns out to have ended gets a token whose
        result is dropped.
        """
        self._steps += 1
        step = SchedulerOutput()
        # Requests that run come first, then those that were swapped out, then new ones: started ones finish.
        if self.options.admission == "optimistic":
            # `victim` has made room for these pages.
            self.tables.reserve(self._ends_on_new_pages())
        if self._swapped or self._waiting:
            blocked = _Blocked()
            if self._swap_in(step, blocked):
                self._admit(step, blocked)
        running = self._running if self._networks is None else self._of_one_checkpoint()
        step.shares = [(request, 1) for request in running if request.decodes]
        budget = self.options.max_num_tokens - len(step.shares)
        decoding = bool(step.shares)
        if len(step.shares) < len(running):  # some are in their prompts, or at their end
            if decoding:
                budget = self._prefill_budget(budget)
            for request in running:
                if request.in_prompt:
                    count = self._prompt_tokens(request, budget, decoding)
                    if count:
                        step.shares.append((request, count))
                        budget -= count
                    if budget <= 0:
                        break
        return step

    def _of_one_checkpoint(self) -> list[Scheduled]:
        """Return the running requests of the checkpoint whose turn it is: its last one is longest ago."""
        due = {request.checkpoint for request in self._running if request.in_prompt or request.decodes}
        turns = [(self._last_turns.get(name, 0), name) for name in due if self._is_bound(name)]
        if not turns:
            return []
        _, chosen = min(turns)
        self._last_turns[chosen] = self._steps
        return [request for request in self._running if request.checkpoint == chosen]

    def _ends_on_new_pages(self) -> dict[int, int]:
        """Return, by slot, the length after this step of decoding requests whose pages are full."""
        return {
            request.slot: request.num_computed + 1
            for request in self._running
            if not request.num_computed % PAGE_SIZE and request.decodes
        }

    def _prefill_budget(self, budget: int) -> int:
        """Limit the prompt tokens of a step in which requests decode, since these wait for all of it."""
        limit = self.options.max_prefill_tokens
        if limit is None or self._num_waiting:
            return budget
        limit = max(limit, self.options.chunk_size)
        remaining = sum(
            request.num_prompt_tokens - request.num_computed for request in self._running if request.in_prompt
        )
        if remaining > _PILE_FACTOR * limit:
            return budget
        return min(budget, limit)

    def computed(self, step: SchedulerOutput) -> list[tuple[Scheduled, int, list[int]]]:
        """Record that a step was computed, and publish the chunks that it completed for reuse.

        Returns (request, first token, pages) of each chunk whose cache the caller must copy into these pages, and then
        pass to `stored`; empty where slots share pages.
        """
        copies = []
        for request, count in step.shares:
            request.num_computed += count
            if request.prefix and request.published < len(request.prefix):
                copies += self._publish(request)
        return copies

    def forked(self, request: Scheduled) -> list[Scheduled]:
        """Start the siblings of a request whose prompt is computed, and return them.

        The caller copies the request's cache to each, as far as pages are not shared.
        """
        siblings = [sibling for sibling in request.siblings if sibling.status is Status.FORKING]
        for sibling in siblings:
            if self.tables.shares:
                self.tables.fork(request.slot, sibling.slot, request.num_computed)
            sibling.num_computed = request.num_computed
            sibling.status = Status.RUNNING
            self._insert(sibling)
        request.siblings = ()
        return siblings

    def stored(self, pages: Sequence[int]) -> None:
        """Release pages that were copied: into, as `computed` asked, or from, for an admitted request.

        The preceding chunks are released first: without them nobody would find this one.
        """
        if pages:
            self.tables.pool.release([*self._parents.pop(pages[0], ()), *pages])

    def check(self) -> None:
        """Assert that no slot or page is lost. For tests and idle engines."""
        used_slots = list[int]()
        for request in self._running:
            used_slots += request.slots
        assert sorted([*used_slots, *self.free_slots]) == list(range(self.options.num_slots))
        assert all(not self.tables[slot] for slot in self.free_slots)
        self.tables.pool.check()

    def _prompt_tokens(self, request: Scheduled, budget: int, decoding: bool) -> int:
        """Return how many tokens of a prompt this step computes: whole chunks, or up to the prompt's end.

        A last chunk of one token is always computed in a separate step. A single token is computed by the decode kernel
        and several by the prefill kernel, and which of the two computes a token must not depend on other requests.
        """
        chunk_size = self.options.chunk_size
        threshold = self.options.long_prefill_token_threshold
        start = request.num_computed
        end = request.num_prompt_tokens
        first_stop = min(end, (start // chunk_size + 1) * chunk_size)
        if first_stop - start > budget:
            return 0
        if end - start == 1:
            return 1
        if decoding and threshold is not None:
            budget = min(budget, max(threshold, first_stop - start))
        stop = end
        if end - start > budget:
            stop = min(end, (start + budget) // chunk_size * chunk_size)
        if stop == end and end % chunk_size == 1:
            stop = end - 1
        return max(first_stop, stop) - start

    def _wait(self, request: Scheduled) -> None:
        heapq.heappush(self._waiting.setdefault(request.needs, []), (request.order, request))

    def _first_waiting(self, skipped: Collection[_Needs]) -> Scheduled | None:
        candidates = []
        for needs in [*self._waiting]:
            queue = self._waiting[needs]
            # Aborted requests are still in the heap.
            while queue and queue[0][1].status is not Status.WAITING:
                heapq.heappop(queue)
            if not queue:
                del self._waiting[needs]
            elif needs not in skipped:
                candidates.append(queue[0])
        if not candidates:
            return None
        _, request = min(candidates)
        return request

    def _admit(self, step: SchedulerOutput, blocked: _Blocked) -> None:
        """Admit waiting requests while there is room."""
        skipped: set[_Needs] = set()
        while (request := self._first_waiting(skipped)) is not None:
            # Without those that were aborted while it waited.
            request.siblings = [sibling for sibling in request.siblings if sibling.status is Status.FORKING]
            if len(self.free_slots) <= len(request.siblings):
                return  # also where a later request would fit: it would overtake this one again and again
            if self._must_wait(request, blocked):
                skipped.add(request.needs)
                continue
            prefix_pages: list[int] = []
            if self.tables.shares is not None:
                prefix_pages = self.tables.pool.find(request.prefix)
            is_allocated = self._allocate(request, prefix_pages)
            if not is_allocated and prefix_pages and not self.tables.shares:
                # A prefix that would be copied may itself hold the pages that are missing: try without it.
                prefix_pages = []
                is_allocated = self._allocate(request, prefix_pages)
            if not is_allocated:
                return
            heapq.heappop(self._waiting[request.needs])  # the first of its heap: `_first_waiting` returned it
            self._num_waiting -= 1
            request.published = 0
            if prefix_pages:
                request.published = len(prefix_pages) // self.tables.chunk_pages(self.options.chunk_size)
            request.num_computed = request.published * self.options.chunk_size
            step.admitted.append((request, prefix_pages))

    def _must_wait(self, request: Scheduled, blocked: _Blocked) -> bool:
        """Return whether a request must wait for a place for its adapter or its checkpoint."""
        slot = self.free_slots[0]  # the one that `_claim_slot` takes
        lacks_adapter = self.residency is not None and not self.residency.can_claim(slot, request.adapter)
        lacks_network = self._networks is not None and not self._networks.can_claim(slot, request.checkpoint)
        if (blocked.adapters and request.adapter is not None) or request.checkpoint == blocked.checkpoint:
            return True
        if lacks_adapter or lacks_network:
            request.blocked_since = request.blocked_since or self._steps
            if self._steps - request.blocked_since >= ADAPTER_WAIT_STEPS:
                blocked.adapters |= lacks_adapter
                if lacks_network and self._networks is not None:
                    blocked.checkpoint = self._networks.resident[0]
        return lacks_adapter or lacks_network

    def _allocate(self, request: Scheduled, prefix_pages: list[int]) -> bool:
        """Give a request and its siblings slots and pages.

        Without enough free pages, release `prefix_pages` and return False.
        """
        tables = self.tables
        tokens = request.max_tokens
        if self.options.admission == "optimistic":
            tokens = min(tokens, request.num_prompt_tokens + self._lookahead)
        needed = self.pages_for(request, tokens)
        if tables.shares:  # else a prefix is copied from its pages, and needs as many again
            needed -= len(prefix_pages)
        if needed > tables.pool.num_available:
            tables.pool.release(prefix_pages)
            return False
        self._claim_slot(request)
        request.status = Status.RUNNING
        if tables.shares:
            tables.share(request.slot, prefix_pages)
        tables.reserve({request.slot: tokens})
        for sibling in request.siblings:  # which will share the prompt's full pages
            self._claim_slot(sibling)
            tables.reserve({sibling.slot: tokens - self._shared_tokens(request)})
        self._insert(request)
        return True

    def pages_for(self, request: Scheduled, tokens: int) -> int:
        """Return the pages that a request and its siblings need for `tokens` each."""
        pages_for = self.tables.pages_for
        return pages_for(tokens) + len(request.siblings) * pages_for(tokens - self._shared_tokens(request))

    def _shared_tokens(self, request: Scheduled) -> int:
        return request.num_prompt_tokens // PAGE_SIZE * PAGE_SIZE if self.tables.shares else 0

    def _swap_in(self, step: SchedulerOutput, blocked: _Blocked) -> bool:
        """Swap requests in while there is room. Return whether others may be admitted after them."""
        skipped = set[_Needs]()
        for request in [*self._swapped]:
            # Reserve as at admission: the steps of a prompt allocate no pages.
            tokens = min(request.max_tokens, max(request.num_prompt_tokens, request.num_computed) + self._lookahead)
            if not self.free_slots or self.tables.pages_for(tokens) > self.tables.pool.num_available:
                return False
            if request.needs in skipped or self._must_wait(request, blocked):
                skipped.add(request.needs)
                continue
            self._swapped.remove(request)
            self._claim_slot(request)
            request.status = Status.RUNNING
            self.tables.reserve({request.slot: tokens})
            self._insert(request)
            step.swapped_in.append(request)
        return True

    def _claim_slot(self, request: Scheduled) -> None:
        request.slot = heapq.heappop(self.free_slots)
        if self.residency is not None:
            claimed = self.residency.claim(request.slot, request.adapter)
            assert claimed, "`_must_wait` was called for this request"
        if self._networks is not None:
            claimed = self._networks.claim(request.slot, request.checkpoint)
            assert claimed, "`_must_wait` was called for this request"

    def _publish(self, request: Scheduled) -> list[tuple[Scheduled, int, list[int]]]:
        """Make the complete chunks of a prompt reusable; return what `computed` does."""
        tables = self.tables
        chunk_size = self.options.chunk_size
        copies = []
        per_chunk = tables.chunk_pages(chunk_size)
        num_complete = min(request.num_computed // chunk_size, len(request.prefix))
        for number in range(request.published, num_complete):
            key = request.prefix[number]
            if tables.shares:
                tables.pool.publish(key, tables[request.slot][number * per_chunk : (number + 1) * per_chunk])
            elif not tables.pool.holds(key):
                # A chunk is found through the chunks before it, so its pages must not evict any of those.
                parents = tables.pool.find(request.prefix[:number])
                # Left out: a chunk that could not be found, and one for whose copy no pages are free.
                if len(parents) < number * per_chunk or tables.pool.num_available < per_chunk:
                    tables.pool.release(parents)
                    continue
                pages = tables.pool.allocate(per_chunk)
                tables.pool.publish(key, pages)
                self._parents[pages[0]] = parents
                copies.append((request, number * chunk_size, pages))
        request.published = num_complete
        return copies

    def _insert(self, request: Scheduled) -> None:
        self._running.append(request)
        # Most arrive in order; one of a higher priority, or that was swapped in, belongs before others.
        if len(self._running) > 1 and self._running[-2].order > request.order:
            self._running.sort(key=_order)

    def _leave(self, request: Scheduled) -> None:
        if request.slot >= 0:
            self.tables.release(request.slot)
            for residency in self._residencies:
                residency.release(request.slot)
            heapq.heappush(self.free_slots, request.slot)
            request.slot = -1


def _order(request: Scheduled) -> tuple[int, int]:
    return request.order


def _is_forking(request: Scheduled) -> bool:
    return any(sibling.status is Status.FORKING for sibling in request.siblings)
