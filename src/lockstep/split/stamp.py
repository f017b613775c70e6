"""Trace few layers and stamp the rest: which blocks, exits and kinds a model of any depth is made of.

In: a config.json mapping and a precision. Out: for each layer its block, the exit that follows it when the model is cut there, its
batchless region, and the tensors that the slots take. Layers are alike when their modules, shapes and settings are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.split.canonical import Graph
from lockstep.split.cut import Cut, Region, bind_slot, cut
from lockstep.split.simplify import pack
from lockstep.split.tracer import DTYPES, Trace, build_config, layer_list, meta_model, trace


@dataclass(frozen=True)
class Layer:
    """block comes before the layer's attention (region); exit follows it when the model ends here. Slots: {slot: tensor name}."""

    block: Graph
    block_slots: dict[str, str]
    region: Region
    exit: Graph
    exit_slots: dict[str, str]


def layers_of(config: Mapping[str, Any], precision: str, stamp: bool = True) -> list[Layer]:
    """All layers of the model. With `stamp=False` every layer is traced (slow; the result is the same, a test holds it)."""
    looks = _signatures(config, precision)
    depth = len(looks)
    uniform = len(set(looks)) == 1 and stamp
    traced = _cut(trace(config, precision, min(depth, 2) if uniform else None))
    exits = {looks[-1]: traced.cut.exit}
    for number, look in enumerate(looks, start=1):
        if look not in exits:
            exits[look] = _cut(trace(config, precision, number)).cut.exit
    layers = []
    for index, look in enumerate(looks):
        block, region = (traced.cut.blocks[min(index, 1)], traced.cut.regions[min(index, 1)]) if uniform else (traced.cut.blocks[index], traced.cut.regions[index])
        exit = exits[look]
        layers.append(Layer(block, _bind(block, index, traced.prefix), region, exit, _bind(exit, index + 1, traced.prefix)))
    return layers


@dataclass(frozen=True)
class _Traced:
    cut: Cut
    prefix: str


def _cut(traced: Trace) -> _Traced:
    return _Traced(cut(pack(traced.graph), traced.weights, traced.layer_prefix), traced.layer_prefix)


def _bind(graph: Graph, layer: int, prefix: str) -> dict[str, str]:
    return {slot["name"]: bind_slot(slot["name"], layer, prefix) for slot in graph.slots}


def _signatures(config: Mapping[str, Any], precision: str) -> list[str]:
    """One text for each layer, equal for layers that trace alike: module tree, tensor shapes, plain settings, per-layer config lists."""
    model_config = build_config(config)
    depth = model_config.get_text_config().num_hidden_layers
    model = meta_model(model_config, DTYPES[precision])
    _, layers = layer_list(model, depth)
    per_layer = {k: v for k, v in model_config.get_text_config().to_dict().items() if isinstance(v, (list, tuple)) and len(v) == depth}
    return [_look(layer, {key: value[index] for key, value in per_layer.items()}) for index, layer in enumerate(layers)]


def _look(layer: torch.nn.Module, settings: Mapping[str, Any]) -> str:
    parts = [repr(layer), repr(sorted(settings.items(), key=lambda item: item[0]))]
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        parts.append(f"{name} {tuple(tensor.shape)} {tensor.dtype}")
    for name, module in layer.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str, type(None))) and k not in ("layer_idx", "_is_hf_initialized")}
        parts.append(f"{name} {sorted(plain.items())}")
    return "\n".join(parts)
