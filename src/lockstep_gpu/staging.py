"""Asynchronous uploads of small arrays through two alternating page-locked buffers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep_gpu import cuda

_ALIGNMENT = 16  # bytes


class Staging:
    """Page-locked memory for an upload of `arrays` arrays of `nbytes` bytes in total.

    The host waits only if it is two uploads ahead of the device.
    """

    def __init__(self, nbytes: int, arrays: int):
        size = nbytes + arrays * _ALIGNMENT
        self._buffers = [(cuda.pinned((size,), np.uint8), cuda.Event()) for _ in range(2)]

    def send(self, stream: cuda.Stream, pairs: Sequence[tuple[cuda.Array, np.ndarray]]) -> None:
        """Enqueue copies of host arrays, cast to the device arrays' dtypes. The host arrays may change afterwards."""
        self._buffers.reverse()
        buffer, copied = self._buffers[0]
        copied.wait()
        offset = 0
        for array, values in pairs:
            host = buffer[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
            host[...] = values
            stream.upload(array, host)
            offset += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        copied.record(stream)
