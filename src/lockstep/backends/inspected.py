"""What can be compared of an opened engine set."""

from __future__ import annotations

import hashlib

from lockstep.artifacts.inspected import InspectedEngine, InspectedSet
from lockstep.backends.engine_set import EngineSet


def inspected(opened: EngineSet) -> InspectedSet:
    """Return what the backend says of each engine, and a digest of the bytes that equal builds share."""
    backend, engines = opened.backend, {}
    for name in opened.names():
        path = opened.file(name)
        shared = backend.canonical_bytes(path)
        sha256 = hashlib.sha256(shared.data).hexdigest()
        choices, layers = backend.choices(path), backend.layer_information(path)
        engines[name] = InspectedEngine(choices, layers, sha256, tuple(shared.removed))
    return InspectedSet(opened.digest(), backend.device_key(opened.manifest.device), engines)
