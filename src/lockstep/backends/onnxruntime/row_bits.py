"""Test whether products on this CPU give a row the same bits in any batch.

In: bits and group size of a weight, or the shape of one that is decoded at each run. Out: yes or no. ONNX Runtime has
an int8 kernel for each instruction set, which takes rows in pairs; the last of an odd number may be accumulated in
another order (seen in groups of 64 and 128 on a CPU with VNNI, not in smaller ones). Weights that are decoded are
packed at each call, in pieces whose size may depend on how many threads share them. So a product is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

# Kernels' tiles divide none of these sizes but the rows.
_ROWS = 64
_GROUPS = 11
_OUTPUTS = 40
_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 31, 33)


def rows_keep_their_bits(bits: int, group_size: int, open_model: Callable[[bytes], ort.InferenceSession]) -> bool:
    """Return whether int8 products give a row the same bits in any batch.

    bits, group_size: of the weight. open_model: returns a session of a model's bytes.
    """
    random = np.random.default_rng(0)
    columns = _GROUPS * group_size
    data = random.integers(0, 256, (_OUTPUTS, _GROUPS, group_size * bits // 8)).astype(np.uint8)
    weights: dict[str, np.ndarray] = {"data": data, "scales": random.standard_normal((_OUTPUTS, _GROUPS), np.float32)}
    sizes: dict[str, Any] = {"K": columns, "N": _OUTPUTS, "bits": bits, "block_size": group_size, "accuracy_level": 4}
    node = helper.make_node("MatMulNBits", ["x", *weights], ["y"], domain="com.microsoft", **sizes)
    ios = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "y")]
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph([node], "rows", ios[:1], ios[1:], constants)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return _keeps(open_model(model.SerializeToString()), random.standard_normal((_ROWS, columns), np.float32), {})


def decoded_rows_keep_their_bits(shape: tuple[int, int], open_model: Callable[[bytes], ort.InferenceSession]) -> bool:
    """Return whether they do in products as `onnx_tools.group_experts` has them; shape: [out_features, in_features]."""
    random = np.random.default_rng(0)
    names = ("x", "weight", "y")
    ios = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None]) for name in names]
    node = helper.make_node("Gemm", names[:2], names[2:], alpha=0.5, transB=1)
    graph = helper.make_graph([node], "rows", ios[:2], ios[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    weight = random.standard_normal(shape, np.float32)
    rows = random.standard_normal((_ROWS, shape[1]), np.float32)
    return _keeps(open_model(model.SerializeToString()), rows, {"weight": weight})


def _keeps(session: ort.InferenceSession, rows: np.ndarray, feeds: Mapping[str, np.ndarray]) -> bool:
    (together,) = session.run(None, {"x": rows, **feeds})
    return all(
        np.array_equal(session.run(None, {"x": rows[-count:], **feeds})[0], together[-count:]) for count in _COUNTS
    )
