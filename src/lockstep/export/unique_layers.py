"""Trace each unique layer of a model once.

It tells which blocks, exits and attention variants a model of any depth is made of.

In: a meta model. Out: its embedding, and for each layer its block, the exit that follows it when the model is cut
there, its batchless graph, and the tensors that the slots take. Layers are alike when their modules, shapes and
settings are; a block depends on its own layer and the one before, an exit on the last layer. So each pair of neighbours
with new signatures is traced once, alone, whatever the depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from lockstep.export.canonical import Graph, canonical
from lockstep.export.checkpoint_layout import checkpoint_layout
from lockstep.export.cut import INPUT_ORDER, BatchlessGraph, Cut, bind_slot, cut
from lockstep.export.independence import check_independence
from lockstep.export.residual import widen_residual
from lockstep.export.simplify import pack
from lockstep.export.tracer import DOMAIN, layer_list, per_layer_settings, trace


@dataclass(frozen=True)
class Layer:
    """A layer: its block, then its attention (batchless), then the exit where the model ends here.

    Slots: {slot: checkpoint tensors whose bytes, one after another, it takes}.
    """

    block: Graph
    block_slots: dict[str, list[str]]
    batchless: BatchlessGraph
    exit: Graph
    exit_slots: dict[str, list[str]]


@dataclass(frozen=True)
class TracedModel:
    """All layers of a model, and its embedding `token_ids [num_tokens]` -> `hidden [num_tokens, hidden_size]`."""

    layers: tuple[Layer, ...]
    embedding: Graph
    embedding_slots: dict[str, list[str]]


def parts_of(meta: PreTrainedModel, trace_unique_layers: bool = True, wide_residual: bool = False) -> TracedModel:
    """Trace all parts of a model.

    With `trace_unique_layers=False` every depth is traced whole (slow; the result is the same, a test holds it).
    wide_residual: of a float16 model the residual stream is float32.
    """
    layer_signatures, prefix = signatures(meta), layer_list(meta)[0]
    cuts = (
        _Cuts(meta, layer_signatures, wide_residual)
        if trace_unique_layers
        else _FullCuts(meta, len(layer_signatures), wide_residual)
    )
    layout = checkpoint_layout(meta)
    layers = []
    for index in range(len(layer_signatures)):
        block, batchless, exit = cuts.block(index), cuts.batchless(index), cuts.exit(index)
        layers.append(
            Layer(block, _bind(block, index, prefix, layout), batchless, exit, _bind(exit, index + 1, prefix, layout))
        )
    embedding = cuts.embedding()
    return TracedModel(tuple(layers), embedding, {slot.name: layout[slot.name] for slot in embedding.signature.slots})


class _Cuts:
    """Cuts of two neighbours at a time, one for each pair of layer signatures."""

    def __init__(self, meta: PreTrainedModel, layer_signatures: Sequence[str], wide_residual: bool):
        self.meta, self.layer_signatures, self.wide_residual = meta, layer_signatures, wide_residual
        self.pairs: dict[tuple[str, str], _Traced] = {}
        self.single: _Traced | None = None

    def pair(self, index: int) -> _Traced:
        """Return the cut of layers index-1 and index, or of the first pair with their signatures."""
        key = (self.layer_signatures[index - 1], self.layer_signatures[index])
        if key not in self.pairs:
            self.pairs[key] = _cut(self.meta, [index - 1, index], self.wide_residual)
        return self.pairs[key]

    def embedding(self) -> Graph:
        return self._first().embedding

    def block(self, index: int) -> Graph:
        return self.pair(index).cut.blocks[1] if index else self._first().cut.blocks[0]

    def batchless(self, index: int) -> BatchlessGraph:
        return self.pair(index).cut.batchless[1] if index else self._first().cut.batchless[0]

    def exit(self, index: int) -> Graph:
        for later, signature in enumerate(self.layer_signatures):
            if later and signature == self.layer_signatures[index]:
                return self.pair(later).cut.exit
        return self._single().cut.exit

    def _first(self) -> _Traced:
        return self.pair(1) if len(self.layer_signatures) > 1 else self._single()

    def _single(self) -> _Traced:
        if self.single is None:
            self.single = _cut(self.meta, [0], self.wide_residual)
        return self.single


class _FullCuts:
    """Cuts of the whole model, and for the exits of the model at each depth."""

    def __init__(self, meta: PreTrainedModel, depth: int, wide_residual: bool):
        self.cuts = [_cut(meta, range(number), wide_residual) for number in range(1, depth + 1)]

    def embedding(self) -> Graph:
        return self.cuts[-1].embedding

    def block(self, index: int) -> Graph:
        return self.cuts[-1].cut.blocks[index]

    def batchless(self, index: int) -> BatchlessGraph:
        return self.cuts[-1].cut.batchless[index]

    def exit(self, index: int) -> Graph:
        return self.cuts[index].cut.exit


@dataclass(frozen=True)
class _Traced:
    """The result of one trace: its cut, and the embedding."""

    cut: Cut
    embedding: Graph


def _cut(meta: PreTrainedModel, indices: Sequence[int], wide_residual: bool) -> _Traced:
    traced = trace(meta, indices)
    body, embedding = pack(traced.graph), pack(traced.embedding)
    for part, weights in ((body, traced.weights), (embedding, traced.embedding_weights)):
        check_independence(part.graph, DOMAIN, meta.config.model_type)
        if wide_residual:
            widen_residual(part.graph, weights)
    slots = {name: name for name in traced.embedding_weights}
    return _Traced(
        cut(body, traced.weights, traced.layer_prefix), canonical(embedding.graph, "embedding", INPUT_ORDER, slots)
    )


def _bind(graph: Graph, layer: int, prefix: str, layout: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return {slot.name: layout[bind_slot(slot.name, layer, prefix)] for slot in graph.signature.slots}


def signatures(meta: PreTrainedModel) -> list[str]:
    """Return one text for each layer, equal for layers that trace alike: modules, shapes and plain settings."""
    _, layers = layer_list(meta)
    lists = per_layer_settings(meta.config.get_text_config(), len(layers))
    return [
        _layer_signature(layer, {key: value[index] for key, value in lists.items()})
        for index, layer in enumerate(layers)
    ]


def _layer_signature(layer: torch.nn.Module, settings: Mapping[str, Any]) -> str:
    parts = [repr(layer), repr(sorted(settings.items(), key=lambda item: item[0]))]
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        parts.append(f"{name} {tuple(tensor.shape)} {tensor.dtype}")
    for name, module in layer.named_modules():
        plain = {
            k: v
            for k, v in vars(module).items()
            if isinstance(v, (bool, int, float, str, type(None))) and k not in _OWN_NUMBER
        }
        parts.append(f"{name} {sorted(plain.items())}")
    return "\n".join(parts)


_OWN_NUMBER = {"layer_idx", "layer_id", "layer_number", "_is_hf_initialized"}
