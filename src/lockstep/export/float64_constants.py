"""Constants of a model that do not depend on the CPU that computes them.

torch's vectorised `pow`, `exp`, `sin` etc. differ in the last bit between instruction sets, and sums between numbers of
threads: so would RoPE frequencies and the graphs that hold them. Under `float64_constants` each operator computes in
float64, and its result is rounded once to its usual dtype. Sums of two, products, quotients and square roots keep their
bits; for other operators this defines the result: the exact value, rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_EXACT_IN_PLACE = ("aten::copy_", "aten::fill_", "aten::zero_")


@contextmanager
def float64_constants() -> Iterator[None]:
    """Compute each operator on tensors with values in float64, and round its result once."""
    with torch.no_grad(), _Float64():
        yield


class _Float64(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        operands = _tensors((args, kwargs))
        # Views and copies round nothing, random numbers would differ in float64, and tensors without values have none.
        if (
            func.is_view
            or func._schema.name in _EXACT_IN_PLACE
            or torch.Tag.nondeterministic_seeded in func.tags
            or any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in operands)
        ):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return _in_place(func, args, kwargs)
        narrow = func(*args, **kwargs)  # for the dtypes of the results, which are then computed in float64
        dtypes = {tensor.dtype for tensor in _tensors(narrow) if not tensor.is_meta}
        if not dtypes.intersection(_NARROW):
            return narrow
        if "dtype" in {argument.name for argument in func._schema.arguments}:
            kwargs["dtype"] = torch.float64
        wide = func(*_widened(args), **_widened(kwargs))
        return tree_map(lambda result, like: result.to(like.dtype), wide, narrow)


def _in_place(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an in-place operator on float64 copies, and copy the results back into the tensors that it writes."""
    parameters = func._schema.arguments
    names = [parameter.name for parameter in parameters]
    written = [parameter.name for parameter in parameters if parameter.alias_info and parameter.alias_info.is_write]
    values = dict(zip(names, args)) | dict(kwargs)
    wide = {name: _widened(value) for name, value in values.items()}
    func(*[wide[name] for name in names[: len(args)]], **{name: wide[name] for name in kwargs})
    for name in written:
        values[name].copy_(wide[name])
    return values[written[0]]  # in-place operators return what they write


def _widened(values: Any) -> Any:
    """Return copies of narrow floating-point tensors in float64, and everything else unchanged."""

    def widen(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype in _NARROW:
            return leaf.double()
        return leaf

    return tree_map(widen, values)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
