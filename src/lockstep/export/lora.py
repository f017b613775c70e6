"""Give the linear layers of a block room for adapters (LoRA; Hu et al. 2021).

In: an exported graph. Out: the same with, for each linear layer y = x W^T that may be adapted,

    y = x W^T + where(column's adapter == token's adapter, x A, 0) B

and the inputs `adapter_ids [num_tokens]`, A and B. A [in_features, n*R] and B [n*R, out_features] hold the matrices of
n adapters side by side, each with room for rank R; what is not used is zero. Two thin products for all tokens take
less time than to gather each token's matrices, and work in every library. The choice is a Where, not a product with 0:
what another adapter makes of a token may be infinite.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import helper, numpy_helper
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lockstep.artifacts import quantized
from lockstep.artifacts.adapters import A_SUFFIX, B_SUFFIX, IDS, LoraSlot, LoraSlots
from lockstep.artifacts.assembly import Assembly
from lockstep.errors import InputError
from lockstep.export.canonical import Graph, canonical
from lockstep.export.cut import INPUT_ORDER

_LAYER_SLOTS = ("previous.", "current.")  # slots of a decoder layer's weights open so
_ROWS = "logit_rows"


def module_of(slot: str) -> str:
    """Return the name of a linear layer within its decoder layer.

    slot: its weight slot, of a quantised one that of its integers. An example is `self_attn.q_proj`.
    """
    return quantized.module_of(slot.partition(".")[2])


def fits(module: str, targets: Collection[str] | None) -> bool:
    """Return whether a module is one of `targets`, as PEFT matches names.

    A name fits whole, or behind a dot. None: all fit.
    """
    return targets is None or any(module == target or module.endswith(f".{target}") for target in targets)


def add_lora(
    graph: Graph, slots: Collection[str], max_adapters: int, max_lora_rank: int
) -> tuple[Graph, dict[str, LoraSlot]]:
    """Give a graph room for adapters of the linear layers with these weight slots.

    Returns the new graph, and where each layer takes its adapters; the graph as it is, where it has none of these
    layers.
    """
    model = graph.proto
    nodes = {node.output[0]: node for node in model.graph.node if node.op_type == "Gemm" and node.input[1] in slots}
    if not nodes:
        return graph, {}
    columns = max_adapters * max_lora_rank
    element = _element(model.graph, next(iter(nodes.values())).input[1])
    rows = _rows_of(model)
    kept, lora, made = [*model.graph.node], {}, onnx.GraphProto()
    masks: dict[str, str] = {}
    ordered: list[onnx.NodeProto] = []
    shapes = {slot.name: slot.sizes for slot in graph.signature.slots}
    inputs: list[str] = [IDS]
    for node in kept:
        if node.output[0] not in nodes or rows.get(node.input[0]) not in ("num_tokens", "num_requests"):
            ordered.append(node)
            continue
        size = rows[node.input[0]]
        if size not in masks:
            masks[size] = f"lora/{size}"
            ordered += _mask(size, masks[size])
        weight, output = node.input[1], node.output[0]
        transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        wide, deep = shapes[weight] if transposed else shapes[weight][::-1]
        slot = LoraSlot(weight + A_SUFFIX, weight + B_SUFFIX, deep, wide)
        lora[weight] = slot
        inputs += [slot.a, slot.b]
        made.input.append(helper.make_tensor_value_info(slot.a, element, [deep, columns]))
        made.input.append(helper.make_tensor_value_info(slot.b, element, [columns, wide]))
        node.output[0] = f"{output}/base"
        ordered += [
            node,
            helper.make_node("Gemm", [node.input[0], slot.a], [f"{output}/shrunk"]),
            helper.make_node("Where", [masks[size], f"{output}/shrunk", "lora/zero"], [f"{output}/own"]),
            helper.make_node("Gemm", [f"{output}/own", slot.b], [f"{output}/lora"]),
            helper.make_node("Add", [f"{output}/base", f"{output}/lora"], [output]),
        ]
    if not lora:
        return graph, {}
    del model.graph.node[:]
    model.graph.node.extend(ordered)
    model.graph.input.append(helper.make_tensor_value_info(IDS, onnx.TensorProto.INT64, ["num_tokens"]))
    model.graph.input.extend(made.input)
    owner = np.repeat(np.arange(max_adapters), max_lora_rank)[None]
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(owner.astype(np.int64), "lora/owner"),
            numpy_helper.from_array(np.array([1], np.int64), "lora/axis"),
            onnx.TensorProto(name="lora/zero", data_type=element, dims=[], raw_data=bytes(_SIZES[element])),
        ]
    )
    carried = [io.name for io in graph.signature.inputs if io.name not in INPUT_ORDER]
    order = [*INPUT_ORDER, *carried, *inputs]
    result = canonical(ir.from_proto(model).graph, model.graph.name, order, {slot: slot for slot in shapes})
    onnx.checker.check_model(result.proto, full_check=True)
    return result, lora


def adapted(
    files: dict[str, bytes],
    assembly: Assembly,
    max_adapters: int,
    max_lora_rank: int,
    targets: Collection[str] | None = None,
    linears: Collection[str] | None = None,
) -> tuple[dict[str, bytes], LoraSlots, dict[str, Graph]]:
    """Return an assembly's files with graphs that take adapters.

    targets: names of modules that adapters may be of, as PEFT has them; None: all linear layers of the decoder layers.
    linears: names of the model's linear layers; what else is such a product (a router of experts) takes no adapters.
    None: all such products are taken for linear layers.

    Returns the files, where the graphs take adapters, and these graphs by class. Raises InputError where none of a
    name, or none at all, is there.
    """
    classes: dict[str, dict[str, LoraSlot]] = {}
    graphs: dict[str, Graph] = {}
    known: set[str] = set()
    files = dict(files)
    for name, file in assembly.classes.items():
        if name == assembly.embedding.graph:
            continue
        graph = Graph(files[file.file], file.signature)
        slots = [slot.name for slot in file.signature.slots if _is_linear(assembly, name, slot.name, linears)]
        made, everywhere = add_lora(graph, slots, max_adapters, max_lora_rank)
        known |= {module_of(slot) for slot in everywhere}
        if targets is not None:
            made, everywhere = add_lora(
                graph, [slot for slot in everywhere if fits(module_of(slot), targets)], max_adapters, max_lora_rank
            )
        if everywhere:
            classes[name], graphs[name], files[file.file] = everywhere, made, made.data
    missing = [target for target in targets or () if not any(fits(module, [target]) for module in known)]
    if missing or not known:
        found = ", ".join(sorted(known)) or "none"
        asked = ", ".join(missing) or "linear layers in its decoder layers"
        raise InputError(f"lora_target_modules: expected linear layers of the model ({found}), found {asked}")
    return files, LoraSlots(max_adapters, max_lora_rank, classes), graphs


def linear_layers(model: PreTrainedModel) -> set[str]:
    """Return the names of a model's linear layers, as PEFT finds them."""
    return {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)}


def _is_linear(assembly: Assembly, name: str, slot: str, linears: Collection[str] | None) -> bool:
    """Return whether a slot takes the weight of one linear layer.

    The layer is one of a decoder layer, and the checkpoint has the weight under the layer's own name.
    """
    if not slot.startswith(_LAYER_SLOTS) or not slot.endswith(".weight"):
        return False
    parts = [part for layer in assembly.layers for part in (layer.block, layer.exit) if part.graph == name]
    return all(
        len(part.slots[slot]) == 1
        and part.slots[slot][0].endswith(f".{module_of(slot)}.weight")
        and (linears is None or part.slots[slot][0].removesuffix(".weight") in linears)
        for part in parts
    )


_SIZES: dict[int, int] = {onnx.TensorProto.FLOAT: 4, onnx.TensorProto.FLOAT16: 2, onnx.TensorProto.BFLOAT16: 2}


def _element(graph: onnx.GraphProto, weight: str) -> int:
    return next(value.type.tensor_type.elem_type for value in graph.input if value.name == weight)


def _rows_of(model: onnx.ModelProto) -> dict[str, str]:
    """Return what the rows are of each value of two dimensions, by name.

    num_tokens or num_requests.
    """
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    return {
        value.name: value.type.tensor_type.shape.dim[0].dim_param
        for value in (*inferred.input, *inferred.value_info, *inferred.output)
        if len(value.type.tensor_type.shape.dim) == 2
    }


def _mask(size: str, name: str) -> list[onnx.NodeProto]:
    """Return nodes that make a mask of each row's adapter, [rows, n*R].

    It says which columns are of the row's adapter. Rows of requests are those of their last tokens.
    """
    nodes, ids = [], IDS
    if size == "num_requests":
        ids = f"{name}/ids"
        nodes.append(helper.make_node("Gather", [IDS, _ROWS], [ids], axis=0))
    return [
        *nodes,
        helper.make_node("Unsqueeze", [ids, "lora/axis"], [f"{name}/column"]),
        helper.make_node("Equal", [f"{name}/column", "lora/owner"], [name]),
    ]
