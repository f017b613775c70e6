"""Faults of the assembly: tensors bound to the wrong layer, or shards to the wrong rank."""

from __future__ import annotations

from functools import partial
from typing import Any

from faults.fault import ASSEMBLY, FLOATS, HOST, Fault, change

Assembly = dict[str, Any]


@change
def swap(assembly: Assembly, layer: int, part: str, part_a: str, other: str) -> None:
    """Bind two slots of a part ("block" or "exit") of a layer to each other's tensors."""
    slots = assembly["layers"][layer][part]["slots"]
    first = next(name for name in slots if part_a in name)
    second = next(name for name in slots if other in name)
    slots[first], slots[second] = slots[second], slots[first]


@change
def bind(assembly: Assembly, layer: int, part: str, slot: str, tensor: str) -> None:
    """Bind the slots of a part of a layer whose names hold `slot` to another tensor: of quantised ones data and scales.

    tensor: without these ends, unless it has one.
    """
    slots = assembly["layers"][layer][part]["slots"]
    for name in [name for name in slots if slot in name]:
        _, _, end = name.partition(".weight")
        slots[name] = [tensor if tensor.endswith(end) else f"{tensor}{end}"]


@change
def moved(assembly: Assembly, layer: int, by: int) -> None:
    """Every tensor of a layer's block that belongs to this layer is the neighbour's."""
    slots = assembly["layers"][layer]["block"]["slots"]
    for name, tensors in slots.items():
        slots[name] = [tensor.replace(f"layers.{layer}.", f"layers.{layer + by}.") for tensor in tensors]


@change
def exit_of(assembly: Assembly, layer: int, other: int) -> None:
    assembly["layers"][layer]["exit"] = assembly["layers"][other]["exit"]


@change
def variants(assembly: Assembly, *names: str) -> None:
    for layer, name in zip(assembly["layers"], names):
        layer["kind"] = name


@change
def spec(assembly: Assembly, name: str, factor: float) -> None:
    """Change what attention of the backend's own takes from the assembly: scale and window of the variants."""
    for variant in assembly["kinds"].values():
        variant[name] = type(variant[name])(variant[name] * factor)


def head_is_embedding(assembly: Assembly) -> None:
    """Bind the head to the embedding, as if the model tied the two."""
    for layer in assembly["layers"]:
        layer["exit"]["slots"]["lm_head.weight"] = ["model.embed_tokens.weight"]


def embedding_is_head(assembly: Assembly) -> None:
    slots = assembly["embedding"]["slots"]
    slots[next(iter(slots))] = ["lm_head.weight"]


@change
def exchanged(assembly: Assembly, kind: str, name: str, *classes: str) -> None:
    """Swap the two ranks' shards of the parts whose names hold `name`. kind: "weights" or "values"."""
    for class_name in classes:
        shards = assembly["tensor_parallel"]["classes"][class_name][kind]
        shards[next(shard for shard in shards if name in shard)]["ranges"].reverse()


@change
def all_add(assembly: Assembly, bias: str) -> None:
    """Each rank adds the bias to its partial sum."""
    for sharded in assembly["tensor_parallel"]["classes"].values():
        sharded["first"] = [slot for slot in sharded["first"] if bias not in slot]


on_gpu = partial(Fault, backends=("tensorrt",))
# fmt: off
FAULTS = (
    Fault("slots-key-value", "slots of key and value swapped", ASSEMBLY, swap(0, "block", "k_proj", "v_proj")),
    Fault("slots-query-key", "slots of query and key swapped", ASSEMBLY,
          swap(1, "block", "q_proj.weight", "k_proj.weight"), "bias"),
    Fault("slots-bias", "slots of two biases swapped", ASSEMBLY,
          swap(0, "block", "q_proj.bias", "v_proj.bias"), "bias"),
    Fault("slots-gate-up", "slots of gate and up swapped", ASSEMBLY, swap(1, "block", "gate_proj", "up_proj")),
    Fault("slots-norms", "slots of two norms swapped", ASSEMBLY,
          swap(1, "block", "previous.post_attention_layernorm", "current.input_layernorm")),
    Fault("slots-final-norm", "the final norm is the first layer's", ASSEMBLY,
          bind(1, "exit", "model.norm", "model.layers.0.input_layernorm.weight")),
    Fault("layer-entry", "the first layer's block has the second's weights", ASSEMBLY, moved(0, 1)),
    Fault("layer-middle", "the second layer's block has the third's weights", ASSEMBLY, moved(1, 1)),
    Fault("layer-key", "the second layer's keys are made with the first's weight", ASSEMBLY,
          bind(1, "block", "k_proj", "model.layers.0.self_attn.k_proj.weight")),
    Fault("layer-output", "the first layer's output projection is the second's", ASSEMBLY,
          bind(1, "block", "o_proj", "model.layers.1.self_attn.o_proj.weight")),
    Fault("layer-down", "the last layer's down projection is the first's", ASSEMBLY,
          bind(1, "exit", "down_proj", "model.layers.0.mlp.down_proj.weight")),
    Fault("layer-exit", "the exit of another depth", ASSEMBLY, exit_of(1, 0)),
    Fault("layer-bias", "the second layer's value bias is the first's", ASSEMBLY,
          bind(1, "block", "v_proj.bias", "model.layers.0.self_attn.v_proj.bias"), "bias"),
    Fault("head-is-embedding", "lm_head taken for tied", ASSEMBLY, head_is_embedding, precisions=FLOATS),
    Fault("embedding-is-head", "the embedding bound to lm_head", ASSEMBLY, embedding_is_head, precisions=FLOATS),
    Fault("kinds-swapped", "window and no window in the other's layer", ASSEMBLY, variants("attention_2", "attention"),
          "gemma2"),
    Fault("kinds-all-windowed", "the window in all layers", ASSEMBLY, variants("attention", "attention"), "gemma2"),
    on_gpu("spec-scale", "the scale of fused attention 1.05 times too high", ASSEMBLY, spec("scale", 1.05)),
    on_gpu("spec-window", "fused attention without the window of 300", ASSEMBLY, spec("window", 0), "window"),
    Fault("kinds-none-windowed", "the window in no layer", ASSEMBLY, variants("attention_2", "attention_2"), "gemma2"),
)
of_ranks = partial(Fault, where=ASSEMBLY, model="ranks", backends=HOST)
RANKS = (
    of_ranks("rank-query", "query heads of the other rank", change=exchanged("weights", "q_proj.weight", "middle")),
    of_ranks("rank-key", "key heads of the other rank", change=exchanged("weights", "k_proj.weight", "middle")),
    of_ranks("rank-value-bias", "the value's bias of the other rank",
             change=exchanged("weights", "v_proj.bias", "middle")),
    of_ranks("rank-output", "rows of the output projection swapped",
             change=exchanged("weights", "o_proj.weight", "middle")),
    of_ranks("rank-gate", "the gate's part of the other rank",
             change=exchanged("weights", "gate_proj.weight", "middle")),
    of_ranks("rank-down", "rows of the down projection swapped",
             change=exchanged("weights", "down_proj.weight", "middle")),
    of_ranks("rank-down-last", "the same in the exit", change=exchanged("weights", "down_proj.weight", "exit")),
    of_ranks("rank-vocabulary", "each rank has the other's tokens",
             change=exchanged("weights", "lm_head.weight", "exit")),
    of_ranks("rank-logits", "logits put together in reverse", change=exchanged("values", "logits", "exit")),
    of_ranks("rank-heads", "the key is put at the other rank's heads", change=exchanged("values", "key", "middle")),
    of_ranks("rank-attention", "attention of the other rank's heads",
             change=exchanged("values", "attention", "middle", "exit")),
    of_ranks("down-bias-twice", "all ranks add the down projection's bias", change=all_add("down_proj.bias")),
    of_ranks("output-bias-twice", "all ranks add the output's bias", change=all_add("o_proj.bias")),
)
# fmt: on
