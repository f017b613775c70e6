"""CUDA kernels of pieces that route tokens to experts: a token's scores, the top k of them, and their weights.

In: a piece of a graph with a `TopK` (`onnx_tools.cut_products`), whose values are a few hundred elements per token.
Out: CUDA C++ of one kernel with a block for each token. Each operator is a loop over its output's elements, which are
float32 in shared memory. Of equal scores the first is chosen, as in ONNX. NaN never leads to an index out of bounds.
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
_MAX_SHARED = 40 << 10  # bytes of shared memory
_MINUS_INFINITY = constant_of(-math.inf)
_ROW = -1  # stands for the number of tokens in shapes that the graph computes
_EXPRESSIONS = {
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
    """Return the kernel of a piece that chooses experts. Raises CheckError for unsupported operators."""
    return _Writer(piece, name).written()


class _Writer:
    """Writes a kernel, operator by operator.

    By name of a value, `_sizes` has its shape without the first dimension, `_places` a function from an index to the
    C++ expression of an element (of a shared array, a constant or a device array), and `_lists` the numbers of a value
    that is a shape.
    """

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
            dims |= self._input(value.name)
        for node in graph.node:
            getattr(self, f"_{node.op_type.lower()}", self._elementwise)(node)
        parameters = []
        for number, kind in enumerate(self._arguments.values()):
            step = f", int step{number}" if kind == ROWS else ""
            parameters.append(f"const unsigned short* __restrict__ in{number}{step}")
        for number, value in enumerate(graph.output):
            element = self._places[value.name]("i")
            if value.type.tensor_type.elem_type == TensorProto.INT64:
                c_type = "int"
                converted = f"(int)({element})"
            else:
                c_type = "unsigned short"
                converted = f"half({element})"
            parameters.append(f"{c_type}* __restrict__ out{number}, int out_step{number}")
            size = math.prod(self._sizes[value.name])
            self._lines.append(f"EACH(i, {size}) out{number}[row * out_step{number} + i] = {converted};")
        if self._used > _MAX_SHARED:
            self._reject(f"values of {self._used >> 10} KiB for each token")
        (rows,) = dims
        head = [f"constexpr int THREADS = {_THREADS}, BLOCKS = 1;", "long long row = blockIdx.x;"]
        head += ["constexpr int chunk = 0;", "next_may_start();", "wait_for_previous();"]
        body = "\n".join("    " + line for line in [*head, *self._shared, *self._lines])
        signature = f"{self._name}({', '.join(parameters)})"
        source = f'extern "C" __global__ void __launch_bounds__({_THREADS}) {signature} {{\n{body}\n}}\n'
        outputs = tuple(value.name for value in graph.output)
        return RowKernel(self._name, source, tuple(self._arguments.items()), outputs, rows, 1, _THREADS)

    def _reject(self, actual: str) -> None:
        raise CheckError(
            f"graph {self._piece.graph.name}: expected a choice of experts that has a CUDA kernel, found {actual}"
        )

    def _input(self, name: str) -> set[str]:
        """Add an input: copy rows into shared memory and return the name of their dimension; read weights in place."""
        element_type, (rows_dim, *sizes) = self._types[name]
        if element_type != TensorProto.FLOAT16:
            self._reject(f"an input {name} of integers")
        number = len(self._arguments)
        is_rows = not isinstance(rows_dim, int)
        self._arguments[name] = ROWS if is_rows else WEIGHT
        if not is_rows:
            self._sizes[name] = tuple(map(int, (rows_dim, *sizes)))
            self._places[name] = lambda index: f"number(in{number}[{index}])"
            return set()
        array = self._new(name, tuple(map(int, sizes)))
        self._loop(name, f"{array}[i] = number(in{number}[row * step{number} + i]);")
        return {str(rows_dim)}

    def _new(self, name: str, sizes: Sizes) -> str:
        """Declare a shared array for a value; return its C++ name."""
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
        """Return the sizes of an operand, which may be a constant."""
        if name in self._sizes:
            return self._sizes[name]
        array = self._constants.get(name)
        if array is None or array.size != 1:
            self._reject(f"an operand {name}")
        assert array is not None
        text = constant_of(float(array.reshape(-1)[0]))
        self._sizes[name] = ()
        self._places[name] = lambda index: text
        return ()

    def _at(self, name: str, sizes: Sizes, index: str = "i") -> str:
        """Return the expression of an operand's element at `index` of `sizes`, to which the operand is broadcast."""
        operand_sizes = self._value(name)
        if operand_sizes == sizes:
            return self._places[name](index)
        if math.prod(operand_sizes) == 1:
            return self._places[name]("0")
        operand_sizes = (1,) * (len(sizes) - len(operand_sizes)) + operand_sizes
        if len(operand_sizes) != len(sizes) or any(size not in (1, full) for size, full in zip(operand_sizes, sizes)):
            self._reject(f"numbers of {list(operand_sizes)} beside {list(sizes)}")
        index_terms = [
            f"{index} / {math.prod(sizes[axis + 1 :])} % {sizes[axis]} * {math.prod(operand_sizes[axis + 1 :])}"
            for axis, size in enumerate(operand_sizes)
            if size > 1
        ]
        return self._places[name](" + ".join(index_terms))

    def _axis(self, name: str, axis: int) -> int:
        """Return the index of an axis in a value's sizes; the axis of tokens has none."""
        sizes = self._value(name)
        index = axis + len(sizes) if axis < 0 else axis - 1
        if not 0 <= index < len(sizes):
            self._reject("an operator over tokens")
        return index

    def _list(self, name: str) -> list[int]:
        """Return the numbers of a shape or of axes."""
        if name in self._lists:
            return self._lists[name]
        return [int(size) for size in self._constants[name].reshape(-1)]

    def _target(self, name: str, width: int) -> Sizes:
        """Return the sizes in a shape of rows of `width` elements; one of them may be -1."""
        first, *sizes = self._list(name)
        if first != _ROW or 0 in sizes:
            self._reject(f"a shape {[first, *sizes]}")
        if _ROW in sizes:
            sizes[sizes.index(_ROW)] = width // -math.prod(sizes)
        return tuple(sizes)

    # Operators: `_softmax` writes a Softmax, and so on.

    def _elementwise(self, node: onnx.NodeProto) -> None:
        expression = _EXPRESSIONS.get(node.op_type) or elementwise(node, self._constants)
        if expression is None:
            self._reject(node.op_type)
        assert expression is not None
        operands = node.input[:1] if node.op_type == "Clip" else node.input
        sizes = np.broadcast_shapes(*(self._value(name) for name in operands))
        elements = [self._at(name, sizes) for name in operands]
        array = self._new(node.output[0], sizes)
        self._loop(node.output[0], f"{array}[i] = {expression.format(*elements)};")

    def _alias(self, node: onnx.NodeProto, sizes: Sizes) -> None:
        operand = node.input[0]
        if math.prod(sizes) != math.prod(self._value(operand)):
            self._reject(f"a {node.op_type} over tokens")
        self._sizes[node.output[0]] = sizes
        self._places[node.output[0]] = self._places[operand]

    def _reshape(self, node: onnx.NodeProto) -> None:
        self._alias(node, self._target(node.input[1], math.prod(self._value(node.input[0]))))

    def _unsqueeze(self, node: onnx.NodeProto) -> None:
        (axis,) = self._list(node.input[1])
        sizes = list(self._value(node.input[0]))
        sizes.insert(axis + len(sizes) + 1 if axis < 0 else axis - 1, 1)
        self._alias(node, tuple(sizes))

    def _squeeze(self, node: onnx.NodeProto) -> None:
        sizes = list(self._value(node.input[0]))
        del sizes[self._axis(node.input[0], *self._list(node.input[1]))]
        self._alias(node, tuple(sizes))

    def _identity(self, node: onnx.NodeProto) -> None:
        self._alias(node, self._value(node.input[0]))

    def _cast(self, node: onnx.NodeProto) -> None:
        if attributes_of(node)["to"] != TensorProto.BOOL:
            self._identity(node)
            return
        sizes = self._value(node.input[0])
        operand = self._at(node.input[0], sizes)
        array = self._new(node.output[0], sizes)
        self._loop(node.output[0], f"{array}[i] = {operand} != 0.0f;")

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
            self._reject("a number of tokens that is a constant")
        sizes_out = np.broadcast_shapes(self._value(node.input[0]), tuple(sizes))
        text = self._at(node.input[0], sizes_out)
        array = self._new(node.output[0], sizes_out)
        self._loop(node.output[0], f"{array}[i] = {text};")

    def _groups(self, node: onnx.NodeProto, axis: int) -> tuple[int, int]:
        """Return (number of groups, elements of a group) of a value, grouped along its last axis, which is `axis`."""
        sizes = self._value(node.input[0])
        if self._axis(node.input[0], axis) != len(sizes) - 1:
            self._reject(f"a {node.op_type} over other than the last numbers")
        return math.prod(sizes[:-1]), sizes[-1]

    def _reduced(self, node: onnx.NodeProto, axis: int, start: str, form: str, reduce: str) -> str:
        """Reduce each group by a warp; return the shared array of the results.

        form: the expression of a thread's new result from its result `of` and an element `x`. reduce: the function that
        combines the results of a warp.
        """
        groups, size = self._groups(node, axis)
        array = f"g{len(self._shared)}"
        self._shared.append(f"__shared__ float {array}[{groups}];")
        text = self._at(node.input[0], self._value(node.input[0]), f"group * {size} + v")
        self._lines += [
            f"EACH_GROUP(group, {groups}) {{",
            f"float of = {start};",
            f"EACH_OF_GROUP(v, {size}) {{ float x = {text}; of = {form}; }}",
            f"of = {reduce}(of);",
            f"if (threadIdx.x % 32 == 0) {array}[group] = of;",
            "}",
            "__syncthreads();",
        ]
        return array

    def _sum(self, node: onnx.NodeProto, form: str = "of + x", start: str = "0.0f", reduce: str = "warp_sum") -> None:
        attributes = attributes_of(node)
        axes = self._list(node.input[1]) if len(node.input) > 1 else list(attributes.get("axes", []))
        if len(axes) != 1:
            self._reject(f"a {node.op_type} over several sizes")
        array = self._reduced(node, axes[0], start, form, reduce)
        sizes = self._value(node.input[0])[:-1]
        self._sizes[node.output[0]] = (*sizes, 1) if attributes.get("keepdims", 1) else sizes
        self._places[node.output[0]] = lambda index: f"{array}[{index}]"

    def _reducesum(self, node: onnx.NodeProto) -> None:
        self._sum(node)

    def _reducemax(self, node: onnx.NodeProto) -> None:
        self._sum(node, "x > of ? x : of", _MINUS_INFINITY, "warp_max")

    def _softmax(self, node: onnx.NodeProto) -> None:
        axis = attributes_of(node).get("axis", -1)
        sizes = self._value(node.input[0])
        largest = self._reduced(node, axis, _MINUS_INFINITY, "x > of ? x : of", "warp_max")
        size = sizes[-1]
        text = self._at(node.input[0], sizes)
        array = self._new(node.output[0], sizes)
        self._loop(node.output[0], f"{array}[i] = expf({text} - {largest}[i / {size}]);")
        exponentials = onnx.NodeProto(op_type="Softmax", input=[node.output[0]], output=node.output)
        total = self._reduced(exponentials, -1, "0.0f", "of + x", "warp_sum")
        self._loop(node.output[0], f"{array}[i] = {array}[i] / {total}[i / {size}];")

    def _topk(self, node: onnx.NodeProto) -> None:
        """Rank each element within its group by counting the larger ones; write those of the first `count` ranks."""
        attributes = attributes_of(node)
        (count,) = self._list(node.input[1])
        groups, size = self._groups(node, attributes.get("axis", -1))
        sizes = (*self._value(node.input[0])[:-1], count)
        sign = ">" if attributes.get("largest", 1) else "<"
        values_name, ids_name = node.output
        values = self._new(values_name or f"{values_name}/unread", sizes)
        ids = self._new(ids_name or f"{values_name}/unread", sizes)
        sizes_in = self._value(node.input[0])
        number = self._at(node.input[0], sizes_in)
        other = self._at(node.input[0], sizes_in, f"i / {size} * {size} + j")
        self._lines += [f"EACH(i, {groups * count}) {values}[i] = {ids}[i] = 0.0f;", "__syncthreads();"]
        self._lines += [
            f"EACH(i, {groups * size}) {{",
            f"float x = {number};",
            f"int own = i % {size}, before = 0;",
            f"for (int j = 0; j < {size}; j++) {{",
            f"float y = {other};",
            f"before += y {sign} x || (y == x && j < own);",
            "}",
            f"if (before < {count}) {{",
            f"{values}[i / {size} * {count} + before] = x;",
            f"{ids}[i / {size} * {count} + before] = own;",
            "}",
            "}",
            "__syncthreads();",
        ]

    def _gatherelements(self, node: onnx.NodeProto) -> None:
        source, ids = node.input
        _, size = self._groups(node, attributes_of(node).get("axis", 0))
        sizes = self._value(ids)
        index = f"i / {sizes[-1]} * {size} + (int)({self._at(ids, sizes)})"
        text = self._places[source](index)
        array = self._new(node.output[0], sizes)
        self._loop(node.output[0], f"{array}[i] = {text};")

    def _scatterelements(self, node: onnx.NodeProto) -> None:
        source, ids, values = node.input
        if attributes_of(node).get("reduction", b"none") != b"none":
            self._reject("a ScatterElements that accumulates")
        _, size = self._groups(node, attributes_of(node).get("axis", 0))
        sizes_out = self._value(source)
        sizes = self._value(ids)
        text = self._at(source, sizes_out)
        index = f"i / {sizes[-1]} * {size} + (int)({self._at(ids, sizes)})"
        update = self._at(values, sizes)
        array = self._new(node.output[0], sizes_out)
        self._loop(node.output[0], f"{array}[i] = {text};")
        self._lines += [f"EACH(i, {math.prod(sizes)}) {array}[{index}] = {update};", "__syncthreads();"]
