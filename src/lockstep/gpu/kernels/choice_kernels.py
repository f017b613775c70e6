"""CUDA kernels of pieces that choose experts: scores of a token, the largest of them, and their weights.

In: a piece of a graph with a `TopK` (`onnx_tools.cut_products`), whose values are a few hundred numbers a token. Out:
CUDA C++ of one kernel, a block of threads for each token: each operator is a loop over the numbers that it makes, which
lie in shared memory, float32. Of equal numbers the first is chosen, as ONNX says. What is no number is never a place
outside of an array.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from lockstep.errors import CheckError
from lockstep.gpu.kernels.row_kernels import ROWS, WEIGHT, RowKernel, constant_of, elementwise
from lockstep.onnx_tools.rewriter import attributes_of, typed_values

_THREADS = 128
_MOST_SHARED = 40 << 10  # bytes
_LEAST = constant_of(-math.inf)
_ROW = -1  # the size of the first dimension, in shapes that are values of the graph
_FORMS = {
    "Not": "{0} == 0.0f",
    "And": "{0} != 0.0f && {1} != 0.0f",
    "Or": "{0} != 0.0f || {1} != 0.0f",
    "Equal": "{0} == {1}",
    "Greater": "{0} > {1}",
    "GreaterOrEqual": "{0} >= {1}",
    "Less": "{0} < {1}",
    "LessOrEqual": "{0} <= {1}",
    "Where": "{0} != 0.0f ? {1} : {2}",
}
Sizes = tuple[int, ...]


def chooses(piece: onnx.ModelProto) -> bool:
    return any(node.op_type == "TopK" for node in piece.graph.node)


def choice_kernel(piece: onnx.ModelProto, name: str) -> RowKernel:
    """Return the kernel of a piece that chooses. Raises CheckError for operators that have none."""
    return _Writer(piece, name).written()


class _Writer:
    """Values: `_sizes` of each, without the first dimension; `_places` of each, a shared array, a constant or an array
    of the device; `_lists` of those that are shapes."""

    def __init__(self, piece: onnx.ModelProto, name: str):
        self._piece = piece
        self._name = name
        self._types = typed_values(piece)
        self._constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in piece.graph.initializer}
        self._sizes: dict[str, Sizes] = {}
        self._places: dict[str, Callable[[str], str]] = {}
        self._lists: dict[str, list[int]] = {}
        self._arguments: dict[str, str] = {}
        self._shared: list[str] = []
        self._lines: list[str] = []
        self._used = 0

    def written(self) -> RowKernel:
        graph = self._piece.graph
        dims = set[str]()
        for value in graph.input:
            dims |= self._given(value.name)
        for node in graph.node:
            getattr(self, f"_{node.op_type.lower()}", self._elementwise)(node)
        kinds = [
            f"const unsigned short* __restrict__ in{n}{f', int step{n}' if kind == ROWS else ''}"
            for n, kind in enumerate(self._arguments.values())
        ]
        for number, value in enumerate(graph.output):
            is_choice = value.type.tensor_type.elem_type == TensorProto.INT64
            number_of = "(int)({})" if is_choice else "half({})"
            kinds += [f"{'int' if is_choice else 'unsigned short'}* __restrict__ out{number}, int out_step{number}"]
            text = number_of.format(self._places[value.name]("i"))
            self._lines.append(
                f"EACH(i, {math.prod(self._sizes[value.name])}) out{number}[row * out_step{number} + i] = {text};"
            )
        if self._used > _MOST_SHARED:
            self._refuse(f"values of {self._used >> 10} KiB for each token")
        (rows,) = dims
        head = [f"constexpr int THREADS = {_THREADS}, BLOCKS = 1;", "long long row = blockIdx.x;"]
        head += ["constexpr int chunk = 0;", "next_may_start();", "wait_for_previous();"]
        text = "\n".join("    " + line for line in [*head, *self._shared, *self._lines])
        declared = ", ".join(kinds)
        source = f'extern "C" __global__ void __launch_bounds__({_THREADS}) {self._name}({declared}) {{\n{text}\n}}\n'
        outputs = tuple(value.name for value in graph.output)
        return RowKernel(self._name, source, tuple(self._arguments.items()), outputs, rows, 1, _THREADS)

    def _refuse(self, found: str) -> None:
        raise CheckError(
            f"graph {self._piece.graph.name}: expected a choice of experts that has a CUDA kernel, found {found}"
        )

    def _given(self, name: str) -> set[str]:
        """Read an input, a value of rows into shared memory; return the name of its first dimension."""
        element, (first, *sizes) = self._types[name]
        if element != TensorProto.FLOAT16:
            self._refuse(f"an input {name} of integers")
        number = len(self._arguments)
        is_rows = not isinstance(first, int)
        self._arguments[name] = ROWS if is_rows else WEIGHT
        if not is_rows:
            self._sizes[name] = tuple(map(int, (first, *sizes)))
            self._places[name] = lambda index: f"number(in{number}[{index}])"
            return set()
        at = self._new(name, tuple(map(int, sizes)))
        self._loop(name, f"{at}[i] = number(in{number}[row * step{number} + i]);")
        return {str(first)}

    def _new(self, name: str, sizes: Sizes) -> str:
        """Make a shared array for a value."""
        at = f"v{len(self._shared)}"
        count = math.prod(sizes)
        self._shared.append(f"__shared__ float {at}[{count}];")
        self._used += 4 * count
        self._sizes[name] = sizes
        self._places[name] = lambda index: f"{at}[{index}]"
        return at

    def _loop(self, name: str, body: str) -> None:
        self._lines += [f"EACH(i, {math.prod(self._sizes[name])}) {body}", "__syncthreads();"]

    def _value(self, name: str) -> Sizes:
        """Return the sizes of an operand, of constants too."""
        if name in self._sizes:
            return self._sizes[name]
        array = self._constants.get(name)
        if array is None or array.size != 1:
            self._refuse(f"an operand {name}")
        assert array is not None
        text = constant_of(float(array.reshape(-1)[0]))
        self._sizes[name] = ()
        self._places[name] = lambda index: text
        return ()

    def _at(self, name: str, sizes: Sizes, index: str = "i") -> str:
        """Return the number of an operand that is broadcast to `sizes`, at `index` of these."""
        own = self._value(name)
        if own == sizes or math.prod(own) == 1:
            return self._places[name](index if own == sizes else "0")
        own = (1,) * (len(sizes) - len(own)) + own
        if len(own) != len(sizes) or any(size not in (1, whole) for size, whole in zip(own, sizes)):
            self._refuse(f"numbers of {list(own)} beside {list(sizes)}")
        terms = [
            f"{index} / {math.prod(sizes[axis + 1 :])} % {sizes[axis]} * {math.prod(own[axis + 1 :])}"
            for axis, size in enumerate(own)
            if size > 1
        ]
        return self._places[name](" + ".join(terms))

    def _axis(self, name: str, axis: int) -> int:
        """Return which of a value's sizes an axis is; `_ROW` is none."""
        sizes = self._value(name)
        found = axis + len(sizes) if axis < 0 else axis - 1
        if not 0 <= found < len(sizes):
            self._refuse("an operator over tokens")
        return found

    def _list(self, name: str) -> list[int]:
        return self._lists[name] if name in self._lists else [int(size) for size in self._constants[name].reshape(-1)]

    def _target(self, name: str, width: int) -> Sizes:
        """Return the sizes that a shape says, whose first dimension is that of rows."""
        first, *sizes = self._list(name)
        if first != _ROW or 0 in sizes:
            self._refuse(f"a shape {[first, *sizes]}")
        if _ROW in sizes:
            sizes[sizes.index(_ROW)] = width // -math.prod(sizes)
        return tuple(sizes)

    # Operators, by their names.

    def _elementwise(self, node: onnx.NodeProto) -> None:
        form = _FORMS.get(node.op_type) or elementwise(node, self._constants)
        if form is None:
            self._refuse(node.op_type)
        assert form is not None
        operands = node.input[:1] if node.op_type == "Clip" else node.input
        sizes = np.broadcast_shapes(*(self._value(name) for name in operands))
        texts = [self._at(name, sizes) for name in operands]
        self._new(node.output[0], sizes)
        self._loop(node.output[0], f"{self._places[node.output[0]]('i')} = {form.format(*texts)};")

    def _alias(self, node: onnx.NodeProto, sizes: Sizes) -> None:
        source = node.input[0]
        if math.prod(sizes) != math.prod(self._value(source)):
            self._refuse(f"a {node.op_type} over tokens")
        self._sizes[node.output[0]], self._places[node.output[0]] = sizes, self._places[source]

    def _reshape(self, node: onnx.NodeProto) -> None:
        self._alias(node, self._target(node.input[1], math.prod(self._value(node.input[0]))))

    def _unsqueeze(self, node: onnx.NodeProto) -> None:
        (axis,), sizes = self._list(node.input[1]), list(self._value(node.input[0]))
        sizes.insert(axis + len(sizes) + 1 if axis < 0 else axis - 1, 1)
        self._alias(node, tuple(sizes))

    def _squeeze(self, node: onnx.NodeProto) -> None:
        sizes = list(self._value(node.input[0]))
        del sizes[self._axis(node.input[0], *self._list(node.input[1]))]
        self._alias(node, tuple(sizes))

    def _identity(self, node: onnx.NodeProto) -> None:
        self._alias(node, self._value(node.input[0]))

    def _cast(self, node: onnx.NodeProto) -> None:
        if attributes_of(node)["to"] == TensorProto.BOOL:  # what is read beside 0 alone
            return self._elementwise_as("{0} != 0.0f", node)
        return self._identity(node)

    def _elementwise_as(self, form: str, node: onnx.NodeProto) -> None:
        sizes = self._value(node.input[0])
        text = self._at(node.input[0], sizes)
        at = self._new(node.output[0], sizes)
        self._loop(node.output[0], f"{at}[i] = {form.format(text)};")

    def _shape(self, node: onnx.NodeProto) -> None:
        self._lists[node.output[0]] = [_ROW, *self._value(node.input[0])]

    def _constantofshape(self, node: onnx.NodeProto) -> None:
        value = attributes_of(node).get("value")
        number = 0.0 if value is None else float(numpy_helper.to_array(value).reshape(-1)[0])
        self._sizes[node.output[0]] = self._target(node.input[0], 0)
        self._places[node.output[0]] = lambda index: constant_of(number)

    def _expand(self, node: onnx.NodeProto) -> None:
        first, *sizes = self._list(node.input[1])
        if first not in (1, _ROW):
            self._refuse("a number of tokens that is a constant")
        whole = np.broadcast_shapes(self._value(node.input[0]), tuple(sizes))
        text = self._at(node.input[0], whole)
        at = self._new(node.output[0], whole)
        self._loop(node.output[0], f"{at}[i] = {text};")

    def _groups(self, node: onnx.NodeProto, axis: int) -> tuple[int, int]:
        """Return how many groups of how many numbers a value has: `axis` is the last."""
        sizes = self._value(node.input[0])
        if self._axis(node.input[0], axis) != len(sizes) - 1:
            self._refuse(f"a {node.op_type} over other than the last numbers")
        return math.prod(sizes[:-1]), sizes[-1]

    def _reduced(self, node: onnx.NodeProto, axis: int, start: str, form: str, reduce: str) -> str:
        """Reduce each group by a warp; return the array that it goes to."""
        groups, size = self._groups(node, axis)
        made = f"g{len(self._shared)}"
        self._shared.append(f"__shared__ float {made}[{groups}];")
        text = self._at(node.input[0], self._value(node.input[0]), f"group * {size} + v")
        self._lines += [
            f"EACH_GROUP(group, {groups}) {{",
            f"float of = {start};",
            f"EACH_OF_GROUP(v, {size}) {{ float x = {text}; of = {form}; }}",
            f"of = {reduce}(of);",
            f"if (threadIdx.x % 32 == 0) {made}[group] = of;",
            "}",
            "__syncthreads();",
        ]
        return made

    def _sum(self, node: onnx.NodeProto, form: str = "of + x", start: str = "0.0f", reduce: str = "warp_sum") -> None:
        attributes = attributes_of(node)
        axes = self._list(node.input[1]) if len(node.input) > 1 else list(attributes.get("axes", []))
        if len(axes) != 1:
            self._refuse(f"a {node.op_type} over several sizes")
        made = self._reduced(node, axes[0], start, form, reduce)
        sizes = self._value(node.input[0])[:-1]
        self._sizes[node.output[0]] = (*sizes, 1) if attributes.get("keepdims", 1) else sizes
        self._places[node.output[0]] = lambda index: f"{made}[{index}]"

    def _reducesum(self, node: onnx.NodeProto) -> None:
        self._sum(node)

    def _reducemax(self, node: onnx.NodeProto) -> None:
        self._sum(node, "x > of ? x : of", _LEAST, "warp_max")

    def _softmax(self, node: onnx.NodeProto) -> None:
        axis = attributes_of(node).get("axis", -1)
        sizes = self._value(node.input[0])
        most = self._reduced(node, axis, _LEAST, "x > of ? x : of", "warp_max")
        size = sizes[-1]
        text = self._at(node.input[0], sizes)
        at = self._new(node.output[0], sizes)
        self._loop(node.output[0], f"{at}[i] = expf({text} - {most}[i / {size}]);")
        power = onnx.NodeProto(op_type="Softmax", input=[node.output[0]], output=node.output)
        total = self._reduced(power, -1, "0.0f", "of + x", "warp_sum")
        self._loop(node.output[0], f"{at}[i] = {at}[i] / {total}[i / {size}];")

    def _topk(self, node: onnx.NodeProto) -> None:
        """Write each number to the place that it has among all of its group, if that is one of the first."""
        attributes = attributes_of(node)
        (count,) = self._list(node.input[1])
        groups, size = self._groups(node, attributes.get("axis", -1))
        sizes = (*self._value(node.input[0])[:-1], count)
        sign = ">" if attributes.get("largest", 1) else "<"
        values, places = (self._new(name or f"{node.output[0]}/unread", sizes) for name in node.output)
        whole = self._value(node.input[0])
        own, other = (self._at(node.input[0], whole, at) for at in ("i", f"i / {size} * {size} + j"))
        self._lines += [f"EACH(i, {groups * count}) {values}[i] = {places}[i] = 0.0f;", "__syncthreads();"]
        self._lines += [
            f"EACH(i, {groups * size}) {{",
            f"float x = {own};",
            f"int own = i % {size}, before = 0;",
            f"for (int j = 0; j < {size}; j++) {{",
            f"float y = {other};",
            f"before += y {sign} x || (y == x && j < own);",
            "}",
            f"if (before < {count}) {{",
            f"{values}[i / {size} * {count} + before] = x;",
            f"{places}[i / {size} * {count} + before] = own;",
            "}",
            "}",
            "__syncthreads();",
        ]

    def _gatherelements(self, node: onnx.NodeProto) -> None:
        source, places = node.input
        _, size = self._groups(node, attributes_of(node).get("axis", 0))
        sizes = self._value(places)
        place = f"i / {sizes[-1]} * {size} + (int)({self._at(places, sizes)})"
        text = self._places[source](place)
        at = self._new(node.output[0], sizes)
        self._loop(node.output[0], f"{at}[i] = {text};")

    def _scatterelements(self, node: onnx.NodeProto) -> None:
        source, places, values = node.input
        if attributes_of(node).get("reduction", b"none") != b"none":
            self._refuse("a ScatterElements that accumulates")
        _, size = self._groups(node, attributes_of(node).get("axis", 0))
        whole = self._value(source)
        sizes = self._value(places)
        text = self._at(source, whole)
        place = f"i / {sizes[-1]} * {size} + (int)({self._at(places, sizes)})"
        given = self._at(values, sizes)
        at = self._new(node.output[0], whole)
        self._loop(node.output[0], f"{at}[i] = {text};")
        self._lines += [f"EACH(i, {math.prod(sizes)}) {at}[{place}] = {given};", "__syncthreads();"]
