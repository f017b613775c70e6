"""An engine that is cut at its products with weights, bound and called as one: see `cut_engine` for its file.

It is used as a `program.TensorRTProgram` is. A call runs the plans of the pieces in order, and between them the
products of `products.Products`; what crosses a cut lies in buffers that all engines of a device share.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.artifacts.signature import IO
from lockstep.backends.tensorrt import cuda
from lockstep.backends.tensorrt.compat import Library, Tensor
from lockstep.backends.tensorrt.cut_engine import Shape, unpack
from lockstep.backends.tensorrt.device_weights import DeviceWeights, Form, Uploads
from lockstep.backends.tensorrt.products import SCALES_TIMES, Multiplier, Products, SmallWeight
from lockstep.backends.tensorrt.program import (
    Bound,
    Context,
    Shapes,
    TensorRTExecutable,
    TensorRTProgram,
    first_profile,
    run_once,
)
from lockstep.backends.tensorrt.rank_device import Device
from lockstep.errors import CheckError
from lockstep.onnx_tools.cut_products import Product
from lockstep.step.executable import Run
from lockstep.weights import Tensors

_HALF = np.dtype(np.float16)
_AS_HALF, _AS_SCALES = Form(_HALF), Form(_HALF, SCALES_TIMES)


class _Shared:
    """What all engines of a device share that run one after another: those of decode steps (`own`), or of prompts."""

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
        """fp16 [rows, *width], the `number`th of its width. Those given before stay valid."""
        key = number, *width
        array = self._buffers.get(key)
        if array is None or array.shape[0] < rows:
            array = self._buffers[key] = cuda.empty((rows, *width), _HALF, "the values of a step")
        return array[:rows]


@dataclass(eq=False, slots=True)
class CutContext:
    """The contexts of all pieces, with the shapes of their inputs, and sizes by the name of the dimension."""

    pieces: Sequence[tuple[Context, Shapes]]
    sizes: Mapping[str, int]


class CutProgram:
    """A cut engine on a rank's device, without weights. slots: of the whole."""

    def __init__(self, library: Library, engine_path: Path, slots: Sequence[IO], rank: int = 0):
        where = str(engine_path)
        self.library, self.path, self.device = library, engine_path, Device.get(rank)
        self.slots = {slot.name: (slot.sizes, slot.numpy_dtype) for slot in slots}
        self.cut = cut = unpack(engine_path.read_bytes(), where)
        weights = {product_slot for step in cut.steps if not isinstance(step, int) for product_slot in _slots(step)}
        self.pieces = []
        for plan in cut.plans:
            piece = TensorRTProgram(library, engine_path, (), rank, plan)
            piece.slots = {name: self.slots[name] for name in piece.tensors if name in self.slots}
            self.pieces.append(piece)
        missing = set(self.slots) - weights - {name for piece in self.pieces for name in piece.slots}
        if missing:
            raise CheckError(
                f"{where}: expected weight inputs {sorted(self.slots)}, found none for {sorted(missing)}; build the "
                "engines again"
            )
        known = {name: tensor for piece in self.pieces for name, tensor in piece.tensors.items()}
        self.tensors = {name: self._tensor(name, True, *told, known) for name, told in cut.inputs.items()}
        self.tensors |= {name: self._tensor(name, False, *told, known) for name, told in cut.outputs.items()}
        self.dynamic = {name for name, tensor in self.tensors.items() if tensor.is_input and -1 in tensor.shape}
        self._contexts: dict[tuple, CutContext] = {}

    def _tensor(self, name: str, is_input: bool, dtype: str, shape: Shape, known: Mapping[str, Tensor]) -> Tensor:
        bounds = tuple(tuple(map(tuple, each[name])) for each in self.cut.profiles if name in each)
        sizes = tuple(-1 if isinstance(size, str) else size for size in shape)
        return Tensor(name, is_input, known[name].dtype if name in known else np.dtype(dtype), sizes, bounds)

    def bind(self, weights: Tensors | None, slots: Mapping[str, Sequence[str]]) -> CutExecutable:
        """See `TensorRTProgram.bind`."""
        if set(slots) != set(self.slots):
            raise CheckError(
                f"{self.path}: expected weights for the slots {sorted(self.slots)}, found {sorted(slots)}; export and "
                "build again"
            )
        assert weights is not None  # a graph with products has slots
        self.device.use()
        store = DeviceWeights.of(weights, self.device)
        pieces = [piece.bind(weights, {slot: slots[slot] for slot in piece.slots}) for piece in self.pieces]
        small = {number: self._weight(store, weights, slots, step) for number, step in self._products()}
        return CutExecutable(self, pieces, small, store.uploads)

    def _products(self) -> list[tuple[int, tuple[Product, ...]]]:
        return [(number, step) for number, step in enumerate(self.cut.steps) if not isinstance(step, int)]

    def _weight(
        self, store: DeviceWeights, weights: Tensors, slots: Mapping[str, Sequence[str]], step: tuple[Product, ...]
    ) -> SmallWeight:
        """The weights of a step's products, one behind the other."""

        def put(part: int, form: Form | None) -> cuda.Array:
            own = [product.slots[part] for product in step]
            names = [name for slot in own for name in slots[slot]]
            _, *tail = self.slots[own[0]][0]
            rows = sum(self.slots[slot][0][0] for slot in own)
            where = f"{self.path}: slot {', '.join(own)}"
            return store.put(weights, names, (rows, *tail), self.slots[own[0]][1], where, form=form)

        first, outs = step[0], tuple(product.out_features for product in step)
        if first.bits == 16:
            data = put(0, _AS_HALF if self.slots[first.slots[0]][1] != _HALF else None)
            return SmallWeight(data, data, 16, 0, first.in_features, outs)
        return SmallWeight(put(0, None), put(1, _AS_SCALES), first.bits, first.group_size, first.in_features, outs)

    def profile_for(self, shapes: Mapping[str, Sequence[int]]) -> int:
        """See `TensorRTProgram.profile_for`."""
        return first_profile(self.cut.profiles, shapes, self.path)

    def context_for(self, shapes: Shapes, own: bool) -> CutContext:
        """See `TensorRTProgram.context_for`."""
        sizes = self.sizes(shapes)
        key = (own, *sorted(sizes.items()))
        if key not in self._contexts:
            if not own:
                self._contexts = {known: each for known, each in self._contexts.items() if known[0]}
            pieces = []
            for piece in self.pieces:
                given = {name: self.filled(name, sizes) for name in piece.tensors if name in piece.dynamic}
                pieces.append((piece.context_for(given, own), given))
            self._contexts[key] = CutContext(pieces, sizes)
        return self._contexts[key]

    def declared(self, name: str) -> Shape:
        """The shape of an input, of an output or of what crosses a cut."""
        told = self.cut.inputs.get(name) or self.cut.outputs.get(name)
        return told[1] if told else self.cut.inner[name]

    def sizes(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """The sizes of dimensions by name. shapes: of inputs and outputs."""
        return {
            dim: size
            for name, shape in shapes.items()
            for dim, size in zip(self.declared(name), shape)
            if isinstance(dim, str)
        }

    def filled(self, name: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of an input, of an output or of what crosses a cut, with sizes for its names."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.declared(name))


class CutExecutable:
    """A cut engine with its weights: see `TensorRTExecutable`. products: the weights by step."""

    adapter_rows: Mapping[str, cuda.Array] = {}

    def __init__(
        self,
        program: CutProgram,
        pieces: Sequence[TensorRTExecutable],
        weights: Mapping[int, SmallWeight],
        uploads: Uploads,
    ):
        self.program, self.uploads = program, uploads
        self._pieces, self._weights = pieces, weights

    def prepare(self, inputs: Mapping[str, cuda.Array], outputs: Mapping[str, cuda.Array], own: bool = False) -> Run:
        """See `TensorRTExecutable.prepare`."""
        shapes = {name: array.shape for name, array in inputs.items() if name in self.program.dynamic}
        bound, context = self._bind(inputs, outputs, own), self.program.context_for(shapes, own)
        return lambda: bound(context, shapes)

    def bind(self, inputs: Mapping[str, cuda.Array], outputs: Mapping[str, cuda.Array]) -> Bound:
        """See `TensorRTExecutable.bind`."""
        return self._bind(inputs, outputs, False)

    def _bind(self, inputs: Mapping[str, cuda.Array], outputs: Mapping[str, cuda.Array], own: bool) -> Bound:
        program, cut = self.program, self.program.cut
        given = {**inputs, **outputs}
        if set(program.tensors) != set(given):
            raise CheckError(f"{program.path}: expected arrays for {sorted(program.tensors)}, found {sorted(given)}")
        for name, array in given.items():
            expected = program.tensors[name].dtype
            if array.dtype != expected:
                raise CheckError(f"{program.path}: {name!r}: expected {expected.name}, found {array.dtype.name}")
        shared, largest = _Shared.of(program.device, own), program.sizes({name: a.shape for name, a in given.items()})
        values, counts = dict(given), dict[tuple[int, ...], int]()
        for name, shape in cut.inner.items():
            width = tuple(int(size) for size in shape[1:])
            counts[width] = counts.get(width, 0) + 1
            values[name] = shared.buffer(counts[width], largest[str(shape[0])], width)
        steps: list[tuple[int, Bound] | tuple[Multiplier, str, cuda.Array, list[cuda.Array]]] = []
        for number, step in enumerate(cut.steps):
            if isinstance(step, int):
                piece, engine = self._pieces[step], program.pieces[step]
                own_values = {name: values[name] for name in engine.tensors if name not in engine.slots}
                takes = {name: a for name, a in own_values.items() if engine.tensors[name].is_input}
                gives = {name: a for name, a in own_values.items() if name not in takes}
                steps.append((step, piece.bind(takes, gives)))
            else:
                rows = str(program.declared(step[0].input)[0])
                outs = [values[product.output] for product in step]
                steps.append((shared.products.bind(self._weights[number]), rows, values[step[0].input], outs))

        def run(context: CutContext, shapes: Shapes) -> None:
            for step in steps:
                if len(step) == 2:
                    number, call = step
                    call(*context.pieces[number])
                else:
                    multiply, rows, x, outs = step
                    multiply(context.sizes[rows], x, outs)

        return run

    def run_once(self, inputs: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `TensorRTExecutable.run_once`."""
        return run_once(self, self.program.device, self.program.tensors, inputs, like)


def _slots(step: tuple[Product, ...]) -> list[str]:
    return [slot for product in step for slot in product.slots]
