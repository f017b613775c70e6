"""Adapters of PEFT that are rejected: they adapt no linear layer of the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import FAMILIES
from transformers import AutoModelForCausalLM, PreTrainedModel

from lockstep.checkpoint import resolve
from lockstep.errors import InputError
from lockstep.export.parity import reference_model
from lockstep.weights.check_adapters import resolve_adapters

peft = pytest.importorskip("peft")

RANK = 3


def _saved(family: str, folder: Path) -> PreTrainedModel:
    """Save a family's random checkpoint, and return it as transformers reads it."""
    reference_model(FAMILIES[family].config, 0, 1.0).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


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
    adapter = tmp_path / "adapter"
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, init_lora_weights=False, **settings)
    peft.get_peft_model(_saved(family, base), config).save_pretrained(adapter)
    checkpoint = resolve(str(base), base, tmp_path / "checkpoint.json")
    with pytest.raises(InputError, match=message):
        resolve_adapters({"a": str(adapter)}, {"a": adapter}, checkpoint, RANK, None, tmp_path / "adapters.json")
