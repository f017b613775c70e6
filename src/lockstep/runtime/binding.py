"""An engine set and the weights of a checkpoint in, the network of a model cut after n layers out."""

from __future__ import annotations

import os

from lockstep.artifacts.assembly import Part
from lockstep.artifacts.dtypes import named_dtype
from lockstep.backends import EngineSet
from lockstep.errors import InputError
from lockstep.step.network import Block, Kind, Network, layer_count
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
    if weights.precision != assembly.precision:
        raise InputError(
            f"{weights_json}: precision: expected {assembly.precision} as in the assembly, "
            f"found {weights.precision}; give the weights of this precision"
        )
    load = lambda name: engines.load(name, threads, low_memory)
    programs = {name: load(name) for name in sorted(assembly.classes)}

    def block(part: Part) -> Block:
        signature = assembly.classes[part.graph].signature
        check_slots(weights, part.slots, signature.slots, part.graph)
        return Block(programs[part.graph].bind(weights, engines.tensors(part.graph, part.slots)), signature)

    chosen = assembly.layers[:count]
    kinds = {
        name: Kind(
            {
                engine.rpartition(".")[2]: load(engine).bind(None, {})
                for engine in engines.names()
                if engine.rpartition(".")[0] == name
            },
            variant,
        )
        for name, variant in sorted(assembly.variants.items())
        if any(layer.variant == name for layer in chosen)
    }
    return Network(
        embedding=block(assembly.embedding),
        layers=tuple((block(layer.block), kinds[layer.variant]) for layer in chosen),
        exit=block(chosen[-1].exit),
        dtype=named_dtype(assembly.dtype),
        vocab_size=assembly.vocab_size,
    )
