"""Quantised tensors: which are kept as integers with scales, and their names.

A linear weight `[out_features, in_features]` is cut along its rows into groups of `group_size` numbers. It is kept as
two tensors: `<name>.data`, uint8 `[out_features, num_groups, group_size * bits / 8]`, whose zero point is the middle of
their range (8 or 128), of 4 bits two to a byte, the first in the low half; and `<name>.scales`, float32 `[out_features,
num_groups]`. That is the layout of ONNX Runtime's `MatMulNBits`. Where a checkpoint was quantised with other zero
points, these are a third, `<name>.zero_points`, uint8 `[out_features, num_groups * bits / 8 (rounded up)]`, packed as
the integers. Where its groups are of columns that are not contiguous, `<name>.order`, int64 `[in_features]`, has the
column of each place within the groups.

With a group size of 0 (`ROW`) a weight is e4m3 numbers with a scale a row: `<name>.data`, float8_e4m3fn `[out_features,
in_features]`, and `<name>.scales`, float32 `[out_features]`.

A checkpoint may hold a linear weight as `[in_features, out_features]` (GPT-2); it is kept transposed, as all others.

Stacks of MXFP4, which a model has as `[num_experts, in_features, out_features]`, are two tensors of the checkpoint as
they are: `<name>.data`, uint8 `[num_experts, out_features, num_groups, 16]`, codes of numbers, and `<name>.scales`,
uint8 `[num_experts, out_features, num_groups]`, shared exponents (`weights.mxfp4`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from lockstep.artifacts.bounds import GroupSize, Name
from lockstep.artifacts.document import length, one_of

_DATA = ".data"
_SCALES = ".scales"
_ZERO_POINTS = ".zero_points"
_ORDER = ".order"


@dataclass(frozen=True)
class QuantizedTensors:
    """The tensors of a checkpoint that are quantised.

    bits: {name: bits of a number}. zero_points: whether each has some. ordered: whether each has an order.
    mxfp4: whether they are stacks of MXFP4. transposed: which the checkpoint holds as [in_features, out_features].
    """

    group_size: GroupSize
    bits: Mapping[Name, Annotated[int, one_of(4, 8)]]
    zero_points: bool = False
    ordered: bool = False
    mxfp4: bool = False
    transposed: Annotated[tuple[Name, ...], length(1_000_000)] = ()

    def parts(self, name: str) -> list[str]:
        """Return the names of the tensors that a quantised tensor or slot is kept as."""
        parts = [data_name(name), scales_name(name)]
        if self.zero_points:
            parts.append(zero_points_name(name))
        if self.ordered:
            parts.append(order_name(name))
        return parts


def data_name(name: str) -> str:
    return name + _DATA


def scales_name(name: str) -> str:
    return name + _SCALES


def zero_points_name(name: str) -> str:
    return name + _ZERO_POINTS


def order_name(name: str) -> str:
    return name + _ORDER


def is_data(name: str) -> bool:
    return name.endswith(_DATA)


def is_scales(name: str) -> bool:
    return name.endswith(_SCALES)


def module_of(tensor: str) -> str:
    return tensor.removesuffix(_DATA).removesuffix(".weight")


def quantized_names(names: Mapping[str, Any]) -> list[str]:
    """Return the tensors of which `names` has both data and scales, sorted."""
    stems = (name.removesuffix(_DATA) for name in names if name.endswith(_DATA))
    return sorted(stem for stem in stems if scales_name(stem) in names)
