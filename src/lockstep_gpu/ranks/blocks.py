"""The blocks of a network on the buffers of a rank: the calls of their engines, and the all-reduces between them.

In a pass whose rows decode the calls are of its size (`RankBlocks.calls`), to be captured. For passes with chunks the
engines are bound once, to arrays of the largest pass: these passes differ in their sizes only (`PrefillPass`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from lockstep.artifacts.adapters import IDS, mask_rank
from lockstep.artifacts.signature import IO, concrete_shape
from lockstep.step.executable import Call
from lockstep.step.network import Block, LayerMixer, Network, ShardCall
from lockstep_gpu import cuda
from lockstep_gpu.attention.base import Arrays, Calls
from lockstep_gpu.plan import MAX_VERIFY_TOKENS, SMALLEST_CHUNK, BlockChoice, StepLimits
from lockstep_gpu.program import Bound, GpuExecutable, GpuProgram, Shapes
from lockstep_gpu.ranks.all_reduce import Exchange

Values = dict[str, cuda.Array]
# The outputs of a block that attention and recurrent mixers read.
_READ = ("query", "key", "value", "decay", "beta", "position_ids", "attention")


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


@dataclass(frozen=True)
class _BoundCall:
    """An engine's call, bound to arrays of the largest pass; inputs: (name, declared shape) of each dynamic input."""

    call: Bound
    program: GpuProgram
    inputs: tuple[tuple[str, tuple[int | str, ...]], ...]


class RankBlocks:
    """The blocks of networks, and the buffers of their values and logits; exchange: None for a single rank."""

    def __init__(self, networks: Sequence[Network], limits: StepLimits, exchange: Exchange | None):
        network = networks[0]
        self._networks = networks
        self._network = network
        self._limits = limits
        self._exchange = exchange
        self.buffer = Buffers(limits.largest_pass)
        self.logit_buffers = dict[tuple[str, bool], cuda.Array]()  # by kind of pass, and whether it is a shard
        # (columns, rank of each adapter, dtype) of the mask that engines read instead of `IDS`; None if none does.
        self.mask_type = _mask_of_engines(network)

    def mask(self, num_tokens: int, adapted: bool) -> cuda.Array | None:
        """Return the mask of a pass, if its engines read one."""
        if not adapted or self.mask_type is None:
            return None
        columns, _, dtype = self.mask_type
        return self.buffer("adapter mask", (num_tokens, columns), dtype)

    def calls(self, name: str, block: Block, values: Values, rows: int, kind: str, mask: cuda.Array | None) -> Calls:
        """Return a block's calls for `rows` rows of one token, for a captured graph; add its outputs to `values`.

        kind: "decode" or "verify".
        """
        calls = Calls()
        summed: cuda.Array | None = None  # the values that the last call all-reduces
        for step in self._steps(block, values, {"num_tokens": rows, "num_requests": rows}, kind, mask):
            if isinstance(step, _AllReduce):
                calls.append(("sum", functools.partial(self.exchange.sum, step.values)))
                summed = step.values
                continue
            engine = engine_of(step.piece)
            fused = None
            if summed is not None and self.exchange.is_small(summed):
                fused = engine.prepare_fused_all_reduce(self.exchange, summed, step.inputs, step.outputs)
            if fused is None:
                calls.append((name, engine.prepare(step.inputs, step.outputs, captured=True)))
            else:
                first_kernel, other_kernels = fused
                calls[-1:] = ("sum", first_kernel), (name, other_kernels)
            summed = None
        return calls

    def bind(self, values: Values, choice: BlockChoice) -> PrefillBlocks:
        """Return all blocks, bound to buffers; values: the inputs of the largest pass."""
        network = self._networks[choice.network]
        largest = self._limits.largest_pass
        mask = self.mask(largest, choice.adapted)
        dims = {"num_tokens": largest, "num_requests": self._limits.num_slots}
        bound: list[list[_BoundCall | _AllReduce]] = []
        values_after = []
        for block, mixer in ((network.embedding, None), *network.layers, (network.exit, None)):
            calls: list[_BoundCall | _AllReduce] = []
            for step in self._steps(block.for_rows(choice.adapted), values, dims, "prompts", mask):
                if isinstance(step, _EngineCall):
                    calls.append(_bind(step))
                else:
                    calls.append(step)
            bound.append(calls)
            if mixer is not None:
                self.add_attention_output(mixer, values, largest)
            values_after.append(dict(values))
        return PrefillBlocks(bound, values_after, self._exchange)

    def add_attention_output(self, mixer: LayerMixer, values: Values, total: int) -> None:
        width = tuple(int(size) for size in mixer.attention.shape[1:])  # only the first dimension is dynamic
        values["attention"] = self.buffer("attention", (total, *width), mixer.attention.numpy_dtype)

    def exit_inputs(self, values: Arrays, total: int) -> list[cuda.Array]:
        """Return the inputs of the lm_head block that are equal on all ranks."""
        excluded = ("attention", "logit_rows", *self._network.exit.adapters)
        names = [io.key for io in self._network.exit.signature.inputs if io.name not in excluded]
        return [values[name][:total] for name in names]

    def logits(self, kind: str, shape: Sequence[int], dtype: np.dtype) -> cuda.Array:
        """Return a buffer of logits, [num_requests, vocab_size], or of a rank's shard of them."""
        is_shard = shape[1] != self._network.vocab_size
        key = (kind, is_shard)
        if key not in self.logit_buffers:
            requests = self._limits.num_slots
            if kind == "verify":
                requests = MAX_VERIFY_TOKENS
            rows = requests + is_shard  # gathers read on to a multiple of 16 bytes
            self.logit_buffers[key] = cuda.empty((rows, *shape[1:]), dtype, "logits")
        return self.logit_buffers[key][: shape[0]]

    @property
    def exchange(self) -> Exchange:
        assert self._exchange is not None  # only several ranks have all-reduces and gathers
        return self._exchange

    def _steps(
        self, block: Block, values: Values, dims: Mapping[str, int], kind: str, mask: cuda.Array | None
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
            piece_outputs = {}
            for io in piece.signature.outputs:
                name = piece.sums.get(io.name, io.name)
                key = f"piece/{name}"
                if name in output_names:
                    key = IO(name, io.dtype, io.shape).key
                array = self._output(key, io, dims, reserved, kind)
                piece_outputs[io.name] = array
                reserved.add(array.address)
            steps.append(_EngineCall(piece, _engine_inputs(piece, arrays, mask), piece_outputs))
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
            return self.logits(kind, shape, io.numpy_dtype)
        array = self.buffer(key, shape, io.numpy_dtype)
        for number in itertools.count(1):
            if array.address not in reserved:
                break
            array = self.buffer(f"{key}/{number}", shape, io.numpy_dtype)
        return array


class PrefillBlocks:
    """All blocks of a network, in order, bound to buffers of the largest pass; values: by key, after each block."""

    def __init__(
        self, blocks: Sequence[Sequence[_BoundCall | _AllReduce]], values: Sequence[Values], exchange: Exchange | None
    ):
        self.blocks = blocks
        self.values = values
        self.exchange = exchange
        self.logits = values[-1]["logits"]
        # What each layer's attention reads and writes. Most layers use the same buffers. They share one dict, by which
        # attention recognizes them.
        unique_values: dict[tuple, Values] = {}
        self.attention_values: list[Values] = []
        for layer_values in values[1:-1]:
            read = {name: layer_values[name] for name in _READ if name in layer_values}
            key = tuple((name, array.address, array.shape, array.dtype) for name, array in read.items())
            self.attention_values.append(unique_values.setdefault(key, read))


class PrefillPass:
    """The blocks of a pass of `num_tokens` tokens. Its calls may be repeated."""

    def __init__(self, blocks: PrefillBlocks, num_tokens: int, num_requests: int):
        self._blocks = blocks
        self._dims = {"num_tokens": num_tokens, "num_requests": num_requests}
        self._contexts: dict[tuple[GpuProgram, tuple], tuple[Any, Shapes]] = {}

    def products(self) -> Iterator[Call]:
        """Yield a call of each distinct engine whose GEMMs are cuBLAS's."""
        programs = set[GpuProgram]()
        for step in itertools.chain(*self._blocks.blocks):
            if isinstance(step, _BoundCall) and not step.program.by_profiles and step.program not in programs:
                programs.add(step.program)
                yield functools.partial(step.call, *self._context(step))

    def calls(self, number: int, name: str) -> Calls:
        """Return the calls of block `number` (0: embedding, -1: exit) under `name`, and its all-reduces as "sum"."""
        calls = Calls()
        for step in self._blocks.blocks[number]:
            if isinstance(step, _AllReduce):
                assert self._blocks.exchange is not None
                calls.append(("sum", functools.partial(self._blocks.exchange.sum, step.values[: self._dims[step.dim]])))
            else:
                calls.append((name, functools.partial(step.call, *self._context(step))))
        return calls

    def _context(self, step: _BoundCall) -> tuple[Any, Shapes]:
        key = step.program, step.inputs
        if key not in self._contexts:
            shapes = {name: concrete_shape(shape, self._dims) for name, shape in step.inputs}
            self._contexts[key] = step.program.context_for(shapes, exclusive=False), shapes
        return self._contexts[key]


def engine_of(of: Block | ShardCall) -> GpuExecutable:
    """Return the executable of a block or of a rank's call, which is always a GPU's here."""
    return cast(GpuExecutable, of.engine)


def _bind(step: _EngineCall) -> _BoundCall:
    engine = engine_of(step.piece)
    declared: dict[str, tuple[int | str, ...]] = {io.name: io.shape for io in step.piece.signature.inputs}
    declared |= {name: ("num_tokens", *array.shape[1:]) for name, array in step.inputs.items() if mask_rank(name)}
    shapes = tuple((name, declared[name]) for name in step.inputs if name in engine.program.dynamic)
    return _BoundCall(engine.bind(step.inputs, step.outputs), engine.program, shapes)


def _engine_inputs(piece: ShardCall, arrays: Arrays, mask: cuda.Array | None) -> Arrays:
    """Return a piece's inputs by the engine's names: some engines read the mask instead of `IDS`."""
    inputs = {io.name: arrays[io.name] for io in piece.signature.inputs}
    mask_names = [name for name in engine_of(piece).program.tensors if mask_rank(name)]
    if mask is not None and mask_names and inputs.pop(IDS, None) is not None:
        inputs[mask_names[0]] = mask
    return inputs


def _mask_of_engines(network: Network) -> tuple[int, int, np.dtype] | None:
    for block in network.blocks:
        for piece in block.pieces:
            for name, tensor in engine_of(piece).program.tensors.items():
                if rank := mask_rank(name):
                    return int(tensor.shape[1]), rank, tensor.dtype
    return None
