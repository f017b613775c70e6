"""The config of OpenVINO: no section, and the precisions of the CPU here."""

from __future__ import annotations

import importlib.util

from lockstep.backends.openvino.cpu import why_not
from lockstep.config.backends import BackendSettings


def _missing() -> str | None:
    found = importlib.util.find_spec("openvino")
    return None if found else "the Python package openvino is not installed for this Python"


SETTINGS = BackendSettings(
    precisions=("fp32", "bf16", "w8a16", "w4a16"),
    zero_points=False,
    lacks="OpenVINO computes fp16 in fp32 on most CPUs",
    unpinned=("openvino",),
    missing=_missing,
    lacks_here=why_not,
)
