"""An engine set and the weights of a checkpoint in, the network of a model cut after n layers out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from lockstep.backends import EngineSet
from lockstep.errors import InputError
from lockstep.step.kv_cache import LayerShape
from lockstep.step.network import Block, Kind, Network, ios_of, layer_count
from lockstep.weights import Weights, check_slots


def open_network(
    engines: EngineSet,
    weights_json: str | os.PathLike,
    layers: int | str,
    threads: int | None = None,
    low_memory: bool = False,
) -> Network:
    """Bind the engine set to the weights, cut after `layers` layers (or "all").

    Raises InputError for a layer count that the model does not have, or a tensor that the weights lack or hold in
    another shape.
    """
    assembly, weights = engines.assembly, Weights.open(weights_json)
    count = layer_count(assembly, layers)
    if weights.precision != assembly["precision"]:
        raise InputError(
            f"{weights_json}: precision: expected {assembly['precision']} as in the assembly, "
            f"found {weights.precision}; give the weights of this precision"
        )
    load = lambda name: engines.load(name, threads, low_memory)
    programs = {name: load(name) for name in sorted(assembly["classes"])}

    def block(part: Mapping[str, Any]) -> Block:
        entry = assembly["classes"][part["class"]]
        check_slots(weights, part["slots"], entry["slots"], part["class"])
        return Block(
            programs[part["class"]].bind(weights, engines.tensors(part["class"], part["slots"])),
            ios_of(entry["inputs"]),
            ios_of(entry["outputs"]),
        )

    chosen = assembly["layers"][:count]
    kinds = {
        name: Kind(
            {
                engine.rpartition(".")[2]: load(engine).bind(None, {})
                for engine in engines.names()
                if engine.rpartition(".")[0] == name
            },
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
