"""Random configs of many types: heads, groups, windows, RoPE, biases, norms, experts.

In: a seed. Out: a config.json mapping of a tiny model. A setting is drawn only for a class that has it; what a class
then refuses is a case too.
"""

from __future__ import annotations

import json
import random
from typing import Any

import transformers

from lockstep.export.quiet import quiet

TYPES = (
    "apertus", "arcee", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "exaone4", "gemma", "gemma2",
    "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_neox", "gpt_oss", "granite", "granitemoe", "hunyuan_v1_dense",
    "internlm3", "llama", "minimax_m2", "ministral3", "mistral", "mixtral", "nemotron", "olmo2", "olmo3", "olmoe",
    "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm",
    "starcoder2",
)  # fmt: skip
_LAYERS = 3
_WINDOWS = (1, 3, 7, 33)
_FLAGS = (
    "attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "qkv_bias", "tie_word_embeddings", "use_qk_norm",
    "qk_layernorm", "norm_topk_prob", "use_parallel_residual", "attn_qkv_bias", "add_bias_linear", "lm_head_bias",
    "use_parallel_embedding", "clip_qkv_on",
)  # fmt: skip
# Each with values that a wrong export would show in the logits.
_NUMBERS: dict[str, tuple[Any, ...]] = {
    "rms_norm_eps": (1e-6, 1e-2), "layer_norm_eps": (1e-5, 1e-2), "logit_scale": (0.0625, 1.0),
    "logits_scaling": (1.0, 8.0), "attention_multiplier": (0.1, 0.5), "embedding_multiplier": (1.0, 12.0),
    "residual_multiplier": (0.22, 1.0), "attn_logit_softcapping": (None, 5.0, 50.0),
    "final_logit_softcapping": (None, 3.0, 30.0), "query_pre_attn_scalar": (16, 24),
    "hidden_act": ("silu", "gelu_pytorch_tanh", "relu2"), "hidden_activation": ("gelu_pytorch_tanh", "silu"),
    "partial_rotary_factor": (0.25, 0.5, 1.0), "swiglu_limit": (0.5, 7.0), "routed_scaling_factor": (1.0, 2.5),
    "scoring_func": ("softmax", "sigmoid"), "first_k_dense_replace": (0, 1, 3), "n_shared_experts": (1, 2),
    "num_shared_experts": (1, 2),
}  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def variation(seed: int) -> dict[str, Any]:
    """Return the config of a seed."""
    draw = random.Random(seed)
    model_type = draw.choice(TYPES)
    with quiet():
        default = json.loads(transformers.CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    kv_heads = draw.choice((1, 2, 3))
    group = draw.choice((1, 2, 3, 4))
    head_dim = draw.choice((8, 16, 24))
    heads = kv_heads * group
    config: dict[str, Any] = {
        "model_type": model_type, "dtype": "float32", "vocab_size": 288, "num_hidden_layers": _LAYERS,
        "hidden_size": heads * head_dim, "intermediate_size": draw.choice((40, 72)), "num_attention_heads": heads,
        "max_position_embeddings": 160, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    if "num_key_value_heads" in default:
        config["num_key_value_heads"] = kv_heads
    if "head_dim" in default:
        config["head_dim"] = draw.choice((head_dim, 2 * head_dim))
    for key in (key for key in _FLAGS if isinstance(default.get(key), bool)):
        config[key] = draw.random() < 0.5
    for key in (key for key in _NUMBERS if key in default and draw.random() < 0.7):
        config[key] = draw.choice(_NUMBERS[key])
    config |= _windows(draw, default) | _experts(draw, default)
    if "kv_lora_rank" in default:
        rope = draw.choice((4, 8))
        plain = draw.choice((8, 12))
        config |= {
            "q_lora_rank": draw.choice((None, 24)), "kv_lora_rank": 20, "qk_rope_head_dim": rope,
            "qk_nope_head_dim": plain, "v_head_dim": draw.choice((10, 16)), "num_key_value_heads": heads,
        }  # fmt: skip
        config.pop("head_dim", None)
    if "rope_parameters" in default:
        share = config.get("partial_rotary_factor") or default.get("partial_rotary_factor") or 1.0
        width = config.get("qk_rope_head_dim") or int(config.get("head_dim", head_dim) * share)
        config["rope_parameters"] = _ropes(draw, config, default, width)
    return config


def _windows(draw: random.Random, default: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if "sliding_window" in default:
        options["sliding_window"] = draw.choice((None, *_WINDOWS))
    if "use_sliding_window" in default:
        options |= {"use_sliding_window": draw.random() < 0.7, "max_window_layers": draw.choice((0, 1, 3))}
    if "layer_types" in default and options.get("sliding_window"):
        kinds = [draw.choice(("sliding_attention", "full_attention")) for _ in range(_LAYERS)]
        options |= {"layer_types": kinds} if draw.random() < 0.7 else {}
    if "no_rope_layers" in default:
        options["no_rope_layers"] = [draw.choice((0, 1)) for _ in range(_LAYERS)]
    return options


def _experts(draw: random.Random, default: dict[str, Any]) -> dict[str, Any]:
    key = next((key for key in _EXPERTS if key in default), None)
    if key is None:
        return {}
    count = draw.choice((4, 8))
    groups = draw.choice((1, 2))
    top_k = draw.choice((1, 2, 3))
    options: dict[str, Any] = {key: count, "num_experts_per_tok": top_k}
    if "n_group" in default:  # groups with fewer experts than are taken leave ties, which libraries break differently
        options |= {"n_group": groups, "topk_group": 1 if top_k <= count // groups else groups}
    if "moe_intermediate_size" in default:
        options["moe_intermediate_size"] = 24
    if "shared_expert_intermediate_size" in default:
        options["shared_expert_intermediate_size"] = draw.choice((16, 24))
    return options


def _ropes(draw: random.Random, config: dict[str, Any], default: dict[str, Any], width: int) -> dict[str, Any]:
    """Return RoPE settings, one for each layer type where the class has several."""
    parameters = default["rope_parameters"]
    if isinstance(parameters, dict) and parameters and all(isinstance(value, dict) for value in parameters.values()):
        return {kind: _rope(draw, width) for kind in parameters}
    return {**_rope(draw, width), **({} if "partial_rotary_factor" not in config else {
        "partial_rotary_factor": config["partial_rotary_factor"]
    })}  # fmt: skip


def _rope(draw: random.Random, width: int) -> dict[str, Any]:
    kind = draw.choice(("default", "default", "linear", "llama3", "yarn", "longrope", "dynamic"))
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": draw.choice((100.0, 10000.0, 1e6))}
    if kind != "default":
        parameters["factor"] = draw.choice((2.0, 8.0))
    if kind in ("llama3", "yarn", "longrope"):
        parameters["original_max_position_embeddings"] = draw.choice((32, 80))
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        parameters |= draw.choice(({}, {"mscale": 1.0, "mscale_all_dim": 0.7}, {"truncate": False}))
    if kind == "longrope":
        parameters |= {"short_factor": [1.0 + n / 9 for n in range(width // 2)], "long_factor": [3.0] * (width // 2)}
    return parameters
