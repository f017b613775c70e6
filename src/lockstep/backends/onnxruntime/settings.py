"""The config of ONNX Runtime: no section."""

from __future__ import annotations

from lockstep.config.backends import BackendSettings

_ADAPTED = ("fp32", "fp16", "w8a16", "w4a16")

SETTINGS = BackendSettings(
    precisions=(*_ADAPTED, "w8a8", "w4a8", "w8a8-fp8"),
    lacks="ONNX Runtime on CPU has no bf16 kernels",
    runs_ranks=True,
    mxfp4=True,
    runs_adapters=_ADAPTED,
)
