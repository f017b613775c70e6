"""The config of OpenVINO: no section, and the precisions of the CPU here."""

from __future__ import annotations

from lockstep.backends.openvino.cpu import why_not
from lockstep.config.backends import BackendSettings, not_installed


def _missing() -> str | None:
    return not_installed("openvino", "openvino", "pip install --no-deps openvino")


SETTINGS = BackendSettings(
    precisions=("fp32", "bf16", "w8a16", "w4a16", "w8a8", "w4a8"),
    zero_points=False,
    mxfp4=True,
    lacks="OpenVINO computes fp16 in fp32 on most CPUs",
    unpinned=("openvino",),
    missing=_missing,
    lacks_here=why_not,
)
