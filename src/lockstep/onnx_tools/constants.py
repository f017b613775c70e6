"""The numbers that a graph holds, apart from its operators.

In: a graph. Out: the digest of all but its floating-point constants, and what these are for.
"""

from __future__ import annotations

import hashlib

from onnx import ModelProto, TensorProto

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
_MOVES = ("Mul", "MatMul", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Transpose", "Concat", "Gather")


def operators_digest(model: ModelProto) -> str:
    """Return the sha256 of a graph whose floating-point constants have lost their values."""
    bare = ModelProto()
    bare.CopyFrom(model)
    for tensor in bare.graph.initializer:
        if tensor.data_type in _FLOATS:
            for field in ("raw_data", "float_data", "double_data", "int32_data"):
                tensor.ClearField(field)
    return hashlib.sha256(bare.SerializeToString(deterministic=True)).hexdigest()


def constants_in_words(model: ModelProto) -> str:
    """Return what the floating-point constants of a graph are for: "constants of RoPE" or "constants"."""
    reached = {tensor.name for tensor in model.graph.initializer if tensor.data_type in _FLOATS}
    for node in model.graph.node:  # in topological order
        if reached.intersection(node.input):
            if node.op_type in ("Cos", "Sin", "RotaryEmbedding"):
                return "constants of RoPE"
            if node.op_type in _MOVES:
                reached.update(node.output)
    return "constants"
