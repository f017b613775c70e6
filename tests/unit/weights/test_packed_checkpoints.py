"""Checkpoints that are quantised already: their own integers come to the graphs, and what cannot be read is said in one
line before anything long."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import error_of
from demo_model import DEMO, LIMITS
from families import FAMILIES
from packed_checkpoints import (
    GPTQ,
    LAYOUTS,
    PROJ,
    Layout,
    label,
    spoil,
    tensors_of,
    without,
    write_packed,
    write_settings,
)
from pipeline import write_assembly
from quantized_models import ASKED, check, damaged, refer, validated
from safetensors.numpy import load_file, save_file

from lockstep import make_random_checkpoint
from lockstep.artifacts.assembly import Assembly
from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.artifacts.files import sha256_file, write_json
from lockstep.artifacts.quantization_error import QuantizationError
from lockstep.artifacts.quantized import QuantizedTensors, data_name, order_name, zero_points_name
from lockstep.backends.builder import build
from lockstep.checkpoint import resolve
from lockstep.checkpoint.resolve import resolve_architecture
from lockstep.config import load
from lockstep.config.packing import packing_of
from lockstep.errors import CheckError, InputError
from lockstep.export.quantize import quantize
from lockstep.export.run import assemble, export
from lockstep.export.tracer import meta_model
from lockstep.targets import Results
from lockstep.verify.golden.reference import make_reference
from lockstep.weights import Weights, convert, packed, slot_array
from lockstep.weights.groups import dequantize, pack
from lockstep.weights.packed import Packed, PackedValueError, pack_zero_points
from shared import Shared
from some import some

CONFIG = json.loads((DEMO / "config.json").read_text())
ZEROS = replace(GPTQ, zero_points=True)
ORDERED = replace(ZEROS, ordered=True)
AWQ = next(layout for layout in LAYOUTS if layout.name == "awq")
PACK = next(layout for layout in LAYOUTS if layout.name == "pack-quantized")
INT8 = next(layout for layout in LAYOUTS if layout.name == "int-quantized")


def precision_of(layout: Layout) -> str:
    return f"w{layout.bits}a16"


def source(shared: Shared, layout: Layout) -> tuple[Path, dict[str, np.ndarray]]:
    """A checkpoint of the demo in a layout, not to be changed, and the numbers that its tensors represent."""

    def make(folder: Path) -> None:
        save_file(write_packed(DEMO, folder / "checkpoint", layout), folder / "numbers.safetensors")

    folder = shared.folder(f"packed/{label(layout)}", make)
    return folder / "checkpoint", load_file(folder / "numbers.safetensors")


def converted(shared: Shared, layout: Layout, root: Path, folder: Path | None = None) -> Results:
    """The demo in a layout through `resolve`, graphs and `convert`; the graphs are made without another model that
    shows that the split is right: other tests do."""
    results = Results(root)
    precision = precision_of(layout)
    folder = folder or source(shared, layout)[0]
    resolve(str(folder), folder, results.checkpoint("model"))
    already = CheckpointManifest.load(results.checkpoint("model")).quantization
    files, assembly = quantize(*shared.assembled(CONFIG, "fp32"), precision, already.group_size, already)
    out = write_assembly(files, assembly, folder, results.assembly("model", precision))
    convert(results.checkpoint("model"), precision, results.weights("model", precision), out)
    return results


@pytest.mark.parametrize("layout", some(LAYOUTS, ORDERED, AWQ, INT8), ids=label)
def test_the_integers_of_a_checkpoint_stay_what_they_are(shared, tmp_path, layout):
    folder, numbers = source(shared, layout)
    results = converted(shared, layout, tmp_path / "results")
    precision = precision_of(layout)
    weights = Weights.open(results.weights("model", precision))
    actual = dict(weights.dequantized())
    assert set(actual) == set(numbers)
    for name, expected in numbers.items():
        assert np.array_equal(actual[name].astype(np.float32), expected), name
        is_packed = "_proj." in name
        assert (data_name(name) in weights) == is_packed
        assert (zero_points_name(name) in weights) == (is_packed and layout.zero_points)
        assert (order_name(name) in weights) == (is_packed and layout.ordered)
    quantized = Assembly.load(results.assembly("model", precision)).quantization
    assert quantized.bits == {name: layout.bits for name in numbers if "_proj." in name}
    assert (quantized.group_size, quantized.zero_points, quantized.ordered) == (16, layout.zero_points, layout.ordered)
    again = tmp_path / "again.json"
    convert(results.checkpoint("model"), precision, again, results.assembly("model", precision))
    first = results.weights("model", precision).with_suffix(".safetensors")
    assert sha256_file(first) == sha256_file(tmp_path / "weights.safetensors")


@pytest.mark.parametrize("layout", [GPTQ, AWQ], ids=label)
def test_layers_and_matrices_may_be_dense(shared, tmp_path, layout):
    """As `dynamic` of GPTQModel and `modules_to_not_convert` leave them; blocks go by what their weights are."""
    folder = tmp_path / "checkpoint"
    dense = r"layers\.0\.|layers\.1\.mlp\.gate|layers\.2\.self_attn\.v_proj"
    numbers = write_packed(DEMO, folder, layout, dense)
    results = converted(shared, layout, tmp_path / "results", folder)
    precision = precision_of(layout)
    actual = dict(Weights.open(results.weights("model", precision)).dequantized())
    assert all(np.array_equal(actual[name].astype(np.float32), expected) for name, expected in numbers.items())
    assembly = Assembly.load(results.assembly("model", precision))
    packed = {name for name in numbers if "_proj." in name and not re.search(dense, name)}
    assert set(assembly.quantization.bits) == packed
    first, *rest_of_layers = [layer.block.graph for layer in assembly.layers if layer.block.graph.startswith("middle")]
    assert len({first, *rest_of_layers[:3]}) > 2 and len(set(rest_of_layers[3:])) == 1
    for layer in assembly.layers:
        for part in layer.parts:
            slots = {slot.name for slot in assembly.classes[part.graph].signature.slots}
            assert slots == set(part.slots)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["gptq", "gptq_v2", "awq", "pack-quantized", "int-quantized"])
def test_long_groups_become_several_in_blocks_of_any_size(monkeypatch, name, bits):
    """Groups of 48 as groups of 16; blocks of 8 rows, the last one shorter."""
    layout = Layout(name, 4 if name == "awq" else 8 if name == "int-quantized" else bits, 48, zero_points=True)
    weight = np.random.default_rng(bits).standard_normal((40, 144)).astype(np.float32)
    tensors, numbers = tensors_of("m", weight, layout)
    packing = packing_of({"quantization_config": layout.config()})
    suffixes = {"qweight": "data", "weight_packed": "data", "weight": "data", "scales": "scales", "g_idx": "order"}
    suffixes |= {"weight_scale": "scales", "qzeros": "zero_points", "weight_zero_point": "zero_points"}
    suffixes |= {"weight_shape": "shape"}
    parts = {suffixes[key.partition(".")[2]]: array for key, array in tensors.items()}
    checkpoint_tensor = Packed(packing, weight.shape, parts)
    checkpoint_tensor.check()
    monkeypatch.setattr(packed, "BLOCK_SIZE", 24 * 144)
    results = []
    for rows in checkpoint_tensor.blocks():
        assert rows.stop - rows.start == (24 if rows.start == 0 else 16)
        data = pack(checkpoint_tensor.integers(rows).reshape(-1, 9, 16), layout.bits)
        zeros = pack_zero_points(checkpoint_tensor.zero_points(rows, 16), layout.bits)
        results.append(dequantize(data, checkpoint_tensor.scales(rows, 16), 16, zeros))
    assert np.array_equal(np.concatenate(results), numbers)


def test_a_gptq_checkpoint_of_which_config_json_says_too_little():
    """A g_idx that nobody filled in is none; version 2 is told from version 1 where zero points are the middle."""
    weight = np.random.default_rng(0).standard_normal((40, 144)).astype(np.float32)
    layout = Layout("gptq", 4, 48, zero_points=False)
    packing = packing_of({"quantization_config": layout.config()})
    tensors, numbers = tensors_of("m", weight, layout)
    roles = {"qweight": "data", "scales": "scales", "qzeros": "zero_points", "g_idx": "order"}
    parts = {roles[name.partition(".")[2]]: array for name, array in tensors.items()}
    zeros = np.zeros_like(parts["order"])
    packed = Packed(packing, weight.shape, {**parts, "order": zeros})
    packed.check()
    assert np.array_equal(packed.numbers(slice(0, 40)), numbers)
    with pytest.raises(PackedValueError, match="gptq_v2"):
        Packed(packing, weight.shape, {**parts, "zero_points": parts["zero_points"] + np.int32(0x11111111)}).check()
    settings = {**layout.config(), "sym": False}
    settings.pop("checkpoint_format", None)
    assert "says no checkpoint_format" in packing_of({"quantization_config": settings}).described()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", [AWQ, INT8], ids=label)
def test_in_floating_point_it_is_what_the_integers_stand_for(shared, tmp_path, layout, precision):
    folder, numbers = source(shared, layout)
    resolve(str(folder), folder, tmp_path / "checkpoint.json")
    convert(tmp_path / "checkpoint.json", precision, tmp_path / "weights.json")
    weights = Weights.open(tmp_path / "weights.json")
    assert weights.names() == sorted(numbers)
    for name, expected in numbers.items():
        assert np.array_equal(weights[name], expected.astype(weights[name].dtype)), name


@pytest.mark.parametrize("layout", some([ORDERED, AWQ, ZEROS, INT8]), ids=label)
def test_engines_say_what_the_checkpoint_says(shared, tmp_path, layout):
    results = converted(shared, layout, tmp_path / "results")
    precision = precision_of(layout)
    build(results.assembly("model", precision), "onnxruntime", results.engines("model", precision, "onnxruntime"))
    make_reference(results.checkpoint("model"), 2, ASKED, results.reference("model", 2))
    refer(results, precision, 2, ASKED)
    validated(results, precision, 2, tmp_path)
    assert check(results, precision, 2, LIMITS, tmp_path)["result"] == "pass"
    error = QuantizationError.load(results.quantization_error("model", precision, 2))
    # The same weights: nothing has moved but sums in another order, with and without a cache.
    assert error.max_weight_error == 0 and error.tokens_differing == 0 and error.max_logit_error < 1e-4
    assert abs(error.perplexity / error.full_perplexity - 1) < 1e-6


@pytest.mark.long
def test_ranks_take_their_part_of_the_zero_points(tmp_path):
    """Which stand two in a byte: a rank takes an even number of groups of a row."""
    config = {**FAMILIES["llama"].config, "hidden_size": 64, "intermediate_size": 128}
    write_json(tmp_path / "config.json", config)
    write_packed(make_random_checkpoint(tmp_path / "config.json", 0, tmp_path / "full"), tmp_path / "packed", ZEROS)
    resolve("packed", tmp_path / "packed", tmp_path / "checkpoint.json")
    already = CheckpointManifest.load(tmp_path / "checkpoint.json").quantization
    files, assembly = assemble(meta_model(config, "fp32"), config, "fp32", tensor_parallel=2)
    split = quantize(files, assembly, "w4a16", 16, already)[1]
    split.save(tmp_path / "assembly.json")
    convert(tmp_path / "checkpoint.json", "w4a16", tmp_path / "weights.json", tmp_path / "assembly.json")
    weights = Weights.open(tmp_path / "weights.json")
    axes = set()
    exact = dict(weights.dequantized())
    for part, old in (
        (split.layers[1].block, assembly.layers[1].block),
        (split.layers[1].exit, assembly.layers[1].exit),
    ):
        sharded = split.tensor_parallel.classes[part.graph]
        full = assembly.tensor_parallel.classes[old.graph]
        sizes = {slot.name: slot.sizes for slot in split.classes[part.graph].signature.slots}
        for slot in [slot for slot in old.slots if data_name(slot) in part.slots]:
            for rank in range(2):
                data, scales, zeros = (
                    sharded.take_weight(name, slot_array(weights, part.slots[name], sizes[name]), rank)
                    for name in already.parts(slot)
                )
                rank_part = full.take_weight(slot, exact[old.slots[slot][0]], rank)
                assert np.array_equal(dequantize(data, scales, 16, zeros), rank_part) and zeros.nbytes < data.nbytes
            axes.add(full.weights[slot].axis)
    assert axes == {0, 1}
    config["intermediate_size"] = 96  # three groups for each rank
    files, assembly = assemble(meta_model(config, "fp32"), config, "fp32", tensor_parallel=2)
    with pytest.raises(InputError, match="group_size: expected a size that divides the 48 numbers of a row of .*down"):
        quantize(files, assembly, "w4a16", 16, already)


def test_export_takes_bits_and_groups_from_the_checkpoint(shared, tmp_path):
    folder, _ = source(shared, ZEROS)
    architecture = resolve_architecture(str(folder), folder, tmp_path / "architecture.json")
    manifest = CheckpointManifest.load(architecture)
    assert not manifest.tensors and manifest.quantization.group_size == 16
    export(architecture, "w4a16", tmp_path / "graphs" / "assembly.json")
    assembly = Assembly.load(tmp_path / "graphs" / "assembly.json")
    assert assembly.quantization == manifest.quantization
    slots = assembly.layers[0].exit.slots
    assert {name.rpartition(".")[2] for name in slots if "down_proj" in name} == {"data", "scales", "zero_points"}
    line = error_of(export, architecture, "w8a16", tmp_path / "other.json")
    assert "expected precision w4a16, for the weights are quantised to 4 bits already, found w8a16" in line
    line = error_of(lambda: export(architecture, "w4a16", tmp_path / "other.json", group_size=32))
    assert line.startswith("group_size: expected 16, as the checkpoint ") and line.endswith("found 32; leave it out")


@pytest.mark.parametrize("part", some(["data", "scales", "zero_points"]))
def test_weights_that_are_not_the_checkpoints_are_refused(shared, tmp_path, part):
    def change(tensors: dict[str, np.ndarray]) -> None:
        array = tensors[f"model.layers.1.mlp.up_proj.weight.{part}"]
        array.flat[5] = array.flat[5] * np.float32(1.001) if part == "scales" else array.flat[5] ^ 1

    results = converted(shared, ZEROS, tmp_path / "right")
    make_reference(results.checkpoint("model"), 2, ASKED, results.reference("model", 2))
    line = "expected numbers equal to the checkpoint's, found [0-9]+ that are not"
    with pytest.raises(CheckError, match=line):
        refer(damaged(results, tmp_path / "results", change), "w4a16", 2, ASKED)


# What cannot be read: one line each, where the files are first looked at.


def _weights(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda settings: settings["config_groups"]["group_0"]["weights"].update(changes)


def _group(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda settings: settings["config_groups"]["group_0"].update(changes)


def _second(settings: dict[str, Any]) -> None:
    first = settings["config_groups"]["group_0"]
    settings["config_groups"]["group_1"] = {**first, "weights": {**first["weights"], "num_bits": 8}}


@pytest.mark.parametrize(
    ("layout", "change", "line"),
    [
        (GPTQ, {"quant_method": "hqq"}, "bitsandbytes, mxfp4, or no quantization_config where the weights are in "
         "floating point as quantization_config.quant_method, found 'hqq'"),
        (GPTQ, {"quant_method": "auto-round", "packing_format": "auto_round:mlx"}, "auto_round:awq "
         "as quantization_config.packing_format, found 'auto_round:mlx'"),
        (GPTQ, {"quant_method": "auto-round", "extra_config": {"lm_head": {"bits": 8}}}, "expected layers of the same "
         "bits, or in floating point as quantization_config.extra_config"),
        (GPTQ, {"bits": 3}, "expected 4 or 8 as quantization_config.bits, found 3"),
        (GPTQ, {"group_size": 24}, "expected -1, or a multiple of 16 as quantization_config.group_size, found 24"),
        (GPTQ, {"checkpoint_format": "marlin"}, "expected gptq or gptq_v2 as quantization_config.checkpoint_format, "
         "found 'marlin'"),
        (GPTQ, {"sym": 1}, "expected true or false as quantization_config.sym, found 1"),
        (AWQ, {"version": "gemv"}, "expected gemm as quantization_config.version, found 'gemv'"),
        (AWQ, {"zero_point": False}, "expected true as quantization_config.zero_point, found False"),
        (PACK, {"format": "float-quantized"}, "found 'float-quantized'"),
        (PACK, {"config_groups": {}}, "expected an object of groups as quantization_config.config_groups, found {}"),
        (PACK, _weights(symmetric="no"), "weights.symmetric, found 'no'"),
        (PACK, _weights(type="float"), "expected int or None as quantization_config.config_groups.group_0.weights.type"),  # noqa: E501
        (PACK, _weights(actorder="group"), "weights.actorder, found 'group'"),
        (PACK, _weights(strategy="tensor"), "expected group or channel as "),
        (PACK, _group(output_activations={"num_bits": 8}), "expected null, for activations are not quantised here as"),
        (PACK, _second, "expected groups of one format, of the same bits and group_size as"),
        (GPTQ, "gptq", "expected an object as quantization_config, found 'gptq'"),
    ],
)  # fmt: skip
def test_a_quantization_config_of_another_layout_is_refused(tmp_path, layout, change, line):
    folder = tmp_path / "checkpoint"
    shutil.copytree(DEMO, folder)
    settings: Any = layout.config()
    if isinstance(change, str):
        settings = change
    elif isinstance(change, dict):
        settings.update(change)
    else:
        change(settings)
    write_settings(folder, settings)
    message = error_of(resolve, str(folder), folder, tmp_path / "checkpoint.json")
    assert message.startswith(str(folder / "config.json")) and line in message
    assert not (tmp_path / "checkpoint.json").exists()


def test_activations_and_caches_that_are_to_be_quantised_are_told_and_left(shared):
    """Weights stay the same: int8 W8A8 is read as w8a16."""
    plain = INT8.config()
    changed = copy.deepcopy(plain) | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    _group(input_activations={"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True})(changed)
    actual, expected = (packing_of({"quantization_config": settings}) for settings in (changed, plain))
    assert actual == expected and not expected.described()
    assert actual.described() == "activations and KV caches, which config.json asks for, are not quantised"


@pytest.mark.parametrize(("form", "layout"), [("auto_round:auto_gptq", GPTQ), ("auto_round:auto_awq", AWQ)])
def test_auto_round_packs_as_gptq_and_awq_do(form, layout):
    settings = {"quant_method": "auto-round", "bits": 4, "data_type": "int", "group_size": 16, "sym": True}
    settings |= {"packing_format": form, "block_name_to_quantize": "model.layers", "extra_config": {"lm_head": {}}}
    assert packing_of({"quantization_config": settings}) == packing_of({"quantization_config": layout.config()})


def _float_too(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{PROJ}.weight"] = np.zeros((400, 144), np.float16)


def _zero_point(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{PROJ}.weight_zero_point"] = np.zeros((50, 9), np.int32)


@pytest.mark.parametrize(
    ("layout", "edit", "line"),
    [
        (GPTQ, without("qzeros"), f"expected tensor '{PROJ}.qzeros' for '{PROJ}."),
        (GPTQ, without("qweight"), f"expected tensor '{PROJ}.qweight' for '{PROJ}."),
        (GPTQ, spoil("qweight", lambda a: a[:-1]), f"tensor '{PROJ}.qweight': expected rows of a multiple of 16 numbers, "  # noqa: E501
         "as group_size in config.json says, found I32 [17, 400]"),
        (GPTQ, spoil("qweight", lambda a: a.astype(np.int64)), "expected I32 or U32 of two dimensions, found I64"),
        (GPTQ, spoil("scales", lambda a: a[:-1]), f"tensor '{PROJ}.scales': expected F64 or F32 or F16 or BF16 [9, 400], "  # noqa: E501
         "found F16 [8, 400]"),
        (GPTQ, spoil("qzeros", lambda a: a.T), "expected I32 or U32 [9, 50], found I32 [50, 9]"),
        (GPTQ, spoil("g_idx", lambda a: a[:-1]), "expected I32 or U32 [144], found I32 [143]"),
        (GPTQ, _float_too, f"expected '{PROJ}.weight' packed or in floating point, found both"),
        (PACK, _zero_point, "expected none of this name, as symmetric in config.json says"),
        (PACK, spoil("weight_scale", lambda a: a.astype(np.int8)), "expected F64 or F32 or F16 or BF16 [400, 9], found I8"),  # noqa: E501
        (INT8, spoil("weight_scale", lambda a: a[:, 0]), "[400, 1], found F16 [400]"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused_by_headers(shared, tmp_path, layout, edit, line):
    folder = changed(shared, tmp_path, layout, edit)
    for stage in (resolve, resolve_architecture):
        message = error_of(stage, str(folder), folder, tmp_path / "checkpoint.json")
        assert message.startswith(str(folder / "model.safetensors")) and line in message
    assert not (tmp_path / "checkpoint.json").exists()


def changed(shared: Shared, tmp_path: Path, layout: Layout, edit: Callable[[dict[str, np.ndarray]], Any]) -> Path:
    folder = tmp_path / "checkpoint"
    shutil.copytree(source(shared, layout)[0], folder)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _nan(array: np.ndarray) -> np.ndarray:
    array[3, 2] = np.nan
    return array


def _other_order(array: np.ndarray) -> np.ndarray:
    return array[::-1]


@pytest.mark.parametrize(
    ("layout", "edit", "line"),
    [
        (GPTQ, spoil("scales", _nan), f"tensor '{PROJ}.scales' (F16 [9, 400]): expected finite numbers, found 1 NaN"),
        (GPTQ, spoil("g_idx", _other_order), f"tensor '{PROJ}.g_idx' (I32 [144]): expected columns in the order of their "  # noqa: E501
         "groups, found another; correct config.json (desc_act: true)"),
        (GPTQ, spoil("qzeros", np.zeros_like), "expected zero points of 8 (sym: true in config.json), found 1"),
        (ORDERED, spoil("g_idx", lambda a: a + np.int32(1)), "expected 9 groups of 16 columns, found 1 to 9"),
        (ORDERED, spoil("g_idx", np.zeros_like), "expected 9 groups of 16 columns, found 0 to 0"),
        (ZEROS, spoil("qzeros", lambda a: a | 15), "expected zero points of at most 15, found 16; readers of the format"),  # noqa: E501
        (PACK, spoil("weight_shape", lambda a: a[::-1]), "expected [400, 144], found [144, 400]"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_refused_when_they_are_read(shared, tmp_path, layout, edit, line):
    folder = changed(shared, tmp_path, layout, edit)
    resolve(str(folder), folder, tmp_path / "checkpoint.json")
    message = error_of(convert, tmp_path / "checkpoint.json", "fp32", tmp_path / "weights.json")
    assert message.startswith(str(folder / "model.safetensors")) and line in message
    with pytest.raises(InputError) as caught:
        converted(shared, layout, tmp_path / "results", folder)
    assert str(caught.value) == message
    assert not list(tmp_path.rglob("weights.*"))


def test_a_checkpoint_without_what_its_config_says_is_refused(tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(DEMO, folder)
    write_settings(folder, GPTQ.config())
    line = error_of(resolve, str(folder), folder, tmp_path / "checkpoint.json")
    assert line.startswith(
        f"{folder}: expected weights packed as gptq (quantization_config in config.json), found none"
    )


def test_weights_that_are_packed_in_a_checkpoint_that_does_not_say_so_are_refused(shared, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(source(shared, INT8)[0], folder)
    write_settings(folder, None)
    line = error_of(resolve, str(folder), folder, tmp_path / "checkpoint.json")
    assert "found I8, which is not supported; use a checkpoint that is not quantized" in line


def test_settings_in_a_file_of_their_own_are_named(shared, tmp_path):
    """As AutoGPTQ left them."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(source(shared, GPTQ)[0], folder)
    write_settings(folder, None)
    (folder / "quantize_config.json").write_text(json.dumps(GPTQ.config()))
    line = error_of(resolve, str(folder), folder, tmp_path / "checkpoint.json")
    assert line.startswith(
        f"{folder}/config.json: expected quantization_config, for 'model.layers.0.mlp.down_proj.qweight'"
    )
    assert "found it in quantize_config.json alone" in line and line.endswith("with quant_method gptq")


def test_graphs_of_other_weights_are_refused(shared, tmp_path):
    """Exported when another tensor was in floating point."""
    results = converted(shared, GPTQ, tmp_path / "results")
    folder, numbers = source(shared, GPTQ)

    def one_in_floats(tensors: dict[str, np.ndarray]) -> None:
        for suffix in ("qweight", "qzeros", "scales", "g_idx"):
            tensors.pop(f"{PROJ}.{suffix}")
        tensors[f"{PROJ}.weight"] = numbers[f"{PROJ}.weight"]

    other = changed(shared, tmp_path, GPTQ, one_in_floats)
    resolve(str(other), other, tmp_path / "checkpoint.json")
    line = error_of(
        convert, tmp_path / "checkpoint.json", "w4a16", tmp_path / "w.json", results.assembly("model", "w4a16")
    )
    assert f"expected '{PROJ}.weight' as the checkpoint has it quantised, found 4 bits in the graphs, none in" in line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precisions": ["fp32", "w8a16"]}, "models.m.precisions[1]: expected w4a16 or floating point, as {path} says how "  # noqa: E501
         "weights are quantised; found 'w8a16'"),
        ({"precisions": ["w4a16"], "group_size": 32}, "models.m.group_size: expected 16, or none: {path} says how "
         "weights are quantised; found 32"),
        ({"precisions": ["w4a16"], "backends": ["onnxruntime", "cuda"]}, "models.m.backends: expected none of "
         "cuda, which takes no zero points of the weights' own ({path}), with w4a16; found one"),
        ({"precisions": ["w4a16"], "backends": ["openvino"]}, "models.m.backends: expected none of openvino, which "
         "takes no zero points of the weights' own ({path}), with w4a16; found one"),
    ],
)  # fmt: skip
def test_a_config_that_asks_for_something_else_is_refused(shared, settings, message):
    folder, _ = source(shared, ZEROS)
    model = {"source": str(folder), "golden": {"prompts": [{"text": "a"}]}, **settings}
    line = error_of(load.load({"models": {"m": model}}).check_sources)
    assert line == f"config: {message.format(path=folder / 'config.json')}"


@pytest.mark.exports
def test_weights_with_activation_order_are_for_one_rank_on_onnx_runtime(tmp_path):
    folder = shutil.copytree(DEMO, tmp_path / "checkpoint")
    already = QuantizedTensors(16, {}, zero_points=True, ordered=True)
    with pytest.raises(InputError, match="tensor_parallel: expected 1 for weights with activation order .*, found 2"):
        config = FAMILIES["llama"].config
        already = replace(already, bits={f"model.layers.{layer}.mlp.up_proj.weight": 4 for layer in range(9)})
        quantize(*assemble(meta_model(config, "fp32"), config, "fp32", tensor_parallel=2), "w4a16", 16, already)
    write_settings(folder, replace(ORDERED, zero_points=False).config())
    model = {"source": str(folder), "golden": {"prompts": [{"text": "a"}]}, "precisions": ["w4a16"]}
    line = error_of(load.load({"models": {"m": {**model, "backends": ["cuda"]}}}).check_sources)
    assert "expected none of cuda, which takes no activation order (desc_act)" in line


def test_random_weights_of_a_quantised_config_are_refused(shared):
    path = source(shared, GPTQ)[0] / "config.json"
    model = {"source": f"random:{path}", "golden": {"prompts": [{"text": "a"}]}}
    line = error_of(load.load({"models": {"m": model}}).check_sources)
    assert line.endswith(
        f"expected a model in floating point in {path}, as random weights are; found quantization_config"
    )


def test_a_config_need_not_name_the_group_size(shared):
    for layout in (GPTQ, INT8):
        model = {"source": str(source(shared, layout)[0]), "golden": {"prompts": [{"text": "a"}]}}
        load.load({"models": {"m": {**model, "precisions": [precision_of(layout)]}}}).check_sources()
