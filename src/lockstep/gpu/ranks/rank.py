"""A rank: one device's engines, buffers and cache, and the calls of a step; callers use its device first."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from lockstep.artifacts.adapters import IDS, mask_rank
from lockstep.artifacts.signature import IO
from lockstep.gpu import cuda
from lockstep.gpu.attention.base import SMALLEST_CHUNK, Arrays, Attention, Calls, PagedAttention, Part, PassTokens
from lockstep.gpu.attention.make import make_attention
from lockstep.gpu.decode_state import DecodeState
from lockstep.gpu.device import Device
from lockstep.gpu.kernels.step_kernels import Kernels
from lockstep.gpu.program import GpuExecutable
from lockstep.gpu.prompt_blocks import BoundPiece, BoundSum, DeviceBlock, PromptBlocks, PromptPass
from lockstep.gpu.prompts import CAPTURED_TOKENS, CAPTURED_TOKENS_OF_RANKS, CAPTURED_WHOLE, Inputs, PromptInputs
from lockstep.gpu.ranks.all_reduce import Exchange
from lockstep.step.advance import Advance
from lockstep.step.network import Block, LayerMixer, Network, ShardCall
from lockstep.step.pages import PageTables

MOST_VERIFIED = 128  # tokens of a step that verifies drafts: more take longer than the weights take to be read
_PRODUCTS_EVERY = 32  # tokens, of sizes whose products are warmed: kernels work in tiles of 64 tokens and more


@dataclass
class StepCalls:
    """The calls of a step of one layout, on buffers that all steps share.

    own_logits: of several ranks, this one's part of the logits where the calls gather none; `logits` are then what
    `Rank.gather` fills.
    """

    parts: list[Part]
    logits: cuda.Array
    own_logits: cuda.Array | None
    whole: list[cuda.Array]  # what the exit reads that all ranks hold
    graph: cuda.Graph | None = None
    warm: bool = False

    @functools.cached_property
    def calls(self) -> Calls:
        """Return all calls, each with the name that its time goes to: embedding, block, attention ..."""
        return [call for part in self.parts for call in part.make()]


@dataclass(frozen=True)
class _Run:
    """A call of a piece's engine on arrays."""

    piece: ShardCall
    inputs: Arrays
    outputs: Arrays


@dataclass(frozen=True)
class _Sum:
    """A sum over the ranks, in place of `values`; dim: the name of their first dimension."""

    values: cuda.Array
    dim: str


class Buffers:
    """Device arrays by name, as large as any step needs them, which all steps and layers share."""

    def __init__(self, largest_pass: int):
        # Fused attention reads, and spoils, what is behind a chunk's last token, as if the chunk were a power of two
        # long: less than twice as long as it is, or as long as the smallest.
        self._rows = largest_pass + max(largest_pass, SMALLEST_CHUNK)
        self._arrays: dict[tuple, cuda.Array] = {}

    def __call__(self, name: str, shape: Sequence[int], dtype: np.dtype) -> cuda.Array:
        """Return the first `shape[0]` rows of the buffer of this name."""
        key = (name, tuple(shape[1:]), np.dtype(dtype))
        array = self._arrays.get(key)
        if array is None:
            array = self._arrays[key] = cuda.zeros((self._rows, *shape[1:]), dtype, "the values of a step")
        return array[: shape[0]]


class Rank:
    """A rank that runs `network` on a device, with slots 0 to `num_slots`-1; exchange: its end, of several."""

    def __init__(
        self,
        network: Network,
        device: Device,
        tables: PageTables,
        num_slots: int,
        max_seq_len: int,
        max_num_tokens: int,
        exchange: Exchange | None,
    ):
        self.network = network
        self.device = device
        self.stream = device.stream
        self.exchange = exchange
        self._num_slots = num_slots
        self._limit = max_seq_len
        self._largest_pass = max_num_tokens + num_slots
        device.use()
        integer = engine_of(network.embedding).program.tensors["token_ids"].dtype
        self._kernels = Kernels(wide=integer.itemsize == 8)
        self._buffer = Buffers(self._largest_pass)
        self._logit_buffers = dict[tuple[str, ...], cuda.Array]()
        self._tuned: dict[int, int] = {}  # each step with prompts asks for three
        self.state = DecodeState(num_slots, max_seq_len, integer)
        self.verified = DecodeState(MOST_VERIFIED, max_seq_len, integer)  # by token of a step that verifies drafts
        self._mask = _mask_of_engines(network)
        (logits,) = (io for io in network.exit.signature.outputs if io.name == "logits")
        self.splits_logits = logits.shape[1] != network.vocab_size
        if exchange is not None:  # what this rank and all ranks tell of a step's tokens: `Kernels.largest`
            self._told = cuda.empty((num_slots + 1, 2), "f4")  # sent on behind its end
            self._told_by_all = cuda.empty((num_slots, 2 * exchange.world), "f4")
        self.has_base = network.exit.base is not None or any(block.base for block, _ in network.layers)
        every_row = np.arange(max(num_slots, MOST_VERIFIED), dtype=integer)  # the logits of a decode step
        self._every_row = cuda.empty(every_row.shape, integer)
        self.stream.upload(self._every_row, every_row)
        # Of passes of prompts. None where engines have profiles: a context keeps the sizes of one pass.
        has_profiles = engine_of(network.embedding).program.by_profiles
        captured = CAPTURED_TOKENS if exchange is None else CAPTURED_TOKENS_OF_RANKS
        self.captured_tokens = 0 if has_profiles else captured
        self._prompts = PromptInputs(self._largest_pass, num_slots, integer, self.captured_tokens, self.stream)
        self._graphs: dict[tuple, cuda.Graph | None] = {}  # of parts of passes, by their key; None after the first time
        sizes = num_slots, max_seq_len, MOST_VERIFIED, self._largest_pass
        self._attention = make_attention(network, tables, *sizes, self._kernels, self._buffer, self.stream)
        self.attentions = list(dict.fromkeys(self._attention))
        self._prompt_blocks: dict[bool, PromptBlocks] = {}  # with adapters or without; made with the first pass
        self.step_calls: dict[tuple, StepCalls] = {}
        # of a step, and of the one behind it
        self.fetched = [(cuda.pinned((num_slots,), "i4"), cuda.Event()) for _ in range(2)]
        self.fetched_verified = cuda.pinned((MOST_VERIFIED,), "i4")

    @property
    def paged(self) -> list[PagedAttention]:
        """Return all attention, where a slot's content can be moved (`PageTables.shares`)."""
        return cast(list[PagedAttention], self.attentions)

    def reserve(self, ends: Mapping[int, int], lengths: np.ndarray) -> None:
        """Make room for a step: see `Attention.reserve`."""
        if any(attention.reserve(ends, lengths) for attention in self.attentions):
            self.step_calls.clear()

    def tuned_for(self, num_tokens: int) -> int:
        """Return the tokens that the profile which takes `num_tokens` is tuned for: a block takes as long."""
        if num_tokens in self._tuned:
            return self._tuned[num_tokens]
        piece = self.network.layers[-1][0].pieces[0]
        program = engine_of(piece).program
        inputs = [io for io in piece.signature.inputs if io.name in program.dynamic]  # none of adapters
        shapes = {io.name: tuple(num_tokens if isinstance(size, str) else size for size in io.shape) for io in inputs}
        tuned = program.tuned_for(shapes)
        found = self._tuned[num_tokens] = max(tuned[io.name][io.shape.index("num_tokens")] for io in inputs)
        return found

    def decode_logits(self, row: int, verified: bool = False) -> cuda.Array:
        """Return a row's logits of the last step that decodes, or verifies, [1, vocab_size]."""
        return self._logit_buffers[("verify" if verified else "decode",)][row : row + 1]

    def gather(self, step: StepCalls) -> None:
        """Gather the logits of a step from the ranks' parts, as its calls left them."""
        assert step.own_logits is not None
        self._end.gather(step.own_logits, step.logits)

    def decode_calls(self, count: int, adapted: bool, drawn: bool, verified: bool = False) -> StepCalls:
        """Return the calls that decode slots 0 to `count`-1; adapted, drawn: some are. Nothing is launched.

        verified: rows are tokens of a step that verifies drafts.
        """
        key = (count, adapted, drawn, verified, *(attention.capacity for attention in self.attentions))
        step = self.step_calls.get(key)
        if step is None:
            state = self.verified if verified else self.state
            arrays = state.token_ids, state.positions, state.rows, state.adapter_ids
            tokens, positions, rows, adapters = (array[:count] for array in arrays)
            inputs = Inputs(tokens, positions, rows, self._every_row[:count], rows, positions, adapters)
            step = self.step_calls[key] = self._make_decode_calls(inputs, adapted, drawn, verified)
        return step

    def send(
        self, decoding: Sequence[Advance], chunks: Sequence[Advance], write: bool = True
    ) -> tuple[Inputs, PassTokens]:
        """Send what a pass of chunks, behind rows that decode, reads: see `PromptInputs.send` and `send_mixed`."""
        adapters = self.state.adapters
        found = self.state.token_ids
        if decoding:
            inputs, tokens = self._prompts.send_mixed(decoding, chunks, found, adapters, write)
        else:
            inputs, tokens = self._prompts.send(chunks, write, adapters)
        for attention in self.attentions:
            attention.begin(tokens)
        return inputs, tokens

    def layout(self, inputs: Inputs, tokens: PassTokens) -> tuple[int, ...] | None:
        """Return what a pass's calls depend on beside array contents; None: it is not captured whole."""
        if tokens.num_tokens > min(CAPTURED_WHOLE, self.captured_tokens):
            return None
        found = [tokens.num_tokens, tokens.decoding.shape[0], inputs.logit_rows.shape[0]]
        for attention in self.attentions:
            layout = attention.layout(tokens)
            if layout is None:
                return None
            found += layout
        return tuple(found)

    def run_prompts(self, inputs: Inputs, tokens: PassTokens, adapted: bool, drawn: bool) -> Iterator[StepCalls]:
        """Put a pass of chunks on the stream; yield the step where other ranks go first.

        The rank's device is used after each, whatever was used meanwhile. adapted, drawn: as of `decode_calls`.
        """
        self.device.use()
        blocks = self._blocks_for_prompts(adapted)
        requests = inputs.logit_rows.shape[0]
        logits = self._logits("prompts", (requests, self.network.vocab_size), blocks.logits.dtype)
        own = blocks.logits[:requests] if self.splits_logits and not drawn else None
        whole = _whole(self.network, blocks.blocks[-2].values, tokens.num_tokens)
        step = StepCalls([], logits, own, whole, warm=True)
        for parts in self._prompt_parts(blocks, inputs, tokens, logits, adapted, drawn):
            for part in parts:
                step.parts.append(part)
                for _ in self._run(part):
                    yield step
                    self.device.use()
            yield step
            self.device.use()

    def _prompt_parts(
        self, blocks: PromptBlocks, inputs: Inputs, tokens: PassTokens, logits: cuda.Array, adapted: bool, drawn: bool
    ) -> Iterator[Iterable[Part]]:
        """Yield the parts of the embedding, of each layer, and of the exit."""
        total = tokens.num_tokens
        a_pass = PromptPass(blocks, total, inputs.logit_rows.shape[0])
        mask = self._mask_calls(inputs, self._mask_array(inputs, adapted))

        def part(number: int, make: Callable[[], Calls]) -> Part:
            return Part(("block", number, total, adapted) if total <= self.captured_tokens else None, make)

        def of_layer(index: int, attention: Attention) -> Iterator[Part]:
            def make() -> Calls:
                own = {name: array[:total] for name, array in values.items()}
                return [*a_pass.calls(index + 1, "block"), *attention.token_calls(index, own, inputs.rows)]

            values = a_pass.values(index)
            # Plans are made here, for which the host may wait: before the block, whose sums wait for other ranks.
            behind = list(attention.parts(index, values, tokens))
            yield part(index + 1, make)
            yield from behind

        def leave() -> Calls:
            found = blocks.logits[: logits.shape[0]]
            return [*a_pass.calls(-1, "exit"), *self._last_calls(found, logits, inputs, drawn, self.state)]

        yield [part(0, lambda: mask + a_pass.calls(0, "embedding"))]
        for index, attention in enumerate(self._attention):
            yield of_layer(index, attention)
        yield [Part(None, leave)]

    def _run(self, part: Part) -> Iterator[None]:
        """Put a part's calls on the stream, from the second time on as a graph; yield where other ranks go first.

        A first call, as the making of a graph, may have the host wait for the device: what that waits for of another
        rank must be on its way. A library may allocate in its first call, which a capture does not take.
        """
        key = part.key
        if key is None or key not in self._graphs:
            for _, call in part.make():
                yield
                call()
            if key is not None:
                self._graphs[key] = None
            return
        graph = self._graphs[key]
        if graph is None:
            yield
            with self.stream.capture() as graph:
                for _, call in part.make():
                    call()
            self._graphs[key] = graph
            yield
        graph.launch(self.stream)

    def warm_products(self, adapted: bool) -> None:
        """Run products at many numbers of tokens: cuBLAS loads a kernel in the first call of a size."""
        self.device.use()
        blocks = self._blocks_for_prompts(adapted)
        for tokens in range(_PRODUCTS_EVERY, self._largest_pass + 1, _PRODUCTS_EVERY):
            for call in PromptPass(blocks, tokens, min(tokens, self._num_slots)).products():
                call()

    def _blocks_for_prompts(self, adapted: bool) -> PromptBlocks:
        if adapted not in self._prompt_blocks:
            self._prompt_blocks[adapted] = PromptBlocks(list(self._bind_prompts(adapted)))
        return self._prompt_blocks[adapted]

    def _make_decode_calls(self, inputs: Inputs, adapted: bool, drawn: bool, verified: bool) -> StepCalls:
        """Return the calls for rows of one token; nothing is put on the stream."""
        of, state = ("verify", self.verified) if verified else ("decode", self.state)
        total = inputs.token_ids.shape[0]
        dims = {"num_tokens": total, "num_requests": inputs.logit_rows.shape[0]}
        values = inputs.values()
        mask = self._mask_array(inputs, adapted)
        network = self.network

        def prepare(name: str, block: Block) -> Calls:
            # what the last call sums
            calls = Calls()
            summed = None
            for step in self._steps(block.for_rows(adapted), values, dims, of):
                if isinstance(step, _Sum):
                    calls.append(("sum", functools.partial(self._end.sum, step.values)))
                    summed = step.values
                    continue
                engine = engine_of(step.piece)
                given = (_by_engine(step, mask), step.outputs)
                if (
                    summed
                    and self._end.is_small(summed)
                    and (pair := engine.prepare_summing(self._end, summed, *given))
                ):
                    calls[-1:] = ("sum", pair[0]), (name, pair[1])
                else:
                    calls.append((name, engine.prepare(*given, own=True)))
                summed = None
            return calls

        calls = self._mask_calls(inputs, mask) + prepare("embedding", network.embedding)
        for index, (block, layer_attention) in enumerate(network.layers):
            calls += prepare("block", block)
            self._add_attention(layer_attention, values, total)
            if verified:
                calls += self.paged[0].verify_calls(index, values, inputs.rows)
            else:
                calls += self._attention[index].decode_calls(index, values, inputs.rows)
        whole = _whole(network, values, total)
        calls += prepare("exit", network.exit)
        made = values["logits"]
        logits = self._logits(of, (total, network.vocab_size), made.dtype)
        calls += self._last_calls(made, logits, inputs, drawn, state)
        own = made if self.splits_logits and not drawn else None
        return StepCalls([Part(None, lambda: calls)], logits, own, whole)

    def _mask_array(self, inputs: Inputs, adapted: bool) -> cuda.Array | None:
        """Return the mask that engines read in place of `IDS`; None where none does."""
        if not adapted or self._mask is None:
            return None
        columns, _, dtype = self._mask
        return self._buffer("adapter mask", (inputs.token_ids.shape[0], columns), dtype)

    def _mask_calls(self, inputs: Inputs, mask: cuda.Array | None) -> Calls:
        if mask is None or self._mask is None:
            return []
        kernels = self._kernels
        stream = self.stream
        ids = inputs.adapter_ids
        rank = self._mask[1]
        return [("adapters", lambda: kernels.adapter_mask(stream, ids, mask, rank))]

    def _last_calls(
        self, made: cuda.Array, logits: cuda.Array, inputs: Inputs, drawn: bool, state: DecodeState
    ) -> Calls:
        """Return the calls from logits, or a rank's part of them, to tokens; gathered where any is drawn."""
        # not `self`, which holds the step
        kernels = self._kernels
        stream = self.stream
        limit = self._limit
        slots = inputs.slots
        held = inputs.held
        found = state.found, state.token_ids, state.positions
        draw = ("next token", lambda: kernels.advance(stream, logits, slots, held, limit, state.samplings, *found))
        if not self.splits_logits:
            return [draw]
        end, (rows, columns) = self._end, made.shape
        if drawn:
            return [("gather", functools.partial(end.gather, made, logits)), draw]
        told = self._told[:rows]
        by_all = self._told_by_all[:rows]
        first = end.rank * columns
        return [
            ("next token", lambda: kernels.largest(stream, made, first, slots, told)),
            ("gather", functools.partial(end.gather, told, by_all)),
            ("next token", lambda: kernels.choose(stream, by_all, slots, held, limit, *found)),
        ]

    def _bind_prompts(self, adapted: bool) -> Iterator[DeviceBlock]:
        """Yield the blocks of a pass of prompts, bound to buffers for the largest."""
        arrays = self._prompts.arrays
        network = self.network
        largest = self._largest_pass
        values = arrays.values()
        mask = self._mask_array(arrays, adapted)
        dims = {"num_tokens": largest, "num_requests": self._num_slots}
        for block, layer_attention in ((network.embedding, None), *network.layers, (network.exit, None)):
            parts: list[BoundPiece | BoundSum] = []
            for step in self._steps(block.for_rows(adapted), values, dims, "prompts"):
                if isinstance(step, _Sum):
                    parts.append(BoundSum(self._end.sum, step.values, step.dim))
                else:
                    engine = engine_of(step.piece)
                    given = _by_engine(step, mask)
                    dynamic = engine.program.dynamic
                    declared: dict[str, tuple[int | str, ...]] = {
                        io.name: io.shape for io in step.piece.signature.inputs
                    }
                    declared |= {name: ("num_tokens", *given[name].shape[1:]) for name in given if mask_rank(name)}
                    shapes = tuple((name, declared[name]) for name in given if name in dynamic)
                    parts.append(BoundPiece(engine.bind(given, step.outputs), engine.program, shapes))
            if layer_attention is not None:
                self._add_attention(layer_attention, values, largest)
            yield DeviceBlock(parts, dict(values))

    def _add_attention(self, layer_attention: LayerMixer, values: dict[str, cuda.Array], total: int) -> None:
        width = tuple(int(size) for size in layer_attention.attention.shape[1:])  # all but the first are numbers
        values["attention"] = self._buffer("attention", (total, *width), layer_attention.attention.numpy_dtype)

    def _steps(
        self, block: Block, values: dict[str, cuda.Array], dims: Mapping[str, int], of: str
    ) -> list[_Run | _Sum]:
        """Return what a block runs; `values` has its outputs afterwards. of: "decode", "verify" or "prompts"."""
        step_inputs = [io for io in block.signature.inputs if io.name not in block.adapters]
        read = {io.key for io in step_inputs}
        made = {io.key for io in block.signature.outputs}
        # Later pieces, and later blocks, may read what is there, but for what this block makes anew.
        taken = {array.address for key, array in values.items() if key in read or key not in made}
        known = {**block.adapters, **{io.name: values[io.key] for io in step_inputs}}
        own = {io.name for io in block.signature.outputs}
        steps: list[_Run | _Sum] = []
        for piece in block.pieces:
            inputs = {io.name: known[io.name] for io in piece.signature.inputs}
            outputs = {}
            for io in piece.signature.outputs:
                name = piece.sums.get(io.name, io.name)
                key = IO(name, io.dtype, io.shape).key if name in own else f"piece/{name}"
                outputs[io.name] = self._output(key, io, dims, taken, of)
                taken.add(outputs[io.name].address)
            steps.append(_Run(piece, inputs, outputs))
            known |= outputs
            for io in piece.signature.outputs:
                if io.name in piece.sums:
                    known[piece.sums[io.name]] = outputs[io.name]
                    steps.append(_Sum(outputs[io.name], str(io.shape[0])))
        values.update({io.key: known[io.name] for io in block.signature.outputs})
        return steps

    def _output(self, key: str, io: IO, dims: Mapping[str, int], taken: set[int], of: str) -> cuda.Array:
        shape = tuple(dims[dim] if isinstance(dim, str) else dim for dim in io.shape)
        if key == "logits":
            return self._logits(of, shape, io.numpy_dtype)
        number = 0
        while True:
            array = self._buffer(f"{key}/{number}" if number else key, shape, io.numpy_dtype)
            if array.address not in taken:
                return array
            number += 1

    def _logits(self, of: str, shape: Sequence[int], dtype: np.dtype) -> cuda.Array:
        """Return a buffer of logits, a row for each request: [num_requests, vocab_size] or a rank's part of it."""
        is_part = shape[1] != self.network.vocab_size
        key = (of, "part") if is_part else (of,)
        if key not in self._logit_buffers:
            requests = MOST_VERIFIED if of == "verify" else self._num_slots
            rows = requests + is_part  # what is sent to other ranks goes on behind its end
            self._logit_buffers[key] = cuda.empty((rows, *shape[1:]), dtype, "logits")
        return self._logit_buffers[key][: shape[0]]

    @property
    def _end(self) -> Exchange:
        assert self.exchange is not None  # sums and gathers are of several ranks
        return self.exchange


def _by_engine(step: _Run, mask: cuda.Array | None) -> Arrays:
    """Return the inputs as the engine names them: a mask has the name of its rank in place of `IDS`."""
    masks = [name for name in engine_of(step.piece).program.tensors if mask_rank(name)]
    if mask is None or not masks:
        return step.inputs
    return {masks[0] if name == IDS else name: mask if name == IDS else a for name, a in step.inputs.items()}


def _mask_of_engines(network: Network) -> tuple[int, int, np.dtype] | None:
    """Return (columns, room of each adapter, dtype) of the blocks' mask; None where none takes adapters."""
    for block in (*(block for block, _ in network.layers), network.exit):
        for piece in block.pieces:
            for name, tensor in engine_of(piece).program.tensors.items():
                if rank := mask_rank(name):
                    return int(tensor.shape[1]), rank, tensor.dtype
    return None


def _whole(network: Network, values: Arrays, total: int) -> list[cuda.Array]:
    others = ("attention", "logit_rows", *network.exit.adapters)
    names = [io.key for io in network.exit.signature.inputs if io.name not in others]
    return [values[name][:total] for name in names]


def engine_of(of: Block | ShardCall) -> GpuExecutable:
    """Return the executable of a block or of a rank's call, which is always of a GPU here."""
    return cast(GpuExecutable, of.run)


def most_exchanged(network: Network, num_slots: int, max_num_tokens: int) -> tuple[int, int]:
    """Return the most bytes of a sum, and of a rank's part of what is gathered."""
    sizes = {"num_tokens": max_num_tokens + num_slots, "num_requests": num_slots}

    def nbytes(io: IO) -> int:
        dims = [sizes[size] if isinstance(size, str) else size for size in io.shape]
        return math.prod(dims) * io.numpy_dtype.itemsize

    blocks = (network.embedding, *(block for block, _ in network.layers), network.exit)
    sums = [
        nbytes(io)
        for block in blocks
        for piece in block.pieces
        for io in piece.signature.outputs
        if io.name in piece.sums
    ]
    told = 8 * num_slots
    return max(sums, default=0), max(
        told, *(nbytes(io) for io in network.exit.signature.outputs if io.name == "logits")
    )
