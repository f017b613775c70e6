"""Checkpoints whose weights are kept as codes, written from the published descriptions of their layouts.

Codes are made and read by ml_dtypes, and numbers are computed in the order in which the layouts' own libraries do.
Nothing of the package's own reading is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from packed_checkpoints import write_settings
from safetensors.numpy import load_file

Tensors = dict[str, np.ndarray]
FP8 = ml_dtypes.float8_e4m3fn
FP4 = ml_dtypes.float4_e2m1fn
FP8_LARGEST = 448
BLOCK = 128
BNB_BLOCK = 64
BNB_NESTED = 256
# The 16 levels of NF4, from the table of the QLoRA paper (appendix E).
NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32,
)  # fmt: skip


def _compressed(style: str, weights: dict[str, Any], activations: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    group |= {"input_activations": activations, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": style, "config_groups": {"group_0": group}}


_DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_FLOAT8 = {"num_bits": 8, "type": "float", "group_size": None}
SETTINGS: dict[str, dict[str, Any]] = {
    # As Qwen and DeepSeek publish it, RedHat's FP8-dynamic and FP8-block, and what vLLM made of a whole tensor.
    "fp8-blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                   "weight_block_size": [BLOCK, BLOCK]},
    "fp8-powers": {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [BLOCK, BLOCK]},
    "fp8-rows": _compressed("float-quantized", {**_FLOAT8, "strategy": "channel"}, _DYNAMIC),
    "fp8-compressed-blocks": _compressed(
        "float-quantized", {**_FLOAT8, "strategy": "block", "block_structure": [BLOCK, BLOCK]}, _DYNAMIC),
    "fp8-tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "nvfp4": _compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group",
                                                  "group_size": 16}, {"num_bits": 4, "type": "float"}),
    "modelopt-nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True},
    "nf4-plain": {"quant_method": "bitsandbytes", "_load_in_4bit": True, "bnb_4bit_use_double_quant": False},
    "bnb-int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
}  # fmt: skip


def tensors_of(layout: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """The tensors of one weight float32 [out, in], named as behind its module, and its numbers, float32."""
    if layout.startswith("fp8"):
        return _fp8(layout, weight)
    if layout.endswith("nvfp4"):
        return _nvfp4(layout, weight)
    if layout == "bnb-int8":
        largest = np.abs(weight).max(1)
        codes = np.rint(weight / largest[:, None] * 127).astype(np.int8)
        numbers = codes.astype(np.float32) * largest[:, None] * np.float32(7.874015718698502e-3)
        return {"weight": codes, "SCB": largest, "weight_format": np.array(0, np.uint8)}, numbers
    return _nf4(layout == "nf4", weight)


def _fp8(layout: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    rows, columns = weight.shape
    high, wide = {"fp8-rows": (1, columns), "fp8-tensor": (rows, columns)}.get(layout, (BLOCK, BLOCK))
    dtype = {"fp8-rows": ml_dtypes.bfloat16, "fp8-powers": ml_dtypes.float8_e8m0fnu}.get(layout, np.float32)
    scales = np.zeros((-(-rows // high), -(-columns // wide)), dtype)
    codes = np.zeros(weight.shape, FP8)
    numbers = np.zeros(weight.shape, np.float32)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = np.s_[row * high : (row + 1) * high, column * wide : (column + 1) * wide]
            scale = np.float32(np.abs(weight[part]).max() / FP8_LARGEST)
            scales[row, column] = 2.0 ** np.ceil(np.log2(scale)) if layout == "fp8-powers" else scale
            scale = scales[row, column].astype(np.float32)
            codes[part] = np.clip(weight[part] / scale, -FP8_LARGEST, FP8_LARGEST).astype(FP8)
            numbers[part] = codes[part].astype(np.float32) * scale
    if layout == "fp8-tensor":
        return {"weight": codes, "weight_scale": scales.reshape(()), "input_scale": np.float32(1).reshape(())}, numbers
    suffix = "weight_scale" if layout in ("fp8-rows", "fp8-compressed-blocks") else "weight_scale_inv"
    return {"weight": codes, suffix: scales}, numbers


def _nvfp4(layout: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    groups = weight.reshape(len(weight), -1, 16)
    scale = np.float32(np.abs(weight).max() / (FP8_LARGEST * 6))
    scales = (np.abs(groups).max(-1) / 6 / scale).astype(FP8)
    divided = np.float32(1) / scale
    effective = scales.astype(np.float32) * scale if layout == "modelopt-nvfp4" else scales.astype(np.float32) / divided
    codes = np.clip(groups / np.maximum(effective, np.float32(1e-30))[..., None], -6, 6).astype(FP4)
    numbers = (codes.astype(np.float32) * effective[..., None]).reshape(weight.shape)
    four = codes.view(np.uint8).reshape(len(weight), -1) & 15
    packed = four[:, 0::2] | four[:, 1::2] << 4
    if layout == "modelopt-nvfp4":
        return {"weight": packed, "weight_scale": scales, "weight_scale_2": scale.reshape(())}, numbers
    return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": divided.reshape(1)}, numbers


def _nf4(nested: bool, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    blocks = weight.reshape(-1, BNB_BLOCK)
    largest = np.abs(blocks).max(1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": BNB_BLOCK, "dtype": "bfloat16", "shape": weight.shape}
    tensors: Tensors = {"weight.quant_map": NF4, "weight.absmax": largest}
    if nested:
        offset = largest.mean()
        table = np.sort(np.linspace(-1, 1, 256) ** 3).astype(np.float32)
        padded = np.pad(largest - offset, (0, -len(largest) % BNB_NESTED)).reshape(-1, BNB_NESTED)
        outer = np.abs(padded).max(1)
        eight = np.abs(padded[..., None] / outer[:, None, None] - table).argmin(-1).astype(np.uint8)
        largest = (table[eight] * outer[:, None] + offset).reshape(-1)[: len(blocks)]
        tensors |= {"weight.absmax": eight.reshape(-1)[: len(blocks)], "weight.nested_absmax": outer}
        tensors["weight.nested_quant_map"] = table
        state |= {"nested_blocksize": BNB_NESTED, "nested_dtype": "float32", "nested_offset": float(offset)}
    codes = np.abs(blocks[..., None] / largest[:, None, None] - NF4).argmin(-1).astype(np.uint8).reshape(-1)
    tensors["weight"] = (codes[0::2] << 4 | codes[1::2])[:, None]
    tensors["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return tensors, (NF4[codes].reshape(blocks.shape) * largest[:, None]).reshape(weight.shape)


def write_coded(source: Path, folder: Path, layout: str, edit: Callable[[Tensors], Any] | None = None) -> Tensors:
    """A checkpoint as `source`, the linear weights of its layers coded; gives what each tensor represents, in float32.

    edit: a change of its tensors before they are written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    stored = {}
    numbers = {}
    for name, array in load_file(source / "model.safetensors").items():
        weight = array.astype(np.float32)
        if name.endswith("_proj.weight"):
            parts, numbers[name] = tensors_of(layout, weight)
            stored |= {f"{name.removesuffix('.weight')}.{suffix}": part for suffix, part in parts.items()}
        else:
            stored[name] = array
            numbers[name] = weight
    if edit is not None:
        edit(stored)
    save(stored, folder / "model.safetensors")
    write_settings(folder, SETTINGS[layout])
    return numbers


def save(tensors: Tensors, path: Path) -> None:
    """Write a safetensors file; the library's writer for NumPy knows no float8_e8m0fnu."""
    names = {"float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "bfloat16": "BF16", "float16": "F16"}
    names |= {"float32": "F32", "uint8": "U8", "int8": "I8", "int32": "I32"}
    header = {}
    data = []
    position = 0
    for name, array in sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        data.append(np.ascontiguousarray(array).tobytes())
        end = position + len(data[-1])
        header[name] = {"dtype": names[array.dtype.name], "shape": list(array.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))
