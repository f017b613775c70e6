"""Checkpoints that are quantised already, written from the published descriptions of their layouts, number by number.

Each weight is quantised by rounding to the nearest; `Written.numbers` are what its integers encode. Nothing of the
package's own reading is used.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which number stands first in a word, second ...


@dataclass(frozen=True)
class Layout:
    """group_size: -1 for one scale a row. zero_points: others than the middle. ordered: groups of columns that lie
    apart (activation order)."""

    name: str
    bits: int
    group_size: int
    zero_points: bool = False
    ordered: bool = False

    def config(self) -> dict[str, Any]:
        if self.name in ("gptq", "gptq_v2"):
            return {
                "quant_method": "gptq", "bits": self.bits, "group_size": self.group_size, "desc_act": self.ordered,
                "sym": not self.zero_points, "checkpoint_format": self.name, "lm_head": False,
            }  # fmt: skip
        if self.name == "awq":
            return {
                "quant_method": "awq", "bits": 4, "group_size": self.group_size, "zero_point": True,
                "version": "gemm", "modules_to_not_convert": None,
            }  # fmt: skip
        weights = {
            "num_bits": self.bits, "type": "int", "symmetric": not self.zero_points, "dynamic": False, "actorder": None,
            "group_size": None if self.group_size == -1 else self.group_size,
            "strategy": "channel" if self.group_size == -1 else "group",
        }  # fmt: skip
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors", "format": self.name, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
        }  # fmt: skip


GPTQ = Layout("gptq", 4, 16)
LAYOUTS = (
    GPTQ, Layout("gptq", 4, 16, zero_points=True), Layout("gptq", 8, 16),
    Layout("gptq", 4, 16, zero_points=True, ordered=True), Layout("gptq_v2", 8, -1, zero_points=True),
    Layout("gptq_v2", 4, 16, zero_points=True), Layout("awq", 4, 16, zero_points=True), Layout("pack-quantized", 4, 16),
    Layout("pack-quantized", 8, -1), Layout("int-quantized", 8, -1), Layout("pack-quantized", 4, 16, zero_points=True),
    Layout("int-quantized", 8, -1, zero_points=True),
)  # fmt: skip


def label(layout: Layout) -> str:
    return (
        f"{layout.name}-{layout.bits}-{layout.group_size}{'-zeros' * layout.zero_points}{'-ordered' * layout.ordered}"
    )


def groups_of(columns: int, layout: Layout) -> np.ndarray:
    """The group of each column, int32."""
    group = np.arange(columns, dtype=np.int32) // (columns if layout.group_size == -1 else layout.group_size)
    return group[np.random.default_rng(0).permutation(columns)] if layout.ordered else group


def quantised(weight: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(integers from 0 [out, in], scales float16, zero points [out, groups]) of floats [out, in]."""
    group = groups_of(weight.shape[1], layout)
    order = np.argsort(group, kind="stable")
    groups = weight.astype(np.float64)[:, order].reshape(len(weight), group.max() + 1, -1)
    largest = (1 << layout.bits) - 1
    middle = 1 << layout.bits - 1
    if layout.zero_points:
        low = np.minimum(groups.min(-1), 0)
        high = np.maximum(groups.max(-1), 0)
        scales = np.maximum((high - low) / largest, 1e-5).astype(np.float16)
        zeros = np.clip(np.rint(-low / scales), 0, largest).astype(np.int64)
    else:
        scales = np.maximum(np.abs(groups).max(-1) / (middle - 1), 1e-5).astype(np.float16)
        zeros = np.full(scales.shape, middle, np.int64)
    if layout.name == "gptq":
        zeros = np.maximum(zeros, 1)  # a zero has no place where points are stored one lower
    integers = np.clip(np.rint(groups / scales[..., None]) + zeros[..., None], 0, largest).astype(np.int64)
    in_place = np.empty(weight.shape, np.int64)
    in_place[:, order] = integers.reshape(weight.shape)
    return in_place, scales, zeros


def numbers_of(integers: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group: np.ndarray) -> np.ndarray:
    """float32 [out, in], by the definition."""
    numbers = (integers - zeros[:, group]) * scales[:, group].astype(np.float64)
    return np.ascontiguousarray(numbers, np.float32)  # the library writes arrays of another order as they lie


def words(numbers: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Numbers packed along an axis into int32, the first in the lowest bits."""
    count = 32 // bits
    numbers = np.moveaxis(numbers, axis, 0)
    packed = np.zeros((len(numbers) // count, *numbers.shape[1:]), np.int64)
    for word in range(len(packed)):
        for place in range(count):
            number = numbers[word * count + (order[place] if order else place)]
            packed[word] |= number << (bits * place)
    return np.moveaxis(packed, 0, axis).astype(np.uint32).view(np.int32)


def tensors_of(module: str, weight: np.ndarray, layout: Layout) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of one weight, and the numbers that they represent."""
    integers, scales, zeros = quantised(weight, layout)
    bits, (rows, columns) = layout.bits, weight.shape
    group = groups_of(columns, layout)
    if layout.name in ("gptq", "gptq_v2"):
        stored = zeros - 1 if layout.name == "gptq" else zeros
        tensors = {
            "qweight": words(integers.T, bits, 0), "qzeros": words(stored.T, bits, 1), "scales": scales.T,
            "g_idx": group,
        }  # fmt: skip
    elif layout.name == "awq":
        tensors = {
            "qweight": words(integers.T, 4, 1, AWQ_ORDER), "qzeros": words(zeros.T, 4, 1, AWQ_ORDER),
            "scales": scales.T,
        }  # fmt: skip
    elif layout.name == "pack-quantized":
        shape = np.array([rows, columns], np.int64)
        tensors = {"weight_packed": words(integers, bits, 1), "weight_scale": scales, "weight_shape": shape}
    else:
        tensors = {"weight": (integers - (1 << bits - 1)).astype(np.int8), "weight_scale": scales}
    if layout.zero_points and "quantized" in layout.name:
        if layout.name == "int-quantized":
            tensors["weight_zero_point"] = (zeros - (1 << bits - 1)).astype(np.int8)
        else:
            padded = np.pad(zeros, ((0, -rows % (32 // bits)), (0, 0)))
            tensors["weight_zero_point"] = words(padded, bits, 0)
    named = {f"{module}.{suffix}": np.ascontiguousarray(array) for suffix, array in tensors.items()}
    return named, numbers_of(integers, scales, zeros, group)


def write_packed(source: Path, folder: Path, layout: Layout, dense: str = "(?!)") -> dict[str, np.ndarray]:
    """A checkpoint as `source`, the linear weights of its layers packed; gives what each tensor represents, in float32.

    dense: a pattern of names that stay in floating point.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)
    stored: dict[str, np.ndarray] = {}
    numbers: dict[str, np.ndarray] = {}
    for name, array in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight") and not re.search(dense, name):
            parts, numbers[name] = tensors_of(name.removesuffix(".weight"), array.astype(np.float32), layout)
            stored |= parts
        else:
            stored[name] = array
            numbers[name] = array.astype(np.float32)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    write_settings(folder, layout.config())
    return numbers


PROJ = "model.layers.0.mlp.up_proj"  # a weight to damage


def without(suffix: str) -> Callable[[dict[str, np.ndarray]], Any]:
    """Return an edit of a checkpoint's tensors: a part of PROJ is missing."""
    return lambda tensors: tensors.pop(f"{PROJ}.{suffix}")


def spoil(suffix: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict[str, np.ndarray]], Any]:
    """Return an edit of a checkpoint's tensors: a part of PROJ goes through `change`."""

    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{PROJ}.{suffix}"] = np.ascontiguousarray(change(tensors[f"{PROJ}.{suffix}"].copy()))

    return edit


def write_settings(folder: Path, settings: Mapping[str, Any] | None) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
