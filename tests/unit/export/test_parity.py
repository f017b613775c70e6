"""The export's numeric gate: it passes right graphs, and catches each fault that a split could have."""

import dataclasses
import gc
import itertools

import numpy as np
import onnx
import pytest
import torch
from benchmarks import published
from benchmarks.tiny import tiny_configs
from families import FAMILIES
from graph_faults import change_input, is_window, mask_dropped, rename, replace_constant
from onnx import numpy_helper
from transformers.models.llama import modeling_llama

from lockstep.errors import InputError
from lockstep.export.parity import Small, check_parity, depths_to_try, make_small, measure, reference_model
from lockstep.export.run import assemble, export_config
from lockstep.export.small_configs import small_configs
from lockstep.export.tracer import meta_model
from lockstep.tolerances import EXPORT
from some import some

pytestmark = pytest.mark.exports

# One model that has all of it: windows and none, capped scores, rotary, groups, tied and scaled embeddings.
CONFIG = FAMILIES["gemma2"].config
PREFILL = "attention.prefill.onnx"
DECODE = "attention.decode.onnx"


@pytest.fixture(scope="module")
def assembled(shared):
    """`assemble` for what other tests may have traced already; the tests change copies of it."""
    return lambda meta, config, precision: shared.assembled(config, precision)


@pytest.fixture(scope="module")
def small(assembled):
    meta = meta_model(CONFIG, "fp32")
    return make_small(CONFIG, meta, *assembled(meta, CONFIG, "fp32"), assembled)


def test_the_split_form_itself_passes(small):
    actual = measure(small)
    assert actual.error < EXPORT / 4 and actual.reference_error < EXPORT / 4  # room for other processors' sums


@pytest.mark.long
def test_a_model_is_held_to_transformers_within_its_positions_alone(assembled):
    """Llama 4 scales queries from position `floor_scale - 1` on, to which no request of ours goes."""
    config = {**FAMILIES["llama4_text"].config, "floor_scale": 16}
    meta = meta_model(config, "fp32")
    assert check_parity(config, meta, *assembled(meta, config, "fp32"), assembled) < EXPORT


def test_measuring_leaves_threads_and_collector_as_they_were(small):
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        measure(small)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert gc.isenabled()


def with_graph(small, name, change):
    """The small model with the graph of one file changed: `change` takes a GraphProto and changes something."""
    model = onnx.ModelProto.FromString(small.files[name])
    before = model.SerializeToString(deterministic=True)
    change(model.graph)
    assert model.SerializeToString(deterministic=True) != before, "no fault was planted"
    return dataclasses.replace(small, files={**small.files, name: model.SerializeToString()})


def with_slots(small, change):
    """The small model with other tensors bound: `change` takes the layers of the assembly."""
    layers = tuple(
        dataclasses.replace(layer, block=dataclasses.replace(layer.block, slots=dict(layer.block.slots)))
        for layer in small.assembly.layers
    )
    change(layers)
    return dataclasses.replace(small, assembly=dataclasses.replace(small.assembly, layers=layers))


def is_float(array, value):
    return array.dtype == np.float32 and array.shape == () and np.isclose(array, value)


SCALE = CONFIG["query_pre_attn_scalar"] ** -0.5
SCALED = replace_constant(lambda array: is_float(array, SCALE), lambda array: array * np.float32(1.05))
NO_ROTARY = replace_constant(
    lambda array: array.dtype == np.float32 and array.size == CONFIG["head_dim"] // 2, np.zeros_like
)
WIDER = replace_constant(is_window(CONFIG["sliding_window"]), lambda array: array + 1)
UNCAPPED = replace_constant(
    lambda array: is_float(array, CONFIG["attn_logit_softcapping"]), lambda array: array * np.float32(20)
)
GRAPH_FAULTS = {
    "scale off by 5 %": SCALED, "mask dropped": mask_dropped, "rotary dropped": NO_ROTARY,
    "positions off by one": change_input("position_ids", "Add", 1), "window wider by one": WIDER,
    "cap lifted": UNCAPPED,
}  # fmt: skip


@pytest.mark.parametrize("name", [PREFILL, pytest.param(DECODE, marks=pytest.mark.long)])
@pytest.mark.parametrize("fault", GRAPH_FAULTS.values(), ids=GRAPH_FAULTS.keys())
def test_a_fault_in_attention_is_caught(small, name, fault):
    assert measure(with_graph(small, name, fault)).error > 10 * EXPORT


def test_a_filled_cache_row_taken_for_an_empty_one_is_caught(small):
    for graph in (PREFILL, DECODE):
        assert measure(with_graph(small, graph, rename("Less", "LessOrEqual"))).error > 10 * EXPORT


def forget_rows_from(row):
    """What says which cache rows are filled says no from `row` on."""

    def change(graph):
        index, node = next(
            (i, node)
            for i, node in enumerate(graph.node)
            if node.op_type == "Less" and any("range" in name for name in node.input)
        )
        rows = next(name for name in node.input if "range" in name)
        source = node.output[0]
        node.output[0] = "filled"
        graph.initializer.append(numpy_helper.from_array(np.array(row), "row"))
        graph.node.insert(index + 1, onnx.helper.make_node("And", ["filled", "kept"], [source]))
        graph.node.insert(index + 1, onnx.helper.make_node("Less", [rows, "row"], ["kept"]))

    return change


@pytest.fixture(scope="module")
def wide(assembled):
    """A model with a window of 300 of all its positions: no prompt of the near walk gets there."""
    config = {**CONFIG, "sliding_window": 300, "max_position_embeddings": 131072}
    meta = meta_model(config, "fp32")
    return make_small(config, meta, *assembled(meta, config, "fp32"), assembled)


@pytest.mark.long
def test_more_far_positions_than_near_requests_are_checked(shared):
    """Llama 3.1's: both sides of the length that its RoPE was made for, and its last position, are three requests."""
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = {**FAMILIES["llama"].config, "rope_parameters": rope, "max_position_embeddings": 131072}
    actual = measure(Small(config, *shared.assembled(config, "fp32")))
    assert actual.error < EXPORT / 4


LATE_FAULTS = {
    "rows forgotten from 999 on": forget_rows_from(999),
    "a wide window off by 1": replace_constant(is_window(300), lambda array: array + 1),
}


@pytest.mark.long
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("fault", LATE_FAULTS)
def test_a_fault_that_begins_late_is_caught(wide, fault, phase):
    assert measure(wide).error < EXPORT / 4
    kinds = [kind for kind in wide.assembly.variants.values() if bool(kind.window) == ("window" in fault)]
    assert measure(with_graph(wide, kinds[0].phases()[phase].file, LATE_FAULTS[fault])).error > 10 * EXPORT


@pytest.fixture(scope="module")
def far(small):
    """The small model for more positions, on which its graphs do not depend."""
    positions = {"max_position_embeddings": 131072}
    assembly = dataclasses.replace(small.assembly, **positions)
    return dataclasses.replace(small, config={**small.config, **positions}, assembly=assembly)


@pytest.mark.parametrize(
    ("at", "phase"),
    some(itertools.product([4096, 16384, 131060], ["prefill", "decode"]), (4096, "prefill"), (131060, "decode")),
)
def test_positions_are_right_up_to_the_last(far, at, phase):
    graph = {"prefill": PREFILL, "decode": DECODE}[phase]
    assert measure(far).error < EXPORT / 4
    assert measure(with_graph(far, graph, change_input("position_ids", "Min", at))).error > 10 * EXPORT


def swap(layer, first, other):
    def change(layers):
        slots = layers[layer].block.slots
        slots[first], slots[other] = slots[other], slots[first]

    return change


def of_another_layer(slot):
    def change(layers):
        layers[1].block.slots[slot] = layers[2].block.slots[slot]

    return change


SLOT_FAULTS = {
    "key and value swapped": swap(1, "current.self_attn.k_proj.weight", "current.self_attn.v_proj.weight"),
    "two norms swapped": swap(1, "current.input_layernorm.weight", "previous.post_attention_layernorm.weight"),
    "gate and up swapped": swap(1, "previous.mlp.gate_proj.weight", "previous.mlp.up_proj.weight"),
    "another layer's weight": of_another_layer("current.self_attn.q_proj.weight"),
}


@pytest.mark.parametrize("fault", SLOT_FAULTS.values(), ids=SLOT_FAULTS.keys())
def test_a_wrong_weight_is_caught(small, fault):
    assert measure(with_slots(small, fault)).error > 10 * EXPORT


def test_a_fault_in_the_export_is_a_refusal_that_says_so(assembled):
    def faulty(meta, config, precision):
        files, assembly = assembled(meta, config, precision)
        model = onnx.ModelProto.FromString(files[PREFILL])
        SCALED(model.graph)
        return {**files, PREFILL: model.SerializeToString()}, assembly

    meta = meta_model(CONFIG, "fp32")
    with pytest.raises(InputError) as error:
        check_parity(CONFIG, meta, *faulty(meta, CONFIG, "fp32"), faulty)
    assert ("its split form differs from transformers") in str(error.value) and "please report" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.long
def test_a_model_that_traces_without_complaint_but_attends_otherwise_is_refused(tmp_path, monkeypatch):
    attention = modeling_llama.eager_attention_forward

    # attention differs from the arguments of the interface
    def sharper(module, query, key, value, attention_mask, scaling, **options):
        return attention(module, query, key, value, attention_mask, scaling * 1.05, **options)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", sharper)
    config = {**FAMILIES["llama"].config, "num_hidden_layers": 2}
    # nothing to see: one attention for each layer, no token mixed, no weight in a batchless graph
    assemble(meta_model(config, "fp32"), config, "fp32")
    with pytest.raises(InputError, match="its split form differs"):
        export_config(config, "fp32", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_an_encoder_is_refused_unless_it_is_told_to_be_a_decoder(tmp_path):
    bert = {
        "model_type": "bert", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48,
    }  # fmt: skip
    with pytest.raises(InputError, match="lets tokens see later ones"):
        export_config(bert, "fp32", tmp_path)
    assert export_config({**bert, "is_decoder": True}, "fp32", tmp_path)


@pytest.mark.parametrize(("looks", "depths"), [
    ("a", [1]), ("ab", [2]), ("aaaaaaaa", [3]), ("abababab", [3, 4]), ("aabbbbbb", [4]), ("aaaaabaaaaab", [7, 12]),
    ("aaaabbbba", [9]),
])  # fmt: skip
def test_the_small_model_is_deep_enough_to_show_all_neighbours(looks, depths):
    assert depths_to_try(looks) == depths
    for depth in depths:
        assert set(itertools.pairwise(looks[:depth])) == set(itertools.pairwise(looks))


SHAPES = {
    "llama-3-70b": {"model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        "bos_token_id": 128000, "eos_token_id": [128001, 128009],
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
    "gpt2-xl": {"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48, "n_positions": 1024,
        "vocab_size": 50257},
    "gemma-3-27b": {"model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504,
        "num_hidden_layers": 62, "num_attention_heads": 32, "vocab_size": 262208, "num_key_value_heads": 16,
        "head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024},
    "mixtral-8x22b": {"model_type": "mixtral", "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56,
        "num_attention_heads": 48, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": 32768},
}  # fmt: skip


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_large_shapes_become_small_and_keep_their_settings(config):
    small = meta_model(next(small_configs(config, 3)), "fp32")
    assert sum(parameter.numel() for parameter in small.parameters()) < 8_000_000
    real = meta_model(config, "fp32").config
    text = small.config
    assert text.num_hidden_layers == 3
    for key in (
        "hidden_act",
        "activation_function",
        "rope_parameters",
        "head_dim",
        "query_pre_attn_scalar",
        "tie_word_embeddings",
        "rms_norm_eps",
    ):
        assert getattr(text, key, None) == getattr(real, key, None), key
    small_heads, real_heads = (getattr(item, "num_key_value_heads", item.num_attention_heads) for item in (text, real))
    assert (text.num_attention_heads > small_heads) == (real.num_attention_heads > real_heads)


@pytest.mark.long
@pytest.mark.parametrize("family", ["DeepSeek V2", "MiniMax-M2"])
def test_operators_that_fp16_has_other_names_for_do_not_refuse_a_model(family, tmp_path):
    """A Reshape more, and Min for Clip."""
    assert export_config(tiny_configs(published.FAMILIES[family].config)[0], "fp16", tmp_path)


@pytest.mark.long
def test_a_router_whose_weights_stay_in_float32_refuses_fp16_by_name(tmp_path):
    config = tiny_configs(published.FAMILIES["GLM-4.5, 4.6, 4.7"].config)[0]
    with pytest.raises(InputError, match="keeps model.layers.1.mlp.gate.e_score_correction_bias in float32; choose f"):
        export_config(config, "fp16", tmp_path)


def test_gpt2_that_upcasts_its_scores_is_compared_in_float64_too() -> None:
    """Its own code refuses anything but float32, with a traceback; graphs have scores in float32 in any case."""
    config = {**FAMILIES["gpt2"].config, "reorder_and_upcast_attn": True}
    ids = torch.arange(4)[None]
    with torch.no_grad():
        plain, upcast = (
            reference_model(config | other, 0, 1.0).double()(ids).logits
            for other in ({"reorder_and_upcast_attn": False}, {})
        )
    assert torch.equal(plain, upcast)
