"""The operators that have a CUDA kernel between products: how an element of a result follows from the operands'.

A rule of `_RULES` gives an element where it is read. One of `_STORED_RULES` writes a loop that computes all elements
before: of reductions, which accumulate in an order that the graph alone decides, and of choices of experts. Of equal
scores the first is chosen, as in ONNX, and NaN never leads to an index out of bounds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from lockstep.errors import CheckError
from lockstep.onnx_tools.toolkit import GraphWriter, Pass, PassResult, replace, run_passes
from lockstep.onnx_tools.types import attributes_of
from lockstep.onnx_tools.values import attribute, required
from lockstep_gpu.kernels.row_kernels import SCALES_TIMES, RowKernel
from lockstep_gpu.kernels.row_writer import (
    WIDE,
    Index,
    Operand,
    Rule,
    StoredRule,
    Unsupported,
    Value,
    Writer,
    constant_of,
    reject_if,
)

_MAX_TERMS = 32  # of a sum that is unrolled: over the taps of a short convolution, or over a token's experts
EXPRESSIONS = {
    "Add": "{} + {}",
    "Sub": "{} - {}",
    "Mul": "{} * {}",
    "Div": "{} / {}",
    "Min": "({1} < {0} ? {1} : {0})",  # NaN stays NaN
    "Max": "({1} > {0} ? {1} : {0})",
    "Neg": "-{0}",
    "Sqrt": "sqrtf({0})",
    "Reciprocal": "1.0f / {0}",
    "Exp": "expf({0})",
    "Log": "logf({0})",
    "Sin": "sinf({0})",
    "Cos": "cosf({0})",
    "Tanh": "tanhf({0})",
    "Sigmoid": "1.0f / (1.0f + expf(-{0}))",
    "Softplus": "(fmaxf({0}, 0.0f) + log1pf(expf(-fabsf({0}))))",
    "Erf": "erff({0})",
    "Relu": "({0} < 0.0f ? 0.0f : {0})",  # NaN stays NaN
    "Abs": "fabsf({0})",
    "Atanh": "atanhf({0})",
    "Not": "!{0}",
    "And": "{0} && {1}",
    "Or": "{0} || {1}",
    "Equal": "{0} == {1}",
    "Greater": "{0} > {1}",
    "GreaterOrEqual": "{0} >= {1}",
    "Less": "{0} < {1}",
    "LessOrEqual": "{0} <= {1}",
    "Where": "{0} ? {1} : {2}",
}
_GELU = {
    b"none": "0.5f * {0} * (1.0f + erff({0} * 0.707106781f))",
    b"tanh": "0.5f * {0} * (1.0f + tanhf(0.797884561f * ({0} + 0.044715f * {0} * {0} * {0})))",
}
_POWERS = {1.0: "{0}", 2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", 0.5: "sqrtf({0})", -0.5: "1.0f / sqrtf({0})"}
# By reduction: the result of nothing, of a result and an element, and the function that joins those of a warp.
_REDUCTIONS = {
    "ReduceSum": ("0.0f", "{0} + {1}", "warp_sum"),
    "ReduceMean": ("0.0f", "{0} + {1}", "warp_sum"),
    "ReduceMax": (constant_of(-math.inf), "({1} > {0} ? {1} : {0})", "warp_max"),
}


def row_kernel(
    piece: onnx.ModelProto, name: str, quantized: Collection[str] = (), wide: Collection[str] = ()
) -> RowKernel:
    """Return the kernel of a piece, whose inputs and outputs become numbers of 16 bits.

    quantized: outputs to quantize to e4m3 as well. wide: rows that stay float32.

    Raises CheckError for an operator without a rule, or in a form that its rule does not take.
    """
    try:
        parts = run_passes(piece, InParts(), check=False)
        return Writer(parts, name, _RULES, _STORED_RULES, wide).write(quantized)
    except Unsupported as error:
        raise CheckError(
            f"graph {piece.graph.name}: expected operators that have a CUDA kernel, found {error}"
        ) from None


# Rules of single elements.


def _elementwise(w: Writer, node: onnx.NodeProto, name: str, index: Index, row: str) -> Operand:
    value = w.value(name)
    expression = EXPRESSIONS.get(node.op_type)
    names = list(node.input)
    if node.op_type == "Clip":
        expression = _clipped(w, node)
        names = names[:1]
    elif node.op_type == "Gelu":
        expression = _GELU[attributes_of(node).get("approximate", b"none")]
    elif node.op_type == "Pow":
        power = w.constants.get(node.input[1])
        expression = "powf({0}, {1})"
        if power is not None and power.size == 1 and power.item() in _POWERS:
            expression = _POWERS[power.item()]
            names = names[:1]
    assert expression is not None
    operands = [w.broadcast(operand, value, index, row) for operand in names]
    if node.op_type not in ("Min", "Max"):
        return w.combine(expression, operands, value.c_type)
    # Min and Max take any number of operands in ONNX.
    return functools.reduce(lambda a, b: w.combine(expression, [a, b], value.c_type), operands)


def _clipped(w: Writer, node: onnx.NodeProto) -> str:
    """Return the expression of a Clip by constants; NaN stays NaN."""
    expression = "{0}"
    for name, sign in zip(node.input[1:], "<>"):  # of the minimum, and of the maximum; either may be absent
        if not name:
            continue
        reject_if(name not in w.constants, f"Clip {node.output[0]} by a number that is computed")
        number = float(w.constants[name].reshape(-1)[0])
        if not math.isinf(number):
            bound = constant_of(number)
            expression = f"({{0}} {sign} {bound} ? {bound} : {expression})"
    return expression


def _cast(w: Writer, node: onnx.NodeProto, name: str, index: Index, row: str) -> Operand:
    """Floats are float32 wherever they are computed: only a cast to or from others changes a number."""
    operand = w.element(node.input[0], index, row)
    c_type = w.value(name).c_type
    if c_type == w.value(node.input[0]).c_type:
        return operand
    expression = f"({c_type}){{0}}"
    if c_type == "bool":
        expression = "{0} != 0"
    return w.combine(expression, [operand], c_type)


def _same_element(w: Writer, node: onnx.NodeProto, name: str, index: Index, row: str) -> Operand:
    """Give another shape to the same elements."""
    value = w.value(name)
    source = w.value(node.input[0])
    is_moved = value.axis is not None and (source.axis is None or value.outer != source.outer)
    reject_if(is_moved or value.width != source.width, f"{node.op_type} {name} of one row's numbers to another")
    return w.element(node.input[0], index, row)


def _expand(w: Writer, node: onnx.NodeProto, name: str, index: Index, row: str) -> Operand:
    return w.broadcast(node.input[0], w.value(name), index, row)


def _filled(w: Writer, node: onnx.NodeProto, name: str, index: Index, row: str) -> Operand:
    tensor = attributes_of(node).get("value")
    number = 0.0
    if tensor is not None:
        number = float(numpy_helper.to_array(tensor).reshape(-1)[0])
    return constant_of(number), False


def _transpose(w: Writer, node: onnx.NodeProto, name: str, index: Index, row: str) -> Operand:
    source = w.value(node.input[0])
    order = attributes_of(node).get("perm") or reversed(range(len(source.sizes)))
    return w.view(node.input[0], w.value(name), [source.strides[axis] for axis in order], 0, index, row)


def _split(w: Writer, node: onnx.NodeProto, name: str, index: Index, row: str) -> Operand:
    source = w.value(node.input[0])
    axis = w.axis_of(attributes_of(node).get("axis", 0), node.input[0], node)
    before = list(node.output)[: list(node.output).index(name)]
    first = sum(w.value(out).sizes[axis] for out in before) * source.strides[axis]
    return w.view(node.input[0], w.value(name), source.strides, first, index, row)


def _slice(w: Writer, node: onnx.NodeProto, name: str, index: Index, row: str) -> Operand:
    source = w.value(node.input[0])
    parameters: list[Any] = [None, None, None, None]
    for number, operand in enumerate(node.input[1:]):
        if operand:
            reject_if(operand not in w.constants, f"Slice {name} with computed ends")
            parameters[number] = w.constants[operand].tolist()
    starts, ends, axes, steps = parameters
    axes = axes or range(len(starts))
    steps = steps or [1] * len(starts)
    strides = list(source.strides)
    first = 0
    for start, end, number, step in zip(starts, ends, axes, steps, strict=True):
        axis = number % len(source.sizes)
        if axis == source.axis:
            reject_if((start, step) != (0, 1) or end < np.iinfo(np.int32).max, f"Slice {name} along rows")
            continue
        first += range(source.sizes[axis])[start:end:step][0] * source.strides[axis]
        strides[axis] *= step
    return w.view(node.input[0], w.value(name), strides, first, index, row)


def _concat(w: Writer, node: onnx.NodeProto, name: str, index: Index, row: str) -> Operand:
    """Read each operand at a valid index, and select the one that has the element."""
    value = w.value(name)
    axis = w.axis_of(attributes_of(node)["axis"], name, node)
    inner = value.strides[axis]
    full = value.sizes[axis] * inner
    sizes = [w.value(operand).sizes[axis] * inner for operand in node.input]
    if index.is_vector and any(size % WIDE for size in sizes):
        return w.one_by_one(lambda at: w.element(name, at, row), index, value.c_type)
    place = w.new_variable()
    w.lines.append(f"int {place} = ({index.base}) % {full};")
    operands = list[Operand]()
    expression = ""
    first = 0
    elements = 1  # that are read at once
    if index.is_vector:
        elements = WIDE
    for number, (operand, size) in enumerate(zip(node.input, sizes, strict=True)):
        last = size - elements
        clamped = f"{place} < {first} ? 0 : {place} < {first + size} ? {place} - {first} : {last}"
        at_operand = w.new_variable()
        w.lines.append(f"int {at_operand} = ({index.base}) / {full} * {size} + ({clamped});")
        operands.append(w.element(operand, Index(at_operand, index.is_vector), row))
        first += size
        if number < len(sizes) - 1:
            expression += f"{place} < {first} ? {{{number}}} : "
        else:
            expression += f"{{{number}}}"
    return w.combine(expression, operands, value.c_type)


def _gather(w: Writer, node: onnx.NodeProto, name: str, index: Index, row: str) -> Operand:
    """Read what integers choose along an axis, or rows of a value by an input of row numbers."""
    source = w.value(node.input[0])
    ids = w.value(node.input[1])
    axis = attributes_of(node).get("axis", 0) % len(source.sizes)
    if axis == source.axis:
        reject_if(ids.width != 1 or source.sizes[axis] != 1 or row != "row", f"Gather {name} along rows")
        at, _ = w.element(node.input[1], Index("0", False), row)
        return w.element(node.input[0], index, at)
    return _chosen(w, node, name, index, row, axis, ids.width)


def _gather_nd(w: Writer, node: onnx.NodeProto, name: str, index: Index, row: str) -> Operand:
    """Read the weights [experts, ...] of a token's experts."""
    ids = w.value(node.input[1])
    is_plain = ids.sizes[-1] == 1 and not attributes_of(node).get("batch_dims", 0)
    reject_if(not is_plain or w.value(node.input[0]).axis is not None, f"GatherND {name} by several numbers")
    return _chosen(w, node, name, index, row, 0, ids.width)


def _chosen(
    w: Writer, node: onnx.NodeProto, name: str, index: Index, row: str, axis: int, count: int, per_inner: bool = False
) -> Operand:
    """Read elements along an axis by `count` integers; per_inner: each element inside of the axis has its own."""
    source = w.value(node.input[0])
    inner = source.strides[axis]
    if index.is_vector and (inner % WIDE or per_inner):
        return w.one_by_one(lambda at: w.element(name, at, row), index, w.value(name).c_type)
    source_size = source.sizes[axis] * inner
    outer = ""
    if source.width > source_size:
        outer = f"({index.base}) / {count * inner} * {source_size} + "
    if per_inner:
        which = index.base
    elif count > 1:  # the same integers for all elements outside of the axis
        which = f"({index.base}) / {inner} % {count}"
    else:
        which = "0"
    number, _ = w.element(node.input[1], Index(which, False), row)
    at = w.new_variable()
    w.lines.append(f"long long {at} = {outer}(long long){number} * {inner} + ({index.base}) % {inner};")
    return w.element(node.input[0], Index(at, index.is_vector), row)


def _gather_elements(w: Writer, node: onnx.NodeProto, name: str, index: Index, row: str) -> Operand:
    axis = w.axis_of(attributes_of(node).get("axis", 0), node.input[0], node)
    return _chosen(w, node, name, index, row, axis, w.value(name).sizes[axis], per_inner=True)


def _dequantized(w: Writer, node: onnx.NodeProto, name: str, index: Index, row: str) -> Operand:
    """Read rows of a quantized weight."""
    sizes = attributes_of(node)
    data, ids, scales = node.input
    ids_width = w.value(ids).width
    reject_if(not w.is_input(data) or ids_width != 1, f"GatherBlockQuantized {name} of several rows")
    at, _ = w.element(ids, Index("0", False), row)
    width = w.value(name).width
    integers = w.argument(data)
    factors = w.argument(w.source(scales))
    element = w.new_variable()
    scale = w.new_variable()
    numbers = w.new_variable()
    if sizes["bits"] == 8:
        number = f"in{integers}[{element} + j]"
    else:
        number = f"(in{integers}[({element} + j) / 2] >> ({element} + j) % 2 * 4 & 15)"
    count = 1
    if index.is_vector:
        count = WIDE  # all of one group: group sizes are multiples of it
    w.lines += [
        f"long long {element} = {at} * {width} + {index.base};",
        f"float {scale} = number_of_half(in{factors}[{element} / {sizes['block_size']}]) * {1 / SCALES_TIMES}f;",
        f"float {numbers}[{count}];",
        "#pragma unroll",
        f"for (int j = 0; j < {count}; j++) {numbers}[j] = ({number} - {1 << sizes['bits'] - 1}) * {scale};",
    ]
    return (numbers, True) if index.is_vector else (f"{numbers}[0]", False)


# Reductions: a short one is a sum of all its terms where it is read, another is computed before.


def _axes(w: Writer, node: onnx.NodeProto) -> list[int]:
    """Return the axes that a node accumulates over."""
    attributes = attributes_of(node)
    axes = attributes.get("axes") or []
    if not axes and len(node.input) > 1:
        reject_if(node.input[1] not in w.constants, f"{node.op_type} {node.output[0]} over computed axes")
        axes = w.constants[node.input[1]].tolist()
    return sorted(w.axis_of(axis, node.input[0], node) for axis in axes or range(len(w.value(node.input[0]).sizes)))


def _is_short(w: Writer, node: onnx.NodeProto) -> bool:
    """Return whether a node accumulates over an axis that isn't the last: the taps of a short convolution."""
    sizes = w.value(node.input[0]).sizes
    axes = _axes(w, node)
    is_sum = node.op_type in ("ReduceSum", "ReduceMean")
    return is_sum and len(axes) == 1 and axes[0] < len(sizes) - 1 and sizes[axes[0]] <= _MAX_TERMS


def _short_sum(w: Writer, node: onnx.NodeProto, name: str, index: Index, row: str) -> Operand:
    source = w.value(node.input[0])
    (axis,) = _axes(w, node)
    terms_value = Value(source.sizes[:axis] + source.sizes[axis + 1 :], None, source.elem_type)
    strides = source.strides[:axis] + source.strides[axis + 1 :]
    count = source.sizes[axis]
    terms = [
        w.view(node.input[0], terms_value, strides, tap * source.strides[axis], index, row) for tap in range(count)
    ]
    expression = " + ".join(f"{{{tap}}}" for tap in range(count))
    if node.op_type == "ReduceMean":
        expression = f"({expression}) / {count}.0f"
    return w.combine(expression, terms)


def _reduce(w: Writer, node: onnx.NodeProto) -> bool:
    """Write a reduction: of a whole row by all threads, of each part of a row by a warp."""
    if _is_short(w, node):
        return False
    source = w.value(node.input[0])
    (name,) = node.output
    reduced = _axes(w, node)
    kept_axes = [axis for axis in range(len(source.sizes)) if axis not in reduced]
    order = [*kept_axes, *reduced]
    transposed = Value(tuple(source.sizes[axis] for axis in order), None, source.elem_type)
    strides = [source.strides[axis] for axis in order]
    groups = math.prod(source.sizes[axis] for axis in kept_axes)
    size = math.prod(source.sizes[axis] for axis in reduced)
    start, expression, join = _REDUCTIONS[node.op_type]
    total = w.new_variable()
    scale = ""
    if node.op_type == "ReduceMean":
        scale = f" * {np.float32(1 / size):.9e}f"

    def add(index: Index) -> None:
        text, vector = w.view(node.input[0], transposed, strides, 0, index, "row")
        if vector:
            w.lines += [
                "#pragma unroll",
                f"for (int j = 0; j < {WIDE}; j++) {total} = {expression.format(total, text + '[j]')};",
            ]
        elif index.is_vector and join == "warp_sum":  # the same value for all elements of the vector
            w.lines.append(f"{total} += {WIDE} * {text};")
        else:
            w.lines.append(f"{total} = {expression.format(total, text)};")

    if groups == 1 and join == "warp_sum":
        result = w.new_variable()
        w.lines.append(f"float {total} = {start};")
        w.loop(size, add)
        w.lines.append(f"float {result} = block_sum<THREADS / 32>({total}){scale};")
        w.set_computed(name, result)
        return True
    array = w.shared_array(groups)
    w.lines += [f"EACH_GROUP(group, {groups}) {{", f"float {total} = {start};"]
    w.loop(size, add, groups)
    w.lines += [
        f"{total} = {join}({total}){scale};",
        f"if (threadIdx.x % 32 == 0) {array}[group] = {total};",
        "}",
        "__syncthreads();",
    ]
    w.set_computed(name, f"{array}[{{}}]")
    return True


# Choices of experts.


def _top_k(w: Writer, node: onnx.NodeProto) -> bool:
    """Rank each element within its group by counting the larger ones; write those of the first `count` ranks."""
    attributes = attributes_of(node)
    source = w.value(node.input[0])
    size = source.sizes[-1]
    axis = w.axis_of(attributes.get("axis", -1), node.input[0], node)
    reject_if(axis != len(source.sizes) - 1 or node.input[1] not in w.constants, f"TopK {node.output[0]}")
    count = int(w.constants[node.input[1]].reshape(-1)[0])
    groups = source.width // size
    scores = w.store_array(node.input[0], node.input[0])
    values = w.shared_array(groups * count)
    ids = w.shared_array(groups * count)
    sign = ">"
    if not attributes.get("largest", 1):
        sign = "<"
    w.lines += [
        f"EACH(i, {groups * count}) {values}[i] = {ids}[i] = 0.0f;",
        "__syncthreads();",
        f"EACH(i, {groups * size}) {{",
        f"float x = {scores}[i];",
        f"int own = i % {size}, before = 0;",
        f"for (int j = 0; j < {size}; j++) {{",
        f"float y = {scores}[i / {size} * {size} + j];",
        f"before += y {sign} x || (y == x && j < own);",
        "}",
        f"if (before < {count}) {{",
        f"{values}[i / {size} * {count} + before] = x;",
        f"{ids}[i / {size} * {count} + before] = own;",
        "}",
        "}",
        "__syncthreads();",
    ]
    for name, array in zip(node.output, (values, ids), strict=True):
        if name:
            w.set_computed(name, f"{array}[{{}}]")
    return True


def _scatter_elements(w: Writer, node: onnx.NodeProto) -> bool:
    source, ids, values = node.input
    (name,) = node.output
    reject_if(attributes_of(node).get("reduction", b"none") != b"none", f"ScatterElements {name} that accumulates")
    axis = w.axis_of(attributes_of(node).get("axis", 0), source, node)
    inner = w.value(name).strides[axis]
    size = w.value(name).sizes[axis] * inner
    update_size = w.value(ids).sizes[axis] * inner

    array = w.store_array(name, source)

    def update(index: Index) -> None:
        number, _ = w.element(ids, index, "row")
        text, _ = w.element(values, index, "row")
        w.lines.append(f"{array}[v / {update_size} * {size} + (int){number} * {inner} + v % {inner}] = {text};")

    w.loop_over_all(w.value(ids).width, update)
    return True


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys([*EXPRESSIONS, "Clip", "Gelu", "Pow"], _elementwise),
    **dict.fromkeys(["Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"], _same_element),
    "Cast": _cast,
    "Concat": _concat,
    "ConstantOfShape": _filled,
    "Expand": _expand,
    "Gather": _gather,
    "GatherBlockQuantized": _dequantized,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ReduceMean": _short_sum,
    "ReduceSum": _short_sum,
    "Slice": _slice,
    "Split": _split,
    "Transpose": _transpose,
}
_STORED_RULES: Mapping[str, StoredRule] = {
    **dict.fromkeys(_REDUCTIONS, _reduce),
    "ScatterElements": _scatter_elements,
    "TopK": _top_k,
}


class InParts(Pass):
    """Write norms, softmaxes and ArgMax over one axis as other operators."""

    def call(self, model: ir.Model) -> PassResult:
        graph = model.graph
        is_changed = False
        for node in [*graph]:
            (out, *statistics) = node.outputs
            axis = attribute(node, "axis", -1)
            writer = GraphWriter(graph, f"{out.name}/part", before=node)
            if node.op_type == "Softmax":
                scores = required(node.inputs[0])
                below = writer.op("Sub", scores, writer.op("ReduceMax", scores, [axis]))
                numbers = writer.op("Exp", below)
                writer.op("Div", numbers, writer.op("ReduceSum", numbers, [axis]), replaces=out)
                is_changed = True
            elif node.op_type == "ArgMax" and attribute(node, "keepdims", 1) and axis == -1:
                results = [f"{out.name}/largest", f"{out.name}/index"]
                _, index = writer.several("TopK", required(node.inputs[0]), [1], results=results, axis=axis)
                replace(out, index)
                is_changed = True
            elif node.op_type == "LayerNormalization" and not statistics and axis == -1:
                _norm(writer, node)
                is_changed = True
        return PassResult(model, is_changed)


def _norm(writer: GraphWriter, node: ir.Node) -> None:
    x, gain, *bias = map(required, node.inputs)
    centered = writer.op("Sub", x, writer.op("ReduceMean", x, [-1]))
    variance = writer.op("ReduceMean", writer.op("Mul", centered, centered), [-1])
    # float32 even in a float16 graph, because epsilon may be too small: so types are not checked.
    epsilon = np.array(attribute(node, "epsilon", 1e-5), np.float32)
    scaled = writer.op("Div", centered, writer.op("Sqrt", writer.op("Add", variance, epsilon)))
    if bias:
        writer.op("Add", writer.op("Mul", scaled, gain), *bias, replaces=node.outputs[0])
    else:
        writer.op("Mul", scaled, gain, replaces=node.outputs[0])
