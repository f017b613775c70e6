"""The engines of a prefill pass, bound once to arrays of the largest size; passes differ in their sizes only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.artifacts.signature import concrete_shape
from lockstep_gpu import cuda
from lockstep_gpu.attention.base import Call, Calls
from lockstep_gpu.program import Bound, GpuProgram, Shapes

Values = dict[str, cuda.Array]
# The outputs of a block that attention and recurrent mixers read.
_READ = ("query", "key", "value", "decay", "beta", "position_ids", "attention")


@dataclass(frozen=True)
class BoundPiece:
    """An engine's call, bound to arrays of the largest sizes; inputs: (name, declared shape) of each dynamic input."""

    call: Bound
    program: GpuProgram
    inputs: tuple[tuple[str, tuple[int | str, ...]], ...]


@dataclass(frozen=True)
class BoundSum:
    """An all-reduce of `values` in place, of the largest size; dim: the name of their first dimension."""

    sum: Callable[[cuda.Array], None]
    values: cuda.Array
    dim: str


@dataclass(frozen=True)
class DeviceBlock:
    """A block's calls in order, and the values by name after the block."""

    parts: Sequence[BoundPiece | BoundSum]
    values: Values


class PromptBlocks:
    """All blocks of a network, in order, bound to buffers of the largest pass."""

    def __init__(self, blocks: Sequence[DeviceBlock]):
        self.blocks = blocks
        self.logits = blocks[-1].values["logits"]
        # Most layers use the same buffers. They share one dict, by which attention recognizes them.
        unique_values: dict[tuple, Values] = {}
        self.values: list[Values] = []
        for block in blocks[1:-1]:
            values = {name: block.values[name] for name in _READ if name in block.values}
            key = tuple((name, array.address, array.shape, array.dtype) for name, array in values.items())
            self.values.append(unique_values.setdefault(key, values))


class PromptPass:
    """The blocks of a pass of `num_tokens` tokens. Its calls may be repeated."""

    def __init__(self, blocks: PromptBlocks, num_tokens: int, num_requests: int):
        self._blocks = blocks
        self._dims = {"num_tokens": num_tokens, "num_requests": num_requests}
        self._contexts: dict[tuple[GpuProgram, tuple], tuple[Any, Shapes]] = {}

    def values(self, index: int) -> Values:
        """Return the arrays that a layer's attention reads and writes, of the largest pass."""
        return self._blocks.values[index]

    def products(self) -> Iterator[Call]:
        """Yield a call of each distinct engine whose GEMMs are cuBLAS's."""
        programs = set[GpuProgram]()
        for block in self._blocks.blocks:
            for part in block.parts:
                if isinstance(part, BoundPiece) and not part.program.by_profiles and part.program not in programs:
                    programs.add(part.program)
                    yield functools.partial(part.call, *self._context(part))

    def calls(self, number: int, name: str) -> Calls:
        """Return the calls of block `number` (0: embedding, -1: exit) under `name`, and its all-reduces as "sum"."""
        calls = Calls()
        for part in self._blocks.blocks[number].parts:
            if isinstance(part, BoundSum):
                values = part.values[: self._dims[part.dim]]
                calls.append(("sum", functools.partial(part.sum, values)))
            else:
                calls.append((name, functools.partial(part.call, *self._context(part))))
        return calls

    def _context(self, part: BoundPiece) -> tuple[Any, Shapes]:
        key = part.program, part.inputs
        if key not in self._contexts:
            shapes = {name: concrete_shape(shape, self._dims) for name, shape in part.inputs}
            self._contexts[key] = part.program.context_for(shapes, exclusive=False), shapes
        return self._contexts[key]
