"""The device of a rank; several ranks are on GPUs of one kind, which reach each other's memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lockstep.errors import CheckError
from lockstep.gpu import cuda
from lockstep.gpu.describe import describe_gpu, gpu_key

ONE_GPU = "LOCKSTEP_RANKS_ON_ONE_GPU"  # of the environment: set, all ranks run on the first GPU, for checks


class Device:
    """A rank's device and its stream, which all programs of a rank share."""

    _instances: dict[int, Device] = {}

    def __init__(self, number: int) -> None:
        self.number = number
        self.use()
        self.stream = cuda.Stream()

    @classmethod
    def get(cls, rank: int = 0) -> Device:
        """Return a rank's device, the first for all with `ONE_GPU`. Raises CheckError for none, or an unlike one."""
        if rank not in cls._instances:
            number = 0 if os.environ.get(ONE_GPU) else rank
            _check_peers(number)
            cls._instances[rank] = cls(number)
        return cls._instances[rank]

    def use(self) -> None:
        """Use this device in what the calling thread does from now on."""
        cuda.use_device(self.number)


def _check_peers(number: int) -> None:
    """Let a device and those before it reach each other's memory. Raises CheckError where they cannot."""
    if number >= (count := cuda.device_count()):
        raise CheckError(
            f"tensor_parallel: expected a GPU for each rank, {number + 1} or more, found {count}; make more visible "
            "(CUDA_VISIBLE_DEVICES), or export with fewer ranks"
        )
    for other in range(number):
        first, own = (gpu_key(describe_gpu("tensor_parallel", ordinal)) for ordinal in (other, number))
        if own != first:
            raise CheckError(
                f"tensor_parallel: GPU {number}: expected {_text(first)}, as GPU {other}, found {_text(own)}; choose "
                "GPUs of one kind (CUDA_VISIBLE_DEVICES)"
            )
        for one, two in ((number, other), (other, number)):
            if not cuda.can_access(one, two):
                raise CheckError(
                    f"tensor_parallel: GPU {one}: expected access to the memory of GPU {two}, found none; choose GPUs "
                    "that have it (`nvidia-smi topo -p2p r`; CUDA_VISIBLE_DEVICES)"
                )
            cuda.use_device(one)
            cuda.enable_access(two)


def _text(key: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in key.items())
