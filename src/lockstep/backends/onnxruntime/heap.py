"""The heap behind packed weights.

In: a process that has packed weights. Out: what they were packed from given back to the system, and what is in use on
pages of 2 MB; the library's allocators do neither. A packed matrix is larger than the hole that the copy of another
left: a mixture of Qwen3's took 1.34 of its weights' bytes, and takes 1.02. A decode step reads all weights once, so
pages of 4 KB cost a translation each: SmolLM2-135M in w4a8 takes 0.92 of the time.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

PAGE = 2 << 20
_MADV_COLLAPSE = 25  # of Linux 6.1; older ones refuse it, and pages stay as they are
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_libc.malloc_trim.argtypes = (ctypes.c_size_t,)


def give_back_free() -> None:
    """Give the pages of freed memory back, wherever they lie in the heap."""
    _libc.malloc_trim(0)


def collapse() -> None:
    """Put what is in use of each 2 MB on one page; memory that has huge pages, or is not to have them, stays so."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, *_, file = (*line.split(maxsplit=5), "")[:6]
        first, end = (int(address, 16) for address in addresses.split("-"))
        first = -(-first // PAGE) * PAGE
        end = end // PAGE * PAGE
        if access == "rw-p" and file in ("", "[heap]") and first < end:
            _libc.madvise(first, end - first, _MADV_COLLAPSE)
