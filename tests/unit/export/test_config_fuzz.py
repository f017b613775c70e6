"""Each key of the demo's config.json with every kind of wrong value: accepted, or rejected with a one-line message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo_model import DEMO
from safetensors.numpy import load_file, save_file
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lockstep.checkpoint import resolve, resolve_architecture
from lockstep.checkpoint.tensors import find_tensors
from lockstep.config import model_config
from lockstep.errors import InputError
from lockstep.export.checkpoint_layout import check_tensors
from lockstep.export.quiet import quiet
from lockstep.export.run import export
from lockstep.export.tracer import meta_model

CONFIG = json.loads((DEMO / "config.json").read_text())
# Keys that the demo lacks and other models have.
OTHERS = (
    "rope_scaling", "sliding_window", "layer_types", "num_local_experts", "attention_chunk_size", "text_config",
    "vision_config", "quantization_config", "is_decoder", "unknown",
)  # fmt: skip
DELETED = object()
VALUES = (
    DELETED, None, True, False, 0, -4, 1, 7, 10**9, 10**30, 0.0, -0.5, 0.5, 1.5, 1e300, float("nan"), float("inf"), "",
    "small", "1", "\ud800", [], [1, 2], [None] * 6, {}, {"a": 1}, {"__float__": "Infinity"},
    {"num_hidden_layers": 10**9}, {"rope_theta": "x"}, [[[]]],
)  # fmt: skip


def folder_of(path: Path, key: str, value: Any) -> Path:
    """The demo's checkpoint with one setting changed."""
    config = {name: setting for name, setting in {**CONFIG, key: value}.items() if setting is not DELETED}
    path.mkdir()
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (path / name).symlink_to(DEMO / name)
    (path / "config.json").write_text(json.dumps(config))
    return path


def resolved(folder: Path) -> Path | None:
    """Return the architecture's manifest, or None if the checkpoint is rejected with one line that says what to do."""
    try:
        resolve(str(folder), folder, folder.parent / "checkpoint.json")
        return resolve_architecture(str(folder), folder, folder.parent / "architecture.json")
    except InputError as error:
        assert str(error).startswith(str(folder)) and str(error).splitlines() == [str(error)] and "; " in str(error)
        assert len(str(error)) < 600
        return None


REFUSED = [
    ("num_attention_heads", 4,
        "tensor 'model.layers.0.self_attn.o_proj.weight': expected shape [144, 160], found [144, 240]"),
    ("num_attention_heads", 7,
        "ValueError: The hidden size (144) is not a multiple of the number of attention heads (7)."),
    ("num_key_value_heads", DELETED,
        "tensor 'model.layers.0.self_attn.k_proj.weight': expected shape [240, 144], found [80, 144]"),
    ("head_dim", None, "tensor 'model.layers.0.self_attn.k_proj.weight': expected shape [48, 144], found [80, 144]"),
    ("head_dim", 10**9, "expected sizes of a model, found ones that make inv_freq a table of 500000000 numbers"),
    ("intermediate_size", 10**9,
        "tensor 'model.layers.0.mlp.down_proj.weight': expected shape [144, 1000000000], found [144, 400]"),
    ("attention_bias", True, "expected tensor 'model.layers.0.self_attn.k_proj.bias' [80], found none of this name"),
    ("attention_bias", "no", "found a config.json that it refuses: Validation error for field 'attention_bias': "
        "TypeError: Field 'attention_bias' expected bool"),
    ("hidden_act", "unknown", "expected the config of a 'llama' model, found one that it refuses: KeyError: "),
    ("rope_parameters", {"rope_type": "x", "rope_theta": 1.0},
        "expected the config of a 'llama' model, found one that it refuses: "),
    ("dtype", "small", "found a config.json that it refuses: module 'torch' has no attribute 'small'; correct"),
    ("model_type", "unknown", "model_type: expected a type of transformers"),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("key", "value", "expected"), REFUSED, ids=[f"{key}={value}"[:40] for key, value, _ in REFUSED]
)
def test_what_only_the_model_knows_is_refused_by_the_export(tmp_path, key, value, expected):
    architecture = resolved(folder_of(tmp_path / "c", key, value))
    with pytest.raises(InputError) as caught:
        export(architecture, "fp32", tmp_path / "graphs" / "assembly.json")
    assert expected in " ".join(str(caught.value).split())
    assert not (tmp_path / "graphs").exists()


@pytest.mark.long
@pytest.mark.parametrize("key", [*CONFIG, *OTHERS])
def test_any_value_that_is_taken_is_exported_or_refused_in_one_line(tmp_path, key):
    for number, value in enumerate(VALUES):
        folder = tmp_path / str(number)
        folder.mkdir()
        if architecture := resolved(folder_of(folder / "c", key, value)):
            try:
                export(architecture, "fp32", folder / "graphs" / "assembly.json")
            except InputError as error:
                assert not (folder / "graphs").exists() and len(" ".join(str(error).split())) < 600


def with_tensors(path: Path, **changes: Any) -> Path:
    """The demo's checkpoint with tensors changed, or left out where None is given; underscores twice for points."""
    folder_of(path, "hidden_size", 144)
    values = {
        **load_file(DEMO / "model.safetensors"),
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    (path / "model.safetensors").unlink()
    save_file({name: value for name, value in values.items() if value is not None}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(("name", "value", "expected"), [
    ("model.layers.3.mlp.up_proj.weight", None, "{folder}: expected tensor "
"'model.layers.3.mlp.up_proj.weight' [400, 144], found none of this name"),
    ("model.norm.weight", np.ones((143,), np.float16), "{folder}/model.safetensors: tensor "
"'model.norm.weight': expected shape [144], found [143]"),
    ("model.layers.5.self_attn.q_proj.weight", np.ones((144, 240), np.float16), "{folder}/model.safetensors: tensor "
"'model.layers.5.self_attn.q_proj.weight': "
"expected shape [240, 144], found [144, 240]"),
    ("model.norm.weight", np.ones((), np.float16), "{folder}/model.safetensors: tensor 'model.norm.weight': "
"expected shape [144], found []"),
])  # fmt: skip
def test_weights_that_do_not_fit_are_refused_before_anything_is_traced(tmp_path, name, value, expected):
    folder = with_tensors(tmp_path / "c", **{name.replace(".", "__"): value})
    with pytest.raises(InputError) as caught:
        export(resolved(folder), "fp32", tmp_path / "graphs" / "assembly.json")
    assert str(caught.value).startswith(expected.format(folder=folder) + "; ")


def test_a_parameter_of_integers_is_refused(tmp_path):
    folder = with_tensors(tmp_path / "c", model__norm__weight=np.ones(144, np.int32))
    with pytest.raises(
        InputError,
        match=r"tensor 'model\.norm\.weight': expected one of F64, F32, F16, "
        r"BF16, found I32; use a checkpoint that is not quantized",
    ):
        check_tensors(meta_model(CONFIG, "fp32"), find_tensors(folder), folder)


def test_a_bare_decoder_may_leave_out_the_first_part_of_its_names(tmp_path):
    folder = folder_of(tmp_path / "c", "hidden_size", 144)
    values = {name.removeprefix("model."): value for name, value in load_file(DEMO / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    save_file(values, folder / "model.safetensors")
    check_tensors(meta_model(CONFIG, "fp32"), find_tensors(folder), folder)


@pytest.mark.long
def test_no_default_of_transformers_is_refused():
    """Requirements on all decoders must hold for each type of transformers: rather a late refusal than a false one."""
    refused = {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            with quiet():
                default = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
        except Exception:  # a class that refuses its own defaults
            continue
        if error := model_config.first_error(default):
            refused[model_type] = error
    assert not refused
