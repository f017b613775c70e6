"""The one import of OpenVINO, which sends nothing, and names of its element types.

Importing `openvino` reports the import to Google Analytics if the package `openvino-telemetry` is installed, which is
one of its dependencies. This module hides that package from the import; OpenVINO then uses a stub.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, cast

_TELEMETRY = "openvino_telemetry"
_before = sys.modules.get(_TELEMETRY)
sys.modules[_TELEMETRY] = cast(ModuleType, None)  # an import of it raises ImportError
try:
    import openvino
finally:
    if _before is None:
        del sys.modules[_TELEMETRY]
    else:
        sys.modules[_TELEMETRY] = _before

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402

VERSION = openvino.__version__.partition("-")[0]  # without the build and its branch
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TYPES: Mapping[np.dtype, Any] = {
    np.dtype(np.float32): openvino.Type.f32,
    _BFLOAT16: openvino.Type.bf16,
    np.dtype(np.float16): openvino.Type.f16,
    np.dtype(np.int64): openvino.Type.i64,
    np.dtype(np.int32): openvino.Type.i32,
    np.dtype(np.bool_): openvino.Type.boolean,
    np.dtype(np.uint8): openvino.Type.u8,
}
_NAMES = {kind.to_string(): dtype.name for dtype, kind in TYPES.items()}
CORE = openvino.Core()


def type_name(kind: Any) -> str:
    """Return the name of an element type in graphs and NumPy, or OpenVINO's name if they have none."""
    return _NAMES.get(kind.to_string(), kind.to_string())


def tensor_on(array: np.ndarray, shape: list[int] | None = None, kind: Any = None) -> Any:
    """Return a tensor on the memory of a contiguous array; shape, kind: of the tensor, if not the array's."""
    if kind is None:
        kind = TYPES[array.dtype]
    if array.dtype == _BFLOAT16:  # an array type that OpenVINO does not accept
        array = array.view(np.uint16)
    return openvino.Tensor(array, openvino.Shape(shape or list(array.shape)), kind)


def one_line(error: Exception) -> str:
    """Return OpenVINO's message, without the lines that name its sources."""
    lines = [line.strip() for line in str(error).splitlines()]
    message_lines = [line for line in lines if line and not line.startswith(("Exception from", "Check '"))]
    return " ".join(message_lines or lines)


def replace(old: Any, new: Any) -> None:
    """Let all readers of the output `old` read `new`, which takes its names."""
    new.set_names(old.get_names())
    for target in list(old.get_target_inputs()):
        target.replace_source_output(new)
