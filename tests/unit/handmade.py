"""A Llama's forward by hand, in float64 NumPy: what the runtime's numbers are compared with where torch would be in the
way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lockstep.backends.builder import build
from lockstep.checkpoint import resolve
from lockstep.export import random_model
from lockstep.export.run import export
from lockstep.targets import Results
from lockstep.weights import Weights, convert

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "hidden_act": "silu",
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "eos_token_id": 0,
}  # fmt: skip


def make(
    folder: Path, precisions: Sequence[str], config: dict = CONFIG, seed: int = 0, tensor_parallel: int = 1
) -> Results:
    """Checkpoint, weights, graphs and engines of a random model called "tiny"."""
    source = folder / "source"
    source.mkdir(parents=True)
    (source / "shape.json").write_text(json.dumps(config))
    random_model.make(source / "shape.json", seed, source)
    results = Results(folder / "results")
    checkpoint = resolve(str(source), source, results.checkpoint("tiny"))
    for precision in precisions:
        convert(checkpoint, precision, results.weights("tiny", precision))
        export(checkpoint, precision, results.assembly("tiny", precision), tensor_parallel)
        build(results.assembly("tiny", precision), "onnxruntime", results.engines("tiny", precision, "onnxruntime"))
    return results


def llama(weights: Weights, config: dict, tokens: Sequence[int], layers: int) -> np.ndarray:
    """Logits [len(tokens), vocab_size] of the whole sequence at once, of the model cut after `layers` layers."""
    n = len(tokens)
    dim = config["head_dim"]
    kv = config["num_key_value_heads"]
    frequency = config["rope_parameters"]["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    angle = (np.arange(n)[:, None] * np.tile(frequency, 2))[:, None]

    def w(name: str) -> np.ndarray:
        return weights[name].astype(np.float64)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w(name)

    def project(y: np.ndarray, name: str, heads: int) -> np.ndarray:
        return (y @ w(f"{name}_proj.weight").T).reshape(n, heads, dim)

    def rotate(x: np.ndarray) -> np.ndarray:
        turned = np.concatenate([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
        return x * np.cos(angle) + turned * np.sin(angle)

    x = w("model.embed_tokens.weight")[np.asarray(tokens)]
    for i in range(layers):
        p = f"model.layers.{i}."
        y = norm(x, p + "input_layernorm.weight")
        query = rotate(project(y, f"{p}self_attn.q", config["num_attention_heads"])).reshape(n, kv, -1, dim)
        key = rotate(project(y, f"{p}self_attn.k", kv))
        value = project(y, f"{p}self_attn.v", kv)
        scores = np.einsum("ikgd,jkd->kgij", query, key) * dim**-0.5
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = x + np.einsum("kgij,jkd->ikgd", shares, value).reshape(n, -1) @ w(p + "self_attn.o_proj.weight").T
        y = norm(x, p + "post_attention_layernorm.weight")
        gate = y @ w(p + "mlp.gate_proj.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w(p + "mlp.up_proj.weight").T)) @ w(p + "mlp.down_proj.weight").T
    return norm(x, "model.norm.weight") @ w("lm_head.weight").T
