"""The engines of a model, possibly truncated after n layers, bound to their weights and in the order of execution."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.graph_files import AttentionVariant, StateMixer, TokenMixer
from lockstep.artifacts.signature import IO, Signature
from lockstep.errors import InputError
from lockstep.step.executable import Executable, HostExecutable
from lockstep.step.kv_cache import LayerShape, StateShape


@dataclass(frozen=True)
class ShardCall:
    """An engine call of a rank, between two all-reduces.

    sums: {name of an output that is a partial sum: name of its all-reduced value}.
    """

    engine: Executable
    signature: Signature
    sums: Mapping[str, str]


@dataclass(frozen=True)
class Block:
    """A block of a network with its weights.

    Attributes:
        pieces: Its engine calls, in order; a rank may have several.
        signature: With the rank's sizes.
        adapters: The backend's arrays of the inputs that are adapters.
        base: The block for steps without adapters, if it takes adapters and the backend has engines without them.
    """

    pieces: tuple[ShardCall, ...]
    signature: Signature
    adapters: Mapping[str, Any] = field(default_factory=dict)
    base: Block | None = None

    @classmethod
    def whole(cls, engine: Executable, signature: Signature, adapters: Mapping[str, Any] | None = None) -> Block:
        return cls((ShardCall(engine, signature, {}),), signature, adapters or {})

    def for_rows(self, adapted: bool) -> Block:
        """Return the block to run if some row of the step has an adapter (`adapted`), or if none has."""
        if adapted or self.base is None:
            return self
        return self.base

    @property
    def engine(self) -> Executable:
        (piece,) = self.pieces
        return piece.engine


@dataclass(frozen=True)
class LayerMixer:
    """A token mixer with its engines by phase: prefill and decode, or whatever the backend has."""

    engines: Mapping[str, Executable]
    variant: TokenMixer

    @functools.cached_property
    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Return the inputs of each phase; a variant without RoPE has no positions."""
        inputs = {}
        for phase, graph in self.variant.phases().items():
            inputs[phase] = tuple(io.name for io in graph.signature.inputs)
        return inputs

    @functools.cached_property
    def attention(self) -> IO:
        return next(io for io in self.variant.decode.signature.outputs if io.name == "attention")


@dataclass(frozen=True)
class LayerAttention(LayerMixer):
    """An attention variant with its engines, over a KV cache."""

    variant: AttentionVariant

    @functools.cached_property
    def cache(self) -> LayerShape:
        return LayerShape(self.variant.num_kv_heads, self.variant.head_dim, self.variant.value_head_dim)


@dataclass(frozen=True)
class LayerState(LayerMixer):
    """A recurrent mixer with its engines, over a state."""

    variant: StateMixer

    @property
    def cache(self) -> StateShape:
        return StateShape(self.variant.state)


@dataclass(frozen=True)
class Network:
    """All that a step runs: the embedding, (block, token mixer) of each layer, and the exit (the lm_head block).

    kv_cache_dtype: "fp8" for a cache of e4m3 numbers; None: `dtype`. others: the networks of the other ranks, if this
    is the first one of several. decode_layers: see `Backend.decode_layers`.
    """

    embedding: Block
    layers: tuple[tuple[Block, LayerAttention | LayerState], ...]
    exit: Block
    dtype: np.dtype
    vocab_size: int
    kv_cache_dtype: str | None = None
    others: tuple[Network, ...] = ()
    decode_layers: HostExecutable | None = None

    @property
    def blocks(self) -> list[Block]:
        return [self.embedding, *(block for block, _ in self.layers), self.exit]


def layer_count(assembly: Assembly, layers: int | str) -> int:
    """Return `layers`, which may be "all", as a number. Raises InputError if the model has fewer."""
    depth = assembly.num_layers
    if layers == "all":
        return depth
    if not isinstance(layers, int) or not 1 <= layers <= depth:
        raise InputError(f"layers: expected 1 to {depth} or 'all', found {layers!r}")
    return layers
