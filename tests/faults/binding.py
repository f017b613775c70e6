"""Faults of the assembly: what is bound to which layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from faults.fault import Fault

Assembly = dict[str, Any]


def swap(layer: int, part: str, one: str, other: str) -> Callable[[Assembly], None]:
    """Bind two slots of a part ("block" or "exit") of a layer to each other's tensors."""

    def plant(assembly: Assembly) -> None:
        slots = assembly["layers"][layer][part]["slots"]
        first, second = (next(name for name in slots if text in name) for text in (one, other))
        slots[first], slots[second] = slots[second], slots[first]

    return plant


def bind(layer: int, part: str, slot: str, tensor: str) -> Callable[[Assembly], None]:
    """Bind the slot of a part of a layer whose name holds `slot` to another tensor."""

    def plant(assembly: Assembly) -> None:
        slots = assembly["layers"][layer][part]["slots"]
        slots[next(name for name in slots if slot in name)] = [tensor]

    return plant


def _moved(layer: int, by: int) -> Callable[[Assembly], None]:
    """Every tensor of a layer's block that belongs to this layer is the neighbour's."""

    def plant(assembly: Assembly) -> None:
        slots = assembly["layers"][layer]["block"]["slots"]
        for name, tensors in slots.items():
            slots[name] = [tensor.replace(f"layers.{layer}.", f"layers.{layer + by}.") for tensor in tensors]

    return plant


def _exit_of(layer: int, other: int) -> Callable[[Assembly], None]:
    def plant(assembly: Assembly) -> None:
        assembly["layers"][layer]["exit"] = assembly["layers"][other]["exit"]

    return plant


def _kinds(*kinds: str) -> Callable[[Assembly], None]:
    def plant(assembly: Assembly) -> None:
        for layer, kind in zip(assembly["layers"], kinds):
            layer["kind"] = kind

    return plant


def _spec(**changes: float) -> Callable[[Assembly], None]:
    """Change what attention of the backend's own takes from the assembly.

    Scale and window of the kinds.
    """

    def plant(assembly: Assembly) -> None:
        for kind in assembly["kinds"].values():
            kind.update({name: type(kind[name])(kind[name] * factor) for name, factor in changes.items()})

    return plant


def _head_is_embedding(assembly: Assembly) -> None:
    """Bind the head to the embedding, as if the model tied the two."""
    for layer in assembly["layers"]:
        layer["exit"]["slots"]["lm_head.weight"] = ["model.embed_tokens.weight"]


def _embedding_is_head(assembly: Assembly) -> None:
    slots = assembly["embedding"]["slots"]
    slots[next(iter(slots))] = ["lm_head.weight"]


FAULTS = (
    Fault("slots-key-value", "slots of key and value swapped", assembly=swap(0, "block", "k_proj", "v_proj")),
    Fault(
        "slots-query-key",
        "slots of query and key swapped",
        "bias",
        assembly=swap(1, "block", "q_proj.weight", "k_proj.weight"),
    ),
    Fault("slots-bias", "slots of two biases swapped", "bias", assembly=swap(0, "block", "q_proj.bias", "v_proj.bias")),
    Fault("slots-gate-up", "slots of gate and up swapped", assembly=swap(1, "block", "gate_proj", "up_proj")),
    Fault(
        "slots-norms",
        "slots of two norms swapped",
        assembly=swap(1, "block", "previous.post_attention_layernorm", "current.input_layernorm"),
    ),
    Fault(
        "slots-final-norm",
        "the final norm is the first layer's",
        assembly=bind(1, "exit", "model.norm", "model.layers.0.input_layernorm.weight"),
    ),
    Fault("layer-entry", "the first layer's block has the second's weights", assembly=_moved(0, 1)),
    Fault("layer-middle", "the second layer's block has the third's weights", assembly=_moved(1, 1)),
    Fault(
        "layer-key",
        "the second layer's keys are made with the first's weight",
        assembly=bind(1, "block", "k_proj", "model.layers.0.self_attn.k_proj.weight"),
    ),
    Fault(
        "layer-output",
        "the first layer's output projection is the second's",
        assembly=bind(1, "block", "o_proj", "model.layers.1.self_attn.o_proj.weight"),
    ),
    Fault(
        "layer-down",
        "the last layer's down projection is the first's",
        assembly=bind(1, "exit", "down_proj", "model.layers.0.mlp.down_proj.weight"),
    ),
    Fault("layer-exit", "the exit of another depth", assembly=_exit_of(1, 0)),
    Fault(
        "layer-bias",
        "the second layer's value bias is the first's",
        "bias",
        assembly=bind(1, "block", "v_proj.bias", "model.layers.0.self_attn.v_proj.bias"),
    ),
    Fault("head-is-embedding", "lm_head taken for tied", assembly=_head_is_embedding),
    Fault("embedding-is-head", "the embedding bound to lm_head", assembly=_embedding_is_head),
    Fault(
        "kinds-swapped",
        "window and no window in the other's layer",
        "gemma2",
        assembly=_kinds("attention_2", "attention"),
    ),
    Fault("kinds-all-windowed", "the window in all layers", "gemma2", assembly=_kinds("attention", "attention")),
    Fault(
        "spec-scale",
        "the scale of fused attention 1.05 times too high",
        assembly=_spec(scale=1.05),
        backends=("tensorrt",),
    ),
    Fault(
        "spec-window",
        "fused attention without the window of 300",
        "window",
        assembly=_spec(window=0),
        backends=("tensorrt",),
    ),
    Fault("kinds-none-windowed", "the window in no layer", "gemma2", assembly=_kinds("attention_2", "attention_2")),
)
