"""CUDA kernels of the operators between GEMMs: residual additions, activation functions, norms.

In: a piece of a graph that was cut at its GEMMs (`onnx_tools.cut_products`), whose values are rows, one for each token
or request. Out: CUDA C++ of one kernel that computes the piece, with one block per row if something is accumulated over
the row, else several. Values are float32 in registers and rounded when they are stored. A value that two loops read is
loaded twice, from the cache: rows are a few kilobytes.

The source depends on the graph only: the same graph gives the same bytes anywhere.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from lockstep.errors import CheckError
from lockstep.onnx_tools.rewriter import Rewriter, attributes_of, with_types

# The start of kernels for `cuda.Launch.overlaps`: a kernel may be scheduled while the previous one runs, so it must not
# touch what that one writes or reads before `wait_for_previous`.
COMMON = r"""
#ifndef ON_HOST  // where the test has its own
__device__ __forceinline__ float number(unsigned short half) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(half));
    return r;
}
__device__ __forceinline__ unsigned short half(float value) {
    unsigned short r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(value));
    return r;
}
__device__ __forceinline__ void next_may_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}
#endif
"""
PRELUDE = (
    COMMON
    + r"""
#ifndef ON_HOST  // where the test has its own
// The pieces of a row, or of a part of it, that a thread has.
#define EACH(v, count) for (int v = chunk * THREADS + threadIdx.x; v < count; v += BLOCKS * THREADS)
#define EACH_GROUP(group, count) for (int group = threadIdx.x / 32; group < count; group += THREADS / 32)
#define EACH_OF_GROUP(v, count) for (int v = threadIdx.x % 32; v < count; v += 32)
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
    return value;
}
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, mask));
    return value;
}
template <int WARPS> __device__ __forceinline__ float block_sum(float value) {
    __shared__ float sums[WARPS];
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) total += sums[warp];
    __syncthreads();
    return total;
}
#endif
struct alignas(16) Eight { unsigned short v[8]; };

__device__ __forceinline__ void load8(const unsigned short* __restrict__ from, float* to) {
    Eight held = *(const Eight*)from;
#pragma unroll
    for (int j = 0; j < 8; j++) to[j] = number(held.v[j]);
}
__device__ __forceinline__ void store8(unsigned short* to, const float* from) {
    Eight held;
#pragma unroll
    for (int j = 0; j < 8; j++) held.v[j] = half(from[j]);
    *(Eight*)to = held;
}
__device__ __forceinline__ long long integer(const void* values, int wide, long long i) {
    return wide ? ((const long long*)values)[i] : ((const int*)values)[i];
}
"""
)
E4M3 = Path(__file__).with_name("e4m3.cu").read_text(encoding="utf-8")  # for kernels with quantized outputs
# Kinds of arguments: see `RowKernel`.
ROWS = "rows"
INDEX = "index"
CHOICES = "choices"
WEIGHT = "weight"
INTEGERS = "integers"
SCALES = "scales"
OF_WEIGHTS = (WEIGHT, INTEGERS, SCALES)
SCALES_TIMES = 256.0  # kernels expect scales of quantized weights times this, to keep them out of fp16's subnormals
_WIDE = 8  # fp16 elements in 16 bytes
_THREADS = 256
_MAX_THREADS = 1024
_WAIT = "wait_for_previous();"
_MAX_TERMS = 32  # of a sum that is unrolled: over the taps of a short convolution, or over a token's experts
_BINARY = {"Add": "{} + {}", "Sub": "{} - {}", "Mul": "{} * {}", "Div": "{} / {}"}
_BINARY |= {"Min": "({1} < {0} ? {1} : {0})", "Max": "({1} > {0} ? {1} : {0})"}  # NaN stays NaN
_UNARY = {
    "Identity": "{0}",
    "Neg": "-{0}",
    "Sqrt": "sqrtf({0})",
    "Reciprocal": "1.0f / {0}",
    "Exp": "expf({0})",
    "Tanh": "tanhf({0})",
    "Sigmoid": "1.0f / (1.0f + expf(-{0}))",
    "Erf": "erff({0})",
    "Relu": "({0} < 0.0f ? 0.0f : {0})",  # NaN stays NaN
    "Abs": "fabsf({0})",
    "Atanh": "atanhf({0})",
}
_GELU = {
    b"none": "0.5f * {0} * (1.0f + erff({0} * 0.707106781f))",
    b"tanh": "0.5f * {0} * (1.0f + tanhf(0.797884561f * ({0} + 0.044715f * {0} * {0} * {0})))",
}
_POWERS = {1.0: "{0}", 2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", 0.5: "sqrtf({0})", -0.5: "1.0f / sqrtf({0})"}
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)
_SHAPING = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")
_SUPPORTED = {*_BINARY, *_UNARY, *_SHAPING, "Gelu", "Pow", "Cast", "Constant", "Gather", "Split", "Slice"}
_SUPPORTED |= {"ReduceMean", "ReduceSum", "LayerNormalization", "GatherBlockQuantized", "Concat", "Expand", "Shape"}
_SUPPORTED |= {"Clip", "Transpose", "GatherND"}
_GATHERS = ("Gather", "GatherBlockQuantized")


@dataclass(frozen=True)
class RowKernel:
    """A kernel of a piece, as CUDA C++, and its arguments.

    Attributes:
        arguments: (name, kind) of each input, in order. By kind the kernel takes
            ROWS: an fp16 array [rows, ...], and the elements from one row to the next;
            INDEX: integers [rows], and whether they are 64 bits wide;
            CHOICES: int32 [rows, ...], and the elements from one row to the next;
            WEIGHT: an fp16 array;
            INTEGERS, SCALES: those of a quantized weight, as GEMMs read them.
        outputs: Names of the outputs, which follow as ROWS, or as CHOICES if they are integers.
        rows: The name of the dimension that is the number of rows.
        blocks: Thread blocks for each row.
        quantized: Outputs that the kernel also quantizes to e4m3. Codes uint8 [rows, ...] and steps float32 [rows] of
            each are the last arguments (e4m3.cu).
    """

    name: str
    source: str
    arguments: tuple[tuple[str, str], ...]
    outputs: tuple[str, ...]
    rows: str
    blocks: int
    threads: int
    quantized: tuple[str, ...] = ()

    def summing(self, name: str, width: int) -> str | None:
        """Return the source of a kernel that first all-reduces an argument of rows (sums.cu); width: of its rows.

        Returns None if a block reads other rows than its own, or several blocks read one row.
        """
        number = [argument for argument, _ in self.arguments].index(name)
        uses = re.findall(rf"\bin{number}\b", self.source)
        row = f"in{number} + row * step{number}"
        # All uses must be the declaration and reads of the block's own row.
        if self.blocks > 1 or width % _WIDE or len(uses) != 1 + self.source.count(f"{row} + "):
            return None
        parameters = ", const void* peers, void* state, void* lost, int rank, int slot, int seconds"
        source = self.source.replace(") {", f"{parameters}) {{", 1)
        row_sum = f"RowSum<{width // _WIDE}, THREADS> sum({{peers, state, lost, rank, slot, seconds}}, {row}, row);"
        return source.replace(_WAIT, f"{_WAIT}\n    {row_sum}\n    in{number} = sum.numbers, step{number} = 0;", 1)


class _Unsupported(Exception):
    """The piece computes something that has no kernel."""


def _reject_if(is_unsupported: object) -> None:
    if is_unsupported:
        raise _Unsupported


def row_kernel(piece: onnx.ModelProto, name: str, quantized: Collection[str] = ()) -> RowKernel:
    """Return the kernel of a piece with fp16 inputs and outputs; quantized: outputs to quantize to e4m3 as well.

    Raises CheckError for unsupported operators.
    """
    for wide in (_WIDE, 1):
        with contextlib.suppress(_Unsupported):
            return _Writer(piece, name, wide).written(quantized)
    operators = sorted({node.op_type for node in piece.graph.node})
    unsupported = [operator for operator in operators if operator not in _SUPPORTED]
    if unsupported:
        actual = ", ".join(unsupported)
    else:
        actual = f"one of {', '.join(operators)} in a form that has none"
    raise CheckError(f"graph {piece.graph.name}: expected operators that have a CUDA kernel, found {actual}")


def constant_of(number: float) -> str:
    """Return a float32 number as CUDA C++."""
    if math.isinf(number):
        return "__int_as_float(0xff800000)" if number < 0 else "__int_as_float(0x7f800000)"
    return f"{np.float32(number):.9e}f"


def elementwise(node: onnx.NodeProto, constants: Mapping[str, np.ndarray]) -> str | None:
    """Return an elementwise operator as a C++ expression of operands `{0}`, `{1}`, ...; None for other operators."""
    if node.op_type in _BINARY and len(node.input) == 2:
        return _BINARY[node.op_type]
    if node.op_type in _UNARY:
        return _UNARY[node.op_type]
    if node.op_type == "Clip":
        return _clipped(node, constants)
    if node.op_type == "Gelu":
        return _GELU[next((helper.get_attribute_value(attribute) for attribute in node.attribute), b"none")]
    if node.op_type == "Pow" and node.input[1] in constants and constants[node.input[1]].size == 1:
        power = float(constants[node.input[1]].reshape(-1)[0])
        return _POWERS.get(power, "powf({0}, {1})")
    return None


def _clipped(node: onnx.NodeProto, constants: Mapping[str, np.ndarray]) -> str:
    """Return the expression of a Clip by constants; NaN stays NaN."""
    expression = "{0}"
    for name, sign in zip(node.input[1:], "<>"):
        if name and not np.isinf(constants[name]).all():
            bound = constant_of(float(constants[name].reshape(-1)[0]))
            expression = f"({{0}} {sign} {bound} ? {bound} : {expression})"
    return expression


@dataclass(frozen=True)
class _Index:
    """An index into a row: the C++ expression `base`; unit: of a vector of elements that starts there."""

    base: str
    unit: bool

    def plus(self, offset: int) -> _Index:
        return self if not offset else _Index(f"{self.base} + {offset}", self.unit)


@dataclass(frozen=True)
class _Value:
    """The shape of a value of the graph; rows: [number of rows, *sizes], else `sizes`."""

    rows: bool
    sizes: tuple[int, ...]

    @property
    def width(self) -> int:
        return math.prod(self.sizes)


class _Writer:
    """Writes the kernel of a piece.

    An element of an output is written as an expression of its operands' elements, recursively, down to inputs.
    wide: elements that a thread computes at once, `_WIDE` or 1.
    """

    def __init__(self, model: onnx.ModelProto, name: str, wide: int):
        piece = _plain_norms(model)
        self._graph = piece.graph
        self._name = name
        self._wide = wide
        graph = with_types(piece).graph
        self._declared = {value.name: value for value in (*graph.input, *graph.value_info, *graph.output)}
        self._inputs = {value.name for value in self._graph.input}
        self._maker = {out: node for node in self._graph.node for out in node.output}
        self._constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in self._graph.initializer}
        for node in self._graph.node:
            if node.op_type == "Constant":
                self._constants[node.output[0]] = numpy_helper.to_array(helper.get_attribute_value(node.attribute[0]))
        self._index = {node.input[1] for node in self._graph.node if node.op_type in _GATHERS} & self._inputs
        embeddings = [node for node in self._graph.node if node.op_type == "GatherBlockQuantized"]
        self._integers = {node.input[0] for node in embeddings}
        self._scales = {self._source(node.input[2]) for node in embeddings}
        self._values: dict[str, _Value] = {}
        self._parts: dict[str, int] = {}  # by value that a reshape cut into parts of rows: the parts of a row
        self._arguments: dict[str, None] = {}  # in order of first use
        self._sums: dict[str, str] = {}  # by reduced value: the expression of an element, with `{}` for its index
        self._shared: list[str] = []
        self._lines: list[str] = []
        self._memo: dict[tuple[str, _Index, str], tuple[str, bool]] = {}  # results of `_number` in the current loop
        self._count = 0

    def written(self, quantized: Collection[str]) -> RowKernel:
        outputs = [value.name for value in self._graph.output]
        codes = tuple(name for name in outputs if name in quantized)
        widths = {name: self._value(name).width for name in outputs}
        row_dims = {self._dims(name)[0] for name in outputs}
        _reject_if(len(row_dims) != 1 or not all(widths.values()))
        _reject_if(not all(self._value(name).rows for name in outputs))
        _reject_if(any(self._element(name) != TensorProto.FLOAT16 for name in outputs))
        reductions = [node for node in self._graph.node if node.op_type in ("ReduceMean", "ReduceSum")]
        sums = [node for node in reductions if not self._is_short(node)]
        widest = max([*widths.values(), *(self._value(node.input[0]).width for node in sums)])
        _reject_if(any(width % self._wide for width in widths.values()))
        vectors = -(-widest // self._wide)
        if sums or codes:
            blocks = 1
            threads = min(_MAX_THREADS, -(-vectors // 32) * 32)
        else:
            threads = min(_THREADS, -(-vectors // 32) * 32)
            blocks = -(-vectors // threads)
        for node in sums:
            self._sum(node)
        for width in dict.fromkeys(widths.values()):
            names = [name for name in outputs if widths[name] == width]
            self._loop(width, functools.partial(self._store, names))
        for name in codes:
            self._quantize(outputs.index(name), widths[name])
        head = [f"constexpr int THREADS = {threads}, BLOCKS = {blocks};"]
        head += ["long long row = blockIdx.x / BLOCKS;", "int chunk = blockIdx.x % BLOCKS;"]
        head += ["next_may_start();", _WAIT]
        arguments = tuple((name, self._kind(name)) for name in self._arguments)
        body = "\n".join("    " + line for line in [*head, *self._shared, *self._lines])
        signature = f"{self._name}({self._parameters(outputs, codes)})"
        source = f'extern "C" __global__ void __launch_bounds__({threads}) {signature} {{\n{body}\n}}\n'
        (rows,) = row_dims
        return RowKernel(self._name, source, arguments, tuple(outputs), str(rows), blocks, threads, codes)

    # Shapes and types of values.

    def _dims(self, name: str) -> list[int | str]:
        value = self._declared.get(name)
        if value is None or not value.type.tensor_type.HasField("shape"):
            raise _Unsupported
        return [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim]

    def _element(self, name: str) -> int:
        return self._declared[name].type.tensor_type.elem_type if name in self._declared else TensorProto.UNDEFINED

    def _value(self, name: str) -> _Value:
        if name not in self._values:
            self._values[name] = self._infer(name)
        return self._values[name]

    def _infer(self, name: str) -> _Value:
        if name in self._constants:
            return _Value(False, self._constants[name].shape)
        dims = self._dims(name)
        if name in self._inputs:
            rows = not all(isinstance(size, int) for size in dims)
        else:
            rows = self._is_rows(name, dims)
        sizes = dims[1:] if rows else dims
        _reject_if(rows and isinstance(dims[0], int))  # a single row for all tokens
        numbers = tuple(size for size in sizes if isinstance(size, int))
        _reject_if(len(numbers) != len(sizes) or 0 in numbers)
        parts = self._parts_of(name, numbers) if rows and name not in self._inputs else 1
        if parts > 1:
            self._parts[name] = parts
            return _Value(rows, (parts, *numbers))
        return _Value(rows, numbers)

    def _is_rows(self, name: str, dims: Sequence[int | str]) -> bool:
        """Return whether a computed value has a row for each token: because an operand has, or by its shape."""
        node = self._maker[name]
        operands = [operand for operand in node.input if operand and self._is_number(operand)]
        if node.op_type in _SHAPING:
            operands.append(node.input[0])
        elif node.op_type == "GatherND":
            operands += node.input[1:]
        if any(self._value(operand).rows for operand in operands):
            return True
        if node.op_type in _GATHERS and node.input[1] in self._index:
            return True
        return node.op_type == "Expand" and not isinstance(dims[0], int)

    def _parts_of(self, name: str, sizes: tuple[int, ...]) -> int:
        """Return into how many parts a reshape cut each row, such as into heads, whose norms are computed apart."""
        node = self._maker[name]
        if node.op_type in _SHAPING:
            source = self._value(node.input[0])
            return source.width // math.prod(sizes) if source.rows else 1
        return max(self._parts.get(operand, 1) for operand in node.input)

    def _is_number(self, name: str) -> bool:
        return name in self._constants or self._element(name) in _FLOATS

    def _kind(self, name: str) -> str:
        if name in self._index:
            return INDEX
        if name in self._inputs and self._element(name) == TensorProto.INT64:
            return CHOICES
        if name in self._integers:
            return INTEGERS
        if name in self._scales:
            return SCALES
        return ROWS if self._value(name).rows else WEIGHT

    def _parameters(self, outputs: Sequence[str], codes: Sequence[str]) -> str:
        texts = []
        for number, name in enumerate(self._arguments):
            half = f"const unsigned short* __restrict__ in{number}"
            kinds = {
                ROWS: f"{half}, int step{number}",
                WEIGHT: half,
                SCALES: half,
                INTEGERS: f"const unsigned char* __restrict__ in{number}",
                INDEX: f"const void* in{number}, int step{number}",
                CHOICES: f"const int* __restrict__ in{number}, int step{number}",
            }
            texts.append(kinds[self._kind(name)])
        texts += [f"unsigned short* __restrict__ out{n}, int out_step{n}" for n, _ in enumerate(outputs)]
        numbers = [outputs.index(name) for name in codes]
        texts += [f"unsigned char* __restrict__ codes{n}, float* __restrict__ step_of_row{n}" for n in numbers]
        return ", ".join(texts)

    def _argument(self, name: str) -> int:
        """Return the number of an argument, which is added at its first use."""
        self._arguments.setdefault(name)
        return list(self._arguments).index(name)

    # Statements.

    def _new(self) -> str:
        """Return the name of a new C++ variable."""
        self._count += 1
        return f"t{self._count}"

    def _loop(self, width: int, body: Callable[[_Index], None]) -> None:
        """Write a loop of all threads over a row's elements."""
        self._memo = {}
        vectors = width // self._wide
        self._lines.append(f"EACH(v, {vectors}) {{")
        body(_Index(f"v * {self._wide}" if self._wide > 1 else "v", self._wide > 1))
        self._lines.append("}")
        self._memo = {}

    def _quantize(self, number: int, width: int) -> None:
        """Write the quantization of a stored output to e4m3."""
        vectors = width // 8
        largest = self._new()
        step = self._new()
        halves = f"(const Halves*)(out{number} + row * out_step{number})"
        self._lines += [
            "__syncthreads();",
            f"u32 {largest} = 0;",
            f"EACH(v, {vectors}) {largest} = largest_of(({halves})[v], {largest});",
            f"float {step} = step_of(block_max<THREADS / 32>({largest}));",
            f"if (threadIdx.x == 0) step_of_row{number}[row] = {step};",
            f"EACH(v, {vectors}) ((Codes*)(codes{number} + row * {width}))[v] = encoded(({halves})[v], {step});",
        ]

    def _store(self, names: Sequence[str], index: _Index) -> None:
        outputs = [value.name for value in self._graph.output]
        for name in names:
            number = outputs.index(name)
            text, vector = self._number(name, index, "row")
            at = f"out{number} + row * out_step{number} + {index.base}"
            if self._wide == 1:
                self._lines.append(f"*({at}) = half({text});")
                continue
            if not vector:
                text = self._vector("{0}", [(text, False)])
            self._lines.append(f"store8({at}, {text});")

    def _combine(self, form: str, operands: Sequence[tuple[str, bool]]) -> tuple[str, bool]:
        """Write the expression `form` of operands; return as `_number` does, a vector if an operand is one."""
        if any(vector for _, vector in operands):
            return self._vector(form, operands), True
        variable = self._new()
        self._lines.append(f"float {variable} = {form.format(*(text for text, _ in operands))};")
        return variable, False

    def _vector(self, form: str, operands: Sequence[tuple[str, bool]]) -> str:
        """Write a vector of the expression `form` of operands; return its variable."""
        variable = self._new()
        texts = [f"{text}[j]" if vector else text for text, vector in operands]
        self._lines += [
            f"float {variable}[{self._wide}];",
            "#pragma unroll",
            f"for (int j = 0; j < {self._wide}; j++) {variable}[j] = {form.format(*texts)};",
        ]
        return variable

    def _number(self, name: str, index: _Index, row: str) -> tuple[str, bool]:
        """Return the expression of a value at `index` of `row`, and whether it is a vector, whose elements are [j]."""
        key = (name, index, row)
        if key not in self._memo:
            self._memo[key] = self._written(name, index, row)
        return self._memo[key]

    def _written(self, name: str, index: _Index, row: str) -> tuple[str, bool]:
        if name in self._constants:
            return self._constant(name), False
        if name in self._inputs:
            return self._load(name, index, row)
        node = self._maker[name]
        value = self._value(name)
        if name in self._sums:
            _reject_if(row != "row" or index.unit)
            return self._sums[name].format(index.base), False
        if node.op_type == "Gather":
            return self._gathered(node, index, row)
        if node.op_type == "GatherBlockQuantized":
            return self._dequantized(node, index, row), index.unit
        if node.op_type == "GatherND":
            return self._of_expert(node, value, index, row)
        if node.op_type in ("Split", "Slice"):
            return self._number(node.input[0], self._part(node, name, index), row)
        if node.op_type in ("ReduceMean", "ReduceSum"):
            return self._short_sum(node, index, row)
        if node.op_type == "Transpose":
            return self._transposed(node, index, row)
        if node.op_type == "Concat":
            return self._joined(node, value, index, row)
        if node.op_type == "Expand":
            return self._number(node.input[0], self._broadcast(node.input[0], value, index), row)
        if node.op_type in _SHAPING:
            source = self._value(node.input[0])
            _reject_if(source.rows != value.rows or source.width != value.width)
            return self._number(node.input[0], index, row)
        if node.op_type == "Cast":
            _reject_if(self._element(name) not in _FLOATS or not self._is_number(node.input[0]))
            return self._number(node.input[0], index, row)
        names = node.input[:1] if node.op_type == "Clip" else node.input
        operands = [self._number(operand, self._broadcast(operand, value, index), row) for operand in names]
        form = elementwise(node, self._constants)
        if form is None:
            raise _Unsupported
        return self._combine(form, operands)

    def _constant(self, name: str) -> str:
        values = self._constants[name]
        _reject_if(values.size != 1 or values.dtype.kind != "f")
        number = float(values.reshape(-1)[0])
        _reject_if(not math.isfinite(number))
        return constant_of(number)

    def _load(self, name: str, index: _Index, row: str) -> tuple[str, bool]:
        _reject_if(self._element(name) != TensorProto.FLOAT16)
        number = self._argument(name)
        variable = self._new()
        offset = f"{row} * step{number} + {index.base}" if self._value(name).rows else index.base
        at = f"in{number} + {offset}"
        if index.unit:
            self._lines += [f"float {variable}[{self._wide}];", f"load8({at}, {variable});"]
        else:
            self._lines.append(f"float {variable} = number(*({at}));")
        return variable, index.unit

    def _gathered(self, node: onnx.NodeProto, index: _Index, row: str) -> tuple[str, bool]:
        """Read rows of a value, or of a weight, by an input of row numbers."""
        _reject_if(attributes_of(node).get("axis", 0) or row != "row")
        source, ids = node.input
        at = self._id(ids)
        if self._value(source).rows:
            return self._number(source, index, at)
        source = self._uncast(source)
        _reject_if(source not in self._inputs)
        width = math.prod(self._value(source).sizes[1:])
        _reject_if(index.unit and width % self._wide)
        return self._load(source, _Index(f"{at} * {width} + {index.base}", index.unit), row)

    def _uncast(self, name: str) -> str:
        """Return the source of a value's casts, which need no code: all values are read as float32."""
        while name in self._maker and self._maker[name].op_type == "Cast":
            name = self._maker[name].input[0]
        return name

    def _of_expert(self, node: onnx.NodeProto, value: _Value, index: _Index, row: str) -> tuple[str, bool]:
        """Read the weights [experts, ...] of a token's experts."""
        weight = self._uncast(node.input[0])
        ids = node.input[1]
        while ids in self._maker and self._maker[ids].op_type in _SHAPING:
            ids = self._maker[ids].input[0]
        inner = math.prod(self._value(weight).sizes[1:])
        _reject_if(ids not in self._inputs or weight not in self._inputs or (index.unit and inner % self._wide))
        _reject_if(attributes_of(node).get("batch_dims", 0) or value.width != self._value(ids).width * inner)
        number = self._argument(ids)
        expert = self._new()
        self._lines.append(f"int {expert} = in{number}[{row} * step{number} + ({index.base}) / {inner}];")
        return self._load(weight, _Index(f"{expert} * {inner} + ({index.base}) % {inner}", index.unit), row)

    def _joined(self, node: onnx.NodeProto, value: _Value, index: _Index, row: str) -> tuple[str, bool]:
        """Read a Concat: read each operand at a valid index, and select the one that has the element."""
        axis = self._axis_of_row(attributes_of(node)["axis"], node.output[0])
        at = self._new()
        inner = math.prod(value.sizes[axis + 1 :])
        full = value.sizes[axis] * inner
        first = 0
        self._lines.append(f"int {at} = ({index.base}) % {full};")
        ends = list[int]()
        operands = list[tuple[str, bool]]()
        for name in node.input:
            size = self._value(name).sizes[axis] * inner
            _reject_if(not self._value(name).rows or (index.unit and (first % self._wide or size % self._wide)))
            end = first + size
            last_valid = size - (self._wide if index.unit else 1)
            clamped = f"{at} < {first} ? 0 : {at} < {end} ? {at} - {first} : {last_valid}"
            part_index = self._new()
            self._lines.append(f"int {part_index} = ({index.base}) / {full} * {size} + ({clamped});")
            operands.append(self._number(name, _Index(part_index, index.unit), row))
            ends.append(end)
            first = end
        form = f"{{{len(ends) - 1}}}"
        for number in reversed(range(len(ends) - 1)):
            form = f"{at} < {ends[number]} ? {{{number}}} : {form}"
        return self._combine(form, operands)

    def _id(self, ids: str) -> str:
        """Read the row's element of an input of integers; return its variable."""
        _reject_if(ids not in self._index or len(self._dims(ids)) != 1)
        key = (ids, _Index("", False), "row")
        if key not in self._memo:
            number = self._argument(ids)
            variable = self._new()
            self._lines.append(f"long long {variable} = integer(in{number}, step{number}, row);")
            self._memo[key] = variable, False
        return self._memo[key][0]

    def _dequantized(self, node: onnx.NodeProto, index: _Index, row: str) -> str:
        """Read a row of a quantized weight; return the variable of its elements at `index`."""
        sizes = attributes_of(node)
        data, ids, scales = node.input
        _reject_if(data not in self._inputs or row != "row")
        at = self._id(ids)
        width = self._value(node.output[0]).width
        integers = self._argument(data)
        factors = self._argument(self._source(scales))
        element = self._new()
        scale = self._new()
        numbers = self._new()
        if sizes["bits"] == 8:
            number = f"in{integers}[{element} + j]"
        else:
            number = f"(in{integers}[({element} + j) / 2] >> ({element} + j) % 2 * 4 & 15)"
        count = self._wide if index.unit else 1  # within one group: group sizes are multiples of it
        self._lines += [
            f"long long {element} = {at} * {width} + {index.base};",
            f"float {scale} = number(in{factors}[{element} / {sizes['block_size']}]) * {1 / SCALES_TIMES}f;",
            f"float {numbers}[{count}];",
            "#pragma unroll",
            f"for (int j = 0; j < {count}; j++) {numbers}[j] = ({number} - {1 << sizes['bits'] - 1}) * {scale};",
        ]
        return numbers if index.unit else f"{numbers}[0]"

    def _source(self, name: str) -> str:
        """Return the source of a weight's casts and reshapes."""
        while name in self._maker and self._maker[name].op_type in ("Cast", *_SHAPING):
            name = self._maker[name].input[0]
        return name

    def _part(self, node: onnx.NodeProto, name: str, index: _Index) -> _Index:
        """Return the index in the input of a Split or Slice of an element of its output."""
        source = self._value(node.input[0])
        value = self._value(name)
        attributes = attributes_of(node)
        _reject_if(not source.rows)
        if node.op_type == "Split":
            axis = self._axis_of_row(attributes.get("axis", 0), node.input[0])
            sizes = [self._value(out).sizes[axis] for out in node.output]
            first = sum(sizes[: list(node.output).index(name)])
        else:
            starts, _, axes, *steps = (self._constants[constant].tolist() for constant in node.input[1:])
            _reject_if(len(axes) != 1)
            axis = self._axis_of_row(axes[0], node.input[0])
            first = starts[0] if starts[0] >= 0 else starts[0] + source.sizes[axis]
            if steps and steps[0] != [1]:
                _reject_if(index.unit or axis != len(source.sizes) - 1 or steps[0][0] < 1)
                part = value.sizes[axis]
                full = source.sizes[axis]
                strided = f"({index.base}) / {part} * {full} + {first} + ({index.base}) % {part} * {steps[0][0]}"
                return _Index(strided, False)
        inner = math.prod(source.sizes[axis + 1 :])
        full = source.sizes[axis] * inner
        part = value.sizes[axis] * inner
        offset = first * inner
        _reject_if(index.unit and (offset % self._wide or full % self._wide or part % self._wide))
        if math.prod(source.sizes[:axis]) == 1:
            return index.plus(offset)
        return _Index(f"({index.base}) / {part} * {full} + {offset} + ({index.base}) % {part}", index.unit)

    def _broadcast(self, name: str, value: _Value, index: _Index) -> _Index:
        """Return the index in an operand that is broadcast to `index` of a value."""
        operand = self._value(name)
        sizes = operand.sizes
        if not operand.rows and value.rows and len(sizes) > len(value.sizes):
            _reject_if(sizes[0] != 1)
            sizes = sizes[1:]
        if math.prod(sizes) == 1:
            return _Index("0", False)
        sizes = (1,) * (len(value.sizes) - len(sizes)) + sizes
        _reject_if(operand.rows and not value.rows or len(sizes) != len(value.sizes))
        _reject_if(operand.rows and len(operand.sizes) != len(value.sizes))  # another axis would be that of rows
        if sizes == value.sizes:
            return index
        for cut in range(len(sizes)):
            inner = math.prod(value.sizes[cut:])
            if math.prod(sizes[:cut]) == 1 and sizes[cut:] == value.sizes[cut:]:
                _reject_if(index.unit and inner % self._wide)
                return _Index(f"({index.base}) % {inner}", index.unit)
            if sizes[:cut] == value.sizes[:cut] and math.prod(sizes[cut:]) == 1:
                _reject_if(index.unit and inner % self._wide)
                return _Index(f"({index.base}) / {inner}", False)
        raise _Unsupported

    def _axes(self, node: onnx.NodeProto) -> list[int]:
        """Return the indices in a row's sizes that a node accumulates over."""
        source = self._value(node.input[0])
        attributes = attributes_of(node)
        axes = attributes.get("axes") or []
        if not axes and len(node.input) > 1:
            axes = self._constants[node.input[1]].tolist()
        _reject_if(not source.rows or not axes or (node.input[0] in self._parts and max(axes) >= 0))
        return sorted(axis + len(source.sizes) if axis < 0 else axis - 1 for axis in axes)

    def _axis_of_row(self, axis: int, name: str) -> int:
        """Return the index in a row's sizes of an axis of a value; the axis of rows has no kernel."""
        index = axis + len(self._value(name).sizes)
        if axis >= 0:
            index -= len(self._dims(name))
        _reject_if(axis == 0 or index < 0)
        return index

    def _is_short(self, node: onnx.NodeProto) -> bool:
        """Return whether a node accumulates over an axis that isn't the last: the taps of a short convolution."""
        axes = self._axes(node)
        rank = len(self._value(node.input[0]).sizes)
        return len(axes) == 1 and 0 <= axes[0] < rank - 1

    def _short_sum(self, node: onnx.NodeProto, index: _Index, row: str) -> tuple[str, bool]:
        """Write a short sum as an expression of all its terms."""
        source = self._value(node.input[0])
        (axis,) = self._axes(node)
        size = source.sizes[axis]
        inner = math.prod(source.sizes[axis + 1 :])
        _reject_if(size > _MAX_TERMS or (index.unit and inner % self._wide))
        at = self._new()
        self._lines.append(f"int {at} = ({index.base}) / {inner} * {size * inner} + ({index.base}) % {inner};")
        terms = [self._number(node.input[0], _Index(f"{at} + {tap * inner}", index.unit), row) for tap in range(size)]
        form = " + ".join(f"{{{tap}}}" for tap in range(size))
        if node.op_type == "ReduceMean":
            form = f"({form}) / {size}.0f"
        return self._combine(form, terms)

    def _transposed(self, node: onnx.NodeProto, index: _Index, row: str) -> tuple[str, bool]:
        """Read a transposed weight."""
        source = self._value(node.input[0])
        _reject_if(source.rows or index.unit or attributes_of(node)["perm"] != [1, 0])
        rows, columns = source.sizes
        transposed = f"({index.base}) % {rows} * {columns} + ({index.base}) / {rows}"
        return self._number(node.input[0], _Index(transposed, False), row)

    def _sum(self, node: onnx.NodeProto) -> None:
        """Write a reduction over the last axes: of a whole row by all threads, of each part of a row by a warp."""
        source = self._value(node.input[0])
        (name,) = node.output
        axes = self._axes(node)
        _reject_if(axes != list(range(axes[0], len(source.sizes))) or axes[0] < 0)
        groups = math.prod(source.sizes[: axes[0]])
        size = math.prod(source.sizes[axes[0] :])
        _reject_if(size % self._wide)
        result = self._new()
        total = self._new()
        scale = f" * {np.float32(1 / size):.9e}f" if node.op_type == "ReduceMean" else ""
        self._memo = {}

        def add(index: _Index) -> None:
            text, vector = self._number(node.input[0], index, "row")
            if vector:
                self._lines += ["#pragma unroll", f"for (int j = 0; j < {self._wide}; j++) {total} += {text}[j];"]
            elif self._wide == 1:
                self._lines.append(f"{total} += {text};")
            else:  # the same value for all elements of the vector
                self._lines.append(f"{total} += {self._wide} * {text};")

        if groups == 1:
            self._lines.append(f"float {total} = 0;")
            self._loop(size, add)
            self._lines.append(f"float {result} = block_sum<THREADS / 32>({total}){scale};")
            self._sums[name] = result
            return
        self._shared.append(f"__shared__ float {result}[{groups}];")
        vectors = size // self._wide
        unit = self._wide > 1
        self._lines += [f"EACH_GROUP(group, {groups}) {{", f"float {total} = 0;", f"EACH_OF_GROUP(v, {vectors}) {{"]
        add(_Index(f"group * {size} + v * {self._wide}", unit))
        self._lines += [
            "}",
            f"{total} = warp_sum({total}){scale};",
            f"if (threadIdx.x % 32 == 0) {result}[group] = {total};",
            "}",
            "__syncthreads();",
        ]
        self._memo = {}
        self._sums[name] = result + "[{}]"


def _plain_norms(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with each LayerNormalization over the last axis decomposed into operators."""
    graph = Rewriter(model)
    norms = [node for node in graph.nodes if node.op_type == "LayerNormalization"]
    if not norms:
        return model
    for node in norms:
        attributes = attributes_of(node)
        out, *statistics = node.output
        if attributes.get("axis", -1) != -1 or statistics:
            continue
        axes = graph.constant(f"{out}/axes", np.array([-1], np.int64))
        # float32 in a float16 graph, because epsilon may be too small for fp16: so `finish` must not check types.
        epsilon = graph.constant(f"{out}/epsilon", np.array(attributes.get("epsilon", 1e-5), np.float32))
        x, gain, *bias = node.input
        mean = f"{out}/mean"
        centered = f"{out}/off"
        square = f"{out}/square"
        variance = f"{out}/variance"
        shifted = f"{out}/shifted"
        root = f"{out}/root"
        scaled = f"{out}/scaled"
        weighted = f"{out}/weighted" if bias else out
        steps = [
            ("ReduceMean", [x, axes], mean),
            ("Sub", [x, mean], centered),
            ("Mul", [centered, centered], square),
            ("ReduceMean", [square, axes], variance),
            ("Add", [variance, epsilon], shifted),
            ("Sqrt", [shifted], root),
            ("Div", [centered, root], scaled),
            ("Mul", [scaled, gain], weighted),
        ]
        if bias:
            steps.append(("Add", [weighted, *bias], out))
        graph.replace(node, *(helper.make_node(operator, inputs, [name]) for operator, inputs, name in steps))
    return graph.finish(check=False)
