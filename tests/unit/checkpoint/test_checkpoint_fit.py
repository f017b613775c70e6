"""Weights that do not fit their config.json, and files that are no weights: one line each, from headers and plain
settings, without torch."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from checkpoints import error_of, write

from lockstep.checkpoint import resolve, resolve_architecture
from lockstep.checkpoint.safetensors_header import MAX_TENSORS, read_header

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 8, "vocab_size": 16, "num_attention_heads": 2,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


def weights(layers: int = 3, **changes) -> dict[str, np.ndarray]:
    shapes = {"model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,), "lm_head.weight": (16, 8)}
    for layer in range(layers):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in (("input_layernorm", (8,)), ("mlp.up_proj", (12, 8)), ("mlp.experts.7.up_proj", (4, 8)))
        }
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()} | {
        name.replace("__", "."): value for name, value in changes.items()
    }


@pytest.fixture
def line(tmp_path):
    """The one line of what `resolve` says of weights and a config, without the folder's name."""

    def line_of(values=None, config=CONFIG, **options) -> str:
        folder = write(
            tmp_path / "checkpoint", weights() if values is None else values, config={**CONFIG, **config}, **options
        )
        line = error_of(resolve, str(folder), folder, tmp_path / "checkpoint.json")
        assert not (tmp_path / "checkpoint.json").exists()
        return line.removeprefix(str(folder)).removeprefix("/")

    return line_of


@pytest.mark.parametrize("config", [
    {}, {"rms_norm_eps": 0}, {"head_dim": None}, {"intermediate_size": [12, 12, 12]},
    {"time_step_limit": [0.0, {"__float__": "Infinity"}]}, {"time_step_limit": [0.0, float("inf")]},
    {"vocab_size": None, "hidden_size": None, "rms_norm_eps": None}, {"quantization_config": None}, {"rope_scaling": None},  # noqa: E501
    {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 10000, "factor": None}}},  # noqa: E501
    {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}, {"num_hidden_layers": 2, "num_nextn_predict_layers": 1024},
])  # fmt: skip
def test_what_fits_is_taken(tmp_path, config):
    folder = write(tmp_path / "checkpoint", weights(), config={**CONFIG, **config})
    resolve(str(folder), folder, tmp_path / "checkpoint.json")


@pytest.mark.parametrize("values", [
    {"transformer.h.0.weight": (2, 2), "transformer.h.1.weight": (2, 2), "transformer.h.2.weight": (2, 2)},
    {"h.0.weight": (2, 2), "h.1.weight": (2, 2), "h.2.weight": (2, 2)},
    {"vision_tower.layers.0.weight": (2, 2), "vision_tower.layers.1.weight": (2, 2), "layers.0.w": (2,), "layers.1.w": (2,), "layers.2.w": (2,)},  # noqa: E501
    # two lists of modules: which are the layers, only the model type knows
    {"a.0.weight": (2, 2), "b.0.weight": (2, 2)},
    {"norm.weight": (8,)},
])  # fmt: skip
def test_layers_are_counted_under_any_name_or_not_at_all(tmp_path, values):
    folder = write(
        tmp_path / "checkpoint", {name: np.ones(shape, np.float32) for name, shape in values.items()}, config=CONFIG
    )
    resolve(str(folder), folder, tmp_path / "checkpoint.json")


def test_fewer_layers_than_the_weights_hold(line):
    assert line(weights(5)) == (
        ": expected 3 layers (num_hidden_layers in config.json), found tensors of 5, up to layer 4 (model.layers); "
        "correct num_hidden_layers; to cut a model, use `layers` of its entry in the config"
    )


@pytest.mark.parametrize("depth", [4, 1024])
def test_more_layers_than_the_weights_hold(line, depth):
    assert line(config={"num_hidden_layers": depth}).startswith(
        f": expected {depth} layers "
        f"(num_hidden_layers in config.json), found tensors of 3 of them, without layer 3 (model.layers); "
    )


def test_a_layer_in_the_middle_is_absent(line):
    values = {name: value for name, value in weights().items() if ".1." not in name}
    assert "found tensors of 2 of them, without layer 1 (model.layers)" in line(values)


@pytest.mark.parametrize(("name", "shape", "expected"), [
    ("model.embed_tokens.weight", (15, 8), "expected 16 rows (vocab_size in config.json), found 15"),
    ("lm_head.weight", (17, 8), "expected 16 rows (vocab_size in config.json), found 17"),
    ("model.embed_tokens.weight", (16, 4), "expected rows of 8 numbers (hidden_size in config.json), found 4"),
    ("model.norm.weight", (0,), "expected numbers, found none in shape [0]; download this file again"),
])  # fmt: skip
def test_a_tensor_of_another_shape(line, name, shape, expected):
    assert line(weights() | {name: np.ones(shape, np.float32)}).startswith(
        f"model.safetensors: tensor {name!r}: {expected}"
    )


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, bool])
@pytest.mark.parametrize(
    ("name", "shape"), [("model.layers.1.mlp.up_proj.weight", (12, 8)), ("model.norm.weight", (8,))]
)
def test_integers_are_no_weights(line, name, shape, dtype):
    assert (f"tensor {name!r}: expected one of F64, F32, F16, BF16, found ") in line(
        weights() | {name: np.ones(shape, dtype)}
    )


def test_integers_that_are_no_weights_are_taken(tmp_path):
    values = weights() | {"h.0.attn.bias": np.ones((1, 1, 4, 4), bool), "position_ids": np.arange(4)[None]}
    folder = write(tmp_path / "checkpoint", values, config=CONFIG)
    resolve(str(folder), folder, tmp_path / "checkpoint.json")


@pytest.mark.parametrize(("key", "value", "expected"), [
    ("num_attention_heads", 0, "expected a positive integer as num_attention_heads, found 0"),
    ("hidden_size", 8.0, "expected a positive integer as hidden_size, found 8.0"),
    ("hidden_size", 2**31, "expected a positive integer as hidden_size, found 2147483648"),
    ("intermediate_size", [12, "12"], "expected a positive integer as intermediate_size, found [12, '12']"),
    ("vocab_size", True, "expected a positive integer as vocab_size, found True"),
    ("num_hidden_layers", 10**9, "expected an integer from 1 to 1024 as num_hidden_layers, found 1000000000"),
    ("max_position_embeddings", 10**12, "expected an integer from 1 to 134217728 as max_position_embeddings, "
"found 1000000000000"),
    ("rms_norm_eps", "small", "expected a number of at least 0 as rms_norm_eps, found 'small'"),
    ("rms_norm_eps", {"__float__": "Infinity"}, "expected a number of at least 0 as rms_norm_eps, found "
"{'__float__': 'Infinity'}"),
    ("attention_multiplier", {"__float__": "NaN"}, "expected a finite value as attention_multiplier, found "
"{'__float__': 'NaN'}"),
    ("rope_scaling", {"factors": [1, {"__float__": "Infinity"}]}, "expected a finite value as "
"rope_scaling.factors[1], found {'__float__': 'Infinity'}"),
    ("rope_theta", 0, "expected a number above 0 as rope_theta, found 0"),
    ("rope_scaling", "linear", "expected an object as rope_scaling, found 'linear'"),
    ("rope_parameters", {"full_attention": {"rope_theta": "x"}}, "expected a number above 0 as "
"rope_parameters.full_attention.rope_theta, found 'x'"),
    ("eos_token_id", -4, "expected eos_token_id to be a token id or a list of them, found -4"),
    ("num_local_experts", 10**6, "expected an integer of at most 65536 as num_local_experts, found 1000000"),
    ("vision_config", {"num_hidden_layers": 10**9}, "expected an integer of at most 1024 as "
"vision_config.num_hidden_layers, found 1000000000"),
    ("vision_config", {"parts": [{"depth": 10**9}]}, "expected an integer of at most 1024 as "
"vision_config.parts[0].depth, found 1000000000"),
    ("text_config", [], "expected an object as text_config, found []"),
    ("quantization_config", {"quant_method": "hqq"}, "expected gptq, awq, auto-round, compressed-tensors, fp8, "
"fbgemm_fp8, modelopt, bitsandbytes, mxfp4, or no quantization_config where the weights are in floating point as "
"quantization_config.quant_method, found 'hqq'"),
    ("text_config", {"quantization_config": {"quant_method": "gptq"}}, "expected nothing, for quantization_config is "
"at the top as text_config.quantization_config, found {'quant_method': 'gptq'}"),
])  # fmt: skip
def test_a_value_that_no_model_can_have(line, tmp_path, key, value, expected):
    assert line(config={key: value}).startswith(f"config.json: {expected}")
    folder = tmp_path / "checkpoint"
    assert error_of(resolve_architecture, str(folder), folder, tmp_path / "a.json").startswith(
        f"{folder}/config.json: {expected}"
    )


@pytest.mark.parametrize("depth", [300, 900, 5000])
def test_a_config_that_is_nested_deeply_is_taken_or_refused(tmp_path, depth):
    folder = write(tmp_path / "checkpoint", weights())
    (folder / "config.json").write_text(json.dumps(CONFIG)[:-1] + ', "x": ' + "[" * depth + "]" * depth + "}")
    try:
        resolve(str(folder), folder, tmp_path / "checkpoint.json")
    except Exception as error:
        assert str(error).startswith(f"{folder}/config.json: expected JSON, found ")


@pytest.mark.parametrize(("name", "data", "expected"), [
    ("generation_config.json", b"[1]", "expected a JSON object, found [1]"),
    ("generation_config.json", b'{"eos_token_id": "2"}', "expected eos_token_id to be a token id or a list "
"of them, found '2'; correct it"),
    ("generation_config.json", b'{"eos_token_id": [1, -2]}', "expected eos_token_id to be a token id or a "
"list of them, found [1, -2]; correct it"),
    ("generation_config.json", b'{"eos_token_id": true}', "expected eos_token_id to be a token id or a list "
"of them, found True; correct it"),
    ("tokenizer_config.json", b"3", "expected a JSON object, found 3"),
    ("special_tokens_map.json", b'{"a": "\xe9"}', "expected text in UTF-8, found 'utf-8' codec can't decode"),
    ("added_tokens.json", b"[", "expected JSON, found "),
    ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\n", "expected JSON, found a Git LFS pointer; run "),
    ("tokenizer.json", '{"model": {"type": "Zürich"}}'.encode("latin-1"), "expected text in UTF-8, found "),
    ("tokenizer.json", '{"model": {}}'.encode("utf-16"), "expected text in UTF-8, found "),
    ("merges.txt", b"\xff\xfe", "expected text in UTF-8, found "),
    ("chat_template.jinja", b"\x80", "expected text in UTF-8, found "),
])  # fmt: skip
def test_a_file_beside_the_weights_that_is_damaged(tmp_path, name, data, expected):
    folder = write(tmp_path / "checkpoint", weights(), config=CONFIG)
    (folder / name).write_bytes(data)
    for stage in (resolve, resolve_architecture):
        assert error_of(stage, str(folder), folder, tmp_path / "out.json").startswith(f"{folder / name}: {expected}")


def test_a_file_too_large_to_be_one_is_not_read(tmp_path):
    folder = write(tmp_path / "checkpoint", weights(), config=CONFIG)
    with open(folder / "generation_config.json", "wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    assert ("expected a file of at most 100000000 bytes, found 1099511627776") in error_of(
        resolve, str(folder), folder, tmp_path / "out.json"
    )


def test_a_million_tensors_are_refused_before_anything_is_made_of_them(tmp_path):
    path = tmp_path / "model.safetensors"
    header = (
        b"{"
        + b",".join(
            b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % number for number in range(MAX_TENSORS + 1)
        )
        + b"}"
    )
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    assert error_of(read_header, path).startswith(
        f"{path}: expected at most {MAX_TENSORS} tensors, found {MAX_TENSORS + 1}; "
    )
