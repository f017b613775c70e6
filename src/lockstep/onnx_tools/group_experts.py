"""Group products with the weights of experts: one product for each expert.

In: a graph in which each row gathers the weights of its expert (`GatherND`, or `GatherBlockQuantized` of quantised
ones) and is multiplied with them: memory grows with rows times weights. Out: one in which rows are sorted by expert and
those of each expert are one product, `Gemm` or `MatMulNBits`, whatever their number; none costs an empty call. Codes
are decoded to weights for each expert that has rows. A stack of weights becomes an input for each expert,
`expert_slot(stack, number)`, so that nothing is copied; with `stacked` it stays one input, which is split at each run.
A stack that all rows go through (Llama 4) becomes a product for each expert likewise.

The result of a row does not depend on other rows: products have the same bits for every number of rows, and the results
of a token's experts are added in the order of the router.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from lockstep.artifacts.experts import expert_slot
from lockstep.onnx_tools.rewriter import Emitter, Rewriter, attributes_of

_CONTRIB = "com.microsoft"
_QUANTIZED = "GatherBlockQuantized"
GATHERS = re.compile(rb"GatherND|GatherBlockQuantized")  # in the bytes of a graph that may have experts


@dataclass(frozen=True)
class ExpertProduct:
    """A product of rows with gathered weights.

    gathers: of the weights. stacks: inputs [num_experts, ...]. ids: the expert of each row, [rows, 1] or [rows]. rows:
    the operand that is not a weight. transposed: whether weights are `[out_features, in_features]`. decode: the nodes
    that turn gathered codes into `weight`, [rows, ...]; none where the weight itself is gathered.
    """

    node: onnx.NodeProto
    gathers: tuple[onnx.NodeProto, ...]
    stacks: tuple[str, ...]
    ids: str
    rows: str
    transposed: bool
    weight: str = ""
    decode: tuple[onnx.NodeProto, ...] = ()

    @property
    def is_quantized(self) -> bool:
        return self.gathers[0].op_type == _QUANTIZED


def group_experts(model: onnx.ModelProto, stacked: bool = False) -> onnx.ModelProto:
    """Return a model with a product for each expert; the model itself if it has none.

    stacked: keep stacks as inputs, and products that all rows go through.
    """
    if not any(node.op_type in ("GatherND", _QUANTIZED, "MatMul") for node in model.graph.node):
        return model
    graph = Rewriter(model)
    products = expert_products(graph)
    batched = []
    if not stacked:
        batched = [node for node in graph.nodes if node.op_type == "MatMul" and _is_weight(graph, node.input[1], 3)]
    for node in batched:
        graph.replace(node, *_by_expert(graph, node))
    if not products:
        return graph.finish() if batched else model
    orders: dict[str, _Order] = {}
    for number, product in enumerate(products):
        experts = graph.shape(product.stacks[0])[0]
        is_new = product.ids not in orders
        if is_new:
            orders[product.ids] = _Order(graph, product.ids, experts, len(orders))
        order = orders[product.ids]
        nodes = _grouped_product(graph, product, order, number, stacked)
        if is_new:
            nodes = [*order.nodes, *nodes]
        graph.replace(product.node, *nodes)
        for gather in product.gathers:
            graph.replace(gather)
    _add_in_order(graph)
    domains = {entry.domain for entry in graph.model.opset_import}
    if _CONTRIB not in domains and any(product.is_quantized for product in products):
        graph.model.opset_import.append(helper.make_opsetid(_CONTRIB, 1))
    return graph.finish()


def _by_expert(graph: Rewriter, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return nodes for rows [num_experts, rows, in_features] times a stack, as a product for each expert.

    ONNX Runtime packs a stack at each call, in pieces whose size depends on the number of rows; a weight once.
    """
    rows, stack = node.input
    (out,) = node.output
    emit = Emitter(graph, f"{out}/experts")
    experts = graph.shape(stack)[0]
    slots = _replace_stack(graph, stack)
    names = [f"{out}/rows/{expert}" for expert in range(experts)]
    rows_of_experts = emit.several("Split", rows, [1] * experts, results=names, axis=0)
    products = [emit("MatMul", expert_rows, slot) for expert_rows, slot in zip(rows_of_experts, slots)]
    emit("Concat", *products, result=out, axis=0)
    return emit.nodes


def expert_products(graph: Rewriter) -> list[ExpertProduct]:
    products = (expert_product(graph, node) for node in graph.nodes)
    return [product for product in products if product is not None]


def expert_product(graph: Rewriter, node: onnx.NodeProto) -> ExpertProduct | None:
    """Return a MatMul with gathered weights as a product of experts; None for any other node.

    The weights are `[rows, out_features, in_features]` as its first factor, `[rows, in_features, out_features]` as its
    second.
    """
    if node.op_type != "MatMul":
        return None
    for position, name in enumerate(node.input):
        gather = graph.producers.get(name)
        if gather is None or len(graph.consumers[name]) > 1 or name in graph.outputs:
            continue
        transposed = position == 0
        if gather.op_type == "Transpose" and attributes_of(gather).get("perm") == [0, 2, 1]:
            name = gather.input[0]
            transposed = not transposed
        gathers, decode = _gathers_and_decoding(graph, name)
        if gathers:
            is_product = _is_reshape(graph, decode[-1]) if decode else _is_weight(graph, gathers[0].input[0], 3)
            if is_product:
                stacks = tuple(gather.input[0] for gather in gathers)
                ids = gathers[0].input[1]
                rows = node.input[1 - position]
                return ExpertProduct(node, tuple(gathers), stacks, ids, rows, transposed, name, tuple(decode))
        if gather.op_type == _QUANTIZED and position == 0:
            # Both reshaped, to [num_experts, out_features, bytes] and [rows].
            data_reshape = graph.producers.get(gather.input[0])
            ids_reshape = graph.producers.get(gather.input[1])
            if data_reshape is None or ids_reshape is None:
                continue
            stacks = (data_reshape.input[0], *gather.input[2:])
            if all(_is_weight(graph, stack) for stack in stacks):
                return ExpertProduct(node, (gather,), stacks, ids_reshape.input[0], node.input[1], True)
    return None


def _is_reshape(graph: Rewriter, node: onnx.NodeProto) -> bool:
    target = graph.array(node.input[1]) if node.op_type == "Reshape" else None
    return target is not None and len(target) == 3


def _gathers_and_decoding(graph: Rewriter, name: str) -> tuple[list[onnx.NodeProto], list[onnx.NodeProto]]:
    """Return the gathers of stacks, by the same ids, that a value depends on, and the nodes in between."""
    gathers: list[onnx.NodeProto] = []
    between: list[onnx.NodeProto] = []
    names = [name]
    while names:
        name = names.pop(0)
        node = graph.producers.get(name)
        if name in graph.constants:
            continue
        if node is None or len(graph.consumers[name]) > 1 or name in graph.outputs:
            return [], []
        if node.op_type != "GatherND":
            between.insert(0, node)
            names += node.input
        elif attributes_of(node).get("batch_dims", 0) or not _is_weight(graph, node.input[0]):
            return [], []
        else:
            gathers.append(node)
    if len({gather.input[1] for gather in gathers}) != 1:
        return [], []
    return gathers, between


def _is_weight(graph: Rewriter, name: str, rank: int | None = None) -> bool:
    if name not in graph.inputs or len(graph.consumers[name]) > 1:
        return False
    shape = graph.shape(name)
    return all(shape) and rank in (None, len(shape))


class _Order:
    """The rows of a step sorted by expert: their order, the number of rows of each expert, and the inverse order."""

    def __init__(self, graph: Rewriter, ids: str, experts: int, number: int):
        prefix = f"experts_{number}"
        emit = Emitter(graph, prefix)
        zeros = [0] * experts
        flat = emit("Reshape", ids, [-1])
        size = emit("Shape", flat)
        results = [f"{prefix}/sorted", f"{prefix}/order"]
        _, self.order = emit.several("TopK", flat, size, results=results, axis=0, largest=0)
        one_per_row = emit("Expand", np.int64(1), size)
        self.counts = emit("ScatterElements", zeros, flat, one_per_row, result=f"{prefix}/counts", reduction="add")
        self.has_rows = emit("Greater", self.counts, zeros)
        numbers = emit("Range", np.int64(0), emit("Squeeze", size), np.int64(1))
        self.back = emit("ScatterElements", self.order, self.order, numbers)
        self.nodes = emit.nodes


def _grouped_product(
    graph: Rewriter, product: ExpertProduct, order: _Order, number: int, stacked: bool
) -> list[onnx.NodeProto]:
    """Return the nodes of a product, of [rows, in_features, 1] or [rows, 1, in_features] and of its result's shape."""
    prefix = f"experts/product_{number}"
    sizes = attributes_of(product.gathers[0])
    experts, rows, columns = graph.shape(product.stacks[0])[:3]
    if product.is_quantized:
        columns *= sizes["block_size"]
    if product.decode:
        decoded_shape = graph.array(product.decode[-1].input[1])
        assert decoded_shape is not None
        rows, columns = map(int, decoded_shape[1:])
    in_features, out_features = (columns, rows) if product.transposed else (rows, columns)
    is_first = product.node.input[1] == product.rows
    emit = Emitter(graph, prefix)
    slots_of_stacks = _expert_slots(graph, emit, product, stacked)
    ordered = emit("Gather", emit("Reshape", product.rows, [-1, in_features]), order.order, axis=0)
    rows_of_experts = [f"{prefix}/rows_{expert}" for expert in range(experts)]
    emit.several("Split", ordered, order.counts, results=rows_of_experts, axis=0)
    products = []
    for expert, expert_rows in enumerate(rows_of_experts):
        slots = [names[expert] for names in slots_of_stacks]
        out = f"{prefix}/product_{expert}"
        if product.is_quantized:
            settings = {"K": in_features, "N": out_features, "bits": sizes["bits"], "block_size": sizes["block_size"]}
            products.append(emit("MatMulNBits", expert_rows, *slots, result=out, domain=_CONTRIB, **settings))
        elif product.decode:
            has_rows = emit("Gather", order.has_rows, np.int64(expert))
            products.append(_decoded_product(graph, emit, product, expert_rows, slots, has_rows, out, out_features))
        else:
            products.append(emit("Gemm", expert_rows, *slots, result=out, transB=int(product.transposed)))
    unordered = emit("Gather", emit("Concat", *products, axis=0), order.back, axis=0)
    shape = [-1, out_features, 1] if is_first else [-1, 1, out_features]
    emit("Reshape", unordered, shape, result=product.node.output[0], name=product.node.name)
    return emit.nodes


def _decoded_product(
    graph: Rewriter,
    emit: Emitter,
    product: ExpertProduct,
    rows: str,
    slots: Sequence[str],
    has_rows: str,
    out: str,
    out_features: int,
) -> str:
    """Emit an expert's rows times its weight, which is decoded only if there are rows.

    The product is halved and doubled: for plain products ONNX Runtime has another kernel for a single row, with other
    bits.
    """
    then = Emitter(graph, f"{out}/then")
    names = {}
    for gather, slot in zip(product.gathers, slots, strict=True):
        names[gather.output[0]] = then("Unsqueeze", slot, [0])
    for node in product.decode:
        inputs = [names.get(name, name) for name in node.input]
        names[node.output[0]] = then(node.op_type, *inputs, domain=node.domain, **attributes_of(node))
    weight = then("Squeeze", names[product.weight], [0])
    half = then("Gemm", rows, weight, alpha=0.5, transB=int(product.transposed))
    result = then("Mul", half, np.float32(2))
    no_rows = numpy_helper.from_array(np.zeros((0, out_features), np.float32))
    empty = helper.make_node("Constant", [], [f"{out}/none"], value=no_rows)
    then_branch = _branch(then.nodes, result, out_features)
    else_branch = _branch([empty], f"{out}/none", out_features)
    return emit("If", has_rows, result=out, then_branch=then_branch, else_branch=else_branch)


def _branch(nodes: Sequence[onnx.NodeProto], name: str, out_features: int) -> onnx.GraphProto:
    output = helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, out_features])
    return helper.make_graph(nodes, name, [], [output])


def _expert_slots(graph: Rewriter, emit: Emitter, product: ExpertProduct, stacked: bool) -> list[list[str]]:
    """Return the names of each stack's experts: inputs, or values that are split off the stack."""
    names = []
    for stack in product.stacks:
        experts, *shape = graph.shape(stack)
        if not stacked:
            names.append(_replace_stack(graph, stack))
            continue
        slots = [expert_slot(stack, expert) for expert in range(experts)]
        names.append(slots)
        parts = emit.several("Split", stack, [1] * experts, results=[f"{slot}/cut" for slot in slots], axis=0)
        for part, slot in zip(parts, slots, strict=True):
            emit("Reshape", part, shape, result=slot)
    return names


def _replace_stack(graph: Rewriter, stack: str) -> list[str]:
    """Replace a stack by an input for each expert, and return their names."""
    experts, *shape = graph.shape(stack)
    element = graph.element(stack)
    slots = [expert_slot(stack, expert) for expert in range(experts)]
    graph.replace_input(stack, *(helper.make_tensor_value_info(slot, element, shape) for slot in slots))
    return slots


def _add_in_order(graph: Rewriter) -> None:
    """Add the results of a token's experts one after another: a library orders a sum by the number of tokens."""
    for node in graph.nodes:
        if node.op_type != "ReduceSum" or len(node.input) < 2 or attributes_of(node).get("keepdims", 1):
            continue
        axes = graph.array(node.input[1])
        reshape = graph.producers.get(node.input[0])
        if axes is None or axes.tolist() != [1] or reshape is None or reshape.op_type != "Reshape":
            continue
        shape = graph.array(reshape.input[1])
        if shape is None or len(shape) != 3 or shape[1] < 3:  # two are the same in both orders
            continue
        (out,) = node.output
        count = int(shape[1])
        emit = Emitter(graph, out)
        parts = [f"{out}/part_{number}" for number in range(count)]
        total, *addends = emit.several("Split", node.input[0], [1] * count, results=parts, axis=1)
        for addend in addends:
            total = emit("Add", total, addend)
        emit("Squeeze", total, [1], result=out, name=node.name)
        graph.replace(node, *emit.nodes)
