"""Merged checkpoints of every family, against what PEFT itself merges into the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import FAMILIES, some_families
from transformers import AutoModelForCausalLM, PreTrainedModel

from lockstep.checkpoint import resolve
from lockstep.errors import InputError
from lockstep.export.lora import linear_layers, transposed_layers
from lockstep.export.parity import reference_model
from lockstep.weights.check_adapters import resolve_adapters
from lockstep.weights.merge import merge

peft = pytest.importorskip("peft")

RANK = 3
# Linear layers that PEFT does not adapt: of Mamba, and of the names of experts, which it then adapts too.
_MLP = ("gate_proj", "up_proj", "down_proj")
LEFT_OUT = dict.fromkeys(("bamba", "falcon_h1", "nemotron_h"), ("out_proj",))
LEFT_OUT |= dict.fromkeys(("qwen3_moe", "deepseek_v3", "dots1"), _MLP)


def _saved(family: str, folder: Path) -> PreTrainedModel:
    """Save a family's random checkpoint, and return it as transformers reads it."""
    reference_model(FAMILIES[family].config, 0, 1.0).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _adapted(model: PreTrainedModel, folder: Path, **settings: object) -> peft.PeftModel:
    """Save a random adapter by PEFT, and return the model with it."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, init_lora_weights=False, **settings)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(folder)
    return adapted


def _merged(checkpoint_folder: Path, adapter: Path, config: dict) -> Path:
    place = checkpoint_folder.parent
    checkpoint = resolve(str(checkpoint_folder), checkpoint_folder, place / "checkpoint.json")
    manifest = place / "adapters.json"
    resolve_adapters({"a": str(adapter)}, {"a": adapter}, checkpoint, RANK, None, manifest)
    return merge(checkpoint, manifest, "a", place / "merged", transposed_layers(config))


@pytest.mark.parametrize("family", some_families("gpt2", "gemma2", "mixtral", "nemotron_h", states=True))
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")  # of GPT-2: PEFT corrects it
def test_a_merge_is_that_of_peft(family: str, tmp_path: Path) -> None:
    """Of all linear layers that PEFT reaches: GPT-2's square and transposed ones, those next to experts and states."""
    base = tmp_path / "base"
    model = _saved(family, base)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    targets = [
        name
        for name in linear_layers(model)
        if (".layers." in name or ".h." in name) and not name.endswith(LEFT_OUT.get(family, ()))
    ]
    adapter = tmp_path / "adapter"
    adapted = _adapted(model, adapter, target_modules=targets)
    if family == "nemotron_h":  # whose checkpoints have other names than its modules
        with pytest.raises(InputError, match="expected modules of the base"):
            _merged(base, adapter, FAMILIES[family].config)
        return
    expected = adapted.merge_and_unload().state_dict()
    merged = _merged(base, adapter, FAMILIES[family].config)
    actual = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).state_dict()
    assert actual.keys() == expected.keys() == before.keys()
    for name, tensor in actual.items():
        # Sums of 3 products and a weight in fp32: PEFT adds them in another order.
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6, msg=name)
        assert torch.equal(tensor, before[name]) == (name.removesuffix(".weight") not in targets), name


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("mixtral", {"target_parameters": ["mlp.experts.gate_up_proj"]}, r"target_parameters \(.* \(experts\) were"),
        ("gemma2", {"target_modules": ["embed_tokens"]}, "expected lora_A and lora_B of linear layers"),
        ("gemma2", {"target_modules": ["lm_head"]}, "found 'base_model.model.lm_head.base_layer.weight'"),
    ],
    ids=["experts", "embedding", "tied head"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of tied weights
def test_what_is_no_linear_layer_of_the_checkpoint_is_refused(
    family: str, settings: dict, message: str, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    _adapted(_saved(family, base), tmp_path / "adapter", **settings)
    with pytest.raises(InputError, match=message):
        _merged(base, tmp_path / "adapter", FAMILIES[family].config)
