"""Join products with the weights of experts to one node each.

In: a graph in which each row gathers its expert's weight and is multiplied with it. Out: one with nodes
`lockstep::ExpertProduct(rows, ids, weight, ...)`, of rows `[num_tokens, in_features]` that a token's experts share, or
`[num_tokens, per_token * in_features]`, and ids `[num_tokens, per_token]`; their outputs are `[num_tokens, per_token *
out_features]`. cut_products.py takes them out of a graph: no library runs them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from lockstep.errors import CheckError
from lockstep.onnx_tools.group_experts import ExpertProduct, expert_product, expert_products
from lockstep.onnx_tools.rewriter import Dims, Emitter, Rewriter, attributes_of, typed_values

DOMAIN = "lockstep"
OPERATOR = "ExpertProduct"
SHAPING = ("Reshape", "Squeeze", "Unsqueeze")
# The operators that decode MXFP4 weights.
_MXFP4 = sorted(["Cast", "Gather", "Reshape", "Cast", "Gather", "Unsqueeze", "Mul", "Reshape"])


@dataclass(frozen=True)
class ExpertWeight:
    """The weights of experts: [count, out_features, in_features] if `transposed`, else with the last two swapped.

    slots: the weight itself for the kind "floats"; data and scales for "integers" and "mxfp4", of `bits` bits, in
    groups.
    """

    slots: tuple[str, ...]
    count: int
    in_features: int
    out_features: int
    bits: int
    group_size: int
    kind: str
    transposed: bool


def with_expert_products(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a graph with a node for each product with experts' weights; the graph itself if it has none."""
    if not any(node.op_type in ("GatherND", "GatherBlockQuantized", "TopK") for node in model.graph.node):
        return model
    graph = Rewriter(model)
    products = expert_products(graph)
    if not products:
        return model
    shapes = {name: shape for name, (_, shape) in typed_values(model).items()}
    for product in products:
        graph.replace(product.node, *_nodes(graph, product, shapes))
    graph.model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return graph.finish()


def with_few_experts(model: onnx.ModelProto, count: int) -> onnx.ModelProto:
    """Return a copy whose products have at most `count` experts; the chosen ids are taken modulo `count`.

    The chosen experts become outputs, under the names by which products read them.
    """
    graph = Rewriter(model)
    shapes = {name: shape for name, (_, shape) in typed_values(model).items()}
    reduced_ids: dict[str, str] = {}  # {ids: ids modulo count}
    for node in graph.nodes:
        product = expert_product(graph, node)
        if product is None:
            continue
        if product.ids not in reduced_ids:
            reduced_ids[product.ids] = f"{product.ids}/few"
            number = graph.constant(f"{product.ids}/count", np.array(count, np.int64))
            mod = helper.make_node("Mod", [product.ids, number], [reduced_ids[product.ids]])
            maker = graph.producers[product.ids]
            graph.replace(maker, maker, mod)
            name, per_token = _ids(graph, product, shapes)
            graph.outputs[name] = helper.make_tensor_value_info(name, TensorProto.INT64, [None, per_token])
        for gather in product.gathers:
            reader = graph.producers[gather.input[1]] if product.is_quantized else gather
            reader.input[reader.input[:].index(product.ids)] = reduced_ids[product.ids]
        if product.is_quantized:
            target = graph.producers[product.gathers[0].input[0]].input[1]
            sizes = graph.array(target)
            assert sizes is not None  # `expert_product` checked it
            graph.constant(target, np.array([min(count, graph.shape(product.stacks[0])[0]), *sizes[1:]], np.int64))
        for stack in product.stacks:
            experts, *matrix_shape = graph.shape(stack)
            value = helper.make_tensor_value_info(stack, graph.element(stack), [min(count, experts), *matrix_shape])
            graph.replace_input(stack, value)
    return graph.finish()


def _nodes(graph: Rewriter, product: ExpertProduct, shapes: dict[str, Dims]) -> list[onnx.NodeProto]:
    (out,) = product.node.output
    weight = _weight(graph, product)
    ids, per_token = _ids(graph, product, shapes)
    is_first = product.node.input[1] == product.rows  # [rows, in_features, 1]
    emit = Emitter(graph, out)
    rows = _token_rows(graph, product.rows, shapes, (per_token, weight.in_features))
    settings = {"per_token": per_token, "shared": int(rows is not None)} | asdict(weight)
    settings.pop("slots")
    if rows is None:
        rows = emit("Reshape", product.rows, [-1, per_token * weight.in_features])
    flat = emit(OPERATOR, rows, ids, *weight.slots, result=f"{out}/flat", domain=DOMAIN, **settings)
    shape = [-1, weight.out_features, 1] if is_first else [-1, 1, weight.out_features]
    emit("Reshape", flat, shape, result=out, name=product.node.name)
    return emit.nodes


def _weight(graph: Rewriter, product: ExpertProduct) -> ExpertWeight:
    """Return the weights of a product. Raises CheckError for an unknown form."""
    experts, rows, columns = graph.shape(product.stacks[0])[:3]
    if product.is_quantized:
        sizes = attributes_of(product.gathers[0])
        bits = sizes["bits"]
        group_size = sizes["block_size"]
        return ExpertWeight(product.stacks, experts, columns * group_size, rows, bits, group_size, "integers", True)
    if not product.decode:
        in_features, out_features = (columns, rows) if product.transposed else (rows, columns)
        return ExpertWeight(product.stacks, experts, in_features, out_features, 16, 0, "floats", product.transposed)
    decoded_shape = graph.array(product.decode[-1].input[1])
    slots = tuple(sorted(product.stacks, key=lambda slot: -len(graph.shape(slot))))  # codes, exponents
    is_mxfp4 = sorted(node.op_type for node in product.decode) == _MXFP4 and product.transposed and len(slots) == 2
    if decoded_shape is None or not is_mxfp4:
        raise CheckError(
            f"graph {graph.model.graph.name}: expected experts of integers or MXFP4, found {product.stacks[0]} in "
            "another form"
        )
    out_features, in_features = (int(size) for size in decoded_shape[1:])
    group_size = in_features // graph.shape(slots[1])[2]
    return ExpertWeight(slots, experts, in_features, out_features, 4, group_size, "mxfp4", True)


def _ids(graph: Rewriter, product: ExpertProduct, shapes: dict[str, Dims]) -> tuple[str, int]:
    """Return the value [num_tokens, per_token] with the experts of tokens, and per_token."""
    name = product.ids
    while name in graph.producers and graph.producers[name].op_type in SHAPING:
        name = graph.producers[name].input[0]
    shape = shapes.get(name, ())
    if len(shape) != 2 or not isinstance(shape[1], int):
        raise CheckError(
            f"graph {graph.model.graph.name}: value {name}: expected the experts of tokens, [num_tokens, experts of a "
            f"token], found {list(shape)}"
        )
    return name, shape[1]


def _token_rows(graph: Rewriter, name: str, shapes: dict[str, Dims], sizes: tuple[int, int]) -> str | None:
    """Return the value [num_tokens, in_features] whose rows are repeated for a token's experts; None without one."""
    is_expanded = False
    while name in graph.producers:
        node = graph.producers[name]
        if node.op_type == "Expand":
            is_expanded = shapes.get(node.output[0], ())[1:] == sizes
        elif node.op_type not in SHAPING:
            return None
        name = node.input[0]
        if is_expanded and len(shapes.get(name, ())) == 2:
            return name
    return None


def is_expert_product(node: onnx.NodeProto) -> bool:
    return node.op_type == OPERATOR and node.domain == DOMAIN
