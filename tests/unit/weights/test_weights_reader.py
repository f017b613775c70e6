"""Weights at run time: views of the mapped files, tensors that are not there, and slots that do not fit."""

from __future__ import annotations

import json
import os

import ml_dtypes
import numpy as np
import pytest
from checkpoints import error_of, hub_cache, safetensors_bytes, tensors, write

from lockstep.artifacts.files import write_json
from lockstep.artifacts.signature import IO
from lockstep.checkpoint import resolve
from lockstep.weights import Weights, check_slots, convert, slot_array


@pytest.fixture
def manifest(tmp_path):
    """bf16 weights in three shards, in place."""
    folder = write(tmp_path / "checkpoint", shards=3)
    return convert(
        resolve(str(folder), folder, tmp_path / "checkpoint.json"), "bf16", tmp_path / "bf16" / "weights.json"
    )


@pytest.fixture
def weights(manifest):
    return Weights.open(manifest)


def test_tensors_by_name(weights):
    assert weights.precision == "bf16"
    assert weights.names() == list(weights) == sorted(tensors())
    assert len(weights) == len(tensors())
    assert "scale" in weights
    assert "scales" not in weights
    for name, value in tensors().items():
        assert weights[name].dtype == ml_dtypes.bfloat16
        assert weights[name].shape == weights.info(name).shape == value.shape
        assert weights[name].tobytes() == value.tobytes()
        path, offset, length = weights.location(name)
        assert path.read_bytes()[offset : offset + length] == value.tobytes()


def test_an_array_is_a_read_only_view_of_the_one_map(weights):
    first = weights["embed.weight"]
    second = weights["embed.weight"]
    assert np.shares_memory(first, second)
    assert not first.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        first[0, 0] = 1


def test_an_array_outlives_its_weights(manifest):
    array = Weights.open(manifest)["embed.weight"]
    assert np.array_equal(array, tensors()["embed.weight"])


def test_a_tensor_that_its_file_does_not_align_is_copied(tmp_path):
    folder = write(tmp_path / "checkpoint")
    numbers = np.arange(6, dtype=np.float32)
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    header += b" " * ((1 - len(header)) % 4)  # the library pads to 8; older writers did not pad
    (folder / "model.safetensors").write_bytes(safetensors_bytes(header, numbers.tobytes()))
    array = Weights.open(convert(resolve(str(folder), folder, tmp_path / "c.json"), "fp32", tmp_path / "weights.json"))[
        "a"
    ]
    assert array.flags.aligned
    assert not array.flags.writeable
    assert np.array_equal(array, numbers.reshape(2, 3))


def test_the_location_in_a_hub_cache_is_the_real_file(tmp_path):
    snapshot = hub_cache(tmp_path / "hub", write(tmp_path / "checkpoint"))
    out = convert(resolve(str(snapshot), snapshot, tmp_path / "c.json"), "bf16", tmp_path / "weights.json")
    path, _, _ = Weights.open(out).location("scale")
    assert path.parent.name == "blobs"
    assert not path.is_symlink()


def test_a_tensor_that_is_not_there_names_the_nearest(weights, manifest):
    line = error_of(weights.__getitem__, "layers.2.up.weight")
    assert line.startswith(
        f"{manifest}: expected tensor 'layers.2.up.weight', found none of this name (the nearest are "
    )
    assert "layers.0.up.weight" in line
    assert "layers.1.up.weight" in line
    assert "(6 others)" in error_of(weights.location, "Q")


def test_a_file_that_changed_or_went_is_named(manifest, tmp_path):
    shard = tmp_path / "checkpoint" / "model-00001-of-00003.safetensors"
    size = shard.stat().st_size
    os.truncate(shard, size - 1)
    assert error_of(Weights.open, manifest) == (
        f"{shard}: expected {size} bytes, found {size - 1}: the file has changed; restore it or convert the "
        f"checkpoint again"
    )
    shard.unlink()
    assert error_of(Weights.open, manifest) == (
        f"{shard}: expected a file of {size} bytes, found none; restore it or convert the checkpoint again"
    )


def test_a_manifest_that_is_none(manifest):
    assert "expected a file, found none" in error_of(Weights.open, manifest.with_name("absent.json"))
    manifest.write_text("{")
    assert "expected JSON" in error_of(Weights.open, manifest)
    manifest.write_text("{}")
    assert "expected format 'lockstep.weights/1'" in error_of(Weights.open, manifest)


@pytest.mark.parametrize(("key", "value"), [
    ("length", 2), ("length", 10**6), ("offset", 10**6), ("offset", -8), ("file", 3), ("file", -1), ("shape", [16, 9]),
    ("dtype", "F8_E4M3"), ("dtype", "X"),
])  # fmt: skip
def test_a_manifest_whose_numbers_do_not_fit_its_files(manifest, key, value):
    content = json.loads(manifest.read_text())
    content["tensors"]["embed.weight"][key] = value
    write_json(manifest, content)
    line = error_of(Weights.open, manifest)
    assert line.startswith(
        (
            f"{manifest}: expected tensor 'embed.weight' within its file, found ",
            f"{manifest}: tensors.embed.weight.{key}: expected ",
        )
    )


def spec(shape: list, dtype: str = "bfloat16", name: str = "up") -> IO:
    return IO(name, dtype, tuple(shape))


def test_slots_that_fit(weights):
    check_slots(weights, {}, [])
    check_slots(
        weights, {"up": ["layers.0.up.weight"], "norm": ["norm.weight"]}, [spec([12, 8]), spec([8], name="norm")]
    )
    check_slots(weights, {"up": ["layers.0.up.weight", "layers.1.up.weight", "embed.weight"]}, [spec([40, 8])])
    check_slots(weights, {"up": ["layers.0.up.weight"]}, [spec(["rows", 8])])
    check_slots(weights, {"experts": ["layers.0.up.weight", "layers.1.up.weight"]}, [spec([2, 12, 8], name="experts")])


def test_a_slot_of_several_tensors_holds_them_one_after_another(weights):
    names = ["layers.0.up.weight", "layers.1.up.weight"]
    values = tensors()
    assert np.shares_memory(slot_array(weights, names[:1], (12, 8)), weights[names[0]])
    assert np.array_equal(slot_array(weights, names, (24, 8)), np.concatenate([values[name] for name in names]))
    assert np.array_equal(slot_array(weights, names, (2, 12, 8)), np.stack([values[name] for name in names]))


@pytest.mark.parametrize(("names", "slot", "expected"), [
    (["layers.0.up.weight"], spec([8, 12]),
        "tensor 'layers.0.up.weight' of layer 3: expected shape [8, 12], found shape [12, 8]; "),
    (["norm.weight"], spec([8, 1]), "tensor 'norm.weight' of layer 3: expected shape [8, 1], found shape [8]; "),
    (["norm.weight"], spec([8], "float16"),
        "tensor 'norm.weight' of layer 3: expected float16, found bfloat16 [8]; convert the checkpoint"),
    (["embed.weight", "layers.0.up.weight"],
        spec([28, 4]),
        "tensor 'embed.weight' of layer 3: expected shape ['any', 4], found shape [16, 8]; "),
    (["embed.weight", "scale"], spec([24, 8]), "tensor 'scale' of layer 3: expected shape ['any'], found shape []; "),
    (["embed.weight", "layers.0.up.weight"],
        spec([24, 8]),
        "tensor 'embed.weight' + 'layers.0.up.weight' of layer 3: expected 192 numbers in all, found 224; "),
    (["norm.weight"] * 1000, spec([8]),
        "tensor 'norm.weight' + 'norm.weight' + 'norm.weight' + ... (1000 in all) of layer 3: "
        "expected 8 numbers in all, found 8000; "),
])  # fmt: skip
def test_a_slot_that_does_not_fit_is_named_with_its_file(weights, names, slot, expected):
    line = error_of(check_slots, weights, {"up": names}, [slot], "layer 3")
    assert line.partition(": ")[2].startswith(expected)
    assert line.partition(": ")[0].endswith(".safetensors")


def test_a_slot_without_its_tensor(weights):
    assert ("expected tensor 'lm_head.weight', found none") in error_of(
        check_slots, weights, {"up": ["lm_head.weight"]}, [spec([8])]
    )
    assert ("expected tensors for the slots up, found down") in error_of(
        check_slots, weights, {"down": ["scale"]}, [spec([8])]
    )
    assert error_of(check_slots, weights, {"up": []}, [spec([8])], "exit") == (
        "exit: expected a tensor for slot 'up', found none; export the model again"
    )
