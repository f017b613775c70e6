"""Products with the weights of experts, one product an expert.

In: a graph in which each row gathers the weights of its expert (`GatherND`, or `GatherBlockQuantized` of quantised
ones) and is multiplied with them: memory grows with rows times weights. Out: one in which rows are sorted by expert and
those of each expert are one product, `Gemm` or `MatMulNBits`, whatever their number; none costs a call that does
nothing. What makes weights of gathered codes is done for each expert that has rows. A stack of weights becomes an input
for each expert, `expert_slot(stack, number)`, so that nothing is copied; with `stacked` it stays one input, which is
cut into experts at each run.

What a row gives does not depend on the rows beside it: products have the same bits for every number of rows, and what a
token's experts give is added in the order of the router.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from lockstep.artifacts.experts import expert_slot
from lockstep.onnx_tools.rewriter import Rewriter, attributes_of

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
    """Return a model with a product for each expert; itself where no row gathers weights."""
    if not any(node.op_type in ("GatherND", _QUANTIZED) for node in model.graph.node):
        return model
    graph = Rewriter(model)
    products = [product for node in graph.nodes if (product := expert_product(graph, node)) is not None]
    if not products:
        return model
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
            name, transposed = gather.input[0], not transposed
        gathers, decode = _decoding(graph, name)
        if gathers and (_is_reshape(graph, decode[-1]) if decode else _is_weight(graph, gathers[0].input[0], 3)):
            stacks, ids = tuple(each.input[0] for each in gathers), gathers[0].input[1]
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
    gathers, between, names = list[onnx.NodeProto](), list[onnx.NodeProto](), [name]
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
        self.order, self.counts, self.back = f"{stem}/order", f"{stem}/counts", f"{stem}/back"
        self.has_rows = f"{stem}/has_rows"
        ints = {"flat_shape": [-1], "none": [0] * experts}
        for label, values in ints.items():
            graph.constant(f"{stem}/{label}", np.array(values, np.int64))
        for label, value in (("zero", 0), ("one", 1)):
            graph.constant(f"{stem}/{label}", np.array(value, np.int64))
        steps: list[tuple[str, list[str], list[str], dict[str, Any]]] = [
            ("Reshape", [ids, f"{stem}/flat_shape"], [f"{stem}/flat"], {}),
            ("Shape", [f"{stem}/flat"], [f"{stem}/size"], {}),
            ("TopK", [f"{stem}/flat", f"{stem}/size"], [f"{stem}/sorted", self.order], {"axis": 0, "largest": 0}),
            ("Expand", [f"{stem}/one", f"{stem}/size"], [f"{stem}/ones"], {}),
            ("ScatterElements", [f"{stem}/none", f"{stem}/flat", f"{stem}/ones"], [self.counts], {"reduction": "add"}),
            ("Greater", [self.counts, f"{stem}/none"], [self.has_rows], {}),
            ("Squeeze", [f"{stem}/size"], [f"{stem}/rows"], {}),
            ("Range", [f"{stem}/zero", f"{stem}/rows", f"{stem}/one"], [f"{stem}/numbers"], {}),
            ("ScatterElements", [self.order, self.order, f"{stem}/numbers"], [self.back], {}),
        ]
        self.nodes = [helper.make_node(op, ins, outs, outs[-1], **settings) for op, ins, outs, settings in steps]


def _grouped(
    graph: Rewriter, product: ExpertProduct, order: _Order, number: int, stacked: bool
) -> list[onnx.NodeProto]:
    """Return the nodes of a product, of [rows, in_features, 1] or [rows, 1, in_features] and of its result's shape."""
    stem, sizes = f"experts/product_{number}", attributes_of(product.gathers[0])
    experts, rows, columns = graph.shape(product.stacks[0])[:3]
    if product.is_quantized:
        columns *= sizes["block_size"]
    if product.decode:
        whole = graph.array(product.decode[-1].input[1])
        assert whole is not None
        rows, columns = map(int, whole[1:])
    features, outs = (columns, rows) if product.transposed else (rows, columns)
    is_first = product.node.input[1] == product.rows
    shapes = {"flat": [-1, features], "shape": [-1, outs, 1] if is_first else [-1, 1, outs]}
    for label, shape in shapes.items():
        graph.constant(f"{stem}/{label}", np.array(shape, np.int64))
    parts = [f"{stem}/rows_{expert}" for expert in range(experts)]
    made = [f"{stem}/product_{expert}" for expert in range(experts)]
    nodes, weights = _weights(graph, product, stem, stacked)
    nodes += [
        helper.make_node("Reshape", [product.rows, f"{stem}/flat"], [f"{stem}/flat_rows"]),
        helper.make_node("Gather", [f"{stem}/flat_rows", order.order], [f"{stem}/sorted"], axis=0),
        helper.make_node("Split", [f"{stem}/sorted", order.counts], parts, axis=0),
    ]
    for expert, (part, out) in enumerate(zip(parts, made, strict=True)):
        if product.is_quantized:
            names = [part, *(slots[expert] for slots in weights)]
            settings = {"K": features, "N": outs, "bits": sizes["bits"], "block_size": sizes["block_size"]}
            nodes.append(helper.make_node("MatMulNBits", names, [out], out, domain=_CONTRIB, **settings))
        elif product.decode:
            place = graph.constant(f"{order.has_rows}/{expert}", np.array(expert, np.int64))
            nodes.append(helper.make_node("Gather", [order.has_rows, place], [f"{out}/has_rows"]))
            nodes.append(_decoded_product(graph, product, part, [slots[expert] for slots in weights], out, outs))
        else:
            factors = [part, weights[0][expert]]
            nodes.append(helper.make_node("Gemm", factors, [out], out, transB=int(product.transposed)))
    return [
        *nodes,
        helper.make_node("Concat", made, [f"{stem}/together"], axis=0),
        helper.make_node("Gather", [f"{stem}/together", order.back], [f"{stem}/result"], axis=0),
        helper.make_node("Reshape", [f"{stem}/result", f"{stem}/shape"], product.node.output, product.node.name),
    ]


def _decoded_product(
    graph: Rewriter, product: ExpertProduct, rows: str, slots: Sequence[str], out: str, outs: int
) -> onnx.NodeProto:
    """Return the node that gives an expert's rows times its weight, which is decoded where there are any.

    The product is halved and doubled: ONNX Runtime has a kernel for one row alone, with other bits, for products as
    they are.
    """
    first = graph.constant("experts/first_axis", np.array([0], np.int64))
    names = {gather.output[0]: f"{out}/{gather.output[0]}" for gather in product.gathers}
    nodes = [
        helper.make_node("Unsqueeze", [slot, first], [name]) for slot, name in zip(slots, names.values(), strict=True)
    ]
    for node in product.decode:
        names |= {name: f"{out}/{name}" for name in node.output}
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = names[node.output[0]]
        copy.input[:], copy.output[:] = ([names.get(name, name) for name in each] for each in (node.input, node.output))
        nodes.append(copy)
    weight, half, result, none = f"{out}/weight", f"{out}/half", f"{out}/result", f"{out}/none"
    two = graph.constant("experts/two", np.array(2, np.float32))
    nodes.append(helper.make_node("Squeeze", [names[product.weight], first], [weight]))
    nodes.append(helper.make_node("Gemm", [rows, weight], [half], alpha=0.5, transB=int(product.transposed)))
    nodes.append(helper.make_node("Mul", [half, two], [result]))
    empty = helper.make_node("Constant", [], [none], value=numpy_helper.from_array(np.zeros((0, outs), np.float32)))
    then_branch, else_branch = (
        helper.make_graph(branch, name, [], [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, outs])])
        for branch, name in ((nodes, result), ([empty], none))
    )
    return helper.make_node("If", [f"{out}/has_rows"], [out], out, then_branch=then_branch, else_branch=else_branch)


def _weights(
    graph: Rewriter, product: ExpertProduct, stem: str, stacked: bool
) -> tuple[list[onnx.NodeProto], list[list[str]]]:
    """Return the names of each stack's experts, and the nodes that cut them out of a stack that stays whole."""
    nodes: list[onnx.NodeProto] = []
    names = []
    for number, stack in enumerate(product.stacks):
        experts, *shape = graph.shape(stack)
        slots = [expert_slot(stack, expert) for expert in range(experts)]
        names.append(slots)
        if not stacked:
            element = graph.element(stack)
            graph.replace_input(stack, *(helper.make_tensor_value_info(slot, element, shape) for slot in slots))
            continue
        ones = graph.constant(f"{stem}/ones_{number}", np.ones(experts, np.int64))
        target = graph.constant(f"{stem}/expert_{number}", np.array(shape, np.int64))
        cut = [f"{slot}/cut" for slot in slots]
        nodes.append(helper.make_node("Split", [stack, ones], cut, axis=0))
        nodes += [helper.make_node("Reshape", [part, target], [slot]) for part, slot in zip(cut, slots, strict=True)]
    return nodes, names


def _add_in_order(graph: Rewriter) -> None:
    """Add what a token's experts give one after another: a library orders a sum by the number of tokens."""
    for node in graph.nodes:
        if node.op_type != "ReduceSum" or len(node.input) < 2 or attributes_of(node).get("keepdims", 1):
            continue
        axes, reshape = graph.array(node.input[1]), graph.producers.get(node.input[0])
        if axes is None or axes.tolist() != [1] or reshape is None or reshape.op_type != "Reshape":
            continue
        shape = graph.array(reshape.input[1])
        if shape is None or len(shape) != 3 or shape[1] < 3:  # two are the same in both orders
            continue
        (out,), terms = node.output, int(shape[1])
        axis = graph.constant(f"{out}/axis", np.array([1], np.int64))
        parts, sums = [f"{out}/part_{term}" for term in range(terms)], [f"{out}/sum_{term}" for term in range(terms)]
        sizes = graph.constant(f"{out}/ones", np.ones(terms, np.int64))
        nodes = [helper.make_node("Split", [node.input[0], sizes], parts, axis=1)]
        sums[0], sums[-1] = parts[0], f"{out}/total"
        nodes += [helper.make_node("Add", [sums[term - 1], parts[term]], [sums[term]]) for term in range(1, terms)]
        graph.replace(node, *nodes, helper.make_node("Squeeze", [sums[-1], axis], [out], node.name))
