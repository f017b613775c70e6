"""MXFP4, as GPT-OSS's experts are published: bound as the checkpoint has it, or the numbers that it represents."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import error_of
from demo_model import CONFIG as TOLERANCES
from demo_model import LIMITS
from pipeline import run_golden, run_validate
from safetensors.numpy import load_file, save_file
from test_experts import BACKENDS, logits_of, make_random
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import lockstep
from lockstep import Advance, Model, ModelOptions, Results
from lockstep.artifacts.quantization_error import QuantizationError
from lockstep.targets import Target
from lockstep.verify.golden.reference import make_reference
from lockstep.verify.golden.terms import GoldenTerms
from lockstep.weights import Weights
from lockstep.weights.source import open_source
from shared import Shared

CONFIG: dict[str, Any] = {
    "model_type": "gpt_oss", "dtype": "float32", "vocab_size": 288, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": 2,
    "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    "layer_types": ["full_attention", "full_attention"],  # the windows are those of `FAMILIES["gpt_oss"]`
}  # fmt: skip
STACKS = [f"model.layers.{layer}.mlp.experts.{name}" for layer in (0, 1) for name in ("gate_up_proj", "down_proj")]
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def checkpoint(shared: Shared) -> Path:
    """A tiny GPT-OSS with random codes, not to be changed."""

    def make(folder: Path) -> None:
        make_random(CONFIG, folder)
        path = folder / "model" / FILE
        random = np.random.default_rng(0)
        tensors = load_file(path)
        for name in STACKS:
            experts, columns, rows = tensors.pop(name).shape
            tensors[f"{name}_blocks"] = random.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
            tensors[f"{name}_scales"] = random.integers(120, 124, (experts, rows, columns // 32), np.uint8)
        save_file(tensors, path, {"format": "pt"})
        config = json.loads((folder / "model" / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        (folder / "model" / "config.json").write_text(json.dumps(config))

    return shared.folder("mxfp4/checkpoint", make) / "model"


def numbers(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What transformers makes of a stack."""
    tensors = load_file(folder / FILE)
    parts = (torch.from_numpy(tensors[f"{name}_{part}"]) for part in ("blocks", "scales"))
    return convert_moe_packed_tensors(*parts, dtype=dtype)


def test_numbers_are_those_of_transformers_to_the_bit(checkpoint, tmp_path):
    every = tmp_path / "every"  # code next to every exponent that gives finite numbers, subnormal ones too
    shutil.copytree(checkpoint, every)
    tensors = load_file(every / FILE)
    exponents = tensors[f"{STACKS[0]}_scales"]
    exponents[:] = np.resize(np.arange(252, dtype=np.uint8), exponents.shape)
    save_file(tensors, every / FILE, {"format": "pt"})
    results = Results(tmp_path / "results")
    source = open_source(lockstep.resolve_checkpoint(str(every), every, results.checkpoint("m")))
    weights = Weights.open(lockstep.convert_weights(results.checkpoint("m"), "bf16", results.weights("m", "bf16")))
    for name in STACKS:
        assert source.array(name).tobytes() == numbers(every, name).numpy().tobytes(), name
        in_bf16 = numbers(every, name, torch.bfloat16)
        assert weights[name].tobytes() == in_bf16.view(torch.int16).numpy().tobytes(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_engines_take_the_codes_from_the_checkpoints_own_file(checkpoint, tmp_path, backend):
    if backend == "openvino":
        pytest.importorskip("openvino", reason="OpenVINO is not installed")
    actual, expected, loaded = logits_of(checkpoint, "w4a16", backend, tmp_path)
    assert loaded.quantization is not None and loaded.quantization.bits == dict.fromkeys(STACKS, 4)
    stored = dict(loaded.dequantized())
    for name in STACKS:
        assert stored[name].tobytes() == numbers(checkpoint, name).numpy().tobytes(), name
        assert {loaded.location(f"{name}.{part}")[0] for part in ("data", "scales")} == {(checkpoint / FILE).resolve()}
    assert np.abs(actual - expected).max() < 1e-4  # fp32 in another order, logits near 1
    results = Results(tmp_path)
    files = (
        results.engines("m", "w4a16", backend), results.assembly("m", "w4a16"), results.weights("m", "w4a16"),
    )  # fmt: skip
    model = Model.open(*files, options=ModelOptions(max_batch_size=3, max_seq_len=32))
    tokens = np.array([3, 200, 17, 9, 101, 54])
    beside = model.step([Advance(0, tokens[::-1], 0), Advance(1, tokens, 0), Advance(2, tokens[:1], 0)])
    assert backend == "openvino" or model.engines.batch_invariant
    assert np.array_equal(beside[1], actual) or not model.engines.batch_invariant


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gates_hold_engines_to_the_checkpoint(checkpoint, tmp_path, backend):
    logits_of(checkpoint, "w4a16", backend, tmp_path)
    results = Results(tmp_path)
    of_graphs, tolerance = (TOLERANCES.tolerance("demo-llama", "w4a16", name) for name in (None, backend))
    reference = results.quantized_reference("m", "w4a16", "all")
    terms = GoldenTerms(8, ("The cat",), 40)
    make_reference(results.checkpoint("m"), "all", terms, reference, results.weights("m", "w4a16"))
    assert QuantizationError.load(results.quantization_error("m", "w4a16", "all")).max_weight_error == 0
    target = Target("m", "w4a16", "all", backend)
    run_validate(results, target, of_graphs, 40, tmp_path)
    assert run_golden(results, target, tolerance, replace(LIMITS, max_seq_len=48), tmp_path)["result"] == "pass"


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("scales", lambda array: array | 255, "exponent 255"),
        ("scales", lambda array: array[:, :, :1], "expected U8 [4, 192, 2], found U8 [4, 192, 1]"),
        ("blocks", lambda array: array.astype(np.int8), "expected U8 of four dimensions"),
        ("scales", None, "expected tensor"),
    ],
)
def test_parts_that_do_not_fit_are_refused(checkpoint, tmp_path, part, change, words):
    folder = tmp_path / "wrong"
    results = Results(tmp_path / "results")
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / FILE)
    array = tensors.pop(f"{STACKS[0]}_{part}")
    if change:
        tensors[f"{STACKS[0]}_{part}"] = np.ascontiguousarray(change(array))
    save_file(tensors, folder / FILE, {"format": "pt"})

    def convert() -> None:
        paths = results.checkpoint("m"), results.assembly("m", "w4a16"), results.weights("m", "w4a16")
        lockstep.resolve_checkpoint(str(folder), folder, paths[0])
        lockstep.export_graphs(paths[0], "w4a16", paths[1])
        lockstep.convert_weights(paths[0], "w4a16", paths[2], paths[1])

    assert words in error_of(convert)
