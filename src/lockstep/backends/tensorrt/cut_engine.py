"""The engine file of a graph that is cut at its products with weights.

It has the pieces and the order in which they run. A piece is a kernel in CUDA C++ (`row_kernels`), or where it has none
an engine plan.

Layout: `MAGIC`, the length of the header (8 bytes, little endian), the header (JSON), and the engine plans one after
another. The header: `inputs` and `outputs` {name: [dtype, shape]} of the whole, `inner` {name: shape} of what crosses a
cut (float16), `profiles` [{input: [min, opt, max]}], `steps` (a piece's number, or products), `pieces` (a kernel, or
the bytes of an engine plan).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from lockstep.artifacts.adapters import A_SUFFIX, B_SUFFIX, IDS
from lockstep.backends.profiles import profiles
from lockstep.backends.tensorrt.row_kernels import RowKernel, row_kernel
from lockstep.errors import CheckError
from lockstep.onnx_tools.cut_products import CutGraph, Product, cut_products, run_cut
from lockstep.onnx_tools.half_activations import halve_activations
from lockstep.onnx_tools.lower_opset import lower
from lockstep.onnx_tools.metrics import max_abs_error, peak
from lockstep.onnx_tools.prepare import random_inputs
from lockstep.onnx_tools.sessions import open_session
from lockstep.onnx_tools.signature import dtype_name
from lockstep.targets import Limits
from lockstep.weights.groups import dequantize

MAGIC = b"lockstep.cut_engine/2\n"
# As of fp16 engines in `onnx_tools.prepare`, of what is rounded between pieces too.
_TOLERANCE = 1e-2
Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class CutEngine:
    """A cut engine file's content.

    inputs, outputs: {name: (dtype, shape)} of all but weights; a dimension is a number or a name. inner: {name: shape}
    of what crosses a cut. steps: a piece's number, or products.
    """

    inputs: Mapping[str, tuple[str, Shape]]
    outputs: Mapping[str, tuple[str, Shape]]
    inner: Mapping[str, Shape]
    profiles: Sequence[Mapping[str, Sequence[Sequence[int]]]]
    steps: Sequence[int | tuple[Product, ...]]
    pieces: Sequence[bytes | RowKernel]


@dataclass(frozen=True)
class CutBlock:
    """A graph that was cut.

    pieces: kernels, and graphs to be built.
    """

    graph: CutGraph
    pieces: tuple[RowKernel | onnx.ModelProto, ...]


def cuts(model: onnx.ModelProto) -> bool:
    """Return whether a float16 graph has products and kernels for all else."""
    if any(
        value.type.tensor_type.elem_type == TensorProto.FLOAT for value in (*model.graph.input, *model.graph.output)
    ):
        return False
    try:
        cut = cut_products(model)
    except CheckError:
        return False
    products = any(not isinstance(step, int) for step in cut.steps)
    return products and all(row_kernel(piece, "piece") for piece in cut.pieces)


def prepare_pieces(model: onnx.ModelProto, opset: int | None) -> CutBlock:
    """Cut a float16 graph, or a float32 graph of quantised products, at its products.

    What crosses cuts is float16. Pieces without a kernel are to be built, in `opset`.

    Raises CheckError for zero points of their own, which the kernels do not read, and where the pieces with the
    products between them give something else than the graph does.
    """
    cut = cut_products(model)
    for product in (each for step in cut.steps if not isinstance(step, int) for each in step):
        if len(product.slots) > 2:
            raise CheckError(
                f"graph {model.graph.name}: expected quantised weights whose zero points are the middle, found "
                f"{product.slots[2]!r}; this backend takes no zero points, use the backend onnxruntime"
            )
    pieces, built = list[onnx.ModelProto](), list[RowKernel | onnx.ModelProto]()
    for number, piece in enumerate(cut.pieces):
        halve_activations(piece)
        kernel = row_kernel(piece, f"piece_{number}")
        pieces.append(piece if kernel or opset is None else lower(piece, opset))
        built.append(kernel or pieces[-1])
    made_of = CutGraph(tuple(pieces), cut.steps, cut.inner)
    _check_same(model, made_of)
    return CutBlock(made_of, tuple(built))


def _check_same(model: onnx.ModelProto, cut: CutGraph) -> None:
    feeds = random_inputs(model)
    for product in (each for step in cut.steps if not isinstance(step, int) for each in step):
        if product.bits < 16:  # weights as large as of full precision
            scales = feeds[product.slots[1]]
            feeds[product.slots[1]] = scales * np.float32(product.group_size**-0.5 / (1 << product.bits - 1))
    session = open_session(model.SerializeToString())
    names = [value.name for value in session.get_outputs()]
    expected = dict(zip(names, session.run(None, feeds)))
    sessions = [open_session(piece.SerializeToString()) for piece in cut.pieces]

    def run_piece(number: int, values: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        own = sessions[number]
        half = lambda array: array.astype(np.float16) if array.dtype == np.float32 else array
        given = {value.name: half(values[value.name]) for value in own.get_inputs()}
        return dict(zip([value.name for value in own.get_outputs()], own.run(None, given)))

    found = run_cut(cut.steps, feeds, run_piece, multiply)
    for name in names:
        allowed = _TOLERANCE * peak(expected[name])
        error = max_abs_error(expected[name], found[name].astype(np.float64))
        if not error <= allowed:
            raise CheckError(
                f"graph {model.graph.name}: output {name}: expected the pieces and products to give the same within "
                f"{allowed:.1e}, found {error:.1e}; please report it"
            )


def multiply(product: Product, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return a product in NumPy, of float16 rows, with its result in float16.

    values: by name.
    """
    half = lambda array: array.astype(np.float16).astype(np.float32)
    rows, parts = half(values[product.input]), [values[slot] for slot in product.slots]
    weight = parts[0] if product.bits == 16 else dequantize(parts[0], parts[1], product.group_size, *parts[2:])
    exact = half(rows @ half(weight).T)
    if (lora := product.lora) is not None:
        ids = values[IDS][values[lora.rows]] if lora.rows else values[IDS]
        own = np.arange(lora.columns) // lora.rank == ids[:, None]
        exact += np.where(own, half(rows @ half(values[lora.a])), 0) @ half(values[lora.b])
    return exact.astype(np.float16)


def pack(model: onnx.ModelProto, cut: CutGraph, pieces: Sequence[bytes | RowKernel], limits: Limits) -> bytes:
    """Return the engine file of a graph that was cut.

    limits: those that the profiles of the engine plans are made for.
    """
    slots = {slot for step in cut.steps if not isinstance(step, int) for product in step for slot in product.slots}
    shape = lambda value: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
    half = lambda dtype: "float16" if dtype == "float32" else dtype
    told = lambda values: {
        value.name: [half(dtype_name(value.type.tensor_type.elem_type)), shape(value)]
        for value in values
        if value.name not in slots
        and not value.name.endswith(A_SUFFIX)
        and (value.name.endswith(B_SUFFIX) or not all(isinstance(size, int) for size in shape(value)))
    }
    header = {
        "inputs": told(model.graph.input),
        "outputs": told(model.graph.output),
        "inner": {name: list(sizes) for name, sizes in cut.inner.items()},
        "profiles": [
            {name: list(map(list, sizes)) for name, sizes in each.items()} for each in profiles(model, limits)
        ],
        "steps": [step if isinstance(step, int) else [product.to_json() for product in step] for step in cut.steps],
        "pieces": [len(piece) if isinstance(piece, bytes) else piece.to_json() for piece in pieces],
    }
    text, plans = json.dumps(header, sort_keys=True).encode(), [each for each in pieces if isinstance(each, bytes)]
    return b"".join([MAGIC, len(text).to_bytes(8, "little"), text, *plans])


def is_cut(data: bytes) -> bool:
    return data.startswith(MAGIC)


def unpack(data: bytes, where: str) -> CutEngine:
    """Return the content of a cut engine file.

    Raises CheckError for a file that is not whole.
    """
    start = len(MAGIC) + 8
    end = start + int.from_bytes(data[len(MAGIC) : start], "little")
    try:
        header = json.loads(data[start:end])
        told = header["pieces"]
    except (ValueError, KeyError) as error:
        raise CheckError(f"{where}: expected the pieces of an engine, found {error}; build it again") from None
    whole = end + sum(each for each in told if isinstance(each, int))
    if len(data) != whole:
        raise CheckError(f"{where}: expected {whole} bytes, found {len(data)} bytes; build it again")
    pieces: list[bytes | RowKernel] = []
    for each in told:
        if isinstance(each, int):
            pieces.append(data[end : end + each])
            end += each
        else:
            pieces.append(RowKernel.from_json(each))
    named = lambda values: {name: (dtype, tuple(shape)) for name, (dtype, shape) in values.items()}
    return CutEngine(
        named(header["inputs"]),
        named(header["outputs"]),
        {name: tuple(shape) for name, shape in header["inner"].items()},
        header["profiles"],
        [step if isinstance(step, int) else tuple(map(Product.from_json, step)) for step in header["steps"]],
        pieces,
    )


def plans_of(data: bytes, where: str) -> Sequence[bytes]:
    """Return the engine plans of an engine file.

    A file that is not cut is one itself.
    """
    return [piece for piece in unpack(data, where).pieces if isinstance(piece, bytes)] if is_cut(data) else [data]
