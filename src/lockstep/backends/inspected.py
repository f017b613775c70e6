"""What can be compared of an opened engine set, as JSON, so that it may be looked at in another Python than the one
that compares."""

from __future__ import annotations

import hashlib
from typing import Any

from lockstep.backends.engine_set import EngineSet


def inspected(opened: EngineSet) -> dict[str, Any]:
    """{"digest": of the set, "device": what of it matters, "engines": {name: {"choices", "layers": as the backend gives
    them, "sha256": of the bytes that equal builds share, "left_out": of the others, in words}}}."""
    backend, engines = opened.backend, {}
    for name in opened.names():
        path = opened.file(name)
        shared = backend.canonical_bytes(path)
        found = {"choices": backend.choices(path), "layers": backend.layer_information(path)}
        engines[name] = {**found, "sha256": hashlib.sha256(shared.data).hexdigest(), "left_out": list(shared.removed)}
    return {"digest": opened.digest(), "device": backend.device_key(opened.manifest.device), "engines": engines}
