"""An engine set and the weights of a checkpoint in, the network of a model cut after n layers out."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lockstep.artifacts.assembly import Assembly, Part
from lockstep.artifacts.dtypes import named_dtype
from lockstep.artifacts.tensor_parallel import ShardedClass, TensorParallel, attention_shards
from lockstep.backends import EngineSet
from lockstep.backends.base import Program
from lockstep.errors import InputError
from lockstep.step.host import check_engine
from lockstep.step.network import Block, Kind, Network, layer_count
from lockstep.step.ranks import RankAttention, RankBlock
from lockstep.weights import Weights, check_slots
from lockstep.weights.adapters import LoraArrays, arrays_of, empty_arrays
from lockstep.weights.ranks import RankWeights


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
    programs = {name: load(name) for name, _ in assembly.engine_graphs() if name in engine_blocks(assembly)}

    def bound(part: Part) -> Block:
        signature = assembly.classes[part.graph].signature
        check_slots(weights, part.slots, signature.slots, part.graph)
        sharded = assembly.tensor_parallel and assembly.tensor_parallel.classes.get(part.graph)
        if sharded:
            return Block(_of_ranks(engines, weights, part, sharded, programs), signature)
        run = programs[part.graph].bind(weights, engines.tensors(part.graph, part.slots))
        return Block(run, signature, empty_arrays(assembly.adapters, part, named_dtype(assembly.dtype)))

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
    if assembly.tensor_parallel:
        kinds = {name: _heads_of_ranks(kind, assembly.tensor_parallel, name) for name, kind in kinds.items()}
    return Network(
        embedding=bound(assembly.embedding),
        layers=tuple((bound(layer.block), kinds[layer.variant]) for layer in chosen),
        exit=bound(chosen[-1].exit),
        dtype=named_dtype(assembly.dtype),
        vocab_size=assembly.vocab_size,
    )


def lora_arrays(assembly: Assembly, network: Network) -> list[LoraArrays]:
    """Where each linear layer's adapters go, of all blocks of a network."""
    slots = assembly.adapters
    if slots is None:
        return []
    layers = assembly.layers[: len(network.layers)]
    pairs = [(layer.block, block) for layer, (block, _) in zip(layers, network.layers, strict=True)]
    pairs.append((layers[-1].exit, network.exit))
    return [each for part, block in pairs for each in arrays_of(slots, part, block.adapters)]


def adapted_modules(assembly: Assembly) -> set[str]:
    """The linear layers of the whole model that take adapters, as the checkpoint names them."""
    classes = assembly.adapters.classes if assembly.adapters else {}
    return {
        part.slots[weight][0].removesuffix(".weight")
        for layer in assembly.layers
        for part in (layer.block, layer.exit)
        for weight in classes.get(part.graph, {})
    }


def engine_blocks(assembly: Assembly) -> set[str]:
    """The engines that take weights: of blocks, or of several ranks the embedding and the pieces."""
    ranks = assembly.tensor_parallel
    return set(assembly.classes) if ranks is None else {assembly.embedding.graph, *ranks.graphs}


def _of_ranks(
    engines: EngineSet, weights: Weights, part: Part, sharded: ShardedClass, programs: Mapping[str, Program]
) -> RankBlock:
    """A block's pieces, each bound once for each rank."""
    ranks = engines.assembly.tensor_parallel
    assert ranks is not None
    whole = engines.assembly.classes[part.graph].signature
    signatures = [ranks.graphs[piece.graph].signature for piece in sharded.pieces]
    runs = []
    for piece, signature in zip(sharded.pieces, signatures, strict=True):
        tensors = engines.tensors(piece.graph, {slot.name: [slot.name] for slot in signature.slots})
        own = [RankWeights(weights, part.slots, whole.slots, sharded, rank) for rank in range(ranks.degree)]
        runs.append([programs[piece.graph].bind(each if tensors else None, tensors) for each in own])
        for run in runs[-1]:
            check_engine(run, signature)
    return RankBlock(sharded, whole, signatures, runs)


def _heads_of_ranks(kind: Kind, ranks: TensorParallel, name: str) -> Kind:
    shards, own = attention_shards(kind.variant, ranks.degree), ranks.variants[name].phases()
    for phase, run in kind.engines.items():
        check_engine(run, own[phase].signature)
    graphs = kind.variant.phases()
    engines = {
        phase: RankAttention(shards, graphs[phase].signature, run, ranks.degree) for phase, run in kind.engines.items()
    }
    return Kind(engines, kind.variant)
