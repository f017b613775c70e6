"""Faults of quantised weights: scales, packing, zero points.

Which scales go with which integers, how these are packed, where their zero is.
"""

from __future__ import annotations

from faults.binding import bind, swap
from faults.edit import LAST, Edit
from faults.fault import Fault

PRECISIONS = ("w8a16", "w4a16")
BACKENDS = ("onnxruntime", "openvino")


def _next_group(edit: Edit) -> None:
    """Each group is scaled as the one before it; the first as the last."""
    product = edit.quantized_product("down_proj")
    scales, axis = product.input[2], edit.ints(1)
    first = edit.op("Slice", scales, edit.ints(0), edit.ints(-1), axis)
    last = edit.op("Slice", scales, edit.ints(-1), edit.ints(LAST), axis)
    product.input[2] = edit.op("Concat", last, first, axis=1)


def _next_row(edit: Edit) -> None:
    product = edit.quantized_product("o_proj")
    scales, axis = product.input[2], edit.ints(0)
    first = edit.op("Slice", scales, edit.ints(0), edit.ints(-1), axis)
    last = edit.op("Slice", scales, edit.ints(-1), edit.ints(LAST), axis)
    product.input[2] = edit.op("Concat", last, first, axis=0)


def _zero_point(edit: Edit) -> None:
    """One below the middle, as of weights that are stored with zero points less one."""
    product = edit.quantized_product("gate_proj")
    sizes = {entry.name: entry.i for entry in product.attribute}
    groups, is_small = sizes["K"] // sizes["block_size"], sizes["bits"] == 4
    columns, byte = ((groups + 1) // 2, 0x77) if is_small else (groups, 0x7F)
    product.input.append(edit.const([byte] * (sizes["N"] * columns), "uint8"))


def _halves_reversed(edit: Edit) -> None:
    """Take the first of two numbers from the high half of a byte."""
    product = edit.quantized_product("up_proj")
    data, four = product.input[1], edit.const(4, "uint8")
    high = edit.op("BitShift", data, four, direction="RIGHT")
    product.input[1] = edit.op("BitwiseOr", high, edit.op("BitShift", data, four, direction="LEFT"))


FAULTS = (
    Fault(
        "scales-swapped",
        "scales of gate and up swapped",
        assembly=swap(1, "block", "gate_proj.weight.scales", "up_proj.weight.scales"),
        precisions=PRECISIONS,
        backends=BACKENDS,
    ),
    Fault(
        "scales-of-another-layer",
        "the first layer's down projection has the second's scales",
        assembly=bind(1, "block", "down_proj.weight.scales", "model.layers.1.mlp.down_proj.weight.scales"),
        precisions=PRECISIONS,
        backends=BACKENDS,
    ),
    Fault(
        "scales-next-group",
        "a group off by one: each has the scale of the one before",
        graphs=("middle",),
        edit=_next_group,
        precisions=PRECISIONS,
        backends=BACKENDS,
    ),
    Fault(
        "scales-next-row",
        "each row has the scales of the one before",
        graphs=("middle",),
        edit=_next_row,
        precisions=PRECISIONS,
        backends=BACKENDS,
    ),
    Fault(
        "zero-point",
        "zero points one below the middle",
        graphs=("middle",),
        edit=_zero_point,
        precisions=PRECISIONS,
        backends=BACKENDS,
    ),
    Fault(
        "halves-reversed",
        "packed numbers in the other order",
        graphs=("middle",),
        edit=_halves_reversed,
        precisions=("w4a16",),
        backends=BACKENDS,
    ),
)
