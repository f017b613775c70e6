"""Checkpoints in fp8, nvfp4 and bitsandbytes' layouts: weights are the numbers that they encode, engines say what
these say, and unreadable ones get one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import error_of
from coded_checkpoints import SETTINGS, Tensors, save, tensors_of, write_coded
from demo_model import CONFIG, DEMO, LIMITS
from lora_folders import tensors as lora_tensors
from lora_folders import write as write_adapter
from packed_checkpoints import PROJ, spoil, without, write_settings
from pipeline import run_golden, run_validate, write_assembly
from quantized_models import ASKED, refer
from safetensors.torch import load_file as load_torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.artifacts.quantization_error import QuantizationError
from lockstep.artifacts.quantized import data_name
from lockstep.backends.builder import build
from lockstep.checkpoint import resolve
from lockstep.checkpoint.resolve import resolve_architecture
from lockstep.config import load
from lockstep.export.quantize import quantize
from lockstep.targets import Results, Target
from lockstep.verify.golden.reference import make_reference
from lockstep.weights import Weights, convert
from lockstep.weights.check_adapters import check_folder
from lockstep.weights.source import open_source
from shared import Shared

MODEL = json.loads((DEMO / "config.json").read_text())
# A kind of codes each; the others differ in scales and names, which the first test reads.
EACH = ("fp8-blocks", "nvfp4", "nf4", "bnb-int8")


def source(shared: Shared, layout: str) -> tuple[Path, Tensors]:
    """A checkpoint of the demo in a layout, not to be changed, and the numbers that its tensors represent."""

    def make(folder: Path) -> None:
        save(write_coded(DEMO, folder / "checkpoint", layout), folder / "numbers.safetensors")

    folder = shared.folder(f"coded/{layout}", make)
    return folder / "checkpoint", {
        name: item.numpy() for name, item in load_torch(folder / "numbers.safetensors").items()
    }


def resolved(folder: Path, results: Results) -> Path:
    return resolve(str(folder), folder, results.checkpoint("model"))


@pytest.mark.parametrize("layout", SETTINGS)
def test_weights_are_the_numbers_that_codes_stand_for(shared, tmp_path, layout):
    folder, numbers = source(shared, layout)
    results = Results(tmp_path)
    actual = open_source(resolved(folder, results))
    for name, expected in numbers.items():
        assert actual.array(name).astype(np.float32).tobytes() == expected.tobytes(), name
    convert(results.checkpoint("model"), "bf16", results.weights("model", "bf16"))
    weights = Weights.open(results.weights("model", "bf16"))
    for name, expected in numbers.items():
        assert np.array_equal(weights[name], expected.astype(weights[name].dtype)), name


def test_blocks_of_fp8_are_what_transformers_makes_of_them(tmp_path):
    """Its own function, on a weight of whole blocks; to_dtype float32, for its default is that of the scales."""
    weight = np.random.default_rng(0).standard_normal((256, 384)).astype(np.float32)
    parts, numbers = tensors_of("fp8-blocks", weight)
    codes = torch.from_numpy(parts["weight"].view(np.uint8)).view(torch.float8_e4m3fn)
    actual = Fp8Dequantize(None)._dequantize_one(codes, torch.from_numpy(parts["weight_scale_inv"]), torch.float32)
    assert np.array_equal(actual.numpy(), numbers)


@pytest.mark.parametrize("layout", ["fp8-rows", "fp8-tensor"])
def test_codes_with_a_scale_a_row_stay_as_they_are(shared, tmp_path, layout):
    folder, numbers = source(shared, layout)
    results = converted(folder, "w8a8-fp8", Results(tmp_path), shared)
    actual = open_source(results.checkpoint("model"))
    weights = Weights.open(results.weights("model", "w8a8-fp8"))
    for name in actual.packed:
        coded = actual.coded(name)
        assert np.array_equal(weights[data_name(name)].view(np.uint8), coded.arrays["data"]), name
        assert np.array_equal(weights.dequantize(name), numbers[name]), name
    assert len(actual.packed) == 7 * MODEL["num_hidden_layers"]


def converted(folder: Path, precision: str, results: Results, shared: Shared) -> Results:
    """A checkpoint through `resolve`, graphs and `convert`; other tests show that graphs are right."""
    resolved(folder, results)
    files, assembly = shared.assembled(MODEL, "fp32")
    if precision != "fp32":
        files, assembly = quantize(files, assembly, precision, 16)
    out = write_assembly(files, assembly, folder, results.assembly("model", precision))
    convert(results.checkpoint("model"), precision, results.weights("model", precision), out)
    return results


@pytest.mark.parametrize(
    ("layout", "precision"),
    [("nf4", "w8a16"),
     *(pytest.param(item, "fp32", marks=pytest.mark.long) for item in EACH),
     *(pytest.param(item, "w8a8-fp8", marks=pytest.mark.long) for item in ("fp8-rows", "fp8-blocks"))],
)  # fmt: skip
def test_engines_say_what_the_numbers_say(shared, tmp_path, layout, precision):
    results = converted(source(shared, layout)[0], precision, Results(tmp_path / "results"), shared)
    build(results.assembly("model", precision), "onnxruntime", results.engines("model", precision, "onnxruntime"))
    make_reference(results.checkpoint("model"), 2, ASKED, results.reference("model", 2))
    if precision != "fp32":
        refer(results, precision, 2, ASKED)
        assert (
            0 < QuantizationError.load(results.quantization_error("model", precision, 2)).max_weight_error < 1.001
        )  # quantised again
    target = Target("model", precision, 2, "onnxruntime")
    of_graphs, tolerance = (CONFIG.tolerance("demo-llama", precision, backend) for backend in (None, "onnxruntime"))
    run_validate(results, target, of_graphs, 96, tmp_path)
    assert run_golden(results, target, tolerance, LIMITS, tmp_path)["result"] == "pass"


def test_a_config_may_ask_for_any_precision_and_a_line_says_how_weights_are_read(shared, tmp_path, capsys):
    folder, _ = source(shared, "fp8-rows")
    model = {"source": str(folder), "precisions": ["fp16", "w8a16", "w4a16"], "group_size": 16}
    load.load({"models": {"m": {**model, "golden": {"prompts": [{"text": "a"}]}}}}).check_sources()
    resolve_architecture(str(folder), folder, tmp_path / "architecture.json")
    assert capsys.readouterr().err.startswith(
        f"lockstep: note: {folder}: weights packed as fp8 are read as the numbers that they encode; activations, "
        "which config.json asks for, are not quantised; w8a8-fp8 keeps weights, and quantises activations\n"
    )


def _state(text: str) -> Callable[[Tensors], Any]:
    return spoil("weight.quant_state.bitsandbytes__nf4", lambda _: np.frombuffer(text.encode(), np.uint8))


def _nan(array: np.ndarray) -> np.ndarray:
    array.view(np.uint8)[3, 2] = 127
    return array


@pytest.mark.parametrize(
    ("layout", "edit", "line"),
    [
        ("fp8-blocks", without("weight_scale_inv"), f"expected tensor '{PROJ}.weight_scale_inv' for '{PROJ}.weight'"),
        ("fp8-blocks", spoil("weight_scale_inv", lambda a: a[:, :1]), "[4, 2], found F32 [4, 1]"),
        ("fp8-tensor", spoil("weight_scale", lambda a: np.ones(3, np.float32)), "[400, 1] or [400] or [1, 1] or [1] or "
         "[], found F32 [3]"),
        ("fp8-rows", spoil("weight_scale", lambda a: a[1:]), "found BF16 [399, 1]; does config.json"),
        ("fp8-rows", spoil("weight", _nan), "expected finite numbers, found 1 NaN"),
        ("nvfp4", without("weight_global_scale"), f"expected tensor '{PROJ}.weight_global_scale' for"),
        ("nvfp4", without("weight_packed"), f"expected tensor '{PROJ}.weight_packed' for '{PROJ}.weight_scale'"),
        ("nvfp4", spoil("weight_scale", lambda a: a[:, 1:]), "expected F8_E4M3 [400, 9], found F8_E4M3 [400, 8]"),
        ("nvfp4", spoil("weight_packed", lambda a: a[:, 1:]), "U8 of two dimensions, of 8s, found U8 [400, 71]"),
        ("nvfp4", spoil("weight_global_scale", lambda a: 0 * a), "NaN and "),
        ("nf4", without("weight.absmax"), f"expected tensor '{PROJ}.weight.absmax' for '{PROJ}.weight.quant_state"),
        ("nf4", spoil("weight.absmax", lambda a: a[1:]), "expected U8 [900], found U8 [899]"),
        ("nf4", spoil("weight", lambda a: a[1:]), "found U8 [28799, 1]"),
        ("nf4", _state("{"), "expected JSON with shape and blocksize, found 'Expecting property name"),
        ("nf4", _state('{"shape": [400, 0], "blocksize": 64}'), "with shape and blocksize, found '[400, 0"),
        ("bnb-int8", spoil("SCB", lambda a: a[1:]), "expected F32 [400], found F32 [399]"),
        ("bnb-int8", spoil("weight_format", lambda a: a + np.uint8(1)), "expected 0, rows one after another, found 1"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused(tmp_path, layout, edit, line):
    folder = tmp_path / "checkpoint"
    write_coded(DEMO, folder, layout, edit)
    message = error_of(lambda: convert(resolved(folder, Results(tmp_path)), "fp32", tmp_path / "weights.json"))
    assert message.startswith(str(folder / "model.safetensors")) and line in message
    assert not list(tmp_path.rglob("weights.*"))


@pytest.mark.parametrize(
    ("layout", "change", "line"),
    [
        ("fp8-blocks", {"weight_block_size": [128]}, "expected two positive integers as quantization_config."
         "weight_block_size, found [128]"),
        ("fp8-blocks", {"fmt": "e5m2"}, "expected e4m3 as quantization_config.fmt, found 'e5m2'"),
        ("modelopt-nvfp4", {"quant_algo": "W4A8"}, "expected FP8 or NVFP4 as quantization_config.quant_algo"),
        ("nf4", {"load_in_4bit": False}, "expected true, or load_in_8bit as quantization_config.load_in_4bit"),
        ("nvfp4", {"format": "mxfp8-quantized"}, "float-quantized, nvfp4-pack-quantized as quantization_config.format"),
    ],
)  # fmt: skip
def test_a_quantization_config_that_is_not_read_is_refused(tmp_path, layout, change, line):
    write_coded(DEMO, tmp_path / "checkpoint", layout)
    write_settings(tmp_path / "checkpoint", SETTINGS[layout] | change)
    message = error_of(resolved, tmp_path / "checkpoint", Results(tmp_path))
    assert message.startswith(str(tmp_path / "checkpoint" / "config.json")) and line in message


def test_an_adapter_of_a_base_in_nf4_is_held_to_it(shared, tmp_path):
    """The base that most adapters are trained on; its files need not be there."""
    folder, _ = source(shared, "nf4")
    checkpoint = replace(CheckpointManifest.load(resolved(folder, Results(tmp_path))), source="hf:a/b")
    module = PROJ
    for rows, line in ((400, None), (402, "expected [out_features, in_features] [28800, 1] as the base")):
        lora = write_adapter(tmp_path / str(rows), 4, lora_tensors({module: (rows, 144)}, 4, 0))
        if line is None:
            assert check_folder(lora, checkpoint, "adapter").modules[module].b.shape == (rows, 4)
        else:
            assert line in error_of(check_folder, lora, checkpoint, "adapter")
