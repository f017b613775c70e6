"""w8a16 and w4a16: which tensors are quantised, to which bytes; engines equal the dequantised weights; and the faults
that would show."""

from __future__ import annotations

import itertools
import json
import shutil

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from checkpoints import error_of
from demo_model import DEMO, LIMITS
from families import FAMILIES
from hypothesis import given
from hypothesis import strategies as st
from pipeline import open_model
from quantized_models import (
    ASKED,
    FAULTS,
    GROUP,
    PRECISIONS,
    assert_far_off,
    check,
    damaged,
    demo,
    product,
    refer,
    validated,
)
from safetensors.numpy import load_file

from lockstep import make_random_checkpoint
from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.dtypes import ROW, named_dtype
from lockstep.artifacts.files import read_json, sha256_file, write_json
from lockstep.artifacts.quantization_error import QuantizationError
from lockstep.artifacts.quantized import QuantizedTensors, scales_name
from lockstep.backends.onnxruntime.backend import OnnxRuntimeBackend
from lockstep.backends.onnxruntime.row_bits import rows_keep_their_bits
from lockstep.checkpoint import resolve
from lockstep.config import load
from lockstep.config.model_config import linear_rows
from lockstep.errors import CheckError, InputError
from lockstep.export.quantize import quantize
from lockstep.onnx_tools import fp8_products, int8_rounding
from lockstep.onnx_tools.int8_products import Int8Products
from lockstep.onnx_tools.prepare import random_inputs
from lockstep.onnx_tools.sessions import compute, open_session
from lockstep.onnx_tools.signature import io_of
from lockstep.onnx_tools.toolkit import GraphWriter, run_passes, to_proto
from lockstep.targets import Results
from lockstep.verify.rounded import rounded_rows as rounded
from lockstep.weights import Weights, convert, e4m3
from lockstep.weights.groups import dequantize, integers_of, pack, scales_of, unpack
from shared import Shared
from some import some


@pytest.mark.parametrize(
    "precision, layers", some(itertools.product(PRECISIONS, (2, "all")), ("w4a16", "all"), ("w8a8-fp8", 2))
)
def test_the_demo_says_what_its_dequantised_weights_say(shared, tmp_path, precision, layers):
    results = demo(shared, precision)
    validated(results, precision, layers, tmp_path)
    report = check(results, precision, layers, LIMITS, tmp_path)
    assert report["result"] == "pass" and report["max_logit_error"] < report["tolerance"]
    error = QuantizationError.load(results.quantization_error("model", precision, layers))
    assert error.precision == precision and error.tokens > 20
    assert error.group_size == (GROUP if precision != "w8a8-fp8" else ROW)
    # 8 bits: 0.01 of logits of 2.7 is seen; e4m3: 0.15; 4 bits: 0.2.
    weights_of_8 = precision.startswith("w8")
    assert 0 < error.rms_logit_error < {"w8a8-fp8": 0.3}.get(precision, 0.05 if weights_of_8 else 0.6)
    assert error.perplexity / error.full_perplexity < (1.02 if weights_of_8 else 1.2)
    assert f"{error.tokens_differing} of {error.tokens} tokens differ" in error.words()


def test_low_memory_has_the_layers_weights_once(shared):
    results = demo(shared, "w4a16")
    for low_memory in (False, True):
        model = open_model(results, "model", "w4a16", max_batch_size=1, max_seq_len=16, low_memory=low_memory)
        assert (model.executor.networks[0].decode_layers is None) is low_memory


def test_what_is_quantised_and_what_stays(shared):
    results = demo(shared, "w4a16")
    weights = Weights.open(results.weights("model", "w4a16"))
    bits = Assembly.load(results.assembly("model", "w4a16")).quantization.bits
    assert {name: width for name, width in bits.items() if width != 4} == {"lm_head.weight": 8}
    tensors = load_file(DEMO / "model.safetensors")
    assert set(bits) == {name for name in tensors if "proj" in name} | {"lm_head.weight"}
    for name, array in weights.dequantized():
        exact = tensors[name].astype(np.float32)
        if name not in bits:
            assert name in weights and np.array_equal(array, exact)
            continue
        step = np.repeat(np.abs(weights[scales_name(name)]), GROUP, axis=1)
        assert name not in weights and array.shape == exact.shape
        assert (np.abs(array - exact) <= step * (0.5 + 1e-3)).mean() > 0.9  # others lie beyond the last integer
        assert (np.abs(array - exact) <= step * (1 + 1e-3)).all()


@pytest.mark.parametrize("head_bits", [8, 4])
def test_a_tied_embedding_reads_rows_of_the_heads_integers(shared, head_bits):
    """By ONNX Runtime's kernel, at both ends of the table; head and embedding are the same tensors."""
    full = shared.assembled(dict(FAMILIES["gemma2"].config), "fp32")
    files, assembly = quantize(*full, "w4a16", GROUP, head_bits=head_bits)
    table = "model.embed_tokens.weight"
    assert assembly.quantization.bits[table] == head_bits
    parts = assembly.quantization.parts(table)
    assert assembly.embedding.slots == {part: [part] for part in parts}
    assert assembly.embedding.slots.items() <= assembly.layers[-1].exit.slots.items()
    graph = onnx.ModelProto.FromString(files[assembly.classes[assembly.embedding.graph].file])
    feeds = random_inputs(graph)
    weight = dequantize(feeds[parts[0]], feeds[parts[1]], GROUP)
    feeds["token_ids"] = np.array([7, 0, len(weight) - 1])
    scale = np.float32(48**0.5)  # Gemma's
    assert np.array_equal(compute(graph, feeds)["hidden"], weight[feeds["token_ids"]] * scale)


def test_another_embedding_stays_as_it_is(shared):
    assembly = Assembly.load(demo(shared, "w4a16").assembly("model", "w4a16"))
    assert set(assembly.embedding.slots) == {"model.embed_tokens.weight"}


def test_two_conversions_are_the_same_bytes(shared, tmp_path):
    results = demo(shared, "w4a16")
    again = tmp_path / "weights.json"
    convert(results.checkpoint("model"), "w4a16", again, results.assembly("model", "w4a16"))
    first = results.weights("model", "w4a16")
    assert sha256_file(again.with_suffix(".safetensors")) == sha256_file(first.with_suffix(".safetensors"))


groups = st.integers(0, 2**32 - 1).map(
    lambda seed: (np.random.default_rng(seed).standard_normal((5, 16)) * 10.0 ** (seed % 40 - 20)).astype(np.float32)
)


@given(groups, st.sampled_from([4, 8]))
def test_numbers_come_back_within_half_a_step(numbers, bits):
    scales = scales_of(numbers, bits)
    integers = integers_of(numbers, scales, bits)
    data = pack(integers, bits)
    assert data.dtype == np.uint8 and data.shape == (5, 16 * bits // 8)
    assert np.array_equal(unpack(data, 16), integers)
    back = dequantize(data[None], scales[None], 16).reshape(numbers.shape)
    step = np.abs(scales)[:, None]
    last = integers == (1 << bits) - 1
    assert (np.abs(back - numbers) <= step * np.where(last, 1, 0.5) * (1 + 1e-5)).all()
    largest = np.abs(numbers).argmax(axis=1)
    rows = np.arange(5)
    assert np.array_equal(back[rows, largest], numbers[rows, largest]), "the largest is kept exactly"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("number", [0.0, -0.0, 1e-45, -1e-40, 3.4e38])
def test_groups_without_a_usable_step(bits, number):
    numbers = np.full((1, 16), number, np.float32)
    scales = scales_of(numbers, bits)
    back = dequantize(pack(integers_of(numbers, scales, bits), bits)[None], scales[None], 16)
    assert np.isfinite(scales).all() and np.abs(back - numbers).max() <= max(1e-38, 1e-6 * abs(number))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9])
def test_the_engine_multiplies_activations_of_16_bits(bits, rows):
    """Against the graph's own meaning, float32 activations; and a row has the same bits in any batch."""
    random = np.random.default_rng(bits)
    columns = 96
    out = 40
    numbers = random.standard_normal((out * columns // GROUP, GROUP), np.float32)
    scales = scales_of(numbers, bits)
    data = pack(integers_of(numbers, scales, bits), bits).reshape(out, columns // GROUP, -1)
    scales = scales.reshape(out, columns // GROUP)
    graph = run_passes(product(data, scales, columns, bits), Int8Products())
    hidden = random.standard_normal((rows, columns), np.float32) * 10.0 ** random.integers(-6, 6, (rows, 1))
    hidden[0, :GROUP] = 0
    actual = run(graph, hidden.astype(np.float32))
    exact = hidden.astype(np.float32).astype(np.float64) @ dequantize(data, scales, GROUP).astype(np.float64).T
    scale = np.abs(hidden).max(axis=1, keepdims=True) * np.sqrt(columns)
    # 16 bits of the largest of a group: 2**-16. Activations of int8 alone are off by 1e-2.
    assert (np.abs(actual - exact) / scale).max() < 1e-4
    for row in range(rows):
        assert np.array_equal(run(graph, hidden[row : row + 1].astype(np.float32))[0], actual[row])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 32, 128])
def test_the_engine_rounds_activations_as_the_reference_does(bits, group):
    """Also as the graph itself does; and rows keep their bits where the backend says so."""
    random = np.random.default_rng(bits)
    columns = 3 * group
    out = 40
    numbers = random.standard_normal((out * columns // group, group), np.float32)
    scales = scales_of(numbers, bits)
    data = pack(integers_of(numbers, scales, bits), bits).reshape(out, columns // group, -1)
    scales = scales.reshape(out, columns // group)
    plain = ir.from_proto(product(data, scales, columns, bits, group))
    (node,) = plain.graph
    node.replace_input_with(0, int8_rounding.rounded(plain.graph, node, node.inputs[0], columns, group))
    graph = to_proto(plain)
    engine = run_passes(graph, Int8Products())
    assert [node.op_type for node in engine.graph.node] == ["MatMulNBits"]
    hidden = random.standard_normal((64, columns), np.float32) * 10.0 ** random.integers(-6, 6, (64, 1))
    hidden = hidden.astype(np.float32)
    hidden[0, :group] = 0
    expected = rounded(torch.from_numpy(hidden), group).numpy().astype(np.float64)
    expected = expected @ dequantize(data, scales, group).astype(np.float64).T
    scale = np.abs(hidden).max(axis=1, keepdims=True) * np.sqrt(columns)
    # Sums of float32. Activations that are not rounded are off by 1e-2.
    for actual in (run(engine, hidden), run(graph, hidden)):
        assert (np.abs(actual - expected) / scale).max() < 1e-5
    together = run(engine, hidden)
    counts = (1, 2, 3, 5, 8, 33)
    is_equal = all(np.array_equal(run(engine, hidden[-count:]), together[-count:]) for count in counts)
    assert is_equal or not rows_keep_their_bits(bits, group, open_session)


def test_the_graph_rounds_rows_to_e4m3_as_the_reference_does(tmp_path):
    """To the bit, and so does NumPy; in the engine, whose rows have the same bits in any company."""
    random = np.random.default_rng(0)
    rows = 33
    columns = 80
    out = 40
    weight = (random.standard_normal((out, columns)) * 10.0 ** random.integers(-4, 4, (out, 1))).astype(np.float32)
    scales = e4m3.row_scales(weight)
    codes = e4m3.codes_of(weight, scales).view(named_dtype("float8_e4m3fn"))
    assert (np.abs(e4m3.dequantize(codes, scales) - weight) <= 2**-4 * np.abs(weight) + scales[:, None] / 1024).all()
    graph = fp8_graph(columns, out)
    hidden = (random.standard_normal((rows, columns)) * 10.0 ** random.integers(-6, 6, (rows, 1))).astype(np.float32)
    hidden[0], hidden[1, 0] = 0, 448 * np.abs(hidden[1]).max()
    numbers, steps = e4m3.rounded(hidden)
    assert np.array_equal(rounded(torch.from_numpy(hidden), ROW).numpy(), numbers * steps)
    actual = compute(graph, {"x": hidden, "w": codes, "s": scales})
    assert np.array_equal(actual["x/fp8/rounded"], numbers)
    (tmp_path / "graph.onnx").write_bytes(graph.SerializeToString())
    engine = tmp_path / "engine.onnx"
    slots = [io_of(value) for value in graph.graph.input][1:]
    OnnxRuntimeBackend().build(tmp_path / "graph.onnx", engine, OnnxRuntimeBackend().default_options())
    run = (
        OnnxRuntimeBackend().load(engine, slots, None, False).bind(Arrays(w=codes, s=scales), {"w": ["w"], "s": ["s"]})
    )
    for count in (1, 2, 5, rows):
        feeds = {"x": hidden[-count:]}
        results = {name: np.empty((count, size), np.float32) for name, size in (("y", out), ("x/fp8/rounded", columns))}
        run.prepare(feeds, results)()
        assert np.array_equal(results["y"], actual["y"][-count:])


def fp8_graph(columns: int, out: int) -> onnx.ModelProto:
    types = onnx.TensorProto
    ios = [
        onnx.helper.make_tensor_value_info(*item)
        for item in (("x", types.FLOAT, ["rows", columns]), ("w", types.FLOAT8E4M3FN, [out, columns]),
                     ("s", types.FLOAT, [out]), ("y", types.FLOAT, ["rows", out]),
                     ("x/fp8/rounded", types.FLOAT, ["rows", columns]))
    ]  # fmt: skip
    node = onnx.helper.make_node("Gemm", ["x", "w"], ["y"], "product", transB=1)
    model = onnx.helper.make_graph([node], "fp8", ios[:3], ios[3:])
    model = ir.from_proto(
        onnx.helper.make_model(model, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    )
    (node,) = model.graph
    x, weight, scales = model.graph.inputs
    rows = fp8_products.rounded(model.graph, node, x)
    writer = GraphWriter(model.graph, "y", before=node)
    fp8_products.product(writer, rows, weight, scales, "product", replaces=node.outputs[0])
    model.graph.remove(node)
    rows.values.type, rows.values.shape = model.graph.outputs[1].type, model.graph.outputs[1].shape
    model.graph.outputs[1] = rows.values
    return to_proto(model)


class Arrays(dict[str, np.ndarray]):
    """Weights of no file."""

    checkpoint = None
    identity = location = staticmethod(lambda name: None)

    def __init__(self, **arrays: np.ndarray):
        super().__init__(arrays)


def run(graph: onnx.ModelProto, hidden: np.ndarray) -> np.ndarray:
    return open_session(graph.SerializeToString()).run(None, {"x": hidden})[0]


# Planted faults: of the weights' file, of the graphs and of bindings.


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_the_weights_is_no_rounding_of_the_checkpoint(shared, tmp_path, fault):
    results = damaged(demo(shared, "w4a16"), tmp_path / "results", fault)
    with pytest.raises(CheckError, match="expected numbers within half a step of the checkpoint's, found") as caught:
        refer(results, "w4a16", 2, ASKED)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", some(FAULTS), ids=lambda fault: fault.__name__)
def test_engines_on_other_weights_than_the_reference_fail(shared, tmp_path, fault):
    """As if the runtime bound, or the library read, the weights in another way than the reference."""
    results = damaged(demo(shared, "w4a16"), tmp_path / "results", fault)
    with pytest.raises(CheckError) as caught:
        check(results, "w4a16", 2, LIMITS, tmp_path)
    assert_far_off(str(caught.value))


def test_scales_bound_to_another_slot_fail_validation(shared, tmp_path):
    results = demo(shared, "w8a16")
    folder = tmp_path / "graphs"
    shutil.copytree(results.assembly("model", "w8a16").parent, folder)
    value = read_json(folder / "assembly.json")
    slots = value["layers"][1]["block"]["slots"]
    first, other = (f"previous.mlp.{part}_proj.weight.scales" for part in ("gate", "up"))
    slots[first], slots[other] = slots[other], slots[first]
    write_json(folder / "assembly.json", value)
    with pytest.raises(CheckError, match=r"layer 0 .*: hidden: expected an error of at most"):
        validated(results, "w8a16", 2, tmp_path, folder / "assembly.json")


# Bad input: one line each.


def test_scales_that_are_no_numbers_are_refused_when_they_are_bound(shared, tmp_path):
    def nan(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.0.self_attn.k_proj.weight.scales"][3, 2] = np.nan

    results = damaged(demo(shared, "w4a16"), tmp_path / "results", nan)
    with pytest.raises(InputError, match=r"k_proj.weight.scales'.*: expected finite scales, found 1 NaN or infinite"):
        check(results, "w4a16", 2, LIMITS, tmp_path)


def test_a_group_size_that_does_not_divide_is_refused_by_config_and_export(shared):
    value = {"models": {"m": {"source": str(DEMO), "precisions": ["w4a16"], "golden": {"prompts": [{"text": "a"}]}}}}
    line = error_of(load.load(value).check_sources)
    assert line == (
        f"config: models.m.group_size: expected a size that divides hidden_size (144 in {DEMO}/config.json); found 32"
    )
    value["models"]["m"]["precisions"] = ["w8a8-fp8"]
    load.load(value).check_sources()  # which has no groups
    line = error_of(quantize, *shared.assembled(json.loads((DEMO / "config.json").read_text()), "fp32"), "w4a16", 32)
    assert line.startswith("group_size: expected a size that divides the 144 numbers of a row of model.layers.0.self_")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"precisions": ["w8a8-fp8"], "tensor_parallel": 2},
            "models.m.tensor_parallel: expected 1 in w8a8-fp8, whose activations have a scale a row; found 2",
        ),
        ({"group_size": 24}, "models.m.group_size: expected one of 16, 32, 64, 128; found 24"),
        (
            {"precisions": ["w2a16"]},
            "models.m.precisions[0]: expected one of fp32, fp16, bf16, w8a16, w4a16, w8a8, w4a8, w8a8-fp8; "
            "found 'w2a16'",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    model = {"source": str(DEMO), "precisions": ["w4a16"], "golden": {"prompts": [{"text": "a"}]}, **settings}
    assert error_of(load.load, {"models": {"m": model}}) == f"config: {message}"


def test_weights_are_converted_by_the_assembly_of_their_precision_only(shared, tmp_path):
    results = demo(shared, "w8a16")
    checkpoint = results.checkpoint("model")
    out = tmp_path / "weights.json"
    line = error_of(convert, checkpoint, "w4a16", out, results.assembly("model", "w8a16"))
    assert "expected an assembly of w4a16, found w8a16" in line
    assert "expected an assembly, which names the quantised weights" in error_of(convert, checkpoint, "w4a16", out)
    assert not out.exists()


def test_a_model_without_linear_weights_of_this_layout_is_refused(shared):
    files, assembly = shared.assembled(dict(FAMILIES["gpt2"].config), "fp32")
    line = error_of(quantize, files, assembly, "w8a16", GROUP, QuantizedTensors(GROUP, {}))
    assert "expected linear weights that can be quantised, found none in a model of type 'gpt2'" in line


@pytest.mark.parametrize("family", some(FAMILIES, "gpt2"))
def test_the_config_tells_which_group_sizes_fit_the_rows(shared: Shared, family: str) -> None:
    config = FAMILIES[family].config
    for size in (16, 32, 64, 128):
        fits = not any(row % size for row in linear_rows(config).values())
        try:
            quantize(*shared.assembled(config, "fp32"), "w4a16", size)
        except InputError:
            assert not fits
        else:
            assert fits


def test_a_square_weight_that_lies_transposed_is_quantized_in_rows_of_its_product(shared: Shared, tmp_path) -> None:
    """GPT-2's `attn.c_proj`: its shape does not tell the orientation."""
    config = FAMILIES["gpt2"].config
    results = Results(tmp_path / "results")
    name = "transformer.h.0.attn.c_proj.weight"
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = make_random_checkpoint(tmp_path / "config.json", 0, tmp_path / "checkpoint")
    checkpoint = resolve(str(folder), folder, results.checkpoint("model"))
    _, assembly = quantize(*shared.assembled(config, "fp32"), "w4a16", GROUP)
    assembly.save(tmp_path / "assembly.json")
    convert(checkpoint, "w4a16", results.weights("model", "w4a16"), tmp_path / "assembly.json")
    weights = Weights.open(results.weights("model", "w4a16"))
    exact = load_file(folder / "model.safetensors")[name]
    assert exact.shape == (48, 48) and name in weights.quantization.transposed
    steps = np.repeat(np.abs(weights[scales_name(name)]), GROUP, axis=1)
    dequantized = dict(weights.dequantized())[name]
    assert (np.abs(dequantized - exact) <= 1.001 * steps.T).all()
    assert not (np.abs(dequantized.T - exact) <= steps.T).all()
