"""Products with the weights of experts as one node each.

In: a graph in which each row gathers its expert's weight and is multiplied with it. Out: one with nodes
`lockstep::ExpertProduct(rows, ids, weight, ...)`, of rows `[num_tokens, in_features]` that a token's experts share, or
`[num_tokens, per_token * in_features]`, and ids `[num_tokens, per_token]`; they give `[num_tokens, per_token *
out_features]`. cut_products.py takes them out of a graph: no library runs them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from lockstep.errors import CheckError
from lockstep.onnx_tools.group_experts import ExpertProduct, expert_product
from lockstep.onnx_tools.rewriter import Dims, Emitter, Rewriter, attributes_of, is_linear, typed_values

DOMAIN = "lockstep"
OPERATOR = "ExpertProduct"
SHAPING = ("Reshape", "Squeeze", "Unsqueeze")


_MXFP4 = sorted(["Cast", "Gather", "Reshape", "Cast", "Gather", "Unsqueeze", "Mul", "Reshape"])  # what decodes it


@dataclass(frozen=True)
class ExpertWeight:
    """The weights of experts: [count, out_features, in_features] if `transposed`, else the other way round.

    slots: of `floats` itself; data and scales of `integers` and `mxfp4`, of so many bits, in groups.
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
    """Return a copy of a graph with a node for each product with experts' weights; itself where it has none."""
    if not any(node.op_type in ("GatherND", "GatherBlockQuantized", "TopK") for node in model.graph.node):
        return model
    graph = Rewriter(model)
    products = [product for node in graph.nodes if (product := expert_product(graph, node)) is not None]
    if not products:
        return model
    shapes = {name: shape for name, (_, shape) in typed_values(model).items()}
    for product in products:
        graph.replace(product.node, *_nodes(graph, product, shapes))
    _halve_routers(graph)
    graph.model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return graph.finish()


def with_few_experts(model: onnx.ModelProto, count: int) -> onnx.ModelProto:
    """Return a copy whose products have `count` experts at most, which are chosen modulo their number.

    It has the experts that are chosen among its outputs, by the names that products have them by.
    """
    graph = Rewriter(model)
    shapes = {name: shape for name, (_, shape) in typed_values(model).items()}
    few = dict[str, str]()
    for node in graph.nodes:
        product = expert_product(graph, node)
        if product is None:
            continue
        if product.ids not in few:
            few[product.ids] = f"{product.ids}/few"
            number = graph.constant(f"{product.ids}/count", np.array(count, np.int64))
            mod = helper.make_node("Mod", [product.ids, number], [few[product.ids]])
            maker = graph.producers[product.ids]
            graph.replace(maker, maker, mod)
            name, per_token = _ids(graph, product, shapes)
            graph.outputs[name] = helper.make_tensor_value_info(name, TensorProto.INT64, [None, per_token])
        for gather in product.gathers:
            reader = graph.producers[gather.input[1]] if product.is_quantized else gather
            reader.input[reader.input[:].index(product.ids)] = few[product.ids]
        if product.is_quantized:
            target = graph.producers[product.gathers[0].input[0]].input[1]
            sizes = graph.array(target)
            assert sizes is not None  # as `expert_product` found it
            graph.constant(target, np.array([min(count, graph.shape(product.stacks[0])[0]), *sizes[1:]], np.int64))
        for stack in product.stacks:
            experts, *rest = graph.shape(stack)
            value = helper.make_tensor_value_info(stack, graph.element(stack), [min(count, experts), *rest])
            graph.replace_input(stack, value)
    return graph.finish()


def _nodes(graph: Rewriter, product: ExpertProduct, shapes: dict[str, Dims]) -> list[onnx.NodeProto]:
    (out,), weight = product.node.output, _weight(graph, product)
    features = weight.in_features
    outs = weight.out_features
    ids, per_token = _ids(graph, product, shapes)
    is_first = product.node.input[1] == product.rows  # [rows, in_features, 1]
    emit = Emitter(graph, out)
    given = _token_rows(graph, product.rows, shapes, (per_token, features))
    settings = {"per_token": per_token, "shared": int(given is not None)} | asdict(weight)
    settings.pop("slots")
    if given is None:
        given = emit("Reshape", product.rows, [-1, per_token * features])
    flat = emit(OPERATOR, given, ids, *weight.slots, result=f"{out}/flat", domain=DOMAIN, **settings)
    emit("Reshape", flat, [-1, outs, 1] if is_first else [-1, 1, outs], result=out, name=product.node.name)
    return emit.nodes


def _weight(graph: Rewriter, product: ExpertProduct) -> ExpertWeight:
    """Return what the weights of a product are. Raises CheckError for a form that is unknown."""
    experts, rows, columns = graph.shape(product.stacks[0])[:3]
    if product.is_quantized:
        sizes = attributes_of(product.gathers[0])
        bits = sizes["bits"]
        group_size = sizes["block_size"]
        return ExpertWeight(product.stacks, experts, columns * group_size, rows, bits, group_size, "integers", True)
    if not product.decode:
        features, outs = (columns, rows) if product.transposed else (rows, columns)
        return ExpertWeight(product.stacks, experts, features, outs, 16, 0, "floats", product.transposed)
    whole = graph.array(product.decode[-1].input[1])
    slots = tuple(sorted(product.stacks, key=lambda slot: -len(graph.shape(slot))))  # codes, exponents
    is_known = sorted(node.op_type for node in product.decode) == _MXFP4 and product.transposed and len(slots) == 2
    if whole is None or not is_known:
        raise CheckError(
            f"graph {graph.model.graph.name}: expected experts of integers or MXFP4, found {product.stacks[0]} in "
            "another form"
        )
    outs, features = (int(size) for size in whole[1:])
    group_size = features // graph.shape(slots[1])[2]
    return ExpertWeight(slots, experts, features, outs, 4, group_size, "mxfp4", True)


def _ids(graph: Rewriter, product: ExpertProduct, shapes: dict[str, Dims]) -> tuple[str, int]:
    """Return the value [num_tokens, per_token] that the experts of rows are, and per_token."""
    name = product.ids
    while (node := graph.producers.get(name)) is not None and node.op_type in SHAPING:
        name = node.input[0]
    shape = shapes.get(name, ())
    if len(shape) != 2 or not isinstance(shape[1], int):
        raise CheckError(
            f"graph {graph.model.graph.name}: value {name}: expected the experts of tokens, [num_tokens, experts of a "
            f"token], found {list(shape)}"
        )
    return name, shape[1]


def _token_rows(graph: Rewriter, name: str, shapes: dict[str, Dims], sizes: tuple[int, int]) -> str | None:
    """Return the value [num_tokens, in_features] whose rows are repeated for a token's experts; None where none is."""
    expanded = False
    while (node := graph.producers.get(name)) is not None and node.op_type in (*SHAPING, "Expand"):
        if node.op_type == "Expand":
            expanded = shapes.get(node.output[0], ())[1:] == sizes
        name = node.input[0]
        if expanded and len(shapes.get(name, ())) == 2:
            return name
    return None


def _halve_routers(graph: Rewriter) -> None:
    """Let products that cast both factors to float32 read them as they are, as all products that are cut."""
    for node in graph.nodes:
        if not is_linear(node) or len(node.input) != 2:
            continue
        casts = [graph.producers.get(name) for name in node.input]
        if any(cast is None or cast.op_type != "Cast" for cast in casts):
            continue
        rows, weight = (cast.input[0] for cast in casts if cast is not None)
        if weight not in graph.inputs or graph.element(weight) != TensorProto.FLOAT16:
            continue
        (out,), half = node.output, f"{node.output[0]}/half"
        product = helper.make_node("Gemm", [rows, weight], [half], node.name, transB=1)
        graph.replace(node, product, helper.make_node("Cast", [half], [out], to=TensorProto.FLOAT))


def is_expert_product(node: onnx.NodeProto) -> bool:
    return node.op_type == OPERATOR and node.domain == DOMAIN
