"""Bind engines to weights.

An engine set and the weights of a checkpoint in; the network of a model cut after n layers out.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.artifacts.adapters import IDS, LoraSlots
from lockstep.artifacts.assembly import Assembly, BoundBlock, Layer
from lockstep.artifacts.dtypes import named_dtype
from lockstep.artifacts.graph_files import StateMixer, TokenMixer
from lockstep.artifacts.quantized import module_of
from lockstep.artifacts.signature import IO, Signature
from lockstep.artifacts.tensor_parallel import ShardedClass, ShardEntry, TensorParallel, attention_shards
from lockstep.backends.base import Program
from lockstep.backends.engine_set import EngineSet
from lockstep.backends.graphs import base_engine, base_graphs
from lockstep.manifests.manifest_files import content
from lockstep.step.activations import with_activations
from lockstep.step.executable import Executable, HasAdapterRows
from lockstep.step.host import check_engine
from lockstep.step.network import Block, LayerAttention, LayerState, Network, ShardCall, layer_count
from lockstep.step.ranks import RankAttention, RankBlock
from lockstep.weights import Weights, check_slots
from lockstep.weights.adapters import LoraArrays, arrays_of, empty_arrays
from lockstep.weights.ranks import RankWeights

_MAX_CHECKPOINTS = 1000  # whose digests are kept, some 10 KB each


class Binder:
    """The engines of a model cut after some layers, loaded once, to be bound to checkpoints of its shape."""

    def __init__(
        self,
        engines: EngineSet,
        layers: int | str,
        threads: int | None = None,
        low_memory: bool = False,
        shares_blocks: bool = False,
    ):
        """Load the engines.

        layers: "all", or a number. shares_blocks: checkpoints with the same numbers in a block share its memory.

        Raises InputError for a layer that the model does not have.
        """
        self.engines = engines
        self.assembly = with_activations(engines.assembly, engines.backend.activations)
        self.num_layers = layer_count(self.assembly, layers)
        self._layers = self.assembly.first_layers(self.num_layers)
        tensor_parallel = self.assembly.tensor_parallel
        self._ranks: list[_RankBinder] = []  # of ranks that have a device each
        if tensor_parallel is not None and engines.backend.rank_devices:
            ranks = range(tensor_parallel.degree)
            self._ranks = [_RankBinder(engines, self.assembly, self._layers, rank) for rank in ranks]
            return
        load = functools.partial(engines.load, threads=threads, low_memory=low_memory)
        blocks = engine_blocks(self.assembly)
        self._programs = {name: load(name) for name, _ in self.assembly.engine_graphs() if name in blocks}
        self._shares_blocks = shares_blocks
        self._blocks: weakref.WeakValueDictionary[bytes, Block] = weakref.WeakValueDictionary()  # by digest
        # By checkpoint, and the names of a block and its tensors; of the last ones only, for weights may be updated.
        self._digests: OrderedDict[str, dict[tuple[str, ...], bytes]] = OrderedDict()
        # By the tensors of a block: what networks read of adapters is the same, whichever checkpoint is bound.
        self._adapter_arrays: dict[tuple[str, ...], dict[str, Any]] = {}
        self._bases = {name: load(name) for name, _ in base_graphs(self.assembly) if name in engines.manifest.engines}
        self._mixers = _layer_mixers(engines, self.assembly.mixers, self._layers, load)
        if tensor_parallel is not None:
            for name, mixer in self._mixers.items():
                if isinstance(mixer, LayerAttention):
                    self._mixers[name] = _heads_of_ranks(mixer, tensor_parallel, name)

    def bind(self, weights_json: str | os.PathLike, shared: Network | None = None) -> Network:
        """Return the network of a checkpoint.

        shared: a network on the host of the same engines and weights, with whose layers this one begins.

        Raises InputError for a tensor that the weights lack or hold in another shape, or files that have changed.
        """
        weights = Weights.open(weights_json)
        weights.check_precision(self.assembly.precision, "the assembly")
        if self._ranks:
            first_rank, *other_ranks = (binder.bind(weights) for binder in self._ranks)
            return replace(first_rank, others=tuple(other_ranks))
        bind = functools.partial(self._bind_block, weights)
        if self._shares_blocks:
            bind = functools.partial(self._shared_block, weights, content(Path(weights_json)))
        if shared is not None and len(self._layers) == len(shared.layers):
            return shared
        if shared is not None and len(self._layers) < len(shared.layers):
            # Only the exit is bound again: it follows another layer here.
            exit_block = bind(self.assembly.exit_of(self._layers))
            network = replace(shared, layers=shared.layers[: len(self._layers)], exit=exit_block)
        else:
            network = _network(self.assembly, self._layers, bind, self._mixers)
        network = replace(network, decode_layers=self.engines.backend.decode_layers(network, weights))
        weights.drop_pages()  # engines have copies, or map the files themselves
        return network

    def _shared_block(self, weights: Weights, checkpoint: str, block: BoundBlock) -> Block:
        """Return a block, that of another checkpoint if that has the same numbers in it."""
        names = block.graph, *_tensors_of(block)
        digests = self._digests.setdefault(checkpoint, {})
        if len(self._digests) > _MAX_CHECKPOINTS:
            self._digests.popitem(last=False)
        if names not in digests:
            digest = hashlib.sha256(repr(names).encode())  # another layer has its own arrays of adapters
            for name in names[1:]:
                array = weights[name]
                digest.update(repr((array.dtype, array.shape)).encode())
                digest.update(hashlib.sha256(array.reshape(-1).view(np.uint8).data).digest())
            digests[names] = digest.digest()
        bound = self._blocks.get(digests[names])
        if bound is None:
            bound = self._blocks[digests[names]] = self._bind_block(weights, block)
        return bound

    def _bind_block(self, weights: Weights, block: BoundBlock) -> Block:
        assembly = self.assembly
        engines = self.engines
        ranks = assembly.tensor_parallel
        signature = assembly.classes[block.graph].signature
        check_slots(weights, block.slots, signature.slots, block.graph)
        if ranks is not None and (sharded := ranks.classes.get(block.graph)):
            return Block.whole(_of_ranks(engines, weights, block, sharded, self._programs), signature)
        engine = self._programs[block.graph].bind(weights, engines.tensors(block.graph, block.slots))
        # Inputs that are rows of the engine's own weights are written there, and are no inputs of a call.
        rows = engine.adapter_rows if isinstance(engine, HasAdapterRows) else {}
        key = _tensors_of(block)
        if key not in self._adapter_arrays:
            dtype = named_dtype(assembly.dtype)
            self._adapter_arrays[key] = empty_arrays(assembly.adapters, block, dtype, engines.backend.empty, rows)
        arrays = self._adapter_arrays[key]
        call_inputs = tuple(io for io in signature.inputs if io.name not in rows)
        bound = Block.whole(engine, replace(signature, inputs=call_inputs), {**arrays, **rows})
        if (base := base_engine(block.graph)) not in self._bases:
            return bound
        plain = self._bases[base].bind(weights, engines.tensors(base, block.slots))
        return replace(bound, base=Block.whole(plain, _without(signature, assembly.adapters, block.graph)))


def _tensors_of(block: BoundBlock) -> tuple[str, ...]:
    return tuple(itertools.chain.from_iterable(block.slots.values()))


def _network(
    assembly: Assembly,
    layers: Sequence[Layer],
    bind: Callable[[BoundBlock], Block],
    mixers: Mapping[str, LayerAttention | LayerState],
) -> Network:
    return Network(
        embedding=bind(assembly.embedding),
        layers=tuple((bind(layer.block), mixers[layer.variant]) for layer in layers),
        exit=bind(assembly.exit_of(layers)),
        dtype=named_dtype(assembly.dtype),
        vocab_size=assembly.vocab_size,
        kv_cache_dtype=assembly.kv_cache_dtype,
    )


def _without(signature: Signature, adapters: LoraSlots | None, block: str) -> Signature:
    """Return a block's signature without the inputs of adapters."""
    assert adapters is not None  # the block takes them
    adapter_inputs = {IDS, *adapters.names(block)}
    return replace(signature, inputs=tuple(io for io in signature.inputs if io.name not in adapter_inputs))


def lora_arrays(assembly: Assembly, network: Network) -> list[LoraArrays]:
    slots = assembly.adapters
    if slots is None:
        return []
    layers = assembly.layers[: len(network.layers)]
    # Each block as the assembly names its tensors, and as it runs.
    pairs = [(layer.block, block) for layer, (block, _) in zip(layers, network.layers, strict=True)]
    pairs.append((assembly.exit_of(layers), network.exit))
    arrays = []
    for named_block, block in pairs:
        by_rows = block.engine.adapter_rows if isinstance(block.engine, HasAdapterRows) else ()
        arrays += arrays_of(slots, named_block, block.adapters, by_rows)
    return arrays


def adapted_modules(assembly: Assembly) -> set[str]:
    """Return the names in the checkpoint of the linear layers that take adapters, of the whole model."""
    modules = set[str]()
    if assembly.adapters is None:
        return modules
    for layer in assembly.layers:
        for block in layer.parts:
            weights = assembly.adapters.classes.get(block.graph, {})
            modules.update(module_of(block.slots[weight][0]) for weight in weights)
    return modules


class _RankBinder:
    """The engines of a rank on a separate device."""

    def __init__(self, engines: EngineSet, assembly: Assembly, layers: Sequence[Layer], rank: int):
        assert assembly.tensor_parallel is not None
        self._engines = engines
        self._assembly = assembly
        self._layers = layers
        self._tensor_parallel = assembly.tensor_parallel
        self._rank = rank
        load = functools.partial(engines.load, rank=rank)
        self._programs = {name: load(name) for name in sorted(engine_blocks(assembly))}
        self._mixers = _layer_mixers(engines, self._tensor_parallel.variants, layers, load)

    def bind(self, weights: Weights) -> Network:
        return _network(self._assembly, self._layers, functools.partial(self._bind_block, weights), self._mixers)

    def _bind_block(self, weights: Weights, block: BoundBlock) -> Block:
        engines = self._engines
        ranks = self._tensor_parallel
        programs = self._programs
        signature = self._assembly.classes[block.graph].signature
        check_slots(weights, block.slots, signature.slots, block.graph)
        sharded = ranks.classes.get(block.graph)
        if sharded is None:  # each rank computes all of it
            engine = programs[block.graph].bind(weights, engines.tensors(block.graph, block.slots))
            return Block.whole(engine, signature)
        pieces = []
        for piece in sharded.pieces:
            piece_signature = ranks.graphs[piece.graph].signature
            engine = _bind_piece(engines, weights, block, sharded, piece, programs, self._rank)
            pieces.append(ShardCall(engine, piece_signature, piece.sums))
        return Block(tuple(pieces), _local(signature, sharded))


def _local(signature: Signature, sharded: ShardedClass) -> Signature:
    """Return a block's signature with the sizes that a rank holds."""

    def local(io: IO) -> IO:
        if io.name not in sharded.values:
            return io
        return replace(io, shape=sharded.values[io.name].shape(io.shape))

    return Signature(tuple(map(local, signature.inputs)), tuple(map(local, signature.outputs)))


def _layer_mixers(
    engines: EngineSet, mixers: Mapping[str, TokenMixer], layers: Sequence[Layer], load: Callable[[str], Program]
) -> dict[str, LayerAttention | LayerState]:
    """Return the named token mixers of the layers, with their engines.

    The engines are by phase: prefill and decode, or those of the backend's own attention.
    """
    layer_mixers: dict[str, LayerAttention | LayerState] = {}
    for name in sorted({layer.variant for layer in layers}):
        by_phase = {}
        for engine in engines.names():  # such as "attention.prefill" of the mixer "attention"
            mixer_name, _, phase = engine.rpartition(".")
            if mixer_name == name:
                by_phase[phase] = load(engine).bind(None, {})
        mixer = mixers[name]
        if isinstance(mixer, StateMixer):
            layer_mixers[name] = LayerState(by_phase, mixer)
        else:
            layer_mixers[name] = LayerAttention(by_phase, mixer)
    return layer_mixers


def engine_blocks(assembly: Assembly) -> set[str]:
    """Return the names of the engines that take weights: of blocks, or of the embedding and the shards' pieces."""
    ranks = assembly.tensor_parallel
    if ranks is None:
        return set(assembly.classes)
    return {assembly.embedding.graph, *ranks.graphs}


def _of_ranks(
    engines: EngineSet, weights: Weights, block: BoundBlock, sharded: ShardedClass, programs: Mapping[str, Program]
) -> RankBlock:
    """Return a block of several ranks: each piece bound once for each rank."""
    ranks = engines.assembly.tensor_parallel
    assert ranks is not None
    unsharded = engines.assembly.classes[block.graph].signature
    signatures = [ranks.graphs[piece.graph].signature for piece in sharded.pieces]
    bound = []
    for piece, signature in zip(sharded.pieces, signatures, strict=True):
        of_ranks = [
            _bind_piece(engines, weights, block, sharded, piece, programs, rank) for rank in range(ranks.degree)
        ]
        for engine in of_ranks:
            check_engine(engine, signature)
        bound.append(of_ranks)
    return RankBlock(sharded, unsharded, signatures, bound)


def _bind_piece(
    engines: EngineSet,
    weights: Weights,
    block: BoundBlock,
    sharded: ShardedClass,
    piece: ShardEntry,
    programs: Mapping[str, Program],
    rank: int,
) -> Executable:
    ranks = engines.assembly.tensor_parallel
    assert ranks is not None
    slots = ranks.graphs[piece.graph].signature.slots
    tensors = engines.tensors(piece.graph, {slot.name: [slot.name] for slot in slots})
    program = programs[piece.graph]
    if not tensors:
        return program.bind(None, {})
    # Named by slot: a rank's tensor is a shard of the block's, which no checkpoint has.
    block_slots = engines.assembly.classes[block.graph].signature.slots
    return program.bind(RankWeights(weights, block.slots, block_slots, sharded, rank), tensors)


def _heads_of_ranks(layer_attention: LayerAttention, ranks: TensorParallel, name: str) -> LayerAttention:
    shards = attention_shards(layer_attention.variant, ranks.degree)
    rank_graphs = ranks.variants[name].phases()
    graphs = layer_attention.variant.phases()
    engines = {}
    for phase, engine in layer_attention.engines.items():
        check_engine(engine, rank_graphs[phase].signature)
        engines[phase] = RankAttention(shards, graphs[phase].signature, engine, ranks.degree)
    return LayerAttention(engines, layer_attention.variant)
