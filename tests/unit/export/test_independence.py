"""No token may depend on another outside attention: graphs that mix tokens are rejected with the operator's name, and
RoPE that changes with length is frozen."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from families import FAMILIES
from onnx.reference import ReferenceEvaluator
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from lockstep.config.sources import read_shape
from lockstep.errors import InputError
from lockstep.export.independence import check_independence
from lockstep.export.language import build_config
from lockstep.export.movement import unfold_copies
from lockstep.export.parity import reference_model
from lockstep.export.rope import freeze_ropes, position_limit
from lockstep.export.tracer import meta_model
from lockstep.export.unique_layers import trace_unique_layers

HEAD = """<ir_version: 8, opset_import: ["": 20]> g (float[num_tokens, 4] hidden, int64[num_tokens] position_ids) => (float[num_tokens, 4] out)
    <int64[1] zero = {0}, int64[1] one = {1}, int64[2] turned = {4, -1}, int64[2] back = {-1, 4}, int64[1] end = {9223372036854775807}, int64 first = {0}, int64 step = {1},
     int64[2] two = {2, -1}>"""  # noqa: E501


def check(body: str) -> None:
    model = onnx.parser.parse_model(f"{HEAD} {{ {body} }}")
    check_independence(
        ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(model, data_prop=True)).graph, "toy"
    )


@pytest.mark.parametrize(
    "body",
    [
        "out = Mul(hidden, hidden)",
        "m = ReduceMean(hidden, one)  out = Sub(hidden, m)",
        "s = Softmax<axis = -1>(hidden)  out = Add(s, hidden)",
        "t = Transpose<perm = [1, 0]>(hidden)  s = Softmax<axis = 0>(t)  out = Transpose<perm = [1, 0]>(s)",
        "p = Unsqueeze(position_ids, one)  f = Cast<to = 1>(p)  out = Add(hidden, f)",
        "n = Shape(hidden)  out = Reshape(hidden, n)",
        "n = Shape(hidden)  z = ConstantOfShape(n)  out = Add(hidden, z)",
    ],
)
def test_token_wise_graphs_pass(body):
    check(body)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("m = ReduceMean(hidden, zero)  out = Sub(hidden, m)", "ReduceMean mixes along the tokens"),
        ("m = ReduceMax<keepdims = 0>(position_ids)  f = Cast<to = 1>(m)  out = Mul(hidden, f)",
         "ReduceMax mixes along the tokens"),
        ("c = CumSum(hidden, first)  out = Add(hidden, c)", "CumSum mixes along the tokens"),
        ("out = Softmax<axis = 0>(hidden)", "Softmax mixes along the tokens"),
        ("a = Slice(hidden, one, end, zero)  b = Slice(hidden, zero, one, zero)  out = Concat<axis = 0>(a, b)",
         "Slice mixes along the tokens"),
        ("out = Gather<axis = 0>(hidden, position_ids)", "Gather mixes along the tokens"),
        ("t = Transpose<perm = [1, 0]>(hidden)  s = MatMul(hidden, t)  out = MatMul(s, hidden)",
         "MatMul mixes along the tokens"),
        ("t = Reshape(hidden, turned)  u = Transpose<perm = [1, 0]>(t)  out = Identity(u)",
         "Reshape mixes along the tokens"),
        ("n = Shape(hidden)  f = Cast<to = 1>(n)  s = ReduceSum<keepdims = 0>(f)  out = Mul(hidden, s)",
         "ReduceSum computes with the number of tokens"),
        ("n = Shape<end = 1>(hidden)  k = Squeeze(n)  r = Range(first, k, step)  f = Cast<to = 1>(r)  g = "
         "Unsqueeze(f, one)  out = Add(hidden, g)",
         "Range computes with the number of tokens"),
        ("n = Shape<end = 1>(hidden)  o = ConstantOfShape<value = int64[1] {1}>(n)  c = CumSum(o, first)  f "
         "= Cast<to = 1>(c)  g = Unsqueeze(f, one)  out = Add(hidden, g)",
         "CumSum mixes along the tokens"),
        ("i = NonZero(hidden)  out = GatherND(hidden, i)",
         "NonZero may mix tokens: it is not known to keep them apart"),
    ],
)  # fmt: skip
def test_mixed_tokens_are_named(body, named):
    with pytest.raises(InputError) as error:
        check(body)
    assert f"outside attention its {named}" in str(error.value) and "the other requests of its steps" in str(
        error.value
    )


LLAMA = {**FAMILIES["llama"].config, "num_hidden_layers": 1}


@pytest.mark.long
def test_copies_of_all_tokens_get_a_dimension_of_their_own():
    """As Llama 4 deals tokens out: all to each expert, with scores of which all but one are zero."""
    text = """<ir_version: 8, opset_import: ["": 20]> g (float[num_tokens, 4] hidden, float[num_tokens, 3] scores) => (float[num_tokens, 4] out)
        <float[3, 4, 4] up = {UP}, int64[2] copies = {3, 1}, int64[2] column = {-1, 1}, int64[3] apart = {3, -1, 4}, int64[2] flat = {-1, 4}, int64[1] first = {0}> {
        repeated = Tile(hidden, copies)  by_expert = Transpose<perm = [1, 0]>(scores)  factors = Reshape(by_expert, column)
        product = Mul(repeated, factors)  dealt = Reshape(product, apart)  each = MatMul(dealt, up)  together = Reshape(each, flat)
        again = Reshape(together, apart)  out = ReduceSum<keepdims = 0>(again, first)
    }"""  # noqa: E501
    text = text.replace("UP", ", ".join(str(number / 7) for number in range(48)))
    full = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), data_prop=True)
    model = ir.serde.deserialize_model(full)
    with pytest.raises(InputError, match="Tile"):
        check_independence(model.graph, "toy")
    unfold_copies(model)
    check_independence(model.graph, "toy")
    random = np.random.default_rng(0)
    shapes = {"hidden": (5, 4), "scores": (5, 3)}
    feeds = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    results = [ReferenceEvaluator(item).run(None, feeds)[0] for item in (full, ir.serde.serialize_model(model))]
    assert np.array_equal(*results)


@pytest.mark.exports
def test_a_model_whose_layers_mix_tokens_beyond_some_length_is_refused(monkeypatch):
    forward = modeling_llama.LlamaMLP.forward

    def mixes(self, x):  # from 5000 tokens on: no numeric gate goes there
        return forward(self, x) + torch.relu(x.abs().sum(1, keepdim=True) - 5000.0)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", mixes)
    with pytest.raises(InputError, match="ReduceSum mixes along the tokens"):
        trace_unique_layers(meta_model(LLAMA, "fp32"))


@pytest.mark.long
@pytest.mark.exports
def test_a_rope_that_reads_the_longest_position_is_refused(monkeypatch):
    forward = modeling_llama.LlamaRotaryEmbedding.forward

    def switches(self, x, position_ids):
        cos, sin = forward(self, x, position_ids)
        long = position_ids.max() > 100_000
        return torch.where(long, cos * 2, cos), sin

    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", switches)
    with pytest.raises(InputError, match="ReduceMax mixes along the tokens"):
        trace_unique_layers(meta_model(LLAMA, "fp32"))


def longrope(**options):
    return {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + 0.1 * i for i in range(6)],
        "long_factor": [2.0 + i for i in range(6)], **options,
    }  # fmt: skip


PHI3 = {
    **FAMILIES["phi3"].config, "sliding_window": None, "num_hidden_layers": 1, "original_max_position_embeddings": 32,
    "rope_parameters": longrope(),
}  # fmt: skip
PHIMOE = {
    **FAMILIES["phi3"].config, "model_type": "phimoe", "sliding_window": None, "num_hidden_layers": 1,
    "num_local_experts": 4, "num_experts_per_tok": 2,
    "rope_parameters": longrope(original_max_position_embeddings=32, short_mscale=1.1, long_mscale=1.3),
}  # fmt: skip
LLAMA4 = {**FAMILIES["llama4_text"].config, "num_hidden_layers": 4, "floor_scale": 16}
DYNAMIC = {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}


@pytest.mark.parametrize(
    ("config", "limit"),
    [(PHI3, 32), (PHIMOE, 32), (DYNAMIC, 128), (LLAMA4, 15)],
    ids=["phi3", "phimoe", "dynamic", "llama4"],
)
def test_what_changes_with_length_is_held_to_what_it_is_first(config, limit):
    """The frozen model gives what transformers gives up to the limit, bit for bit, and something else beyond it, where
    users cannot go."""
    assert position_limit(build_config(config))[0] == limit
    model = reference_model(config, 0, 1.0)
    frozen = reference_model(config, 0, 1.0)
    freeze_ropes(frozen)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 288, limit + 1))[None]
    with torch.no_grad():
        at, beyond = (
            torch.equal(model(ids[:, :n], use_cache=False).logits, frozen(ids[:, :n], use_cache=False).logits)
            for n in (limit, limit + 1)
        )
    assert at and not beyond


@pytest.mark.long
@pytest.mark.traces
@pytest.mark.exports
def test_a_frozen_rope_leaves_no_look_at_other_tokens_in_the_trace():
    trace_unique_layers(meta_model(PHI3, "fp32"))
    with pytest.raises(InputError, match="mixes along the tokens"):
        meta = meta_model({**PHI3, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, "fp32")
        for module in meta.modules():  # as transformers makes it
            if getattr(module, "rope_type", None):
                module.rope_type = "longrope"
                module.config = build_config(PHI3)
                # transformers keeps them from its first call: of two traces the second would find the first one's
                module.long_inv_freq = module.inv_freq.clone()
        trace_unique_layers(meta)


@pytest.mark.parametrize("config", [
    {"rope_scaling": {"type": "su", "original_max_position_embeddings": 64}}, {"rope_parameters": longrope(), "original_max_position_embeddings": 64},  # noqa: E501
    {"text_config": {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 64}}},
    {"text_config": {"attention_chunk_size": 64, "attn_temperature_tuning": 4, "floor_scale": 128}},
    {"attention_chunk_size": 96, "attn_temperature_tuning": True, "floor_scale": 65},
])  # fmt: skip
def test_the_limit_of_positions_is_known_before_anything_runs(tmp_path, config):
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 2, "max_position_embeddings": 128, **config})
    )
    shape = read_shape(tmp_path)
    keys = ("original_max_position_embeddings", "attention_chunk_size", "floor_scale")
    assert shape.max_position_embeddings == 64 and shape.limited_by.partition(":")[0] in keys
    (tmp_path / "config.json").write_text(json.dumps({
        "num_hidden_layers": 2, "max_position_embeddings": 128,
        "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64},
    }))  # fmt: skip
    assert read_shape(tmp_path).max_position_embeddings == 128


def test_transformers_itself_lets_a_neighbour_change_a_longrope():
    """Why it is held: one long request in a batch changes a short one's logits. If this fails, transformers has
    changed: look again."""
    model = AutoModelForCausalLM.from_config(build_config(PHI3), attn_implementation="eager").eval()
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 288, (2, 40)))
    positions = torch.arange(40).expand(2, 40).clone()
    with torch.no_grad():
        alone = model(ids[:1, :20], use_cache=False).logits[0, 10]
        beside = model(ids, position_ids=positions, use_cache=False).logits[0, 10]
    assert (alone - beside).abs().max() > 1e-4
