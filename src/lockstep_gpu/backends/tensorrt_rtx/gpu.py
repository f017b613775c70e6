"""Whether a GPU here runs engines for these compute capabilities, by the CUDA driver alone."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep_gpu.compute_capability import compute_capability, needs_gpu

PORTABLE = "8.0, 8.6, 8.9 or 12.x"
_PORTABLE_BELOW_12 = ("8.0", "8.6", "8.9")


def why_not(built_for: Sequence[str] | None) -> str | None:
    """Return why engines for these compute capabilities (None: portable) cannot run here; None where they can."""
    capability = compute_capability()
    if capability and runs_on(capability, built_for):
        return None
    if built_for is None:
        return needs_gpu(PORTABLE, capability)
    *other_capabilities, last = built_for
    if other_capabilities:
        last = f"{', '.join(other_capabilities)} or {last}"
    return needs_gpu(last, capability)


def runs_on(capability: str, built_for: Sequence[str] | None) -> bool:
    """Return whether a GPU runs such engines; TensorRT-RTX says that portable ones run on all from 12.0."""
    if built_for is not None:
        return capability in built_for
    return capability in _PORTABLE_BELOW_12 or int(capability.partition(".")[0]) >= 12
