"""Keys of prompt prefixes: token ids in, one key for each whole chunk out.

Prefixes with equal keys have the same keys and values in the cache.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from lockstep.runtime.model import Model


def root_key(model: Model, salt: str = "", adapter_sha256: str | None = None, checkpoint: str = "") -> bytes:
    """Return the key from which the keys of the prefixes of one of a model's checkpoints are derived.

    It covers everything that determines cached values besides the tokens. Requests with different checkpoints, salts or
    adapters share nothing.
    """
    identity: dict[str, Any] = {
        "weights": model.checkpoints[checkpoint].weights_sha256,
        "engines": model.engines.digest(),
        "layers": model.layers,
        "chunk_size": model.chunk_size,
        "salt": salt,
    }
    if dtype := model.engines.assembly.kv_cache_dtype:
        identity["kv_cache_dtype"] = dtype
    if libraries := model.libraries:
        identity["libraries"] = libraries
    if adapter_sha256 is not None:
        identity["adapter"] = adapter_sha256
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).digest()


def chunk_keys(root: bytes, tokens: np.ndarray, chunk_size: int) -> list[bytes]:
    """Return the key of each whole chunk of `tokens` (integers, 1-D).

    SHA-256 of the previous chunk's key and this chunk's ids as little-endian int32. The last token is left out: it is
    always computed, since its logits are needed.
    """
    data = tokens.astype("<i4", copy=False).data.cast("B")
    keys = [root]
    for start in range(0, (len(tokens) - 1) // chunk_size * chunk_size, chunk_size):
        key = hashlib.sha256(keys[-1])
        key.update(data[4 * start : 4 * (start + chunk_size)])
        keys.append(key.digest())
    return keys[1:]
