"""Products with the weights of experts, one product an expert.

In: a graph in which each row gathers the weights of its expert (`GatherND`, or `GatherBlockQuantized` of quantised
ones) and is multiplied with them: memory grows with rows times weights. Out: one in which rows are sorted by expert and
those of each expert are one product, `Gemm` or `MatMulNBits`, whatever their number; none costs a call that does
nothing. What makes weights of gathered codes is done for each expert that has rows. A stack of weights becomes an input
for each expert, `expert_slot(stack, number)`, so that nothing is copied; with `stacked` it stays one input, which is
cut into experts at each run. A stack that all rows go through (Llama 4) becomes a product for each expert likewise.

What a row gives does not depend on the rows beside it: products have the same bits for every number of rows, and what a
token's experts give is added in the order of the router.
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
    that make `weight`, [rows, ...], of what is gathered; none where that is the weight.
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
    """Return a model with a product for each expert; itself where it has none.

    stacked: products that all rows go through stay as they are.
    """
    if not any(node.op_type in ("GatherND", _QUANTIZED, "MatMul") for node in model.graph.node):
        return model
    graph = Rewriter(model)
    products = [product for node in graph.nodes if (product := expert_product(graph, node)) is not None]
    of_all = [node for node in graph.nodes if node.op_type == "MatMul" and _is_weight(graph, node.input[1], 3)]
    for node in () if stacked else of_all:
        graph.replace(node, *_by_expert(graph, node))
    if not products:
        return model if stacked or not of_all else graph.finish()
    orders: dict[str, _Order] = {}
    for number, product in enumerate(products):
        experts = graph.shape(product.stacks[0])[0]
        first = product.ids not in orders
        order = orders.setdefault(product.ids, _Order(graph, product.ids, experts, len(orders)))
        graph.replace(product.node, *(order.nodes if first else ()), *_grouped(graph, product, order, number, stacked))
        for gather in product.gathers:
            graph.replace(gather)
    _add_in_order(graph)
    domains = {entry.domain for entry in graph.model.opset_import}
    if _CONTRIB not in domains and any(product.is_quantized for product in products):
        graph.model.opset_import.append(helper.make_opsetid(_CONTRIB, 1))
    return graph.finish()


def _by_expert(graph: Rewriter, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return nodes for rows [num_experts, rows, in_features] times a stack, whose experts are packed as any weight is.

    As one product ONNX Runtime packs them at each call, in pieces whose size depends on the number of rows.
    """
    (rows, stack), (out,) = node.input, node.output
    emit = Emitter(graph, f"{out}/experts")
    experts = graph.shape(stack)[0]
    slots = _experts_of(graph, stack)
    parts = emit.several("Split", rows, [1] * experts, results=[f"{out}/rows/{n}" for n in range(experts)], axis=0)
    emit("Concat", *(emit("MatMul", part, slot) for part, slot in zip(parts, slots)), result=out, axis=0)
    return emit.nodes


def expert_product(graph: Rewriter, node: onnx.NodeProto) -> ExpertProduct | None:
    """Return what a MatMul with weights that rows gather is; None for any other node.

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
        gathers, decode = _decoding(graph, name)
        if gathers and (_is_reshape(graph, decode[-1]) if decode else _is_weight(graph, gathers[0].input[0], 3)):
            stacks = tuple(each.input[0] for each in gathers)
            ids = gathers[0].input[1]
            rows = node.input[1 - position]
            return ExpertProduct(node, tuple(gathers), stacks, ids, rows, transposed, name, tuple(decode))
        if gather.op_type == _QUANTIZED and position == 0:
            # Both reshaped, to [num_experts, out_features, bytes] and [rows].
            data, ids = (graph.producers.get(name) for name in gather.input[:2])
            if data is None or ids is None:
                continue
            stacks = (data.input[0], *gather.input[2:])
            if all(_is_weight(graph, stack) for stack in stacks):
                return ExpertProduct(node, (gather,), stacks, ids.input[0], node.input[1], True)
    return None


def _is_reshape(graph: Rewriter, node: onnx.NodeProto) -> bool:
    target = graph.array(node.input[1]) if node.op_type == "Reshape" else None
    return target is not None and len(target) == 3


def _decoding(graph: Rewriter, name: str) -> tuple[list[onnx.NodeProto], list[onnx.NodeProto]]:
    """Return the gathers of stacks, by the same ids, that a value is made of, and the nodes between."""
    gathers = list[onnx.NodeProto]()
    between = list[onnx.NodeProto]()
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
    """The rows of a step sorted by expert: their order, how many each expert has, and the way back."""

    def __init__(self, graph: Rewriter, ids: str, experts: int, number: int):
        stem = f"experts_{number}"
        emit = Emitter(graph, stem)
        none = [0] * experts
        flat = emit("Reshape", ids, [-1])
        size = emit("Shape", flat)
        _, self.order = emit.several("TopK", flat, size, results=[f"{stem}/sorted", f"{stem}/order"], axis=0, largest=0)
        ones = emit("Expand", np.int64(1), size)
        self.counts = emit("ScatterElements", none, flat, ones, result=f"{stem}/counts", reduction="add")
        self.has_rows = emit("Greater", self.counts, none)
        numbers = emit("Range", np.int64(0), emit("Squeeze", size), np.int64(1))
        self.back = emit("ScatterElements", self.order, self.order, numbers)
        self.nodes = emit.nodes


def _grouped(
    graph: Rewriter, product: ExpertProduct, order: _Order, number: int, stacked: bool
) -> list[onnx.NodeProto]:
    """Return the nodes of a product, of [rows, in_features, 1] or [rows, 1, in_features] and of its result's shape."""
    stem = f"experts/product_{number}"
    sizes = attributes_of(product.gathers[0])
    experts, rows, columns = graph.shape(product.stacks[0])[:3]
    if product.is_quantized:
        columns *= sizes["block_size"]
    if product.decode:
        whole = graph.array(product.decode[-1].input[1])
        assert whole is not None
        rows, columns = map(int, whole[1:])
    features, outs = (columns, rows) if product.transposed else (rows, columns)
    is_first = product.node.input[1] == product.rows
    emit, (result,) = Emitter(graph, stem), product.node.output
    weights = _weights(graph, emit, product, stacked)
    ordered = emit("Gather", emit("Reshape", product.rows, [-1, features]), order.order, axis=0)
    parts = [f"{stem}/rows_{expert}" for expert in range(experts)]
    emit.several("Split", ordered, order.counts, results=parts, axis=0)
    made = []
    for expert, part in enumerate(parts):
        slots = [names[expert] for names in weights]
        out = f"{stem}/product_{expert}"
        if product.is_quantized:
            settings = {"K": features, "N": outs, "bits": sizes["bits"], "block_size": sizes["block_size"]}
            made.append(emit("MatMulNBits", part, *slots, result=out, domain=_CONTRIB, **settings))
        elif product.decode:
            has_rows = emit("Gather", order.has_rows, np.int64(expert))
            made.append(_decoded_product(graph, emit, product, part, slots, has_rows, out, outs))
        else:
            made.append(emit("Gemm", part, *slots, result=out, transB=int(product.transposed)))
    together = emit("Gather", emit("Concat", *made, axis=0), order.back, axis=0)
    shape = [-1, outs, 1] if is_first else [-1, 1, outs]
    emit("Reshape", together, shape, result=result, name=product.node.name)
    return emit.nodes


def _decoded_product(
    graph: Rewriter,
    emit: Emitter,
    product: ExpertProduct,
    rows: str,
    slots: Sequence[str],
    has_rows: str,
    out: str,
    outs: int,
) -> str:
    """Emit an expert's rows times its weight, which is decoded where there are any.

    The product is halved and doubled: ONNX Runtime has a kernel for one row alone, with other bits, for products as
    they are.
    """
    then = Emitter(graph, f"{out}/then")
    names = {
        gather.output[0]: then("Unsqueeze", slot, [0]) for gather, slot in zip(product.gathers, slots, strict=True)
    }
    for node in product.decode:
        inputs = [names.get(name, name) for name in node.input]
        (made,) = node.output
        names[made] = then(node.op_type, *inputs, domain=node.domain, **attributes_of(node))
    weight = then("Squeeze", names[product.weight], [0])
    half = then("Gemm", rows, weight, alpha=0.5, transB=int(product.transposed))
    result = then("Mul", half, np.float32(2))
    none = f"{out}/none"
    empty = helper.make_node("Constant", [], [none], value=numpy_helper.from_array(np.zeros((0, outs), np.float32)))
    then_branch, else_branch = (
        helper.make_graph(branch, name, [], [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, outs])])
        for branch, name in ((then.nodes, result), ([empty], none))
    )
    return emit("If", has_rows, result=out, then_branch=then_branch, else_branch=else_branch)


def _weights(graph: Rewriter, emit: Emitter, product: ExpertProduct, stacked: bool) -> list[list[str]]:
    """Return the names of each stack's experts, which are cut out of a stack that stays whole."""
    names = []
    for stack in product.stacks:
        experts, *shape = graph.shape(stack)
        if not stacked:
            names.append(_experts_of(graph, stack))
            continue
        slots = [expert_slot(stack, expert) for expert in range(experts)]
        names.append(slots)
        parts = emit.several("Split", stack, [1] * experts, results=[f"{slot}/cut" for slot in slots], axis=0)
        for part, slot in zip(parts, slots, strict=True):
            emit("Reshape", part, shape, result=slot)
    return names


def _experts_of(graph: Rewriter, stack: str) -> list[str]:
    """Put an input for each expert in the place of a stack, and return their names."""
    (experts, *shape), element = graph.shape(stack), graph.element(stack)
    slots = [expert_slot(stack, expert) for expert in range(experts)]
    graph.replace_input(stack, *(helper.make_tensor_value_info(slot, element, shape) for slot in slots))
    return slots


def _add_in_order(graph: Rewriter) -> None:
    """Add what a token's experts give one after another: a library orders a sum by the number of tokens."""
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
        (out,), terms = node.output, int(shape[1])
        emit = Emitter(graph, out)
        parts = [f"{out}/part_{term}" for term in range(terms)]
        total, *others = emit.several("Split", node.input[0], [1] * terms, results=parts, axis=1)
        for part in others:
            total = emit("Add", total, part)
        emit("Squeeze", total, [1], result=out, name=node.name)
        graph.replace(node, *emit.nodes)
