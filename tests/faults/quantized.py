"""Faults of quantised weights: which scales go with which integers, how these are packed, where their zero is."""

from __future__ import annotations

from functools import partial

from onnx import NodeProto, TensorProto

from faults.assembly import bind, swap
from faults.edit import LAST, Edit, Value
from faults.fault import ASSEMBLY, HOST, INTEGER_WEIGHTS, MIDDLE, Fault, change


@change
def scales_of_the_one_before(edit: Edit, projection: str, axis: int) -> None:
    """Each group, or row, is scaled as the one before it; the first as the last."""
    product = edit.quantized_product(projection)
    product.input[2] = rolled(edit, product.input[2], axis)


def rolled(edit: Edit, scales: Value, axis: int) -> Value:
    """Move each number to the next place along an axis, the last to the first."""
    first = edit.op("Slice", scales, edit.ints(0), edit.ints(-1), edit.ints(axis))
    last = edit.op("Slice", scales, edit.ints(-1), edit.ints(LAST), edit.ints(axis))
    return edit.op("Concat", last, first, axis=axis)


def zero_point(edit: Edit) -> None:
    """One below the middle, as of weights that are stored with zero points less one."""
    product = edit.quantized_product("gate_proj")
    sizes = {entry.name: entry.i for entry in product.attribute}
    groups = sizes["K"] // sizes["block_size"]
    is_small = sizes["bits"] == 4
    columns, byte = ((groups + 1) // 2, 0x77) if is_small else (groups, 0x7F)
    product.input.append(edit.const([byte] * (sizes["N"] * columns), "uint8"))


def halves_reversed(edit: Edit) -> None:
    """Take the first of two numbers from the high half of a byte."""
    product = edit.quantized_product("up_proj")
    data = product.input[1]
    four = edit.const(4, "uint8")
    high = edit.op("BitShift", data, four, direction="RIGHT")
    product.input[1] = edit.op("BitwiseOr", high, edit.op("BitShift", data, four, direction="LEFT"))


def of_e4m3(edit: Edit, text: str) -> list[NodeProto]:
    """Return the nodes of a product with a weight: the division of activations, both their casts, and the Gemm."""
    weight = edit.reader(edit.slot(f"{text}.weight.data"), "Cast")
    nodes = [edit.reader(weight.output[0], "Gemm")]
    while len(nodes) < 4:
        before = edit.producer(nodes[0].input[0])
        assert before is not None  # as fp8_products.py has it
        nodes.insert(0, before)
    return nodes


def e5m2(edit: Edit) -> None:
    """Activations are e5m2: two bits of the number, not three."""
    of_e4m3(edit, "down_proj")[1].attribute[0].i = TensorProto.FLOAT8E5M2


def saturated(edit: Edit) -> None:
    """The step is halved: numbers beyond half the largest one saturate."""
    division, _, _, gemm = of_e4m3(edit, "down_proj")
    step = edit.op("Mul", division.input[1], edit.const(0.5, "float32"))
    division.input[1] = edit.reader(gemm.output[0], "Mul").input[1] = step


def scales_of_the_row_before(edit: Edit) -> None:
    """Each output has the scale of the one before, the first that of the last."""
    scales = edit.slot("o_proj.weight.scales")
    product = edit.reader(scales, "Mul")
    product.input[1] = rolled(edit, scales, 0)


fault = partial(Fault, precisions=INTEGER_WEIGHTS, backends=HOST)
of_fp8 = partial(Fault, precisions=("w8a8-fp8",), backends=("onnxruntime",))
# fmt: off
FAULTS = (
    fault("scales-swapped", "scales of gate and up swapped", ASSEMBLY,
          swap(1, "block", "gate_proj.weight.scales", "up_proj.weight.scales")),
    fault("scales-of-another-layer", "the first layer's down projection has the second's scales", ASSEMBLY,
          bind(1, "block", "down_proj.weight.scales", "model.layers.1.mlp.down_proj.weight.scales")),
    fault("scales-next-group", "a group off by one: each has the scale of the one before", MIDDLE,
          scales_of_the_one_before("down_proj", 1)),
    fault("scales-next-row", "each row has the scales of the one before", MIDDLE,
          scales_of_the_one_before("o_proj", 0)),
    fault("zero-point", "zero points one below the middle", MIDDLE, zero_point),
    fault("halves-reversed", "packed numbers in the other order", MIDDLE, halves_reversed,
          precisions=("w4a16", "w4a8")),
    of_fp8("fp8-scales-swapped", "scales of gate and up swapped", ASSEMBLY,
           swap(1, "block", "gate_proj.weight.scales", "up_proj.weight.scales")),
    of_fp8("fp8-scales-next-row", "each row has the scale of the one before", MIDDLE, scales_of_the_row_before),
    of_fp8("fp8-e5m2", "activations of down_proj in e5m2", MIDDLE, e5m2),
    of_fp8("fp8-saturated", "activations of down_proj beyond half the largest saturate", MIDDLE, saturated),
)
# fmt: on
