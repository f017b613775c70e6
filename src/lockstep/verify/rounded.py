"""Run a model of float32 in PyTorch as if its numbers had fewer bits. Needs torch and transformers.

`Rounded`: as one of 16 bits, or parameters of 16 bits as if they were float32. Weights are cast where they are read,
each function rounds its outputs, and products accumulate in float32, as in engines. The model keeps its weights: they
are cast at each call, one at a time. The kernels are those of float32, which every CPU has.

`round_activations`: with activations of 8 bits, as of w8a8, w4a8 and w8a8-fp8. `round_kv_cache`: with keys and values
of a cache in fp8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedModel

from lockstep.artifacts.dtypes import ROW, has_8_bit_activations
from lockstep.artifacts.quantized import module_of
from lockstep.checkpoint.fit import HEAD
from lockstep.export.checkpoint_layout import checkpoint_layout
from lockstep.export.torch_model import is_within
from lockstep.onnx_tools.fp8_products import LARGEST, TINY
from lockstep.weights import Weights

# What noise is measured in, with its rounding in units of fp16's: bf16 where values go beyond fp16's range.
NOISE_DTYPES = ((torch.float16, 1.0), (torch.bfloat16, 8.0))
_PRODUCTS = {
    functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.mm,
    torch.Tensor.mm, torch.bmm, torch.Tensor.bmm, torch.baddbmm, torch.Tensor.baddbmm, torch.addmm, torch.Tensor.addmm,
    torch.einsum, functional.conv1d, torch._grouped_mm,
}  # fmt: skip
# Functions that choose: the largest of some scores, or those above a limit.
_LARGEST = {torch.topk, torch.Tensor.topk, torch.max, torch.Tensor.max, torch.argmax, torch.Tensor.argmax}
_COMPARED = {
    torch.gt, torch.Tensor.gt, torch.Tensor.__gt__, torch.ge, torch.Tensor.ge, torch.Tensor.__ge__, torch.lt,
    torch.Tensor.lt, torch.Tensor.__lt__, torch.le, torch.Tensor.le, torch.Tensor.__le__,
}  # fmt: skip
_LEVELS = 127.0
_OF_EXPERTS = re.compile(r"\.experts\.")  # whose activations are not rounded (export.quantize); shared ones are
_DTYPE = torch.Tensor.dtype.__get__


class Rounded(TorchFunctionMode):
    """Round to `dtype` the outputs of torch's functions, and the parameters that they read; float32 rounds nothing.

    A parameter of the model reports this dtype; values computed in float32 without one (RoPE angles, softmax, norms)
    stay so, as in transformers.
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _DTYPE and _is_parameter(args[0]):
            return self.dtype
        if getattr(func, "__name__", "") in ("__get__", "__set__"):
            return func(*args, **kwargs)
        # Rounds the rows read, not the whole table: an embedding's, or one expert of a stack.
        is_part = func == torch.Tensor.__getitem__ and _is_parameter(args[0])
        if func is functional.embedding or is_part:
            return func(*args, **kwargs).to(self.dtype)
        args = _mapped(self._parameter, args)
        kwargs = _mapped(self._parameter, kwargs)
        if func not in _PRODUCTS:
            return func(*args, **kwargs)
        return func(*_mapped(_float32, args), **_mapped(_float32, kwargs)).to(self.dtype)

    def _parameter(self, value: Any) -> Any:
        if _is_parameter(value):
            return value.to(self.dtype)
        return value


class Choices(TorchFunctionMode):
    """Record a model's choices, such as a router's; after `replay` repeat them while the same steps run rounded.

    A choice that rounding decides is no noise (docs/checks.md).
    """

    def __init__(self) -> None:
        super().__init__()
        self._recorded: list[torch.Tensor] = []
        self._replayed: Iterator[torch.Tensor] | None = None
        self.takes_largest = False  # of some scores, as a router does

    def replay(self) -> Choices:
        self._replayed = iter(self._recorded)
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in _COMPARED and func not in _LARGEST:
            return result
        scores = args[0] if args else kwargs["input"]
        chosen = result[1] if isinstance(result, tuple) else result
        if not _is_float(scores) or _is_float(chosen):  # torch.max of two tensors returns numbers, not indices
            return result
        if self._replayed is None:
            self._recorded.append(chosen)
            self.takes_largest |= func in _LARGEST
            return result
        chosen = next(self._replayed)
        if not isinstance(result, tuple):
            return chosen
        # The values of the repeated choice are these scores. `dim` comes after k in topk(input, k, dim).
        place = 2 if func in (torch.topk, torch.Tensor.topk) else 1
        dim = kwargs.get("dim", next(iter(args[place:]), -1))
        if chosen.dim() == scores.dim():
            values = scores.gather(dim, chosen)
        else:
            values = scores.gather(dim, chosen.unsqueeze(dim)).squeeze(dim)
        return type(result)((values, chosen))


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def noisy(exact: np.ndarray, compute: Callable[[torch.dtype], np.ndarray]) -> np.ndarray:
    """Return `exact` as computed in fp16. compute: calls the model in a dtype.

    Where that exceeds fp16's range its errors are those of bf16, scaled.
    """
    rounded = exact
    for dtype, rounding in NOISE_DTYPES:
        rounded = exact + (compute(dtype) - exact) / np.float32(rounding)
        if np.isfinite(rounded).all():
            break
    return rounded


def _is_parameter(value: Any) -> bool:
    return type(value) is torch.nn.Parameter  # isinstance calls Python code of torch, which costs more than the rest


def _float32(value: Any) -> Any:
    if _is_float(value):
        return value.float()
    return value


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a function's arguments with `function` called on each, also within lists."""
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(_mapped(function, item) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    return function(value)


def round_activations(model: Any, weights: Weights, layers: int | str) -> None:
    """Hook a model's products, in place, so that they round their activations as the weights' precision does.

    The model's quantised weights are dequantised; the product of the rounded numbers is float32's.
    """
    if not has_8_bit_activations(weights.precision) or weights.quantization is None:
        return
    size = weights.quantization.group_size
    parameters: dict[str, str] = {}
    for name, tensors in checkpoint_layout(model).items():
        parameters |= dict.fromkeys(tensors, name)
    # Checkpoints of a bare decoder leave out the first part of the name ("transformer.").
    parameters |= {tensor.partition(".")[2]: name for tensor, name in parameters.items()}

    def before(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return rounded_rows(inputs[0], size), *inputs[1:]

    for tensor in weights.quantization.bits:
        if is_within(tensor, layers) and not _OF_EXPERTS.search(tensor):
            _module(model, parameters, tensor).register_forward_pre_hook(before)


def rounded_rows(values: torch.Tensor, group_size: int) -> torch.Tensor:
    """Round [..., in_features] to 8 bits, symmetric, to nearest, ties to even.

    To int8 as the kernels of ONNX Runtime do, in the groups of the weight: the step is the largest magnitude over 127.
    Or each row to e4m3: the step is its largest magnitude over 448.
    """
    if group_size == ROW:
        rows = values.float()
        step = torch.clamp(rows.abs().amax(-1, keepdim=True) / LARGEST, min=TINY)
        return ((rows / step).to(torch.float8_e4m3fn).float() * step).to(values.dtype)
    groups = values.float().unflatten(-1, (-1, group_size))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, _LEVELS / largest, 0.0)
    return (torch.round(groups * inverse) * (largest / _LEVELS)).flatten(-2).to(values.dtype)


def _module(model: Any, parameters: Mapping[str, str], tensor: str) -> Any:
    """Return the module whose product reads a tensor of the checkpoint. parameters: {tensor: name in the model}."""
    if HEAD.fullmatch(tensor):  # transformers may have another name for it
        return model.get_output_embeddings()
    module = model.get_submodule(module_of(parameters[tensor]))
    if isinstance(module, torch.nn.Embedding):  # a tied head
        return model.get_output_embeddings()
    return module


def rounded_heads(heads: torch.Tensor) -> torch.Tensor:
    """Round [..., head_dim] to e4m3, as the backend `cuda` stores keys (after RoPE) and values.

    Each token and head has a scale: the smallest power of two, from 2^-22 to 2^7, with which no number exceeds 448.
    """
    fraction, exponent = torch.frexp(heads.float().abs().amax(-1, keepdim=True))
    # `fraction` is at least 0.5; 448 is 0.875 * 2^9, so a larger fraction needs one more bit of the exponent.
    scale = torch.exp2(torch.clamp(exponent - 9 + (fraction > LARGEST / 512), -22, 7).float())
    codes = torch.clamp(heads.float() / scale, -LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(heads.dtype)


class RoundedCache(DynamicCache):
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().update(rounded_heads(key_states), rounded_heads(value_states), *args, **kwargs)


def round_kv_cache(model: PreTrainedModel) -> RemovableHandle:
    """Let a model of transformers keep rounded keys and values, also without `use_cache`."""

    def before(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        options = {**kwargs, "use_cache": True}
        if options.get("past_key_values") is None:
            options["past_key_values"] = RoundedCache(config=model.config)
        return args, options

    return model.register_forward_pre_hook(before, with_kwargs=True)
