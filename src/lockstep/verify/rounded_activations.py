"""Activations of 8 bits in PyTorch, as of w8a8, w4a8 and w8a8-fp8. Needs torch.

In: a model whose quantised weights are dequantised. Out: the same model, whose products with these round what they
multiply: as the int8 kernels of ONNX Runtime do, in the groups of the weight, symmetric, the step is the largest
magnitude over 127, to nearest, ties to even; or each row to e4m3, the step is its largest magnitude over 448. The
product of the rounded numbers is float32's.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from lockstep.artifacts.dtypes import ROW, has_8_bit_activations
from lockstep.artifacts.quantized import module_of
from lockstep.checkpoint.fit import HEAD
from lockstep.errors import InputError
from lockstep.export.torch_model import is_within
from lockstep.onnx_tools.fp8_products import LARGEST, TINY
from lockstep.weights import Weights

_LEVELS = 127.0
_OF_EXPERTS = re.compile(r"\.experts\.")  # whose activations are not rounded (export.quantize); shared ones are


def round_activations(model: Any, weights: Weights, layers: int | str) -> None:
    """Let a model's products round their activations in place, where the weights' precision says so."""
    if not has_8_bit_activations(weights.precision) or weights.quantization is None:
        return
    modules, size = dict(model.named_modules()), weights.quantization.group_size

    def before(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return rounded(inputs[0], size), *inputs[1:]

    for tensor in weights.quantization.bits:
        if is_within(tensor, layers) and not _OF_EXPERTS.search(tensor):
            _module(model, modules, module_of(tensor), weights).register_forward_pre_hook(before)


def rounded(values: torch.Tensor, group_size: int) -> torch.Tensor:
    """Round [..., in_features] to int8, in groups, or to e4m3."""
    if group_size == ROW:
        rows = values.float()
        step = torch.clamp(rows.abs().amax(-1, keepdim=True) / LARGEST, min=TINY)
        return ((rows / step).to(torch.float8_e4m3fn).float() * step).to(values.dtype)
    groups = values.float().unflatten(-1, (-1, group_size))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, _LEVELS / largest, 0.0)
    return (torch.round(groups * inverse) * (largest / _LEVELS)).flatten(-2).to(values.dtype)


def _module(model: Any, modules: dict[str, Any], name: str, weights: Weights) -> Any:
    if HEAD.fullmatch(f"{name}.weight"):  # which transformers may call otherwise, and may be the embedding
        return model.get_output_embeddings()
    # Checkpoints of a bare decoder leave out the first part of the name ("transformer.").
    found = [key for key in modules if key == name or key.partition(".")[2] == name]
    if len(found) != 1:
        raise InputError(
            f"{weights.manifest_path}: precision {weights.precision}: expected a linear layer of the name {name!r} in "
            f"transformers, found {len(found)}; choose a precision with activations of 16 bits"
        )
    module = modules[found[0]]
    return model.get_output_embeddings() if isinstance(module, torch.nn.Embedding) else module  # a tied head
