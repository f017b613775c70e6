"""Small checkpoints in Hugging Face's layout, and ways to damage them. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from lockstep.errors import InputError

CONFIG = {"model_type": "llama", "num_hidden_layers": 2}
NUMPY = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
INDEX = "model.safetensors.index.json"


def tensors(dtype: str = "BF16", seed: int = 0) -> dict[str, np.ndarray]:
    """Five tensors of two "layers": matrices, a vector, a scalar and an empty one."""
    numbers = np.random.default_rng(seed)
    shapes = {
        "embed.weight": (16, 8),
        "layers.0.up.weight": (12, 8),
        "layers.1.up.weight": (12, 8),
        "norm.weight": (8,),
        "scale": (),
    }
    results = {name: np.asarray(numbers.standard_normal(shape), NUMPY[dtype]) for name, shape in shapes.items()}
    return {**results, "empty": np.zeros((0, 8), NUMPY[dtype])}


def write(
    folder: Path, values: Mapping[str, np.ndarray] | None = None, shards: int = 1, config: Mapping[str, Any] = CONFIG
) -> Path:
    """A checkpoint of `values` (by default `tensors()`) in one file, or dealt to `shards` files with an index."""
    values = tensors() if values is None else values
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    if shards == 1:
        save_file(dict(values), folder / "model.safetensors", {"format": "pt"})
        return folder
    names = sorted(values)
    files = {f"model-{number + 1:05d}-of-{shards:05d}.safetensors": names[number::shards] for number in range(shards)}
    for file, file_tensors in files.items():
        save_file({name: values[name] for name in file_tensors}, folder / file, {"format": "pt"})
    weight_map = {}
    for file, file_tensors in files.items():
        weight_map |= dict.fromkeys(file_tensors, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def in_shards(folder: Path, shard_bytes: int) -> Path:
    """Deal the one file of a checkpoint to files of at most that many bytes, as transformers saves a large model."""
    from huggingface_hub import save_torch_state_dict  # needs torch
    from safetensors.torch import load

    path = folder / "model.safetensors"
    tensors = load(path.read_bytes())
    path.unlink()
    save_torch_state_dict(tensors, folder, max_shard_size=shard_bytes)
    return folder


def safetensors_bytes(header: bytes | Mapping[str, Any], data: bytes = b"") -> bytes:
    """A file of any header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def hub_cache(root: Path, folder: Path, commit: str = "0123abcd") -> Path:
    """`folder` as the hub's cache holds it: `snapshots/<commit>` of relative links into `blobs`. Returns the
    snapshot."""
    blobs = root / "models--org--name" / "blobs"
    snapshot = root / "models--org--name" / "snapshots" / commit
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        (blobs / f"{number:064x}").write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
    return snapshot


def error_of(call: Callable[..., Any], *arguments: Any) -> str:
    """The one line of the InputError that `call` raises."""
    with pytest.raises(InputError) as caught:
        call(*arguments)
    line = str(caught.value)
    assert line.splitlines() == [line], "an error is one line"
    return line
