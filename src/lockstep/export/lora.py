"""Give the linear layers of a block room for adapters (LoRA; Hu et al. 2021).

In: an exported graph. Out: the same with, for each linear layer y = x W^T that may be adapted,

    y = x W^T + where(column's adapter == token's adapter, x A, 0) B

and the inputs `adapter_ids [num_tokens]`, A and B. A [in_features, n*R] and B [n*R, out_features] hold the matrices of
n adapters side by side, each with room for rank R; what is not used is zero. Two thin products for all tokens take
less time than to gather each token's matrices, and work in every library. The choice is a Where, not a product with 0:
what another adapter makes of a token may be infinite.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lockstep.artifacts import quantized
from lockstep.artifacts.adapters import A_SUFFIX, B_SUFFIX, IDS, LoraSlot, LoraSlots
from lockstep.artifacts.assembly import Assembly
from lockstep.errors import InputError
from lockstep.export.canonical import Graph, canonical_proto
from lockstep.export.cut import INPUT_ORDER
from lockstep.export.tracer import meta_model
from lockstep.onnx_tools.rewriter import Emitter, Rewriter, attributes_of, typed_values

_LAYER_SLOTS = ("previous", "current.")  # slots of a decoder layer's weights open so
_ROWS = "logit_rows"
_KNOWN_ROWS = ("num_tokens", "num_requests")
_IN_LAYER = re.compile(r"\.\d+\.")


def module_of(slot: str) -> str:
    """Return the name of a linear layer within its decoder layer, `self_attn.q_proj`, from its weight's slot."""
    return quantized.module_of(slot.partition(".")[2])


def fits(module: str, targets: Collection[str] | None) -> bool:
    """Return whether a module is one of `targets` as PEFT matches names: whole, or behind a dot. None: all fit."""
    return targets is None or any(module == target or module.endswith(f".{target}") for target in targets)


def with_adapters(
    files: Mapping[str, bytes], assembly: Assembly, adapters: Mapping[str, Any], linears: Collection[str] | None = None
) -> tuple[dict[str, bytes], Assembly]:
    """Return files and assembly with blocks that take adapters; the uncut graph stays without.

    adapters: max_adapters, max_lora_rank, and targets: names of modules that adapters may be of, as PEFT has them;
    None: all linear layers of the decoder layers. linears: names of the model's linear layers; what else is such a
    product (a router of experts) takes no adapters. None: all such products are taken for linear layers.

    Raises InputError where no linear layer of a name, or none at all, is there, and where one takes no adapters.
    """
    room = (adapters["max_adapters"], adapters["max_lora_rank"])
    targets = adapters.get("targets")
    modules = {
        name: {
            slot.name: module_of(slot.name)
            for slot in file.signature.slots
            if name != assembly.embedding.graph and _is_linear(assembly, name, slot.name, linears)
        }
        for name, file in assembly.classes.items()
    }
    products = {
        name: _products(Rewriter(onnx.ModelProto.FromString(files[file.file])), modules[name])
        for name, file in assembly.classes.items()
    }
    known = {modules[name][slot] for name, slots in products.items() for slot in slots}
    if not known:
        renamed = {_IN_LAYER.split(name)[-1] for name in linears or () if _IN_LAYER.search(name)}
        raise InputError(
            "adapters: expected linear layers in decoder layers whose weights have the layers' own names in the "
            f"checkpoint, found other names there for {', '.join(sorted(renamed)) or 'all'}; serve this model without "
            "adapters"
        )
    if missing := [target for target in targets or () if not any(fits(module, [target]) for module in known)]:
        found = ", ".join(sorted(known))
        asked = ", ".join(missing)
        raise InputError(f"lora_target_modules: expected linear layers of the model ({found}), found {asked}")
    parts = [part for layer in assembly.layers for part in layer.parts]
    taken = {part.slots[slot][0].removesuffix(".weight") for part in parts for slot in products[part.graph]}
    # The head, which is in no list of layers, takes no adapters of PEFT's either unless it is named.
    lost = {name for name in linears or () if _IN_LAYER.search(name) and fits(name, targets) and name not in taken}
    if lost:
        kinds = [", ".join(sorted({_IN_LAYER.split(name)[-1] for name in names})) for names in (taken, lost)]
        raise InputError(
            f"lora_target_modules: expected linear layers that take adapters ({kinds[0]}), found {kinds[1]}, whose "
            "products are none of a linear layer in the graphs; name there the modules that your adapters are of"
        )
    adapted = dict(files)
    classes = dict(assembly.classes)
    lora = {}
    for name, file in assembly.classes.items():
        slots = [slot for slot, module in modules[name].items() if fits(module, targets)]
        graph, layers = add_lora(Graph(files[file.file], file.signature), slots, *room)
        if layers:
            lora[name] = layers
            adapted[file.file] = graph.data
            classes[name] = replace(file, sha256=graph.sha256, signature=graph.signature)
    return adapted, replace(assembly, classes=classes, adapters=LoraSlots(*room, lora))


def add_lora(
    graph: Graph, slots: Collection[str], max_adapters: int, max_lora_rank: int
) -> tuple[Graph, dict[str, LoraSlot]]:
    """Give a graph room for adapters of the linear layers with these weight slots.

    Returns the new graph, and where each layer takes its adapters; the graph as it is, where it has none of these
    layers.
    """
    rewriter = Rewriter(graph.proto)
    columns = max_adapters * max_lora_rank
    products = _products(rewriter, slots)
    if not products:
        return graph, {}
    element = rewriter.element(next(iter(products)))
    owner = np.repeat(np.arange(max_adapters, dtype=np.int64), max_lora_rank)
    rewriter.constant("lora/owner", owner[None])
    rewriter.constant("lora/axis", np.array([1], np.int64))
    rewriter.constants["lora/zero"] = helper.make_tensor("lora/zero", element, [], [0.0])
    inputs = [rewriter.input(IDS, onnx.TensorProto.INT64, ["num_tokens"])]
    for rows in dict.fromkeys(rows for _, rows in products.values()):
        rewriter.prepend(*_mask(rows))
    lora = {}
    for weight, (node, rows) in products.items():
        wide, deep = rewriter.shape(weight) if attributes_of(node).get("transB") else rewriter.shape(weight)[::-1]
        lora[weight] = slot = LoraSlot(weight + A_SUFFIX, weight + B_SUFFIX, deep, wide)
        inputs.append(rewriter.input(slot.a, element, [deep, columns]))
        inputs.append(rewriter.input(slot.b, element, [columns, wide]))
        (output,) = node.output
        node.output[0] = f"{output}/base"
        emit = Emitter(rewriter, f"{output}/lora")
        own = emit("Where", f"lora/{rows}", emit("Gemm", node.input[0], slot.a), "lora/zero")
        emit("Add", node.output[0], emit("Gemm", own, slot.b), result=output)
        rewriter.replace(node, node, *emit.nodes)
    carried = [io.name for io in graph.signature.inputs if io.name not in INPUT_ORDER]
    proto = rewriter.finish().graph
    weights = {slot.name: slot.name for slot in graph.signature.slots}
    return canonical_proto(proto, proto.name, [*INPUT_ORDER, *carried, *inputs], weights), lora


def _products(graph: Rewriter, slots: Collection[str]) -> dict[str, tuple[onnx.NodeProto, str]]:
    """Return {weight slot: its product, and whether its rows are num_tokens or num_requests}."""
    types = typed_values(graph.model)
    products = {}
    of_requests = {_ROWS}
    for node in graph.nodes:
        if of_requests & set(node.input):
            of_requests |= set(node.output)
        if node.op_type == "Gemm" and node.input[1] in slots:
            rows, *_ = types[node.input[0]][1]
            if isinstance(rows, str) and rows not in _KNOWN_ROWS:  # after a Reshape, as of state mixers
                rows = "num_requests" if node.input[0] in of_requests else "num_tokens"
            if rows in _KNOWN_ROWS:
                products[node.input[1]] = (node, str(rows))
    return products


def _mask(rows: str) -> list[onnx.NodeProto]:
    """Return nodes that make the mask [rows, n*R] of each row's adapter; rows: num_tokens, or num_requests."""
    name = f"lora/{rows}"
    ids = IDS if rows == "num_tokens" else f"lora/{rows}/ids"
    gather = helper.make_node("Gather", [IDS, _ROWS], [ids], axis=0)
    return [
        *([] if ids == IDS else [gather]),
        helper.make_node("Unsqueeze", [ids, "lora/axis"], [f"{name}/column"]),
        helper.make_node("Equal", [f"{name}/column", "lora/owner"], [name]),
    ]


def linear_layers(model: PreTrainedModel) -> set[str]:
    """Return the names of a model's linear layers, as PEFT finds them, but for routers that return more."""
    plain = torch.nn.Linear.forward, Conv1D.forward
    return {name for name, module in model.named_modules() if type(module).forward in plain}


def transposed_layers(config: Mapping[str, Any]) -> set[str]:
    """Return the names of the linear layers of a config.json whose weights are [in_features, out_features]."""
    return {name for name, module in meta_model(config, "fp32").named_modules() if isinstance(module, Conv1D)}


def _is_linear(assembly: Assembly, name: str, slot: str, linears: Collection[str] | None) -> bool:
    """Return whether a slot takes the weight of one linear layer of a decoder layer, under the layer's own name."""
    if not slot.startswith(_LAYER_SLOTS) or not slot.endswith(".weight"):
        return False
    parts = [part for layer in assembly.layers for part in layer.parts if part.graph == name]
    return all(
        len(part.slots[slot]) == 1
        and part.slots[slot][0].endswith(f".{module_of(slot)}.weight")
        and (linears is None or part.slots[slot][0].removesuffix(".weight") in linears)
        for part in parts
    )
