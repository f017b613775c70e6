"""Steps on host arrays, for backends without an executor of their own.

Each step is a `HostStep`: calls bound to NumPy buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np

from lockstep.artifacts.signature import IO, Signature
from lockstep.step.advance import Advance
from lockstep.step.executable import Executable, HostExecutable
from lockstep.step.greedy import most_likely
from lockstep.step.host_step import Chunk, HostStep, Layout, Observer, RowAttention, Rows, Verified
from lockstep.step.kv_cache import CacheRow, KVCache
from lockstep.step.network import Network
from lockstep.step.packing import split
from lockstep.step.pages import PAGE_SIZE, PagePool, PageTables
from lockstep.step.sampling import Sampling, draw
from lockstep.weights.adapters import LoraArrays

_KEPT_STEPS = 16
_ROWS = 16  # of logits at a time, where all of a prompt are asked for


class Content(NamedTuple):
    """A copy of what a slot holds: rows of keys and values, and states."""

    length: int
    rows: Sequence[np.ndarray]
    states: Sequence[np.ndarray]


class HostExecutor:
    """Runs steps that are checked already. `lengths[slot]`: tokens that a slot holds.

    A request's pages are counted, not addressed: its keys and values lie in a row of `KVCache`. Pages of a prefix hold
    copies, which `share` copies back; the last of a chunk holds the states behind it, where layers have some.
    """

    in_flight = async_scheduling = False
    max_verify_tokens = 16

    def __init__(
        self,
        network: Network,
        num_slots: int,
        max_seq_len: int,
        chunk_size: int,
        kv_bytes: int,
        decode_layers: HostExecutable | None,
    ):
        """Check the engines, and make an empty cache.

        chunk_size: tokens brought together are cut at multiples of it. kv_bytes: for the pages of all requests.
        decode_layers: of the backend, which see.
        """
        _check_declared(network)
        self._decode_layers = decode_layers
        self._observer: Observer | None = None
        self.num_slots = num_slots
        self.max_seq_len = max_seq_len
        self.chunk_size = chunk_size
        self.network = network
        self._cache = KVCache(
            [mixer.cache for _, mixer in network.layers], num_slots, max_seq_len, network.dtype, kv_bytes
        )
        page_nbytes = PAGE_SIZE * self._cache.token_nbytes
        self._stored: dict[int, list[np.ndarray]] = {}  # by page
        pool = PagePool(kv_bytes // page_nbytes, page_nbytes, self._drop_stored)
        self.tables = PageTables(
            pool,
            num_slots,
            lambda length: -(-self._cache.capacity_for(length) // PAGE_SIZE),
            shares=False,
            # without attention a page is no measure
            state_pages=-(-self._cache.state_nbytes // page_nbytes) if self._cache.group_shapes() else 0,
        )
        self._room = [0] * num_slots  # tokens that each slot's row has room for, and pages
        self._steps: dict[Layout, HostStep] = {}
        self._row_attentions: dict[tuple[int, CacheRow], RowAttention] = {}  # by layer and row
        self._taken: tuple[HostStep, Sequence[Advance]] | None = None  # the last step
        self._samplings: dict[int, tuple[Sampling, int]] = {}  # of slots that sample
        self._adapters: np.ndarray | None = None  # the adapter slot of each request slot

    @property
    def lengths(self) -> np.ndarray:
        return self._cache.lengths

    def observe(self, observer: Observer | None) -> None:
        """Show all steps to come to an observer, each block a call of its own; None ends it."""
        self._observer = observer
        self._steps.clear()

    def warm_up(self) -> None:
        """Do nothing: an open engine is ready, and a first layout costs no more."""

    def reset(self, slot: int) -> None:
        """Forget what the slot holds, so that its memory may be used again."""
        self._cache.reset(slot)
        self.tables.release(slot)
        self._room[slot] = 0

    def logits(self, advances: Sequence[Advance]) -> np.ndarray:
        return self._take(advances).logits().astype(np.float32)

    def _take(self, advances: Sequence[Advance]) -> HostStep:
        self._taken = None  # its buffers are free before others are made
        ends = {advance.slot: advance.start + len(advance.tokens) for advance in advances}
        grown = {slot: end for slot, end in ends.items() if end > self._room[slot]}
        if grown:
            self.tables.reserve(grown)
            for slot, end in grown.items():
                self._reserve_row(slot, end)
        step = self._host_step(self._lay_out(advances))
        decoded = self._pack(step, advances)
        step.run(decoded)
        step.write_decoded(decoded)
        self._taken = step, advances
        return step

    def tokens(self, advances: Sequence[Advance], following: Sequence[Advance]) -> np.ndarray:
        step = self._take(advances)
        if any(advance.slot in self._samplings for advance in advances):
            return self._choose(advances, step.logits().astype(np.float32))
        return step.most_likely()

    def tokens_and_logits(self, advances: Sequence[Advance], wanted: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        logits = self.logits(advances)
        return self._choose(advances, logits), logits[wanted]

    def logits_behind(self, number: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the logits behind all tokens of `advances[number]`, a few at a time.

        Of the step that was taken last. Each item is the position of the first token, and the logits behind each,
        [num_tokens, vocab_size] float32. Groups lie within chunks, so what a token's row is computed with depends on
        its request alone.
        """
        assert self._taken is not None
        step, advances = self._taken
        advance = advances[number]
        row = sum(each.num_rows for each in advances[: number + 1]) - 1
        first = int(step.logit_rows[row]) + 1 - len(advance.tokens) - advance.start  # packed row of position 0
        for start, end in self._chunks(advance):
            for low in range(start, end, _ROWS):
                rows = np.arange(low, min(low + _ROWS, end), dtype=np.int64)
                yield low, step.logits_behind(first + rows).astype(np.float32)

    def set_sampling(self, slot: int, sampling: Sampling, choice: int) -> None:
        if sampling.temperature:
            self._samplings[slot] = sampling, choice
        else:
            self._samplings.pop(slot, None)

    def take_adapters(self, arrays: Sequence[LoraArrays], max_lora_rank: int, adapter_slots: np.ndarray) -> None:
        self._adapters = adapter_slots

    def _choose(self, advances: Sequence[Advance], logits: np.ndarray) -> np.ndarray:
        tokens = most_likely(logits)
        end = 0
        for advance in advances:
            first = end
            end = end + advance.num_rows
            if advance.slot in self._samplings:
                sampling, choice = self._samplings[advance.slot]
                position = advance.start + len(advance.tokens) + 1 - advance.num_rows
                for row in range(first, end):
                    if tokens[row] >= 0:
                        tokens[row] = draw(logits[row], sampling, choice, position + row - first)
        return tokens

    def room(self, length: int) -> int:
        """Return how many tokens can follow `length` tokens in the same row."""
        return self._cache.capacity_for(length) - length

    def keep(self, slot: int, length: int) -> None:
        """Forget the tokens of a slot behind its first `length`, as if they had never come."""
        self._cache.clear(slot, length, int(self.lengths[slot]))
        self.lengths[slot] = length

    def share(self, slot: int, pages: Sequence[int]) -> None:
        of_chunk = self.tables.chunk_pages(self.chunk_size)
        of_states = self.tables.state_pages
        rows = [page for number, page in enumerate(pages) if number % of_chunk < of_chunk - of_states]
        self._reserve_row(slot, len(rows) * PAGE_SIZE)
        for number, page in enumerate(rows):
            self._cache.copy_in(slot, number * PAGE_SIZE, self._stored[page])
        if of_states:
            self._cache.states_in(slot, self._stored[pages[-1]])
        self._cache.lengths[slot] = len(rows) * PAGE_SIZE

    def store(self, slot: int, start: int, pages: Sequence[int]) -> None:
        of_states = self.tables.state_pages
        for number, page in enumerate(pages[: len(pages) - of_states]):
            first = start + number * PAGE_SIZE
            self._stored[page] = self._cache.copy_out(slot, first, first + PAGE_SIZE)
        if of_states:
            assert self._taken is not None  # what is stored is of the step that was taken last
            end = self._cache.row_of(slot), start + (len(pages) - of_states) * PAGE_SIZE
            self._stored[pages[-1]] = self._taken[0].kept_states.pop(end)

    def _drop_stored(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._stored.pop(page, None)  # none where copying it failed

    def move(self, slot: int, other: int) -> None:
        raise AssertionError("rows of a step on the host are those of the list, whatever their slots")

    def fork(self, slot: int, other: int) -> None:
        self._put(other, self._copied(slot))

    def swap_out(self, slot: int) -> Content:
        content = self._copied(slot)
        self.reset(slot)
        return content

    def swap_in(self, slot: int, swapped: Content) -> None:
        self._put(slot, swapped)

    def _copied(self, slot: int) -> Content:
        length = int(self._cache.lengths[slot])
        return Content(length, self._cache.copy_out(slot, 0, length), self._cache.states_out(slot))

    def _put(self, slot: int, content: Content) -> None:
        self.tables.reserve({slot: content.length})
        self._reserve_row(slot, content.length)
        self._cache.copy_in(slot, 0, content.rows)
        self._cache.states_in(slot, content.states)
        self._cache.lengths[slot] = content.length

    def _reserve_row(self, slot: int, length: int) -> None:
        if self._cache.reserve(slot, length):
            self._steps.clear()
            self._row_attentions.clear()
        self._room[slot] = self._cache.row_of(slot).capacity

    def _lay_out(self, advances: Sequence[Advance]) -> Layout:
        """Lay out a step: decoding requests by row, then the others in list order.

        A request of one token decodes.
        """
        rows: dict[int, list[int]] = {}
        chunks: list[Chunk | Verified] = []
        for advance in advances:
            place = self._cache.row_of(advance.slot)
            if len(advance.tokens) == 1:
                rows.setdefault(place.capacity, []).append(place.row)
            elif advance.verifies:
                chunks.append(Verified(place, len(advance.tokens)))
            else:
                chunks += [
                    Chunk(place, start, end - start, advance.keeps_states and not end % self.chunk_size)
                    for start, end in self._chunks(advance)
                ]
        decoding = [Rows(capacity, min(found), max(found) + 1) for capacity, found in sorted(rows.items())]
        return Layout(tuple(decoding), tuple(chunks), sum(advance.num_rows for advance in advances))

    def _chunks(self, advance: Advance) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of the chunks of an advance, cut at `chunk_size`.

        Cuts lie at multiples of `chunk_size`; end is behind the last token.
        """
        start = advance.start
        end = advance.start + len(advance.tokens)
        while start < end:
            stop = min(end, (start // self.chunk_size + 1) * self.chunk_size)
            yield start, stop
            start = stop

    def _host_step(self, layout: Layout) -> HostStep:
        """Return the bound calls of a layout.

        Steps without prompts come again and again with one layout: those are kept. A prompt's is used once.
        """
        step = self._steps.get(layout)
        if step is None:
            layers = self._decode_layers if self._observer is None else None
            step = HostStep(self.network, self._cache, layout, self._row_attentions, layers, self._observer)
            if layout.comes_again:
                while len(self._steps) >= _KEPT_STEPS:
                    del self._steps[next(iter(self._steps))]
                self._steps[layout] = step
        return step

    def _pack(self, step: HostStep, advances: Sequence[Advance]) -> dict[int, np.ndarray]:
        """Fill the step's token ids, positions, adapter ids and logit rows.

        Returns by capacity the cache rows that decode, ascending.
        """
        layout = step.layout
        first_of = {part.capacity: at.start - part.low for part, at in zip(layout.decoding, step.slices)}
        decoded: dict[int, list[int]] = {capacity: [] for capacity in first_of}
        decoding, chunks = split(advances)
        rows = []
        for advance in decoding:
            place = self._cache.row_of(advance.slot)
            decoded[place.capacity].append(place.row)
            rows.append(first_of[place.capacity] + place.row)
        places = step.tokens.pack(decoding, rows, layout.num_decode, chunks)
        if len(decoding) < layout.num_decode:
            for part, at in zip(layout.decoding, step.slices):
                gaps = step.tokens.slots[at] < 0
                step.tokens.position_ids[at][gaps] = self._cache.held(part.capacity, part.low, part.high)[gaps]
        in_order = iter(places[: len(decoding)]), iter(places[len(decoding) :])
        step.logit_rows[:] = [
            row
            for advance in advances
            for _, end in [next(in_order[len(advance.tokens) > 1])]
            for row in range(end - advance.num_rows, end)
        ]
        if self._adapters is not None:
            step.adapter_ids[:] = step.tokens.adapter_ids(self._adapters)
        return {capacity: np.array(sorted(found), np.int64) for capacity, found in decoded.items()}


def _check_declared(network: Network) -> None:
    """Check that all engines read and make what the assembly says.

    Buffers are of the assembly's sizes. Dimensions that a step decides may have any name, or none. Raises CheckError.
    """
    declared: dict[Executable, Signature] = {block.run: block.signature for block, _ in network.layers}
    declared |= {block.run: block.signature for block in (network.embedding, network.exit)}
    for mixer in {id(mixer): mixer for _, mixer in network.layers}.values():
        declared |= {mixer.engines[phase]: graph.signature for phase, graph in mixer.variant.phases().items()}
    for executable, signature in declared.items():
        check_engine(executable, signature)


def check_engine(executable: Executable, signature: Signature) -> None:
    """Check what an engine on host arrays takes and gives against `signature`.

    Slots are left out. Dimensions that a step decides may have any name, or none. Raises CheckError where they differ.
    """
    engine = cast(HostExecutable, executable)  # what this executor runs is on host arrays
    expected, found = (
        Signature(*(tuple(IO(name, dtype, _any_name(shape)) for name, dtype, shape in ios) for ios in sides))
        for sides in (
            [[(io.name, io.dtype, io.shape) for io in ios] for ios in (signature.inputs, signature.outputs)],
            [
                [(name, value.dtype.name, value.shape) for name, value in values.items()]
                for values in (engine.inputs, engine.outputs)
            ],
        )
    )
    expected.check(found, engine.where, "export and build again, or take another bundle")


def _any_name(shape: Sequence[int | str]) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) else "any" for size in shape)
