"""The step on a GPU: the same engines in the same order as on a CPU, with all values on the device.

Rows that decode are one CUDA graph for each (number of rows, capacity of the cache): embedding, blocks, attention,
cache, logits, next tokens. It runs rows 0 to a power of two, whatever slots decode; a row that does not is written
nowhere. Tokens of prompts are a pass of their own behind it, put on the stream call by call, as the calls are made: the
device is at the decoding rows, or at the first layers, while the host prepares the next ones. So rows decode by the
graph that they have alone, whatever a step brings.

The device chooses the tokens, greedy or drawn: where these alone are asked for, no logits come back, and the device
holds what the next step goes on with. Where the caller says that it will, that step is launched before these tokens are
back, so that the device does not wait for the host; prompts that arrive meanwhile follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from lockstep.backends.tensorrt import cuda
from lockstep.backends.tensorrt.attention import (
    LARGEST_BATCH,
    SMALLEST_CHUNK,
    Chunks,
    PagedAttention,
    make_attention,
    make_tables,
    padded,
)
from lockstep.backends.tensorrt.decode_state import DecodeState
from lockstep.backends.tensorrt.kernels import Kernels
from lockstep.backends.tensorrt.program import Bound, Device, TensorRTExecutable
from lockstep.backends.tensorrt.prompt_blocks import PromptBlocks
from lockstep.backends.tensorrt.prompts import Inputs, PromptInputs
from lockstep.errors import CheckError, InputError
from lockstep.step.advance import Advance
from lockstep.step.network import Block, Kind, Network
from lockstep.step.sampling import Sampling

Call = Callable[[], None]
_ROUNDS = 20  # of what is timed


@dataclass
class _Plan:
    """The calls of one layout, on buffers that all plans share."""

    calls: list[Call]
    names: list[str]  # what the time of each call goes to: embedding, block, attention ...
    logits: cuda.Array
    graph: cuda.Graph | None = None
    warm: bool = False


@dataclass
class _Flight:
    """A step that the device is at, or through with. ends: of its slots, what they hold then."""

    ends: dict[int, int]
    tokens: np.ndarray  # page-locked: what it finds, by slot, once `done`
    done: cuda.Event
    given: np.ndarray | None = None  # of a step in flight: the tokens that it went on with, by slot


class GpuExecutor:
    """Runs steps of a Network whose engines are TensorRT's. `lengths[slot]`: tokens that a slot
    holds."""

    def __init__(
        self, network: Network, num_slots: int, max_seq_len: int, max_num_tokens: int, kv_bytes: float | None = None
    ):
        """kv_bytes: memory for keys and values; None: for the longest requests in all slots, or nine tenths of what is
        free. Raises CheckError where that is no page."""
        self.num_slots, self.max_seq_len = num_slots, max_seq_len
        self.lengths = np.zeros(num_slots, np.int64)
        # slots that a step was begun for since they were forgotten: it may have failed, and their length be 0 still
        self._written: set[int] = set()
        self._network = network
        blocks = (network.embedding, *(block for block, _ in network.layers), network.exit)
        self._uploads = list({id(run.uploads): run.uploads for run in map(_engine, blocks)}.values())
        self._device = Device.get()
        self._stream = self._device.stream
        self._max_num_tokens = max_num_tokens
        integer = _engine(network.embedding).program.tensors["token_ids"].dtype
        self._kernels = Kernels(wide=integer.itemsize == 8)
        self._buffers: dict[tuple, cuda.Array] = {}
        self._state = DecodeState(num_slots, max_seq_len, integer)
        self._every_row = cuda.empty((num_slots,), integer)  # the logits of a decode step
        self._stream.upload(self._every_row, np.arange(num_slots, dtype=integer))
        self._prompts = PromptInputs(max_num_tokens, num_slots, integer)
        self.tables = make_tables(network, num_slots, max_seq_len, kv_bytes)
        self._attention = make_attention(network, self.tables, num_slots, max_seq_len, self._kernels)
        self._forms = list(dict.fromkeys(self._attention))
        self._prompt_blocks: PromptBlocks | None = None  # its buffers are made with the first pass
        self._plans: dict[tuple, _Plan] = {}
        self._in_flight: _Flight | None = None  # a step that nobody has asked for yet
        # the step with one prompt that was taken last, and its slots
        self._prompt: tuple[_Plan, list[int]] | None = None
        # of a step, and of the one behind it
        self._fetched = [(cuda.pinned((num_slots,), "i4"), cuda.Event()) for _ in range(2)]
        self._host_logits: np.ndarray | None = None

    def __del__(self) -> None:
        if hasattr(self, "_stream"):
            self._stream.drain()  # what is freed now may be at work still

    @property
    def in_flight(self) -> bool:
        """A step was begun that nobody has asked for yet."""
        return self._in_flight is not None

    def reset(self, slot: int) -> None:
        """Forget what a slot holds; its pages go back."""
        if slot in self._written:
            for attention in self._forms:
                attention.reset(slot, self._stream)
        self._written.discard(slot)
        self._leave_flight(slot)
        self.tables.release(slot)
        self.lengths[slot] = 0

    def share(self, slot: int, pages: Sequence[int]) -> None:
        """Nothing is copied: the slot's table begins with `pages`."""
        self._written.add(slot)

    def store(self, slot: int, start: int, pages: Sequence[int]) -> None:
        raise AssertionError("a prefix is not copied: its pages are in the slot's table")

    def fork(self, slot: int, other: int) -> None:
        """Copy what is behind the slot's full pages."""
        self._written.add(other)
        for attention in self._paged:
            attention.fork(slot, other, int(self.lengths[slot]), self._stream)

    def swap_out(self, slot: int) -> list[np.ndarray]:
        """Bring the slot's pages to page-locked memory, and reset it."""
        swapped = [attention.save(slot, int(self.lengths[slot]), self._stream) for attention in self._paged]
        self._stream.synchronize()
        self.reset(slot)
        return swapped

    def swap_in(self, slot: int, swapped: Sequence[np.ndarray]) -> None:
        """Bring pages back into those that the slot has now."""
        self._written.add(slot)
        for attention, saved in zip(self._paged, swapped):
            attention.restore(slot, saved, self._stream)
        self._stream.synchronize()

    @property
    def _paged(self) -> list[PagedAttention]:
        """All attention, where a slot's content can be moved (`tables.shares`)."""
        return cast(list[PagedAttention], self._forms)

    def set_sampling(self, slot: int, sampling: Sampling, choice: int) -> None:
        """Choose a slot's tokens so in steps that are launched from now on: see `Executor.set_sampling`."""
        if self._state.set_sampling(slot, sampling, choice):
            self._leave_flight(slot)

    def _leave_flight(self, slot: int) -> None:
        """What the step in flight finds for the slot is not asked for: it was launched for another request."""
        if self._in_flight is not None:
            self._in_flight.ends.pop(slot, None)

    def logits(self, advances: Sequence[Advance]) -> np.ndarray:
        """Take a step that is checked already; [len(advances), vocab_size] float32, in the order of the list."""
        return self.tokens_and_logits(advances, range(len(advances)))[1]

    def tokens(self, advances: Sequence[Advance], more: bool) -> np.ndarray:
        """As `logits`, but just the tokens come back that `set_sampling` asks for, [len(advances)] int64; -1 where the
        largest logit is NaN or infinite.

        more: the next step goes on with these tokens, in these slots or some of them, as far as the caller knows.
        """
        flight, _ = self._put(advances)
        slots = [advance.slot for advance in advances]
        launched = self._launch_next({slot: flight.ends[slot] for slot in slots}) if more else None
        flight.done.wait()
        found = flight.tokens.copy()
        if launched is None:
            self._state.tell(slots, found)
        else:
            launched.given = found
        self._in_flight = launched
        return found[slots].astype(np.int64)

    def tokens_and_logits(self, advances: Sequence[Advance], wanted: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """As `tokens`, and the logits behind some of the requests: see `Executor.tokens_and_logits`."""
        flight, rows = self._put(advances)
        found = [rows[advances[number].slot] for number in wanted]
        if self._host_logits is None:
            any_row = next(iter(rows.values()))
            self._host_logits = cuda.pinned((self.num_slots, any_row.shape[1]), any_row.dtype)
        for at, row in enumerate(found):
            self._stream.download(self._host_logits[at : at + 1], row)
        self._stream.synchronize()
        slots = [advance.slot for advance in advances]
        self._state.tell(slots, flight.tokens)
        return flight.tokens[slots].astype(np.int64), self._host_logits[: len(found)].astype(np.float32)

    def _put(self, advances: Sequence[Advance]) -> tuple[_Flight, dict[int, cuda.Array]]:
        """Put a step on the stream, as far as it is not in flight; what it finds, and by slot the row of logits
        [1, vocab_size], which is there until the next step."""
        decoding, chunks = _split(advances)
        flight, rows = self._asked_for(decoding), {}
        if flight is None or chunks:
            self._begin(advances, flight)
            if flight is None and decoding:
                self._decode(decoding)
            if chunks:
                logits = self._prefill(chunks).logits
                rows = {chunk.slot: logits[number : number + 1] for number, chunk in enumerate(chunks)}
            flight = self._fetch(_ends(advances))
        if decoding:
            logits = self._buffers["logits", "decode"]
            rows |= {advance.slot: logits[advance.slot : advance.slot + 1] for advance in decoding}
        return flight, rows

    def _asked_for(self, decoding: Sequence[Advance]) -> _Flight | None:
        """The step in flight, if these are slots of it; else it is dropped: nobody asks for it any more."""
        flight, self._in_flight = self._in_flight, None
        if flight is None or not decoding or flight.given is None:
            return None
        asked = all(
            flight.ends.get(advance.slot) == advance.start + 1 and flight.given[advance.slot] == advance.tokens[0]
            for advance in decoding
        )
        return flight if asked else None

    def _fetch(self, ends: dict[int, int]) -> _Flight:
        """Bring the tokens of the step that was put on the stream last."""
        self._fetched.reverse()
        flight = _Flight(ends, *self._fetched[0])
        self._stream.download(flight.tokens, self._state.found)
        flight.done.record(self._stream)
        return flight

    def _launch_next(self, held: dict[int, int]) -> _Flight | None:
        """Put the step of these slots, which hold so much by then, on the stream too, if all have room."""
        if max(held.values()) == self.max_seq_len:
            return None
        ends, lengths = {slot: length + 1 for slot, length in held.items()}, self.lengths.copy()
        lengths[list(held)] = list(held.values())
        try:
            self._reserve(ends, lengths)
            plan = self._decode_plan(_bucket(max(ends) + 1, self.num_slots))
        except (CheckError, InputError):  # no memory for a step that may never be asked for; whoever asks is told
            return None
        self._state.decode(list(held), None, list(held.values()), self._stream)
        self._launch(plan)
        return self._fetch(ends)

    def wait(self) -> None:
        """Until all weights are on the device. Raises what an upload raised."""
        for uploads in self._uploads:
            uploads.wait()

    def warm_up(self) -> None:
        """Run what steps are made of once, so that no request waits for it: capture the decode graph of each number of
        rows, and take prompts of each power of two of tokens, alone and several at a time. Caches stay as they are."""
        self.wait()
        self._reserve({}, self.lengths)
        self._state.decode([], None, [], self._stream)
        for count in sorted({_bucket(rows, self.num_slots) for rows in range(1, self.num_slots + 1)}):
            plan = self._decode_plan(count)
            while plan.graph is None:
                self._launch(plan)
        longest = min(self._max_num_tokens, self.max_seq_len)
        for batch in (1 << power for power in range(LARGEST_BATCH.bit_length())):
            for tokens in {min(1 << power, longest) for power in range(1, longest.bit_length() + 1)}:
                fits = min(tokens, self._max_num_tokens // batch)
                if batch <= self.num_slots and padded(fits) == padded(tokens) and fits > 1:
                    chunks = [Advance(slot, np.zeros(fits, np.int64), 0) for slot in range(batch)]
                    self._pass(*self._prompts.send(chunks, self._stream, write=False))
        self._stream.synchronize()

    def _begin(self, advances: Sequence[Advance], flight: _Flight | None = None) -> None:
        """Make room for a step, which goes on behind `flight`."""
        self.wait()
        ends, lengths = _ends(advances), self.lengths.copy()
        if flight is not None:
            lengths[list(flight.ends)] = list(flight.ends.values())
        self._reserve(ends, lengths)
        self._written |= ends.keys()

    def _reserve(self, ends: Mapping[int, int], lengths: np.ndarray) -> None:
        self.tables.reserve(ends)
        if any(attention.reserve(ends, lengths, self._stream) for attention in self._forms):
            self._plans.clear()

    def _launch(self, plan: _Plan) -> None:
        """The first time as it is, which TensorRT asks for before a capture; the second time captured; then the
        graph."""
        if plan.graph is not None:
            plan.graph.launch(self._stream)
        elif not plan.warm:
            for call in plan.calls:
                call()
            plan.warm = True
        else:
            with self._stream.capture() as graph:
                for call in plan.calls:
                    call()
            plan.graph = graph
            graph.launch(self._stream)

    def _decode(self, decoding: Sequence[Advance]) -> _Plan:
        """One token of each slot, put on the stream."""
        self._prompt = None
        plan = self._decode_plan(_bucket(max(advance.slot for advance in decoding) + 1, self.num_slots))
        slots, tokens, positions = zip(*((advance.slot, advance.tokens[0], advance.start) for advance in decoding))
        self._state.decode(slots, tokens, positions, self._stream)
        self._launch(plan)
        return plan

    def _decode_plan(self, count: int) -> _Plan:
        key = (count, *(attention.capacity for attention in self._forms))
        plan = self._plans.get(key)
        if plan is None:
            state = self._state
            inputs = Inputs(
                state.token_ids[:count],
                state.positions[:count],
                state.rows[:count],
                self._every_row[:count],
                state.rows[:count],
                state.positions[:count],
            )
            plan = self._plans[key] = self._plan(inputs)
        return plan

    def _prefill(self, chunks: Sequence[Advance]) -> _Plan:
        """A pass of prompts, put on the stream; the logits of `chunks`, in their order."""
        self._prompt = None
        self._state.send_samplings(self._stream)
        slots = [chunk.slot for chunk in chunks]
        self._state.advance(slots, [chunk.start + len(chunk.tokens) for chunk in chunks])
        plan = self._pass(*self._prompts.send(chunks, self._stream))
        if len(chunks) == 1:
            self._prompt = plan, slots
        return plan

    def _pass(self, inputs: Inputs, chunks: Chunks) -> _Plan:
        for attention in self._forms:
            attention.begin(chunks, self._stream)
        if self._prompt_blocks is None:
            self._prompt_blocks = PromptBlocks(self._network, self._bind_prompts)
        return self._prompt_plan(self._prompt_blocks, inputs, chunks)

    def breakdown(self, batch: int) -> dict[str, float]:
        """Microseconds of a decode step of rows 0 to `batch`-1, of what they hold, by what they go to: each kind of
        call repeated alone in a graph; "gaps": the rest of the step. The rows hold afterwards what they held.

        Raises InputError where a row has no room: what is repeated goes on, token after token, in the cache behind what
        the row holds.
        """
        held, count = self.lengths[:batch], _bucket(batch, self.num_slots)
        end = int(held.max()) + 2 + 2 * (_ROUNDS + 1)  # two steps before there is a graph; "next token"; whole steps
        if end > self.max_seq_len:
            raise InputError(
                f"breakdown: expected room for {end - held.max()} more tokens in each row, at "
                f"most {self.max_seq_len} (max_seq_len), found a row of {held.max()}"
            )
        self._prompt = self._in_flight = None
        self._reserve(dict.fromkeys(range(batch), end), self.lengths)
        plan = self._decode_plan(count)
        self._state.decode(range(batch), [0] * batch, held.tolist(), self._stream)
        while plan.graph is None:
            self._launch(plan)
        try:
            found = self._parts(plan)
            whole = self._time(plan.graph)
        finally:
            self._state.forget()
        found["gaps"] = round(whole - sum(found.values()), 1)
        found["step"] = round(whole, 1)
        return found

    def breakdown_prefill(self) -> dict[str, float]:
        """Microseconds of the prompt in the step that was taken last, by what they go to. Its slot is forgotten: what
        is repeated spoils its cache.

        Raises InputError where that step did not bring one prompt.
        """
        if self._prompt is None:
            raise InputError("breakdown: expected a step with one prompt just before, found none")
        (plan, slots), self._prompt, self._in_flight = self._prompt, None, None
        try:
            return self._parts(plan)
        finally:
            self._state.forget()
            for slot in slots:
                self.reset(slot)

    def _parts(self, plan: _Plan) -> dict[str, float]:
        return {
            name: self._alone([call for call, of in zip(plan.calls, plan.names) if of == name])
            for name in dict.fromkeys(plan.names)
        }

    def _alone(self, calls: Sequence[Call]) -> float:
        """Microseconds of calls in a graph of their own."""
        with self._stream.capture() as graph:
            for call in calls:
                call()
        return round(self._time(graph), 1)

    def _time(self, graph: cuda.Graph) -> float:
        graph.launch(self._stream)
        first, last = cuda.Event(), cuda.Event()
        first.record(self._stream)
        for _ in range(_ROUNDS):
            graph.launch(self._stream)
        last.record(self._stream)
        last.wait()
        return last.milliseconds_since(first) * 1e3 / _ROUNDS

    def _plan(self, inputs: Inputs) -> _Plan:
        """Rows of one token; nothing is put on the stream."""
        total = inputs.token_ids.shape[0]
        dims = {"num_tokens": total, "num_requests": inputs.logit_rows.shape[0]}
        values = {"token_ids": inputs.token_ids, "position_ids": inputs.position_ids, "logit_rows": inputs.logit_rows}
        network = self._network

        def prepare(block: Block) -> Call:
            return _engine(block).prepare(*self._arrays(block, values, dims, "decode"), own=True)

        calls = [("embedding", prepare(network.embedding))]
        for index, (block, kind) in enumerate(network.layers):
            calls.append(("block", prepare(block)))
            self._add_attention(kind, values, total)
            calls += self._attention[index].calls(
                index, kind, values, inputs.rows, [], self._buffer, self._stream, True
            )
        calls += [("exit", prepare(network.exit)), ("next token", self._next_token(values["logits"], inputs))]
        return _Plan([call for _, call in calls], [name for name, _ in calls], values["logits"])

    def _prompt_plan(self, blocks: PromptBlocks, inputs: Inputs, chunks: Chunks) -> _Plan:
        """Chunks; each call is put on the stream once it is made."""
        total, num_requests = inputs.token_ids.shape[0], inputs.logit_rows.shape[0]
        a_pass = blocks.begin(total, num_requests)
        calls: list[Call] = []
        names: list[str] = []

        def add(name: str, call: Call) -> None:
            call()
            calls.append(call)
            names.append(name)

        add("embedding", a_pass.embedding())
        for index, (_, kind) in enumerate(self._network.layers):
            call, values = a_pass.layer(index)
            add("block", call)
            for name, call in self._attention[index].calls(
                index, kind, values, inputs.rows, chunks, self._buffer, self._stream, False
            ):
                add(name, call)
        call, logits = a_pass.exit()
        add("exit", call)
        add("next token", self._next_token(logits, inputs))
        return _Plan(calls, names, logits)

    def _next_token(self, logits: cuda.Array, inputs: Inputs) -> Call:
        kernels, stream, limit = self._kernels, self._stream, self.max_seq_len  # not `self`, which holds the plan
        state = self._state
        found = state.samplings, state.found, state.token_ids, state.positions
        return lambda: kernels.advance(stream, logits, inputs.slots, inputs.held, limit, *found)

    def _bind_prompts(self) -> Iterator[tuple[Block, Bound, dict[str, cuda.Array]]]:
        """Each block of a pass of prompts, bound to buffers for the largest, and by name the values behind it."""
        arrays, network, largest = self._prompts.arrays, self._network, self._max_num_tokens
        values = {"token_ids": arrays.token_ids, "position_ids": arrays.position_ids, "logit_rows": arrays.logit_rows}
        dims = {"num_tokens": largest, "num_requests": self.num_slots}
        for block, kind in ((network.embedding, None), *network.layers, (network.exit, None)):
            bound = _engine(block).bind(*self._arrays(block, values, dims, "prompts"))
            if kind is not None:
                self._add_attention(kind, values, largest)
            yield block, bound, dict(values)

    def _add_attention(self, kind: Kind, values: dict[str, cuda.Array], total: int) -> None:
        width = tuple(int(size) for size in kind.attention.shape[1:])  # all but the first are numbers
        values["attention"] = self._buffer("attention", (total, *width), kind.attention.numpy_dtype)

    def _arrays(
        self, block: Block, values: dict[str, cuda.Array], dims: Mapping[str, int], of: str
    ) -> tuple[dict[str, cuda.Array], dict[str, cuda.Array]]:
        """Inputs and outputs of a block; `values` has its outputs afterwards. of: whose logits an exit makes."""
        inputs = {io.name: values[io.key] for io in block.signature.inputs}
        outputs = {}
        for io in block.signature.outputs:
            shape = tuple(dims[dim] if isinstance(dim, str) else dim for dim in io.shape)
            if io.name == "logits":
                outputs[io.name] = self._logits(of, shape, io.numpy_dtype)
                continue
            outputs[io.name] = self._buffer(io.key, shape, io.numpy_dtype)
            if any(array.address == outputs[io.name].address for array in inputs.values()):
                # a block reads the value that it replaces
                outputs[io.name] = self._buffer(f"{io.key}/other", shape, io.numpy_dtype)
        values.update({io.key: outputs[io.name] for io in block.signature.outputs})
        return inputs, outputs

    def _logits(self, of: str, shape: Sequence[int], dtype: np.dtype) -> cuda.Array:
        """[num_requests, vocab_size]: a row for each slot is enough."""
        key = ("logits", of)
        if key not in self._buffers:
            self._buffers[key] = cuda.empty((self.num_slots, *shape[1:]), dtype, "logits")
        return self._buffers[key][: shape[0]]

    def _buffer(self, name: str, shape: Sequence[int], dtype: np.dtype) -> cuda.Array:
        """The buffer of this name, as large as any step needs it: all plans and layers use the same."""
        key = (name, tuple(shape[1:]), np.dtype(dtype))
        array = self._buffers.get(key)
        if array is None:
            # Fused attention reads, and spoils, what is behind a chunk's last token, as if the chunk were a power of
            # two long: less than twice as long as it is, or as long as the smallest.
            tokens = max(self.num_slots, self._max_num_tokens)
            count = tokens + max(tokens, SMALLEST_CHUNK)
            array = self._buffers[key] = cuda.zeros((count, *shape[1:]), dtype, "the values of a step")
        return array[: shape[0]]


def _engine(block: Block) -> TensorRTExecutable:
    """A network that this executor is given has engines of this backend."""
    return cast(TensorRTExecutable, block.run)


def _bucket(count: int, rows: int) -> int:
    """The next power of two, at most `rows`."""
    return min(1 << (count - 1).bit_length(), rows)


def _split(advances: Sequence[Advance]) -> tuple[list[Advance], list[Advance]]:
    """Those of one token, which decode, and those of several; these by their length, so that prompts of about one
    length lie together."""
    decoding = [advance for advance in advances if len(advance.tokens) == 1]
    chunks = [advance for advance in advances if len(advance.tokens) > 1]
    return decoding, sorted(chunks, key=lambda chunk: padded(len(chunk.tokens)))


def _ends(advances: Sequence[Advance]) -> dict[int, int]:
    """By slot the number of tokens that it holds behind the step."""
    return {advance.slot: advance.start + len(advance.tokens) for advance in advances}
