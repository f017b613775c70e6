"""Trace each unique layer of a model once, whatever the depth.

In: a meta model. Out: its embedding, and for each layer its block, the exit that follows it when the model is cut
there, its batchless graph, and the tensors of the slots. Layers are equal when their modules, shapes and settings are.
A block depends on its own layer and the one before, an exit on the last layer, so each pair of neighbours with new
signatures is traced once, alone. A layer without a token mixer (Nemotron-H) belongs to the preceding layer that has
one; later blocks and exits depend on that too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
import torch
from transformers import PreTrainedModel

from lockstep.errors import InputError
from lockstep.export.canonical import Graph, canonical
from lockstep.export.checkpoint_layout import checkpoint_layout
from lockstep.export.cut import INPUT_ORDER, Batchless, Cut, bind_slot, cut
from lockstep.export.decoder_layers import layer_list
from lockstep.export.independence import check_independence
from lockstep.export.language import per_layer_settings
from lockstep.export.markers import DOMAIN
from lockstep.export.movement import put_tokens_first, unfold_copies
from lockstep.export.refusals import known_reason
from lockstep.export.residual import widen_residual
from lockstep.export.simplify import pack
from lockstep.export.tracer import trace
from lockstep.onnx_tools.values import shape_of
from lockstep.progress import steps


@dataclass(frozen=True)
class Layer:
    """A token mixer (batchless), the block before it, and the exits where the model ends after its layer.

    Further exits are those of layers without a mixer that follow. Slots: {slot: checkpoint tensors whose bytes it
    takes, one after another}.
    """

    block: Graph
    block_slots: dict[str, list[str]]
    batchless: Batchless
    exits: tuple[tuple[Graph, dict[str, list[str]]], ...]


@dataclass(frozen=True)
class TracedModel:
    """All layers of a model, and its embedding `token_ids [num_tokens]` -> `hidden [num_tokens, hidden_size]`."""

    layers: tuple[Layer, ...]
    embedding: Graph
    embedding_slots: dict[str, list[str]]


def trace_unique_layers(meta: PreTrainedModel, wide_residual: bool = False) -> TracedModel:
    """Trace all parts of a model; wide_residual: keep the residual stream of a float16 model in float32."""
    names = signatures(meta)
    traced: dict[tuple[str, ...], _Traced] = {}
    without_mixer: set[str] = set()

    def trace_at(index: int) -> _Traced:
        """Return the trace of a layer after the mixer before it, or that of an equal one."""
        start = max(index - 1, 0)
        while names[start] in without_mixer:
            start -= 1
        indices = range(start, index + 1)
        key = tuple(names[number] for number in indices)
        if key not in traced:
            traced[key] = trace_and_cut(meta, indices, wide_residual)
            if not traced[key].last_mixes:
                without_mixer.add(names[index])
        return traced[key]

    # Layer 0 is traced together with layer 1: that trace has the entry block, and the first one between two mixers.
    first = trace_at(min(1, len(names) - 1))
    traces = [first, *(trace_at(index) for index in steps(range(1, len(names)), "export: traces", "layers"))]
    layout = checkpoint_layout(meta)
    prefix = layer_list(meta)[0]
    layers: list[Layer] = []
    for index, (name, layer_trace) in enumerate(zip(names, traces)):
        exit_trace = layer_trace
        if name not in without_mixer:
            # The exit depends on the last layer alone: take that of the first equal layer, which is traced already.
            exit_trace = trace_at(next((later for later in range(1, len(names)) if names[later] == name), 0))
        exit = (exit_trace.cut.exit, bind_slots(exit_trace.cut.exit, index + 1, prefix, layout))
        if name in without_mixer:
            layers[-1] = replace(layers[-1], exits=(*layers[-1].exits, exit))
            continue
        cut = layer_trace.cut
        # A trace has this layer after the one before it; of the first two layers' trace the first is taken. A layer may
        # have several mixers (Falcon-H1): the exit follows the last one.
        traced_layer = max(cut.layers) if index else 0
        mixers = [number for number, layer in enumerate(cut.layers) if layer == traced_layer]
        for number in mixers:
            block = cut.blocks[number]
            exits = [exit] if number == mixers[-1] else []
            layers.append(Layer(block, bind_slots(block, index, prefix, layout), cut.batchless[number], tuple(exits)))
    embedding = {slot.name: layout[slot.name] for slot in first.embedding.signature.slots}
    return TracedModel(tuple(layers), first.embedding, embedding)


@dataclass(frozen=True)
class _Traced:
    """The result of one trace: its cut, the embedding, and whether the last layer has a token mixer."""

    cut: Cut
    embedding: Graph
    last_mixes: bool


def trace_and_cut(meta: PreTrainedModel, indices: Sequence[int], wide_residual: bool) -> _Traced:
    traced = trace(meta, indices)
    body = pack(traced.graph)
    embedding = pack(traced.embedding)
    embedded = embedding.graph.outputs[0]
    embedded.shape = ir.Shape(["num_tokens", *shape_of(embedded)[1:]])
    unfold_copies(body)
    for part, weights in ((body, traced.weights), (embedding, traced.embedding_weights)):
        try:
            check_independence(part.graph, meta.config.model_type)
        except InputError as error:
            reason = known_reason(meta)
            if reason is not None:
                raise InputError(f"model type {meta.config.model_type!r} cannot be split: {reason}") from error
            raise
        if any(node.domain == DOMAIN and node.op_type != "Attention" for node in part.graph):
            put_tokens_first(part.graph)
        if wide_residual:
            widen_residual(part.graph, weights)
    slots = {name: name for name in traced.embedding_weights}
    return _Traced(
        cut(body, traced.weights, traced.layer_prefix, indices),
        canonical(embedding.graph, "embedding", INPUT_ORDER, slots),
        indices[-1] in traced.mixing,
    )


def bind_slots(graph: Graph, layer: int, prefix: str, layout: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return {slot.name: layout[bind_slot(slot.name, layer, prefix)] for slot in graph.signature.slots}


def signatures(meta: PreTrainedModel) -> list[str]:
    """Return one text for each layer, equal for layers that trace alike: modules, shapes and plain settings."""
    _, layers = layer_list(meta)
    lists = per_layer_settings(meta.config.get_text_config(), len(layers))
    texts = []
    for index, layer in enumerate(layers):
        texts.append(layer_signature(layer, {key: value[index] for key, value in lists.items()}))
    return texts


def layer_signature(layer: torch.nn.Module, settings: Mapping[str, Any]) -> str:
    parts = [repr(layer), repr(sorted(settings.items(), key=lambda item: item[0]))]
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        parts.append(f"{name} {tuple(tensor.shape)} {tensor.dtype}")
    # Constants that a trace folds into the graph: an epsilon, a scale, a window.
    for name, module in layer.named_modules():
        settings_of_module = []
        for key, value in sorted(vars(module).items()):
            if isinstance(value, (bool, int, float, str, type(None))) and key not in _LAYER_NUMBER_KEYS:
                settings_of_module.append((key, value))
        parts.append(f"{name} {settings_of_module}")
    return "\n".join(parts)


_LAYER_NUMBER_KEYS = {"layer_idx", "layer_id", "layer_number", "_is_hf_initialized"}  # differ between equal layers
