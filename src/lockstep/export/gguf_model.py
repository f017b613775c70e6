"""A checkpoint folder of the model in a GGUF file.

In: a GGUF file of an architecture that both llama.cpp and transformers know. Out: config.json, weights in fp32,
tokenizer and chat template. Weights are dequantised tensor by tensor with NumPy's elementwise operations, so that the
bytes are the same on every CPU. transformers provides llama.cpp's tensor names and the order of rows.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from lockstep.artifacts.files import atomic_path, write_json
from lockstep.checkpoint.tensors import SINGLE
from lockstep.config.gguf_file import GgufFile, GgufTensor, read_gguf
from lockstep.errors import InputError
from lockstep.export.checkpoint_layout import checkpoint_shapes
from lockstep.export.gguf_config import ROPE_DIVISORS, config_of
from lockstep.export.gguf_tokenizer import chat_template, tokenizer_of
from lockstep.export.quiet import quiet
from lockstep.export.tracer import meta_model
from lockstep.weights.writer import write_pieces


def make(path: Path, folder: Path) -> Path:
    """Write the checkpoint of the model in a GGUF file to `folder`.

    Raises InputError for a file that is damaged, or has anything not known to mean the same here as in llama.cpp: an
    architecture, a setting, a tensor, a quantisation, a pre-tokenizer.
    """
    file = read_gguf(path)
    sizes = tensor_nbytes(file)
    with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        tensors = {tensor.name: tensor for tensor in file.tensors}

        def read(name: str) -> np.ndarray:
            return _dequantized(data, tensors[name], sizes[name])

        config = config_of(file, lambda: read(ROPE_DIVISORS))
        tokenizer, settings = tokenizer_of(file)
        with quiet():
            meta = meta_model(config, "fp32")
            processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=config)
            names = get_gguf_hf_weights_map(meta, processor)
        shapes = checkpoint_shapes(meta)
        sources = _sources(file, names, shapes)

        def pieces(name: str) -> Iterable[np.ndarray]:
            source = sources[name]
            yield processor.process(read(source), source).weights

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").unlink(missing_ok=True)  # an earlier one would call a half-written folder whole
        write_pieces(folder / SINGLE, shapes, "F32", pieces, "dequantised")
    with atomic_path(folder / "tokenizer.json") as temporary:
        tokenizer.save(str(temporary))
    write_json(folder / "tokenizer_config.json", settings)
    template = chat_template(file)
    if template:
        with atomic_path(folder / "chat_template.jinja") as temporary:
            temporary.write_text(template)
    write_json(folder / "generation_config.json", _generation(file, config))
    write_json(folder / "config.json", config)  # last: a folder with a config.json is whole
    return folder


def tensor_nbytes(file: GgufFile) -> dict[str, int]:
    """Return the bytes of each tensor. Raises InputError for an unknown type, or one that ends beyond the file."""
    length = file.path.stat().st_size
    sizes = {}
    block_sizes: dict[int, tuple[int, int]] = {}
    for tensor in file.tensors:
        if tensor.type not in block_sizes:
            block_sizes[tensor.type] = _block_size(file, tensor)
        values, size = block_sizes[tensor.type]
        if tensor.shape and tensor.shape[-1] % values:
            raise InputError(
                f"{file.path}: expected rows of a multiple of {values} in {tensor.name!r}; found {list(tensor.shape)}"
            )
        count = int(np.prod(tensor.shape, dtype=object))
        sizes[tensor.name] = count // values * size
        end = tensor.offset + sizes[tensor.name]
        if end > length:
            raise InputError(f"{file.path}: expected {end} bytes or more, where {tensor.name!r} ends; found {length}")
    return sizes


def _block_size(file: GgufFile, tensor: GgufTensor) -> tuple[int, int]:
    """Return how many values a block of the tensor's type has, and how many bytes."""
    try:
        kind = gguf.GGMLQuantizationType(tensor.type)
        values, size = gguf.GGML_QUANT_SIZES[kind]
        gguf.dequantize(np.zeros((1, size), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        names = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
        raise InputError(
            f"{file.path}: expected tensors that the package gguf {version('gguf')} dequantises; found type"
            f" {names.get(tensor.type, tensor.type)} of {tensor.name!r}"
        ) from None
    return values, size


def _dequantized(data: mmap.mmap, tensor: GgufTensor, size: int) -> np.ndarray:
    raw = np.frombuffer(data, np.uint8, size, tensor.offset)
    rows = raw.reshape(*(tensor.shape[:-1] or (1,)), -1)
    # A copy: no array may reference the memory map when it is closed.
    return np.array(gguf.dequantize(rows, gguf.GGMLQuantizationType(tensor.type)), np.float32).reshape(tensor.shape)


def _sources(file: GgufFile, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the file's tensor for each of the checkpoint's.

    Raises InputError unless both have the same tensors in the same shapes: one left over is a bias, a scale or a layer
    that the model would lack.
    """
    sources: dict[str, str] = {}
    for tensor in file.tensors:
        name = names.get(tensor.name, "")
        if name in shapes and name not in sources:
            sources[name] = tensor.name
            if tensor.shape != shapes[name]:
                raise InputError(
                    f"{file.path}: expected {tensor.name!r} in the shape {list(shapes[name])} of {name}; found"
                    f" {list(tensor.shape)}"
                )
        elif tensor.name != ROPE_DIVISORS:
            raise InputError(
                f"{file.path}: expected only tensors that transformers' {file.architecture} model has; found"
                f" {tensor.name!r}; take the model's own checkpoint"
            )
    absent = [name for name in shapes if name not in sources]
    if absent:
        gguf_names = {name: gguf_name for gguf_name, name in names.items()}
        missing = gguf_names.get(absent[0], absent[0])
        raise InputError(f"{file.path}: expected tensor {missing!r}; found none of this name")
    return sources


def _generation(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of generation_config.json; some models end a turn with another token than EOS."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: config[name] for name in names if config[name] is not None}
    ends = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(end for end in ends if end is not None))
    if len(ends) > 1:
        ids["eos_token_id"] = ends
    return ids
