"""The device of a rank. Several ranks need GPUs of one model with peer access to each other's memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lockstep.errors import CheckError
from lockstep_gpu import cuda
from lockstep_gpu.describe import describe_gpu, gpu_key

# Environment variable for tests: if set, all ranks run on the first GPU.
ONE_GPU = "LOCKSTEP_RANKS_ON_ONE_GPU"


class Device:
    """A rank's device, and the stream that all programs of the rank share."""

    instances: dict[int, Device] = {}

    def __init__(self, number: int) -> None:
        self.number = number
        self.use()
        self.stream = cuda.Stream()

    @classmethod
    def get(cls, rank: int = 0) -> Device:
        """Return a rank's device; with `ONE_GPU` the first one. Raises CheckError if it is missing or differs."""
        if rank not in cls.instances:
            number = 0 if os.environ.get(ONE_GPU) else rank
            _check_peers(number)
            cls.instances[rank] = cls(number)
        return cls.instances[rank]

    def use(self) -> None:
        """Make this the calling thread's current device."""
        cuda.use_device(self.number)


def _check_peers(number: int) -> None:
    """Enable peer access between a device and all devices before it. Raises CheckError if there is none."""
    count = cuda.device_count()
    if number >= count:
        raise CheckError(
            f"tensor_parallel: expected a GPU for each rank, {number + 1} or more, found {count}; make more visible "
            "(CUDA_VISIBLE_DEVICES), or export with fewer ranks"
        )
    for other in range(number):
        expected = gpu_key(describe_gpu("tensor_parallel", other))
        actual = gpu_key(describe_gpu("tensor_parallel", number))
        if actual != expected:
            raise CheckError(
                f"tensor_parallel: GPU {number}: expected {_text(expected)}, as GPU {other}, found {_text(actual)}; "
                "choose GPUs of one kind (CUDA_VISIBLE_DEVICES)"
            )
        for source, peer in ((number, other), (other, number)):
            if not cuda.can_access(source, peer):
                raise CheckError(
                    f"tensor_parallel: GPU {source}: expected access to the memory of GPU {peer}, found none; choose "
                    "GPUs that have it (`nvidia-smi topo -p2p r`; CUDA_VISIBLE_DEVICES)"
                )
            cuda.use_device(source)
            cuda.enable_access(peer)


def _text(key: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in key.items())
