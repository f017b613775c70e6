"""A checkpoint of any shape with random weights, for shape work, speed and tests.

In: a config.json. Out: a checkpoint folder. Each tensor is drawn from a generator seeded by (seed, tensor name) and
streamed into a safetensors file; the scales keep logits near a standard deviation of 1. Needs torch and transformers
for the tensors' names and shapes.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lockstep.artifacts.dtypes import NAME_PRECISIONS, PRECISION_DTYPES
from lockstep.artifacts.files import atomic_path, write_json
from lockstep.checkpoint.source_files import read_source_json
from lockstep.checkpoint.tensors import SINGLE
from lockstep.errors import InputError
from lockstep.weights.writer import write_pieces

_WRITTEN = ("config.json", "tokenizer.json", "tokenizer_config.json")
LOG_DECAY = -3.0  # of states that last for some tens of tokens, as most do in trained models
_PIECE = 1 << 22  # numbers drawn at a time: 16 MB


def make(config_json: str | os.PathLike, seed: int, folder: str | os.PathLike) -> Path:
    """Write the checkpoint of `config_json` with random weights of `seed` to `folder`.

    The dtype is the config's, else float32. A tokenizer.json in the config's folder is copied, else one of single bytes
    is made. Raises InputError for a config that is not a causal LM's, a folder that holds a checkpoint, and when the
    disk has no room for the weights.
    """
    config_json = Path(config_json)
    folder = Path(folder)
    if not config_json.is_file():
        raise InputError(f"{config_json}: expected a config.json of a model, found none; correct the source")
    config = read_source_json(config_json)
    dtype = _dtype(config_json, config)
    from lockstep.export.checkpoint_layout import checkpoint_shapes  # with torch: only once the config is read
    from lockstep.export.tracer import meta_model

    shapes = checkpoint_shapes(meta_model(config, "fp32"))
    folder.mkdir(parents=True, exist_ok=True)
    _check_empty(folder, config_json)
    write_pieces(folder / SINGLE, shapes, dtype, lambda name: _draw(name, shapes[name], seed), "random")
    tokenizer = config_json.with_name("tokenizer.json")
    if not tokenizer.is_file():
        write_byte_tokenizer(folder)
    elif tokenizer.resolve() != (folder / "tokenizer.json").resolve():
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
    write_json(folder / "config.json", config)  # last: a folder with a config.json is whole
    return folder


def _check_empty(folder: Path, config_json: Path) -> None:
    """Raise InputError for another checkpoint's files in `folder`."""
    sources = {config_json.resolve(), config_json.with_name("tokenizer.json").resolve()}
    for path in sorted(folder.iterdir()):
        is_written = path.name in _WRITTEN or re.fullmatch(r"model.*\.safetensors(\.index\.json)?", path.name)
        if is_written and path.resolve() not in sources:
            raise InputError(
                f"{path}: expected a folder without a checkpoint, found this file; delete it, or choose another folder"
            )


def write_byte_tokenizer(folder: Path) -> None:
    with atomic_path(folder / "tokenizer.json") as temporary:
        byte_tokenizer().save(str(temporary))
    # Else transformers uses the class of the model's type, which looks for tokens that this tokenizer lacks.
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token for each byte, for any text and any vocabulary of 256 or more."""
    vocabulary = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _dtype(path: Path, config: Mapping[str, Any]) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in NAME_PRECISIONS:
        raise InputError(f"{path}: dtype: expected one of {', '.join(sorted(NAME_PRECISIONS))}, found {name!r}")
    return PRECISION_DTYPES[NAME_PRECISIONS[name]]


def _draw(name: str, shape: tuple[int, ...], seed: int) -> Iterator[np.ndarray]:
    """Yield a tensor's numbers in pieces, float32: gains near 1, biases near 0, matrices over sqrt(inputs)."""
    # Seeded by name: a tensor's numbers do not depend on which others a model has.
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    random = np.random.Generator(np.random.SFC64(int.from_bytes(digest[:16], "little")))
    mean = 1.0
    scale = 0.05
    if len(shape) >= 2:
        mean = 0.0
        scale = 1.0 / math.sqrt(shape[-1])
    elif name.endswith("_log"):
        mean = LOG_DECAY
        scale = 1.0
    elif "bias" in name:
        mean = 0.0
        scale = 0.02
    count = math.prod(shape)
    for start in range(0, count, _PIECE):
        piece = random.standard_normal(min(_PIECE, count - start), dtype=np.float32)
        piece *= np.float32(scale)
        piece += np.float32(mean)
        yield piece
