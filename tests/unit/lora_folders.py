"""Adapters for tests: folders as PEFT saves them, with random numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from lockstep.artifacts.assembly import Assembly
from lockstep.runtime.binding import adapted_modules


def sizes(assembly: Assembly) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of the linear layers that take adapters."""
    assert assembly.adapters is not None
    found = {}
    for layer in assembly.layers:
        for part in (layer.block, layer.exit):
            for weight, slot in assembly.adapters.classes.get(part.graph, {}).items():
                found[part.slots[weight][0].removesuffix(".weight")] = (slot.out_features, slot.in_features)
    assert set(found) == adapted_modules(assembly)
    return found


def tensors(modules: Mapping[str, tuple[int, int]], rank: int, seed: int, size: float = 0.05) -> dict[str, np.ndarray]:
    """Random matrices under PEFT's names; size: how much larger numbers of B are than those of a layer that adds
    nothing."""
    random, found = np.random.default_rng(seed), {}
    for name, (out, given) in sorted(modules.items()):
        key = f"base_model.model.{name}"
        found[f"{key}.lora_A.weight"] = random.standard_normal((rank, given), np.float32) / np.float32(given**0.5)
        found[f"{key}.lora_B.weight"] = random.standard_normal((out, rank), np.float32) * np.float32(size)
    return found


def write(folder: Path, rank: int, arrays: Mapping[str, np.ndarray], **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "use_rslora": False, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(arrays), folder / "adapter_model.safetensors")
    return folder
