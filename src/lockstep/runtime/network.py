"""The engines of a model cut after n layers, each bound to its weights, in the order in which they run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.engine import EngineSet, Executable
from lockstep.errors import InputError
from lockstep.runtime.kv_cache import LayerShape
from lockstep.weights import Weights, check_slots


@dataclass(frozen=True)
class IO:
    """An input or output of a graph: dimensions are numbers or names (`num_tokens`, `num_requests`, `past_capacity`)."""

    name: str
    dtype: np.dtype
    shape: tuple[int | str, ...]

    @property
    def key(self) -> str:
        """The name under which the runner keeps the value: a graph that reads `hidden` has to call its result `hidden_out`."""
        return self.name.removesuffix("_out")


@dataclass(frozen=True)
class Block:
    """A batchful piece with its weights."""

    run: Executable
    inputs: tuple[IO, ...]
    outputs: tuple[IO, ...]


@dataclass(frozen=True)
class Kind:
    """A batchless behaviour: its engines by phase (prefill and decode, or what the backend has instead), what each phase reads (a kind without
    rotary encoding decodes without positions), the cache that a layer of this kind needs, and its entry in the assembly."""

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


def open_network(
    engines: EngineSet, weights_json: str | os.PathLike, layers: int | str, threads: int | None = None, low_memory: bool = False
) -> Network:
    """Bind the engine set to the weights, cut after `layers` layers (or "all").

    Raises InputError for a layer count that the model does not have, or a tensor that the weights lack or hold in another shape.
    """
    assembly, weights = engines.assembly, Weights.open(weights_json)
    count = layer_count(assembly, layers)
    if weights.precision != assembly["precision"]:
        raise InputError(f"{weights_json}: precision: expected {assembly['precision']} as in the assembly, found {weights.precision}; give the weights of this precision")
    load = lambda name: engines.load(name, threads, low_memory)
    programs = {name: load(name) for name in sorted(assembly["classes"])}

    def block(part: Mapping[str, Any]) -> Block:
        entry = assembly["classes"][part["class"]]
        check_slots(weights, part["slots"], entry["slots"], part["class"])
        return Block(programs[part["class"]].bind(weights, engines.tensors(part["class"], part["slots"])), ios_of(entry["inputs"]), ios_of(entry["outputs"]))

    chosen = assembly["layers"][:count]
    kinds = {
        name: Kind(
            {engine.rpartition(".")[2]: load(engine).bind(None, {}) for engine in engines.names() if engine.rpartition(".")[0] == name},
            {phase: tuple(io["name"] for io in kind[phase]["inputs"]) for phase in ("prefill", "decode")},
            next(io for io in ios_of(kind["decode"]["outputs"]) if io.name == "attention"),
            LayerShape(kind["num_kv_heads"], kind["head_dim"], kind["value_head_dim"]),
            kind,
        )
        for name, kind in sorted(assembly["kinds"].items())
        if any(layer["kind"] == name for layer in chosen)
    }
    return Network(
        embedding=block(assembly["embedding"]),
        layers=tuple((block(layer["block"]), kinds[layer["kind"]]) for layer in chosen),
        exit=block(chosen[-1]["exit"]),
        dtype=np.dtype(assembly["dtype"]),
        vocab_size=assembly["vocab_size"],
    )


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
