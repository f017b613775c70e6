"""The engines of a model cut after n layers, each bound to its weights.

They stand in the order in which they run.
"""

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
from lockstep.step.executable import Executable
from lockstep.step.kv_cache import LayerShape, StateShape


@dataclass(frozen=True)
class ShardCall:
    """One engine call of a rank, between two sums over the ranks.

    sums: {partial sum that it gives: the name under which later calls, or whoever reads the block, find the sum over
    the ranks}.
    """

    run: Executable
    signature: Signature
    sums: Mapping[str, str]


@dataclass(frozen=True)
class Block:
    """A block of a network with its weights.

    pieces: its engine calls in order; of a rank several, and then `signature` has the rank's sizes. adapters: the
    backend's arrays behind those of its inputs that adapters are written to. base: of a block that takes adapters, the
    same without, where the backend has engines for steps in which no row has one.
    """

    pieces: tuple[ShardCall, ...]
    signature: Signature
    adapters: Mapping[str, Any] = field(default_factory=dict)
    base: Block | None = None

    @classmethod
    def whole(cls, run: Executable, signature: Signature, adapters: Mapping[str, Any] | None = None) -> Block:
        """Return a block that is one engine."""
        return cls((ShardCall(run, signature, {}),), signature, adapters or {})

    def for_rows(self, adapted: bool) -> Block:
        """Return the block that a step runs in which some row has an adapter, or none."""
        return self if adapted or self.base is None else self.base

    @property
    def run(self) -> Executable:
        """Return the engine of a block that is one engine."""
        (piece,) = self.pieces
        return piece.run


@dataclass(frozen=True)
class LayerMixer:
    """A token mixer with its engines by phase.

    The phases are prefill and decode, or what the backend has instead.
    """

    engines: Mapping[str, Executable]
    variant: TokenMixer

    @functools.cached_property
    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Return what each phase reads.

        A variant without RoPE decodes without positions.
        """
        return {
            phase: tuple(io.name for io in graph.signature.inputs) for phase, graph in self.variant.phases().items()
        }

    @functools.cached_property
    def attention(self) -> IO:
        return next(io for io in self.variant.decode.signature.outputs if io.name == "attention")


@dataclass(frozen=True)
class LayerAttention(LayerMixer):
    """An attention variant with its engines, over a KV cache."""

    variant: AttentionVariant

    @functools.cached_property
    def cache(self) -> LayerShape:
        """Return the shape of the cache that a layer needs."""
        return LayerShape(self.variant.num_kv_heads, self.variant.head_dim, self.variant.value_head_dim)


@dataclass(frozen=True)
class LayerState(LayerMixer):
    """A mixer with a state, and its engines."""

    variant: StateMixer

    @property
    def cache(self) -> StateShape:
        """Return the shape of a request's state."""
        return StateShape(self.variant.state)


@dataclass(frozen=True)
class Network:
    """All that one step runs: embedding, (block, token mixer) by layer, exit.

    kv_cache_dtype: "fp8" where keys and values are kept as e4m3 numbers; None: as `dtype`. others: of several ranks,
    each on a device of its own, what those behind the first run; this is the first's then.
    """

    embedding: Block
    layers: tuple[tuple[Block, LayerAttention | LayerState], ...]
    exit: Block
    dtype: np.dtype
    vocab_size: int
    kv_cache_dtype: str | None = None
    others: tuple[Network, ...] = ()

    @property
    def blocks(self) -> list[Block]:
        """Return the embedding, the layers' blocks and the exit, in order."""
        return [self.embedding, *(block for block, _ in self.layers), self.exit]


def layer_count(assembly: Assembly, layers: int | str) -> int:
    """Return `layers` as a number. Raises InputError when the model has fewer."""
    depth = assembly.num_layers
    if layers == "all":
        return depth
    if not isinstance(layers, int) or not 1 <= layers <= depth:
        raise InputError(f"layers: expected 1 to {depth} or 'all', found {layers!r}")
    return layers
