"""The engines of a pass of prompts, bound once: their arrays lie where they lie, only the sizes differ between passes.

What a pass costs the host is paid while the device waits: a prompt of 256 tokens is through a layer before the host has
prepared the next one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import cast

from lockstep.backends.tensorrt import cuda
from lockstep.backends.tensorrt.program import Bound, Context, Shapes, TensorRTExecutable, TensorRTProgram
from lockstep.step.network import Block, Network

Call = Callable[[], None]
Values = dict[str, cuda.Array]
_READ = ("query", "key", "value", "position_ids", "attention")  # by attention, of what a block makes


class PromptBlocks:
    """All blocks of a network, in order, on buffers for the largest pass."""

    def __init__(self, network: Network, bind: Callable[[], Iterable[tuple[Block, Bound, Values]]]):
        """bind: gives each block, its call and the values behind it, of the largest sizes."""
        bound = list(bind())
        self.calls = [call for _, call, _ in bound]
        self.programs = [cast(TensorRTExecutable, block.run).program for block, _, _ in bound]
        self.shapes = [tuple((io.name, io.shape) for io in block.signature.inputs) for block, _, _ in bound]
        self.logits = bound[-1][2]["logits"]
        # Most layers read and make the same buffers: attention is given one object for all of these.
        known: dict[tuple, Values] = {}
        self.values: list[Values] = []
        for _, _, values in bound[1:-1]:
            read = {name: values[name] for name in _READ if name in values}
            key = tuple((name, array.address, array.shape, array.dtype) for name, array in read.items())
            self.values.append(known.setdefault(key, read))

    def begin(self, num_tokens: int, num_requests: int) -> PromptPass:
        return PromptPass(self, num_tokens, num_requests)


class PromptPass:
    """The blocks of one pass, of `num_tokens` tokens of `num_requests` prompts; calls may be repeated."""

    def __init__(self, blocks: PromptBlocks, num_tokens: int, num_requests: int):
        self._blocks = blocks
        self._dims = {"num_tokens": num_tokens, "num_requests": num_requests}
        self._contexts: dict[tuple[TensorRTProgram, tuple], tuple[Context, Shapes]] = {}
        self._values: dict[int, Values] = {}

    def embedding(self) -> Call:
        return self._call(0)

    def layer(self, index: int) -> tuple[Call, Values]:
        """The call of a layer's block, and by name what its attention reads and writes."""
        whole = self._blocks.values[index]
        values = self._values.get(id(whole))
        if values is None:
            count = self._dims["num_tokens"]
            values = self._values[id(whole)] = {name: array[:count] for name, array in whole.items()}
        return self._call(1 + index), values

    def exit(self) -> tuple[Call, cuda.Array]:
        """The call of the exit, and the logits [num_requests, vocab_size] that it makes."""
        return self._call(-1), self._blocks.logits[: self._dims["num_requests"]]

    def _call(self, number: int) -> Call:
        blocks = self._blocks
        key = blocks.programs[number], blocks.shapes[number]
        found = self._contexts.get(key)
        if found is None:
            dims = self._dims
            shapes = {
                name: tuple([dims[size] if isinstance(size, str) else size for size in shape]) for name, shape in key[1]
            }
            found = self._contexts[key] = key[0].context_for(shapes, False), shapes
        return functools.partial(blocks.calls[number], *found)
