"""Find where a float16 graph exceeds float16.

In: a graph and its inputs. Out: the first value that is too large, when the graph is computed in float32, or the
outputs with all that follows from such values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

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
            if layer and self.ends_layer:  # a block begins with the rest of the layer before
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
    makers = _makers(model)
    floats = [array for array in feeds.values() if array.dtype.kind == "f"]
    if not makers or not all(np.isfinite(array).all() for array in floats):
        return None
    wide = widened(model, TensorProto.FLOAT16)
    outputs = {value.name for value in wide.graph.output}
    names = list(makers)
    wide.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names if name not in outputs
    )
    arrays = open_session(wide.SerializeToString()).run(names, _in_float32(feeds))
    for name, array in zip(names, arrays, strict=True):
        largest = float(np.abs(array).max(initial=0))
        if largest > LARGEST:
            dependent = {name}
            for node in model.graph.node:
                if not dependent.isdisjoint(node.input):
                    dependent.update(node.output)
            return Overflow(name, largest, makers[name] in PRODUCTS, "hidden_out" in dependent)
    return None


def with_infinities(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the outputs, float32, of a float16 graph in which a value beyond float16 is infinite.

    That is what float16 gives. ONNX Runtime leaves out a cast to float16 that another one follows, and stays finite.
    feeds: all inputs, weights too.
    """
    makers = _makers(model)
    wide = widened(model, TensorProto.FLOAT16)
    prefix = "float16"  # of names, which no exported graph has
    constants = {f"{prefix} largest": LARGEST, f"{prefix} infinity": np.inf}
    for name, number in constants.items():
        wide.graph.initializer.append(numpy_helper.from_array(np.array(number, np.float32), name))
    largest, infinity = constants
    nodes = []
    for node in wide.graph.node:
        nodes.append(node)
        for position, name in enumerate(node.output):
            if name not in makers:
                continue
            in_float32 = f"{prefix} {name}"
            node.output[position] = in_float32
            nodes.append(helper.make_node("Abs", [in_float32], [f"{in_float32} magnitude"]))
            nodes.append(helper.make_node("Greater", [f"{in_float32} magnitude", largest], [f"{in_float32} exceeds"]))
            nodes.append(helper.make_node("Where", [f"{in_float32} exceeds", infinity, in_float32], [name]))
    # Copies: emptying the list frees the nodes that were in it.
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del wide.graph.node[:]
    wide.graph.node.extend(copies)
    outputs = [value.name for value in wide.graph.output]
    return dict(zip(outputs, open_session(wide.SerializeToString()).run(outputs, _in_float32(feeds)), strict=True))


def _makers(model: onnx.ModelProto) -> dict[str, str]:
    """Return {value that a node gives in float16: the node's operator}."""
    inferred = onnx.shape_inference.infer_shapes(model).graph
    halves = set()
    for value in (*inferred.value_info, *inferred.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
            halves.add(value.name)
    makers: dict[str, str] = {}
    for node in model.graph.node:
        makers.update((name, node.op_type) for name in node.output if name in halves)
    return makers


def _in_float32(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    wide = dict(feeds)
    for name, array in feeds.items():
        if array.dtype == np.float16:
            wide[name] = array.astype(np.float32)
    return wide
