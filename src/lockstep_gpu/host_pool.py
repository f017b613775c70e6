"""One pool of page-locked host memory for the weights of all checkpoints, each tensor once.

A copy from here to a device needs no CPU: 13.5 GB take a quarter of a second over PCIe 5. Locking the pages takes seven
seconds, in which steps are slow: it is done while there are no requests, as far as there is room.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from lockstep.errors import CheckError
from lockstep.step import host_memory
from lockstep_gpu import cuda

# Of the memory that is free when the first checkpoint is added: else it would hold the files of the same weights.
_SHARE = 0.8
_PIECE_NBYTES = 8 << 20
_READERS = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "pool")


class HostPool:
    """The bytes of tensors as a device has them, by the digest of their contents."""

    def __init__(self, nbytes: int):
        self._free_nbytes = nbytes
        self._digests: dict[Hashable, str] = {}  # by checkpoint and tensor
        self._arrays: dict[str, np.ndarray] = {}

    @classmethod
    def of_machine(cls) -> HostPool:
        return cls(int(_SHARE * host_memory.free_bytes()))

    def find(self, checkpoint: Path, key: Hashable) -> tuple[str, np.ndarray] | None:
        """Return the digest of a checkpoint's tensor, and its bytes, if it was added."""
        digest = self._digests.get((checkpoint, key))
        if digest is None:
            return None
        return digest, self._arrays[digest]

    def add(self, checkpoint: Path, key: Hashable, values: np.ndarray) -> bool:
        """Add a tensor (contiguous), unless there is no room for it: return False."""
        data = values.reshape(-1).view(np.uint8)
        starts = range(0, data.nbytes, _PIECE_NBYTES)
        pieces = [data[start : start + _PIECE_NBYTES] for start in starts]
        digest = hashlib.sha256(b"".join(_READERS.map(_digest, pieces))).hexdigest()
        if digest not in self._arrays:
            if self._free_nbytes < data.nbytes:
                return False
            try:
                array = cuda.pinned(data.shape, np.uint8)
            except CheckError:  # no more memory can be locked
                self._free_nbytes = 0
                return False
            copies = [array[start : start + _PIECE_NBYTES] for start in starts]
            list(_READERS.map(np.copyto, copies, pieces))
            self._arrays[digest] = array
            self._free_nbytes -= data.nbytes
        self._digests[checkpoint, key] = digest
        return True


def _digest(piece: np.ndarray) -> bytes:
    return hashlib.sha256(piece.data).digest()
