"""A rank: the engines, buffers and cache of one device, and the calls of a step. Callers make its device current."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from lockstep.artifacts.adapters import IDS, mask_rank
from lockstep.artifacts.signature import IO, concrete_shape
from lockstep.step.advance import Advance
from lockstep.step.network import Block, LayerMixer, Network, ShardCall
from lockstep.step.observer import Observer
from lockstep.step.packing import PackedTokens
from lockstep.step.pages import PageTables
from lockstep_gpu import cuda
from lockstep_gpu.attention.base import SMALLEST_CHUNK, Arrays, Attention, Calls, PagedAttention, Part, PassTokens
from lockstep_gpu.attention.make import make_attention
from lockstep_gpu.decode_state import DecodeState
from lockstep_gpu.device import Device
from lockstep_gpu.kernels.step_kernels import Kernels
from lockstep_gpu.logits_tables import LogitsTables
from lockstep_gpu.program import GpuExecutable
from lockstep_gpu.prompt_blocks import BoundPiece, BoundSum, DeviceBlock, PromptBlocks, PromptPass
from lockstep_gpu.prompts import CAPTURED_TOKENS, CAPTURED_TOKENS_OF_RANKS, CAPTURED_WHOLE, Inputs, PromptInputs
from lockstep_gpu.ranks.all_reduce import Exchange
from lockstep_gpu.sampling_records import LOGPROBS

# Tokens of a step that verifies drafts: more take longer than reading the weights does.
MAX_VERIFY_TOKENS = 128
_WARM_GEMM_STEP = 32  # tokens between the sizes of GEMMs that are warmed up: kernels have tiles of 64 tokens and more


@dataclass
class StepCalls:
    """The calls of a step of one layout, on buffers that all steps share.

    Attributes:
        logits: [rows, vocab_size]. With `shard_logits`, `Rank.gather` fills them.
        shard_logits: The rank's shard of the logits, if the calls don't gather them.
        exit_inputs: The inputs of the lm_head block that are equal on all ranks.
        graph: The captured calls, from the second run on.
        warm: The calls have run once.
        observed: The calls copy values to the host, so that they can't be captured.
    """

    parts: list[Part]
    logits: cuda.Array
    shard_logits: cuda.Array | None
    exit_inputs: list[cuda.Array]
    graph: cuda.Graph | None = None
    warm: bool = False
    observed: bool = False

    @functools.cached_property
    def calls(self) -> Calls:
        """Return all calls, each with the name that its time is reported under: embedding, block, attention, ..."""
        calls = Calls()
        for part in self.parts:
            calls += part.make()
        return calls


@dataclass(frozen=True)
class _EngineCall:
    """A call of a piece's engine on arrays."""

    piece: ShardCall
    inputs: Arrays
    outputs: Arrays


@dataclass(frozen=True)
class _AllReduce:
    """An all-reduce of `values` in place; dim: the name of their first dimension."""

    values: cuda.Array
    dim: str


class Buffers:
    """Named device arrays of the largest size that any step needs, which all steps and layers share."""

    def __init__(self, largest_pass: int):
        # Fused attention pads a chunk to a power of two: it reads and overwrites rows after the chunk's last token.
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
    """A rank that runs `network` on a device, for slots 0 to `num_slots`-1; exchange: None for a single rank."""

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
        self.logit_buffers = dict[tuple[str, ...], cuda.Array]()
        self._tuned: dict[int, int] = {}  # results of `tuned_for`
        logits_tables = LogitsTables(num_slots, network.vocab_size)
        self.state = DecodeState(num_slots, max_seq_len, integer, logits_tables)
        # Its rows are tokens of any slots, and use no tables.
        self.verify_state = DecodeState(MAX_VERIFY_TOKENS, max_seq_len, integer, logits_tables)
        self._mask = _mask_of_engines(network)
        (logits,) = (io for io in network.exit.signature.outputs if io.name == "logits")
        self.splits_logits = logits.shape[1] != network.vocab_size
        if exchange is not None:  # see `Kernels.largest`
            self._rank_argmax = cuda.empty((num_slots + 1, 2), "f4")  # gathers read on to a multiple of 16 bytes
            self._gathered_argmax = cuda.empty((num_slots, 2 * exchange.world), "f4")
        self.has_base = network.exit.base is not None or any(block.base for block, _ in network.layers)
        all_rows = np.arange(max(num_slots, MAX_VERIFY_TOKENS), dtype=integer)
        self._all_rows = cuda.empty(all_rows.shape, integer)
        self.stream.upload(self._all_rows, all_rows)
        if engine_of(network.embedding).program.by_profiles:
            self.captured_tokens = 0  # a context keeps the sizes of one pass, so no graph of another stays valid
        else:
            self.captured_tokens = CAPTURED_TOKENS if exchange is None else CAPTURED_TOKENS_OF_RANKS
        self.prompts = PromptInputs(self._largest_pass, num_slots, integer, self.captured_tokens, self.stream)
        self.graphs: dict[tuple, cuda.Graph | None] = {}  # by the key of a part; None: it has run once
        sizes = num_slots, max_seq_len, MAX_VERIFY_TOKENS, self._largest_pass
        self._layer_attention = make_attention(network, tables, *sizes, self._kernels, self._buffer, self.stream)
        self.attentions = list(dict.fromkeys(self._layer_attention))
        self._prompt_blocks: dict[bool, PromptBlocks] = {}  # with or without adapters; bound at the first pass
        self.step_calls: dict[tuple, StepCalls] = {}
        # Two buffers: a speculative step is enqueued before the tokens of the previous one are read.
        self.fetched = [
            (cuda.pinned((num_slots,), "i4"), cuda.pinned((num_slots,), LOGPROBS), cuda.Event()) for _ in range(2)
        ]
        self.fetched_verified = cuda.pinned((MAX_VERIFY_TOKENS,), "i4")
        self._observer: Observer | None = None

    @property
    def paged(self) -> list[PagedAttention]:
        """Return all attentions of a model whose slots can be moved (`PageTables.shares` is not None)."""
        return cast(list[PagedAttention], self.attentions)

    def observe(self, observer: Observer | None) -> None:
        """Show later steps to an observer: see `Executor.observe`."""
        self._observer = observer
        self.step_calls.clear()

    def reserve(self, lengths_after: Mapping[int, int], lengths: np.ndarray) -> None:
        """Make room for a step: see `Attention.reserve`."""
        if any(attention.reserve(lengths_after, lengths) for attention in self.attentions):
            self.step_calls.clear()

    def tuned_for(self, num_tokens: int) -> int:
        """Return the tokens that the profile for `num_tokens` is tuned for: a block costs as much as these."""
        if num_tokens not in self._tuned:
            piece = self.network.layers[-1][0].pieces[0]
            program = engine_of(piece).program
            inputs = [io for io in piece.signature.inputs if io.name in program.dynamic]  # adapters' are not
            shapes = {io.name: concrete_shape(io.shape, {"num_tokens": num_tokens}) for io in inputs}
            tuned = program.tuned_for(shapes)
            self._tuned[num_tokens] = max(tuned[io.name][io.shape.index("num_tokens")] for io in inputs)
        return self._tuned[num_tokens]

    def decode_logits(self, row: int, verifies: bool = False) -> cuda.Array:
        """Return a row's logits of the last decode step (or the last step that verifies), [1, vocab_size]."""
        kind = "verify" if verifies else "decode"
        return self.logit_buffers[(kind,)][row : row + 1]

    def gather(self, step: StepCalls) -> None:
        """Gather the logits of the step that ran last from the ranks' shards."""
        assert step.shard_logits is not None
        self._exchange.gather(step.shard_logits, step.logits)

    def decode_calls(self, count: int, adapted: bool, drawn: bool, verifies: bool = False) -> StepCalls:
        """Return the calls of a decode step of rows 0 to `count`-1. Nothing is launched.

        adapted, drawn: some row has an adapter, or draws its token. verifies: rows are tokens of any slots.
        """
        key = (count, adapted, drawn, verifies, *(attention.capacity for attention in self.attentions))
        step = self.step_calls.get(key)
        if step is None:
            state = self.verify_state if verifies else self.state
            rows = state.rows[:count]
            positions = state.positions[:count]
            inputs = Inputs(
                token_ids=state.token_ids[:count],
                position_ids=positions,
                rows=rows,
                logit_rows=self._all_rows[:count],
                slots=rows,
                logit_positions=positions,
                adapter_ids=state.adapter_ids[:count],
            )
            step = self.step_calls[key] = self._make_decode_calls(inputs, adapted, drawn, verifies)
        return step

    def send(
        self, decoding: Sequence[Advance], chunks: Sequence[Advance], write: bool = True
    ) -> tuple[Inputs, PassTokens]:
        """Upload the inputs of a prefill pass: see `PromptInputs.send` and `PromptInputs.send_mixed`."""
        adapters = self.state.adapters
        previous_tokens = self.state.token_ids
        if decoding:
            inputs, tokens = self.prompts.send_mixed(decoding, chunks, previous_tokens, adapters, write)
        else:
            inputs, tokens = self.prompts.send(chunks, write, adapters)
        for attention in self.attentions:
            attention.begin(tokens)
        return inputs, tokens

    def layout(self, inputs: Inputs, tokens: PassTokens) -> tuple[int, ...] | None:
        """Return all that a pass's calls depend on, except array contents; None: the pass can't be captured whole."""
        if tokens.num_tokens > min(CAPTURED_WHOLE, self.captured_tokens) or self._observer is not None:
            return None
        layout = [tokens.num_tokens, tokens.decoding.shape[0], inputs.logit_rows.shape[0]]
        for attention in self.attentions:
            attention_layout = attention.layout(tokens)
            if attention_layout is None:
                return None
            layout += attention_layout
        return tuple(layout)

    def run_prompts(self, inputs: Inputs, tokens: PassTokens, adapted: bool, drawn: bool) -> Iterator[StepCalls]:
        """Enqueue a prefill pass; yield where other ranks must enqueue their calls first.

        Makes the rank's device current again after each yield. adapted, drawn: as for `decode_calls`.
        """
        self.device.use()
        blocks = self._blocks_for_prompts(adapted)
        requests = inputs.logit_rows.shape[0]
        logits = self._logits("prompts", (requests, self.network.vocab_size), blocks.logits.dtype)
        shard_logits = blocks.logits[:requests] if self.splits_logits and not drawn else None
        exit_inputs = _exit_inputs(self.network, blocks.blocks[-2].values, tokens.num_tokens)
        step = StepCalls([], logits, shard_logits, exit_inputs, warm=True)
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
        prompt_pass = PromptPass(blocks, total, inputs.logit_rows.shape[0])
        mask_calls = self._mask_calls(inputs, self._mask_array(inputs, adapted))
        is_captured = total <= self.captured_tokens and self._observer is None
        last = len(self._layer_attention)

        def block_part(number: int, make: Callable[[], Calls]) -> Part:
            return Part(("block", number, total, adapted) if is_captured else None, make)

        def observed(number: int, part: str, layer: int) -> Calls:
            block = self.network.blocks[number]
            before, after = (device_block.values for device_block in blocks.blocks[number - 1 : number + 1])
            return self._observed(part, layer, block, before, after, inputs)

        def layer_parts(index: int, attention: Attention) -> Iterator[Part]:
            def make() -> Calls:
                token_values = {name: array[:total] for name, array in values.items()}
                calls = prompt_pass.calls(index + 1, "block") + observed(index + 1, "block", index)
                return calls + attention.token_calls(index, token_values, inputs.rows)

            values = prompt_pass.values(index)
            # cuDNN's plans are made here, and the host may wait for that: before the block is enqueued, whose
            # all-reduces wait for other ranks.
            attention_parts = list(attention.parts(index, values, tokens))
            yield block_part(index + 1, make)
            yield from attention_parts

        def exit_calls() -> Calls:
            computed = blocks.logits[: logits.shape[0]]
            calls = prompt_pass.calls(-1, "exit") + observed(last + 1, "exit", last - 1)
            return calls + self._last_calls(computed, logits, inputs, drawn, self.state)

        yield [block_part(0, lambda: self._observed_tokens(inputs) + mask_calls + prompt_pass.calls(0, "embedding"))]
        for index, attention in enumerate(self._layer_attention):
            yield layer_parts(index, attention)
        yield [Part(None, exit_calls)]

    def _run(self, part: Part) -> Iterator[None]:
        """Enqueue a part's calls, as a graph from the second time on; yield where other ranks must go first.

        A first call, and a capture, may make the host wait for the device, which may be waiting for kernels of other
        ranks: those must be enqueued before. A library may allocate memory in its first call, which can't be captured.
        """
        key = part.key
        if key is None or key not in self.graphs:
            for _, call in part.make():
                yield
                call()
            if key is not None:
                self.graphs[key] = None
            return
        graph = self.graphs[key]
        if graph is None:
            yield
            with self.stream.capture() as graph:
                for _, call in part.make():
                    call()
            self.graphs[key] = graph
            yield
        graph.launch(self.stream)

    def warm_products(self, adapted: bool) -> None:
        """Run the GEMMs at many numbers of tokens: cuBLAS loads a kernel in the first call of a size."""
        self.device.use()
        blocks = self._blocks_for_prompts(adapted)
        for tokens in range(_WARM_GEMM_STEP, self._largest_pass + 1, _WARM_GEMM_STEP):
            for call in PromptPass(blocks, tokens, min(tokens, self._num_slots)).products():
                call()

    def _blocks_for_prompts(self, adapted: bool) -> PromptBlocks:
        if adapted not in self._prompt_blocks:
            self._prompt_blocks[adapted] = PromptBlocks(list(self._bind_prompts(adapted)))
        return self._prompt_blocks[adapted]

    def _make_decode_calls(self, inputs: Inputs, adapted: bool, drawn: bool, verifies: bool) -> StepCalls:
        """Return the calls for rows of one token; nothing is enqueued."""
        kind = "verify" if verifies else "decode"
        state = self.verify_state if verifies else self.state
        total = inputs.token_ids.shape[0]
        dims = {"num_tokens": total, "num_requests": inputs.logit_rows.shape[0]}
        values = inputs.values()
        mask = self._mask_array(inputs, adapted)
        network = self.network

        def block_calls(name: str, block: Block, layer: int = -1) -> Calls:
            before = dict(values)
            calls = self._prepare(name, self._block_steps(block.for_rows(adapted), values, dims, kind), mask)
            return calls + self._observed(name, layer, block, before, values, inputs)

        calls = self._observed_tokens(inputs) + self._mask_calls(inputs, mask)
        calls += block_calls("embedding", network.embedding)
        for index, (block, mixer) in enumerate(network.layers):
            calls += block_calls("block", block, index)
            self._add_attention_output(mixer, values, total)
            if verifies:
                calls += self.paged[0].verify_calls(index, values, inputs.rows)
            else:
                calls += self._layer_attention[index].decode_calls(index, values, inputs.rows)
        exit_inputs = _exit_inputs(network, values, total)
        calls += block_calls("exit", network.exit, len(network.layers) - 1)
        computed = values["logits"]  # a shard of the logits, if ranks split them
        logits = self._logits(kind, (total, network.vocab_size), computed.dtype)
        calls += self._last_calls(computed, logits, inputs, drawn, state)
        shard_logits = computed if self.splits_logits and not drawn else None
        observed = self._observer is not None
        return StepCalls([Part(None, lambda: calls)], logits, shard_logits, exit_inputs, observed=observed)

    def _observed_tokens(self, inputs: Inputs) -> Calls:
        """Return the call that shows a step's tokens to the observer, if there is one."""
        observer = self._observer
        if observer is None:
            return []

        def show() -> None:
            arrays = (inputs.token_ids, inputs.position_ids, inputs.rows)
            observer.step(PackedTokens(*(self.fetch(array).astype(np.int64) for array in arrays)))

        return [("observer", show)]

    def _observed(self, part: str, layer: int, block: Block, before: Arrays, after: Arrays, inputs: Inputs) -> Calls:
        """Return the call that shows a block to the observer, if there is one.

        before, after: the values by key, of this step or of the largest one.
        """
        observer = self._observer
        if observer is None or layer < 0:
            return []
        dims = {"num_tokens": inputs.token_ids.shape[0], "num_requests": inputs.logit_rows.shape[0]}

        def arrays(ios: Sequence[IO], values: Arrays) -> Arrays:
            return {io.name: values[io.key][: dims[str(io.shape[0])]] for io in ios}

        read = arrays(block.signature.inputs, before)
        written = arrays(block.signature.outputs, after)

        def show() -> None:
            given, made = ({name: self.fetch(array) for name, array in side.items()} for side in (read, written))
            if part == "exit":  # without rows of slots that are in no request
                is_request = self.fetch(inputs.slots) >= 0
                given["logit_rows"] = given["logit_rows"][is_request]
                made = {name: array[is_request] for name, array in made.items()}
            observer.block(part, layer, given, made)

        return [("observer", show)]

    def fetch(self, array: cuda.Array) -> np.ndarray:
        """Wait for an array and return it."""
        host = np.empty(array.shape, array.dtype)
        self.stream.download(host, array)
        self.stream.synchronize()
        return host

    def _prepare(self, name: str, steps: Iterable[_EngineCall | _AllReduce], mask: cuda.Array | None) -> Calls:
        """Return the calls of a block for a captured graph."""
        calls = Calls()
        summed: cuda.Array | None = None  # the values that the last call all-reduces
        for step in steps:
            if isinstance(step, _AllReduce):
                calls.append(("sum", functools.partial(self._exchange.sum, step.values)))
                summed = step.values
                continue
            engine = engine_of(step.piece)
            inputs = _engine_inputs(step, mask)
            fused = None
            if summed is not None and self._exchange.is_small(summed):
                fused = engine.prepare_fused_all_reduce(self._exchange, summed, inputs, step.outputs)
            if fused is None:
                calls.append((name, engine.prepare(inputs, step.outputs, captured=True)))
            else:
                first_kernel, other_kernels = fused
                calls[-1:] = ("sum", first_kernel), (name, other_kernels)
            summed = None
        return calls

    def _mask_array(self, inputs: Inputs, adapted: bool) -> cuda.Array | None:
        """Return the mask that engines read instead of `IDS`; None if no engine does."""
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
        self, computed: cuda.Array, logits: cuda.Array, inputs: Inputs, drawn: bool, state: DecodeState
    ) -> Calls:
        """Return the calls that choose tokens from the computed logits, or from the rank's shard of them.

        A greedy choice exchanges each rank's argmax only; a draw gathers the shards into `logits`.
        """
        # The lambdas hold these locals and not `self`, which holds the step: no reference cycle.
        kernels = self._kernels
        stream = self.stream
        limit = self._limit
        slots = inputs.slots
        positions = inputs.logit_positions
        out = state.next_tokens, state.token_ids, state.positions
        given = inputs.token_ids, inputs.logit_rows, state.samplings, state.logits_tables.arrays
        draw = ("next token", lambda: kernels.advance(stream, logits, slots, positions, limit, *given, *out))
        if not self.splits_logits:
            return [draw]
        exchange = self._exchange
        if drawn:
            return [("gather", functools.partial(exchange.gather, computed, logits)), draw]
        rows, columns = computed.shape
        rank_argmax = self._rank_argmax[:rows]
        gathered_argmax = self._gathered_argmax[:rows]
        first_token = exchange.rank * columns
        return [
            ("next token", lambda: kernels.largest(stream, computed, first_token, slots, rank_argmax)),
            ("gather", functools.partial(exchange.gather, rank_argmax, gathered_argmax)),
            ("next token", lambda: kernels.choose(stream, gathered_argmax, slots, positions, limit, *out)),
        ]

    def _bind_prompts(self, adapted: bool) -> Iterator[DeviceBlock]:
        """Yield the blocks of a prefill pass, bound to buffers of the largest pass."""
        arrays = self.prompts.arrays
        network = self.network
        largest = self._largest_pass
        values = arrays.values()
        mask = self._mask_array(arrays, adapted)
        dims = {"num_tokens": largest, "num_requests": self._num_slots}
        for block, mixer in ((network.embedding, None), *network.layers, (network.exit, None)):
            parts: list[BoundPiece | BoundSum] = []
            for step in self._block_steps(block.for_rows(adapted), values, dims, "prompts"):
                if isinstance(step, _AllReduce):
                    parts.append(BoundSum(self._exchange.sum, step.values, step.dim))
                else:
                    parts.append(_bound_piece(step, mask))
            if mixer is not None:
                self._add_attention_output(mixer, values, largest)
            yield DeviceBlock(parts, dict(values))

    def _add_attention_output(self, mixer: LayerMixer, values: dict[str, cuda.Array], total: int) -> None:
        width = tuple(int(size) for size in mixer.attention.shape[1:])  # only the first dimension is dynamic
        values["attention"] = self._buffer("attention", (total, *width), mixer.attention.numpy_dtype)

    def _block_steps(
        self, block: Block, values: dict[str, cuda.Array], dims: Mapping[str, int], kind: str
    ) -> list[_EngineCall | _AllReduce]:
        """Return a block's engine calls and all-reduces; add its outputs to `values`.

        kind: "decode", "verify" or "prompts".
        """
        inputs = [io for io in block.signature.inputs if io.name not in block.adapters]
        input_keys = {io.key for io in inputs}
        output_keys = {io.key for io in block.signature.outputs}
        # Buffers that an output must not overwrite, because a later piece or block reads them: all values except those
        # that this block replaces.
        reserved = {array.address for key, array in values.items() if key in input_keys or key not in output_keys}
        arrays = {**block.adapters, **{io.name: values[io.key] for io in inputs}}
        output_names = {io.name for io in block.signature.outputs}
        steps: list[_EngineCall | _AllReduce] = []
        for piece in block.pieces:
            piece_inputs = {io.name: arrays[io.name] for io in piece.signature.inputs}
            piece_outputs = {}
            for io in piece.signature.outputs:
                name = piece.sums.get(io.name, io.name)
                key = IO(name, io.dtype, io.shape).key if name in output_names else f"piece/{name}"
                array = self._output(key, io, dims, reserved, kind)
                piece_outputs[io.name] = array
                reserved.add(array.address)
            steps.append(_EngineCall(piece, piece_inputs, piece_outputs))
            arrays |= piece_outputs
            for io in piece.signature.outputs:
                if io.name in piece.sums:
                    arrays[piece.sums[io.name]] = piece_outputs[io.name]
                    steps.append(_AllReduce(piece_outputs[io.name], str(io.shape[0])))
        values.update({io.key: arrays[io.name] for io in block.signature.outputs})
        return steps

    def _output(self, key: str, io: IO, dims: Mapping[str, int], reserved: set[int], kind: str) -> cuda.Array:
        """Return a buffer for an output, at none of the `reserved` addresses."""
        shape = concrete_shape(io.shape, dims)
        if key == "logits":
            return self._logits(kind, shape, io.numpy_dtype)
        for number in itertools.count():
            array = self._buffer(f"{key}/{number}" if number else key, shape, io.numpy_dtype)
            if array.address not in reserved:
                break
        return array

    def _logits(self, kind: str, shape: Sequence[int], dtype: np.dtype) -> cuda.Array:
        """Return a buffer of logits, [num_requests, vocab_size], or of a rank's shard of them."""
        is_shard = shape[1] != self.network.vocab_size
        key = (kind, "part") if is_shard else (kind,)
        if key not in self.logit_buffers:
            requests = MAX_VERIFY_TOKENS if kind == "verify" else self._num_slots
            rows = requests + is_shard  # gathers read on to a multiple of 16 bytes
            self.logit_buffers[key] = cuda.empty((rows, *shape[1:]), dtype, "logits")
        return self.logit_buffers[key][: shape[0]]

    @property
    def _exchange(self) -> Exchange:
        assert self.exchange is not None  # only several ranks have all-reduces and gathers
        return self.exchange


def _bound_piece(step: _EngineCall, mask: cuda.Array | None) -> BoundPiece:
    engine = engine_of(step.piece)
    inputs = _engine_inputs(step, mask)
    declared: dict[str, tuple[int | str, ...]] = {io.name: io.shape for io in step.piece.signature.inputs}
    declared |= {name: ("num_tokens", *array.shape[1:]) for name, array in inputs.items() if mask_rank(name)}
    shapes = tuple((name, declared[name]) for name in inputs if name in engine.program.dynamic)
    return BoundPiece(engine.bind(inputs, step.outputs), engine.program, shapes)


def _engine_inputs(step: _EngineCall, mask: cuda.Array | None) -> Arrays:
    """Return the inputs by the engine's names: some engines read the mask instead of `IDS`."""
    mask_names = [name for name in engine_of(step.piece).program.tensors if mask_rank(name)]
    if mask is None or not mask_names:
        return step.inputs
    inputs = {name: array for name, array in step.inputs.items() if name != IDS}
    if IDS in step.inputs:
        inputs[mask_names[0]] = mask
    return inputs


def _mask_of_engines(network: Network) -> tuple[int, int, np.dtype] | None:
    """Return (columns, rank of each adapter, dtype) of the blocks' mask; None if no block takes one."""
    for block in network.blocks:
        for piece in block.pieces:
            for name, tensor in engine_of(piece).program.tensors.items():
                if rank := mask_rank(name):
                    return int(tensor.shape[1]), rank, tensor.dtype
    return None


def _exit_inputs(network: Network, values: Arrays, total: int) -> list[cuda.Array]:
    """Return the inputs of the lm_head block that are equal on all ranks."""
    excluded = ("attention", "logit_rows", *network.exit.adapters)
    names = [io.key for io in network.exit.signature.inputs if io.name not in excluded]
    return [values[name][:total] for name in names]


def engine_of(of: Block | ShardCall) -> GpuExecutable:
    """Return the executable of a block or of a rank's call, which is always a GPU's here."""
    return cast(GpuExecutable, of.run)


def max_exchange_bytes(network: Network, num_slots: int, max_num_tokens: int) -> tuple[int, int]:
    """Return the bytes of the largest all-reduce, and of a rank's largest shard of a gather."""
    sizes = {"num_tokens": max_num_tokens + num_slots, "num_requests": num_slots}

    def nbytes(io: IO) -> int:
        return math.prod(concrete_shape(io.shape, sizes)) * io.numpy_dtype.itemsize

    largest_sum = 0
    for block in network.blocks:
        for piece in block.pieces:
            for io in piece.signature.outputs:
                if io.name in piece.sums:
                    largest_sum = max(largest_sum, nbytes(io))
    argmax_nbytes = 8 * num_slots  # an fp32 logit and an int32 token
    logits_nbytes = max(nbytes(io) for io in network.exit.signature.outputs if io.name == "logits")
    return largest_sum, max(argmax_nbytes, logits_nbytes)
