"""The executor on host arrays, whose steps are `HostStep`s: calls bound to NumPy buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from lockstep.artifacts.signature import IO, Signature
from lockstep.step.advance import Advance, Observer, split
from lockstep.step.executable import Executable, HostExecutable
from lockstep.step.host_step import Chunk, DecodeRows, HostStep, Layout, RowAttention, Verified
from lockstep.step.kv_cache import CacheRow, KVCache
from lockstep.step.logits_pipeline import Row, Sampler, choose, most_likely
from lockstep.step.network import Network
from lockstep.step.pages import PAGE_SIZE, PagePool, PageTables
from lockstep.step.sampling import Logprobs
from lockstep.weights.adapters import LoraArrays

_CACHED_STEPS = 16  # for each network
_ROWS = 16  # of a prompt's logits that are computed at once
_LOADER = ThreadPoolExecutor(1, "weights")  # one load at a time: others would only share its disk


class SlotContents(NamedTuple):
    """A copy of a slot's keys, values and states."""

    length: int
    arrays: Sequence[np.ndarray]
    states: Sequence[np.ndarray]


class HostLoad:
    """A network that is bound in another thread: see `Executor.load`."""

    def __init__(self, executor: HostExecutor, number: int, network: Future[Network]):
        self._executor = executor
        self._number = number
        self._network = network

    def done(self) -> bool:
        return self._network.done()

    def finish(self) -> None:
        self._executor.replace(self._number, self._network.result())


class HostExecutor:
    """An `Executor` on host arrays.

    A request's pages are only counted: its keys and values are in a row of `KVCache`. The pages of a prefix have copies
    in `stored_pages`, which `share` copies back; the last pages of a chunk have the states after it, if layers have
    states.
    """

    in_flight = async_scheduling = processes_logits = False
    logprobs: Mapping[int, Logprobs] = {}
    max_verify_tokens = 16

    def __init__(self, networks: Sequence[Network], num_slots: int, max_seq_len: int, chunk_size: int, kv_bytes: int):
        """Check the engines, and create an empty cache.

        networks: of one engine set; a step runs one of them. chunk_size: prompts are cut at multiples of it. kv_bytes:
        bytes of all pages.
        """
        network = networks[0]
        _check_declared(network)
        self._observer: Observer | None = None
        self.num_slots = num_slots
        self.max_seq_len = max_seq_len
        self.chunk_size = chunk_size
        self.networks = list(networks)
        self.cache = KVCache(
            [mixer.cache for _, mixer in network.layers], num_slots, max_seq_len, network.dtype, kv_bytes
        )
        self.lengths = self.cache.lengths
        page_nbytes = PAGE_SIZE * self.cache.token_nbytes
        self.stored_pages: dict[int, list[np.ndarray]] = {}  # by page
        pool = PagePool(kv_bytes // page_nbytes, page_nbytes, self._drop_stored)
        state_pages = 0  # without attention, pages have no size to count states in
        if self.cache.groups:
            state_pages = -(-self.cache.state_nbytes // page_nbytes)
        self.tables = PageTables(pool, num_slots, self._pages_for, shares=False, state_pages=state_pages)
        self._capacities = [0] * num_slots  # of each slot's row, whose pages are reserved
        self._steps: dict[tuple[int, Layout], HostStep] = {}  # by network and layout
        self._row_attentions: dict[tuple[int, CacheRow], RowAttention] = {}  # by layer and row
        self.last_step: tuple[HostStep, Sequence[Advance]] | None = None
        self.samplers: dict[int, Sampler] = {}  # of slots that are not greedy
        self._adapters: np.ndarray | None = None  # the adapter slot of each request slot

    def _pages_for(self, length: int) -> int:
        return -(-self.cache.capacity_for(length) // PAGE_SIZE)

    def load(self, network: int, weights_json: Path, bind: Callable[[Path], Network]) -> HostLoad:
        return HostLoad(self, network, _LOADER.submit(bind, weights_json))

    def preload(self, checkpoints: Sequence[Path]) -> Iterator[None]:
        """Do nothing: files are mapped."""
        return iter(())

    def replace(self, number: int, network: Network) -> None:
        """Put a network in the place of another one, whose bound steps are dropped."""
        self.networks[number] = network
        self._steps = {key: step for key, step in self._steps.items() if key[0] != number}
        self.last_step = None

    def observe(self, observer: Observer | None) -> None:
        self._observer = observer
        self._steps.clear()

    def warm_up(self) -> Iterator[None]:
        """Do nothing: the first step of a layout costs no more than others."""
        return iter(())

    def reset(self, slot: int) -> None:
        self.cache.reset(slot)
        self.tables.release(slot)
        self._capacities[slot] = 0

    def logits(self, advances: Sequence[Advance]) -> np.ndarray:
        return self.run_step(advances).logits().astype(np.float32)

    def run_step(self, advances: Sequence[Advance]) -> HostStep:
        self.last_step = None  # free its buffers before others are allocated
        lengths = {advance.slot: advance.start + len(advance.tokens) for advance in advances}
        grown = {slot: length for slot, length in lengths.items() if length > self._capacities[slot]}
        if grown:
            self.tables.reserve(grown)
            for slot, length in grown.items():
                self._reserve_row(slot, length)
        step = self._host_step(advances[0].network, self._lay_out(advances))
        decoded = self.pack(step, advances)
        step.run(decoded)
        step.write_decoded(decoded)
        self.last_step = step, advances
        return step

    def tokens(self, advances: Sequence[Advance], following: Sequence[Advance]) -> np.ndarray:
        step = self.run_step(advances)
        if any(advance.slot in self.samplers for advance in advances):
            return self._choose(advances, step.logits().astype(np.float32))
        return step.most_likely()

    def tokens_and_logits(
        self, advances: Sequence[Advance], logit_rows: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        logits = self.logits(advances)
        return self._choose(advances, logits), logits[logit_rows]

    def logits_after(self, number: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the logits after each token of `advances[number]` in the last step, a few tokens at a time.

        Yields the position of the first token, and the logits [num_tokens, vocab_size] float32. The tokens of an item
        belong to one chunk, so that their bits depend on their request only.
        """
        assert self.last_step is not None
        step, advances = self.last_step
        advance = advances[number]
        row = sum(other.num_rows for other in advances[: number + 1]) - 1
        last_packed = int(step.logit_rows[row])
        packed_zero = last_packed + 1 - len(advance.tokens) - advance.start  # the packed index of position 0
        for start, end in self._chunks(advance):
            for first in range(start, end, _ROWS):
                positions = np.arange(first, min(first + _ROWS, end), dtype=np.int64)
                yield first, step.logits_after(packed_zero + positions).astype(np.float32)

    def set_sampling(self, slot: int, sampler: Sampler) -> None:
        if sampler.sampling.temperature:
            self.samplers[slot] = sampler
        else:
            self.samplers.pop(slot, None)

    def take_adapters(
        self, networks: Sequence[Sequence[LoraArrays]], max_lora_rank: int, adapter_slots: np.ndarray
    ) -> None:
        self._adapters = adapter_slots

    def _choose(self, advances: Sequence[Advance], logits: np.ndarray) -> np.ndarray:
        tokens = most_likely(logits)
        rows = {}
        end = 0
        for advance in advances:
            end += advance.num_rows
            sampler = self.samplers.get(advance.slot)
            if sampler is not None:
                length = advance.start + len(advance.tokens)
                # From the last row to the first: each is drawn with the noise of its position.
                for before_end in range(advance.num_rows):
                    row = end - 1 - before_end
                    rows[row] = Row(sampler, logits[row], length - before_end)
        tokens[list(rows)] = [sampled.token for sampled in choose(list(rows.values()))]
        return tokens

    def room(self, length: int) -> int:
        return self.cache.capacity_for(length) - length

    def keep(self, slot: int, length: int) -> None:
        self.cache.clear(slot, length, int(self.lengths[slot]))
        self.lengths[slot] = length

    def share(self, slot: int, pages: Sequence[int]) -> None:
        # A chunk's pages: first those of its tokens, then those that its states count as.
        chunk_pages = self.tables.chunk_pages(self.chunk_size)
        token_pages_of_chunk = chunk_pages - self.tables.state_pages
        token_pages = [page for number, page in enumerate(pages) if number % chunk_pages < token_pages_of_chunk]
        length = len(token_pages) * PAGE_SIZE
        self._reserve_row(slot, length)
        for number, page in enumerate(token_pages):
            self.cache.copy_in(slot, number * PAGE_SIZE, self.stored_pages[page])
        if self.tables.state_pages:  # after the last chunk; earlier ones are only for shorter prefixes
            self.cache.states_in(slot, self.stored_pages[pages[-1]])
        self.lengths[slot] = length

    def store(self, slot: int, start: int, pages: Sequence[int]) -> None:
        token_pages = len(pages) - self.tables.state_pages
        for number, page in enumerate(pages[:token_pages]):
            first = start + number * PAGE_SIZE
            self.stored_pages[page] = self.cache.copy_out(slot, first, first + PAGE_SIZE)
        if self.tables.state_pages:
            assert self.last_step is not None  # stored prefixes are of the last step
            step, _ = self.last_step
            end = self.cache.row_of(slot), start + token_pages * PAGE_SIZE
            self.stored_pages[pages[-1]] = step.kept_states.pop(end)

    def _drop_stored(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.stored_pages.pop(page, None)  # nothing is stored if copying it failed

    def move(self, slot: int, other: int) -> None:
        raise AssertionError("rows of a step on the host are those of the list, whatever their slots")

    def fork(self, slot: int, other: int) -> None:
        self._put(other, self._copy(slot))

    def swap_out(self, slot: int) -> SlotContents:
        contents = self._copy(slot)
        self.reset(slot)
        return contents

    def swap_in(self, slot: int, swapped: SlotContents) -> None:
        self._put(slot, swapped)

    def _copy(self, slot: int) -> SlotContents:
        length = int(self.lengths[slot])
        return SlotContents(length, self.cache.copy_out(slot, 0, length), self.cache.states_out(slot))

    def _put(self, slot: int, contents: SlotContents) -> None:
        self.tables.reserve({slot: contents.length})
        self._reserve_row(slot, contents.length)
        self.cache.copy_in(slot, 0, contents.arrays)
        self.cache.states_in(slot, contents.states)
        self.lengths[slot] = contents.length

    def _reserve_row(self, slot: int, num_tokens: int) -> None:
        if self.cache.reserve(slot, num_tokens):
            # Bound calls have views of the arrays that were moved.
            self._steps.clear()
            self._row_attentions.clear()
        self._capacities[slot] = self.cache.row_of(slot).capacity

    def _lay_out(self, advances: Sequence[Advance]) -> Layout:
        """Return a step's layout: decoding requests by row, then the others in the order of `advances`."""
        rows: dict[int, list[int]] = {}
        chunks: list[Chunk | Verified] = []
        for advance in advances:
            cache_row = self.cache.row_of(advance.slot)
            if len(advance.tokens) == 1:
                rows.setdefault(cache_row.capacity, []).append(cache_row.index)
            elif advance.verifies:
                chunks.append(Verified(cache_row, len(advance.tokens)))
            else:
                for start, end in self._chunks(advance):
                    keeps_states = advance.keeps_states and not end % self.chunk_size
                    chunks.append(Chunk(cache_row, start, end - start, keeps_states))
        decoding = [DecodeRows(capacity, min(numbers), max(numbers) + 1) for capacity, numbers in sorted(rows.items())]
        return Layout(tuple(decoding), tuple(chunks), sum(advance.num_rows for advance in advances))

    def _chunks(self, advance: Advance) -> Iterator[tuple[int, int]]:
        """Yield the (start, end) positions of an advance's chunks, cut at multiples of `chunk_size`."""
        start = advance.start
        end = advance.start + len(advance.tokens)
        while start < end:
            stop = min(end, (start // self.chunk_size + 1) * self.chunk_size)
            yield start, stop
            start = stop

    def _host_step(self, network: int, layout: Layout) -> HostStep:
        """Return the bound calls of a layout, from the cache if steps of this layout may recur."""
        step = self._steps.get((network, layout))
        if step is None:
            step = HostStep(self.networks[network], self.cache, layout, self._row_attentions, self._observer)
            if layout.is_reusable:
                while len(self._steps) >= _CACHED_STEPS * len(self.networks):
                    del self._steps[next(iter(self._steps))]
                self._steps[network, layout] = step
        return step

    def pack(self, step: HostStep, advances: Sequence[Advance]) -> dict[int, np.ndarray]:
        """Fill the step's inputs; return by capacity the cache rows that decode, ascending."""
        layout = step.layout
        # By capacity: the packed index of a row minus its number.
        offsets = {part.capacity: packed.start - part.low for part, packed in zip(layout.decoding, step.slices)}
        decoded: dict[int, list[int]] = {capacity: [] for capacity in offsets}
        decoding, chunks = split(advances)
        rows = []
        for advance in decoding:
            cache_row = self.cache.row_of(advance.slot)
            decoded[cache_row.capacity].append(cache_row.index)
            rows.append(offsets[cache_row.capacity] + cache_row.index)
        num_decode = layout.num_decode
        ranges = step.tokens.pack(decoding, rows, num_decode, chunks)
        if len(decoding) < num_decode:
            # A dummy token is at the position after its row's last token, where an engine may write: see `host_step`.
            for part, packed in zip(layout.decoding, step.slices):
                gaps = step.tokens.slots[packed] < 0
                lengths = self.cache.row_lengths(part.capacity, part.low, part.high)
                step.tokens.position_ids[packed][gaps] = lengths[gaps]
        # `ranges` are in the order of `decoding`, then of `chunks`; logits are in the order of `advances`.
        decode_ranges = iter(ranges[: len(decoding)])
        chunk_ranges = iter(ranges[len(decoding) :])
        logit_rows: list[int] = []
        for advance in advances:
            ranges_of_kind = chunk_ranges if len(advance.tokens) > 1 else decode_ranges
            _, end = next(ranges_of_kind)
            logit_rows += range(end - advance.num_rows, end)
        step.logit_rows[:] = logit_rows
        if self._adapters is not None:
            step.adapter_ids[:] = step.tokens.adapter_ids(self._adapters)
        return {capacity: np.array(sorted(numbers), np.int64) for capacity, numbers in decoded.items()}


def _check_declared(network: Network) -> None:
    """Raise CheckError if an engine's inputs and outputs differ from the assembly's, which size the buffers."""
    declared: dict[Executable, Signature] = {block.engine: block.signature for block, _ in network.layers}
    declared |= {block.engine: block.signature for block in (network.embedding, network.exit)}
    for mixer in {id(mixer): mixer for _, mixer in network.layers}.values():
        declared |= {mixer.engines[phase]: graph.signature for phase, graph in mixer.variant.phases().items()}
    for executable, signature in declared.items():
        check_engine(executable, signature)


def check_engine(executable: Executable, signature: Signature) -> None:
    """Raise CheckError if the inputs or outputs of an engine on host arrays differ from `signature`, except weights.

    Dynamic dimensions may have any name.
    """
    engine = cast(HostExecutable, executable)  # this executor runs no others
    expected = Signature(
        tuple(_any_names(io.name, io.dtype, io.shape) for io in signature.inputs),
        tuple(_any_names(io.name, io.dtype, io.shape) for io in signature.outputs),
    )
    actual = Signature(
        tuple(_any_names(name, value.dtype.name, value.shape) for name, value in engine.inputs.items()),
        tuple(_any_names(name, value.dtype.name, value.shape) for name, value in engine.outputs.items()),
    )
    expected.check(actual, engine.where, "export and build again, or take another bundle")


def _any_names(name: str, dtype: str, shape: Sequence[int | str]) -> IO:
    return IO(name, dtype, tuple(size if isinstance(size, int) else "any" for size in shape))
