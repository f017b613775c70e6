"""Write the CUDA kernel of a piece of a graph: loops over a row, whose elements are expressions of other elements.

The piece is computed for one row, a token or a request. Its values are rows, or the same for all rows. `row_operators`
has a rule for each operator, which gives an element of its result from elements of its operands, down to the inputs;
results of reductions and choices are in shared memory or registers before others read them. An index counts the
elements of a row in C order. A loop takes eight elements at once where they are contiguous, else one at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from lockstep.onnx_tools.types import Dims, attributes_of, dims_of, with_types
from lockstep_gpu.kernels.row_kernels import CHOICES, INDEX, INTEGERS, ROWS, SCALES, WAIT, WEIGHT, RowKernel

WIDE = 8  # elements of 16 bits in 16 bytes
STORED = (TensorProto.FLOAT, TensorProto.FLOAT16)  # types of the floats that kernels load and store
_THREADS = 256
_MAX_THREADS = 1024
_MAX_SHARED = 40 << 10  # bytes of shared memory
_TRIED_ROWS = 3  # to see which axis of a value is that of rows
_C_TYPES: Mapping[int, str] = {TensorProto.INT64: "long long", TensorProto.INT32: "long long", TensorProto.BOOL: "bool"}
_SHAPING = ("Cast", "Reshape", "Squeeze", "Unsqueeze")
Sizes = tuple[int, ...]
Operand = tuple[str, bool]  # the C++ expression of an element, and whether it is a vector, whose elements are [j]


class Unsupported(Exception):
    """An operator has no rule, or none for its form: says which."""


def reject_if(is_unsupported: object, actual: str) -> None:
    if is_unsupported:
        raise Unsupported(actual)


@dataclass(frozen=True)
class Index:
    """An index into a row: the C++ expression `base`; is_vector: of the elements that start there."""

    base: str
    is_vector: bool

    def plus(self, offset: int) -> Index:
        if not offset:
            return self
        return Index(f"{self.base} + {offset}", self.is_vector)


@dataclass(frozen=True)
class Value:
    """A value for one row. sizes: its shape for one row; axis: that of rows, None if it is the same for all rows."""

    sizes: Sizes
    axis: int | None
    elem_type: int

    @property
    def width(self) -> int:
        return math.prod(self.sizes)

    @property
    def strides(self) -> Sizes:
        return tuple(math.prod(self.sizes[axis + 1 :]) for axis in range(len(self.sizes)))

    @property
    def outer(self) -> int:
        """Return the product of the sizes before the axis of rows: 1 if a row is contiguous."""
        return math.prod(self.sizes[: self.axis or 0])

    @property
    def c_type(self) -> str:
        return _C_TYPES.get(self.elem_type, "float")


def constant_of(number: float) -> str:
    """Return a float32 number as CUDA C++."""
    if math.isnan(number):
        return "__int_as_float(0x7fc00000)"
    if math.isinf(number):
        if number < 0:
            return "__int_as_float(0xff800000)"
        return "__int_as_float(0x7f800000)"
    return f"{np.float32(number):.9e}f"


def operand_index(sizes: Sequence[int], strides: Sequence[int], offset: int, index: Index) -> Index | None:
    """Return the index in an operand of the element `index` of a value.

    Args:
        sizes: Of the value.
        strides: Elements of the operand from one to the next along each axis of the value; 0 where it is repeated.
        offset: The operand's element that is the value's first.

    Returns None for a vector whose elements are not contiguous in the operand.
    """
    axes: list[tuple[int, int]] = []  # neighbours with one stride are merged
    for size, stride in zip(sizes, strides, strict=True):
        if axes and axes[-1][1] == stride * size:
            axes[-1] = axes[-1][0] * size, stride
        elif size > 1:
            axes.append((size, stride))
    if not any(stride for _, stride in axes):
        return Index(str(offset), False)
    is_vector = index.is_vector
    if is_vector:
        size, stride = axes[-1]
        outer_strides = [stride for _, stride in axes[:-1]]
        if stride > 1 or (len(axes) > 1 and size % WIDE):
            return None
        if stride == 1 and any(number % WIDE for number in (offset, *outer_strides)):
            return None
        is_vector = stride == 1
    if axes == [(math.prod(sizes), 1)]:
        return Index(index.base, is_vector).plus(offset)
    terms = []
    inner = math.prod(size for size, _ in axes)
    for number, (size, stride) in enumerate(axes):
        inner //= size
        if not stride:  # the operand is repeated along this axis
            continue
        term = f"({index.base})"
        if inner > 1:
            term += f" / {inner}"
        if number:  # the outermost quotient is below its size
            term += f" % {size}"
        if stride > 1:
            term += f" * {stride}"
        terms.append(term)
    return Index(" + ".join(terms), is_vector).plus(offset)


class Writer:
    """Writes the kernel of a piece, whose nodes have rules: see `row_operators`."""

    def __init__(
        self,
        piece: onnx.ModelProto,
        name: str,
        rules: Mapping[str, Rule],
        stored_rules: Mapping[str, StoredRule],
        wide: Collection[str] = (),
    ):
        self._graph = piece.graph
        self._name = name
        self._rules = rules
        self._stored_rules = stored_rules
        self._wide = wide
        self._inputs = {value.name: value for value in piece.graph.input}
        self._producers: dict[str, onnx.NodeProto] = {}
        for node in piece.graph.node:
            self._producers |= dict.fromkeys(node.output, node)
        self.constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in piece.graph.initializer}
        for node in piece.graph.node:
            if node.op_type == "Constant":
                self.constants[node.output[0]] = numpy_helper.to_array(attributes_of(node)["value"])
        embeddings = [node for node in piece.graph.node if node.op_type == "GatherBlockQuantized"]
        self._integers = {node.input[0] for node in embeddings}
        self._scales = {self.source(node.input[2]) for node in embeddings}
        self._values = _values_of_a_row(piece)
        self._arguments: dict[str, None] = {}  # in order of first use
        self._computed: dict[str, str] = {}  # by value that is computed already: an element, with `{}` for its index
        self._tables: dict[str, tuple[str, str]] = {}  # by constant array: its C++ name and declaration
        self._shared: list[str] = []
        self._shared_nbytes = 0
        self.lines: list[str] = []
        self._written: dict[tuple[str, Index, str], Operand] = {}  # elements that the current loop has computed already
        self._count = 0
        self._longest = 1  # iterations of a loop

    def write(self, quantized: Collection[str]) -> RowKernel:
        outputs = [value.name for value in self._graph.output]
        rows = {self._row_dim(value) for value in self._graph.output}
        reject_if(len(rows) != 1, f"rows of {' and '.join(sorted(rows))} in one kernel")
        codes = tuple(name for name in outputs if name in quantized)
        is_shared = bool(codes)
        for node in self._graph.node:
            rule = self._stored_rules.get(node.op_type)
            if rule is not None and rule(self, node):
                is_shared = True
        widths = {name: self.value(name).width for name in outputs}
        for width in dict.fromkeys(widths.values()):
            names = [name for name in outputs if widths[name] == width]
            self.loop(width, functools.partial(self._store, names))
        for name in codes:
            self._quantize(outputs.index(name), widths[name])
        reject_if(self._shared_nbytes > _MAX_SHARED, f"values of {self._shared_nbytes >> 10} KiB for each row")
        threads = -(-self._longest // 32) * 32
        if is_shared:  # all threads of a row read its shared memory
            threads = min(_MAX_THREADS, threads)
            blocks = 1
        else:
            threads = min(_THREADS, threads)
            blocks = -(-self._longest // threads)
        head = [f"constexpr int THREADS = {threads}, BLOCKS = {blocks};"]
        head += ["long long row = blockIdx.x / BLOCKS;", "int chunk = blockIdx.x % BLOCKS;"]
        head += ["next_may_start();", WAIT]
        arguments = tuple((name, self._kind(name)) for name in self._arguments)
        body = "\n".join("    " + line for line in [*head, *self._shared, *self.lines])
        signature = f"{self._name}({self._parameters(outputs, codes)})"
        source = f'extern "C" __global__ void __launch_bounds__({threads}) {signature} {{\n{body}\n}}\n'
        source = "".join(declaration for _, declaration in self._tables.values()) + source
        wide = tuple(name for name in (*self._arguments, *outputs) if name in self._wide)
        return RowKernel(self._name, source, arguments, tuple(outputs), rows.pop(), blocks, threads, codes, wide)

    # Values.

    def value(self, name: str) -> Value:
        if name in self.constants:
            array = self.constants[name]
            return Value(array.shape, None, onnx.helper.np_dtype_to_tensor_dtype(array.dtype))
        value = self._values.get(name, "of an unknown shape")
        if isinstance(value, Value):
            return value
        producer = "the input"
        if name in self._producers:
            producer = self._producers[name].op_type
        raise Unsupported(f"{producer} {name} {value}")

    def axis_of(self, axis: int, name: str, node: onnx.NodeProto) -> int:
        """Return an axis of a value, counted from the first; a node works along it, so it is not that of rows."""
        value = self.value(name)
        axis %= len(value.sizes)
        reject_if(axis == value.axis, f"{node.op_type} {node.output[0]} along rows")
        return axis

    def source(self, name: str) -> str:
        """Return the source of a weight's casts and reshapes."""
        while name in self._producers and self._producers[name].op_type in _SHAPING:
            name = self._producers[name].input[0]
        return name

    def is_input(self, name: str) -> bool:
        return name in self._inputs

    def _row_dim(self, output: onnx.ValueInfoProto) -> str:
        value = self.value(output.name)
        actual = f"output {output.name} {list(value.sizes)}"
        reject_if(value.axis is None or math.prod(value.sizes[: value.axis + 1]) > 1, f"{actual} that is not of rows")
        reject_if(value.elem_type not in (*STORED, TensorProto.INT64), f"{actual} of another type")
        assert value.axis is not None
        return str(dims_of(output)[value.axis])

    def _kind(self, name: str) -> str:
        value = self.value(name)
        if name in self._integers:
            return INTEGERS
        if name in self._scales:
            return SCALES
        if value.elem_type in _C_TYPES:
            # An index is one integer a row, of 32 or 64 bits; choices are several, which a kernel wrote as 32 bits.
            if len(value.sizes) == 1:
                return INDEX
            return CHOICES
        if value.axis is None:
            return WEIGHT
        return ROWS

    def _parameters(self, outputs: Sequence[str], codes: Sequence[str]) -> str:
        texts = []
        for number, name in enumerate(self._arguments):
            floats = f"const {self._stored_type(name)}* __restrict__ in{number}"
            kinds = {
                ROWS: f"{floats}, int step{number}",
                WEIGHT: floats,
                SCALES: floats,
                INTEGERS: f"const unsigned char* __restrict__ in{number}",
                INDEX: f"const void* in{number}, int step{number}",
                CHOICES: f"const int* __restrict__ in{number}, int step{number}",
            }
            texts.append(kinds[self._kind(name)])
        for number, name in enumerate(outputs):
            c_type = "int"
            if self.value(name).elem_type in STORED:
                c_type = self._stored_type(name)
            texts.append(f"{c_type}* __restrict__ out{number}, int out_step{number}")
        numbers = [outputs.index(name) for name in codes]
        texts += [f"unsigned char* __restrict__ codes{n}, float* __restrict__ step_of_row{n}" for n in numbers]
        return ", ".join(texts)

    def _stored_type(self, name: str) -> str:
        if name in self._wide:
            return "float"
        return "unsigned short"

    def argument(self, name: str) -> int:
        """Return the number of an argument, which is added at its first use."""
        self._arguments.setdefault(name)
        return list(self._arguments).index(name)

    # Statements.

    def new_variable(self) -> str:
        """Return the name of a new C++ variable."""
        self._count += 1
        return f"t{self._count}"

    def shared_array(self, size: int) -> str:
        """Declare an array of floats in shared memory; return its name."""
        name = self.new_variable()
        self._shared.append(f"__shared__ float {name}[{size}];")
        self._shared_nbytes += 4 * size
        return name

    def set_computed(self, name: str, element: str) -> None:
        """Say where a value is computed already; element: an expression with `{}` for the index."""
        self._computed[name] = element

    def loop(self, width: int, body: Callable[[Index], None], groups: int = 0) -> None:
        """Write a loop of all threads over a row's elements, or of a warp over those of its group."""
        is_vector = width % WIDE == 0
        count = width
        element = "v"
        if is_vector:
            count = width // WIDE
            element = f"v * {WIDE}"
        macro = "EACH"
        if groups:
            macro = "EACH_OF_GROUP"
            element = f"group * {width} + {element}"
        self._longest = max(self._longest, count * max(1, groups))
        self._written = {}
        self.lines.append(f"{macro}(v, {count}) {{")
        body(Index(element, is_vector))
        self.lines.append("}")
        self._written = {}

    def loop_over_all(self, count: int, body: Callable[[Index], None]) -> None:
        """Write a loop of all threads over elements one by one, and wait for its end."""
        self._longest = max(self._longest, count)
        self._written = {}
        self.lines.append(f"EACH(v, {count}) {{")
        body(Index("v", False))
        self.lines += ["}", "__syncthreads();"]
        self._written = {}

    def store_array(self, name: str, source: str) -> str:
        """Write a loop that puts the elements of `source` into shared memory, as those of a value; return the array."""
        width = self.value(source).width
        array = self.shared_array(width)
        self.loop_over_all(
            width, lambda index: self.lines.append(f"{array}[v] = {self.element(source, index, 'row')[0]};")
        )
        self.set_computed(name, array + "[{}]")
        return array

    def combine(self, expression: str, operands: Sequence[Operand], c_type: str = "float") -> Operand:
        """Write an expression of operands into a variable, a vector if an operand is one."""
        if not any(vector for _, vector in operands):
            variable = self.new_variable()
            self.lines.append(f"{c_type} {variable} = {expression.format(*(text for text, _ in operands))};")
            return variable, False
        return self._vector(expression.format(*map(_at_j, operands)), c_type), True

    def _vector(self, text: str, c_type: str = "float") -> str:
        """Write a vector whose elements are an expression; return its variable."""
        variable = self.new_variable()
        self.lines += [
            f"{c_type} {variable}[{WIDE}];",
            "#pragma unroll",
            f"for (int j = 0; j < {WIDE}; j++) {variable}[j] = {text};",
        ]
        return variable

    def one_by_one(self, element: Callable[[Index], Operand], index: Index, c_type: str = "float") -> Operand:
        """Write the elements of a vector one after another."""
        variable = self.new_variable()
        outside = self._written
        self._written = dict(outside)
        self.lines += [f"{c_type} {variable}[{WIDE}];", "#pragma unroll", f"for (int j = 0; j < {WIDE}; j++) {{"]
        text, _ = element(Index(f"({index.base} + j)", False))
        self.lines += [f"{variable}[j] = {text};", "}"]
        self._written = outside
        return variable, True

    def _store(self, names: Sequence[str], index: Index) -> None:
        outputs = [value.name for value in self._graph.output]
        for name in names:
            number = outputs.index(name)
            operand = self.element(name, index, "row")
            text, vector = operand
            address = f"out{number} + row * out_step{number} + {index.base}"
            is_float = self.value(name).elem_type in STORED
            if is_float and index.is_vector:
                if not vector:
                    text = self._vector(text)
                self.lines.append(f"store8({address}, {text});")
            elif is_float and name in self._wide:
                self.lines.append(f"*({address}) = {text};")
            elif is_float:
                self.lines.append(f"*({address}) = narrow({text});")
            elif index.is_vector:
                self.lines.append(f"for (int j = 0; j < {WIDE}; j++) ({address})[j] = (int){_at_j(operand)};")
            else:
                self.lines.append(f"*({address}) = (int){text};")

    def _quantize(self, number: int, width: int) -> None:
        """Write the quantization of a stored output to e4m3."""
        vectors = width // 8
        largest = self.new_variable()
        step = self.new_variable()
        halves = f"(const Halves*)(out{number} + row * out_step{number})"
        self.lines += [
            "__syncthreads();",
            f"u32 {largest} = 0;",
            f"EACH(v, {vectors}) {largest} = largest_of(({halves})[v], {largest});",
            f"float {step} = step_of(block_max<THREADS / 32>({largest}));",
            f"if (threadIdx.x == 0) step_of_row{number}[row] = {step};",
            f"EACH(v, {vectors}) ((Codes*)(codes{number} + row * {width}))[v] = encoded(({halves})[v], {step});",
        ]

    # Elements.

    def element(self, name: str, index: Index, row: str) -> Operand:
        """Return the element of a value at `index` of `row`, a vector or a number that its elements share."""
        key = (name, index, row)
        if key not in self._written:
            self._written[key] = self._element(name, index, row)
        return self._written[key]

    def _element(self, name: str, index: Index, row: str) -> Operand:
        if name in self.constants:
            return self._constant(name, index)
        if name in self._computed:
            reject_if(row != "row", f"Gather of {name}, which is computed from a whole row")
            if index.is_vector:
                return self.one_by_one(lambda at: self.element(name, at, row), index)
            return self._computed[name].format(index.base), False
        if name in self._inputs:
            return self._load(name, index, row)
        node = self._producers[name]
        rule = self._rules.get(node.op_type)
        if rule is None:
            raise Unsupported(node.op_type)
        return rule(self, node, name, index, row)

    def view(self, name: str, value: Value, strides: Sequence[int], offset: int, index: Index, row: str) -> Operand:
        """Return the element of operand `name` that is at `index` of a value: see `operand_index`."""
        at = operand_index(value.sizes, strides, offset, index)
        if at is not None:
            return self.element(name, at, row)
        return self.one_by_one(
            lambda at_one: self.view(name, value, strides, offset, at_one, row), index, self.value(name).c_type
        )

    def broadcast(self, name: str, value: Value, index: Index, row: str) -> Operand:
        """Return the element of an operand that is broadcast to `index` of a value."""
        operand = self.value(name)
        strides = [0] * (len(value.sizes) - len(operand.sizes))
        for size, stride in zip(operand.sizes, operand.strides, strict=True):
            strides.append(stride if size > 1 else 0)
        return self.view(name, value, strides, 0, index, row)

    def _constant(self, name: str, index: Index) -> Operand:
        array = self.constants[name]
        if array.dtype.kind == "f":
            texts = [constant_of(float(number)) for number in array.reshape(-1)]
        else:
            texts = [str(int(number)) for number in array.reshape(-1)]
        if len(texts) == 1:
            return texts[0], False
        if name not in self._tables:
            c_type = self.value(name).c_type
            table = f"{self._name}_table{len(self._tables)}"
            self._tables[name] = table, f"static __device__ const {c_type} {table}[] = {{{', '.join(texts)}}};\n"
        table, _ = self._tables[name]
        if index.is_vector:
            return f"({table} + {index.base})", True
        return f"{table}[{index.base}]", False

    def _load(self, name: str, index: Index, row: str) -> Operand:
        value = self.value(name)
        number = self.argument(name)
        kind = self._kind(name)
        variable = self.new_variable()
        if kind in (INDEX, CHOICES):
            if index.is_vector:
                return self.one_by_one(lambda at: self.element(name, at, row), index, value.c_type)
            text = f"in{number}[{row} * step{number} + {index.base}]"
            if kind == INDEX:  # of 32 or 64 bits, which the step says
                text = f"integer(in{number}, step{number}, {row})"
            self.lines.append(f"long long {variable} = {text};")
            return variable, False
        reject_if(kind not in (WEIGHT, ROWS) or value.elem_type not in STORED, f"the input {name} of another type")
        reject_if(value.axis is not None and value.outer > 1, f"the input {name} {list(value.sizes)}")
        offset = index.base
        if kind == ROWS:
            offset = f"{row} * step{number} + {offset}"
        if index.is_vector and kind == ROWS and value.width % WIDE:  # rows that start anywhere
            return self.one_by_one(lambda at: self.element(name, at, row), index)
        if index.is_vector:
            self.lines += [f"float {variable}[{WIDE}];", f"load8(in{number} + {offset}, {variable});"]
        else:
            self.lines.append(f"float {variable} = number(*(in{number} + {offset}));")
        return variable, index.is_vector


Rule = Callable[[Writer, onnx.NodeProto, str, Index, str], Operand]
StoredRule = Callable[[Writer, onnx.NodeProto], bool]


def _at_j(operand: Operand) -> str:
    """Return the C++ expression of an operand's element in a loop over j."""
    text, vector = operand
    if vector:
        return f"{text}[j]"
    return text


def _values_of_a_row(piece: onnx.ModelProto) -> dict[str, Value | str]:
    """Return {name: value} of the values that only grow with the rows; of any other value why it has no rows."""
    # Shapes are inferred twice, for one row and for three: the axis of rows is the one that grows.
    shapes_of_one_row = _shapes(piece, 1)
    shapes_of_several = _shapes(piece, _TRIED_ROWS)
    values: dict[str, Value | str] = {}
    for name, (element, dims) in shapes_of_one_row.items():
        _, dims_of_several = shapes_of_several.get(name, (element, ()))
        sizes = tuple(size for size in dims if isinstance(size, int))
        sizes_of_several = tuple(size for size in dims_of_several if isinstance(size, int))
        is_known = len(sizes) == len(dims) and len(sizes_of_several) == len(dims_of_several)
        if not is_known or len(sizes) != len(sizes_of_several):
            continue
        axes = [axis for axis, size in enumerate(sizes) if size != sizes_of_several[axis]]
        if not axes:
            values[name] = Value(sizes, None, element)
        elif len(axes) == 1 and sizes_of_several[axes[0]] == _TRIED_ROWS * sizes[axes[0]]:
            values[name] = Value(sizes, axes[0], element)
        else:
            values[name] = f"of {list(sizes)} numbers for a row, and {list(sizes_of_several)} for {_TRIED_ROWS}"
    return values


def _shapes(piece: onnx.ModelProto, rows: int) -> dict[str, tuple[int, Dims]]:
    """Return {name: (element type, shape)} of a piece's values for a number of rows."""
    sized = onnx.ModelProto()
    sized.CopyFrom(piece)
    for value in sized.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if not dim.HasField("dim_value"):
                dim.dim_value = rows
    for value in sized.graph.output:
        value.type.tensor_type.ClearField("shape")
    graph = with_types(sized).graph
    return {
        value.name: (value.type.tensor_type.elem_type, dims_of(value))
        for value in (*graph.input, *graph.value_info, *graph.output)
    }
