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
    """The blocks of one pass, whose calls may be repeated; num_decoding: tokens in front, that decode."""

    def __init__(self, blocks: PromptBlocks, num_tokens: int, num_requests: int, num_decoding: int):
        self._blocks = blocks
        self._parts = [slice(0, num_decoding)] if num_decoding else []
        self._parts.append(slice(num_decoding, num_tokens))
        self._dims = {"num_tokens": num_tokens, "num_requests": num_requests}
        self._contexts: dict[tuple[GpuProgram, tuple], tuple[Any, Shapes]] = {}
        self._values: dict[int, list[Values]] = {}

    def embedding(self) -> Calls:
        return self._calls(0)

    def layer(self, index: int) -> tuple[Calls, list[Values]]:
        """Return a block's calls, and what its attention reads and writes: of decoding tokens, of prompts."""
        whole = self._blocks.values[index]
        values = self._values.get(id(whole))
        if values is None:
            values = [{name: array[part] for name, array in whole.items()} for part in self._parts]
            self._values[id(whole)] = values
        return self._calls(1 + index), values

    def exit(self) -> tuple[Calls, cuda.Array]:
        """Return the exit's calls, and its logits [num_requests, vocab_size], or a rank's part of them."""
        return self._calls(-1), self._blocks.logits[: self._dims["num_requests"]]

    def products(self) -> Iterator[Call]:
        """Yield a call of each engine, once, whose products are cuBLAS's."""
        known = set[GpuProgram]()
        for block in self._blocks.blocks:
            for part in block.parts:
                if isinstance(part, BoundPiece) and not part.program.by_profiles and part.program not in known:
                    known.add(part.program)
                    yield functools.partial(part.call, *self._context(part))

    def _calls(self, number: int) -> Calls:
        """Return the calls of a block: "sum" for one over ranks, else without a name."""
        return [
            ("sum", functools.partial(part.sum, part.values[: self._dims[part.dim]]))
            if isinstance(part, BoundSum)
            else ("", functools.partial(part.call, *self._context(part)))
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
