"""Python's garbage collector, out of the way while something makes many objects that live."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No collections inside: each would walk all objects so far again, half a million of them once torch and
    transformers are loaded."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
