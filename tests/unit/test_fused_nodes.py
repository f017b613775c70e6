"""Norms and attention in one node each: in engines, and only where it is the same."""

from collections import Counter

import onnx
import pytest
from handmade import make

from lockstep.backends.onnxruntime.grouped_attention import grouped_attention
from lockstep.backends.onnxruntime.norms import fuse_norms
from lockstep.targets import Results


@pytest.fixture(scope="module")
def tiny(shared):
    return Results(shared.folder("tiny", lambda folder: make(folder, ["fp32", "fp16"])) / "results")


def operators(model):
    return Counter(node.op_type for node in model.graph.node)


def test_engines_have_them(tiny):
    folder = tiny.engines("tiny", "fp32", "onnxruntime").parent
    names = ("attention.decode", "attention.prefill", "middle")
    *attention, middle = (operators(onnx.load(folder / f"{name}.onnx")) for name in names)
    for counts in attention:
        assert counts["GroupQueryAttention"] == 1 and not counts["Softmax"] + counts["MatMul"] + counts["FusedMatMul"]
    assert middle["SimplifiedLayerNormalization"] == 2 and not middle["Reciprocal"]


def edited(model, operator, replace):
    """The model with `replace` called on its last node of this operator."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    replace([node for node in copy.graph.node if node.op_type == operator][-1])
    return copy


def test_others_stay_as_they_are(tiny):
    folder = tiny.assembly("tiny", "fp32").parent
    decode, prefill, middle = (
        onnx.load(folder / f"{name}.onnx") for name in ("attention.decode", "attention.prefill", "middle")
    )
    half = onnx.load(tiny.assembly("tiny", "fp16").parent / "attention.decode.onnx")
    other = edited(decode, "Softmax", lambda node: setattr(node, "op_type", "LogSoftmax"))
    axes = [edited(model, "Softmax", lambda node: setattr(node.attribute[0], "i", -2)) for model in (decode, prefill)]
    future = edited(prefill, "GreaterOrEqual", lambda node: node.input.reverse())
    for model in (middle, half, other, *axes, future):
        assert grouped_attention(model) is model
    assert operators(fuse_norms(middle))["SimplifiedLayerNormalization"] == 2
    one = edited(middle, "Sqrt", lambda node: setattr(node, "op_type", "Abs"))
    assert operators(fuse_norms(one))["SimplifiedLayerNormalization"] == 1
