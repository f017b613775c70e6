"""Convert: the same bytes as the safetensors library writes of torch's casts, nothing copied that need not be, and what
is refused."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import NUMPY, error_of, hub_cache, safetensors_bytes, tensors, write
from safetensors.numpy import save_file

from lockstep.artifacts.dtypes import DTYPE_BITS
from lockstep.artifacts.files import sha256_file
from lockstep.checkpoint import resolve
from lockstep.weights import Weights, convert
from lockstep.weights.source import PIECE_BYTES

DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
BF16 = ml_dtypes.bfloat16
BIG = PIECE_BYTES + 2  # a bf16 tensor of this many numbers is read in three pieces, the last of 4 bytes


def resolved(folder: Path) -> Path:
    return resolve(str(folder), folder, folder.parent / "results" / "checkpoint.json")


def converted(folder: Path, precision: str) -> Path:
    out = folder.parent / "results" / precision / "weights.json"
    assert convert(resolved(folder), precision, out) == out
    return out


def refused(folder: Path, precision: str) -> str:
    out = folder.parent / "results" / precision / "weights.json"
    line = error_of(convert, resolved(folder), precision, out)
    assert not out.parent.exists() or not any(out.parent.iterdir()), "nothing is left on an error"
    return line


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("dtype", NUMPY)
def test_the_file_is_the_one_that_the_library_writes_of_the_casts(tmp_path, dtype, precision, shards):
    values = tensors(dtype)
    values.update({"flags": np.array([True, False, True]), "positions": np.arange(5)})
    out = converted(write(tmp_path / "checkpoint", values, shards), precision)
    expected = {
        name: value if name in ("flags", "positions") else value.astype(NUMPY[DTYPES[precision]])
        for name, value in values.items()
    }
    weights = Weights.open(out)
    assert weights.names() == sorted(expected)
    for name, value in expected.items():
        assert (weights[name].dtype, weights[name].shape, bits(weights[name])) == (
            value.dtype,
            value.shape,
            bits(value),
        )
    manifest = json.loads(out.read_text())
    file = out.with_name("weights.safetensors")
    assert (manifest["format"], manifest["precision"]) == ("lockstep.weights/1", precision)
    if DTYPES[precision] == dtype:
        assert not file.exists()
        return
    save_file(expected, tmp_path / "library.safetensors", {"format": "pt"})
    assert file.read_bytes() == (tmp_path / "library.safetensors").read_bytes()
    assert manifest["files"] == [
        {"path": "weights.safetensors", "size": file.stat().st_size, "sha256": sha256_file(file)}
    ]


def every_finite(dtype: str) -> np.ndarray:
    every = np.arange(2**16, dtype=np.uint16).view(NUMPY[dtype])
    return every[np.isfinite(every.astype(np.float32))]


def near_ties() -> np.ndarray:
    """fp32 numbers that lie on, just below and just above the middle between two neighbours of bf16 or of fp16."""
    numbers = np.random.default_rng(0)
    high = numbers.integers(0, 2**32, 200_000, np.uint32)
    parts = []
    for width, step in itertools.product((16, 13), (-1, 0, 1)):
        parts.append((high & ~np.uint32(2**width - 1)) + np.uint32(2 ** (width - 1) + step))
    every = np.concatenate([high, *parts]).view(np.float32)
    return every[np.isfinite(every)]


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("BF16", "fp32"), ("BF16", "fp16"), ("F16", "fp32"), ("F16", "bf16"), ("F32", "fp16"), ("F32", "bf16")],
)
def test_every_number_is_rounded_as_torch_rounds_it(tmp_path, dtype, precision):
    import torch
    from safetensors.torch import load_file

    numbers = near_ties() if dtype == "F32" else every_finite(dtype)
    limit = float(ml_dtypes.finfo(NUMPY[DTYPES[precision]]).max)
    numbers = numbers[np.abs(numbers.astype(np.float64)) <= limit]
    folder = write(tmp_path / "checkpoint", {"numbers": numbers})
    actual = load_file(converted(folder, precision).with_name("weights.safetensors"))["numbers"]
    expected = load_file(folder / "model.safetensors")["numbers"].to(
        {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    )
    assert actual.dtype == expected.dtype
    # -0.0 too
    assert bits(actual.contiguous().view(torch.uint8).numpy()) == bits(expected.contiguous().view(torch.uint8).numpy())


def test_a_tensor_of_several_pieces_is_whole(tmp_path):
    numbers = np.arange(BIG, dtype=np.uint32).astype(np.uint16) & 0x3FFF  # below 2.0 as bf16
    folder = write(tmp_path / "checkpoint", {"big": numbers.view(BF16), "small": np.ones(3, BF16)})
    weights = Weights.open(converted(folder, "fp32"))
    assert np.array_equal(weights["big"], numbers.view(BF16).astype(np.float32))
    assert np.array_equal(weights["small"], np.ones(3, np.float32))


def test_two_runs_write_the_same_bytes(tmp_path):
    folder = write(tmp_path / "checkpoint", shards=3)
    out = converted(folder, "fp32")
    first = [path.read_bytes() for path in sorted(out.parent.iterdir())]
    shutil.rmtree(out.parent)
    assert [path.read_bytes() for path in sorted(converted(folder, "fp32").parent.iterdir())] == first
    assert len(first) == 2


def test_the_same_type_points_into_the_checkpoint(tmp_path):
    folder = write(tmp_path / "checkpoint", shards=3)
    out = converted(folder, "bf16")
    assert [path.name for path in out.parent.iterdir()] == ["weights.json"]
    manifest = json.loads(out.read_text())
    checkpoint = json.loads((folder.parent / "results" / "checkpoint.json").read_text())
    recorded = {file["path"]: file for file in checkpoint["files"]}
    for file in manifest["files"]:
        path = Path(file["path"])
        assert path.parent == folder
        assert (file["size"], file["sha256"]) == (recorded[path.name]["size"], recorded[path.name]["sha256"])
    for name, entry in manifest["tensors"].items():
        assert {**entry, "file": Path(manifest["files"][entry["file"]]["path"]).name} == checkpoint["tensors"][name]


def test_a_relative_checkpoint_gives_a_manifest_that_moves_with_its_tree(tmp_path):
    folder = write(tmp_path / "a" / "resources" / "m")
    results = tmp_path / "a" / "results" / "m"
    for precision in ("bf16", "fp32"):
        convert(
            resolve("resources/m", folder, results / "checkpoint.json"), precision, results / precision / "weights.json"
        )
    assert (
        json.loads((results / "bf16" / "weights.json").read_text())["files"][0]["path"]
        == "../../../resources/m/model.safetensors"
    )
    shutil.move(tmp_path / "a", tmp_path / "b")
    for precision in ("bf16", "fp32"):
        weights = Weights.open(tmp_path / "b" / "results" / "m" / precision / "weights.json")
        assert np.array_equal(weights["norm.weight"].astype(np.float32), tensors()["norm.weight"].astype(np.float32))


def test_a_hub_cache_is_read_through_its_links(tmp_path):
    snapshot = hub_cache(tmp_path / "hub", write(tmp_path / "checkpoint"))
    for precision in ("bf16", "fp32"):
        weights = Weights.open(converted(snapshot, precision))
        assert np.array_equal(weights["embed.weight"].astype(np.float32), tensors()["embed.weight"].astype(np.float32))


def test_a_checkpoint_of_several_types_goes_into_one_file(tmp_path):
    values = {"a": np.ones(3, np.float16), "b": np.full(3, 0.1, np.float32), "c": np.ones(3, BF16)}
    out = converted(write(tmp_path / "checkpoint", values), "fp16")
    weights = Weights.open(out)
    assert {weights.info(name).dtype for name in weights} == {"F16"}
    assert len(json.loads(out.read_text())["files"]) == 1


def test_weights_of_an_earlier_checkpoint_do_not_stay(tmp_path):
    out = converted(write(tmp_path / "checkpoint", tensors("F32")), "bf16")
    # An engine that has mapped the file goes on with its numbers: the next file takes its name, and not its bytes.
    mapped = Weights.open(out)["embed.weight"]
    before = mapped.copy()
    values = {**tensors("F32"), "embed.weight": 2 * tensors("F32")["embed.weight"]}
    assert converted(write(tmp_path / "checkpoint", values), "bf16") == out
    assert np.array_equal(mapped, before) and np.array_equal(Weights.open(out)["embed.weight"], 2 * before)
    assert converted(write(tmp_path / "checkpoint", tensors("BF16")), "bf16") == out
    assert [path.name for path in out.parent.iterdir()] == ["weights.json"]
    assert Weights.open(out)["norm.weight"].shape == (8,)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_nan_and_infinity_are_counted_and_the_first_is_named(tmp_path, dtype, precision):
    values = tensors(dtype)
    values["layers.0.up.weight"].flat[[7, 20, 21]] = [np.nan, -np.inf, np.inf]
    folder = write(tmp_path / "checkpoint", values)
    assert refused(folder, precision) == (
        f"{folder}/model.safetensors: tensor 'layers.0.up.weight' ({dtype} [12, 8]): expected finite "
        f"numbers, found 1 NaN and 2 infinite, "
        "the first at flat index 7; download this file again, or use another checkpoint if it was trained to this"
    )


def test_a_constant_of_older_models_is_no_weight(tmp_path):
    constant = {"layers.0.attention.masked_bias": np.asarray(-np.inf, np.float16)}
    weights = Weights.open(converted(write(tmp_path / "checkpoint", {**tensors("F16"), **constant}), "fp32"))
    assert set(weights.names()) == set(tensors())


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_nan_in_the_last_piece_is_found(tmp_path, precision):
    numbers = np.ones(BIG, BF16)
    numbers[[-3, -1]] = np.nan
    line = refused(write(tmp_path / "checkpoint", {"big": numbers}), precision)
    assert f"found 2 NaN and 0 infinite, the first at flat index {BIG - 3};" in line


@pytest.mark.parametrize(
    ("dtype", "precision", "fits", "overflows", "remedy"),
    [
        ("F32", "fp16", 65519.996, 65520.0, "use bf16 or fp32"),
        ("BF16", "fp16", 65280.0, 65536.0, "use bf16 or fp32"),
        ("F32", "bf16", 3.3961e38, 3.3962e38, "use fp32"),
        ("F64", "fp32", 3.4028235e38, 3.4028236e38, "use a checkpoint stored in fp32 or smaller"),
    ],
)
def test_a_number_too_large_for_the_precision(tmp_path, dtype, precision, fits, overflows, remedy):
    values = tensors(dtype)
    values["norm.weight"][3] = fits
    assert np.isfinite(
        Weights.open(converted(write(tmp_path / "fits" / "checkpoint", values), precision))["norm.weight"]
    ).all()
    values["norm.weight"][3] = -overflows
    folder = write(tmp_path / "not" / "checkpoint", values)
    line = refused(folder, precision)
    assert line.startswith(
        f"{folder}/model.safetensors: tensor 'norm.weight' ({dtype} [8]): expected "
        f"numbers that fit {precision}, found a magnitude of "
    )
    # printed with six digits
    assert float(line.split("magnitude of ")[1].split(",")[0]) == pytest.approx(overflows, rel=1e-5)
    assert line.endswith(f"which overflows; {remedy} for this model")


def test_an_error_leaves_the_earlier_result(tmp_path):
    out = converted(write(tmp_path / "checkpoint"), "fp32")
    before = {path.name: path.read_bytes() for path in out.parent.iterdir()}
    values = tensors()
    values["norm.weight"][0] = np.nan
    error_of(converted, write(tmp_path / "checkpoint", values), "fp32")
    assert {path.name: path.read_bytes() for path in out.parent.iterdir()} == before


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F4", "C64"])
def test_types_that_are_not_supported_yet_are_named(tmp_path, dtype):
    folder = write(tmp_path / "checkpoint")
    length = 4 * DTYPE_BITS[dtype] // 8
    header = {"a": {"dtype": dtype, "shape": [4], "data_offsets": [0, length]}}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(header, bytes(length)))
    line = refused(folder, "fp16")
    assert f"tensor 'a' ({dtype} [4]): expected F64, F32, F16, BF16 or integers, found {dtype}, which" in line
    assert "which is not supported yet; use a checkpoint that is not quantized" in line


def test_an_unknown_precision(tmp_path):
    folder = write(tmp_path / "checkpoint")
    precisions = "fp32, fp16, bf16, w8a16, w4a16, w8a8, w4a8, w8a8-fp8"
    assert refused(folder, "int4") == f"expected a precision of {precisions}, found 'int4'; correct it in the config"


def test_a_checkpoint_that_changed_since_it_was_resolved(tmp_path):
    folder = write(tmp_path / "checkpoint", shards=3)
    checkpoint = resolved(folder)
    out = tmp_path / "weights.json"
    shard = folder / "model-00002-of-00003.safetensors"
    data = shard.read_bytes()

    def line() -> str:
        return error_of(convert, checkpoint, "fp32", out)

    shard.write_bytes(data + b"\0")
    assert line() == (
        f"{shard}: expected {len(data)} bytes, found {len(data) + 1}: the file has changed; "
        f"restore it or resolve the checkpoint again"
    )
    shard.unlink()
    assert line() == (
        f"{shard}: expected a file of {len(data)} bytes, found none; restore it or resolve the checkpoint again"
    )
    shard.write_bytes(data.replace(b"[0,8]", b"[8,0]"))
    assert line().startswith(f"{shard}: expected sha256 ") and line().endswith(
        ": the file has changed; restore it or resolve the checkpoint again"
    )
    shard.write_bytes(data)
    config = folder / "config.json"
    os.truncate(config, 3)
    assert line().startswith(f"{config}: expected ")
    assert not out.exists()
