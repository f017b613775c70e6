"""A block's kernels and products on a device: a `KernelsFile` and its weights.

In: an engine file, weights on the device, and the arrays of a step. Out: a list of launches. Blocks run one after
another on one stream, so all of a device use the same buffers for the values between their steps.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep.artifacts.adapters import IDS
from lockstep.artifacts.dtypes import named_dtype
from lockstep.artifacts.signature import IO
from lockstep.errors import InputError
from lockstep.onnx_tools.products import Experts, Product
from lockstep.step.executable import Call
from lockstep.weights import Tensors, check_bound_slots, check_inputs
from lockstep_gpu import cuda
from lockstep_gpu.backends.cuda.kernels_file import Group, KernelsFile, Shape
from lockstep_gpu.device import Device
from lockstep_gpu.kernels.expert_products import ExpertOrder, ExpertStack, largest_tile
from lockstep_gpu.kernels.expert_products import bind as bind_experts
from lockstep_gpu.kernels.fp8_gemm import QuantizedRows
from lockstep_gpu.kernels.gemm import ALIGNED
from lockstep_gpu.kernels.library import including, kind_options
from lockstep_gpu.kernels.products import Adapters, Products, SmallWeight, StridedView
from lockstep_gpu.kernels.row_kernels import (
    CHOICES,
    INDEX,
    INTEGERS,
    OF_WEIGHTS,
    ROWS,
    SCALES,
    SCALES_TIMES,
    WEIGHT,
    RowKernel,
)
from lockstep_gpu.program import Arrays, Bound, GpuExecutable, GpuProgram, Shapes
from lockstep_gpu.ranks.all_reduce import Exchange
from lockstep_gpu.tensor import Tensor
from lockstep_gpu.weights import DeviceWeights, Uploads, WeightCast

_EXPERT_ID = np.dtype(np.int32)
_WIDE = np.dtype(np.float32)  # of a residual stream that is not of 16 bits
_FP8 = (8, 9)  # the first compute capability whose tensor cores take e4m3
_AS_SCALES = WeightCast(np.dtype(np.float16), SCALES_TIMES)
Sizes = Mapping[str, int]  # of dimensions, by name
GroupWeights = Mapping[Group, SmallWeight]


class _SharedBuffers:
    """Products and buffers that all blocks of a device share, one set for captured decode steps and one for prompts.

    Held weakly: they are freed with the last call that uses them.
    """

    _instances: weakref.WeakValueDictionary[tuple[int, bool, np.dtype], _SharedBuffers] = weakref.WeakValueDictionary()

    def __init__(self, device: Device, dtype: np.dtype):
        self.products = Products(device.stream, dtype)
        self._buffers: dict[tuple, cuda.Array] = {}

    @classmethod
    def of(cls, device: Device, captured: bool, dtype: np.dtype) -> _SharedBuffers:
        key = id(device), captured, dtype
        shared = cls._instances.get(key)
        if shared is None:
            shared = cls._instances[key] = cls(device, dtype)
        return shared

    def buffer(self, number: int, rows: int, width: Sequence[int], dtype: np.dtype) -> cuda.Array:
        """Return [rows, *width], the `number`th buffer of its width and type; earlier ones stay valid."""
        key = dtype, number, *width
        array = self._buffers.get(key)
        # A larger call gets a new array: calls that were captured before hold the address of the old one.
        if array is None or array.shape[0] < rows:
            array = self._buffers[key] = cuda.empty((rows, *width), dtype, "the values of a step")
        return array[:rows]


class KernelsProgram(GpuProgram):
    """A block on a rank's device, without weights: see `GpuProgram`."""

    by_profiles = False  # products take as long as their size says

    def __init__(self, path: Path, slots: Sequence[IO], rank: int = 0):
        super().__init__(path, slots, rank)
        self.block = block = KernelsFile.load(path)
        # A step is a kernel, or a group of products of one input and one kind: its first product stands for all.
        self.kernels = [step.kernel for step in block.steps if step.kernel is not None]
        groups = [step.products for step in block.steps if step.kernel is None]
        self.groups = [group for group in groups if group[0].experts is None]
        products = list(itertools.chain.from_iterable(groups))
        self.expert_products = [product for product in products if product.experts is not None]
        self._weights_of_kernels = dict[str, str]()  # {slot: kind}
        self.wide = set[str]()
        for kernel in self.kernels:
            self.wide.update(kernel.wide)
            self._weights_of_kernels.update(argument for argument in kernel.arguments if argument[1] in OF_WEIGHTS)
        slots_read = {*self._weights_of_kernels}
        for product in products:
            slots_read.update(product.slots)
        check_inputs(self.slots, slots_read, str(path))
        capability = cuda.compute_capability(self.device.number)
        if any(group[0].is_fp8 for group in self.groups) and capability < _FP8:
            raise InputError(
                f"{path}: expected a GPU of compute capability {_FP8[0]}.{_FP8[1]} or higher for w8a8-fp8, found "
                f"{capability[0]}.{capability[1]}; choose w8a16, or fp16"
            )
        self.dtype = named_dtype(block.dtype)
        self.functions = self._compiled()
        tensors = {name: _tensor(name, True, *declared) for name, declared in block.inputs.items()}
        self.tensors = tensors | {name: _tensor(name, False, *declared) for name, declared in block.outputs.items()}

    def _compiled(self) -> dict[str, cuda.Kernel]:
        if not self.kernels:
            return {}
        self.device.use()
        source = self._includes + "".join(kernel.source for kernel in self.kernels)
        module = cuda.compile_kernels(source, kind_options(self.block.dtype))
        return {kernel.name: module[kernel.name] for kernel in self.kernels}

    @property
    def _includes(self) -> str:
        if any(kernel.quantized for kernel in self.kernels):
            return including("rows.cuh", "e4m3.cuh")
        return including("rows.cuh")

    def summing(self, kernel: RowKernel, name: str, exchange: Exchange) -> cuda.Kernel | None:
        """Return `kernel` with an all-reduce of its argument `name` in front; None where it cannot have one."""
        if name in kernel.wide:  # whose sums are of 16 bits
            return None
        source = kernel.summing(name, math.prod(int(size) for size in self.declared(name)[1:]))
        if source is None:
            return None
        options = *exchange.options, *kind_options(self.block.dtype)
        return cuda.compile_kernels(self._includes + including("sums.cuh") + source, options)[kernel.name]

    def shares_buffer(self, group: Group) -> bool:
        """Return whether a group's results are columns of one buffer, so that one product computes them all.

        They are if only kernels read them, which take a stride: products and other graphs read contiguous rows.
        """
        results = {product.output for product in group}
        by_products = {group[0].input for group in self.groups}
        by_products |= {product.input for product in self.expert_products}
        aligned = not any(product.out_features % ALIGNED for product in group)
        return len(group) > 1 and aligned and results.isdisjoint({*self.block.outputs, *by_products})

    def bind(self, weights: Tensors | None, slots: Mapping[str, Sequence[str]]) -> KernelsExecutable:
        """Return the block with its weights, whose uploads may go on. Raises CheckError where they do not fit."""
        check_bound_slots(self.slots, slots, str(self.path))
        assert weights is not None  # every block has some
        self.device.use()
        store = _BlockWeights(self, DeviceWeights.of(weights, self.device), weights, slots)
        rows = dict[str, cuda.Array]()
        groups = {group: store.group(group, self.shares_buffer(group), rows) for group in self.groups}
        kinds = dict(self._weights_of_kernels)
        for product in self.expert_products:
            kinds.update(_kinds(product))
        kernel_weights = {name: store.kernel_weight(name, kind) for name, kind in kinds.items()}
        return KernelsExecutable(self, groups, kernel_weights, store.uploads, rows)

    def tuned_for(self, shapes: Shapes) -> Shapes:
        """Return `shapes`: there are no profiles."""
        return shapes

    def context_for(self, shapes: Shapes, exclusive: bool) -> Sizes:
        """Return {dimension: size}, which is all that calls need."""
        return self.sizes(shapes)

    def declared(self, name: str) -> Shape:
        """Return the shape of an input, of an output or of a value between two steps."""
        declared = self.block.inputs.get(name) or self.block.outputs.get(name)
        if declared is None:
            return self.block.inner[name]
        return declared[1]

    def sizes(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Return {dimension: size}, from shapes of inputs and outputs."""
        sizes = {}
        for name, shape in shapes.items():
            for dim, size in zip(self.declared(name), shape):
                if isinstance(dim, str):
                    sizes[dim] = size
        return sizes


def _kinds(product: Product) -> Iterator[tuple[str, str]]:
    """Yield (slot, kind of kernel argument) of a product of experts."""
    assert product.experts is not None
    kinds = {"floats": (WEIGHT,), "integers": (INTEGERS, SCALES), "mxfp4": (INTEGERS, INTEGERS)}
    return zip(product.slots, kinds[product.experts.weight.kind], strict=True)


def _tensor(name: str, is_input: bool, dtype: str, shape: Shape) -> Tensor:
    sizes = []
    for size in shape:
        if isinstance(size, str):  # a dynamic dimension
            size = -1
        sizes.append(size)
    return Tensor(name, is_input, named_dtype(dtype), tuple(sizes))


class _BlockWeights:
    """The weights of a block on its device."""

    def __init__(
        self, program: KernelsProgram, store: DeviceWeights, weights: Tensors, slots: Mapping[str, Sequence[str]]
    ):
        self._program = program
        self._store = store
        self._weights = weights
        self._names = slots
        self.uploads = store.uploads

    def kernel_weight(self, slot: str, kind: str) -> cuda.Array:
        """Return a weight that kernels read: in the block's type, or if it is quantised as products read it."""
        cast = None
        if kind == SCALES:
            cast = _AS_SCALES
        elif kind != INTEGERS and slot not in self._program.wide:
            cast = self._cast(slot, self._program.dtype)
        return self._put([slot], self._program.slots[slot][0], cast)

    def group(self, group: Group, in_one_buffer: bool, rows: dict[str, cuda.Array]) -> SmallWeight:
        """Return the weights of a group's products in one array.

        Adapters' matrices A, transposed, are further rows of it: one product computes x W and x A. rows: gets the views
        of these rows, {input A: [columns of all adapters, in_features]}.
        """
        first = group[0]
        outs = tuple(product.out_features for product in group)
        columns = {product.lora.a: product.lora.columns for product in group if product.lora is not None}
        num_adapter_rows = sum(columns.values())
        num_rows = sum(outs)
        in_features = first.in_features
        if in_one_buffer or num_adapter_rows:
            outs = (num_rows + num_adapter_rows,)
        if first.bits < 16:  # a set with quantised weights takes no adapters
            data = self._quantized_part(group, 0, None)
            scale_cast: WeightCast | None = _AS_SCALES
            if first.is_fp8:  # whose scales are float32 and stay so
                scale_cast = None
            scales = self._quantized_part(group, 1, scale_cast)
            return SmallWeight(data, scales, first.bits, first.group_size, in_features, outs)
        dtype = self._program.dtype
        if first.is_float32:
            dtype = _WIDE
        cast = self._cast(first.slots[0], dtype)
        if first.transposed:
            cast = replace(cast or WeightCast(self._program.slots[first.slots[0]][1]), transposed=True)
        slots = [product.slots[0] for product in group]
        data = self._put(slots, (num_rows + num_adapter_rows, in_features), cast, room=bool(num_adapter_rows))
        at = num_rows
        for name, count in columns.items():
            rows[name] = data[at : at + count]
            at += count
        return SmallWeight(data, None, 16, 0, in_features, outs)

    def _quantized_part(self, group: Group, part: int, cast: WeightCast | None) -> cuda.Array:
        """Return the integers (part 0) or scales (part 1) of a group's weights, one product after another."""
        slots = [product.slots[part] for product in group]
        sizes = [self._program.slots[slot][0] for slot in slots]
        return self._put(slots, (sum(rows for rows, *_ in sizes), *sizes[0][1:]), cast)

    def _put(
        self, slots: Sequence[str], shape: Sequence[int], cast: WeightCast | None, room: bool = False
    ) -> cuda.Array:
        names = list(itertools.chain.from_iterable(self._names[slot] for slot in slots))
        where = f"{self._program.path}: slot {', '.join(slots)}"
        dtype = self._program.slots[slots[0]][1]
        return self._store.put(self._weights, names, tuple(shape), dtype, where, room=room, cast=cast)

    def _cast(self, slot: str, dtype: np.dtype) -> WeightCast | None:
        if self._program.slots[slot][1] == dtype:
            return None
        return WeightCast(dtype)


class KernelsExecutable(GpuExecutable):
    """A block with its weights, those of products (`groups`) and of kernels."""

    program: KernelsProgram

    def __init__(
        self, program: KernelsProgram, groups: GroupWeights, weights: Arrays, uploads: Uploads, adapter_rows: Arrays
    ):
        super().__init__(uploads, weights, adapter_rows)
        self.program = program
        self.groups = groups

    def bind(self, inputs: Arrays, outputs: Arrays, captured: bool = False) -> Bound:
        arrays = {**inputs, **outputs}
        self.check_arrays(arrays)
        call = _BoundSteps(self, arrays, captured)

        def run(sizes: Sizes, shapes: Shapes) -> None:
            for step in call.steps:
                step(sizes)

        return run

    def prepare_fused_all_reduce(
        self, exchange: Exchange, values: cuda.Array, inputs: Arrays, outputs: Arrays
    ) -> tuple[Call, Call] | None:
        kernel = self.program.block.steps[0].kernel
        if kernel is None:
            return None
        names = [name for name, kind in kernel.arguments if inputs.get(name) is values]
        if not names:
            return None
        function = self.program.summing(kernel, names[0], exchange)
        if function is None:
            return None
        arrays = {**inputs, **outputs}
        self.check_arrays(arrays)
        call = _BoundSteps(self, arrays, True)
        sizes = self.program.sizes({name: array.shape for name, array in arrays.items()})
        first_step = call.kernel(kernel, function, *exchange.group)
        later_steps = call.steps[1:]

        def run_later_steps() -> None:
            for step in later_steps:
                step(sizes)

        return functools.partial(first_step, sizes), run_later_steps


Step = Callable[[Sizes], None]


class _BoundSteps:
    """The steps of an executable on arrays of the largest sizes."""

    def __init__(self, engine: KernelsExecutable, arrays: Arrays, captured: bool):
        self._engine = engine
        self._program = program = engine.program
        self._shared = _SharedBuffers.of(program.device, captured, program.dtype)
        self._largest = program.sizes({name: array.shape for name, array in arrays.items()})
        self._arrays = arrays
        self._counts = dict[tuple[int, ...], int]()
        self._values = {name: StridedView.of(array) for name, array in arrays.items()}
        # Shared buffers first: the other values between steps, below, are those that no buffer has yet.
        for group in program.groups:
            if program.shares_buffer(group) and not any(product.lora for product in group):
                self._share_buffer(group)
        choices = {product.experts.ids for product in program.expert_products if product.experts is not None}
        dtypes: dict[str, np.dtype] = dict.fromkeys(program.wide, _WIDE)
        dtypes |= dict.fromkeys(choices, _EXPERT_ID)
        for name, shape in program.block.inner.items():
            if name not in self._values:
                buffer = self._buffer(str(shape[0]), *(int(size) for size in shape[1:]), dtype=dtypes.get(name))
                self._values[name] = StridedView.of(buffer)
        self._orders: dict[str, ExpertOrder] = {}
        self._quantized: dict[str, QuantizedRows] = {}
        quantized = itertools.chain.from_iterable(kernel.quantized for kernel in program.kernels)
        for number, name in enumerate(quantized):
            count = self._largest[str(program.declared(name)[0])]
            width = self._values[name].array.shape[1:]
            codes = self._shared.buffer(number, count, (math.prod(width),), np.dtype(np.uint8))
            scales = self._shared.buffer(number, count, (), np.dtype(np.float32))
            self._quantized[name] = QuantizedRows(codes, scales)
        self.steps: list[Step] = []
        for step in program.block.steps:
            if step.kernel is None:
                self.steps += self._group(step.products)
            else:
                self.steps.append(self.kernel(step.kernel))

    def _buffer(self, rows: str, *width: int, dtype: np.dtype | None = None) -> cuda.Array:
        """Return a new buffer; None: of the block's type."""
        self._counts[width] = self._counts.get(width, 0) + 1
        return self._shared.buffer(self._counts[width], self._largest[rows], width, dtype or self._program.dtype)

    def _share_buffer(self, group: Group) -> None:
        """Make a group's results columns of one buffer."""
        first_column = 0
        dtype = _WIDE if group[0].is_float32 else None
        buffer = self._buffer(self._rows(group), sum(product.out_features for product in group), dtype=dtype)
        for product in group:
            self._values[product.output] = _columns_from(buffer, first_column)
            first_column += product.out_features

    def _rows(self, group: Group) -> str:
        """Return the name of the dimension that counts the rows of a group's input."""
        return str(self._program.declared(group[0].input)[0])

    def kernel(self, kernel: RowKernel, function: cuda.Kernel | None = None, *appended: cuda.Array | int) -> Step:
        """Return a kernel's launch; function: instead of the kernel's own. appended: its further arguments."""
        # The order of arguments is that of the generated source (row_kernels): each input's pointer with its stride,
        # or of ids whether they have 64 bits; then outputs with their strides, and codes and scales of e4m3 rows.
        arguments: list[cuda.Array | int] = []
        for name, kind in kernel.arguments:
            if kind in OF_WEIGHTS:
                arguments.append(self._engine.weights[name])
                continue
            assert kind in (ROWS, INDEX, CHOICES)
            view = self._values[name]
            if kind == INDEX:
                arguments += [view.array, int(view.array.dtype.itemsize == 8)]
            else:
                arguments += [view.array, view.stride]
        for name in kernel.outputs:
            arguments += [self._values[name].array, self._values[name].stride]
        for name in kernel.quantized:
            arguments += self._quantized[name]
        stream = self._program.device.stream
        function = function or self._program.functions[kernel.name]
        # `overlaps`: the kernel may be launched before the one in front has ended, and waits for its values itself.
        launch = cuda.Launch(function, stream, kernel.threads, *arguments, *appended, overlaps=True)
        rows = kernel.rows
        blocks = kernel.blocks
        return lambda sizes: launch(sizes[rows] * blocks)

    def _products_of_experts(self, product: Product, experts: Experts) -> list[Step]:
        stream = self._program.device.stream
        rows = self._rows((product,))
        ids = self._values[experts.ids].array
        steps = list[Step]()
        order = self._orders.get(experts.ids)
        if order is None:
            # The first product of these ids sorts its rows by expert, for all products that read the same ids.
            count = math.prod(ids.shape)
            number = -1 - len(self._orders)  # other buffers count from 0
            sorted_rows = self._shared.buffer(number, count, (), _EXPERT_ID)
            tiles = self._shared.buffer(number, count, (4,), _EXPERT_ID)
            all_experts = [other.experts for other in self._program.expert_products if other.experts is not None]
            forms = [other.weight for other in all_experts if other.ids == experts.ids]
            tile = largest_tile(forms, self._program.dtype)
            order = ExpertOrder(stream, ids, experts.weight.count, sorted_rows, tiles, tile)
            self._orders[experts.ids] = order
            sort = order.sort
            steps.append(lambda sizes: sort(sizes[rows]))
        scales = self._engine.weights[product.slots[1]] if len(product.slots) > 1 else None
        stack = ExpertStack(self._engine.weights[product.slots[0]], scales, experts.weight)
        x = self._values[product.input].array
        out = self._values[product.output].array
        multiply = bind_experts(stream, stack, x, out, order, experts.shared)
        return [*steps, lambda sizes: multiply(sizes[rows])]

    def _group(self, group: Group) -> list[Step]:
        """Return the steps of the products of one input."""
        if group[0].experts is not None:
            steps = list[Step]()
            for product in group:
                if product.experts:
                    steps += self._products_of_experts(product, product.experts)
            return steps
        weight = self._engine.groups[group]
        rows = self._rows(group)
        x = self._values[group[0].input].array
        products = self._shared.products
        if not any(product.lora for product in group):
            outs = [self._values[product.output].array for product in group]
            if self._program.shares_buffer(group):
                outs = [outs[0].reshape(self._largest[rows], sum(product.out_features for product in group))]
            multiply = products.bind(weight, x, outs, self._quantized.get(group[0].input))
            return [lambda sizes: multiply(sizes[rows])]
        # With adapters one product gives x W and x A of all of them, in the columns after x W. A second kernel adds to
        # each row of x W the product of its adapter's columns and B, and writes the results of the group.
        wide_out = self._buffer(rows, *weight.out_features)
        multiply = products.bind(weight, x, [wide_out])
        shrunk = _columns_from(wide_out, sum(product.out_features for product in group))
        lora = next(product.lora for product in group if product.lora)
        rows_of_outputs = self._arrays[lora.rows] if lora.rows else None
        adapters = Adapters(self._arrays[IDS], rows_of_outputs, lora.rank)
        outs = [self._values[product.output].array for product in group]
        matrices: list[cuda.Array | None] = []
        for product in group:
            b = None
            if product.lora is not None:
                b = self._arrays[product.lora.b]
            matrices.append(b)
        expand = products.expand(StridedView.of(wide_out), shrunk, adapters, matrices, outs)
        return [lambda sizes: multiply(sizes[rows]), lambda sizes: expand(sizes[rows])]


def _columns_from(array: cuda.Array, column: int) -> StridedView:
    """Return the columns of [rows, columns] from one on."""
    rows, columns = array.shape
    return StridedView(array.reshape(rows * columns)[column:], columns)
