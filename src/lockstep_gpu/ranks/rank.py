"""A rank: the engines, buffers and cache of one device, and the calls of a pass. Callers make its device current."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from lockstep.artifacts.signature import IO, concrete_shape
from lockstep.step.advance import Observer, PackedTokens
from lockstep.step.network import Block, Network
from lockstep.step.pages import PageTables
from lockstep_gpu import cuda
from lockstep_gpu.attention.base import Arrays, Attention, Calls, PagedAttention, Part, PassTokens
from lockstep_gpu.attention.make import make_attention
from lockstep_gpu.device import Device
from lockstep_gpu.kernels.step_kernels import Kernels
from lockstep_gpu.logits_tables import LOGPROBS, LogitsTables
from lockstep_gpu.pass_inputs import DecodeState, Inputs, PassInputs
from lockstep_gpu.plan import CAPTURED_WHOLE, MAX_VERIFY_TOKENS, BlockChoice, PackedPass, StepLimits
from lockstep_gpu.profiling import in_ranges
from lockstep_gpu.ranks.all_reduce import Exchange
from lockstep_gpu.ranks.blocks import PrefillBlocks, PrefillPass, RankBlocks, engine_of

_WARM_GEMM_STEP = 32  # tokens between the sizes of GEMMs that are warmed up: kernels have tiles of 64 tokens and more


@dataclass
class PassCalls:
    """The calls of a pass of one layout, on buffers that all passes share.

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
        return in_ranges(calls)


class FetchedTokens(NamedTuple):
    """What a step returns to the host: page-locked arrays by slot, valid after `done`.

    tokens: int32, the next ones. logprobs: LOGPROBS, of the first rank only.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    done: cuda.Event


class Rank:
    """A rank that runs networks of the same engines on a device; exchange: None for a single rank."""

    def __init__(
        self,
        networks: Sequence[Network],
        device: Device,
        tables: PageTables,
        limits: StepLimits,
        exchange: Exchange | None,
    ):
        network = networks[0]
        self.network = network
        self._networks = networks
        self.device = device
        self.stream = device.stream
        self.exchange = exchange
        self._limits = limits
        num_slots = limits.num_slots
        max_seq_len = limits.max_seq_len
        device.use()
        integer = engine_of(network.embedding).program.tensors["token_ids"].dtype
        self._kernels = Kernels(wide=integer.itemsize == 8)
        self.blocks = RankBlocks(networks, limits, exchange)
        self._tuned: dict[int, int] = {}  # results of `tuned_for`
        logits_tables = LogitsTables(num_slots, network.vocab_size)
        self.state = DecodeState(num_slots, max_seq_len, integer, logits_tables)
        # Its rows are tokens of any slots, and use no tables.
        self.verify_state = DecodeState(MAX_VERIFY_TOKENS, max_seq_len, integer, logits_tables)
        (logits,) = (io for io in network.exit.signature.outputs if io.name == "logits")
        self.splits_logits = logits.shape[1] != network.vocab_size
        if exchange is not None:  # see `Kernels.largest`
            self._rank_argmax = cuda.empty((num_slots + 1, 2), "f4")  # gathers read on to a multiple of 16 bytes
            self._gathered_argmax = cuda.empty((num_slots, 2 * exchange.world), "f4")
        # A base block is built without adapters, for passes in which no request has one.
        self.has_base = network.exit.base is not None or any(block.base for block, _ in network.layers)
        all_rows = np.arange(max(num_slots, MAX_VERIFY_TOKENS), dtype=integer)
        self._all_rows = cuda.empty(all_rows.shape, integer)
        self.stream.upload(self._all_rows, all_rows)
        self._inputs = PassInputs(limits, integer, self.stream)
        self.graphs: dict[tuple, cuda.Graph | None] = {}  # by the key of a part; None: it has run once
        self._layer_attention = make_attention(network, tables, limits, self._kernels, self.blocks.buffer, self.stream)
        self.attentions = list(dict.fromkeys(self._layer_attention))
        self._prefill_blocks: dict[BlockChoice, PrefillBlocks] = {}  # bound at the first pass
        self._decode_passes: dict[tuple, PassCalls] = {}
        # Two buffers: a speculative step is enqueued before the tokens of the previous one are read.
        self.fetched = [
            FetchedTokens(cuda.pinned((num_slots,), "i4"), cuda.pinned((num_slots,), LOGPROBS), cuda.Event())
            for _ in range(2)
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
        self._decode_passes.clear()

    def reserve(self, lengths_after: Mapping[int, int], lengths: np.ndarray) -> None:
        """Make room for a step: see `Attention.reserve`."""
        if any(attention.reserve(lengths_after, lengths) for attention in self.attentions):
            self._decode_passes.clear()

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

    def gather(self, calls: PassCalls) -> None:
        """Gather the logits of an enqueued pass from the ranks' shards, if it left them there."""
        if calls.shard_logits is not None:
            self.blocks.exchange.gather(calls.shard_logits, calls.logits)

    def decode_pass(self, count: int, choice: BlockChoice, drawn: bool, verifies: bool = False) -> PassCalls:
        """Return the calls of a pass in which rows 0 to `count`-1 decode. Nothing is launched.

        drawn: some row draws its token. verifies: rows are tokens of any slots.
        """
        key = (count, choice, drawn, verifies, *(attention.capacity for attention in self.attentions))
        calls = self._decode_passes.get(key)
        if calls is None:
            state = self.state
            if verifies:
                state = self.verify_state
            inputs = state.inputs(count, self._all_rows)
            calls = self._decode_passes[key] = self._make_decode_pass(inputs, choice, drawn, verifies)
        return calls

    def send(self, packed: PackedPass) -> tuple[Inputs, PassTokens]:
        """Upload the inputs of a pass with chunks: see `PassInputs.send`."""
        inputs, tokens = self._inputs.send(packed, self.state.token_ids, self.state.adapters)
        for attention in self.attentions:
            attention.begin(tokens)
        return inputs, tokens

    def layout(self, inputs: Inputs, tokens: PassTokens) -> tuple[int, ...] | None:
        """Return all that a pass's calls depend on, except array contents; None: the pass can't be captured whole."""
        if tokens.num_tokens > min(CAPTURED_WHOLE, self._limits.captured_tokens) or self._observer is not None:
            return None
        layout = [tokens.num_tokens, tokens.decoding.shape[0], inputs.logit_rows.shape[0]]
        for attention in self.attentions:
            attention_layout = attention.layout(tokens)
            if attention_layout is None:
                return None
            layout += attention_layout
        return tuple(layout)

    def enqueue(self, inputs: Inputs, tokens: PassTokens, choice: BlockChoice, drawn: bool) -> Iterator[PassCalls]:
        """Enqueue a pass with chunks; yield where other ranks must enqueue their calls first.

        Makes the rank's device current again after each yield. drawn: as for `decode_pass`.
        """
        self.device.use()
        blocks = self._bound_blocks(choice)
        requests = inputs.logit_rows.shape[0]
        logits = self.blocks.logits("prompts", (requests, self.network.vocab_size), blocks.logits.dtype)
        shard_logits = None
        if self.splits_logits and not drawn:
            shard_logits = blocks.logits[:requests]
        exit_inputs = self.blocks.exit_inputs(blocks.values[-2], tokens.num_tokens)
        calls = PassCalls([], logits, shard_logits, exit_inputs, warm=True)
        for parts in self._prompt_parts(blocks, inputs, tokens, logits, choice, drawn):
            for part in parts:
                calls.parts.append(part)
                for _ in self._enqueue_part(part):
                    yield calls
                    self.device.use()
            yield calls
            self.device.use()

    def _prompt_parts(
        self,
        blocks: PrefillBlocks,
        inputs: Inputs,
        tokens: PassTokens,
        logits: cuda.Array,
        choice: BlockChoice,
        drawn: bool,
    ) -> Iterator[Iterable[Part]]:
        """Yield the parts of the embedding, of each layer, and of the exit."""
        total = tokens.num_tokens
        prefill = PrefillPass(blocks, total, inputs.logit_rows.shape[0])
        mask_calls = self._mask_calls(inputs, self.blocks.mask(total, choice.adapted))
        is_captured = total <= self._limits.captured_tokens and self._observer is None
        last = len(self._layer_attention)

        def block_part(number: int, make: Callable[[], Calls]) -> Part:
            key = None
            if is_captured:
                key = ("block", number, total, choice)
            return Part(key, make)

        def observed(number: int, part: str, layer: int) -> Calls:
            block = self._networks[choice.network].blocks[number]
            return self._observed(part, layer, block, blocks.values[number - 1], blocks.values[number], inputs)

        def layer_parts(index: int, attention: Attention) -> Iterator[Part]:
            def make() -> Calls:
                token_values = {name: array[:total] for name, array in values.items()}
                calls = prefill.calls(index + 1, "block") + observed(index + 1, "block", index)
                return calls + attention.token_calls(index, token_values, inputs.rows)

            values = blocks.attention_values[index]
            # cuDNN's plans are made here, and the host may wait for that: before the block is enqueued, whose
            # all-reduces wait for other ranks.
            attention_parts = list(attention.parts(index, values, tokens))
            yield block_part(index + 1, make)
            yield from attention_parts

        def exit_calls() -> Calls:
            computed = blocks.logits[: logits.shape[0]]
            calls = prefill.calls(-1, "exit") + observed(last + 1, "exit", last - 1)
            return calls + self._last_calls(computed, logits, inputs, drawn, self.state)

        yield [block_part(0, lambda: self._observed_tokens(inputs) + mask_calls + prefill.calls(0, "embedding"))]
        for index, attention in enumerate(self._layer_attention):
            yield layer_parts(index, attention)
        yield [Part(None, exit_calls)]

    def _enqueue_part(self, part: Part) -> Iterator[None]:
        """Enqueue a part's calls, as a graph from the second time on; yield where other ranks must go first.

        A first call, and a capture, may make the host wait for the device, which may be waiting for kernels of other
        ranks: those must be enqueued before. A library may allocate memory in its first call, which can't be captured.
        """
        key = part.key
        if key is None or key not in self.graphs:
            for _, call in in_ranges(part.make()):
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

    def warm_products(self, choice: BlockChoice) -> Iterator[None]:
        """Run the GEMMs at many numbers of tokens, one at a time: cuBLAS loads a kernel in the first call of a size."""
        for tokens in range(_WARM_GEMM_STEP, self._limits.largest_pass + 1, _WARM_GEMM_STEP):
            self.device.use()
            blocks = self._bound_blocks(choice)
            for call in PrefillPass(blocks, tokens, min(tokens, self._limits.num_slots)).products():
                call()
            yield

    def _bound_blocks(self, choice: BlockChoice) -> PrefillBlocks:
        if choice not in self._prefill_blocks:
            self._prefill_blocks[choice] = self.blocks.bind(self._inputs.arrays.values(), choice)
        return self._prefill_blocks[choice]

    def _make_decode_pass(self, inputs: Inputs, choice: BlockChoice, drawn: bool, verifies: bool) -> PassCalls:
        """Return the calls for rows of one token; nothing is enqueued."""
        kind = "decode"
        state = self.state
        if verifies:
            kind = "verify"
            state = self.verify_state
        total = inputs.token_ids.shape[0]
        values = inputs.values()
        mask = self.blocks.mask(total, choice.adapted)
        network = self._networks[choice.network]

        def block_calls(name: str, block: Block, layer: int = -1) -> Calls:
            before = dict(values)
            calls = self.blocks.calls(name, block.for_rows(choice.adapted), values, total, kind, mask)
            return calls + self._observed(name, layer, block, before, values, inputs)

        calls = self._observed_tokens(inputs) + self._mask_calls(inputs, mask)
        calls += block_calls("embedding", network.embedding)
        for index, (block, mixer) in enumerate(network.layers):
            calls += block_calls("block", block, index)
            self.blocks.add_attention_output(mixer, values, total)
            if verifies:
                calls += self.paged[0].verify_calls(index, values, inputs.rows)
            else:
                calls += self._layer_attention[index].decode_calls(index, values, inputs.rows)
        exit_inputs = self.blocks.exit_inputs(values, total)
        calls += block_calls("exit", network.exit, len(network.layers) - 1)
        computed = values["logits"]  # a shard of the logits, if ranks split them
        logits = self.blocks.logits(kind, (total, network.vocab_size), computed.dtype)
        calls += self._last_calls(computed, logits, inputs, drawn, state)
        shard_logits = None
        if self.splits_logits and not drawn:
            shard_logits = computed
        observed = self._observer is not None
        return PassCalls([Part(None, lambda: calls)], logits, shard_logits, exit_inputs, observed=observed)

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
            block_inputs = {name: self.fetch(array) for name, array in read.items()}
            block_outputs = {name: self.fetch(array) for name, array in written.items()}
            if part == "exit":  # without rows of slots that are in no request
                is_request = self.fetch(inputs.slots) >= 0
                block_inputs["logit_rows"] = block_inputs["logit_rows"][is_request]
                block_outputs = {name: array[is_request] for name, array in block_outputs.items()}
            observer.block(part, layer, block_inputs, block_outputs)

        return [("observer", show)]

    def fetch(self, array: cuda.Array) -> np.ndarray:
        """Wait for an array and return it."""
        host = np.empty(array.shape, array.dtype)
        self.stream.download(host, array)
        self.stream.synchronize()
        return host

    def _mask_calls(self, inputs: Inputs, mask: cuda.Array | None) -> Calls:
        if mask is None or self.blocks.mask_type is None:
            return []
        kernels = self._kernels
        stream = self.stream
        ids = inputs.adapter_ids
        rank = self.blocks.mask_type[1]
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
        limit = self._limits.max_seq_len
        slots = inputs.slots
        positions = inputs.logit_positions
        out = state.next_tokens, state.token_ids, state.positions
        draw_inputs = inputs.token_ids, inputs.logit_rows, state.samplings, state.logits_tables.arrays
        draw = ("next token", lambda: kernels.advance(stream, logits, slots, positions, limit, *draw_inputs, *out))
        if not self.splits_logits:
            return [draw]
        exchange = self.blocks.exchange
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


def max_exchange_bytes(network: Network, limits: StepLimits) -> tuple[int, int]:
    """Return the bytes of the largest all-reduce, and of a rank's largest shard of a gather."""
    sizes = {"num_tokens": limits.largest_pass, "num_requests": limits.num_slots}

    def nbytes(io: IO) -> int:
        return math.prod(concrete_shape(io.shape, sizes)) * io.numpy_dtype.itemsize

    largest_sum = 0
    for block in network.blocks:
        for piece in block.pieces:
            for io in piece.signature.outputs:
                if io.name in piece.sums:
                    largest_sum = max(largest_sum, nbytes(io))
    argmax_nbytes = 8 * limits.num_slots  # an fp32 logit and an int32 token
    logits_nbytes = max(nbytes(io) for io in network.exit.signature.outputs if io.name == "logits")
    return largest_sum, max(argmax_nbytes, logits_nbytes)
