"""What can be compared of an engine set: engines.json in, JSON out, so that it may be looked at in another Python than the one that compares."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from lockstep import formats
from lockstep.engine.backend import get_backend
from lockstep.files import read_json


def inspected(engines_json: Path) -> dict[str, Any]:
    """{"device": what of it matters, "engines": {name: {"choices", "layers": as the backend gives them, "sha256": of the bytes that equal builds share,
    "left_out": of the others, in words}}}."""
    manifest = read_json(engines_json, formats.ENGINES)
    backend = get_backend(manifest["backend"])
    engines = {}
    for name, entry in sorted(manifest["engines"].items()):
        path = engines_json.with_name(entry["file"])
        shared = backend.canonical_bytes(path)
        found = {"choices": backend.choices(path), "layers": backend.layer_information(path)}
        engines[name] = {**found, "sha256": hashlib.sha256(shared.data).hexdigest(), "left_out": list(shared.removed)}
    return {"device": backend.device_key(manifest["device"]), "engines": engines}
