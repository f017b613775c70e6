"""The step on a GPU: the same engines in the same order as on a CPU, with all values on the device.

A step that only decodes is one CUDA graph for each (number of rows, capacity of the cache): embedding, blocks,
attention, cache, logits, next tokens. It runs rows 0 to a power of two, whatever slots decode; a row that does not
carries token 0 and is written nowhere. When a step goes on with the tokens that the step before it found, nothing is
uploaded; where the caller says that it will, it is launched before these tokens are back, so that the device does not
wait for the host. A step that brings prompts is put on the stream call by call, as the calls are made: the device works
on the first layers while the host prepares the next ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from lockstep.backends.tensorrt import cuda
from lockstep.backends.tensorrt.attention import SMALLEST_CHUNK, make_attention
from lockstep.backends.tensorrt.kernels import Kernels
from lockstep.backends.tensorrt.program import Device, TensorRTExecutable
from lockstep.errors import CheckError, InputError
from lockstep.step.advance import Advance
from lockstep.step.greedy import most_likely
from lockstep.step.network import Block, Network
from lockstep.step.pages import PAGE_SIZE, PagePool, PageTables

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
class _Expected:
    """What the device's token ids and positions hold behind the decode step that was asked for last: a step that asks
    for just this uploads nothing. (With a step ahead they are one token further already.)"""

    rows: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    positions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass
class _Flight:
    """A decode step that the device is at, or through with."""

    order: list[int]  # of its rows those that decode
    tokens: np.ndarray  # page-locked: what it finds, of all its rows, once `done`
    done: cuda.Event


class GpuExecutor:
    """Runs steps of a Network whose engines are TensorRT's. `lengths[slot]`: tokens that a slot
    holds."""

    def __init__(self, network: Network, rows: int, max_seq_len: int, max_num_tokens: int):
        self.rows, self.max_seq_len = rows, max_seq_len
        self.num_slots = rows
        self.tables = PageTables(PagePool(rows * -(-max_seq_len // PAGE_SIZE), 0), rows, shares=None)
        self.lengths = np.zeros(rows, np.int64)
        # slots that a step was begun for since they were forgotten: it may have failed, and their length be 0 still
        self._written: set[int] = set()
        self._network = network
        blocks = (network.embedding, *(block for block, _ in network.layers), network.exit)
        self._uploads = list({id(run.uploads): run.uploads for run in map(_engine, blocks)}.values())
        self._device = Device.get()
        self._stream = self._device.stream
        self._tokens = rows + max_num_tokens  # the most that one step brings
        self._integer = _engine(network.embedding).program.tensors["token_ids"].dtype
        self._kernels = Kernels(wide=self._integer.itemsize == 8)
        self._buffers: dict[tuple, cuda.Array] = {}
        self._token_ids, self._positions = (cuda.zeros((self._tokens,), self._integer) for _ in range(2))
        self._rows = cuda.zeros((self._tokens,), "i4")
        self._found = cuda.zeros((rows,), "i4")
        self._logit_rows = cuda.zeros((rows,), self._integer)
        self._attention = make_attention(network, rows, max_seq_len, self._kernels)
        self._forms = list(dict.fromkeys(self._attention))
        self._plans: dict[tuple, _Plan] = {}
        self._expected = _Expected()
        # a step that nobody has asked for yet: rows, tokens and positions are those of `_expected`
        self._ahead: _Flight | None = None
        # the step with one prompt that was taken last, and its rows
        self._prompt: tuple[_Plan, list[int]] | None = None
        self._host = {
            name: cuda.pinned((self._tokens,), dtype)
            for name, dtype in (("tokens", self._integer), ("positions", self._integer), ("rows", np.dtype("i4")))
        }
        self._host_rows = cuda.pinned((rows,), self._integer)
        # of a step, and of the one ahead of it
        self._fetched = [(cuda.pinned((rows,), "i4"), cuda.Event()) for _ in range(2)]
        self._host_logits: np.ndarray | None = None

    def __del__(self) -> None:
        if hasattr(self, "_stream"):
            self._stream.drain()  # what is freed now may be at work still

    @property
    def ahead(self) -> bool:
        """A step was begun that nobody has asked for yet."""
        return self._ahead is not None

    def reset(self, slot: int) -> None:
        """Forget what a slot holds."""
        if slot in self._written:
            for attention in self._forms:
                attention.reset(slot, self._stream)
        self._written.discard(slot)
        self.tables.release(slot)
        self.lengths[slot] = 0

    def logits(self, advances: Sequence[Advance]) -> np.ndarray:
        """Take a step that is checked already; [len(advances), vocab_size] float32, in the order of the list."""
        plan, order = self._run(advances)
        count = plan.logits.shape[0]
        if self._host_logits is None or self._host_logits.shape[0] < count:
            self._host_logits = cuda.pinned((max(count, self.rows), plan.logits.shape[1]), plan.logits.dtype)
        host = self._host_logits[:count]
        self._stream.download(host, plan.logits)
        self._stream.synchronize()
        return host[order].astype(np.float32)

    def tokens(self, advances: Sequence[Advance], more: bool) -> np.ndarray:
        """As `logits`, but of a step that only decodes just the most likely tokens come back, [len(advances)] int64; -1
        where its logit is NaN or infinite.

        more: the next step goes on with these tokens, in these rows or some of them, as far as the caller knows.
        """
        if any(len(advance.tokens) > 1 for advance in advances):
            return most_likely(self.logits(advances))
        flight = self._asked_for(advances)
        if flight is None:
            plan, order = self._run(advances)
            flight = self._fetch(plan, order)
        whole = len(advances) == len(flight.order)  # else the device has rows that nobody asks for any more
        ahead = self._go_ahead(flight) if more and whole else None
        flight.done.wait()
        found = flight.tokens[[advance.slot for advance in advances]].astype(np.int64)
        self._expected.tokens = np.where(self._expected.rows >= 0, flight.tokens[: len(self._expected.rows)], 0).astype(
            np.int64
        )
        self._ahead = ahead
        return found

    def _asked_for(self, advances: Sequence[Advance]) -> _Flight | None:
        """The step ahead, if these are rows of it."""
        flight, old = self._ahead, self._expected
        if flight is None or any(
            advance.slot not in flight.order
            or advance.tokens[0] != old.tokens[advance.slot]
            or advance.start != old.positions[advance.slot]
            for advance in advances
        ):
            return None
        self._ahead = None
        self._expected = _Expected(old.rows, np.empty(0, np.int64), old.positions + (old.rows >= 0))
        return flight

    def _fetch(self, plan: _Plan, order: list[int]) -> _Flight:
        """Bring the tokens of the step that was put on the stream last."""
        self._fetched.reverse()
        flight, count = _Flight(order, *self._fetched[0]), plan.logits.shape[0]
        self._stream.download(flight.tokens[:count], self._found[:count])
        flight.done.record(self._stream)
        return flight

    def _go_ahead(self, flight: _Flight) -> _Flight | None:
        """Put the step behind `flight` on the stream too, if its rows have room."""
        lengths = self.lengths.copy()
        lengths[flight.order] = self._expected.positions[flight.order]
        if lengths[flight.order].max() == self.max_seq_len:
            return None
        try:
            self._reserve({slot: int(lengths[slot]) + 1 for slot in flight.order}, lengths)
        except CheckError:  # no memory for a step that may never be asked for; whoever asks for it is told
            return None
        plan = self._decode_plan(len(self._expected.rows))
        self._launch(plan)
        return self._fetch(plan, flight.order)

    def share(self, slot: int, pages: Sequence[int]) -> None:
        raise InputError("prefix: not with this attention")

    def store(self, slot: int, start: int, pages: Sequence[int]) -> None:
        raise InputError("prefix: not with this attention")

    def fork(self, slot: int, other: int) -> None:
        raise InputError("fork: not with this attention")

    def swap_out(self, slot: int) -> None:
        raise InputError("swap: not with this attention")

    def swap_in(self, slot: int, swapped: object) -> None:
        raise InputError("swap: not with this attention")

    def wait(self) -> None:
        """Until all weights are on the device. Raises what an upload raised."""
        for uploads in self._uploads:
            uploads.wait()

    def _run(self, advances: Sequence[Advance]) -> tuple[_Plan, list[int]]:
        """Put a step on the stream; gives its plan and, for each advance, its row of the logits."""
        self.wait()
        if self._ahead is not None:  # nobody asked for it: tokens and positions on the device are those behind it
            self._ahead, self._expected = None, _Expected()
        ends = {advance.slot: advance.start + len(advance.tokens) for advance in advances}
        self._written |= ends.keys()
        self._reserve(ends, self.lengths)
        decoding = [advance for advance in advances if len(advance.tokens) == 1]
        chunks = [advance for advance in advances if len(advance.tokens) > 1]
        num_decode = _bucket(max(advance.slot for advance in decoding) + 1, self.rows) if decoding else 0
        if chunks:
            plan, order = self._mixed(advances, decoding, chunks, num_decode)
            if len(chunks) == 1:
                self._prompt = plan, [advance.slot for advance in advances]
        else:
            plan, order = self._decode(decoding, num_decode), [advance.slot for advance in advances]
            self._launch(plan)
        return plan, order

    def _reserve(self, ends: Mapping[int, int], lengths: np.ndarray) -> None:
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

    def _decode(self, decoding: Sequence[Advance], count: int) -> _Plan:
        rows, tokens, positions = np.full(count, -1, np.int32), np.zeros(count, np.int64), np.zeros(count, np.int64)
        for advance in decoding:
            rows[advance.slot], tokens[advance.slot], positions[advance.slot] = (
                advance.slot,
                advance.tokens[0],
                advance.start,
            )
        old = self._expected
        if not (
            np.array_equal(old.rows, rows)
            and np.array_equal(old.tokens, tokens)
            and np.array_equal(old.positions, positions)
        ):
            self._upload(tokens, positions, rows, np.arange(count))
        self._expected = _Expected(rows, np.empty(0, np.int64), positions + (rows >= 0))
        return self._decode_plan(count)

    def _decode_plan(self, count: int) -> _Plan:
        key = (count, *(attention.capacity for attention in self._forms))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(count, count, [])
        return plan

    def _mixed(
        self, advances: Sequence[Advance], decoding: Sequence[Advance], chunks: Sequence[Advance], num_decode: int
    ) -> tuple[_Plan, list[int]]:
        """A step with prompts, put on the stream."""
        total = num_decode + sum(len(advance.tokens) for advance in chunks)
        rows, tokens, positions = np.full(total, -1, np.int32), np.zeros(total, np.int64), np.zeros(total, np.int64)
        last: dict[int, int] = {}
        for advance in decoding:
            rows[advance.slot], tokens[advance.slot], positions[advance.slot] = (
                advance.slot,
                advance.tokens[0],
                advance.start,
            )
            last[advance.slot] = advance.slot
        at, places = num_decode, []
        for advance in chunks:
            end = at + len(advance.tokens)
            rows[at:end], tokens[at:end], positions[at:end] = (
                advance.slot,
                advance.tokens,
                np.arange(advance.start, advance.start + len(advance.tokens)),
            )
            places.append((advance.slot, advance.start, at, end))
            last[advance.slot] = end - 1
            at = end
        self._upload(tokens, positions, rows, np.array([last[advance.slot] for advance in advances]))
        return self._plan(num_decode, len(advances), places), list(range(len(advances)))

    def _upload(self, tokens: np.ndarray, positions: np.ndarray, rows: np.ndarray, logit_rows: np.ndarray) -> None:
        self._prompt, self._ahead, self._expected = None, None, _Expected()
        self._stream.synchronize()  # what was sent last may still be read
        count = len(tokens)
        for name, values, array in (
            ("tokens", tokens, self._token_ids),
            ("positions", positions, self._positions),
            ("rows", rows, self._rows),
        ):
            self._host[name][:count] = values
            self._stream.upload(array[:count], self._host[name][:count])
        self._host_rows[: len(logit_rows)] = logit_rows
        self._stream.upload(self._logit_rows[: len(logit_rows)], self._host_rows[: len(logit_rows)])

    def breakdown(self, batch: int) -> dict[str, float]:
        """Microseconds of a decode step of rows 0 to `batch`-1, of what they hold, by what they go to: each kind of
        call repeated alone in a graph; "gaps": the rest of the step. The rows hold afterwards what they held.

        Raises InputError where a row has no room: what is repeated goes on, token after token, in the cache behind what
        the row holds.
        """
        held, count = self.lengths[:batch], _bucket(batch, self.rows)
        end = int(held.max()) + 2 + 2 * (_ROUNDS + 1)  # two steps before there is a graph; "next token"; whole steps
        if end > self.max_seq_len:
            raise InputError(
                f"breakdown: expected room for {end - held.max()} more tokens in each row, at "
                f"most {self.max_seq_len} (max_seq_len), found a row of {held.max()}"
            )
        self._reserve(dict.fromkeys(range(batch), end), self.lengths)
        rows, positions = np.full(count, -1, np.int32), np.zeros(count, np.int64)
        rows[:batch], positions[:batch] = np.arange(batch), held
        self._upload(np.zeros(count, np.int64), positions, rows, np.arange(count))
        plan = self._decode_plan(count)
        while plan.graph is None:
            self._launch(plan)
        found = self._parts(plan)
        whole = self._time(plan.graph)
        found["gaps"] = round(whole - sum(found.values()), 1)
        found["step"] = round(whole, 1)
        return found

    def breakdown_prefill(self) -> dict[str, float]:
        """Microseconds of the step that was taken last, by what they go to. Its rows are forgotten: what is repeated
        spoils their cache.

        Raises InputError where that step did not bring one prompt.
        """
        if self._prompt is None:
            raise InputError("breakdown: expected a step with one prompt just before, found none")
        (plan, rows), self._prompt = self._prompt, None
        try:
            return self._parts(plan)
        finally:
            for row in rows:
                self.reset(row)

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

    def _plan(self, num_decode: int, num_logits: int, chunks: Sequence[tuple[int, int, int, int]]) -> _Plan:
        """num_decode rows of one token, then chunks (slot, start, first token, token behind the last). With chunks each
        call is put on the stream once it is made; without, none is."""
        total = chunks[-1][3] if chunks else num_decode
        dims = {"num_tokens": total, "num_requests": num_logits}
        values = {
            "token_ids": self._token_ids[:total],
            "position_ids": self._positions[:total],
            "logit_rows": self._logit_rows[:num_logits],
        }
        rows = self._rows[:total]
        calls: list[Call] = []
        names: list[str] = []
        network, own = self._network, not chunks

        def add(name: str, call: Call) -> None:
            calls.append(call)
            names.append(name)
            if chunks:
                call()

        for attention in self._forms:
            for call in attention.begin(chunks, self._stream):
                add("lengths", call)
        add("embedding", self._block(network.embedding, values, dims, own))
        for index, (block, kind) in enumerate(network.layers):
            add("block", self._block(block, values, dims, own))
            width = tuple(int(size) for size in kind.attention.shape[1:])  # all but the first are numbers
            values["attention"] = self._buffer("attention", (total, *width), kind.attention.numpy_dtype)
            for name, call in self._attention[index].calls(
                index, kind, values, rows, num_decode, chunks, self._buffer, self._stream, own
            ):
                add(name, call)
        add("exit", self._block(network.exit, values, dims, own))
        logits = values["logits"]
        if not chunks:
            token_ids, positions = self._token_ids[:total], self._positions[:total]
            kernels, stream, found = self._kernels, self._stream, self._found  # not `self`, which holds the plan
            add("next token", lambda: kernels.advance(stream, logits, rows, found, token_ids, positions))
        return _Plan(calls, names, logits)

    def _block(self, block: Block, values: dict[str, cuda.Array], dims: Mapping[str, int], own: bool) -> Call:
        inputs = {io.name: values[io.key] for io in block.signature.inputs}
        outputs = {}
        for io in block.signature.outputs:
            shape = tuple(dims[dim] if isinstance(dim, str) else dim for dim in io.shape)
            if io.name == "logits":
                outputs[io.name] = self._logits(shape, io.numpy_dtype)
                continue
            outputs[io.name] = self._buffer(io.key, shape, io.numpy_dtype)
            if io.key in values and values[io.key].address == outputs[io.name].address:
                # a block reads the value that it replaces
                outputs[io.name] = self._buffer(f"{io.key}/other", shape, io.numpy_dtype)
        call = _engine(block).prepare(inputs, outputs, own)
        values.update({io.key: outputs[io.name] for io in block.signature.outputs})
        return call

    def _logits(self, shape: Sequence[int], dtype: np.dtype) -> cuda.Array:
        """[num_requests, vocab_size]: a row for each slot is enough."""
        key = ("logits",)
        if key not in self._buffers:
            self._buffers[key] = cuda.empty((self.rows, *shape[1:]), dtype, "logits")
        return self._buffers[key][: shape[0]]

    def _buffer(self, name: str, shape: Sequence[int], dtype: np.dtype) -> cuda.Array:
        """The buffer of this name, as large as any step needs it: all plans and layers use the same."""
        key = (name, tuple(shape[1:]), np.dtype(dtype))
        array = self._buffers.get(key)
        if array is None:
            # Fused attention reads, and spoils, what is behind a chunk's last token, as if the chunk were a power of
            # two long: less than twice as long as it is, or as long as the smallest.
            count = self._tokens + max(self._tokens, SMALLEST_CHUNK)
            array = self._buffers[key] = cuda.zeros((count, *shape[1:]), dtype, "the values of a step")
        return array[: shape[0]]


def _engine(block: Block) -> TensorRTExecutable:
    """A network that this executor is given has engines of this backend."""
    return cast(TensorRTExecutable, block.run)


def _bucket(count: int, rows: int) -> int:
    """The next power of two, at most `rows`."""
    return min(1 << (count - 1).bit_length(), rows)
