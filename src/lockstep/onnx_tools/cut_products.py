"""Cut a graph at its products with weights.

In: a graph. Out: its products, and the pieces that stand between them.

A product is a `MatMulNBits`, or a `Gemm(transB=1)` whose second factor is a weight `[out_features, in_features]`; its
bias is added behind it. What a layer's adapters add to it is a part of the product. What stands between is pieces,
graphs of the dtype that the whole has: one for each level, which is how many products lie before a value at most.
Products of one input are one step. A backend runs the steps in order: pieces as engines or kernels, products by kernels
that read the weights as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from lockstep.artifacts.adapters import IDS
from lockstep.artifacts.document import Mark
from lockstep.errors import CheckError
from lockstep.onnx_tools.graph_types import keep_constants, typed_values
from lockstep.onnx_tools.without_adapters import is_expand

_NAMES = ("num_tokens", "num_requests")  # of the first dimension of what crosses a cut


@dataclass(frozen=True)
class Lora:
    """The share of a product that its resident adapters add.

    It is (input times a) times b, of a row's own adapter.

    a, b: inputs [in_features, columns] and [columns, out_features]; `columns` are `rank` for each adapter. rows: the
    input by which rows of `IDS` are taken; "" where the product's rows are tokens.
    """

    a: str
    b: str
    columns: int
    rank: int
    rows: Annotated[str, Mark.ALWAYS] = ""


@dataclass(frozen=True)
class Product:
    """out [rows, out_features] = input [rows, in_features] times a weight, transposed.

    slots: the weight's data, scales and zero points if it has some; of a weight of 16 bits itself. bits: 4, 8 or 16.
    group_size: numbers that share a scale; 0 at 16 bits.
    """

    input: str
    output: str
    slots: tuple[str, ...]
    bits: int
    group_size: int
    in_features: int
    out_features: int
    lora: Annotated[Lora | None, Mark.ALWAYS] = None


@dataclass(frozen=True)
class CutGraph:
    """A graph that is cut at its products.

    steps: pieces, by their number, and products of one input and kind, in the order in which they run. inner: what
    crosses a cut, {name: shape}, its first dimension a name.
    """

    pieces: tuple[onnx.ModelProto, ...]
    steps: tuple[int | tuple[Product, ...], ...]
    inner: Mapping[str, tuple[int | str, ...]]


def has_quantized_products(model: onnx.ModelProto) -> bool:
    """Return whether there is a product with a quantised weight."""
    return any(node.op_type == "MatMulNBits" for node in model.graph.node)


def cut_products(given: onnx.ModelProto) -> CutGraph:
    """Cut a graph at its products with weights.

    Raises CheckError for a value between two steps whose shape is not known.
    """
    model = onnx.ModelProto()
    model.CopyFrom(given)
    _add_biases_behind(model.graph)
    graph = model.graph
    shapes = {value.name: _dims(value) for value in (*graph.input, *graph.output)}
    readers: dict[str, int] = {}
    for name in (name for node in graph.node for name in node.input):
        readers[name] = readers.get(name, 0) + 1
    weights = {name for name in (value.name for value in graph.input) if all(isinstance(d, int) for d in shapes[name])}
    products: dict[str, Product] = {}
    for node in graph.node:
        found = _product(node, weights, shapes, readers)
        if found is not None:
            products[found.output] = found
    for plain, product in _adapted(graph, products).items():
        del products[plain]
        products[product.output] = product
    return _Cut(model, products, shapes, weights).made()


class _Cut:
    def __init__(
        self,
        model: onnx.ModelProto,
        products: Mapping[str, Product],
        shapes: dict[str, tuple[int | str, ...]],
        weights: set[str],
    ):
        self._model, self._products, self._weights = model, products, weights
        graph = model.graph
        self._maker = {name: node for node in graph.node for name in node.output}
        self._given = {value.name: value for value in graph.input}
        self._results = [value.name for value in graph.output]
        self._level = {name: 0 for name in self._given if name not in weights}  # of what depends on activations
        for node in graph.node:
            product = products.get(node.output[0])
            inputs = node.input if product is None else [product.input]
            known = [self._level[name] for name in inputs if name in self._level]
            if known:
                step = 0 if product is None else 1
                self._level.update(dict.fromkeys(node.output, max(known) + step))
        self._types, self._shapes = self._typed(shapes)

    def made(self) -> CutGraph:
        pieces: list[onnx.ModelProto] = []
        steps: list[int | tuple[Product, ...]] = []
        for level in range(max(self._level.values()) + 1):
            wanted = self._wanted(level)
            if wanted:
                steps.append(len(pieces))
                pieces.append(self._piece(wanted, len(pieces)))
            behind = [each for each in self._products.values() if self._level[each.output] == level + 1]
            groups: dict[tuple, list[Product]] = {}
            for each in behind:
                groups.setdefault((each.input, each.bits, each.group_size, len(each.slots)), []).append(each)
            steps += [tuple(group) for group in groups.values()]
        ends = {*self._results, *self._given}
        crossing = {value.name for piece in pieces for value in (*piece.graph.input, *piece.graph.output)}
        crossing |= {name for each in self._products.values() for name in (each.input, each.output)}
        inner = {name: self._shape(name) for name in sorted(crossing - ends)}
        return CutGraph(tuple(pieces), tuple(steps), inner)

    def _wanted(self, level: int) -> list[str]:
        """Return the values of a level that other steps or the outputs need.

        Those of products and inputs are left out.
        """
        needed = [each.input for each in self._products.values()] + self._results
        for node in self._between():
            if self._level.get(node.output[0], level) != level:
                needed += node.input
        others = self._products.keys() | self._given
        return list(dict.fromkeys(name for name in needed if self._level.get(name) == level and name not in others))

    def _between(self) -> list[onnx.NodeProto]:
        """Return the nodes that are no part of a product."""
        found, wanted = list[onnx.NodeProto](), {*self._results, *(each.input for each in self._products.values())}
        for node in reversed(self._model.graph.node):
            if not wanted.isdisjoint(node.output) and node.output[0] not in self._products:
                found.append(node)
                wanted.update(node.input)
        return found

    def _piece(self, wanted: Sequence[str], number: int) -> onnx.ModelProto:
        """Return the graph of `wanted`.

        It is computed from inputs, products and what earlier pieces give. What depends on no activation is computed
        where it is needed.
        """
        level = self._level[wanted[0]]
        nodes: dict[str, onnx.NodeProto] = {}
        read: dict[str, None] = {}
        constants: set[str] = set()
        initializers = {tensor.name for tensor in self._model.graph.initializer}

        def visit(name: str) -> None:
            if name in initializers:
                constants.add(name)
            elif name in self._given or name in self._products or self._level.get(name, level) < level:
                read[name] = None
            elif name and self._maker[name].output[0] not in nodes:
                node = self._maker[name]
                nodes[node.output[0]] = node
                for other in node.input:
                    visit(other)

        for name in wanted:
            visit(name)
        graph, made = self._model.graph, onnx.ModelProto()
        made.CopyFrom(self._model)
        del made.graph.node[:], made.graph.input[:], made.graph.output[:], made.graph.value_info[:]
        made.graph.name = f"{graph.name}.{number}"
        made.graph.node.extend(node for node in graph.node if node.output[0] in nodes)
        order = [*self._given, *(name for node in graph.node for name in node.output)]
        made.graph.input.extend(self._value(name) for name in sorted(read, key=order.index))
        made.graph.output.extend(self._value(name) for name in sorted(wanted, key=order.index))
        keep_constants(made.graph, constants)
        kept = [entry for entry in made.opset_import if entry.domain in ("", "ai.onnx")]
        del made.opset_import[:]
        made.opset_import.extend(kept)
        onnx.checker.check_model(made, full_check=True)
        return made

    def _value(self, name: str) -> onnx.ValueInfoProto:
        if name in self._given:
            return self._given[name]
        return helper.make_tensor_value_info(name, self._types[name], self._shape(name))

    def _shape(self, name: str) -> tuple[int | str, ...]:
        """Return the shape of a value that crosses a cut.

        Rows of tokens, or of requests, and sizes. Raises CheckError for any other shape.
        """
        first, *rest = self._shapes.get(name, ())
        if not rest or any(not isinstance(size, int) or not size for size in rest):
            raise CheckError(
                f"graph {self._model.graph.name}: value {name}: expected rows [{' or '.join(_NAMES)}, sizes ...] "
                f"between two products, found {list(self._shapes.get(name, ()))}"
            )
        return (first if first in _NAMES else self._rows(), *rest)

    def _rows(self) -> str:
        """Return the name of rows whose name was lost in a reshape.

        An exit computes one row of each request.
        """
        return _NAMES["logit_rows" in self._given]

    def _typed(
        self, shapes: Mapping[str, tuple[int | str, ...]]
    ) -> tuple[dict[str, int], dict[str, tuple[int | str, ...]]]:
        """Return types and shapes of all values.

        ONNX's inference knows no `MatMulNBits`, and is given a Gemm for it.
        """
        copy = onnx.ModelProto()
        copy.CopyFrom(self._model)
        del copy.graph.node[:]
        for node in self._model.graph.node:
            if node.op_type != "MatMulNBits":
                copy.graph.node.append(node)
                continue
            attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
            stand_in, sizes = f"{node.output[0]}/weight", [attributes["N"], attributes["K"]]
            copy.graph.node.append(
                helper.make_node("Gemm", [node.input[0], stand_in], node.output, name=node.name, transB=1)
            )
            copy.graph.input.append(helper.make_tensor_value_info(stand_in, TensorProto.FLOAT, sizes))
        graph = onnx.shape_inference.infer_shapes(copy, strict_mode=True).graph
        found = {value.name: _dims(value) for value in (*graph.input, *graph.value_info, *graph.output)}
        return {name: element for name, (element, _) in typed_values(copy).items()}, {**found, **shapes}


def _product(
    node: onnx.NodeProto, weights: set[str], shapes: Mapping[str, Sequence[int | str]], readers: Mapping[str, int]
) -> Product | None:
    attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
    if node.op_type == "MatMulNBits":
        sizes = attributes["bits"], attributes["block_size"], attributes["K"], attributes["N"]
        return Product(node.input[0], node.output[0], tuple(node.input[1:]), *sizes)
    defaults = {"transA": 0, "transB": 0, "alpha": 1.0, "beta": 1.0}
    plain = {**defaults, **attributes} == {**defaults, "transB": 1} and len(node.input) == 2  # see _add_biases_behind
    if node.op_type != "Gemm" or not plain or node.input[1] not in weights or readers[node.input[1]] > 1:
        return None
    rows, columns = shapes[node.input[1]]
    assert isinstance(rows, int) and isinstance(columns, int)  # a weight's
    return Product(node.input[0], node.output[0], (node.input[1],), 16, 0, columns, rows)


def _add_biases_behind(graph: onnx.GraphProto) -> None:
    """Make a Gemm with a bias two nodes, in place.

    Where adapters add to it, the bias is added behind these.
    """
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    expands = {node.output[0] for node in graph.node if is_expand(node)}
    behind: dict[str, onnx.NodeProto] = {}  # by the node's output that it follows
    for node in graph.node:
        if node.op_type != "Gemm" or len(node.input) != 3 or not node.input[2]:
            continue
        (out,), bias, last = node.output, node.input.pop(), node
        if len(readers.get(out, [])) == 1 and readers[out][0].op_type == "Add" and expands & {*readers[out][0].input}:
            last = readers[out][0]
        (result,) = last.output
        last.output[0] = f"{result}/without bias"
        behind[last.output[0]] = helper.make_node("Add", [last.output[0], bias], [result], name=f"{result}/bias")
    if not behind:
        return
    nodes = []
    for node in graph.node:
        nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
        if node.output[0] in behind:
            nodes.append(behind[node.output[0]])
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]


def _adapted(graph: onnx.GraphProto, products: Mapping[str, Product]) -> dict[str, Product]:
    """Find the products to which their adapters' products are added.

    That is base + where(a column's adapter is the row's, x A, 0) B. Returns them by the output of the product without
    these.
    """
    maker = {name: node for node in graph.node for name in node.output}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    found: dict[str, Product] = {}
    for node in graph.node:
        expands = [name for name in node.input if name in maker and is_expand(maker[name])]
        plain = [name for name in node.input if name in products]
        if node.op_type != "Add" or len(expands) != 1 or len(plain) != 1:
            continue
        expand, product = maker[expands[0]], products[plain[0]]
        choice = maker[expand.input[0]]
        shrink, equal = maker[choice.input[1]], maker[choice.input[0]]
        if (choice.op_type, equal.op_type, shrink.op_type) != ("Where", "Equal", "Gemm"):
            continue
        (ids,) = maker[equal.input[0]].input[:1]
        gather = maker.get(ids)
        rows = "" if gather is None else gather.input[1]
        if shrink.input[0] != product.input or (ids if gather is None else gather.input[0]) != IDS:
            continue
        owners = numpy_helper.to_array(constants[equal.input[1]]).reshape(-1)
        lora = Lora(shrink.input[1], expand.input[1], len(owners), int((owners == owners[0]).sum()), rows)
        found[plain[0]] = replace(product, output=node.output[0], lora=lora)
    return found


def _dims(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    return tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)


Pieces = Callable[[int, Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
Multiply = Callable[[Product, Mapping[str, np.ndarray]], np.ndarray]


def run_cut(
    steps: Sequence[int | tuple[Product, ...]], feeds: Mapping[str, np.ndarray], run_piece: Pieces, multiply: Multiply
) -> dict[str, np.ndarray]:
    """Run the steps on a CPU; return all values behind them, by name."""
    values = dict(feeds)
    for step in steps:
        if isinstance(step, int):
            values.update(run_piece(step, values))
        else:
            for product in step:
                values[product.output] = multiply(product, values)
    return values
