"""Bind the experts of a stack to the inputs of an engine that has one for each.

A stack `[num_experts, ...]` is one slot of a graph. Its engine may have an input for each expert instead. Each expert
is its own tensors, or a slice of one, as stored: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from pathlib import Path

import numpy as np

from lockstep.artifacts.engines import expert_slots
from lockstep.artifacts.signature import IO
from lockstep.weights.reader import Tensors
from lockstep.weights.slots import check_arrays, slot_array


class WeightInputs:
    """The weight inputs of an engine; declared: {input: (shape, dtype)}."""

    def __init__(self, slots: Sequence[IO], inputs: Collection[str]):
        self.slots = {slot.name: (slot.sizes, slot.numpy_dtype) for slot in slots}
        self.experts = {}  # {slot: its experts' inputs}
        for name in self.slots:
            expert_inputs = expert_slots(name, inputs)
            if expert_inputs:
                self.experts[name] = expert_inputs
        self.declared: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        for name, (shape, dtype) in self.slots.items():
            experts = dict.fromkeys(self.experts.get(name, ()), (shape[1:], dtype))
            self.declared |= experts or {name: (shape, dtype)}

    def bind(
        self, weights: Tensors, slots: Mapping[str, Sequence[str]], where: str
    ) -> tuple[Tensors, Mapping[str, Sequence[str]]]:
        """Return weights and {input: its tensors in them}, from {slot: tensors}.

        where: the engine, for the message. Raises CheckError for tensors that do not fit a stack's slot.
        """
        if not self.experts:
            return weights, slots
        tensors = _ExpertTensors(weights)
        bound: dict[str, Sequence[str]] = {}
        for slot, names in slots.items():
            inputs = self.experts.get(slot)
            if inputs is None:
                bound[slot] = names
                continue
            shape, dtype = self.slots[slot]
            check_arrays([weights[name] for name in names], shape, dtype, f"{where}: slot {slot}")
            # A checkpoint has one or several tensors for each expert, or fewer tensors, each of many experts.
            per_expert, remainder = divmod(len(names), len(inputs))
            if not remainder:
                for number, name in enumerate(inputs):
                    bound[name] = names[number * per_expert : (number + 1) * per_expert]
                continue
            # A single tensor stays a view of the file; several, of many experts each, are joined.
            stack = slot_array(weights, names, shape)
            tensor = names[0] if len(names) == 1 else None
            for number, name in enumerate(inputs):
                tensors.add(name, tensor, number, stack)
                bound[name] = [name]
        return tensors, bound


class _ExpertTensors:
    """Weights, and the experts of stacks under names of inputs: see `Tensors`."""

    def __init__(self, weights: Tensors):
        self._weights = weights
        self._stacks: dict[str, tuple[str | None, int, np.ndarray]] = {}  # {expert: (tensor, number, array)}

    @property
    def checkpoint(self) -> object:
        return self._weights.checkpoint

    def add(self, name: str, tensor: str | None, number: int, stack: np.ndarray) -> None:
        """Add an expert of a stack; tensor: that of the stack, None for one that was joined from several."""
        self._stacks[name] = tensor, number, stack

    def identity(self, name: str) -> Hashable:
        return name if name in self._stacks else self._weights.identity(name)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._stacks:
            return self._weights[name]
        _, number, stack = self._stacks[name]
        return stack[number]

    def location(self, name: str) -> tuple[Path, int, int] | None:
        if name not in self._stacks:
            return self._weights.location(name)
        tensor, number, stack = self._stacks[name]
        if tensor is None or (place := self._weights.location(tensor)) is None:
            return None
        path, offset, _ = place
        size = stack[number].nbytes
        return path, offset + number * size, size
