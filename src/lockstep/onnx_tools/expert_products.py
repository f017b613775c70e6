"""Join products with the weights of experts to one node each.

In: a graph in which each row gathers its expert's weight and is multiplied with it. Out: one with nodes
`lockstep::ExpertProduct(rows, ids, weight, ...)`, of rows `[num_tokens, in_features]` that a token's experts share, or
`[num_tokens, per_token * in_features]`, and ids `[num_tokens, per_token]`; their outputs are `[num_tokens, per_token *
out_features]`. cut_products.py takes them out of a graph: no library runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import onnx_ir as ir

from lockstep.errors import CheckError
from lockstep.onnx_tools.group_experts import ExpertProduct, expert_products
from lockstep.onnx_tools.products import ExpertWeight
from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult, infer_types
from lockstep.onnx_tools.values import array_of, attribute, maker, required, sizes_of

DOMAIN = "lockstep"
OPERATOR = "ExpertProduct"
SHAPING = ("Reshape", "Squeeze", "Unsqueeze")
# The operators that decode MXFP4 weights.
_MXFP4 = sorted(["Cast", "Gather", "Reshape", "Cast", "Gather", "Unsqueeze", "Mul", "Reshape"])


class ExpertProducts(Pass):
    """Make a node of each product with experts' weights. Raises CheckError for weights of an unknown form."""

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        products = expert_products(graph)
        if products:
            infer_types(model)
            model.opset_imports[DOMAIN] = 1
        for product in products:
            _write(graph, product)
        return PassResult(model, bool(products))


class FewExperts(Pass):
    """Give products at most `count` experts, for a trial with random weights; chosen ids are taken modulo `count`.

    The chosen experts become outputs, under the names by which products read them.
    """

    def __init__(self, count: int):
        self._count = count

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        infer_types(model)
        products = expert_products(graph)
        products_by_ids: dict[ir.Value, list[ExpertProduct]] = {}
        for product in products:
            products_by_ids.setdefault(product.ids, []).append(product)
        for ids, products_of_ids in products_by_ids.items():
            chosen, per_token = _ids(graph, products_of_ids[0])
            id_readers = list[ir.Node]()
            for product in products_of_ids:
                id_readers += _id_readers(product)
            # The router reads the ids, too, for its weights: those stay.
            uses = [(node, index) for node, index in ids.uses() if node in id_readers]
            writer = GraphWriter(graph, f"{ids.name}/few", after=required(ids.producer()))
            reduced_ids = writer.op("Mod", ids, np.array(self._count, np.int64))
            for node, index in uses:
                node.replace_input_with(index, reduced_ids)
            if not chosen.is_graph_output():
                chosen.type = ir.TensorType(ir.DataType.INT64)
                chosen.shape = ir.Shape([None, per_token])
                graph.outputs.append(chosen)
        for product in products:
            for stack in product.stacks:
                experts, *matrix_shape = sizes_of(stack)
                stack.shape = ir.Shape([min(self._count, experts), *matrix_shape])
            if product.is_quantized:  # the codes of all experts are reshaped before those of a row are gathered
                reshape = required(required(product.gathers[0].inputs[0]).producer())
                sizes = array_of(reshape.inputs[1])
                assert sizes is not None  # `expert_product` checked it
                count = sizes_of(product.stacks[0])[0]
                writer = GraphWriter(graph)
                reshape.replace_input_with(1, writer.constant(np.array([count, *sizes[1:]], np.int64)))
        return PassResult(model, bool(products))


def _id_readers(product: ExpertProduct) -> list[ir.Node]:
    """Return the nodes of a product that read its ids: the gathers, or the reshape in front of a quantised one."""
    if not product.is_quantized:
        return [*product.gathers]
    return [required(required(product.gathers[0].inputs[1]).producer())]


def _write(graph: ir.Graph, product: ExpertProduct) -> None:
    """Replace a product of experts by one node, between reshapes to and from rows of tokens."""
    (out,) = product.node.outputs
    weight, slots = _weight(graph, product)
    ids, per_token = _ids(graph, product)
    writer = GraphWriter(graph, f"{out.name}/experts", before=product.node)
    rows = _token_rows(product.rows, (per_token, weight.in_features))
    settings = {"per_token": per_token, "shared": int(rows is not None)} | asdict(weight)
    del settings["slots"]
    settings["transposed"] = int(weight.transposed)
    if rows is None:
        rows = writer.op("Reshape", product.rows, [-1, per_token * weight.in_features])
    flat = writer.op(OPERATOR, rows, ids, *slots, result=f"{out.name}/flat", domain=DOMAIN, **settings)
    shape = [-1, 1, weight.out_features]
    if product.is_first:
        shape = [-1, weight.out_features, 1]
    writer.op("Reshape", flat, shape, name=product.node.name, replaces=out)


def _weight(graph: ir.Graph, product: ExpertProduct) -> tuple[ExpertWeight, Sequence[ir.Value]]:
    """Return the weights of a product, and the inputs that they are. Raises CheckError for an unknown form."""
    experts, rows, columns = sizes_of(product.stacks[0])[:3]
    slots = product.stacks
    if product.is_quantized:
        bits, group_size = (attribute(product.gathers[0], name) for name in ("bits", "block_size"))
        in_features = columns * group_size  # columns: groups
        return ExpertWeight(_names(slots), experts, in_features, rows, bits, group_size, "integers", True), slots
    if not product.decode:
        if product.transposed:  # [out_features, in_features]
            return ExpertWeight(_names(slots), experts, columns, rows, 16, 0, "floats", True), slots
        return ExpertWeight(_names(slots), experts, rows, columns, 16, 0, "floats", False), slots
    decoded_shape = array_of(product.decode[-1].inputs[1])
    slots = tuple(sorted(slots, key=lambda slot: -len(sizes_of(slot))))  # codes in groups, then exponents
    is_mxfp4 = sorted(node.op_type for node in product.decode) == _MXFP4 and product.transposed and len(slots) == 2
    if decoded_shape is None or not is_mxfp4:
        raise CheckError(
            f"graph {graph.name}: expected experts of integers or MXFP4, found {product.stacks[0].name} in another form"
        )
    out_features, in_features = (int(size) for size in decoded_shape[1:])
    group_size = in_features // sizes_of(slots[1])[2]
    return ExpertWeight(_names(slots), experts, in_features, out_features, 4, group_size, "mxfp4", True), slots


def _names(slots: Sequence[ir.Value]) -> tuple[str, ...]:
    return tuple(str(slot.name) for slot in slots)


def _ids(graph: ir.Graph, product: ExpertProduct) -> tuple[ir.Value, int]:
    """Return the value [num_tokens, per_token] with the experts of tokens, and per_token."""
    value = product.ids
    while (shaping := maker(value, *SHAPING)) is not None:
        value = required(shaping.inputs[0])
    shape = list[int | ir.SymbolicDim]()
    if value.shape is not None:
        shape += value.shape
    if len(shape) != 2 or not isinstance(shape[1], int):
        raise CheckError(
            f"graph {graph.name}: value {value.name}: expected the experts of tokens, [num_tokens, experts of a "
            f"token], found {shape}"
        )
    return value, shape[1]


def _token_rows(value: ir.Value, sizes: tuple[int, int]) -> ir.Value | None:
    """Return the value [num_tokens, in_features] whose rows are repeated for a token's experts; None without one."""
    is_expanded = False  # upwards: the first matrix above an Expand to all experts has the rows that it repeats
    while (node := value.producer()) is not None:
        if node.op_type == "Expand":
            is_expanded = value.shape is not None and tuple(value.shape)[1:] == sizes
        elif node.op_type not in SHAPING:
            return None
        value = required(node.inputs[0])
        if is_expanded and value.shape is not None and len(value.shape) == 2:
            return value
    return None


def is_expert_product(node: ir.Node) -> bool:
    return node.op_type == OPERATOR and node.domain == DOMAIN
