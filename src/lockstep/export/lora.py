"""Add inputs for adapters to the linear layers of a block (LoRA; Hu et al. 2021).

In: an exported graph. Out: the same graph in which each linear layer y = x W^T that may be adapted computes

    y = x W^T + where(column's adapter == token's adapter, x A, 0) B

with the inputs `adapter_ids [num_tokens]`, A and B. A [in_features, n*R] and B [n*R, out_features] hold the matrices of
n adapters side by side, each padded with zeros to rank R. Two thin products over all tokens take less time than to
gather each token's matrices, and work in every library. A Where masks, not a product with 0: another adapter's result
for a token may be infinite.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lockstep.artifacts import quantized
from lockstep.artifacts.adapters import A_SUFFIX, B_SUFFIX, IDS, LoraSlot, LoraSlots, is_target
from lockstep.artifacts.assembly import Assembly
from lockstep.errors import InputError
from lockstep.export.canonical import Graph, canonical
from lockstep.export.cut import INPUT_ORDER
from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult, add_input, change, infer_types
from lockstep.onnx_tools.values import attribute, dtype_of, required, shape_of, sizes_of

_LAYER_SLOT_PREFIXES = ("previous", "current.")  # of slots of a decoder layer's weights
_ROWS = "logit_rows"
_ROW_DIMS = ("num_tokens", "num_requests")  # of blocks, and of an exit from its logit rows on
_IN_LAYER = re.compile(r"\.\d+\.")


def module_of(slot: str) -> str:
    """Return the name of a linear layer within its decoder layer, `self_attn.q_proj`, from its weight's slot."""
    return quantized.module_of(slot.partition(".")[2])


def with_adapters(
    files: Mapping[str, bytes], assembly: Assembly, adapters: Mapping[str, Any], linears: Collection[str] | None = None
) -> tuple[dict[str, bytes], Assembly]:
    """Return files and assembly with blocks that take adapters; the uncut graph does not change.

    adapters: max_adapters, max_lora_rank, and targets: names of modules that adapters may have, as in PEFT; None: all
    linear layers of the decoder layers. linears: names of the model's linear layers; other products of this form (a
    router of experts) take no adapters. None: all such products count as linear layers.

    Raises InputError where a target matches no linear layer, or one whose product takes no adapters.
    """
    limits = (adapters["max_adapters"], adapters["max_lora_rank"])
    targets = adapters.get("targets")
    modules: dict[str, dict[str, str]] = {}  # {class: {weight slot: module}}
    products: dict[str, Products] = {}
    for name, file in assembly.classes.items():
        modules[name] = {}
        if name != assembly.embedding.graph:
            for slot in file.signature.slots:
                if _is_linear(assembly, name, slot.name, linears):
                    modules[name][slot.name] = module_of(slot.name)
        products[name] = _products(ir.from_proto(onnx.ModelProto.FromString(files[file.file])), modules[name])
    available: set[str] = set()
    for name, slots in products.items():
        available.update(modules[name][slot] for slot in slots)
    if not available:
        renamed = _within_layer([name for name in linears or () if _IN_LAYER.search(name)])
        raise InputError(
            "adapters: expected linear layers in decoder layers whose weights have the layers' own names in the "
            f"checkpoint, found other names there for {renamed or 'all'}; serve this model without adapters"
        )
    unmatched = []
    for target in targets or ():
        if not any(is_target(module, [target]) for module in available):
            unmatched.append(target)
    if unmatched:
        raise InputError(
            f"lora_target_modules: expected linear layers of the model ({', '.join(sorted(available))}), found "
            f"{', '.join(unmatched)}"
        )
    _check_all_adapted(assembly, products, linears or (), targets)
    adapted = dict(files)
    classes = dict(assembly.classes)
    lora = {}
    for name, file in assembly.classes.items():
        targeted = [slot for slot, module in modules[name].items() if is_target(module, targets)]
        graph, layers = add_lora(Graph(files[file.file], file.signature), targeted, *limits)
        if layers:
            lora[name] = layers
            adapted[file.file] = graph.data
            classes[name] = replace(file, sha256=graph.sha256, signature=graph.signature)
    return adapted, replace(assembly, classes=classes, adapters=LoraSlots(*limits, lora))


def _check_all_adapted(
    assembly: Assembly, products: Mapping[str, Products], linears: Collection[str], targets: Collection[str] | None
) -> None:
    """Raise InputError for a linear layer that matches a target and has no product in the graphs."""
    adapted: set[str] = set()
    for layer in assembly.layers:
        for block in layer.parts:
            adapted.update(block.slots[slot][0].removesuffix(".weight") for slot in products[block.graph])
    # The head is in no list of layers: PEFT adapts it only if it is named.
    missing = {name for name in linears if _IN_LAYER.search(name) and is_target(name, targets)} - adapted
    if missing:
        raise InputError(
            f"lora_target_modules: expected linear layers that take adapters ({_within_layer(adapted)}), found "
            f"{_within_layer(missing)}, whose products are none of a linear layer in the graphs; name there the "
            "modules that your adapters are of"
        )


def _within_layer(names: Collection[str]) -> str:
    return ", ".join(sorted({_IN_LAYER.split(name)[-1] for name in names}))


def add_lora(
    graph: Graph, slots: Collection[str], max_adapters: int, max_lora_rank: int
) -> tuple[Graph, dict[str, LoraSlot]]:
    """Add adapter inputs for the linear layers with these weight slots.

    Returns the new graph, and the slots of A and B by weight slot; a graph without these layers is returned unchanged.
    """
    adapt = AddLora(slots, max_adapters, max_lora_rank)
    model = ir.from_proto(graph.proto)
    if not change(model, adapt):
        return graph, {}
    carried = [io.name for io in graph.signature.inputs if io.name not in INPUT_ORDER]
    weights = {slot.name: slot.name for slot in graph.signature.slots}
    return canonical(model.graph, str(model.graph.name), [*INPUT_ORDER, *carried, *adapt.inputs], weights), adapt.lora


class AddLora(Pass):
    """Add adapters to the linear layers with these weight slots.

    inputs: the names of those that are added. lora: {weight slot: its slots of A and B}.
    """

    def __init__(self, slots: Collection[str], max_adapters: int, max_lora_rank: int):
        self._slots = slots
        self._owner = np.repeat(np.arange(max_adapters, dtype=np.int64), max_lora_rank)[None]  # the adapter of a column
        self.inputs: list[str] = []
        self.lora: dict[str, LoraSlot] = {}

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        products = _products(model, self._slots)
        if not products:
            return PassResult(model, False)
        logit_rows = next((value for value in graph.inputs if value.name == _ROWS), None)
        ids = self._add(graph, IDS, ir.DataType.INT64, ["num_tokens"])
        start = GraphWriter(graph, "lora", before=next(iter(graph)))
        masks = {}
        # One mask for all products over tokens, and in an exit one for those over the rows of its logits.
        for rows in dict.fromkeys(rows for _, rows in products.values()):
            ids_of_rows = ids
            if rows == "num_requests":
                ids_of_rows = start.op("Gather", ids, logit_rows, axis=0)
            masks[rows] = start.op("Equal", start.op("Unsqueeze", ids_of_rows, [1]), self._owner)
        columns = self._owner.size
        for name, (node, rows) in products.items():
            weight = required(node.inputs[1])
            dtype = dtype_of(weight)
            (out,) = node.outputs
            out_features, in_features = sizes_of(weight)
            if not attribute(node, "transB", 0):
                in_features, out_features = sizes_of(weight)
            self.lora[name] = slot = LoraSlot(name + A_SUFFIX, name + B_SUFFIX, in_features, out_features)
            a = self._add(graph, slot.a, dtype, [in_features, columns])
            b = self._add(graph, slot.b, dtype, [columns, out_features])
            writer = GraphWriter(graph, f"{out.name}/lora", before=node)
            base = writer.copy(node, *node.inputs)
            shrunk = writer.op("Gemm", node.inputs[0], a)
            masked = writer.op("Where", masks[rows], shrunk, np.zeros((), dtype.numpy()))
            writer.op("Add", base, writer.op("Gemm", masked, b), replaces=out)
        return PassResult(model, True)

    def _add(self, graph: ir.Graph, name: str, dtype: ir.DataType, shape: list[int | str]) -> ir.Value:
        self.inputs.append(name)
        return add_input(graph, name, dtype, shape)


Products = dict[str, tuple[ir.Node, str]]  # {weight slot: (its Gemm, num_tokens or num_requests)}


def _products(model: ir.Model, slots: Collection[str]) -> Products:
    """Return the products of weight slots whose rows are tokens or requests."""
    infer_types(model)
    products = {}
    of_requests = {value for value in model.graph.inputs if value.name == _ROWS}
    for node in model.graph:
        if not of_requests.isdisjoint(node.inputs):
            of_requests.update(node.outputs)
        if node.op_type != "Gemm" or required(node.inputs[1]).name not in slots:
            continue
        first = shape_of(node.inputs[0])[0]
        if isinstance(first, int):  # rows that are no tokens
            continue
        rows = first.value
        if rows not in _ROW_DIMS:  # after a Reshape, as of state mixers, the dimension has no name
            rows = _ROW_DIMS[node.inputs[0] in of_requests]
        products[str(required(node.inputs[1]).name)] = (node, str(rows))
    return products


def linear_layers(model: PreTrainedModel) -> set[str]:
    """Return the names of a model's linear layers as in PEFT, except for routers, which return more than a product."""
    linear_forwards = torch.nn.Linear.forward, Conv1D.forward
    return {name for name, module in model.named_modules() if type(module).forward in linear_forwards}


def _is_linear(assembly: Assembly, name: str, slot: str, linears: Collection[str] | None) -> bool:
    """Return whether a slot takes the weight of one linear layer of a decoder layer, under the layer's own name."""
    if not slot.startswith(_LAYER_SLOT_PREFIXES) or not slot.endswith(".weight"):
        return False
    for layer in assembly.layers:
        for block in layer.parts:
            if block.graph != name:
                continue
            tensors = block.slots[slot]
            if len(tensors) != 1 or not tensors[0].endswith(f".{module_of(slot)}.weight"):
                return False
            if linears is not None and tensors[0].removesuffix(".weight") not in linears:
                return False
    return True
