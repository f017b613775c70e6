"""Cut a graph at its products with weights.

In: a graph. Out: its products, and the pieces between them.

A product is a `MatMulNBits`, one of e4m3 numbers (fp8_products.py), or a `Gemm` whose second factor is a weight; its
bias is added after it. Adapters of a layer are part of the product. Products with the weights of experts count too
(expert_products.py). The pieces between are graphs in the dtype of the whole: one
for each level, which is the largest number of products before a value, and one more where experts are chosen. Products
of one input are one step. A backend runs the steps in order: pieces as engines or kernels, products by kernels that
read the weights in their stored form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import onnx
from onnx import TensorProto, helper

from lockstep.artifacts.adapters import IDS
from lockstep.artifacts.document import Mark
from lockstep.artifacts.dtypes import ROW
from lockstep.errors import CheckError
from lockstep.onnx_tools.adapted_graphs import adapter_columns, is_expand
from lockstep.onnx_tools.expert_products import SHAPING, ExpertWeight, is_expert_product, with_expert_products
from lockstep.onnx_tools.fp8_products import product_of
from lockstep.onnx_tools.rewriter import Rewriter, attributes_of, is_linear, is_transposed, typed_values, upstream

_ROW_DIMS = ("num_tokens", "num_requests")  # names of the dimension of rows of values that cross a cut
_VIEWS = (*SHAPING, "Transpose", "Expand")


@dataclass(frozen=True)
class Lora:
    """The term that a row's adapter adds to a product: (input times a) times b.

    a, b: inputs [in_features, columns] and [columns, out_features]; each adapter has `rank` of the `columns`. rows: the
    input that selects rows of `IDS`; "" where the product's rows are tokens.
    """

    a: str
    b: str
    columns: int
    rank: int
    rows: Annotated[str, Mark.ALWAYS] = ""


@dataclass(frozen=True)
class Experts:
    """The experts whose weights the rows of a product are multiplied with.

    ids: a value [rows, per_token], the experts of each token. shared: a token has one row for all of them; else one for
    each.
    """

    ids: str
    per_token: int
    shared: bool
    weight: ExpertWeight


@dataclass(frozen=True)
class Product:
    """out [rows, out_features] = input [rows, in_features] times a weight, transposed.

    slots: the weight's data, scales and zero points if any; for 16 bits the weight itself. bits: 4, 8 or 16.
    group_size: numbers that share a scale; 0 at 16 bits, and for e4m3 numbers, which have a scale a row. With experts
    the output is [rows, per_token * out_features], and so is the input if its rows are not shared. transposed: the
    weight is [in_features, out_features], as GPT-2 has it.
    """

    input: str
    output: str
    slots: tuple[str, ...]
    bits: int
    group_size: int
    in_features: int
    out_features: int
    lora: Annotated[Lora | None, Mark.ALWAYS] = None
    experts: Experts | None = None
    transposed: bool = False

    @property
    def is_fp8(self) -> bool:
        """Return whether weights and activations are e4m3 numbers."""
        return self.bits == 8 and self.group_size == ROW


@dataclass(frozen=True)
class CutGraph:
    """A graph that is cut at its products.

    steps: pieces, by their number, and products of one input and kind, in the order in which they run. inner: values
    that cross a cut, {name: shape from the dimension of rows on}, which is a name.
    """

    pieces: tuple[onnx.ModelProto, ...]
    steps: tuple[int | tuple[Product, ...], ...]
    inner: Mapping[str, tuple[int | str, ...]]


def has_quantized_products(model: onnx.ModelProto) -> bool:
    """Return whether there is a product with a quantised weight, or an embedding that reads rows of one."""
    for node in model.graph.node:
        if node.op_type in ("MatMulNBits", "GatherBlockQuantized"):
            return True
        if node.op_type == "Cast" and attributes_of(node)["to"] == TensorProto.FLOAT8E4M3FN:
            return True
    return False


def cut_products(model: onnx.ModelProto) -> CutGraph:
    """Cut a graph at its products with weights. Raises CheckError for an unknown shape between two steps."""
    graph = Rewriter(with_expert_products(_add_biases_after(model)))
    products = {}
    for node in graph.nodes:
        product = _product(graph, node)
        if product is not None:
            products[node.output[0]] = product
    for base, product in _with_lora(graph, products).items():
        del products[base]
        products[product.output] = product
    return _Cut(graph, products).cut()


class _Cut:
    def __init__(self, graph: Rewriter, products: Mapping[str, Product]):
        self._graph = graph
        self._products = products
        weights = {name for name in graph.inputs if all(graph.shape(name))}
        self._level = {name: 0 for name in graph.inputs if name not in weights}  # of what depends on activations
        for node in graph.nodes:
            product = products.get(node.output[0])
            inputs = node.input if product is None else _activations(product)
            levels = [self._level[name] for name in inputs if name in self._level]
            if levels:
                self._level.update(dict.fromkeys(node.output, max(levels) + (product is not None)))
        self._types = typed_values(_without_quantized(graph))
        self._remade = self._remade_values()

    def _all_activations(self) -> list[str]:
        names = []
        for product in self._products.values():
            names += _activations(product)
        return names

    def _remade_values(self) -> set[str]:
        """Return values that each step makes its own of: they cost nothing, or are exact before they are rounded.

        They are others in another shape, or follow from integers alone, such as angles of RoPE; around products of
        experts also the gathers of their weights.
        """
        ends = {*self._graph.outputs, *self._all_activations()}
        views = [*_VIEWS]
        if any(product.experts for product in self._products.values()):
            views.append("GatherND")
        from_integers = {name for name in self._graph.inputs if self._graph.element(name) == TensorProto.INT64}
        remade = set[str]()
        for node in self._graph.nodes:
            if from_integers.issuperset(name for name in node.input if name not in self._graph.constants):
                from_integers.update(node.output)
                remade.update(node.output)
            elif node.op_type in views:
                remade.add(node.output[0])
        return (remade & self._level.keys()) - ends

    def cut(self) -> CutGraph:
        pieces: list[onnx.ModelProto] = []
        steps: list[int | tuple[Product, ...]] = []
        for level in range(max(self._level.values()) + 1):
            for outputs in self._outputs_of_pieces(level):
                steps.append(len(pieces))
                pieces.append(self._piece(outputs, level, len(pieces)))
            groups: dict[tuple, list[Product]] = {}
            for product in self._products.values():
                if self._level[product.output] == level + 1:
                    form = product.bits, product.group_size, len(product.slots), product.transposed
                    groups.setdefault((product.input, *form, product.experts), []).append(product)
            steps += [tuple(group) for group in groups.values()]
        crossing = {*self._all_activations(), *(product.output for product in self._products.values())}
        for piece in pieces:
            crossing.update(value.name for value in (*piece.graph.input, *piece.graph.output))
        ends = {*self._graph.outputs, *self._graph.inputs}
        shapes = {name: self._shape(name) for name in sorted(crossing - ends)}
        inner = {name: shape[[*map(type, shape)].index(str) :] for name, shape in shapes.items()}
        return CutGraph(tuple(pieces), tuple(steps), inner)

    def _outputs(self, level: int) -> list[str]:
        """Return the values of a level, without products and inputs, that other steps or the outputs need."""
        needed = [*self._all_activations(), *self._graph.outputs]
        between = upstream(self._graph.nodes, needed, self._products)
        for node in reversed(self._graph.nodes):  # those that are no part of a product
            if between.isdisjoint(node.output) or node.output[0] in self._products:
                continue
            is_elsewhere = self._level.get(node.output[0], level) != level
            if is_elsewhere or (node.output[0] in self._remade and node.output[0] in needed):
                needed += node.input
        excluded = self._products.keys() | self._graph.inputs | self._remade
        return list(dict.fromkeys(name for name in needed if self._level.get(name) == level and name not in excluded))

    def _outputs_of_pieces(self, level: int) -> list[list[str]]:
        """Return the outputs of a level's pieces; values that depend on a choice of experts get a piece."""
        outputs = self._outputs(level)
        ends = {*self._graph.inputs, *self._products, *(name for name in self._level if self._level[name] < level)}
        choices: set[str] = set()
        for node in self._graph.nodes:
            if node.op_type == "TopK":
                choices.update(node.output)
        chosen = []
        for name in outputs:
            if choices & (upstream(self._graph.nodes, [name], ends - self._remade) - ends):
                chosen.append(name)
        independent = [name for name in outputs if name not in chosen]
        return [names for names in (chosen, independent) if names]

    def _piece(self, outputs: Sequence[str], level: int, number: int) -> onnx.ModelProto:
        """Return the graph of `outputs`; values that depend on no activation are computed in every piece."""
        piece = Rewriter(self._graph.model)
        order = [*piece.inputs, *piece.producers]
        ends = {*piece.inputs, *self._products, *(name for name in order if self._level.get(name, level) < level)}
        ends -= self._remade
        read = upstream(piece.nodes, outputs, ends) & ends
        piece.inputs = {name: self._value(name) for name in sorted(read, key=order.index)}
        piece.outputs = {name: self._value(name) for name in sorted(outputs, key=order.index)}
        piece.model.graph.name = f"{piece.model.graph.name}.{number}"
        if not any(node.op_type == "GatherBlockQuantized" for node in piece.nodes):
            opsets = {entry.domain: entry.version for entry in piece.model.opset_import}
            piece.set_opset(opsets[""] if "" in opsets else opsets["ai.onnx"])
        return piece.finish()

    def _value(self, name: str) -> onnx.ValueInfoProto:
        if name in self._graph.inputs:
            return self._graph.inputs[name]
        shape = self._shape(name)  # of a value without one there is no type either
        return helper.make_tensor_value_info(name, self._types[name][0], shape)

    def _shape(self, name: str) -> tuple[int | str, ...]:
        """Return the shape of a value that crosses a cut. Raises CheckError for one that is not of rows."""
        shape = self._types[name][1] if name in self._types else ()
        rows = [axis for axis, size in enumerate(shape) if not isinstance(size, int)]
        if len(rows) != 1 or len(shape) < 2 or 0 in shape or any(size != 1 for size in shape[: rows[0]]):
            raise CheckError(
                f"graph {self._graph.model.graph.name}: value {name}: expected rows [{' or '.join(_ROW_DIMS)}, sizes "
                f"...] between two products, found {list(shape)}"
            )
        (axis,) = rows
        row_dim = shape[axis]
        if row_dim not in _ROW_DIMS:  # lost in a reshape: an exit computes one row of each request
            row_dim = _ROW_DIMS["logit_rows" in self._graph.inputs]
        return (*shape[:axis], row_dim, *shape[axis + 1 :])


def _activations(product: Product) -> list[str]:
    """Return the inputs of a product other than its weight."""
    return [product.input] if product.experts is None else [product.input, product.experts.ids]


def _without_quantized(graph: Rewriter) -> onnx.ModelProto:
    """Return a copy with a Gemm for each `MatMulNBits` and product of experts, which ONNX's inference cannot handle."""
    copy = Rewriter(graph.model)
    for node in copy.nodes:
        if node.op_type == "MatMulNBits":
            sizes = attributes_of(node)
            weight = copy.input(f"{node.output[0]}/weight", TensorProto.FLOAT, [sizes["N"], sizes["K"]])
            copy.replace(node, helper.make_node("Gemm", [node.input[0], weight], node.output, node.name, transB=1))
        elif is_expert_product(node):
            product = _product(copy, node)
            if product is None or product.experts is None:
                continue
            count = product.experts.per_token
            input_copies = 1 if product.experts.shared else count
            shape = [count * product.out_features, product.in_features * input_copies]
            element = TensorProto.FLOAT if product.bits < 16 else copy.element(product.slots[0])
            weight = copy.input(f"{node.output[0]}/weight", element, shape)
            copy.replace(node, helper.make_node("Gemm", [product.input, weight], node.output, node.name, transB=1))
    return copy.finish()


def _product(graph: Rewriter, node: onnx.NodeProto) -> Product | None:
    if is_expert_product(node):
        rows, ids, *slots = node.input
        settings = attributes_of(node)
        per_token = settings.pop("per_token")
        shared = bool(settings.pop("shared"))
        kind = settings.pop("kind").decode()
        transposed = bool(settings.pop("transposed"))
        weight = ExpertWeight(tuple(slots), **settings, kind=kind, transposed=transposed)
        experts = Experts(ids, per_token, shared, weight)
        numbers = weight.bits, weight.group_size, weight.in_features, weight.out_features
        return Product(rows, node.output[0], tuple(slots), *numbers, experts=experts)
    if node.op_type == "MatMulNBits":
        sizes = attributes_of(node)
        numbers = sizes["bits"], sizes["block_size"], sizes["K"], sizes["N"]
        return Product(node.input[0], node.output[0], tuple(node.input[1:]), *numbers)
    fp8_product = product_of(graph, node) if node.op_type == "Mul" else None
    if fp8_product is not None:
        activation, *fp8_slots = fp8_product
        out_features, in_features = graph.shape(fp8_slots[0])
        return Product(activation, node.output[0], tuple(fp8_slots), 8, ROW, in_features, out_features)
    transposed = is_transposed(node)
    if not (transposed or is_linear(node)) or len(node.input) > 2:  # see _add_biases_after
        return None
    slot = node.input[1]
    if slot not in graph.inputs or not all(graph.shape(slot)) or len(graph.consumers[slot]) > 1:
        return None
    in_features, out_features = graph.shape(slot) if transposed else reversed(graph.shape(slot))
    return Product(node.input[0], node.output[0], (slot,), 16, 0, in_features, out_features, transposed=transposed)


def _add_biases_after(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in which a bias is added after its Gemm, and after the adapters' sum."""
    graph = Rewriter(model)
    for node in graph.nodes:
        if node.op_type != "Gemm" or len(node.input) != 3 or not node.input[2]:
            continue
        bias = node.input.pop()
        last = node
        readers = graph.consumers.get(node.output[0], [])
        if len(readers) == 1 and readers[0].op_type == "Add":
            makers = [graph.producers[name] for name in readers[0].input if name in graph.producers]
            if any(map(is_expand, makers)):
                last = readers[0]
        (result,) = last.output
        last.output[0] = f"{result}/without bias"
        graph.replace(last, last, helper.make_node("Add", [last.output[0], bias], [result], name=f"{result}/bias"))
    return graph.finish()


def _with_lora(graph: Rewriter, products: Mapping[str, Product]) -> dict[str, Product]:
    """Return {output of the base product: product with its adapters}, for base + where(mask, x A, 0) B."""
    adapted: dict[str, Product] = {}
    maker = graph.producers
    for node in graph.nodes:
        expands = [maker[name] for name in node.input if name in maker and is_expand(maker[name])]
        bases = [name for name in node.input if name in products]
        if node.op_type != "Add" or len(expands) != 1 or len(bases) != 1:
            continue
        expand = expands[0]
        product = products[bases[0]]
        choice = maker[expand.input[0]]
        shrink = maker[choice.input[1]]
        equal = maker[choice.input[0]]
        if (choice.op_type, equal.op_type, shrink.op_type) != ("Where", "Equal", "Gemm"):
            continue
        source = maker[equal.input[0]].input[0]
        rows = ""
        if source in maker:  # the ids of the requests' rows
            source, rows = maker[source].input[:2]
        if shrink.input[0] == product.input and source == IDS:
            lora = Lora(shrink.input[1], expand.input[1], *adapter_columns(graph, equal), rows)
            adapted[bases[0]] = replace(product, output=node.output[0], lora=lora)
    return adapted


Pieces = Callable[[int, Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
Multiply = Callable[[Product, Mapping[str, np.ndarray]], np.ndarray]


def run_cut(
    steps: Sequence[int | tuple[Product, ...]], feeds: Mapping[str, np.ndarray], run_piece: Pieces, multiply: Multiply
) -> dict[str, np.ndarray]:
    """Run the steps on a CPU; return all values {name: array}."""
    values = dict(feeds)
    for step in steps:
        if isinstance(step, int):
            values.update(run_piece(step, values))
        else:
            for product in step:
                values[product.output] = multiply(product, values)
    return values
