"""Cut a graph at its products with weights.

In: a graph. Out: its products, and the pieces between them.

A product is a `MatMulNBits`, one of e4m3 numbers (fp8_products.py), or a `Gemm` whose second factor is a weight; its
bias is added after it. Adapters of a layer are part of the product. Products with the weights of experts count too
(expert_products.py). The pieces between are graphs in the dtype of the whole: one for each level, which is the largest
number of products before a value, and one more where experts are chosen. Products of one input are one step. A backend
runs the steps in order: pieces as engines or kernels, products by kernels that read the weights in their stored form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from lockstep.artifacts.adapters import A_SUFFIX, B_SUFFIX, IDS
from lockstep.artifacts.dtypes import ROW
from lockstep.errors import CheckError
from lockstep.onnx_tools.adapted_graphs import adapter_columns, is_expand
from lockstep.onnx_tools.expert_products import SHAPING, ExpertProducts, is_expert_product
from lockstep.onnx_tools.fp8_products import product_of
from lockstep.onnx_tools.products import Experts, ExpertWeight, Lora, Product
from lockstep.onnx_tools.toolkit import (
    GraphWriter,
    Pass,
    PassResult,
    add_input,
    infer_types,
    remove_unused,
    replace,
    run_passes,
    to_proto,
)
from lockstep.onnx_tools.values import attribute, is_linear, is_transposed, maker, required, sizes_of, upstream

_ROW_DIMS = ("num_tokens", "num_requests")  # names of the dimension of rows of values that cross a cut
_VIEWS = (*SHAPING, "Transpose", "Expand")


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
    for node in ir.from_proto(model).graph:
        if node.op_type in ("MatMulNBits", "GatherBlockQuantized"):
            return True
        if node.op_type == "Cast" and attribute(node, "to") == ir.DataType.FLOAT8E4M3FN:
            return True
    return False


def cut_products(model: onnx.ModelProto) -> CutGraph:
    """Cut a graph at its products with weights. Raises CheckError for an unknown shape between two steps."""
    joined = ir.from_proto(run_passes(model, AddBiasesAfter(), ExpertProducts()))
    products = {}
    for node in joined.graph:
        product = _product(node)
        if product is not None:
            products[product.output] = product
    # A product with adapters ends where these are added: its own result never leaves the kernel.
    for base, product in _with_lora(joined.graph, products).items():
        del products[base]
        products[product.output] = product
    return _Cut(joined, products).cut()


class _Cut:
    """A graph that is being cut. Values are known by their names: each piece is a copy of the graph.

    A value's level is the largest number of products on a path to it; values that depend on no activation have none.
    """

    def __init__(self, model: ir.Model, products: Mapping[str, Product]):
        self._model = model
        self._graph = model.graph
        self._products = products
        self._inputs = [str(value.name) for value in self._graph.inputs]
        self._outputs = [str(value.name) for value in self._graph.outputs]
        self._values = _values(self._graph)
        # Inputs with a dynamic dimension are activations, the others weights.
        self._level = {str(value.name): 0 for value in self._graph.inputs if not all(sizes_of(value))}
        for node in self._graph:
            product = products.get(str(node.outputs[0].name))
            names = _names(node.inputs)
            if product is not None:
                names = _activations(product)
            levels = [self._level[name] for name in names if name in self._level]
            if not levels:
                continue
            level = max(levels)
            if product is not None:
                level += 1
            self._level.update(dict.fromkeys(_names(node.outputs), level))
        self._types = self._inferred()
        self._recomputed = self._recomputed_values()

    def _all_activations(self) -> list[str]:
        names = []
        for product in self._products.values():
            names += _activations(product)
        return names

    def _recomputed_values(self) -> set[str]:
        """Return values that each piece computes again where it reads them, instead of passing them between steps.

        They are views of others, which cost nothing, or follow from integers alone, such as angles of RoPE, which would
        be rounded between steps; around products of experts also the gathers of their weights.
        """
        views = [*_VIEWS]
        if any(product.experts for product in self._products.values()):
            views.append("GatherND")
        from_integers = {value for value in self._graph.inputs if value.dtype == ir.DataType.INT64}
        recomputed = set[str]()
        for node in self._graph:
            operands = [value for value in node.inputs if value is not None and not value.is_initializer()]
            if from_integers.issuperset(operands):
                from_integers.update(node.outputs)
                recomputed.update(_names(node.outputs))
            elif node.op_type in views:
                recomputed.add(str(node.outputs[0].name))
        return recomputed.intersection(self._level) - {*self._outputs, *self._all_activations()}

    def cut(self) -> CutGraph:
        pieces: list[onnx.ModelProto] = []
        steps: list[int | tuple[Product, ...]] = []
        for level in range(max(self._level.values()) + 1):
            for outputs in self._outputs_of_pieces(level):
                steps.append(len(pieces))
                pieces.append(self._piece(outputs, level, len(pieces)))
            # Products of one input and form are one step: a kernel computes them together.
            groups: dict[tuple, list[Product]] = {}
            for product in self._products.values():
                if self._level[product.output] == level + 1:
                    form = product.bits, product.group_size, len(product.slots), product.transposed
                    groups.setdefault((product.input, *form, product.experts), []).append(product)
            steps += [tuple(group) for group in groups.values()]
        crossing = {*self._all_activations(), *(product.output for product in self._products.values())}
        for piece in pieces:
            crossing.update(value.name for value in (*piece.graph.input, *piece.graph.output))
        shapes = {name: self._shape(name) for name in sorted(crossing.difference(self._outputs, self._inputs))}
        # Without the leading ones before the dimension of rows.
        inner = {name: shape[[*map(type, shape)].index(str) :] for name, shape in shapes.items()}
        return CutGraph(tuple(pieces), tuple(steps), inner)

    def _upstream(self, names: Sequence[str], stops: set[str]) -> set[str]:
        values = upstream([self._values[name] for name in names], {self._values[name] for name in stops})
        return {str(value.name) for value in values}

    def _outputs_of_level(self, level: int) -> list[str]:
        """Return the values of a level, without products and inputs, that other steps or the outputs need."""
        needed = [*self._all_activations(), *self._outputs]
        between = self._upstream(needed, set(self._products))
        for node in reversed(self._graph):
            name = str(node.outputs[0].name)
            if between.isdisjoint(_names(node.outputs)) or name in self._products:
                continue
            # Its operands cross a cut if another level computes it, or each piece that reads it again.
            is_elsewhere = self._level.get(name, level) != level
            if is_elsewhere or (name in self._recomputed and name in needed):
                needed += _names(node.inputs)
        excluded = {*self._products, *self._inputs, *self._recomputed}
        return list(dict.fromkeys(name for name in needed if self._level.get(name) == level and name not in excluded))

    def _outputs_of_pieces(self, level: int) -> list[list[str]]:
        """Return the outputs of a level's pieces; values that depend on a choice of experts get a piece."""
        outputs = self._outputs_of_level(level)
        ends = self._ends(level - 1)
        choices: set[str] = set()
        for node in self._graph:
            if node.op_type == "TopK":
                choices.update(_names(node.outputs))
        chosen = []
        for name in outputs:
            if choices & (self._upstream([name], ends - self._recomputed) - ends):
                chosen.append(name)
        independent = [name for name in outputs if name not in chosen]
        return [names for names in (chosen, independent) if names]

    def _ends(self, level: int) -> set[str]:
        """Return where a walk upstream from the next level ends: inputs, products, values up to `level`."""
        return {*self._inputs, *self._products, *(name for name, other in self._level.items() if other <= level)}

    def _piece(self, outputs: Sequence[str], level: int, number: int) -> onnx.ModelProto:
        """Return the graph of `outputs`; values that depend on no activation are computed in every piece."""
        ends = self._ends(level - 1) - self._recomputed
        read = self._upstream(outputs, ends) & ends
        piece = self._model.clone()
        graph = piece.graph
        values = _values(graph)
        order = [*values]  # of the graph: a set's would change the bytes from run to run
        inputs = []
        for name in sorted(read, key=order.index):
            if name not in self._inputs:  # replace the value by an input of its name, which cuts off its maker
                value = ir.Value(name=name)
                values[name].replace_all_uses_with(value, replace_graph_outputs=True)
                values[name] = value
            inputs.append(self._declared(values[name]))
        graph.inputs.clear()
        graph.inputs.extend(inputs)
        graph.outputs.clear()
        graph.outputs.extend(self._declared(values[name]) for name in sorted(outputs, key=order.index))
        graph.name = f"{graph.name}.{number}"
        if not any(node.op_type == "GatherBlockQuantized" for node in graph):
            version = piece.opset_imports.get("", piece.opset_imports.get("ai.onnx", 0))
            piece.opset_imports.clear()
            piece.opset_imports[""] = version
        remove_unused(graph)
        proto = to_proto(piece)
        onnx.checker.check_model(proto, full_check=True)
        return proto

    def _declared(self, value: ir.Value) -> ir.Value:
        """Give a value that crosses a cut its type and shape."""
        name = str(value.name)
        if name not in self._inputs:
            value.shape = ir.Shape(self._shape(name))
            value.type = self._types[name].type
        return value

    def _shape(self, name: str) -> tuple[int | str, ...]:
        """Return the shape of a value that crosses a cut. Raises CheckError for one that is not of rows."""
        dims = list[int | str]()
        value = self._types.get(name)
        if value is not None and value.shape is not None:
            for size in value.shape:
                if isinstance(size, int):
                    dims.append(size)
                else:
                    dims.append(size.value or "?")
        rows = [axis for axis, size in enumerate(dims) if not isinstance(size, int)]
        if len(rows) != 1 or len(dims) < 2 or 0 in dims or any(size != 1 for size in dims[: rows[0]]):
            raise CheckError(
                f"graph {self._graph.name}: value {name}: expected rows [{' or '.join(_ROW_DIMS)}, sizes ...] between "
                f"two products, found {dims}"
            )
        if dims[rows[0]] not in _ROW_DIMS:  # lost in a reshape: an exit computes one row of each request
            dims[rows[0]] = _ROW_DIMS["logit_rows" in self._inputs]
        return tuple(dims)

    def _inferred(self) -> Mapping[str, ir.Value]:
        """Return {name: value} with types and shapes.

        ONNX's inference knows no `MatMulNBits` and no product of experts, so a Gemm of the same shapes replaces each.
        """
        copy = self._model.clone()
        graph = copy.graph
        for node in [*graph]:
            product = self._products.get(str(node.outputs[0].name))
            if node.op_type != "MatMulNBits" and not is_expert_product(node):
                continue
            product = product or required(_product(node))
            experts = product.experts
            shape = [product.out_features, product.in_features]
            dtype = ir.DataType.FLOAT
            if experts is not None:
                shape[0] *= experts.per_token
                if not experts.shared:
                    shape[1] *= experts.per_token
            if product.bits == 16:
                dtype = required(self._values[product.slots[0]].dtype)
            (out,) = node.outputs
            weight = add_input(graph, f"{out.name}/weight", dtype, shape)
            GraphWriter(graph, before=node).op("Gemm", node.inputs[0], weight, transB=1, replaces=out)
            graph.remove(node)
        infer_types(copy)
        return _values(graph)


def _values(graph: ir.Graph) -> dict[str, ir.Value]:
    """Return {name: value} of inputs, computed values and constants, in this order."""
    values = [*graph.inputs]
    for node in graph:
        values += node.outputs
    values += graph.initializers.values()
    return {str(value.name): value for value in values if value.name}


def _names(values: Sequence[ir.Value | None]) -> list[str]:
    return [str(value.name) for value in values if value is not None]


def _activations(product: Product) -> list[str]:
    if product.experts is None:
        return [product.input]
    return [product.input, product.experts.ids]


def _product(node: ir.Node) -> Product | None:
    """Return the product that a node computes; None where it is no product with a weight."""
    out = str(node.outputs[0].name)
    names = _names(node.inputs)
    if is_expert_product(node):
        rows, ids, *slots = names
        settings = {name: setting.value for name, setting in node.attributes.items()}
        per_token = settings.pop("per_token")
        shared = bool(settings.pop("shared"))
        transposed = bool(settings.pop("transposed"))
        weight = ExpertWeight(tuple(slots), **settings, transposed=transposed)
        experts = Experts(ids, per_token, shared, weight)
        numbers = weight.bits, weight.group_size, weight.in_features, weight.out_features
        return Product(rows, out, tuple(slots), *numbers, experts=experts)
    if node.op_type == "MatMulNBits":
        bits, group_size, in_features, out_features = (
            attribute(node, name) for name in ("bits", "block_size", "K", "N")
        )
        return Product(names[0], out, tuple(names[1:]), bits, group_size, in_features, out_features)
    fp8_product = product_of(node)
    if fp8_product is not None:
        activation, *fp8_slots = fp8_product
        out_features, in_features = sizes_of(fp8_slots[0])
        return Product(str(activation.name), out, tuple(_names(fp8_slots)), 8, ROW, in_features, out_features)
    transposed = is_transposed(node)
    if not (transposed or is_linear(node)) or len(node.inputs) > 2:  # see AddBiasesAfter
        return None
    slot = required(node.inputs[1])
    if not slot.is_graph_input() or not all(sizes_of(slot)) or len(slot.uses()) > 1:
        return None
    if names[1].endswith((A_SUFFIX, B_SUFFIX)):  # of adapters, which are terms of a product
        return None
    in_features, out_features = sizes_of(slot)
    if not transposed:
        out_features, in_features = sizes_of(slot)
    return Product(names[0], out, (names[1],), 16, 0, in_features, out_features, transposed=transposed)


class AddBiasesAfter(Pass):
    """Add a bias after its Gemm, and after the adapters' sum: a product with its adapters is then without a bias."""

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        biased = [node for node in graph if node.op_type == "Gemm" and len(node.inputs) == 3]
        for node in biased:
            *factors, bias = node.inputs
            (out,) = node.outputs
            product = GraphWriter(graph, before=node).copy(node, *factors, replaces=out)
            last = product
            readers = product.consumers()
            if len(readers) == 1 and readers[0].op_type == "Add":
                if any(is_expand(value.producer()) for value in readers[0].inputs if value is not None):
                    last = readers[0].outputs[0]
            writer = GraphWriter(graph, after=required(last.producer()))
            total = writer.op("Add", last, bias, name=f"{last.name}/bias")
            replace(last, total, keep=total.producer())
        return PassResult(model, bool(biased))


def _with_lora(graph: ir.Graph, products: Mapping[str, Product]) -> dict[str, Product]:
    """Return {output of the base product: product with its adapters}, for base + where(mask, x A, 0) B."""
    adapted: dict[str, Product] = {}
    for node in graph:
        producers = [value.producer() for value in node.inputs if value is not None]
        expands = [expand for expand in producers if expand is not None and is_expand(expand)]
        bases = [name for name in _names(node.inputs) if name in products]
        if node.op_type != "Add" or len(expands) != 1 or len(bases) != 1:
            continue
        choice = maker(expands[0].inputs[0], "Where")
        if choice is None:
            continue
        equal = maker(choice.inputs[0], "Equal")
        shrink = maker(choice.inputs[1], "Gemm")
        if equal is None or shrink is None:
            continue
        product = products[bases[0]]
        # The mask is Equal(Unsqueeze(ids), owner of each column); an exit gathers the ids of the requests' rows first.
        source = required(required(required(equal.inputs[0]).producer()).inputs[0])
        rows = ""
        if (gather := source.producer()) is not None:
            source = required(gather.inputs[0])
            rows = _names(gather.inputs)[1]
        if _names(shrink.inputs)[0] == product.input and source.name == IDS:
            a = _names(shrink.inputs)[1]
            b = _names(expands[0].inputs)[1]
            lora = Lora(a, b, *adapter_columns(equal), rows)
            adapted[bases[0]] = dataclasses.replace(product, output=str(node.outputs[0].name), lora=lora)
    return adapted
