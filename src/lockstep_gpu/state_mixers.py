"""Recurrent token mixers on a GPU, with a state for each request slot.

Prompts and decoding rows run the same kernel, one token after another (state_mixers.cu).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import numpy as np

from lockstep.step.network import LayerState
from lockstep_gpu import cuda
from lockstep_gpu.attention.base import Arrays, Calls, PassTokens, SlicedAttention
from lockstep_gpu.kernels.library import including
from lockstep_gpu.plan import Chunks
from lockstep_gpu.staging import Staging
from lockstep_gpu.state_kernels import THREADS, StateKernelSpec


class StateMixers(SlicedAttention):
    """The recurrent mixers of some layers: see `attention.base.PagedAttention`.

    layers: by number. wide: positions are int64. The kernel starts from a zero state at position 0.
    """

    capacity = 0  # calls don't depend on lengths

    def __init__(self, layers: Mapping[int, LayerState], rows: int, wide: bool, stream: cuda.Stream):
        self._stream = stream
        self._specs = {index: StateKernelSpec.of(layer.variant, "a layer") for index, layer in layers.items()}
        self._kernels = {}
        for index, spec in self._specs.items():
            values = {"WIDE": int(wide), "THREADS": THREADS, **spec.sizes}
            options = tuple(f"-D{name}={value}" for name, value in values.items())
            self._kernels[index] = cuda.compile_kernels(including("state_mixers.cu"), options)[spec.kernel]
        self._states = {
            index: cuda.zeros((rows, *spec.state), "f4", "the states of requests")
            for index, spec in self._specs.items()
        }
        self._bounds = cuda.zeros((rows, 2), "i4")  # of each chunk of a pass: its first packed token, and the end
        self._staging = Staging(self._bounds.nbytes, 1)

    def reserve(self, ends: Mapping[int, int], lengths: np.ndarray) -> bool:
        return False

    def reset(self, row: int) -> None:
        """Do nothing: the kernel starts from a zero state at position 0."""

    def begin(self, tokens: PassTokens) -> None:
        """Upload the bounds of the chunks."""
        bounds = np.array([(low, high) for _, _, low, high in tokens.chunks])
        self._staging.send(self._stream, [(self._bounds[: len(bounds)], bounds)])

    def layout(self, tokens: PassTokens) -> tuple[int, ...]:
        return tokens.num_decoding, len(tokens.chunks)

    def _calls(self, index: int, values: Arrays, rows: cuda.Array, chunks: Chunks, captured: bool) -> Calls:
        spec = self._specs[index]
        kernel = self._kernels[index]
        out = values["attention"]
        inputs = [values[name] for name in spec.inputs]
        if spec.kernel == "recurrence" and not spec.sizes["BETA"]:
            inputs.append(inputs[-1])  # a placeholder for beta, which the kernel doesn't read
        requests = len(chunks) or out.shape[0]
        positions = values["position_ids"]
        arguments: tuple[cuda.Array | int, ...]
        arguments = (*inputs, out, self._states[index], self._bounds, int(not chunks), rows, positions)
        return [("state", functools.partial(kernel.launch, self._stream, requests * spec.blocks, THREADS, *arguments))]

    def fork(self, slot: int, other: int, length: int) -> None:
        """Copy a slot's states to another."""
        for states in self._states.values():
            self._stream.copy(states[other : other + 1], states[slot : slot + 1])

    def save(self, slot: int, length: int) -> np.ndarray:
        """Return the slot's states of all layers, concatenated, float32, page-locked."""
        size = sum(math.prod(states.shape[1:]) for states in self._states.values())
        saved = cuda.pinned((size,), "f4")
        self._copy(slot, saved, self._stream.download)
        return saved

    def restore(self, slot: int, saved: np.ndarray) -> None:
        self._copy(slot, saved, lambda host, states: self._stream.upload(states, host))

    def _copy(self, slot: int, saved: np.ndarray, copy: Callable[[np.ndarray, cuda.Array], None]) -> None:
        start = 0
        for states in self._states.values():
            end = start + math.prod(states.shape[1:])
            copy(saved[start:end].reshape(1, *states.shape[1:]), states[slot : slot + 1])
            start = end
