"""Tests marked `gpu` are skipped, with the reason, where TensorRT cannot build."""

from __future__ import annotations

import pytest


def _missing() -> str | None:
    """What this machine lacks to build with TensorRT."""
    from lockstep.engine import get_backend
    from lockstep.errors import LockstepError

    try:
        get_backend("tensorrt").describe_device()
    except LockstepError as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = _missing() if on_gpu else None
    if reason:
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))
