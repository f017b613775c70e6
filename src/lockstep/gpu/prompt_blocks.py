"""The engines of a pass of prompts, bound once to arrays of which only sizes differ between passes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.gpu import cuda
from lockstep.gpu.attention.base import Call, Calls
from lockstep.gpu.program import Bound, GpuProgram, Shapes

Values = dict[str, cuda.Array]
# By attention and mixers with a state, of what a block makes.
_READ = ("query", "key", "value", "decay", "beta", "position_ids", "attention")


@dataclass(frozen=True)
class BoundPiece:
    """An engine's call, of the largest sizes; inputs: (name, shape) of what it reads."""

    call: Bound
    program: GpuProgram
    inputs: tuple[tuple[str, tuple[int | str, ...]], ...]


@dataclass(frozen=True)
class BoundSum:
    """A sum over the ranks in place of `values`, of the largest size; dim: the name of their first dimension."""

    sum: Callable[[cuda.Array], None]
    values: cuda.Array
    dim: str


@dataclass(frozen=True)
class DeviceBlock:
    """A block's calls in order, and the values behind it."""

    parts: Sequence[BoundPiece | BoundSum]
    values: Values


class PromptBlocks:
    """All blocks of a network, in order, on buffers for the largest pass."""

    def __init__(self, bound: Sequence[DeviceBlock]):
        self.blocks = bound
        self.logits = bound[-1].values["logits"]
        # Most layers read and make the same buffers: attention is given one object for all of these.
        known: dict[tuple, Values] = {}
        self.values: list[Values] = []
        for block in bound[1:-1]:
            read = {name: block.values[name] for name in _READ if name in block.values}
            key = tuple((name, array.address, array.shape, array.dtype) for name, array in read.items())
            self.values.append(known.setdefault(key, read))


class PromptPass:
    """The blocks of one pass, whose calls may be repeated."""

    def __init__(self, blocks: PromptBlocks, num_tokens: int, num_requests: int):
        self._blocks = blocks
        self._dims = {"num_tokens": num_tokens, "num_requests": num_requests}
        self._contexts: dict[tuple[GpuProgram, tuple], tuple[Any, Shapes]] = {}

    def values(self, index: int) -> Values:
        """Return what a layer's attention reads and writes, of the largest pass."""
        return self._blocks.values[index]

    def products(self) -> Iterator[Call]:
        """Yield a call of each engine, once, whose products are cuBLAS's."""
        known = set[GpuProgram]()
        for block in self._blocks.blocks:
            for part in block.parts:
                if isinstance(part, BoundPiece) and not part.program.by_profiles and part.program not in known:
                    known.add(part.program)
                    yield functools.partial(part.call, *self._context(part))

    def calls(self, number: int, name: str) -> Calls:
        """Return the calls of a block under a name, "sum" for those over ranks: the embedding is 0, the exit -1."""
        return [
            ("sum", functools.partial(part.sum, part.values[: self._dims[part.dim]]))
            if isinstance(part, BoundSum)
            else (name, functools.partial(part.call, *self._context(part)))
            for part in self._blocks.blocks[number].parts
        ]

    def _context(self, part: BoundPiece) -> tuple[Any, Shapes]:
        key = part.program, part.inputs
        found = self._contexts.get(key)
        if found is None:
            dims = self._dims
            shapes = {
                name: tuple([dims[size] if isinstance(size, str) else size for size in shape])
                for name, shape in part.inputs
            }
            found = self._contexts[key] = part.program.context_for(shapes, False), shapes
        return found
