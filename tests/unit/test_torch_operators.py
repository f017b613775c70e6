"""What torch's operators become computes what they compute."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from lockstep.export.torch_operators import OPSET, to_concat
from lockstep.onnx_tools.sessions import compute


class Assigned(torch.nn.Module):
    """Keys of two parts, as DeepSeek V3 puts them together; parts in the middle, every other number, rows."""

    def forward(self, x):
        keys, middle, others, rows = x.new_empty(x.shape), x.clone(), x.clone(), x.clone()
        keys[..., :3], keys[..., 3:] = 2 * x[..., :3], 3 * x[..., :5]
        middle[..., 2:5], middle[..., -2:] = 2 * x[..., :3], 3 * x[..., :2]
        others[..., ::2] = 2 * x[..., :4]
        rows[:, 1:2] = 5
        return keys, middle, others, rows


def test_an_assigned_slice_stands_between_what_is_left() -> None:
    count, table = torch.export.Dim("count"), {torch.ops.aten.slice_scatter.default: to_concat}
    program = torch.onnx.export(
        Assigned().eval(), (torch.zeros(2, 3, 8),), dynamic_shapes=({0: count},), opset_version=OPSET, dynamo=True,
        verbose=False, custom_translation_table=table,
    )  # fmt: skip
    assert program is not None
    x = torch.rand(5, 3, 8)
    found = compute(program.model_proto, {"x": x.numpy()})
    assert all(np.array_equal(*pair) for pair in zip(found.values(), Assigned()(x), strict=True))
    operators = Counter(node.op_type for node in program.model.graph)
    assert operators["ScatterND"] == 1, "of every other number alone"
    keys = program.model.graph.outputs[0].producer()
    assert keys.op_type == "Concat" and [value.producer().op_type for value in keys.inputs] == ["Mul", "Mul"]
