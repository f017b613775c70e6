"""The base of backends whose engines run on the CPU here, on NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.backends.base import Backend
from lockstep.backends.cpu import cpu_key, describe_cpu


class HostBackend(Backend):
    """A backend whose engines run on the CPU and depend on its instruction sets; equal builds are equal bytes."""

    on_host = True
    rank_devices = False

    def describe_device(self) -> dict[str, Any]:
        return {"type": "cpu", **describe_cpu()}

    def device_key(self, device: Mapping[str, Any]) -> Any:
        return cpu_key(device)


class Declared(NamedTuple):
    """The dtype and shape that an engine declares for an input or output; dimensions are numbers or names."""

    dtype: np.dtype
    shape: Sequence[int | str]
