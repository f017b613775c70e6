"""The engines of a model cut after n layers, each bound to its weights, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.errors import InputError
from lockstep.step.executable import Executable
from lockstep.step.kv_cache import LayerShape


@dataclass(frozen=True)
class IO:
    """An input or output of a graph: dimensions are numbers or names (`num_tokens`, `num_requests`,
    `past_capacity`)."""

    name: str
    dtype: np.dtype
    shape: tuple[int | str, ...]

    @property
    def key(self) -> str:
        """The name under which the runner keeps the value: a graph that reads `hidden` has to call its result
        `hidden_out`."""
        return self.name.removesuffix("_out")


@dataclass(frozen=True)
class Block:
    """A batchful piece with its weights."""

    run: Executable
    inputs: tuple[IO, ...]
    outputs: tuple[IO, ...]


@dataclass(frozen=True)
class Kind:
    """A batchless behaviour: its engines by phase (prefill and decode, or what the backend has instead), what each
    phase reads (a kind without rotary encoding decodes without positions), the cache that a layer of this kind needs,
    and its entry in the assembly."""

    engines: Mapping[str, Executable]
    inputs: Mapping[str, tuple[str, ...]]
    attention: IO
    cache: LayerShape
    spec: Mapping[str, Any]


@dataclass(frozen=True)
class Network:
    """Everything that one step runs: embedding, then (block, attention) for each layer, then exit."""

    embedding: Block
    layers: tuple[tuple[Block, Kind], ...]
    exit: Block
    dtype: np.dtype
    vocab_size: int


def layer_count(assembly: Mapping[str, Any], layers: int | str) -> int:
    """`layers` as a number. Raises InputError when the model has fewer."""
    depth = assembly["num_layers"]
    if layers == "all":
        return depth
    if not isinstance(layers, int) or not 1 <= layers <= depth:
        raise InputError(f"layers: expected 1 to {depth} or 'all', found {layers!r}")
    return layers


def ios_of(entries: Sequence[Mapping[str, Any]]) -> tuple[IO, ...]:
    """The inputs or outputs that an assembly lists."""
    return tuple(IO(entry["name"], np.dtype(entry["dtype"]), tuple(entry["shape"])) for entry in entries)
