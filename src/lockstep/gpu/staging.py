"""Uploads of small arrays that nobody waits for, through two pieces of page-locked memory in turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.gpu import cuda

_ALIGNMENT = 16  # bytes


class Staging:
    """Page-locked memory for `nbytes` in `arrays` arrays; the host waits only when two uploads ahead of the device."""

    def __init__(self, nbytes: int, arrays: int):
        size = nbytes + arrays * _ALIGNMENT
        self._pieces = [(cuda.pinned((size,), np.uint8), cuda.Event()) for _ in range(2)]

    def send(self, stream: cuda.Stream, pairs: Sequence[tuple[cuda.Array, np.ndarray]]) -> None:
        """Put copies of host arrays, of any numbers, to device arrays on the stream; they may change then."""
        self._pieces.reverse()
        piece, sent = self._pieces[0]
        sent.wait()
        at = 0
        for array, values in pairs:
            host = piece[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
            host[...] = values
            stream.upload(array, host)
            at += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        sent.record(stream)
