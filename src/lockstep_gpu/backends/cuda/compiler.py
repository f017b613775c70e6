"""Compile a block: cut its graph at its products, and write a kernel for each piece between them.

In: a graph of float16 or bfloat16, or a float32 graph of quantised products, whose activations become float16, or the
type that it declares; a hidden state in float32 stays so (residual.py). Out: the kernels and products. Their results
are compared with those of the graph first, both in float32 on the CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx

from lockstep.artifacts.adapters import A_SUFFIX, B_SUFFIX, IDS
from lockstep.artifacts.signature import IO
from lockstep.errors import CheckError
from lockstep.onnx_tools.chosen_experts import ChosenExperts
from lockstep.onnx_tools.cut_products import CutGraph, cut_products
from lockstep.onnx_tools.expert_products import FewExperts
from lockstep.onnx_tools.judge import Bound, measure, peak, wrong
from lockstep.onnx_tools.prepare import random_inputs
from lockstep.onnx_tools.products import Experts, Product
from lockstep.onnx_tools.sessions import compute, open_session
from lockstep.onnx_tools.signature import declared_activations, signature_of
from lockstep.onnx_tools.toolkit import run_passes
from lockstep.onnx_tools.widened import in_float32, widened
from lockstep.tolerances import KERNELS
from lockstep.weights import e4m3
from lockstep.weights.groups import dequantize
from lockstep.weights.mxfp4 import mxfp4_numbers
from lockstep_gpu.backends.cuda.kernels_file import BlockStep, KernelsFile, Shape
from lockstep_gpu.backends.cuda.residual import residual_stream, with_copies
from lockstep_gpu.kernels.row_operators import row_kernel

_EXPERT_GROUPS = 32  # columns that a kernel takes at once
_EXPERTS_TRIED = 8  # with random weights in the comparison: those of all experts are gigabytes
_FLOAT = onnx.TensorProto.FLOAT
_FP8_ALIGNED = 16  # columns: each row of fp8 weights starts at an address that 16 divides


def compile_block(model: onnx.ModelProto, is_fp32: bool = False) -> KernelsFile:
    """Return the kernels and products of a graph. is_fp32: activations are float32, too.

    Raises CheckError for an operator without a kernel, for zero points that are inputs, which the kernels do not read,
    and where the results of kernels and products differ from the graph's.
    """
    dtype = declared_activations(model) or "float16"
    if is_fp32:
        dtype = "float32"
    elif widened(model) is not model:
        dtype = "bfloat16"
    # Kernels compute in float32, so the graph that they are generated from and compared with does, too.
    float32_model = run_passes(in_float32(model), ChosenExperts())
    try:
        cut = cut_products(float32_model)
        slots = set[str]()
        for product in _products(cut):
            slots.update(product.slots)
        signature = signature_of(model.graph, slots)
        if is_fp32:
            stream = set[str]()
            float32_names = _floats(cut)
        else:
            stream = residual_stream(float32_model, signature)
            cut = with_copies(_with_float32_products(cut, model), stream, signature)
            float32_names = stream | _float32_weights(model.graph)
            float32_names.update(product.output for product in _products(cut) if product.is_float32)
        quantized = {product.input for product in _products(cut) if product.is_fp8}
        kernels = [
            row_kernel(piece, f"piece_{number}", quantized, float32_names) for number, piece in enumerate(cut.pieces)
        ]
    except CheckError as error:
        raise CheckError(f"{error}; use the backend tensorrt, which compiles any operator") from None
    _check_products(cut, model.graph.name)
    _check_same(float32_model, cut)
    steps = []
    for step in cut.steps:
        if isinstance(step, int):
            steps.append(BlockStep(kernel=kernels[step]))
        else:
            steps.append(BlockStep(products=tuple(step)))
    inputs = _declared_types(filter(_is_activation, signature.inputs), dtype, stream)
    outputs = _declared_types(signature.outputs, dtype, stream)
    return KernelsFile(inputs, outputs, cut.inner, tuple(steps), dtype)


def _check_products(cut: CutGraph, name: str) -> None:
    """Raise CheckError for products whose sizes or zero points the kernels do not take."""
    for product in _products(cut):
        if product.is_fp8 and product.in_features % _FP8_ALIGNED:
            raise CheckError(
                f"graph {name}: expected rows of weights of a multiple of {_FP8_ALIGNED} numbers in w8a8-fp8, "
                f"found {product.in_features}; use the backend onnxruntime, or fp16"
            )
        if product.experts is not None and product.group_size % _EXPERT_GROUPS:
            raise CheckError(
                f"graph {name}: expected experts in groups of a multiple of {_EXPERT_GROUPS} numbers, found groups of "
                f"{product.group_size}; choose another group_size, the backend onnxruntime, or fp16"
            )
        if len(product.slots) > 2:
            raise CheckError(
                f"graph {name}: expected quantised weights whose zero points are the middle, found "
                f"{product.slots[2]!r}; this backend takes no zero points, use the backend onnxruntime"
            )


def _float32_weights(graph: onnx.GraphProto) -> set[str]:
    """Return the weights that a graph of 16 bits has in float32, as transformers keeps the biases of some routers."""
    inputs = signature_of(graph).inputs
    if all(io.dtype not in ("float16", "bfloat16") for io in inputs):
        return set()
    return {io.name for io in inputs if io.dtype == "float32" and not _is_activation(io)}


def _floats(cut: CutGraph) -> set[str]:
    """Return the inputs and outputs of pieces that are floats."""
    names = set[str]()
    for piece in cut.pieces:
        values = (*piece.graph.input, *piece.graph.output)
        names.update(value.name for value in values if value.type.tensor_type.elem_type == _FLOAT)
    return names


def _with_float32_products(cut: CutGraph, model: onnx.ModelProto) -> CutGraph:
    """Mark the products that a graph of 16 bits has in float32, as separate steps: routers, in most cases."""
    inferred = onnx.shape_inference.infer_shapes(model)
    if not any(io.dtype in ("float16", "bfloat16") for io in signature_of(model.graph).inputs):
        return cut
    wide = {value.name for value in inferred.graph.value_info if value.type.tensor_type.elem_type == _FLOAT}
    steps = list[int | tuple[Product, ...]]()
    for step in cut.steps:
        if isinstance(step, int):
            steps.append(step)
            continue
        marked = [replace(product, is_float32=product.bits == 16 and product.output in wide) for product in step]
        for is_float32 in (False, True):
            if group := tuple(product for product in marked if product.is_float32 == is_float32):
                steps.append(group)
    return replace(cut, steps=tuple(steps))


def _products(cut: CutGraph) -> list[Product]:
    products = list[Product]()
    for step in cut.steps:
        if not isinstance(step, int):
            products += step
    return products


def _is_activation(io: IO) -> bool:
    """Return whether an input is no weight; A of adapters is rows of one."""
    if io.name.endswith(A_SUFFIX):
        return False
    return io.name.endswith(B_SUFFIX) or not all(isinstance(size, int) for size in io.shape)


def _declared_types(ios: Iterable[IO], dtype: str, wide: Collection[str]) -> dict[str, tuple[str, Shape]]:
    """Return {name: (dtype, shape)}; wide: those that stay float32, where others get `dtype`."""
    types = {}
    for io in ios:
        is_narrowed = io.dtype == "float32" and io.name not in wide
        types[io.name] = (dtype if is_narrowed else io.dtype, io.shape)
    return types


def _check_same(model: onnx.ModelProto, cut: CutGraph) -> None:
    """Run a float32 graph and its pieces and products, which round nothing here, on the same random numbers."""
    choices = {product.experts.ids for product in _products(cut) if product.experts is not None}
    if choices:
        model = run_passes(model, FewExperts(_EXPERTS_TRIED))
    feeds = random_inputs(model)
    for product in _products(cut):
        # Random scales are replaced by small ones: large activations would hide an error below the tolerance.
        if product.experts is not None and product.experts.weight.kind == "mxfp4":
            feeds[product.slots[1]] = feeds[product.slots[1]] % 4 + 118  # exponents of numbers below 1
        elif product.bits < 16 and not product.is_fp8:
            scales = feeds[product.slots[1]]
            feeds[product.slots[1]] = scales * np.float32(product.group_size**-0.5 / (1 << product.bits - 1))
    expected = compute(model, feeds)
    sessions = [open_session(piece.SerializeToString()) for piece in cut.pieces]
    results = dict(feeds)
    for step in cut.steps:
        if isinstance(step, int):
            session = sessions[step]
            inputs = {value.name: results[value.name] for value in session.get_inputs()}
            results.update(zip([value.name for value in session.get_outputs()], session.run(None, inputs)))
        else:
            for product in step:
                results[product.output] = multiply(product, results)
    kind = "fp8" if any(product.is_fp8 for product in _products(cut)) else "*"
    bound = Bound(KERNELS[kind])
    # Scores that are nearly equal may be rounded to another order. Such a row has other experts and is not compared.
    num_rows = len(results[next(iter(expected))])
    same_experts = np.ones(num_rows, np.bool_)
    for name in choices:
        same_experts &= (np.sort(expected.pop(name)) == np.sort(results[name])).all(axis=1)
    if not same_experts.any():
        raise CheckError(f"graph {model.graph.name}: expected the experts that the graph chooses, found others")
    for name in expected:
        error = measure(expected[name][same_experts], results[name][same_experts], bound, peak(expected[name]))
        if line := wrong(f"output {name}", error):
            raise CheckError(
                f"graph {model.graph.name}: {line}: the kernels and products compute something else; please report it"
            )


def multiply(product: Product, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return [rows, out_features] of a product, in float32 by NumPy; values: arrays of names."""
    rows = values[product.input].astype(np.float32)
    parts = [values[slot] for slot in product.slots]
    if product.is_fp8:
        codes, steps = e4m3.rounded(rows)
        return codes @ parts[0].astype(np.float32).T * steps * parts[1]
    if product.experts is not None:
        return _of_experts(rows, parts, values[product.experts.ids], product.experts)
    weight = parts[0]
    if product.bits < 16:
        weight = dequantize(parts[0], parts[1], product.group_size, *parts[2:])
    if not product.transposed:
        weight = weight.T
    result = rows @ weight.astype(np.float32)
    if (lora := product.lora) is not None:
        ids = values[IDS]
        if lora.rows:
            ids = ids[values[lora.rows]]
        is_of_adapter = np.arange(lora.columns) // lora.rank == ids[:, None]
        result += np.where(is_of_adapter, rows @ values[lora.a], 0) @ values[lora.b]
    return result


def _of_experts(rows: np.ndarray, parts: Sequence[np.ndarray], ids: np.ndarray, experts: Experts) -> np.ndarray:
    """Return [tokens, per_token * out_features]: the products of each token with the weights of its experts.

    rows: [tokens, in_features] if `experts.shared`, else [tokens, per_token * in_features]. ids: [tokens, per_token].
    """
    weight = experts.weight
    if experts.shared:
        inputs = rows[:, np.newaxis]
    else:
        inputs = rows.reshape(len(rows), experts.per_token, -1)
    inputs = np.broadcast_to(inputs, (*ids.shape, inputs.shape[-1]))
    results = np.zeros((*ids.shape, weight.out_features), np.float32)
    ids = ids % len(parts[0])  # the comparison has fewer experts than the graph
    for number in np.unique(ids):
        data, *scales = (part[number] for part in parts)
        if weight.kind == "mxfp4":
            data = mxfp4_numbers(data, *scales)
        elif scales:
            data = dequantize(data, scales[0].reshape(data.shape[:2]), weight.group_size)
        if weight.transposed:
            data = data.T
        results[ids == number] = inputs[ids == number] @ data.astype(np.float32)
    return results.reshape(len(rows), -1)
