"""Norms, RoPE and attention in one node each, in engines, and only where it is the same; layers in one graph."""

from collections import Counter

import numpy as np
import onnx
import pytest
from handmade import make

from lockstep import Advance, Model, ModelOptions
from lockstep.backends.onnxruntime.backend import OnnxRuntimeBackend
from lockstep.backends.onnxruntime.grouped_attention import GroupedAttention
from lockstep.backends.onnxruntime.norms import FuseNorms
from lockstep.onnx_tools.toolkit import run_passes
from lockstep.targets import Results


@pytest.fixture(scope="module")
def tiny(shared):
    return Results(shared.folder("tiny", lambda folder: make(folder, ["fp32", "fp16"])) / "results")


def fused(model, graph_pass):
    return run_passes(model, graph_pass, check=False)


def operators(model):
    return Counter(node.op_type for node in model.graph.node)


def test_engines_have_them(tiny):
    folder = tiny.engines("tiny", "fp32", "onnxruntime").parent
    names = ("attention.decode", "attention.prefill", "middle")
    *attention, middle = (operators(onnx.load(folder / f"{name}.onnx")) for name in names)
    for counts in attention:
        assert counts["GroupQueryAttention"] == 1 and not counts["Softmax"] + counts["MatMul"] + counts["FusedMatMul"]
    assert (attention[0]["RotaryEmbedding"], attention[0]["Split"]) == (2, 0)
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
        assert fused(model, GroupedAttention()) is model
    assert operators(fused(middle, FuseNorms()))["SimplifiedLayerNormalization"] == 2
    edited_graph = edited(middle, "Sqrt", lambda node: setattr(node, "op_type", "Abs"))
    assert operators(fused(edited_graph, FuseNorms()))["SimplifiedLayerNormalization"] == 1


def test_rope_that_the_node_does_not_know_stays(tiny):
    decode = onnx.load(tiny.assembly("tiny", "fp32").parent / "attention.decode.onnx")
    for operator in ("Neg", "Cos"):  # other halves are turned, other angles
        other = operators(
            fused(edited(decode, operator, lambda node: setattr(node, "op_type", "Sin")), GroupedAttention())
        )
        assert (other["GroupQueryAttention"], other["RotaryEmbedding"]) == (1, 0)


def test_layers_in_one_graph_have_the_bits_of_their_engines(tiny, monkeypatch):
    paths = tiny.engines("tiny", "fp32", "onnxruntime"), tiny.assembly("tiny", "fp32"), tiny.weights("tiny", "fp32")
    full = Model.open(*paths, options=ModelOptions(max_batch_size=3, max_seq_len=64))
    monkeypatch.setattr(OnnxRuntimeBackend, "decode_layers", lambda self, network, weights: None)
    cut = Model.open(*paths, options=ModelOptions(max_batch_size=3, max_seq_len=64))
    tokens = np.arange(64) % 90

    def logits(model):
        yield model.step([Advance(0, tokens[:1], 0)])
        yield from (logits for _, logits in model.logits_after(0))
        for slot, length in ((0, 10), (1, 64), (2, 20)):  # the second row is full
            yield model.step([Advance(slot, tokens[:length], 0)]) if slot else model.step([Advance(0, tokens[1:10], 1)])
        for slots in ((0, 1, 2), (0, 2), (2,), (0, 2)):
            at = model.executor.lengths
            yield model.step([Advance(slot, tokens[:1], int(at[slot])) for slot in slots if at[slot] < 64])

    actual = [*logits(full)]
    expected = [*logits(cut)]
    assert all(np.array_equal(*pair) for pair in zip(actual, expected, strict=True))
    assert [len(model.executor.last_step[0].calls) for model in (full, cut)] == [3, 8]
