"""Wrapped language models: graphs of the language model, from checkpoints as transformers saves the whole."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pipeline import make_engines, open_model, run_golden, run_validate
from safetensors.numpy import load_file, save_file
from tests import lifelike
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMultimodalLM

from lockstep.checkpoint import resolve
from lockstep.checkpoint.language import language_name, language_tensors
from lockstep.errors import InputError
from lockstep.export import language as wrappers
from lockstep.export.language import language_config
from lockstep.export.random_model import write_byte_tokenizer
from lockstep.export.torch_model import cut_config
from lockstep.runtime import Advance
from lockstep.targets import Limits, Results, Target
from lockstep.tolerances import Tolerances
from lockstep.verify.golden.reference import make_reference
from lockstep.verify.golden.terms import GoldenTerms

NAME = "tiny"
TEXT = {
    "vocab_size": 288, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
_SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 48}
_MROPE = {"rope_theta": 10000.0, "rope_type": "default"}
# A published layout each: a causal LM of transformers inside, with and without a tied head, or a bare decoder.
WRAPPERS = {
    "mistral3": {
        "model_type": "mistral3",
        "tie_word_embeddings": False,
        "text_config": {"model_type": "ministral3", **TEXT},
        "vision_config": {**_SIGLIP, "model_type": "pixtral", "head_dim": 16},
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_vl_text",
            **TEXT,
            "rope_scaling": {**_MROPE, "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
        },
        "vision_config": {**_TOWER, "deepstack_visual_indexes": [0]},
    },
    "qwen2_5_vl": {  # the language model's settings are the wrapper's own
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": False,
        **TEXT,
        "hidden_size": 64,
        "head_dim": None,
        "rope_scaling": {**_MROPE, "type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {**_TOWER, "out_hidden_size": 64},
    },
    "gemma3": {
        "model_type": "gemma3",
        "mm_tokens_per_image": 4,
        "text_config": {
            "model_type": "gemma3_text",
            **TEXT,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": _SIGLIP,
    },
    "llava": {
        "model_type": "llava",
        "tie_word_embeddings": False,
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {**_SIGLIP, "model_type": "clip_vision_model"},
    },
    "smolvlm": {
        "model_type": "smolvlm",
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {**_SIGLIP, "model_type": "smolvlm_vision"},
    },
    "paligemma": {"model_type": "paligemma", "text_config": {"model_type": "gemma", **TEXT}, "vision_config": _SIGLIP},
}


def write_wrapper(config: dict, folder: Path) -> torch.nn.Module:
    """Write a checkpoint of the whole wrapper, its language model with lifelike weights; return the wrapper."""
    wrapper_config = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    wrapper = AutoModelForMultimodalLM.from_config(
        wrapper_config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    language = AutoModelForCausalLM.from_config(
        cut_config(config, "all"), attn_implementation="eager", dtype=torch.float32
    ).eval()
    lifelike.draw(language, 0)
    with torch.no_grad():
        ours = dict(language.named_parameters(remove_duplicate=False))
        for name, tensor in wrapper.named_parameters(remove_duplicate=False):
            if language_name(name) in ours:
                tensor.copy_(ours[language_name(name)])
    wrapper.save_pretrained(folder)
    write_byte_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return wrapper


@pytest.mark.long
@pytest.mark.exports
@pytest.mark.parametrize("name", WRAPPERS)
def test_the_language_model_of_a_wrapper_goes_through_all_stages(name, tmp_path, capsys):
    folder = tmp_path / "checkpoint"
    results = Results(tmp_path / "results")
    wrapper = write_wrapper(WRAPPERS[name], folder)
    make_engines(folder, results, NAME, "fp32")
    (line,) = {line for line in capsys.readouterr().err.splitlines() if "the language model is used" in line}
    assert "visual" in line or "vision" in line
    model = open_model(results, NAME, "fp32", max_batch_size=1, max_seq_len=64)
    ids = np.random.default_rng(0).integers(3, 256, 20)
    with torch.no_grad():
        expected = wrapper(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
    actual = [model.step([Advance(0, ids[:17], 0)])[0], *(model.step([Advance(0, ids[[n]], n)])[0] for n in (17, 18))]
    # fp32 sums in another order give 1e-6 to 2e-5 of the logits' standard deviation, 5 here
    assert abs(np.stack(actual) - expected[16:19]).max() < 1e-4 * expected.std()
    target = Target(NAME, "fp32", "all", "onnxruntime")
    tolerances = Tolerances("fp32")
    run_validate(results, target, tolerances, 64, tmp_path)
    make_reference(results.checkpoint(NAME), "all", GoldenTerms(4, ("a b",), 24), results.reference(NAME, "all"))
    limits = Limits(max_batch_size=2, max_input_len=32, max_seq_len=64, max_num_tokens=64)
    assert run_golden(results, target, tolerances, limits, tmp_path)["result"] == "pass"


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.text_model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_tensors_have_the_names_of_the_language_model_alone(published, expected):
    assert language_name(published) == expected


def test_tensors_of_towers_are_told_from_those_of_the_language_model():
    tensors = {
        "language_model.model.norm.weight": 1,
        "lm_head.weight": 2,
        "vision_tower.layers.0.weight": 3,
        "multi_modal_projector.linear.weight": 4,
    }
    language, towers = language_tensors(tensors)
    assert language == {"model.norm.weight": 1, "lm_head.weight": 2}
    assert towers == ("multi_modal_projector.linear.weight", "vision_tower.layers.0.weight")
    assert language_tensors({"model.norm.weight": 1, "visual.blocks.0.weight": 2})[0] == {"model.norm.weight": 1}
    assert language_tensors({"bert.encoder.layer.0.weight": 1}) == ({"bert.encoder.layer.0.weight": 1}, ())


def test_either_part_of_a_config_may_tie_the_head():
    config = WRAPPERS["mistral3"]
    assert language_config(config)["tie_word_embeddings"] is False
    text = {**config["text_config"], "tie_word_embeddings": True}
    assert language_config({**config, "text_config": text})["tie_word_embeddings"] is True


def test_a_wrapper_with_code_of_its_own_is_taken_by_its_text_config():
    config = {"model_type": "somebodys_vl", "text_config": {"model_type": "kimi_k2", **TEXT}}
    assert language_config(config)["model_type"] == "deepseek_v3"


def test_a_causal_lm_that_is_made_of_the_whole_config_is_no_wrapper():
    assert language_config({"model_type": "emu3"})["model_type"] == "emu3"
    wrappers.check_wrapper({"model_type": "emu3"}, {}, None)  # nothing to compare with


@pytest.mark.exports
def test_a_wrapper_that_does_more_with_text_is_refused():
    config = WRAPPERS["llava"]
    language = AutoModelForCausalLM.from_config(cut_config(config, "all"), attn_implementation="eager").eval()
    wrappers.check_wrapper(config, language_config(config), language)
    other = {**language_config(config), "rms_norm_eps": 1e-2}
    with pytest.raises(InputError, match="on text alone its logits differ by .* from those of its language model"):
        wrappers.check_wrapper(config, other, language)


def test_a_head_of_its_own_that_the_config_ties_is_found_under_a_prefix(tmp_path):
    folder = tmp_path / "checkpoint"
    config = {**WRAPPERS["llava"], "tie_word_embeddings": True}
    write_wrapper(WRAPPERS["llava"], folder)
    tensors = load_file(folder / "model.safetensors")
    assert any(name.startswith("language_model.") for name in tensors), "as older checkpoints have them"
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="tie_word_embeddings in config.json ties it"):
        resolve(str(folder), folder, tmp_path / "checkpoint.json")


def test_what_a_class_refuses_where_python_has_no_docstrings_is_no_fault_of_the_config(monkeypatch) -> None:
    monkeypatch.setattr("sys.flags", SimpleNamespace(optimize=2))
    with pytest.raises(InputError, match="unset PYTHONOPTIMIZE"), wrappers.refused_in_one_line("llama"):
        raise ValueError("No `Args` section is found in the docstring of `BaseModelOutputWithPast`")
