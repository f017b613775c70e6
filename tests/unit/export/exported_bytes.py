"""Print digests of what holds numbers that a vectorised kernel could have computed, as JSON.

Run by test_same_bytes.py under other instruction sets and numbers of threads: the demo's graphs, those of a model with
each kind of RoPE, and the RoPE constants that graphs get at usual pairs of theta and head size."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep.artifacts.files import dump_json
from lockstep.export.run import assemble
from lockstep.export.tracer import meta_model

DEMO = Path(__file__).parents[3] / "resources" / "demo-llama" / "config.json"
SMALL: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8192,
}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 3.0, "original_max_position_embeddings": 2048},
    "llama3": {
        "factor": 3.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048,
    },
    "longrope": {
        "factor": 3.0, "short_factor": [1.0 + n / 7 for n in range(48)],
        "long_factor": [1.0 + n / 3 for n in range(48)], "original_max_position_embeddings": 2048,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}  # fmt: skip
PARTIAL = {"model_type": "stablelm", "hidden_size": 96, "partial_rotary_factor": 0.5}
# Of these, torch's own `pow` gave other bits with AVX2 than without for six.
PAIRS = [
    *((10000.0, size) for size in (48, 64, 96, 256)),
    *((500000.0, size) for size in (64, 96, 128)),
    *((1000000.0, size) for size in (80, 128, 256)),
]


def configs() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "demo", json.loads(DEMO.read_text())
    for kind, settings in ROPES.items():
        rope = {"rope_type": kind, "rope_theta": 10000.0, **settings}
        yield kind, {**SMALL, "head_dim": 96, "rope_parameters": rope}
    yield "partial", {**SMALL, **PARTIAL}


def constants(theta: float, head_size: int) -> Iterator[tuple[str, bytes]]:
    rope = {"rope_type": "default", "rope_theta": theta}
    model = meta_model({**SMALL, "head_dim": head_size, "rope_parameters": rope}, "fp32")
    for name, buffer in model.named_buffers():
        if not buffer.is_meta:
            yield name, buffer.numpy().tobytes()


def digest(files: Mapping[str, bytes]) -> str:
    total = hashlib.sha256()
    for name, data in sorted(files.items()):
        total.update(f"{name} {hashlib.sha256(data).hexdigest()}\n".encode())
    return total.hexdigest()


def main() -> None:
    digests = {}
    for name, config in configs():
        files, assembly = assemble(meta_model(config, "fp32"), config, "fp32")
        digests[name] = digest({**files, "assembly": dump_json(assembly.to_json()).encode()})
    for pair in PAIRS:
        digests[str(pair)] = digest(dict(constants(*pair)))
    print(json.dumps({"capability": torch.backends.cpu.get_cpu_capability().lower(), "digests": digests}))


if __name__ == "__main__":
    main()
