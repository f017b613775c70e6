"""Ask this CPU whether int8 products give a row the same bits in any company.

In: bits and group size of a weight. Out: yes or no. ONNX Runtime has a kernel for each instruction set, which takes
rows in pairs; the last of an odd number may be accumulated in another order (seen in groups of 64 and 128 on a CPU with
VNNI, not in smaller ones). So a small product is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

_ROWS, _GROUPS, _OUTPUTS = 64, 11, 40  # numbers that no kernel's tile divides, but for the rows
_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 31, 33)


def rows_keep_their_bits(bits: int, group_size: int, opened: Callable[[bytes], ort.InferenceSession]) -> bool:
    """Return whether they do. opened: of a model."""
    random, columns = np.random.default_rng(0), _GROUPS * group_size
    data = random.integers(0, 256, (_OUTPUTS, _GROUPS, group_size * bits // 8)).astype(np.uint8)
    weights: dict[str, np.ndarray] = {"data": data, "scales": random.standard_normal((_OUTPUTS, _GROUPS), np.float32)}
    sizes: dict[str, Any] = {"K": columns, "N": _OUTPUTS, "bits": bits, "block_size": group_size, "accuracy_level": 4}
    node = helper.make_node("MatMulNBits", ["x", *weights], ["y"], domain="com.microsoft", **sizes)
    ios = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "y")]
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph([node], "rows", ios[:1], ios[1:], constants)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = opened(model.SerializeToString())
    rows = random.standard_normal((_ROWS, columns), np.float32)
    (together,) = session.run(None, {"x": rows})
    return all(np.array_equal(session.run(None, {"x": rows[-count:]})[0], together[-count:]) for count in _COUNTS)
