"""Find where a float16 graph goes beyond what float16 holds.

A graph and what it reads in, the first value that is too large out. The graph is computed in float32, where it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from lockstep.onnx_tools.rewriter import upstream
from lockstep.onnx_tools.sessions import open_session
from lockstep.onnx_tools.widened import widened

OVERFLOWS = "float16 overflows"  # how the line opens
LARGEST = 65504.0  # of float16
PRODUCTS = frozenset("Gemm MatMul Conv Einsum".split())


@dataclass(frozen=True)
class Overflow:
    """A value of a graph that float16 does not hold.

    name: in the graph. largest: its largest magnitude in float32. is_product: whether it is one, which stays float16
    where the residual stream is wide. ends_layer: whether `hidden_out`, the state that leaves a decoder layer, is made
    of it.
    """

    name: str
    largest: float
    is_product: bool
    ends_layer: bool

    def text(self, block: str, layer: int | None, residual: str | None) -> str:
        """Say it in one line.

        block: its class. layer: the one whose attention the block comes before, or that the exit comes behind; None for
        the embedding. residual: the assembly's.
        """
        number = layer - 1 if layer and self.ends_layer else layer
        where = f"{'the embedding' if number is None else f'layer {number}'} (block {block})"
        name = "the hidden state" if self.name.startswith("hidden") else self.name
        found = f"{OVERFLOWS}: {where}: {name} reaches {self.largest:,.0f}, expected at most {LARGEST:.0f}"
        wide = "" if residual or self.is_product else "set residual: float32 for the model, or "
        return f"{found}; {wide}take bf16 or fp32 instead of float16"


def overflows(outputs: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> bool:
    """Return whether outputs are not finite though what is expected of them, where known, is."""
    infinite = [name for name, array in outputs.items() if not np.isfinite(array).all()]
    known = [expected[name] for name in infinite if name in expected]
    return bool(infinite) and all(np.abs(array).max(initial=0) > LARGEST for array in known)


def find_overflow(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Overflow | None:
    """Return the first value that goes beyond float16, in the order of the nodes; None where none does.

    feeds: all that the graph reads, weights too. None also where these are not finite themselves.
    """
    inferred = onnx.shape_inference.infer_shapes(model).graph
    halves = {
        value.name: value
        for value in (*inferred.value_info, *inferred.output)
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16
    }
    floats = [array for array in feeds.values() if array.dtype.kind == "f"]
    if not halves or not all(np.isfinite(array).all() for array in floats):
        return None
    wide = widened(model, TensorProto.FLOAT16)
    given = {value.name for value in wide.graph.output}
    wide.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in halves if name not in given
    )
    makers = {name: node.op_type for node in model.graph.node for name in node.output if name in halves}
    names = list(makers)
    feeds = {name: array.astype(np.float32) if array.dtype == np.float16 else array for name, array in feeds.items()}
    arrays = open_session(wide.SerializeToString()).run(names, feeds)
    for name, array in zip(names, arrays, strict=True):
        largest = float(np.abs(array).max(initial=0))
        if largest > LARGEST:
            return Overflow(name, largest, makers[name] in PRODUCTS, name in upstream(model.graph.node, ["hidden_out"]))
    return None
