"""Compiled kernels, kept in the user's cache: NVRTC takes seconds, which each start of a process would pay.

The key of an entry is all that its bytes depend on: the sources, the flags and NVRTC's version. The cache only saves
time, and may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from lockstep.artifacts.files import atomic_path
from lockstep.errors import InputError
from lockstep.manifests.digest_cache import user_cache

_DIGEST_NBYTES = 32  # of SHA-256, before the code


def entry_path(parts: Iterable[bytes]) -> Path:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return user_cache("kernels", f"{digest.hexdigest()}.cubin")


def read(path: Path) -> bytes | None:
    """Return compiled code; None where there is none, or it is damaged."""
    with contextlib.suppress(OSError):
        data = path.read_bytes()
        code = data[_DIGEST_NBYTES:]
        if hashlib.sha256(code).digest() == data[:_DIGEST_NBYTES]:
            with contextlib.suppress(OSError):
                os.utime(path)  # so that entries can be deleted by the age of their last use
            return code
    return None


def write(path: Path, code: bytes) -> None:
    with contextlib.suppress(InputError, OSError):  # no home, a full disk: it is compiled again next time
        with atomic_path(path) as temporary:
            temporary.write_bytes(hashlib.sha256(code).digest() + code)
