"""Run a model of float32 in PyTorch as if it were one of 16 bits, or parameters of 16 bits as if they were float32.

Needs torch. A model and what runs it in; what transformers gives in that precision out: weights are cast where they
are read, each function rounds what it gives, and products accumulate in float32, as engines do. The model keeps its
weights: they are cast at each call, one at a time. The kernels are those of float32, which every CPU has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# What noise is measured in, with its rounding in units of fp16's: bf16 where values go beyond fp16's range.
NOISE_DTYPES = ((torch.float16, 1.0), (torch.bfloat16, 8.0))
_PRODUCTS = {
    functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.mm,
    torch.Tensor.mm, torch.bmm, torch.Tensor.bmm, torch.baddbmm, torch.Tensor.baddbmm, torch.addmm, torch.Tensor.addmm,
    torch.einsum, functional.conv1d, torch._grouped_mm,
}  # fmt: skip
_DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]


class Rounded(TorchFunctionMode):
    """Round to `dtype` what functions of torch give, and the parameters that they read; float32 rounds nothing.

    A parameter of the model says that it has this dtype; what is float32 without one (RoPE angles, softmax, norms)
    stays so, as transformers has it.
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
        if func is functional.embedding:  # of a large table a few rows are read
            return func(*args, **kwargs).to(self.dtype)
        args, kwargs = _mapped(self._parameter, args), _mapped(self._parameter, kwargs)
        if func not in _PRODUCTS:
            return func(*args, **kwargs)
        return func(*_mapped(_float32, args), **_mapped(_float32, kwargs)).to(self.dtype)

    def _parameter(self, value: Any) -> Any:
        return value.to(self.dtype) if _is_parameter(value) else value


def noisy(exact: np.ndarray, compute: Callable[[torch.dtype], np.ndarray]) -> np.ndarray:
    """Return what `compute` gives in fp16 in the place of `exact`.

    Where that goes beyond fp16's range its errors are those of bf16, scaled. compute: is given the dtype, and calls the
    model in it.
    """
    rounded = exact
    for dtype, rounding in NOISE_DTYPES:
        rounded = exact + (compute(dtype) - exact) / np.float32(rounding)
        if np.isfinite(rounded).all():
            break
    return rounded


def _is_parameter(value: Any) -> bool:
    return isinstance(value, torch.nn.Parameter)


def _float32(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.float() if is_half else value


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a function's arguments with `function` called on each, also within lists."""
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(_mapped(function, item) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    return function(value)
