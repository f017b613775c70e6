"""A cut engine, bound and called as one: see `cut_engine` for its file.

It is used as a `program.TensorRTProgram` is. A call runs the pieces in order, kernels and engine plans, and between
them the products of `products.Products`, with what adapters add to them. What crosses a cut lies in buffers that all
engines of a device share.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.artifacts.adapters import IDS
from lockstep.artifacts.signature import IO
from lockstep.backends.tensorrt import cuda
from lockstep.backends.tensorrt.compat import Library, Tensor
from lockstep.backends.tensorrt.cut_engine import Shape, unpack
from lockstep.backends.tensorrt.device_weights import DeviceWeights, Uploads, WeightCast
from lockstep.backends.tensorrt.products import SCALES_TIMES, Adapters, Products, SmallWeight, StridedView
from lockstep.backends.tensorrt.program import Bound, Context, Shapes, TensorRTExecutable, TensorRTProgram, run_once
from lockstep.backends.tensorrt.rank_device import Device
from lockstep.backends.tensorrt.row_kernels import INDEX, PRELUDE, ROWS, WEIGHT, RowKernel
from lockstep.errors import CheckError
from lockstep.onnx_tools.cut_products import Product
from lockstep.step.executable import Run
from lockstep.weights import Tensors

_HALF = np.dtype(np.float16)
_AS_HALF, _AS_SCALES = WeightCast(_HALF), WeightCast(_HALF, SCALES_TIMES)
Group = tuple[Product, ...]  # products of one input


class _Shared:
    """Products and buffers that the engines of a device share.

    They are of engines that run one after another: those of decode steps (`own`), or of prompts.
    """

    _instances: weakref.WeakKeyDictionary[Device, dict[bool, _Shared]] = weakref.WeakKeyDictionary()

    def __init__(self, device: Device):
        self.products = Products(device.stream)
        self._buffers: dict[tuple, cuda.Array] = {}

    @classmethod
    def of(cls, device: Device, own: bool) -> _Shared:
        known = cls._instances.setdefault(device, {})
        if own not in known:
            known[own] = cls(device)
        return known[own]

    def buffer(self, number: int, rows: int, width: Sequence[int]) -> cuda.Array:
        """Return fp16 [rows, *width], the `number`th buffer of its width.

        Buffers given before stay valid.
        """
        key = number, *width
        array = self._buffers.get(key)
        if array is None or array.shape[0] < rows:
            array = self._buffers[key] = cuda.empty((rows, *width), _HALF, "the values of a step")
        return array[:rows]


@dataclass(eq=False, slots=True)
class CutContext:
    """The contexts of the engine plans, and sizes by the name of the dimension.

    plans: by number of the piece, with the shapes of the plan's inputs.
    """

    plans: Mapping[int, tuple[Context, Shapes]]
    sizes: Mapping[str, int]


class CutProgram:
    """A cut engine on a rank's device, without weights.

    slots: of the whole.
    """

    by_profiles = False  # its products take as long as their size says

    def __init__(self, library: Library, engine_path: Path, slots: Sequence[IO], rank: int = 0):
        where = str(engine_path)
        self.library, self.path, self.device = library, engine_path, Device.get(rank)
        self.slots = {slot.name: (slot.sizes, slot.numpy_dtype) for slot in slots}
        self.cut = cut = unpack(engine_path.read_bytes(), where)
        weights = {product_slot for group in self.groups() for product_slot in _slots(group)}
        self.plans: dict[int, TensorRTProgram] = {}
        self.kernels = {number: piece for number, piece in enumerate(cut.pieces) if isinstance(piece, RowKernel)}
        self.functions = self._compiled()
        for number, piece in enumerate(cut.pieces):
            if isinstance(piece, bytes):
                plan = self.plans[number] = TensorRTProgram(library, engine_path, (), rank, piece)
                plan.slots = {name: self.slots[name] for name in plan.tensors if name in self.slots}
                weights |= set(plan.slots)
        weights |= {name for kernel in self.kernels.values() for name, kind in kernel.arguments if kind == WEIGHT}
        missing = set(self.slots) - weights
        if missing:
            raise CheckError(
                f"{where}: expected weight inputs {sorted(self.slots)}, found none for {sorted(missing)}; build the "
                "engines again"
            )
        known = {name: tensor for plan in self.plans.values() for name, tensor in plan.tensors.items()}
        self.tensors = {name: self._tensor(name, True, *told, known) for name, told in cut.inputs.items()}
        self.tensors |= {name: self._tensor(name, False, *told, known) for name, told in cut.outputs.items()}
        self.dynamic = {name for name, tensor in self.tensors.items() if tensor.is_input and -1 in tensor.shape}
        self.side_by_side = {number for number, group in enumerate(cut.steps) if self._beside(group)}
        self._contexts: dict[tuple, CutContext] = {}

    def _compiled(self) -> dict[str, cuda.Kernel]:
        """Compile the kernels; return them by name."""
        if not self.kernels:
            return {}
        self.device.use()
        module = cuda.compile_kernels(PRELUDE + "".join(kernel.source for kernel in self.kernels.values()))
        return {kernel.name: module[kernel.name] for kernel in self.kernels.values()}

    def groups(self) -> list[Group]:
        """Return the products, in the order in which they run."""
        return [step for step in self.cut.steps if not isinstance(step, int)]

    def _beside(self, step: int | Group) -> bool:
        """Return whether the results of a group may lie beside each other in one buffer.

        They may where kernels alone read all of them.
        """
        if isinstance(step, int) or len(step) < 2:
            return False
        made = {product.output for product in step}
        by_plans = {name for plan in self.plans.values() for name in plan.tensors}
        by_products = {product.input for group in self.groups() for product in group}
        return made.isdisjoint({*self.cut.outputs, *by_plans, *by_products})

    def _tensor(self, name: str, is_input: bool, dtype: str, shape: Shape, known: Mapping[str, Tensor]) -> Tensor:
        bounds = tuple(tuple(map(tuple, each[name])) for each in self.cut.profiles if name in each)
        sizes = tuple(-1 if isinstance(size, str) else size for size in shape)
        if dtype == "int64" and not self.library.has("int64"):  # as plans have them
            dtype = "int32"
        return Tensor(name, is_input, known[name].dtype if name in known else np.dtype(dtype), sizes, bounds)

    def bind(self, weights: Tensors | None, slots: Mapping[str, Sequence[str]]) -> CutExecutable:
        """Return the engine with its weights: see `TensorRTProgram.bind`."""
        if set(slots) != set(self.slots):
            raise CheckError(
                f"{self.path}: expected weights for the slots {sorted(self.slots)}, found {sorted(slots)}; export and "
                "build again"
            )
        assert weights is not None  # a graph with products has slots
        self.device.use()
        store = _Store(self, DeviceWeights.of(weights, self.device), weights, slots)
        plans = {
            number: plan.bind(weights, {slot: slots[slot] for slot in plan.slots})
            for number, plan in self.plans.items()
        }
        rows: dict[str, cuda.Array] = {}
        groups = {
            number: store.group(step, number in self.side_by_side, rows)
            for number, step in enumerate(self.cut.steps)
            if not isinstance(step, int)
        }
        own = {name for kernel in self.kernels.values() for name, kind in kernel.arguments if kind == WEIGHT}
        return CutExecutable(self, plans, groups, {name: store.plain(name) for name in own}, store.uploads, rows)

    def context_for(self, shapes: Shapes, own: bool) -> CutContext:
        """Return a context for these input shapes: see `TensorRTProgram.context_for`."""
        sizes = self.sizes(shapes)
        key = (own, *sorted(sizes.items()))
        if key not in self._contexts:
            if not own:
                self._contexts = {known: each for known, each in self._contexts.items() if known[0]}
            plans = {}
            for number, plan in self.plans.items():
                given = {name: self.filled(name, sizes) for name in plan.tensors if name in plan.dynamic}
                plans[number] = plan.context_for(given, own), given
            self._contexts[key] = CutContext(plans, sizes)
        return self._contexts[key]

    def declared(self, name: str) -> Shape:
        """Return the shape of an input, of an output or of what crosses a cut."""
        told = self.cut.inputs.get(name) or self.cut.outputs.get(name)
        return told[1] if told else self.cut.inner[name]

    def sizes(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Return the sizes of dimensions by name.

        shapes: of inputs and outputs.
        """
        return {
            dim: size
            for name, shape in shapes.items()
            for dim, size in zip(self.declared(name), shape)
            if isinstance(dim, str)
        }

    def filled(self, name: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return a declared shape with sizes in place of its dimensions' names."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.declared(name))


class _Store:
    """The weights of a cut engine on its device."""

    def __init__(self, program: CutProgram, store: DeviceWeights, weights: Tensors, slots: Mapping[str, Sequence[str]]):
        self._program, self._store, self._weights, self._names = program, store, weights, slots
        self.uploads = store.uploads

    def plain(self, slot: str) -> cuda.Array:
        """Return a weight that kernels read, in fp16."""
        return self._put([slot], self._program.slots[slot][0], self._cast(slot))

    def group(self, group: Group, beside: bool, rows: dict[str, cuda.Array]) -> SmallWeight:
        """Return the weights of a group's products, one behind the other.

        With adapters A is further rows of them, transposed. rows: gets where these go.
        """
        first, outs = group[0], tuple(product.out_features for product in group)
        columns = {product.lora.a: product.lora.columns for product in group if product.lora is not None}
        more, whole, deep = sum(columns.values()), sum(outs), first.in_features
        if first.bits < 16:  # a set with quantised weights takes no adapters
            data, scales = self._part(group, 0, None, None), self._part(group, 1, None, _AS_SCALES)
            together = (whole,) if beside else outs
            return SmallWeight(data, scales, first.bits, first.group_size, deep, together)
        data = self._part(group, 0, (whole + more, deep), self._cast(first.slots[0]), room=bool(more))
        at = whole
        for name, count in columns.items():
            rows[name] = data[at : at + count]
            at += count
        return SmallWeight(data, data, 16, 0, deep, (whole + more,) if beside or more else outs)

    def _part(
        self, group: Group, part: int, shape: tuple[int, ...] | None, cast: WeightCast | None, room: bool = False
    ) -> cuda.Array:
        slots = [product.slots[part] for product in group]
        sizes = [self._program.slots[slot][0] for slot in slots]
        return self._put(slots, shape or (sum(rows for rows, *_ in sizes), *sizes[0][1:]), cast, room)

    def _put(
        self, slots: Sequence[str], shape: Sequence[int], cast: WeightCast | None, room: bool = False
    ) -> cuda.Array:
        names = [name for slot in slots for name in self._names[slot]]
        where, dtype = f"{self._program.path}: slot {', '.join(slots)}", self._program.slots[slots[0]][1]
        return self._store.put(self._weights, names, tuple(shape), dtype, where, room=room, cast=cast)

    def _cast(self, slot: str) -> WeightCast | None:
        return _AS_HALF if self._program.slots[slot][1] != _HALF else None


class CutExecutable:
    """A cut engine with its weights: see `TensorRTExecutable`.

    groups: the weights of products, by step. weights: those that kernels read. adapter_rows: see `HasAdapterRows`.
    """

    def __init__(
        self,
        program: CutProgram,
        plans: Mapping[int, TensorRTExecutable],
        groups: Mapping[int, SmallWeight],
        weights: Mapping[str, cuda.Array],
        uploads: Uploads,
        adapter_rows: Mapping[str, cuda.Array],
    ):
        self.program, self.uploads, self.adapter_rows = program, uploads, adapter_rows
        self._plans, self._groups, self._weights = plans, groups, weights

    def prepare(self, inputs: Mapping[str, cuda.Array], outputs: Mapping[str, cuda.Array], own: bool = False) -> Run:
        """Return a call of the engine: see `TensorRTExecutable.prepare`."""
        shapes = {name: array.shape for name, array in inputs.items() if name in self.program.dynamic}
        bound, context = self._bind(inputs, outputs, own), self.program.context_for(shapes, own)
        return lambda: bound(context, shapes)

    def bind(self, inputs: Mapping[str, cuda.Array], outputs: Mapping[str, cuda.Array]) -> Bound:
        """Return a call on arrays of the largest sizes: see `TensorRTExecutable.bind`."""
        return self._bind(inputs, outputs, False)

    def _bind(self, inputs: Mapping[str, cuda.Array], outputs: Mapping[str, cuda.Array], own: bool) -> Bound:
        program = self.program
        given = {**inputs, **outputs}
        if set(program.tensors) != set(given):
            raise CheckError(f"{program.path}: expected arrays for {sorted(program.tensors)}, found {sorted(given)}")
        for name, array in given.items():
            expected = program.tensors[name].dtype
            if array.dtype != expected:
                raise CheckError(f"{program.path}: {name!r}: expected {expected.name}, found {array.dtype.name}")
        steps = _Call(self, given, own).steps

        def run(context: CutContext, shapes: Shapes) -> None:
            for step in steps:
                step(context)

        return run

    def run_once(self, inputs: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs for `inputs`: see `TensorRTExecutable.run_once`."""
        return run_once(self, self.program.device, self.program.tensors, inputs, like)


Step = Callable[[CutContext], None]


class _Call:
    """The steps of an executable on arrays."""

    def __init__(self, run: CutExecutable, given: Mapping[str, cuda.Array], own: bool):
        self._run, self._program, cut = run, run.program, run.program.cut
        self._shared = _Shared.of(run.program.device, own)
        self._largest = run.program.sizes({name: array.shape for name, array in given.items()})
        self._given, self._counts = given, dict[tuple[int, ...], int]()
        self._values = {name: StridedView.of(array) for name, array in given.items()}
        for number in sorted(run.program.side_by_side):
            step = cut.steps[number]
            assert not isinstance(step, int)
            if not any(product.lora for product in step):
                self._put_beside(step)
        for name, shape in cut.inner.items():
            if name not in self._values:
                self._values[name] = StridedView.of(self._buffer(str(shape[0]), *(int(size) for size in shape[1:])))
        self.steps: list[Step] = []
        for number, step in enumerate(cut.steps):
            if not isinstance(step, int):
                self.steps += self._group(step, run._groups[number], number in run.program.side_by_side)
            elif step in run.program.kernels:
                self.steps.append(self._kernel(run.program.kernels[step]))
            else:
                self.steps.append(self._plan(step))

    def _buffer(self, rows: str, *width: int) -> cuda.Array:
        self._counts[width] = self._counts.get(width, 0) + 1
        return self._shared.buffer(self._counts[width], self._largest[rows], width)

    def _put_beside(self, group: Group) -> None:
        """Give a group's results one buffer."""
        total, at = sum(product.out_features for product in group), 0
        whole = self._buffer(self._rows(group), total)
        for product in group:
            self._values[product.output] = _part_of(whole, at)
            at += product.out_features

    def _rows(self, group: Group) -> str:
        return str(self._program.declared(group[0].input)[0])

    def _plan(self, number: int) -> Step:
        program, values = self._program.plans[number], self._values
        own = {name: values[name].array for name in program.tensors if name not in program.slots}
        takes = {name: array for name, array in own.items() if program.tensors[name].is_input}
        gives = {name: array for name, array in own.items() if name not in takes}
        call = self._run._plans[number].bind(takes, gives)
        return lambda context: call(*context.plans[number])

    def _kernel(self, kernel: RowKernel) -> Step:
        arguments: list[cuda.Array | int] = []
        for name, kind in kernel.arguments:
            if kind == WEIGHT:
                arguments.append(self._run._weights[name])
                continue
            view = self._values[name]
            arguments += [view.array, view.stride if kind == ROWS else int(view.array.dtype.itemsize == 8)]
            assert kind in (ROWS, INDEX)
        for name in kernel.outputs:
            arguments += [self._values[name].array, self._values[name].stride]
        stream = self._program.device.stream
        launch = cuda.Launch(self._program.functions[kernel.name], stream, kernel.threads, *arguments, overlaps=True)
        rows, blocks = kernel.rows, kernel.blocks
        return lambda context: launch(context.sizes[rows] * blocks)

    def _group(self, group: Group, weight: SmallWeight, beside: bool) -> list[Step]:
        rows, x, products = self._rows(group), self._values[group[0].input].array, self._shared.products
        if not any(product.lora for product in group):
            outs = [self._values[product.output].array for product in group]
            if beside:
                outs = [outs[0].reshape(self._largest[rows], sum(product.out_features for product in group))]
            multiply = products.bind(weight, x, outs)
            return [lambda context: multiply(context.sizes[rows])]
        made = self._buffer(rows, *weight.out_features)
        multiply = products.bind(weight, x, [made])
        calls: list[Step] = [lambda context: multiply(context.sizes[rows])]
        shrunk = _part_of(made, sum(product.out_features for product in group))
        lora = next(product.lora for product in group if product.lora)
        adapters = Adapters(self._given[IDS], self._given[lora.rows] if lora.rows else None, lora.rank)
        outs = [self._values[product.output].array for product in group]
        matrices = [self._given[product.lora.b] if product.lora else None for product in group]
        expand = products.expand(StridedView.of(made), shrunk, adapters, matrices, outs)
        return [*calls, lambda context: expand(context.sizes[rows])]


def _part_of(whole: cuda.Array, column: int) -> StridedView:
    """Return the columns of [rows, columns] from one on."""
    rows, columns = whole.shape
    return StridedView(whole.reshape(rows * columns)[column:], columns)


def _slots(group: Group) -> list[str]:
    return [slot for product in group for slot in product.slots]
