"""One pool of page-locked host memory for the weights of all checkpoints, each tensor once.

A copy from here to a device needs no CPU: 13.5 GB take a quarter of a second over PCIe 5. To fill it takes longer, in
which steps are slow: it is done while there are no requests, as far as there is room.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import mmap
import os
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from lockstep.step import host_memory
from lockstep_gpu import cuda

# Of the memory that is free when the first checkpoint is added: else it would hold the files of the same weights.
_SHARE = 0.8
_PIECE_NBYTES = 8 << 20
_SLAB_NBYTES = 64 << 20
_THREADS = min(8, os.cpu_count() or 1)
_READERS = ThreadPoolExecutor(_THREADS, "pool")


class HostPool:
    """The bytes of tensors as a device has them, in pieces, by the digest of their contents."""

    def __init__(self, nbytes: int):
        self._free_nbytes = nbytes
        self._slab = np.empty(0, np.uint8)  # the rest of the last one
        self._digests: dict[Hashable, bytes] = {}  # by checkpoint and tensor
        self._pieces: dict[bytes, Sequence[np.ndarray]] = {}

    @classmethod
    def of_machine(cls) -> HostPool:
        return cls(int(_SHARE * host_memory.free_bytes()))

    def find(self, checkpoint: Path, key: Hashable) -> tuple[bytes, Sequence[np.ndarray]] | None:
        """Return the digest of a checkpoint's tensor, and its bytes, if it was added."""
        digest = self._digests.get((checkpoint, key))
        if digest is None:
            return None
        return digest, self._pieces[digest]

    def add(self, checkpoint: Path, tensors: Mapping[Hashable, np.ndarray]) -> bool:
        """Add tensors (contiguous) as far as there is room; return whether there was for all of them."""
        pieces_of = {key: _pieces(values) for key, values in tensors.items()}
        digests = _READERS.map(_digest, itertools.chain.from_iterable(pieces_of.values()))
        added: dict[bytes, Sequence[np.ndarray]] = {}
        digest_of: dict[Hashable, bytes] = {}
        copies = []
        for key, pieces in pieces_of.items():
            digest = hashlib.sha256(b"".join(itertools.islice(digests, len(pieces)))).digest()
            if digest not in self._pieces and digest not in added:
                places = [place for place in map(self._allocate, pieces) if place is not None]
                if len(places) < len(pieces):
                    break
                added[digest] = places
                copies += [_READERS.submit(np.copyto, place, piece) for place, piece in zip(places, pieces)]
            digest_of[checkpoint, key] = digest
        for copy in copies:
            copy.result()
        self._pieces |= added
        self._digests |= digest_of
        return len(digest_of) == len(tensors)

    def _allocate(self, piece: np.ndarray) -> np.ndarray | None:
        """Return memory of a piece's size, or None where no more can be locked."""
        if self._slab.size < piece.size:
            nbytes = min(_SLAB_NBYTES, self._free_nbytes)
            if nbytes < piece.size or not cuda.lock_pages(slab := _touched(nbytes)):
                self._free_nbytes = 0
                return None
            self._slab = slab
            self._free_nbytes -= nbytes
        place = self._slab[: piece.size]
        self._slab = self._slab[piece.size :]
        return place


def _pieces(values: np.ndarray) -> list[np.ndarray]:
    data = values.reshape(-1).view(np.uint8)
    return [data[start : start + _PIECE_NBYTES] for start in range(0, data.nbytes, _PIECE_NBYTES)]


def _digest(piece: np.ndarray) -> bytes:
    return hashlib.sha256(piece.data).digest()


def _touched(nbytes: int) -> np.ndarray:
    """Return memory whose pages are there: threads share the work, which locking would do in one."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # kernels without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    slab = np.frombuffer(memory, np.uint8)
    list(_READERS.map(_touch, np.array_split(slab, _THREADS)))
    return slab


def _touch(part: np.ndarray) -> None:
    part[:: mmap.PAGESIZE] = 0
