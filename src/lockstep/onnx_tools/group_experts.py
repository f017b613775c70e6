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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from lockstep.artifacts.engines import expert_slot
from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult, add_input
from lockstep.onnx_tools.values import array_of, attribute, dtype_of, maker, required, sizes_of

_CONTRIB = "com.microsoft"
_QUANTIZED = "GatherBlockQuantized"


@dataclass(frozen=True)
class ExpertProduct:
    """A product of rows with gathered weights.

    gathers: of the weights. stacks: inputs [num_experts, ...]. ids: the expert of each row, [rows, 1] or [rows]. rows:
    the operand that is not a weight. transposed: whether weights are `[out_features, in_features]`. decode: the nodes
    that turn gathered codes into `weight`, [rows, ...]; none where the weight itself is gathered.
    """

    node: ir.Node
    gathers: tuple[ir.Node, ...]
    stacks: tuple[ir.Value, ...]
    ids: ir.Value
    rows: ir.Value
    transposed: bool
    weight: ir.Value
    decode: tuple[ir.Node, ...] = ()

    @property
    def is_quantized(self) -> bool:
        return self.gathers[0].op_type == _QUANTIZED

    @property
    def is_first(self) -> bool:
        """Return whether the weights are the first factor, and rows [rows, in_features, 1]."""
        return self.node.inputs[1] is self.rows


class GroupExperts(Pass):
    """Make a product for each expert.

    stacked: keep stacks as inputs, and products that all rows go through.
    """

    def __init__(self, stacked: bool = False):
        self._stacked = stacked

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        products = expert_products(graph)
        # Products [experts, rows, ...] with a whole stack, in which each token goes through all experts.
        batched = []
        if not self._stacked:
            batched = [node for node in graph if node.op_type == "MatMul" and _is_weight(required(node.inputs[1]), 3)]
        for node in batched:
            _by_expert(graph, node)
        orders: dict[ir.Value, _Order] = {}  # by ids: the products of a layer sort its rows once
        for number, product in enumerate(products):
            if product.ids not in orders:
                orders[product.ids] = _Order(graph, product, len(orders))
            _GroupedProduct(graph, product, orders[product.ids], number, self._stacked).write()
        if products:
            _add_in_order(graph)
        if any(product.is_quantized for product in products):
            model.opset_imports.setdefault(_CONTRIB, 1)
        return PassResult(model, bool(products or batched))


def _by_expert(graph: ir.Graph, node: ir.Node) -> None:
    """Write rows [num_experts, rows, in_features] times a stack as a product for each expert.

    ONNX Runtime packs a stack at each call, in pieces whose size depends on the number of rows; a weight once.
    """
    rows, stack = map(required, node.inputs)
    (out,) = node.outputs
    writer = GraphWriter(graph, f"{out.name}/experts", before=node)
    slots = _split_stack(graph, stack)
    names = [f"{out.name}/rows/{expert}" for expert in range(len(slots))]
    rows_of_experts = writer.several("Split", rows, [1] * len(slots), results=names, axis=0)
    products = [writer.op("MatMul", expert_rows, slot) for expert_rows, slot in zip(rows_of_experts, slots)]
    writer.op("Concat", *products, axis=0, replaces=out)


def expert_products(graph: ir.Graph) -> list[ExpertProduct]:
    return [product for product in map(expert_product, graph) if product is not None]


def expert_product(node: ir.Node) -> ExpertProduct | None:
    """Return a MatMul with gathered weights as a product of experts; None for any other node.

    The weights are `[rows, out_features, in_features]` as its first factor, `[rows, in_features, out_features]` as its
    second.
    """
    if node.op_type != "MatMul":
        return None
    for position, factor in enumerate(map(required, node.inputs)):
        gather = factor.producer()
        if gather is None or not _is_inner(factor):
            continue
        weight = factor
        transposed = position == 0
        if gather.op_type == "Transpose" and attribute(gather, "perm") == (0, 2, 1):
            weight = required(gather.inputs[0])
            transposed = not transposed
        rows = required(node.inputs[1 - position])
        gathers, decode = _gathers_and_decoding(weight)
        is_product = False
        if decode:  # a weight has its shape only after decoding
            is_product = _is_reshape(decode[-1])
        elif gathers:
            is_product = _is_weight(required(gathers[0].inputs[0]), 3)
        if is_product:
            stacks = tuple(required(gather.inputs[0]) for gather in gathers)
            ids = required(gathers[0].inputs[1])
            return ExpertProduct(node, tuple(gathers), stacks, ids, rows, transposed, weight, tuple(decode))
        if gather.op_type == _QUANTIZED and position == 0:
            # Both reshaped, to [num_experts, out_features, bytes] and [rows].
            data_reshape, ids_reshape = (required(value).producer() for value in gather.inputs[:2])
            if data_reshape is None or ids_reshape is None:
                continue
            stacks = (required(data_reshape.inputs[0]), *map(required, gather.inputs[2:]))
            if all(map(_is_weight, stacks)):
                return ExpertProduct(node, (gather,), stacks, required(ids_reshape.inputs[0]), rows, True, weight)
    return None


def _is_inner(value: ir.Value) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()


def _is_reshape(node: ir.Node) -> bool:
    if node.op_type != "Reshape":
        return False
    target = array_of(node.inputs[1])
    return target is not None and len(target) == 3


def _gathers_and_decoding(value: ir.Value) -> tuple[list[ir.Node], list[ir.Node]]:
    """Return the gathers of stacks, by the same ids, that a value depends on, and the nodes in between."""
    gathers: list[ir.Node] = []
    between: list[ir.Node] = []
    values = [value]
    while values:
        value = values.pop(0)
        node = value.producer()
        if value.is_initializer():
            continue
        if node is None or not _is_inner(value):
            return [], []
        if node.op_type != "GatherND":
            between.insert(0, node)
            values += map(required, node.inputs)
        elif attribute(node, "batch_dims", 0) or not _is_weight(required(node.inputs[0])):
            return [], []
        else:
            gathers.append(node)
    if len({gather.inputs[1] for gather in gathers}) != 1:
        return [], []
    return gathers, between


def _is_weight(value: ir.Value, rank: int | None = None) -> bool:
    if not value.is_graph_input() or len(value.uses()) > 1:
        return False
    shape = sizes_of(value)
    return all(shape) and rank in (None, len(shape))


class _Order:
    """The rows of a step sorted by expert: their order, the number of rows of each expert, and the inverse order."""

    def __init__(self, graph: ir.Graph, product: ExpertProduct, number: int):
        """Write them before the first product with these ids."""
        prefix = f"experts_{number}"
        writer = GraphWriter(graph, prefix, before=product.node)
        zeros = [0] * sizes_of(product.stacks[0])[0]
        flat = writer.op("Reshape", product.ids, [-1])
        size = writer.op("Shape", flat)
        results = [f"{prefix}/sorted", f"{prefix}/order"]
        # ONNX has no sort: TopK of all ids, the smallest first, which keeps the order of equal ones.
        _, self.order = writer.several("TopK", flat, size, results=results, axis=0, largest=0)
        one_per_row = writer.op("Expand", np.int64(1), size)
        self.counts = writer.op("ScatterElements", zeros, flat, one_per_row, reduction="add")
        self.has_rows = writer.op("Greater", self.counts, zeros)
        numbers = writer.op("Range", np.int64(0), writer.op("Squeeze", size), np.int64(1))
        # The inverse permutation: back[order[i]] = i.
        self.back = writer.op("ScatterElements", self.order, self.order, numbers)


class _GroupedProduct:
    """A product, of [rows, in_features, 1] or [rows, 1, in_features], that becomes one for each expert."""

    def __init__(self, graph: ir.Graph, product: ExpertProduct, order: _Order, number: int, stacked: bool):
        self._graph = graph
        self._product = product
        self._order = order
        self._stacked = stacked
        self._prefix = f"experts/product_{number}"
        self._writer = GraphWriter(graph, self._prefix, before=product.node)

    def write(self) -> None:
        product = self._product
        writer = self._writer
        sizes = {name: attribute(product.gathers[0], name, 0) for name in ("bits", "block_size")}
        experts, rows, columns = sizes_of(product.stacks[0])[:3]
        # A quantized stack is [experts, rows, groups, bytes]; a decoded one has its shape only after decoding.
        if product.is_quantized:
            columns *= sizes["block_size"]
        if product.decode:
            decoded_shape = array_of(product.decode[-1].inputs[1])
            assert decoded_shape is not None
            rows, columns = map(int, decoded_shape[1:])
        in_features = rows
        out_features = columns
        if product.transposed:
            in_features = columns
            out_features = rows
        slots_of_stacks = [self._expert_slots(stack) for stack in product.stacks]
        ordered = writer.op("Gather", writer.op("Reshape", product.rows, [-1, in_features]), self._order.order, axis=0)
        names = [f"{self._prefix}/rows_{expert}" for expert in range(experts)]
        rows_of_experts = writer.several("Split", ordered, self._order.counts, results=names, axis=0)
        products = []
        for expert, expert_rows in enumerate(rows_of_experts):
            slots = [slots[expert] for slots in slots_of_stacks]
            out = f"{self._prefix}/product_{expert}"
            if product.is_quantized:
                settings = {"K": in_features, "N": out_features, **sizes}
                products.append(writer.op("MatMulNBits", expert_rows, *slots, result=out, domain=_CONTRIB, **settings))
            elif product.decode:
                has_rows = writer.op("Gather", self._order.has_rows, np.int64(expert))
                branches = self._branches(expert_rows, slots, out, out_features)
                products.append(writer.op("If", has_rows, result=out, **branches))
            else:
                products.append(writer.op("Gemm", expert_rows, *slots, result=out, transB=int(product.transposed)))
        unordered = writer.op("Gather", writer.op("Concat", *products, axis=0), self._order.back, axis=0)
        shape = [-1, 1, out_features]
        if product.is_first:
            shape = [-1, out_features, 1]
        writer.op("Reshape", unordered, shape, name=product.node.name, replaces=product.node.outputs[0])

    def _branches(self, rows: ir.Value, slots: Sequence[ir.Value], out: str, out_features: int) -> Mapping[str, Any]:
        """Return an expert's rows times its weight, which is decoded only if there are rows, and an empty result.

        The product is halved and doubled: for plain products ONNX Runtime has another kernel for a single row, with
        other bits.
        """
        product = self._product
        then = _Branch(self._graph, f"{out}/then")
        values: dict[ir.Value | None, Any] = {}
        for gather, slot in zip(product.gathers, slots, strict=True):
            values[gather.outputs[0]] = then.op("Unsqueeze", slot, [0])
        for node in product.decode:
            values[node.outputs[0]] = then.copy(node, *(values.get(value, value) for value in node.inputs))
        weight = then.op("Squeeze", values[product.weight], [0])
        half = then.op("Gemm", rows, weight, alpha=0.5, transB=int(product.transposed))
        otherwise = _Branch(self._graph, f"{out}/else")
        no_rows = ir.tensor(np.zeros((0, out_features), np.float32))
        return {
            "then_branch": then.giving(then.op("Mul", half, np.float32(2)), out_features),
            "else_branch": otherwise.giving(otherwise.op("Constant", value=no_rows), out_features),
        }

    def _expert_slots(self, stack: ir.Value) -> Sequence[ir.Value]:
        """Return a stack's experts: inputs, or values that are split off the stack."""
        if not self._stacked:
            return _split_stack(self._graph, stack)
        experts, *shape = sizes_of(stack)
        names = [expert_slot(str(stack.name), expert) for expert in range(experts)]
        results = [f"{name}/cut" for name in names]
        parts = self._writer.several("Split", stack, [1] * experts, results=results, axis=0)
        return [self._writer.op("Reshape", part, shape, result=name) for part, name in zip(parts, names)]


class _Branch(GraphWriter):
    """The writer of a branch of an `If`, whose constants are those of the graph."""

    def __init__(self, graph: ir.Graph, prefix: str):
        super().__init__(ir.Graph([], [], nodes=[], name=prefix), prefix)
        self._outer = GraphWriter(graph)

    def constant(self, array: np.ndarray | np.generic, name: str | None = None) -> ir.Value:
        return self._outer.constant(array, name)

    def giving(self, value: ir.Value, out_features: int) -> ir.Graph:
        """Return the branch, whose result is `value`, [rows, out_features]."""
        value.type = ir.TensorType(ir.DataType.FLOAT)
        value.shape = ir.Shape([None, out_features])
        self.graph.outputs.append(value)
        return self.graph


def _split_stack(graph: ir.Graph, stack: ir.Value) -> list[ir.Value]:
    experts, *shape = sizes_of(stack)
    names = [expert_slot(str(stack.name), expert) for expert in range(experts)]
    return [add_input(graph, name, dtype_of(stack), shape, before=stack) for name in names]


def _add_in_order(graph: ir.Graph) -> None:
    """Add the results of a token's experts one after another: a library orders a sum by the number of tokens."""
    for node in graph:
        if node.op_type != "ReduceSum" or len(node.inputs) < 2 or attribute(node, "keepdims", 1):
            continue
        axes = array_of(node.inputs[1])
        reshape = maker(node.inputs[0], "Reshape")
        if axes is None or axes.tolist() != [1] or reshape is None:
            continue
        shape = array_of(reshape.inputs[1])
        if shape is None or len(shape) != 3 or shape[1] < 3:  # two are the same in both orders
            continue
        (out,) = node.outputs
        count = int(shape[1])
        writer = GraphWriter(graph, f"{out.name}/in_order", before=node)
        names = [f"{out.name}/part_{number}" for number in range(count)]
        total, *addends = writer.several("Split", node.inputs[0], [1] * count, results=names, axis=1)
        for addend in addends:
            total = writer.op("Add", total, addend)
        writer.op("Squeeze", total, [1], name=node.name, replaces=out)
