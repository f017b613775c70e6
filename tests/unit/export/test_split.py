"""The split export of the demo checkpoint: contents of the files, equality of the bytes, refusals."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.checkpoint import resolve
from lockstep.errors import InputError
from lockstep.export import unique_layers
from lockstep.export.checkpoint_layout import checkpoint_layout
from lockstep.export.decoder_layers import layer_list
from lockstep.export.flow import Flow
from lockstep.export.run import assemble, export
from lockstep.export.tracer import meta_model
from lockstep.export.unique_layers import trace_unique_layers
from lockstep.onnx_tools.sessions import open_session
from lockstep.weights import Weights, convert

pytestmark = pytest.mark.exports
DEMO = Path(__file__).parents[3] / "resources" / "demo-llama"


TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.fixture(scope="module")
def exported(demo, tmp_path_factory):
    """{precision: folder} with assembly.json, graphs and weights.json of the demo checkpoint."""
    root = tmp_path_factory.mktemp("split")
    resolve(str(DEMO), DEMO, root / "checkpoint.json")
    for precision in ("fp32", "fp16"):
        shutil.copytree(demo.assembly("demo-llama", precision).parent, root / precision / "graphs")
        convert(root / "checkpoint.json", precision, root / precision / "weights.json")
    return root


def assembly_of(root, precision="fp32"):
    return json.loads((root / precision / "graphs" / "assembly.json").read_text())


def test_a_uniform_model_has_three_block_classes_and_one_kind(exported):
    assembly = assembly_of(exported)
    assert sorted(assembly["classes"]) == ["embedding", "entry", "exit", "middle"]
    assert list(assembly["kinds"]) == ["attention"]
    assert [layer["block"]["class"] for layer in assembly["layers"]] == ["entry"] + ["middle"] * 5


def shapes(values):
    return {value["name"]: value["shape"] for value in values}


def test_names_and_shapes_are_those_of_the_contract(exported):
    assembly = assembly_of(exported, "fp16")
    hidden = 144
    heads = 6
    kv = 2
    dim = 40
    vocab = 768
    classes = assembly["classes"]
    kind = assembly["kinds"]["attention"]
    qkv = {"query": ["num_tokens", heads * dim], "key": ["num_tokens", kv * dim], "value": ["num_tokens", kv * dim]}
    assert shapes(classes["entry"]["inputs"]) == {"hidden": ["num_tokens", hidden]}
    assert shapes(classes["entry"]["outputs"]) == qkv
    assert shapes(classes["middle"]["inputs"]) == {
        "hidden": ["num_tokens", hidden],
        "attention": ["num_tokens", heads * dim],
    }
    assert shapes(classes["middle"]["outputs"]) == {"hidden_out": ["num_tokens", hidden]} | qkv
    assert shapes(classes["exit"]["inputs"])["logit_rows"] == ["num_requests"]
    assert shapes(classes["exit"]["outputs"]) == {"logits": ["num_requests", vocab]}
    for form, rows, requests in (("prefill", "num_tokens", 1), ("decode", "num_requests", "num_requests")):
        past = [requests, kv, "past_capacity", dim]
        assert shapes(kind[form]["inputs"]) == {
            "query": [rows, heads * dim], "key": [rows, kv * dim], "value": [rows, kv * dim], "position_ids": [rows],
            "past_key": past, "past_value": past, "past_lengths": [requests],
        }  # fmt: skip
        assert shapes(kind[form]["outputs"]) == {
            "attention": [rows, heads * dim],
            "key_out": [rows, kv, dim],
            "value_out": [rows, kv, dim],
        }
    assert {
        value["dtype"]
        for value in classes["middle"]["inputs"] + classes["middle"]["slots"] + classes["exit"]["outputs"]
    } == {"float16"}


def test_every_checkpoint_tensor_is_bound_and_has_the_slots_shape(exported):
    assembly = assembly_of(exported)
    weights = Weights.open(exported / "fp32" / "weights.json")
    parts = [layer["block"] for layer in assembly["layers"]] + [assembly["layers"][-1]["exit"], assembly["embedding"]]
    bound = set()
    for part in parts:
        bound.update(*part["slots"].values())
    assert bound == set(weights.names())
    for layer in assembly["layers"]:
        for part in (layer["block"], layer["exit"]):
            for slot in assembly["classes"][part["class"]]["slots"]:
                (tensor,) = part["slots"][slot["name"]]
                assert list(weights[tensor].shape) == slot["shape"]


def test_graphs_hold_no_weight_path_time_or_trace(exported):
    for path in (exported / "fp16" / "graphs").glob("*.onnx"):
        model = onnx.load(path)
        onnx.checker.check_model(model, full_check=True)
        # shapes, axes, 20 rotary frequencies
        assert sum(len(tensor.raw_data) for tensor in model.graph.initializer) < 1024, path
        assert not model.metadata_props and not model.doc_string and not model.producer_version, path
        for part in (model.graph, *model.functions):
            assert not any(node.metadata_props or node.doc_string for node in part.node), path
        assert not model.graph.value_info and not model.graph.metadata_props, path
        assert b"site-packages" not in path.read_bytes() and os.fsencode(DEMO.parent.parent) not in path.read_bytes(), (
            path
        )


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture
def older(exported, tmp_path):
    """The folder of an export of another model, with a graph that this one does not have."""
    folder = tmp_path / "again"
    shutil.copytree(exported / "fp16" / "graphs", folder)
    (folder / "middle_2.onnx").write_bytes((folder / "middle.onnx").read_bytes())
    assembly = json.loads((folder / "assembly.json").read_text())
    assembly["classes"]["middle_2"] = {**assembly["classes"]["middle"], "graph": "middle_2.onnx"}
    del assembly["entries_sha256"]
    (folder / "assembly.json").write_text(json.dumps(assembly))
    return folder


def test_an_export_over_an_older_one_leaves_no_stale_graph(exported, older):
    export(exported / "checkpoint.json", "fp16", older / "assembly.json")
    assert digests(older) == digests(exported / "fp16" / "graphs")


MIXED = {
    "uniform": {"model_type": "llama", "num_hidden_layers": 3},
    "alternating": {"model_type": "gemma2", "num_hidden_layers": 3, "head_dim": 8, "sliding_window": 4,
        "query_pre_attn_scalar": 8},
    "mixed depth": {"model_type": "qwen3_moe", "num_hidden_layers": 3, "head_dim": 8, "mlp_only_layers": [0],
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.traces
@pytest.mark.parametrize("config", MIXED.values(), ids=MIXED.keys())
def test_unique_and_fully_traced_files_are_the_same_bytes(config):
    config = {**TINY, "num_key_value_heads": 2, **config}
    meta = meta_model(config, "fp32")
    unique = assemble(meta, config, "fp32")
    assert unique == assemble(meta, config, "fp32", traced=traced_whole(meta))
    extra_files = {"middle_2", "exit_2"} if config["model_type"] == "qwen3_moe" else set()
    assert set(unique[1].classes) == {"entry", "middle", "exit", "embedding", *extra_files}


def traced_whole(meta) -> unique_layers.TracedModel:
    """Trace the model at each of its depths, each as a whole."""
    depth = len(unique_layers.signatures(meta))
    prefix = layer_list(meta)[0]
    traced = [unique_layers.trace_and_cut(meta, range(n), False) for n in range(1, depth + 1)]
    layout = checkpoint_layout(meta)
    layers = []
    for index, (block, batchless) in enumerate(zip(traced[-1].cut.blocks, traced[-1].cut.batchless, strict=True)):
        exit = traced[index].cut.exit
        slots = [unique_layers.bind_slots(graph, index + n, prefix, layout) for n, graph in enumerate((block, exit))]
        layers.append(unique_layers.Layer(block, slots[0], batchless, ((exit, slots[1]),)))
    embedding = traced[-1].embedding
    return unique_layers.TracedModel(
        tuple(layers), embedding, {slot.name: layout[slot.name] for slot in embedding.signature.slots}
    )


def run(path, feeds, weights):
    session = open_session(path)
    feeds = feeds | {i.name: weights[i.name] for i in session.get_inputs() if i.name not in feeds}
    return session.run(None, feeds)


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    # logits of std 2.3: fp32 differs by the order of sums, fp16 by 2^-11 of each value over 6 layers
    [("fp32", 1e-4), ("fp16", 5e-2)],
)
def test_uncut_graph_equals_transformers(exported, precision, tolerance):
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, attn_implementation="eager")
    ids = np.random.default_rng(0).integers(0, 768, 19)
    weights = Weights.open(exported / precision / "weights.json")
    with torch.no_grad():
        expected = model(torch.as_tensor(ids)[None]).logits[0].numpy()
    (hidden,) = run(exported / precision / "graphs" / "embedding.onnx", {"token_ids": ids}, weights)
    feeds = {"hidden": hidden, "position_ids": np.arange(19), "logit_rows": np.arange(19)}
    (logits,) = run(exported / precision / "graphs" / "batchful.onnx", feeds, weights)
    assert np.abs(logits - expected).max() < tolerance


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "t5", **TINY}, "expected a causal LM"),
        ({"model_type": "no-such-model", **TINY}, "model_type: expected a type of transformers"),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_a_model_that_cannot_be_split_is_refused_with_the_reason(config, reason):
    with pytest.raises(InputError) as error:
        trace_unique_layers(meta_model(config, "fp32"))
    assert reason in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("way", "at"),
    [
        (
            "narrow = Cast<to = 10>(normed)  later = Identity(narrow)  heads = Reshape(later, shape)  given = "
            "Cast<to = 1>(heads)",
            "narrow",
        ),
        ("heads = Reshape(normed, shape)  given = Neg(heads)", "normed"),
        # a narrower value from which not all of its numbers come
        (
            "narrow = Cast<to = 10>(normed)  wide = Cast<to = 1>(narrow)  both = Concat<axis = -1>(wide, normed)"
            "  part = Slice(both, low, high, axis)  given = Reshape(part, shape)",
            "normed",
        ),
        ("heads = Reshape(normed, shape)  given = Mul(heads, at)", "normed"),
        # more than RoPE: a norm of what positions turned; one head for all
        ("heads = Reshape(normed, shape)  turned = Mul(heads, at)  given = Mul(turned, turned)", "given"),
        (
            "heads = Reshape(normed, shape)  turned = Mul(heads, at)  all = Shape(turned)  part = Slice(turned, zero, "
            "axis, axis)  given = Expand(part, all)",
            "given",
        ),
    ],
)
def test_queries_are_cut_where_they_are_narrowest_and_there_as_early_as_can_be(way, at):
    text = f"""<ir_version: 8, opset_import: ["": 20]>
        g (float16[num_tokens, 8] hidden, int64[num_tokens] position_ids) => (float[num_tokens, 2, 4] given)
        <float[1] gain = {{2}}, int64[3] shape = {{-1, 2, 4}}, int64[1] low = {{4}}, int64[1] high = {{12}},
         int64[1] axis = {{1}}, int64[1] zero = {{0}}, int64[3] each = {{-1, 1, 1}}>
        {{ f = Cast<to = 1>(hidden)  normed = Mul(f, gain)  position = Cast<to = 1>(position_ids)
           at = Reshape(position, each)  {way} }}"""
    graph = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))).graph
    assert Flow(graph, frozenset({"gain"})).cut_value(graph.outputs[0]).name == at
