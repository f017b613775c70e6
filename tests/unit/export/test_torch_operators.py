"""Translations of torch's operators compute the same numbers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxscript
import torch
from torch.onnx._internal.exporter import _core as exporter

from lockstep.export.bfloat16 import widen_unsupported
from lockstep.export.torch_operators import OPSET, to_concat, torch_operators
from lockstep.onnx_tools.sessions import compute


class Assigned(torch.nn.Module):
    """Keys of two parts, as DeepSeek V3 puts them together; parts in the middle, every other number, rows."""

    def forward(self, x):
        keys = x.new_empty(x.shape)
        middle = x.clone()
        result = x.clone()
        rows = x.clone()
        keys[..., :3] = 2 * x[..., :3]
        keys[..., 3:] = 3 * x[..., :5]
        middle[..., 2:5] = 2 * x[..., :3]
        middle[..., -2:] = 3 * x[..., :2]
        result[..., ::2] = 2 * x[..., :4]
        rows[:, 1:2] = 5
        return keys, middle, result, rows


def test_an_assigned_slice_stands_between_what_is_left() -> None:
    count = torch.export.Dim("count")
    table = {torch.ops.aten.slice_scatter.default: to_concat}
    program = torch.onnx.export(
        Assigned().eval(), (torch.zeros(2, 3, 8),), dynamic_shapes=({0: count},), opset_version=OPSET, dynamo=True,
        verbose=False, custom_translation_table=table,
    )  # fmt: skip
    assert program is not None
    x = torch.rand(5, 3, 8)
    actual = compute(program.model_proto, {"x": x.numpy()})
    assert all(np.array_equal(*pair) for pair in zip(actual.values(), Assigned()(x), strict=True))
    operators = Counter(node.op_type for node in program.model.graph)
    assert operators["ScatterND"] == 1, "of every other number alone"
    keys = program.model.graph.outputs[0].producer()
    assert keys.op_type == "Concat" and [value.producer().op_type for value in keys.inputs] == ["Mul", "Mul"]


class OfBfloat16(torch.nn.Module):
    """What models compute in bfloat16 by operators that ONNX has no bfloat16 for."""

    def forward(self, x):
        narrow = x.bfloat16()
        values, places = narrow.topk(3, dim=-1)
        ordered, order = narrow.sort(dim=-1, descending=True)
        products = torch.einsum("ab,cb->ac", narrow, narrow)
        convolved = torch.nn.functional.conv1d(narrow[:, None], narrow[:1, None, :3])
        bent = [torch.nn.functional.softplus(narrow), torch.nn.functional.mish(narrow), narrow.sin(), narrow.cos()]
        numbers = [values, ordered, products, convolved, *bent, narrow.round(), narrow.atan()]
        return *(number.float() for number in numbers), places, order


def test_operators_without_bfloat16_compute_in_float32() -> None:
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(0)) * 3
    program = torch.export.export(OfBfloat16().eval(), (x,))
    model = exporter.export(program, (), {}, registry=torch_operators(), opset_version=OPSET, optimize=False).model
    onnxscript.optimizer.optimize_ir(model)
    widen_unsupported(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    actual = list(compute(proto, {"x": x.numpy()}).values())
    expected = [value.numpy() for value in OfBfloat16()(x)]
    assert len(actual) == len(expected) == 12
    for number, (ours, theirs) in enumerate(zip(actual, expected)):
        if number in (0, 1, 8, 10, 11):  # chosen, ordered or rounded: the same numbers
            np.testing.assert_array_equal(ours, theirs)
        else:  # computed: one rounding to 8 bits, of sums in another order
            np.testing.assert_allclose(ours, theirs, rtol=2**-7, atol=2**-7)
