"""The models that faults are planted in: their checkpoints, graphs, weights and references, made once, with torch."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lockstep
from lockstep import Results
from lockstep.artifacts.files import write_json
from lockstep.targets import is_quantized

_REPOSITORY = Path(__file__).resolve().parents[2]
LIMITS = {"max_batch_size": 4, "max_input_len": 128, "max_seq_len": 256, "max_num_tokens": 512}  # the config's defaults
MAX_NEW_TOKENS = 16
GROUP_SIZE = 16  # divides the rows of all models
# Those of config/config.yaml: of 8, 1, 24 and 45 tokens in the demo.
PROMPTS = (
    "San Francisco is a",
    "Light",
    "Lake Zürich is long and narrow, and on clear days the snow",
    "A bridge must carry its own weight before it can carry anything else. An arch turns that weight into a "
    "push against the ground, while a "
    "cable turns it into a pull, and so stone",
)
# Of the model with adapters. More than it has: each slot is to be used all the same.
MAX_ADAPTERS = 5
MAX_LORA_RANK = 8
_SIZES = {
    "dtype": "float32", "vocab_size": 288, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip
_GEMMA = {
    **_SIZES, "model_type": "gemma2", "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
    "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class FaultModel:
    """A model at one depth: the demo's folder, or a config.json with random weights. adapters: names of the demo's."""

    about: str
    layers: int | str
    config: Mapping[str, Any] | None = None
    prompts: tuple[str, ...] = PROMPTS
    limits: Mapping[str, int] = field(default_factory=lambda: LIMITS)
    tensor_parallel: int = 1
    adapters: tuple[str, ...] = ()


# A random model's tokens are bytes: its prompts are as long in tokens as in characters, and must fit max_input_len.
_SHORT = (*PROMPTS[:3], PROMPTS[3][:100])
CHECKPOINT = "checkpoint"
MODELS = {
    CHECKPOINT: FaultModel("a trained checkpoint (`--checkpoint`), cut after 2 layers", 2),
    "demo": FaultModel("the demo, cut after 2 layers", 2),
    "gemma2": FaultModel(
        "random Gemma 2: soft caps, a window of 16 in one of 2 layers, tied lm_head", "all", _GEMMA, _SHORT
    ),
    "window": FaultModel(
        "random Mistral: a window of 300 in both layers, requests of up to 384 tokens", "all",
        {**_SIZES, "model_type": "mistral", "sliding_window": 300}, _SHORT, {**LIMITS, "max_seq_len": 384},
    ),
    "bias": FaultModel(
        "random Qwen 2: biases, as many KV heads as query heads", "all",
        {**_SIZES, "model_type": "qwen2", "num_key_value_heads": 4}, _SHORT,
    ),
    "experts": FaultModel(
        "random Qwen 3 MoE: three of eight experts for each token", "all",
        {**_SIZES, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
         "norm_topk_prob": True}, _SHORT,
    ),
    "ranks": FaultModel(
        "random Llama with biases, split over two ranks", "all",
        {**_SIZES, "model_type": "llama", "attention_bias": True, "mlp_bias": True}, _SHORT, tensor_parallel=2,
    ),
    "adapters": FaultModel(
        f"the demo with two adapters in {MAX_ADAPTERS} slots", "all", adapters=("captain", "shakespeare")
    ),
}  # fmt: skip


def _source_of(name: str, work: Path, checkpoint: Path | None) -> Path:
    """Return the checkpoint's folder, made where its weights are random."""
    if name == CHECKPOINT:
        return checkpoint
    config = MODELS[name].config
    if config is None:
        return _REPOSITORY / "resources" / "demo-llama"
    folder = work / "sources" / name
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
    write_json(folder / "shape.json", dict(config))
    return lockstep.make_random_checkpoint(folder / "shape.json", 0, folder)


def _terms(model: FaultModel) -> lockstep.GoldenTerms:
    """Return the terms of the config's defaults."""
    return lockstep.GoldenTerms(MAX_NEW_TOKENS, model.prompts, model.limits["max_seq_len"] - MAX_NEW_TOKENS)


def _adapted_terms(model: FaultModel) -> lockstep.GoldenTerms:
    """Return the terms of the reference with each adapter, and with none."""
    return lockstep.GoldenTerms(MAX_NEW_TOKENS, adapted=dict.fromkeys(("", *model.adapters), model.prompts[:2]))


def start(name: str, work: Path, checkpoint: Path | None = None) -> None:
    """Make a model's checkpoint, its manifest and its references, under `work`/right. checkpoint: the trained one."""
    results = right(work)
    model = MODELS[name]
    source = _source_of(name, work, checkpoint)
    lockstep.resolve_checkpoint(str(source), source, results.checkpoint(name))
    reference = results.reference(name, model.layers)
    lockstep.make_reference(results.checkpoint(name), model.layers, _terms(model), reference)
    if model.adapters:
        folders = {adapter: _REPOSITORY / "resources" / "demo-adapters" / adapter for adapter in model.adapters}
        sources = {name: str(folder) for name, folder in folders.items()}
        out = results.adapters(name)
        lockstep.resolve_adapters(sources, folders, results.checkpoint(name), MAX_LORA_RANK, None, out)
        reference = results.adapted_reference(name, model.layers)
        terms = _adapted_terms(model)
        lockstep.make_reference(results.checkpoint(name), model.layers, terms, reference, adapters_json=out)


def make(name: str, precision: str, work: Path) -> None:
    """Make graphs and weights of a model that was started, and the references of a quantised one."""
    results = right(work)
    model = MODELS[name]
    quantized = is_quantized(precision)
    checkpoint = results.checkpoint(name)
    assembly = results.assembly(name, precision)
    weights = results.weights(name, precision)
    options: dict[str, Any] = {"group_size": GROUP_SIZE} if quantized else {}
    if model.tensor_parallel > 1:
        options["tensor_parallel"] = model.tensor_parallel
    if model.adapters:
        options["adapters"] = {"max_adapters": MAX_ADAPTERS, "max_lora_rank": MAX_LORA_RANK, "targets": None}
    lockstep.export_graphs(checkpoint, precision, assembly, **options)
    lockstep.convert_weights(checkpoint, precision, weights, assembly)
    if quantized:
        reference = results.quantized_reference(name, precision, model.layers)
        lockstep.make_reference(checkpoint, model.layers, _terms(model), reference, weights)
        if model.adapters:
            reference = results.quantized_adapted_reference(name, precision, model.layers)
            adapters = results.adapters(name)
            lockstep.make_reference(checkpoint, model.layers, _adapted_terms(model), reference, weights, adapters)


def right(work: Path) -> Results:
    """Return the folder of everything without a fault."""
    return Results(work / "right")
