"""A merged checkpoint: exact to rounding, of the same files, and what transformers then says."""

from __future__ import annotations

import shutil
from pathlib import Path

import checkpoints
import numpy as np
import pytest
from click.testing import CliRunner
from demo_model import DEMO, ROOT
from lora_folders import tensors, write
from safetensors.numpy import load_file, save_file

from answers import compute
from lockstep.checkpoint import resolve
from lockstep.checkpoint.resolve import describe
from lockstep.cli.main import main
from lockstep.errors import InputError
from lockstep.export.lora import transposed_layers
from lockstep.export.tracer import meta_model
from lockstep.targets import Results
from lockstep.weights import source
from lockstep.weights.check_adapters import resolve_adapters
from lockstep.weights.merge import merge

ADAPTERS = ROOT / "resources" / "demo-adapters"
PEFT = np.load(ROOT / "tests" / "data" / "peft.npz")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Manifests of the demo and its adapters."""
    results = Results(tmp_path_factory.mktemp("merged"))
    checkpoint = resolve(str(DEMO), DEMO, results.checkpoint("demo-lora"))
    folders = {name: ADAPTERS / name for name in ("captain", "shakespeare")}
    sources = {name: str(folder) for name, folder in folders.items()}
    resolve_adapters(sources, folders, checkpoint, 16, None, results.adapters("demo-lora"))
    return results


def merged(results: Results, name: str, out: Path) -> Path:
    return merge(results.checkpoint("demo-lora"), results.adapters("demo-lora"), name, out)


@pytest.mark.parametrize("piece", [4 << 20, 1000])  # bytes; the second ends within rows
def test_a_merged_checkpoint_is_exact_to_rounding(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    for module in ("source", "merge"):
        monkeypatch.setattr(f"lockstep.weights.{module}.PIECE_BYTES", piece)
    assert source.PIECE_BYTES == piece
    out = merged(results, "shakespeare", tmp_path / "out")
    base = load_file(DEMO / "model.safetensors")
    tensors = load_file(out / "model.safetensors")
    lora = {n: t.astype(np.float64) for n, t in load_file(ADAPTERS / "shakespeare/adapter_model.safetensors").items()}
    assert set(tensors) == set(base)
    changed = 0
    for name, array in base.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in lora:
            exact = array.astype(np.float64) + 2.0 * lora[f"{key}.lora_B.weight"] @ lora[f"{key}.lora_A.weight"]
            # Half the distance between two neighbours in fp16, and nothing more but the last bits of float64.
            half = 0.5 * np.spacing(np.abs(tensors[name])).astype(np.float64)
            assert (np.abs(tensors[name] - exact) <= half * (1 + 1e-9)).all()
            changed += 1
        else:
            assert array.dtype == tensors[name].dtype and np.array_equal(array, tensors[name])
    assert changed == 6 * 7
    layer = "model.layers.3.self_attn.q_proj.weight"
    assert np.abs(tensors[layer][:4].astype(np.float32) - PEFT["shakespeare merged"]).max() < 1e-3  # fp16's rounding


def test_a_merged_weight_does_not_depend_on_the_order_in_which_a_cpu_adds(results: Results, tmp_path: Path) -> None:
    """Large products that cancel leave the rounding of their sum: another for each order, and for fused adds."""
    module = "model.layers.0.self_attn.q_proj"
    rank = 12
    lora = tensors({module: (240, 144)}, rank, 0, size=1e12)
    a, b = (lora[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
    a[6:] = a[:6]
    b[:, 6:] = -b[:, :6]
    folder = write(tmp_path / "a", rank, lora, lora_alpha=5)
    manifest = tmp_path / "adapters.json"
    checkpoint = results.checkpoint("demo-lora")
    resolve_adapters({"a": str(folder)}, {"a": folder}, checkpoint, 16, None, manifest)
    actual = load_file(merge(checkpoint, manifest, "a", tmp_path / "out") / "model.safetensors")[f"{module}.weight"]
    base = load_file(DEMO / "model.safetensors")[f"{module}.weight"]
    changed = 0
    for row in range(3):
        for column in range(144):
            total = 0.0
            for left, right in zip(b[row].tolist(), a[:, column].tolist()):
                total += left * (5 / rank) * right
            assert actual[row, column] == np.float16(float(base[row, column]) + total)
            changed += total != 0
    assert changed > 100


def test_the_model_says_how_a_square_weight_lies(tmp_path: Path) -> None:
    """GPT-2's attn.c_proj is [in, out] and square: by its shape it was taken for [out, in], with exit code 0."""
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 16}
    meta = meta_model(config, "fp32")
    random = np.random.default_rng(0)
    shapes = {name: tuple(tensor.shape) for name, tensor in meta.state_dict().items() if name != "lm_head.weight"}
    base = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    folder = checkpoints.write(tmp_path / "base", base, config=config)
    checkpoint = resolve(str(folder), folder, tmp_path / "checkpoint.json")
    modules = {"transformer.h.0.attn.c_proj": (8, 8), "transformer.h.0.attn.c_attn": (24, 8)}
    lora = tensors(modules, 2, 0, size=1.0)
    adapter = write(tmp_path / "a", 2, lora, lora_alpha=4, fan_in_fan_out=True)
    manifest = resolve_adapters({"a": str(adapter)}, {"a": adapter}, checkpoint, 16, None, tmp_path / "adapters.json")
    found = load_file(
        merge(checkpoint, manifest, "a", tmp_path / "out", transposed_layers(config)) / "model.safetensors"
    )
    inputs = random.standard_normal((3, 8), np.float32)
    for module in modules:
        a, b = (lora[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
        expected = inputs @ base[f"{module}.weight"] + 2.0 * (inputs @ a.T) @ b.T  # as PEFT computes it
        # Sums of 8 and of 2 products of float32 in another order.
        np.testing.assert_allclose(inputs @ found[f"{module}.weight"], expected, rtol=1e-5, atol=1e-5)


def test_a_merged_checkpoint_has_the_bases_files_and_says_what_the_adapter_says(
    results: Results, tmp_path: Path
) -> None:
    out = merged(results, "captain", tmp_path / "out")
    names = {file.path for file in describe(out).files}
    assert names == {file.path for file in describe(DEMO).files}
    assert (out / "tokenizer.json").read_bytes() == (DEMO / "tokenizer.json").read_bytes()
    answer = compute(out, describe(out).config, "all", ["Light"], 16).prompts[0]
    assert answer.new_text == " the lamps, for we sail with the tide."
    with pytest.raises(InputError, match="expected a new folder to write to, found something there"):
        merged(results, "captain", out)
    with pytest.raises(InputError, match="merge: expected one of captain, shakespeare; found 'pirate'"):
        merged(results, "pirate", tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_sum_that_overflows_leaves_nothing_behind(results: Results, tmp_path: Path) -> None:
    folder = write(tmp_path / "wild", 4, tensors({"model.layers.0.self_attn.q_proj": (240, 144)}, 4, 0, size=1e7))
    manifest = tmp_path / "adapters.json"
    checkpoint = results.checkpoint("demo-lora")
    resolve_adapters({"wild": str(folder)}, {"wild": folder}, checkpoint, 16, None, manifest)
    with pytest.raises(InputError, match="q_proj.weight' .*: adapter 'wild': expected sums that fit F16, found"):
        merge(checkpoint, manifest, "wild", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapters.json", "wild"]


def test_weights_that_are_stored_transposed_and_in_bf16_are_merged(tmp_path: Path) -> None:
    """As GPT-2's: of a checkpoint that has one such weight, and whose names leave out the first part."""
    import ml_dtypes

    random = np.random.default_rng(0)
    base = tmp_path / "base"
    folder = tmp_path / "a"
    shutil.copytree(DEMO, base)
    arrays = load_file(DEMO / "model.safetensors")
    weight = random.standard_normal((144, 240)).astype(ml_dtypes.bfloat16)  # [in, out]
    save_file({**arrays, "h.0.attn.c_attn.weight": weight}, base / "model.safetensors")
    lora = tensors({"transformer.h.0.attn.c_attn": (240, 144)}, 4, 0)
    write(folder, 4, lora, fan_in_fan_out=True)
    checkpoint = resolve(str(base), base, tmp_path / "checkpoint.json")
    manifest = tmp_path / "adapters.json"
    resolve_adapters({"a": str(folder)}, {"a": folder}, checkpoint, 16, None, manifest)
    merged = merge(checkpoint, manifest, "a", tmp_path / "out", {"transformer.h.0.attn.c_attn"})
    found = load_file(merged / "model.safetensors")
    a, b = (lora[f"base_model.model.transformer.h.0.attn.c_attn.lora_{side}.weight"] for side in "AB")
    exact = weight.astype(np.float64) + 2.0 * (b.astype(np.float64) @ a.astype(np.float64)).T
    assert np.array_equal(found["h.0.attn.c_attn.weight"], exact.astype(ml_dtypes.bfloat16))


@pytest.mark.long
def test_the_command_writes_a_merged_checkpoint(results: Results, tmp_path: Path) -> None:
    arguments = ["merge", "demo-lora", "captain", "--out", str(tmp_path / "out"), "--results", str(results.root)]
    made = CliRunner().invoke(main, arguments)
    assert made.exit_code == 0 and made.output.strip() == str(tmp_path / "out"), made.output
    assert (tmp_path / "out" / "model.safetensors").is_file()
