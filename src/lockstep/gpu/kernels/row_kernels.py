"""CUDA kernels of what stands between products: sums, activation functions, norms.

In: a piece of a graph that was cut at its products (`onnx_tools.cut_products`), whose values are rows, one of each
token or request. Out: CUDA C++ of one kernel that computes the piece: a row in a block of threads where something is
accumulated over the row, else in several. Values are float32 inside, and rounded where they are stored. Each value that
is read twice is read twice from the cache: rows are a few kilobytes.

The text depends on the graph alone: no library chooses, and the same graph gives the same bytes anywhere.
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

# What kernels begin with that are launched with `cuda.Launch.overlaps`: the next one may be brought onto the device
# while this one runs, and what the one before has written, or still reads, is touched behind `wait_for_previous` alone.
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
E4M3 = Path(__file__).with_name("e4m3.cu").read_text(encoding="utf-8")  # of kernels with outputs that are quantised
# Kinds of arguments.
ROWS = "rows"
INDEX = "index"
CHOICES = "choices"
WEIGHT = "weight"
INTEGERS = "integers"
SCALES = "scales"
OF_WEIGHTS = (WEIGHT, INTEGERS, SCALES)
SCALES_TIMES = 256.0  # what kernels expect scales of quantised weights to be multiplied by: few are too small for fp16
_WIDE = 8  # fp16 numbers of 16 bytes
_THREADS = 256
_MOST_THREADS = 1024
_WAIT = "wait_for_previous();"
_MOST_TERMS = 32  # of a short convolution, or a token's experts
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
_KNOWN = {*_BINARY, *_UNARY, *_SHAPING, "Gelu", "Pow", "Cast", "Constant", "Gather", "Split", "Slice"}
_KNOWN |= {"ReduceMean", "ReduceSum", "LayerNormalization", "GatherBlockQuantized", "Concat", "Expand", "Shape"}
_KNOWN |= {"Clip", "Transpose", "GatherND"}
_GATHERS = ("Gather", "GatherBlockQuantized")


@dataclass(frozen=True)
class RowKernel:
    """A kernel of a piece, as CUDA C++, and its arguments.

    arguments: (name, kind) in order: of rows, an fp16 array [rows, ...] and how many numbers lie between two rows; an
    index, integers [rows] and whether they are 64 bits wide; choices, int32 [rows, ...] and numbers from row to row; a
    weight, an fp16 array; integers and scales of one that is quantised, as products read them. outputs: as rows, or
    choices where they are integers, behind them. quantized: those that are made e4m3 too: codes
    uint8 [rows, ...] and steps float32 [rows] of each, behind all (e4m3.cu).
    rows: the name of the dimension that is their number. blocks: of threads, for each row.
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
        """Return the source of one that makes the sum over the ranks of an argument of rows first: see sums.cu.

        None where it reads other rows than its own, or several blocks read one.
        """
        number = [each for each, _ in self.arguments].index(name)
        used = re.findall(rf"\bin{number}\b", self.source)
        at = f"in{number} + row * step{number}"
        if self.blocks > 1 or width % _WIDE or len(used) != 1 + self.source.count(f"{at} + "):
            return None
        more = ", const void* peers, void* state, void* lost, int rank, int slot, int seconds"
        text = self.source.replace(") {", f"{more}) {{", 1)
        summed = f"RowSum<{width // _WIDE}, THREADS> sum({{peers, state, lost, rank, slot, seconds}}, {at}, row);"
        return text.replace(_WAIT, f"{_WAIT}\n    {summed}\n    in{number} = sum.numbers, step{number} = 0;", 1)


class _HasNoKernel(Exception):
    """The piece computes what has no kernel here."""


def _refuse_if(has_no_kernel: object) -> None:
    if has_no_kernel:
        raise _HasNoKernel


def row_kernel(piece: onnx.ModelProto, name: str, quantized: Collection[str] = ()) -> RowKernel:
    """Return the kernel of a piece with fp16 inputs and outputs, which makes those of `quantized` e4m3 too.

    Raises CheckError for operators that have none.
    """
    for wide in (_WIDE, 1):
        with contextlib.suppress(_HasNoKernel):
            return _Writer(piece, name, wide).written(quantized)
    found = sorted({node.op_type for node in piece.graph.node})
    never = [each for each in found if each not in _KNOWN]
    said = ", ".join(never) if never else f"one of {', '.join(found)} in a form that has none"
    raise CheckError(f"graph {piece.graph.name}: expected operators that have a CUDA kernel, found {said}")


def constant_of(number: float) -> str:
    """Return a float32 number as CUDA C++."""
    if math.isinf(number):
        return "__int_as_float(0xff800000)" if number < 0 else "__int_as_float(0x7f800000)"
    return f"{np.float32(number):.9e}f"


def elementwise(node: onnx.NodeProto, constants: Mapping[str, np.ndarray]) -> str | None:
    """Return what an operator makes of numbers `{0}` and on, as CUDA C++; None for one that is not elementwise."""
    if node.op_type in _BINARY and len(node.input) == 2:
        return _BINARY[node.op_type]
    if node.op_type in _UNARY:
        return _UNARY[node.op_type]
    if node.op_type == "Clip":
        return _clipped(node, constants)
    if node.op_type == "Gelu":
        return _GELU[next((helper.get_attribute_value(each) for each in node.attribute), b"none")]
    if node.op_type == "Pow" and node.input[1] in constants and constants[node.input[1]].size == 1:
        power = float(constants[node.input[1]].reshape(-1)[0])
        return _POWERS.get(power, "powf({0}, {1})")
    return None


def _clipped(node: onnx.NodeProto, constants: Mapping[str, np.ndarray]) -> str:
    """Bound by constants; what is not a number stays so."""
    form = "{0}"
    for name, sign in zip(node.input[1:], "<>"):
        if name and not np.isinf(constants[name]).all():
            bound = constant_of(float(constants[name].reshape(-1)[0]))
            form = f"({{0}} {sign} {bound} ? {bound} : {form})"
    return form


@dataclass(frozen=True)
class _Index:
    """Where in a row: `base`, and with `unit` the numbers behind it."""

    base: str
    unit: bool

    def plus(self, offset: int) -> _Index:
        return self if not offset else _Index(f"{self.base} + {offset}", self.unit)


@dataclass(frozen=True)
class _Value:
    """What a name of the graph is: one of each row, of `sizes`, or, without `rows`, a value of `sizes`."""

    rows: bool
    sizes: tuple[int, ...]

    @property
    def width(self) -> int:
        return math.prod(self.sizes)


class _Writer:
    def __init__(self, given: onnx.ModelProto, name: str, wide: int):
        piece = _plain_norms(given)
        self._graph = piece.graph
        self._name = name
        self._wide = wide
        graph = with_types(piece).graph
        self._declared = {value.name: value for value in (*graph.input, *graph.value_info, *graph.output)}
        self._given = {value.name for value in self._graph.input}
        self._maker = {out: node for node in self._graph.node for out in node.output}
        self._constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in self._graph.initializer}
        for node in self._graph.node:
            if node.op_type == "Constant":
                self._constants[node.output[0]] = numpy_helper.to_array(helper.get_attribute_value(node.attribute[0]))
        self._index = {
            node.input[1] for node in self._graph.node if node.op_type in _GATHERS and node.input[1] in self._given
        }
        embeddings = [node for node in self._graph.node if node.op_type == "GatherBlockQuantized"]
        self._integers = {node.input[0] for node in embeddings}
        self._scales = {self._source(node.input[2]) for node in embeddings}
        self._values: dict[str, _Value] = {}
        self._parts: dict[str, int] = {}  # of a value whose rows are parts of rows: how many a row has
        self._used: dict[str, None] = {}
        self._sums: dict[str, str] = {}  # what is accumulated over a row, by name: how it is read
        self._shared: list[str] = []
        self._lines: list[str] = []
        self._memo: dict[tuple[str, _Index, str], tuple[str, bool]] = {}
        self._count = 0

    def written(self, quantized: Collection[str]) -> RowKernel:
        outputs = [value.name for value in self._graph.output]
        codes = tuple(name for name in outputs if name in quantized)
        found = {name: self._value(name) for name in outputs}
        rows = {self._dims(name)[0] for name in outputs}
        _refuse_if(len(rows) != 1 or not all(value.rows and value.width for value in found.values()))
        _refuse_if(any(self._element(name) != TensorProto.FLOAT16 for name in outputs))
        reduced = [node for node in self._graph.node if node.op_type in ("ReduceMean", "ReduceSum")]
        sums = [node for node in reduced if not self._is_short(node)]
        widest = max([value.width for value in found.values()] + [self._value(node.input[0]).width for node in sums])
        _refuse_if(any(value.width % self._wide for value in found.values()))
        vectors = -(-widest // self._wide)
        if sums or codes:
            blocks = 1
            threads = min(_MOST_THREADS, -(-vectors // 32) * 32)
        else:
            threads = min(_THREADS, -(-vectors // 32) * 32)
            blocks = -(-vectors // threads)
        for node in sums:
            self._sum(node)
        widths = dict.fromkeys(value.width for value in found.values())
        for width in widths:
            own = [name for name in outputs if found[name].width == width]
            self._loop(width, functools.partial(self._store, own))
        for name in codes:
            self._quantize(outputs.index(name), found[name].width)
        head = [f"constexpr int THREADS = {threads}, BLOCKS = {blocks};"]
        head += ["long long row = blockIdx.x / BLOCKS;", "int chunk = blockIdx.x % BLOCKS;"]
        head += ["next_may_start();", _WAIT]
        arguments = tuple((name, self._kind(name)) for name in self._used)
        text = "\n".join("    " + line for line in [*head, *self._shared, *self._lines])
        declared = self._declared_as(outputs, codes)
        source = f'extern "C" __global__ void __launch_bounds__({threads}) {self._name}({declared}) {{\n{text}\n}}\n'
        (dim,) = rows
        return RowKernel(self._name, source, arguments, tuple(outputs), str(dim), blocks, threads, codes)

    # What values are.

    def _dims(self, name: str) -> list[int | str]:
        value = self._declared.get(name)
        if value is None or not value.type.tensor_type.HasField("shape"):
            raise _HasNoKernel
        return [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim]

    def _element(self, name: str) -> int:
        return self._declared[name].type.tensor_type.elem_type if name in self._declared else TensorProto.UNDEFINED

    def _value(self, name: str) -> _Value:
        if name not in self._values:
            self._values[name] = self._found(name)
        return self._values[name]

    def _found(self, name: str) -> _Value:
        if name in self._constants:
            return _Value(False, self._constants[name].shape)
        dims = self._dims(name)
        if name not in self._given:
            node = self._maker[name]
            data = [name for name in node.input if name and self._is_number(name)]
            if node.op_type in _SHAPING:
                data.append(node.input[0])
            elif node.op_type == "GatherND":
                data += node.input[1:]
            rows = any(self._value(each).rows for each in data)
            rows = rows or (node.op_type in _GATHERS and node.input[1] in self._index)
            rows = rows or node.op_type == "Expand" and not isinstance(dims[0], int)
        else:
            rows = not all(isinstance(size, int) for size in dims)
        sizes = dims[1:] if rows else dims
        if rows and isinstance(dims[0], int):  # one row for all
            raise _HasNoKernel
        numbers = tuple(size for size in sizes if isinstance(size, int))
        _refuse_if(len(numbers) != len(sizes) or 0 in numbers)
        parts = self._parts_of(name, numbers) if rows and name not in self._given else 1
        if parts > 1:
            self._parts[name] = parts
        return _Value(rows, (parts, *numbers) if parts > 1 else numbers)

    def _parts_of(self, name: str, sizes: tuple[int, ...]) -> int:
        """Return the parts of a row that a value's rows are, where a reshape made them: heads, as rows of a norm."""
        node = self._maker[name]
        if node.op_type in _SHAPING:
            source = self._value(node.input[0])
            return source.width // math.prod(sizes) if source.rows else 1
        return max(self._parts.get(each, 1) for each in node.input)

    def _is_number(self, name: str) -> bool:
        return name in self._constants or self._element(name) in _FLOATS

    def _kind(self, name: str) -> str:
        if name in self._index:
            return INDEX
        if name in self._given and self._element(name) == TensorProto.INT64:
            return CHOICES
        if name in self._integers or name in self._scales:
            return INTEGERS if name in self._integers else SCALES
        return ROWS if self._value(name).rows else WEIGHT

    def _declared_as(self, outputs: Sequence[str], codes: Sequence[str]) -> str:
        texts = []
        for number, name in enumerate(self._used):
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
        self._used.setdefault(name)
        return list(self._used).index(name)

    # What is written.

    def _new(self) -> str:
        self._count += 1
        return f"t{self._count}"

    def _loop(self, width: int, body: Callable[[_Index], None]) -> None:
        """Write a loop over a row's numbers, some of each thread."""
        self._memo = {}
        vectors = width // self._wide
        self._lines.append(f"EACH(v, {vectors}) {{")
        body(_Index(f"v * {self._wide}" if self._wide > 1 else "v", self._wide > 1))
        self._lines.append("}")
        self._memo = {}

    def _quantize(self, number: int, width: int) -> None:
        """Write how an output that is stored becomes e4m3."""
        vectors = width // 8
        most = self._new()
        step = self._new()
        place = f"(const Halves*)(out{number} + row * out_step{number})"
        self._lines += [
            "__syncthreads();",
            f"u32 {most} = 0;",
            f"EACH(v, {vectors}) {most} = largest_of(({place})[v], {most});",
            f"float {step} = step_of(block_max<THREADS / 32>({most}));",
            f"if (threadIdx.x == 0) step_of_row{number}[row] = {step};",
            f"EACH(v, {vectors}) ((Codes*)(codes{number} + row * {width}))[v] = encoded(({place})[v], {step});",
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
                text = self._each("{0}", [(text, False)])
            self._lines.append(f"store8({at}, {text});")

    def _each(self, form: str, operands: Sequence[tuple[str, bool]]) -> str:
        """Write a vector of what `form` makes of operands; return its variable."""
        made = self._new()
        texts = [f"{text}[j]" if vector else text for text, vector in operands]
        self._lines += [
            f"float {made}[{self._wide}];",
            "#pragma unroll",
            f"for (int j = 0; j < {self._wide}; j++) {made}[j] = {form.format(*texts)};",
        ]
        return made

    def _number(self, name: str, index: _Index, row: str) -> tuple[str, bool]:
        """Return a variable of a value at `index` of `row`, and whether it has a number for each of a vector's."""
        key = (name, index, row)
        if key not in self._memo:
            self._memo[key] = self._written(name, index, row)
        return self._memo[key]

    def _written(self, name: str, index: _Index, row: str) -> tuple[str, bool]:
        if name in self._constants:
            return self._constant(name), False
        if name in self._given:
            return self._load(name, index, row)
        node = self._maker[name]
        value = self._value(name)
        if name in self._sums:
            _refuse_if(row != "row" or index.unit)
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
            return self._number(node.input[0], self._place(node.input[0], value, index), row)
        if node.op_type in _SHAPING:
            source = self._value(node.input[0])
            _refuse_if(source.rows != value.rows or source.width != value.width)
            return self._number(node.input[0], index, row)
        if node.op_type == "Cast":
            _refuse_if(self._element(name) not in _FLOATS or not self._is_number(node.input[0]))
            return self._number(node.input[0], index, row)
        given = node.input[:1] if node.op_type == "Clip" else node.input
        operands = [self._number(each, self._place(each, value, index), row) for each in given]
        form = self._form(node)
        if any(vector for _, vector in operands):
            return self._each(form, operands), True
        made = self._new()
        self._lines.append(f"float {made} = {form.format(*(text for text, _ in operands))};")
        return made, False

    def _form(self, node: onnx.NodeProto) -> str:
        form = elementwise(node, self._constants)
        if form is None:
            raise _HasNoKernel
        return form

    def _constant(self, name: str) -> str:
        values = self._constants[name]
        _refuse_if(values.size != 1 or values.dtype.kind != "f")
        number = float(values.reshape(-1)[0])
        _refuse_if(not math.isfinite(number))
        return constant_of(number)

    def _load(self, name: str, index: _Index, row: str) -> tuple[str, bool]:
        _refuse_if(self._element(name) != TensorProto.FLOAT16)
        number = self._argument(name)
        made = self._new()
        at = f"in{number} + {f'{row} * step{number} + ' if self._value(name).rows else ''}{index.base}"
        if index.unit:
            self._lines += [f"float {made}[{self._wide}];", f"load8({at}, {made});"]
        else:
            self._lines.append(f"float {made} = number(*({at}));")
        return made, index.unit

    def _gathered(self, node: onnx.NodeProto, index: _Index, row: str) -> tuple[str, bool]:
        """Read rows of another number of rows, or of a weight, by an input of integers."""
        _refuse_if(attributes_of(node).get("axis", 0) or row != "row")
        source, ids = node.input
        at = self._id(ids)
        if self._value(source).rows:
            return self._number(source, index, at)
        source = self._uncast(source)
        _refuse_if(source not in self._given)
        width = math.prod(self._value(source).sizes[1:])
        _refuse_if(index.unit and width % self._wide)
        return self._load(source, _Index(f"{at} * {width} + {index.base}", index.unit), row)

    def _uncast(self, name: str) -> str:
        """Return what was cast to a value: all are read as float32."""
        while name in self._maker and self._maker[name].op_type == "Cast":
            name = self._maker[name].input[0]
        return name

    def _of_expert(self, node: onnx.NodeProto, value: _Value, index: _Index, row: str) -> tuple[str, bool]:
        """Read a weight [experts, ...] of each of a token's experts."""
        weight = self._uncast(node.input[0])
        ids = node.input[1]
        while ids in self._maker and self._maker[ids].op_type in _SHAPING:
            ids = self._maker[ids].input[0]
        inner = math.prod(self._value(weight).sizes[1:])
        _refuse_if(ids not in self._given or weight not in self._given or (index.unit and inner % self._wide))
        _refuse_if(attributes_of(node).get("batch_dims", 0) or value.width != self._value(ids).width * inner)
        number = self._argument(ids)
        made = self._new()
        self._lines.append(f"int {made} = in{number}[{row} * step{number} + ({index.base}) / {inner}];")
        return self._load(weight, _Index(f"{made} * {inner} + ({index.base}) % {inner}", index.unit), row)

    def _joined(self, node: onnx.NodeProto, value: _Value, index: _Index, row: str) -> tuple[str, bool]:
        """Choose the part that a number is of: all are read, each at a place that it has."""
        axis = self._axis_of_row(attributes_of(node)["axis"], node.output[0])
        at = self._new()
        inner = math.prod(value.sizes[axis + 1 :])
        whole = value.sizes[axis] * inner
        first = 0
        self._lines.append(f"int {at} = ({index.base}) % {whole};")
        ends = list[int]()
        operands = list[tuple[str, bool]]()
        for name in node.input:
            size = self._value(name).sizes[axis] * inner
            _refuse_if(not self._value(name).rows or (index.unit and (first % self._wide or size % self._wide)))
            last = first + size
            own = self._new()
            place = f"{at} < {first} ? 0 : {at} < {last} ? {at} - {first} : {size - (self._wide if index.unit else 1)}"
            self._lines.append(f"int {own} = ({index.base}) / {whole} * {size} + ({place});")
            operands.append(self._number(name, _Index(own, index.unit), row))
            ends.append(first := last)
        form = f"{{{len(ends) - 1}}}"
        for number in reversed(range(len(ends) - 1)):
            form = f"{at} < {ends[number]} ? {{{number}}} : {form}"
        if any(vector for _, vector in operands):
            return self._each(form, operands), True
        made = self._new()
        self._lines.append(f"float {made} = {form.format(*(text for text, _ in operands))};")
        return made, False

    def _id(self, ids: str) -> str:
        """Read the row's number of an input of integers; return its variable."""
        _refuse_if(ids not in self._index or len(self._dims(ids)) != 1)
        key = (ids, _Index("", False), "row")
        if key not in self._memo:
            number = self._argument(ids)
            made = self._new()
            self._lines.append(f"long long {made} = integer(in{number}, step{number}, row);")
            self._memo[key] = made, False
        return self._memo[key][0]

    def _dequantized(self, node: onnx.NodeProto, index: _Index, row: str) -> str:
        """Read a row of a quantised weight; return the variable of its numbers at `index`."""
        sizes, (data, ids, scales) = attributes_of(node), node.input
        _refuse_if(data not in self._given or row != "row")
        at = self._id(ids)
        width = self._value(node.output[0]).width
        integers = self._argument(data)
        factors = self._argument(self._source(scales))
        place = self._new()
        scale = self._new()
        made = self._new()
        byte = f"in{integers}[{place} + j]" if sizes["bits"] == 8 else f"in{integers}[({place} + j) / 2]"
        number = byte if sizes["bits"] == 8 else f"({byte} >> ({place} + j) % 2 * 4 & 15)"
        count = self._wide if index.unit else 1  # a group has more, and a whole number of them
        self._lines += [
            f"long long {place} = {at} * {width} + {index.base};",
            f"float {scale} = number(in{factors}[{place} / {sizes['block_size']}]) * {1 / SCALES_TIMES}f;",
            f"float {made}[{count}];",
            "#pragma unroll",
            f"for (int j = 0; j < {count}; j++) {made}[j] = ({number} - {1 << sizes['bits'] - 1}) * {scale};",
        ]
        return made if index.unit else f"{made}[0]"

    def _source(self, name: str) -> str:
        """Return the input that a weight is, whatever its shape and type there."""
        while name in self._maker and self._maker[name].op_type in ("Cast", *_SHAPING):
            name = self._maker[name].input[0]
        return name

    def _part(self, node: onnx.NodeProto, name: str, index: _Index) -> _Index:
        """Return where in the input of a Split or Slice a number of its output is."""
        source = self._value(node.input[0])
        value = self._value(name)
        attributes = attributes_of(node)
        _refuse_if(not source.rows)
        if node.op_type == "Split":
            axis = self._axis_of_row(attributes.get("axis", 0), node.input[0])
            own = [self._value(out).sizes[axis] for out in node.output]
            first = sum(own[: list(node.output).index(name)])
        else:
            starts, _, axes, *steps = (self._constants[each].tolist() for each in node.input[1:])
            _refuse_if(len(axes) != 1)
            axis = self._axis_of_row(axes[0], node.input[0])
            first = starts[0] if starts[0] >= 0 else starts[0] + source.sizes[axis]
            if steps and steps[0] != [1]:
                _refuse_if(index.unit or axis != len(source.sizes) - 1 or steps[0][0] < 1)
                part = value.sizes[axis]
                whole = source.sizes[axis]
                place = f"({index.base}) / {part} * {whole} + {first} + ({index.base}) % {part} * {steps[0][0]}"
                return _Index(place, False)
        inner = math.prod(source.sizes[axis + 1 :])
        whole = source.sizes[axis] * inner
        part = value.sizes[axis] * inner
        offset = first * inner
        _refuse_if(index.unit and (offset % self._wide or whole % self._wide or part % self._wide))
        if math.prod(source.sizes[:axis]) == 1:
            return index.plus(offset)
        return _Index(f"({index.base}) / {part} * {whole} + {offset} + ({index.base}) % {part}", index.unit)

    def _place(self, operand: str, value: _Value, index: _Index) -> _Index:
        """Return where in an operand, which is broadcast, the number is that goes to `index` of a value."""
        given = self._value(operand)
        sizes = given.sizes
        if not given.rows and value.rows and len(sizes) > len(value.sizes):
            _refuse_if(sizes[0] != 1)
            sizes = sizes[1:]
        if math.prod(sizes) == 1:
            return _Index("0", False)
        sizes = (1,) * (len(value.sizes) - len(sizes)) + sizes
        _refuse_if(given.rows and not value.rows or len(sizes) != len(value.sizes))
        if given.rows and len(given.sizes) != len(value.sizes):  # what is a row is another axis there
            raise _HasNoKernel
        if sizes == value.sizes:
            return index
        for cut in range(len(sizes)):
            inner = math.prod(value.sizes[cut:])
            if math.prod(sizes[:cut]) == 1 and sizes[cut:] == value.sizes[cut:]:
                _refuse_if(index.unit and inner % self._wide)
                return _Index(f"({index.base}) % {inner}", index.unit)
            if sizes[:cut] == value.sizes[:cut] and math.prod(sizes[cut:]) == 1:
                _refuse_if(index.unit and inner % self._wide)
                return _Index(f"({index.base}) / {inner}", False)
        raise _HasNoKernel

    def _axes(self, node: onnx.NodeProto) -> list[int]:
        """Return which sizes of a row a node accumulates over."""
        source = self._value(node.input[0])
        attributes = attributes_of(node)
        axes = attributes.get("axes") or (self._constants[node.input[1]].tolist() if len(node.input) > 1 else [])
        _refuse_if(not source.rows or not axes or (node.input[0] in self._parts and max(axes) >= 0))
        return sorted(axis + len(source.sizes) if axis < 0 else axis - 1 for axis in axes)

    def _axis_of_row(self, axis: int, name: str) -> int:
        """Return which of the sizes of a row an axis of a value is; of [rows, *sizes] the first has no kernel."""
        found = axis + len(self._value(name).sizes) - (0 if axis < 0 else len(self._dims(name)))
        _refuse_if(axis == 0 or found < 0)
        return found

    def _is_short(self, node: onnx.NodeProto) -> bool:
        """Return whether a node accumulates over one size in front of others: the taps of a short convolution."""
        axes = self._axes(node)
        rank = len(self._value(node.input[0]).sizes)
        return len(axes) == 1 and 0 <= axes[0] < rank - 1

    def _short_sum(self, node: onnx.NodeProto, index: _Index, row: str) -> tuple[str, bool]:
        source, (axis,) = self._value(node.input[0]), self._axes(node)
        size = source.sizes[axis]
        inner = math.prod(source.sizes[axis + 1 :])
        _refuse_if(size > _MOST_TERMS or (index.unit and inner % self._wide))
        at = self._new()
        self._lines.append(f"int {at} = ({index.base}) / {inner} * {size * inner} + ({index.base}) % {inner};")
        terms = [self._number(node.input[0], _Index(f"{at} + {tap * inner}", index.unit), row) for tap in range(size)]
        form = " + ".join(f"{{{tap}}}" for tap in range(size))
        form = f"({form}) / {size}.0f" if node.op_type == "ReduceMean" else form
        if any(vector for _, vector in terms):
            return self._each(form, terms), True
        made = self._new()
        self._lines.append(f"float {made} = {form.format(*(text for text, _ in terms))};")
        return made, False

    def _transposed(self, node: onnx.NodeProto, index: _Index, row: str) -> tuple[str, bool]:
        """Read a weight the other way round."""
        source = self._value(node.input[0])
        _refuse_if(source.rows or index.unit or attributes_of(node)["perm"] != [1, 0])
        rows, columns = source.sizes
        return self._number(
            node.input[0], _Index(f"({index.base}) % {rows} * {columns} + ({index.base}) / {rows}", False), row
        )

    def _sum(self, node: onnx.NodeProto) -> None:
        """Accumulate over the last dimensions: over the row by all threads, over a part of it by a warp."""
        source, (name,), last = self._value(node.input[0]), node.output, self._axes(node)
        _refuse_if(last != list(range(last[0], len(source.sizes))) or last[0] < 0)
        groups = math.prod(source.sizes[: last[0]])
        size = math.prod(source.sizes[last[0] :])
        _refuse_if(size % self._wide)
        made = self._new()
        total = self._new()
        scale = f" * {np.float32(1 / size):.9e}f" if node.op_type == "ReduceMean" else ""
        self._memo = {}

        def add(index: _Index) -> None:
            text, vector = self._number(node.input[0], index, "row")
            if vector:
                self._lines += ["#pragma unroll", f"for (int j = 0; j < {self._wide}; j++) {total} += {text}[j];"]
            else:
                self._lines.append(f"{total} += {text};" if self._wide == 1 else f"{total} += {self._wide} * {text};")

        if groups == 1:
            self._lines.append(f"float {total} = 0;")
            self._loop(size, add)
            self._lines.append(f"float {made} = block_sum<THREADS / 32>({total}){scale};")
            self._sums[name] = made
            return
        self._shared.append(f"__shared__ float {made}[{groups}];")
        vectors = size // self._wide
        unit = self._wide > 1
        self._lines += [f"EACH_GROUP(group, {groups}) {{", f"float {total} = 0;", f"EACH_OF_GROUP(v, {vectors}) {{"]
        add(_Index(f"group * {size} + v * {self._wide}", unit))
        self._lines += [
            "}",
            f"{total} = warp_sum({total}){scale};",
            f"if (threadIdx.x % 32 == 0) {made}[group] = {total};",
            "}",
            "__syncthreads();",
        ]
        self._memo = {}
        self._sums[name] = made + "[{}]"


def _plain_norms(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with LayerNormalization over the last dimension as the operators it is made of."""
    graph = Rewriter(model)
    norms = [node for node in graph.nodes if node.op_type == "LayerNormalization"]
    for node in norms:
        attributes, (out, *more) = attributes_of(node), node.output
        if attributes.get("axis", -1) != -1 or more:
            continue
        axes = graph.constant(f"{out}/axes", np.array([-1], np.int64))
        small = np.array(attributes.get("epsilon", 1e-5), np.float32)  # which fp16 may not have
        epsilon = graph.constant(f"{out}/epsilon", small)
        (x, gain, *bias) = node.input
        mean, off, square, variance, shifted, root, scaled, weighted = (
            f"{out}/{what}" for what in ("mean", "off", "square", "variance", "shifted", "root", "scaled", "weighted")
        )
        steps = [
            ("ReduceMean", [x, axes], mean),
            ("Sub", [x, mean], off),
            ("Mul", [off, off], square),
            ("ReduceMean", [square, axes], variance),
            ("Add", [variance, epsilon], shifted),
            ("Sqrt", [shifted], root),
            ("Div", [off, root], scaled),
            ("Mul", [scaled, gain], weighted if bias else out),
            *([("Add", [weighted, *bias], out)] if bias else []),
        ]
        graph.replace(node, *(helper.make_node(operator, inputs, [name]) for operator, inputs, name in steps))
    return graph.finish(check=False) if norms else model  # whose epsilon is float32 in a float16 graph
