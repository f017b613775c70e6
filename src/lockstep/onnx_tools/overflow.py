"""Find where a float16 graph exceeds float16.

In: a graph and its inputs. Out: the first value that is too large, when the graph is computed in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from lockstep.onnx_tools.sessions import open_session
from lockstep.onnx_tools.widened import widened

OVERFLOWS = "float16 overflows"  # start of the message
LARGEST = 65504.0  # of float16
PRODUCTS = frozenset("Gemm MatMul Conv Einsum".split())


@dataclass(frozen=True)
class Overflow:
    """A value of a graph that exceeds float16.

    name: in the graph. largest: its largest magnitude in float32. is_product: a product stays float16 where the
    residual stream is wide. ends_layer: whether `hidden_out`, the output of a decoder layer, depends on it.
    """

    name: str
    largest: float
    is_product: bool
    ends_layer: bool

    def text(self, block: str, layer: int | None, residual: str | None) -> str:
        """Return the message.

        block: its class. layer: the one whose attention the block precedes, or that the exit follows; None for the
        embedding. residual: the assembly's.
        """
        where = "the embedding"
        if layer is not None:
            if layer and self.ends_layer:
                layer -= 1
            where = f"layer {layer}"
        name = "the hidden state" if self.name.startswith("hidden") else self.name
        advice = "take bf16 or fp32 instead of float16"
        if not residual and not self.is_product:
            advice = f"set residual: float32 for the model, or {advice}"
        return (
            f"{OVERFLOWS}: {where} (block {block}): {name} reaches {self.largest:,.0f}, expected at most "
            f"{LARGEST:.0f}; {advice}"
        )


def overflows(outputs: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> bool:
    """Return whether outputs are not finite although their expected values, where given, fit float16."""
    infinite = [name for name, array in outputs.items() if not np.isfinite(array).all()]
    expected_arrays = [expected[name] for name in infinite if name in expected]
    return bool(infinite) and all(np.abs(array).max(initial=0) > LARGEST for array in expected_arrays)


def find_overflow(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Overflow | None:
    """Return the first value that exceeds float16, in the order of the nodes; None where none does.

    feeds: all inputs, weights too. None also where these are not finite.
    """
    inferred = onnx.shape_inference.infer_shapes(model).graph
    halves = set()
    for value in (*inferred.value_info, *inferred.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
            halves.add(value.name)
    floats = [array for array in feeds.values() if array.dtype.kind == "f"]
    if not halves or not all(np.isfinite(array).all() for array in floats):
        return None
    makers: dict[str, str] = {}  # {float16 value: operator}
    for node in model.graph.node:
        makers.update((name, node.op_type) for name in node.output if name in halves)
    wide = widened(model, TensorProto.FLOAT16)
    outputs = {value.name for value in wide.graph.output}
    names = list(makers)
    wide.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names if name not in outputs
    )
    wide_feeds = dict(feeds)
    for name, array in feeds.items():
        if array.dtype == np.float16:
            wide_feeds[name] = array.astype(np.float32)
    arrays = open_session(wide.SerializeToString()).run(names, wide_feeds)
    for name, array in zip(names, arrays, strict=True):
        largest = float(np.abs(array).max(initial=0))
        if largest > LARGEST:
            dependent = {name}
            for node in model.graph.node:
                if not dependent.isdisjoint(node.input):
                    dependent.update(node.output)
            return Overflow(name, largest, makers[name] in PRODUCTS, "hidden_out" in dependent)
    return None
