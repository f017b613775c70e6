"""Names on disk: parameters that checkpoints hold in parts, and checkpoints of a bare decoder."""

import numpy as np
import pytest
import torch
from families import FAMILIES
from pipeline import make_engines, open_model
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep.export.checkpoint_layout import checkpoint_layout, checkpoint_shapes
from lockstep.export.random_model import byte_tokenizer
from lockstep.export.tracer import meta_model
from lockstep.runtime import Advance
from lockstep.targets import Results

pytestmark = pytest.mark.exports

SIZES = {
    "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48,
}  # fmt: skip
MIXTRAL = {"model_type": "mixtral", **SIZES, "num_local_experts": 3, "num_experts_per_tok": 2}
QWEN = {
    "model_type": "qwen3_moe", **SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "mlp_only_layers": [0],
}  # fmt: skip
GPT2 = dict(FAMILIES["gpt2"].config)  # which other tests trace too


def saved(config: dict, folder) -> torch.nn.Module:
    """A random model of `config`, saved by transformers itself."""
    torch.manual_seed(0)
    values = {k: v for k, v in config.items() if k != "model_type"}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config["model_type"], initializer_range=0.2, **values), attn_implementation="eager"
    ).eval()
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return model


IDS = [3, 200, 17, 9, 101, 54]


def test_names_and_shapes_are_those_that_transformers_saves(tmp_path):
    from safetensors import safe_open

    for config in (MIXTRAL, QWEN, GPT2):
        saved(config, tmp_path / config["model_type"])
        with safe_open(tmp_path / config["model_type"] / "model.safetensors", "np") as file:
            on_disk = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        assert checkpoint_shapes(meta_model(config, "fp32")) == on_disk


def test_parts_are_in_the_order_of_the_parameters_bytes():
    layout = checkpoint_layout(meta_model(MIXTRAL, "fp32"))
    experts = "model.layers.0.block_sparse_moe.experts"
    assert layout["model.layers.0.mlp.experts.gate_up_proj"] == [
        f"{experts}.{e}.{w}.weight" for e in range(3) for w in ("w1", "w3")
    ]
    assert layout["model.norm.weight"] == ["model.norm.weight"]


def test_checkpoint_of_a_bare_decoder_runs_as_in_transformers(tmp_path):
    model = saved(GPT2, tmp_path / "model")  # as the published gpt2: names without "transformer."
    save_file(
        {n.removeprefix("transformer."): t.clone() for n, t in model.state_dict().items() if n != "lm_head.weight"},
        tmp_path / "model" / "model.safetensors",
    )
    results = Results(tmp_path / "results")
    make_engines(tmp_path / "model", results, "m", "fp32")
    (logits,) = open_model(results, "m", "fp32", max_seq_len=32).step([Advance(0, IDS, 0)])
    with torch.no_grad():
        expected = model(torch.tensor([IDS]), use_cache=False).logits[0, -1].numpy()
    assert np.abs(logits - expected).max() < 1e-4  # fp32, logits near 1: the order of sums
