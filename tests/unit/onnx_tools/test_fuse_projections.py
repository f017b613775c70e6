"""Fused graphs compute what the canonical graph computes: both run in ONNX Runtime on the same inputs."""

import functools
import itertools

import families
import handmade
import numpy as np
import onnx
import pytest

from lockstep.artifacts.signature import IO
from lockstep.errors import CheckError
from lockstep.onnx_tools.fuse_projections import FuseProjections
from lockstep.onnx_tools.prepare import Prepared, check_same, prepare
from lockstep.onnx_tools.sessions import compute
from lockstep.onnx_tools.toolkit import run_passes

pytestmark = pytest.mark.exports

FAMILIES = {"llama": (handmade.CONFIG, "fp16"), "llama (biases)": (families.FAMILIES["llama"].config, "fp32")}


@pytest.fixture(scope="module")
def graphs(shared):
    """[(file name, canonical model)] of a family."""

    @functools.cache
    def load(family):
        files, _ = shared.assembled(*FAMILIES[family])
        return [(file, onnx.load_from_string(data)) for file, data in sorted(files.items())]

    return load


def fuse(model, slots):
    fusion = FuseProjections(slots)
    return run_passes(model, fusion), fusion.parts


def inputs_of(model, seed=0):
    """Random values for every input; integers that are valid positions, rows and lengths for 3 tokens and a cache of
    5."""
    random = np.random.default_rng(seed)
    sizes = {"num_tokens": 3, "num_requests": 3, "past_capacity": 5}
    feeds = {}
    for value in model.graph.input:
        shape = [dim.dim_value or sizes[dim.dim_param] for dim in value.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        integers = {
            "position_ids": np.arange(2, 5),
            "past_lengths": np.arange(2, 2 + (shape or [1])[0]),
            "logit_rows": np.array([2, 0, 1]),
        }
        if dtype.kind == "i":
            feeds[value.name] = integers.get(value.name, np.array([5, 1, 63]))
        else:
            feeds[value.name] = (random.standard_normal(shape) * 0.3).astype(dtype)
    return feeds


@pytest.mark.parametrize(("family", "products"), [("llama", 4), ("llama (biases)", 4)])
def test_fused_projections_compute_the_same(graphs, family, products):
    (model,) = [model for name, model in graphs(family) if name == "middle.onnx"]
    slots = {value.name for value in model.graph.input if value.name not in ("hidden", "attention")}
    fused, mapping = fuse(model, slots)
    assert sum(node.op_type == "Gemm" for node in fused.graph.node) == products  # qkv, output, gate and up, down
    assert sorted(itertools.chain(*mapping.values())) == sorted(slots)
    feeds = inputs_of(model)
    rows = {}
    for slot, parts in mapping.items():
        rows[slot] = np.concatenate([feeds[part] for part in parts])
    expected = compute(model, feeds)
    actual = compute(fused, {name: feeds[name] for name in ("hidden", "attention")} | rows)
    for output in expected:
        # sums of 32 products of size 0.1 in another blocking: fp32 1e-6; in fp16 one unit in the last place of values
        # up to 1
        np.testing.assert_allclose(
            actual[output], expected[output], rtol=0, atol=1e-3 if family == "llama" else 1e-5, err_msg=output
        )


def test_a_scalar_among_the_weights_stays_one():
    """Apertus's activation has two."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]>
        g (float[3, 8] hidden, float[4, 8] gate, float[4, 8] up, float alpha) => (float[3, 4] out)
        { a = Gemm<transB = 1>(hidden, gate)  b = Gemm<transB = 1>(hidden, up)  c = Mul(a, alpha)  out = Mul(c, b) }"""
    )
    slots = [IO("gate", "float32", (4, 8)), IO("up", "float32", (4, 8)), IO("alpha", "float32", ())]
    prepared = prepare(model, slots, {"fuse_projections": True})
    assert [(slot.name, slot.shape) for slot in prepared.slots] == [("alpha", ()), ("gate + up", (8, 8))]


def test_fp32_made_from_fp16_products_may_differ_by_fp16s_last_bits():
    """Some models normalise fp16 queries and keys in fp32. Which bits a product in fp16 ends in depends on the
    processor; here it is rounded by hand."""
    text = """<ir_version: 10, opset_import: ["": 20]> g (float16[3, 64] hidden, float16[32, 64] weight) => (float[3, 32] key)
    { h = Cast<to = 1>(hidden)  w = Cast<to = 1>(weight)  PRODUCT  short = Cast<to = 10>(y)  key = Cast<to = 1>(short) }"""  # noqa: E501
    halves = """h1, h2 = Split<axis = 1, num_outputs = 2>(h)  w1, w2 = Split<axis = 1, num_outputs = 2>(w)  y1 = Gemm<transB = 1>(h1, w1)
    short1 = Cast<to = 10>(y1)  long1 = Cast<to = 1>(short1)  y2 = Gemm<transB = 1>(h2, w2)  y = Add(long1, y2)"""  # noqa: E501
    full, parts = (
        onnx.parser.parse_model(text.replace("PRODUCT", product)) for product in ("y = Gemm<transB = 1>(h, w)", halves)
    )
    check_same(full, Prepared(parts, [], {"weight": ["weight"]}))
    wrong = onnx.parser.parse_model(text.replace("PRODUCT", halves.replace("Add", "Sub")))
    with pytest.raises(CheckError, match="output key: expected an error of at most .* is not equivalent"):
        check_same(full, Prepared(wrong, [], {"weight": ["weight"]}))


def test_a_weight_that_another_operator_reads_is_not_fused():
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[n, 4] x, float[2, 4] a, float[2, 4] b) => (float[n, 2] y, float[n, 2] z, float[2, 4] c)
    { y = Gemm<transB = 1>(x, a)  z = Gemm<transB = 1>(x, b)  c = Neg(b) }"""  # noqa: E501
    fused, mapping = fuse(onnx.parser.parse_model(text), {"a", "b"})
    assert mapping == {"a": ["a"], "b": ["b"]} and sum(node.op_type == "Gemm" for node in fused.graph.node) == 2
