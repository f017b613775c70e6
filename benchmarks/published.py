"""The model families that are downloaded most, as their checkpoints are published.

For each the settings of its config.json that decide the computation: class, geometry, layer types, RoPE, norms and
windows; and how its weights are quantised as published. Facts are those of the checkpoints' own config.json, as
transformers' documentation, conversion scripts and tests give them. Sizes of vision towers are left out: they are not
read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
FP8_TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
MXFP4 = {"quant_method": "mxfp4"}


@dataclass(frozen=True)
class Published:
    """A family. example: a checkpoint of it. config: its settings. packing: its quantization_config, if any."""

    example: str
    config: dict[str, Any]
    packing: dict[str, Any] | None = field(default=None)


def _plain(
    example: str,
    model_type: str,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    packing: dict[str, Any] | None = None,
    **settings: Any,
) -> Published:
    """Return a family whose settings have the common names."""
    sizes = {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
    }  # fmt: skip
    return Published(example, {"model_type": model_type, **sizes, **settings}, packing)


def _wrapped(model_type: str, text: Published, tied: bool | None = None, **settings: Any) -> Published:
    """Return a wrapper of a language model."""
    head = {} if tied is None else {"tie_word_embeddings": tied}
    return Published(
        text.example, {"model_type": model_type, **head, "text_config": text.config, **settings}, text.packing
    )


def _rope(kind: str, factor: float, original: int | None = None, **settings: Any) -> dict[str, Any]:
    length = {} if original is None else {"original_max_position_embeddings": original}
    return {"rope_type": kind, "factor": factor, **length, **settings}


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_DEEPSEEK_ROPE = _rope("yarn", 40, 4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)
_DEEPSEEK_V3: dict[str, Any] = {
    **_MLA, "q_lora_rank": 1536, "first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "moe_intermediate_size": 2048, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "max_position_embeddings": 163840, "rope_scaling": _DEEPSEEK_ROPE,
}  # fmt: skip
_KIMI: dict[str, Any] = {
    **_DEEPSEEK_V3, "first_k_dense_replace": 1, "n_routed_experts": 384, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 2.827, "max_position_embeddings": 131072, "rope_theta": 50000.0,
    "rope_scaling": _rope("yarn", 32.0, 4096, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
}  # fmt: skip
_QWEN3 = {"head_dim": 128, "rope_theta": 1e6, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6}
_QWEN3_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
_MROPE3 = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}
_DELTA: dict[str, Any] = {
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25,
    "max_position_embeddings": 262144, "rope_theta": 1e7,
}  # fmt: skip
_GEMMA3_ROPE: dict[str, Any] = {"rope_theta": 1e6, "rope_local_base_freq": 10000.0, "max_position_embeddings": 131072}
_GEMMA3_WIDE = {**_GEMMA3_ROPE, "rope_scaling": _rope("linear", 8.0), "sliding_window": 1024, "head_dim": 256}
_GLM4_MOE: dict[str, Any] = {
    "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 1e6,
    "max_position_embeddings": 131072, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 1, "topk_group": 1, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "norm_topk_prob": True,
}  # fmt: skip
_GRANITE = {"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
_LFM2 = {"norm_eps": 1e-5, "rope_theta": 1e6, "conv_L_cache": 3, "max_position_embeddings": 128000}
_LONG = [1.0 + n / 8 for n in range(48)]  # the real factors are 48 numbers too, which grow

FAMILIES = {
    "Llama 2": _plain("meta-llama/Llama-2-7b-hf", "llama", 4096, 11008, 32, 32, 32, 32000),
    "Llama 3.1, 3.3": _plain(
        "meta-llama/Llama-3.1-8B-Instruct", "llama", 4096, 14336, 32, 32, 8, 128256, rope_theta=500000.0,
        max_position_embeddings=131072, rope_scaling=_rope("llama3", 8.0, 8192, **_LLAMA3),
    ),
    "Llama 3.2": _plain(
        "meta-llama/Llama-3.2-1B-Instruct", "llama", 2048, 8192, 16, 32, 8, 128256, rope_theta=500000.0, head_dim=64,
        max_position_embeddings=131072, rope_scaling=_rope("llama3", 32.0, 8192, **_LLAMA3), tie_word_embeddings=True,
    ),
    "Llama 4": _wrapped("llama4", _plain(
        "meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4_text", 5120, 8192, 48, 40, 8, 202048, head_dim=128,
        intermediate_size_mlp=16384, num_local_experts=16, num_experts_per_tok=1, interleave_moe_layer_step=1,
        attention_chunk_size=8192, use_qk_norm=True, rope_theta=500000.0, max_position_embeddings=10485760,
        rope_scaling=_rope("llama3", 16.0, 8192, low_freq_factor=1.0, high_freq_factor=1.0),
    )),
    "Qwen2.5": _plain(
        "Qwen/Qwen2.5-7B-Instruct", "qwen2", 3584, 18944, 28, 28, 4, 152064, rope_theta=1e6, rms_norm_eps=1e-6,
        max_position_embeddings=32768, sliding_window=131072, use_sliding_window=False, max_window_layers=28,
    ),
    "Qwen3": _plain("Qwen/Qwen3-8B", "qwen3", 4096, 12288, 36, 32, 8, 151936, **_QWEN3),
    "Qwen3, tied": _plain(
        "Qwen/Qwen3-0.6B", "qwen3", 1024, 3072, 28, 16, 8, 151936, tie_word_embeddings=True, **_QWEN3
    ),
    "Qwen3 MoE": _plain(
        "Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3_moe", 2048, 6144, 48, 32, 4, 151936, **_QWEN3, **_QWEN3_EXPERTS
    ),
    "Qwen3 FP8": _plain("Qwen/Qwen3-8B-FP8", "qwen3", 4096, 12288, 36, 32, 8, 151936, FP8, **_QWEN3),
    "Qwen3-Next": _plain(
        "Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_next", 2048, 5120, 48, 16, 2, 151936, **_DELTA, num_experts=512,
        num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512,
    ),
    "Qwen3.5, 3.6": _wrapped("qwen3_5", _plain(
        "Qwen/Qwen3.5-27B", "qwen3_5_text", 5120, 17408, 64, 24, 4, 248320, **_DELTA
    ), tied=False),
    "Qwen3.5, 3.6 MoE": _wrapped("qwen3_5_moe", _plain(
        "Qwen/Qwen3.5-35B-A3B", "qwen3_5_moe_text", 2048, 512, 40, 16, 2, 248320, **_DELTA, num_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512,
    ), tied=False),
    "Qwen2-VL": _plain(
        "Qwen/Qwen2-VL-7B-Instruct", "qwen2_vl", 3584, 18944, 28, 28, 4, 152064, rope_theta=1e6, rms_norm_eps=1e-6,
        max_position_embeddings=32768, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
        tie_word_embeddings=False,
    ),
    "Qwen2.5-VL": _plain(
        "Qwen/Qwen2.5-VL-7B-Instruct", "qwen2_5_vl", 3584, 18944, 28, 28, 4, 152064, rope_theta=1e6, rms_norm_eps=1e-6,
        max_position_embeddings=128000, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
        tie_word_embeddings=False,
    ),
    "Qwen3-VL": _wrapped("qwen3_vl", _plain(
        "Qwen/Qwen3-VL-4B-Instruct", "qwen3_vl_text", 2560, 9728, 36, 32, 8, 151936, head_dim=128, rope_theta=5e6,
        max_position_embeddings=262144, rope_scaling=_MROPE3,
    ), tied=True),
    "Qwen3-VL MoE": _wrapped("qwen3_vl_moe", _plain(
        "Qwen/Qwen3-VL-30B-A3B-Instruct", "qwen3_vl_moe_text", 2048, 6144, 48, 32, 4, 151936, head_dim=128,
        rope_theta=5e6, max_position_embeddings=262144, rope_scaling=_MROPE3, **_QWEN3_EXPERTS,
    ), tied=False),
    "GPT-OSS": _plain(
        "openai/gpt-oss-20b", "gpt_oss", 2880, 2880, 24, 64, 8, 201088, MXFP4, head_dim=64, num_local_experts=32,
        num_experts_per_tok=4, sliding_window=128, attention_bias=True, swiglu_limit=7.0, rope_theta=150000.0,
        max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_scaling=_rope("yarn", 32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False),
    ),
    "DeepSeek V2": _plain(
        "deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek_v2", 2048, 10944, 27, 16, 16, 102400, **_MLA, q_lora_rank=None,
        first_k_dense_replace=1, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, n_group=1,
        topk_group=1, moe_intermediate_size=1408, topk_method="greedy", norm_topk_prob=False,
        max_position_embeddings=163840,
        rope_scaling=_rope("yarn", 40, 4096, beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707),
    ),
    "DeepSeek V3, R1": _plain(
        "deepseek-ai/DeepSeek-R1", "deepseek_v3", 7168, 18432, 61, 128, 128, 129280, FP8, **_DEEPSEEK_V3
    ),
    "DeepSeek V3.2": _plain(
        "deepseek-ai/DeepSeek-V3.2", "deepseek_v32", 7168, 18432, 61, 128, 128, 129280, FP8, **_DEEPSEEK_V3,
        index_n_heads=64, index_head_dim=128, index_topk=2048,
    ),
    "Kimi K2": _plain("moonshotai/Kimi-K2-Instruct", "kimi_k2", 7168, 18432, 61, 64, 64, 163840, FP8, **_KIMI),
    "Kimi K2.5": _wrapped("kimi_k25", _plain(
        "moonshotai/Kimi-K2.5", "kimi_k2", 7168, 18432, 61, 64, 64, 163840, **_KIMI
    ), tied=False),
    "Kimi Linear": _plain(
        "moonshotai/Kimi-Linear-48B-A3B-Instruct", "kimi_linear", 2304, 9216, 27, 32, 32, 163840, **_MLA
    ),
    "Gemma": _plain(
        "google/gemma-7b-it", "gemma", 3072, 24576, 28, 16, 16, 256000, head_dim=256, max_position_embeddings=8192,
        hidden_activation="gelu_pytorch_tanh",
    ),
    "Gemma 2": _plain(
        "google/gemma-2-9b-it", "gemma2", 3584, 14336, 42, 16, 8, 256000, head_dim=256, query_pre_attn_scalar=256,
        sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0, max_position_embeddings=8192,
    ),
    "Gemma 3 270M, 1B": _plain(
        "google/gemma-3-1b-it", "gemma3_text", 1152, 6912, 26, 4, 1, 262144, head_dim=256, sliding_window=512,
        query_pre_attn_scalar=256, **{**_GEMMA3_ROPE, "max_position_embeddings": 32768},
    ),
    "Gemma 3 4B to 27B": _wrapped("gemma3", _plain(
        "google/gemma-3-4b-it", "gemma3_text", 2560, 10240, 34, 8, 4, 262208, query_pre_attn_scalar=256, **_GEMMA3_WIDE
    )),
    "Gemma 3n": _wrapped("gemma3n", _plain(
        "google/gemma-3n-E4B-it", "gemma3n_text", 2048, 16384, 35, 8, 2, 262400, head_dim=256
    )),
    "Gemma 4 E2B, E4B": _wrapped("gemma4", _plain(
        "google/gemma-4-E2B-it", "gemma4_text", 1536, 6144, 35, 8, 1, 262144, head_dim=256, global_head_dim=512,
        num_kv_shared_layers=20, hidden_size_per_layer_input=256, use_double_wide_mlp=True, sliding_window=512,
        final_logit_softcapping=30.0, max_position_embeddings=131072,
        layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
    )),
    "Gemma 4 31B": _wrapped("gemma4", _plain(
        "google/gemma-4-31B-it", "gemma4_text", 5376, 21504, 60, 32, 16, 262144, head_dim=256, global_head_dim=512,
        num_global_key_value_heads=4, attention_k_eq_v=True, hidden_size_per_layer_input=0, sliding_window=1024,
        final_logit_softcapping=30.0, max_position_embeddings=262144,
    )),
    "Gemma 4 26B-A4B": _wrapped("gemma4", _plain(
        "google/gemma-4-26B-A4B-it", "gemma4_text", 2816, 2112, 30, 16, 8, 262144, head_dim=256, global_head_dim=512,
        num_global_key_value_heads=2, attention_k_eq_v=True, hidden_size_per_layer_input=0, sliding_window=1024,
        final_logit_softcapping=30.0, max_position_embeddings=262144, enable_moe_block=True, num_experts=128,
        top_k_experts=8, moe_intermediate_size=704,
    )),
    "PaliGemma 2": _wrapped("paligemma", _plain(
        "google/paligemma2-3b-pt-224", "gemma2", 2304, 9216, 26, 8, 4, 257216, head_dim=256, query_pre_attn_scalar=256,
        sliding_window=4096, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
    )),
    "Mistral 7B": _plain(
        "mistralai/Mistral-7B-Instruct-v0.3", "mistral", 4096, 14336, 32, 32, 8, 32768, rope_theta=1e6,
        sliding_window=None, max_position_embeddings=32768,
    ),
    "Mistral Nemo": _plain(
        "mistralai/Mistral-Nemo-Instruct-2407", "mistral", 5120, 14336, 40, 32, 8, 131072, head_dim=128,
        rope_theta=1e6, sliding_window=None, max_position_embeddings=131072,
    ),
    "Mistral Small 3.1, 3.2": _wrapped("mistral3", _plain(
        "mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral", 5120, 32768, 40, 32, 8, 131072, head_dim=128,
        rope_theta=1e9, sliding_window=None, max_position_embeddings=131072,
    ), tied=False),
    "Ministral 3": _wrapped("mistral3", _plain(
        "mistralai/Ministral-3-8B-Instruct-2512", "ministral3", 4096, 14336, 34, 32, 8, 131072, FP8_TENSOR,
        head_dim=128, max_position_embeddings=262144, rope_parameters=_rope(
            "yarn", 16.0, 16384, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, rope_theta=1e6,
            llama_4_scaling_beta=0.1,
        ),
    ), tied=False),
    "Mixtral": _plain(
        "mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8,
        num_experts_per_tok=2, rope_theta=1e6, sliding_window=None, max_position_embeddings=32768,
    ),
    "Phi-2": _plain(
        "microsoft/phi-2", "phi", 2560, 10240, 32, 32, 32, 51200, partial_rotary_factor=0.4,
        max_position_embeddings=2048,
    ),
    "Phi-3.5 mini": _plain(
        "microsoft/Phi-3.5-mini-instruct", "phi3", 3072, 8192, 32, 32, 32, 32064, max_position_embeddings=131072,
        original_max_position_embeddings=4096, sliding_window=262144,
        rope_scaling={"type": "longrope", "short_factor": _LONG, "long_factor": _LONG},
    ),
    "Phi-3.5 MoE": _plain(
        "microsoft/Phi-3.5-MoE-instruct", "phimoe", 4096, 6400, 32, 32, 8, 32064, num_local_experts=16,
        num_experts_per_tok=2, attention_bias=True, lm_head_bias=True, max_position_embeddings=131072,
        original_max_position_embeddings=4096, sliding_window=131072, rope_scaling={
            "type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64,
            "short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122,
            "original_max_position_embeddings": 4096,
        },
    ),
    "Phi-4": _plain(
        "microsoft/phi-4", "phi3", 5120, 17920, 40, 40, 10, 100352, rope_theta=250000.0, max_position_embeddings=16384,
        original_max_position_embeddings=16384, sliding_window=None,
    ),
    "Phi-4 mini": _plain(
        "microsoft/Phi-4-mini-instruct", "phi3", 3072, 8192, 32, 24, 8, 200064, partial_rotary_factor=0.75,
        max_position_embeddings=131072, original_max_position_embeddings=4096, sliding_window=262144,
        tie_word_embeddings=True, rope_scaling={"type": "longrope", "short_factor": [1.0] * 48, "long_factor": _LONG},
    ),
    "GLM-4": _plain(
        "zai-org/GLM-4-9B-0414", "glm4", 4096, 13696, 40, 32, 2, 151552, head_dim=128, partial_rotary_factor=0.5,
        max_position_embeddings=32768,
    ),
    "GLM-4.5, 4.6, 4.7": _plain(
        "zai-org/GLM-4.5-Air", "glm4_moe", 4096, 10944, 46, 96, 8, 151552, use_qk_norm=False, **_GLM4_MOE
    ),
    "GLM-4.7-Flash": _plain(
        "zai-org/GLM-4.7-Flash", "glm4_moe_lite", 2048, 10240, 47, 20, 20, 154880,
        kv_lora_rank=512, q_lora_rank=768, qk_rope_head_dim=64, qk_nope_head_dim=192, v_head_dim=256,
        n_routed_experts=64, n_shared_experts=1, num_experts_per_tok=4, n_group=1, topk_group=1,
        moe_intermediate_size=1536, rope_theta=1e6, max_position_embeddings=202752,
    ),
    "GLM-5": _plain("zai-org/GLM-5", "glm_moe_dsa", 6144, 12288, 78, 64, 64, 154880),
    "GLM-4.1V": _wrapped("glm4v", _plain(
        "zai-org/GLM-4.1V-9B-Thinking", "glm4v_text", 4096, 13696, 40, 32, 2, 151552, partial_rotary_factor=0.5,
        rope_scaling={"type": "default", "mrope_section": [8, 12, 12]}, max_position_embeddings=65536,
    ), tied=False),
    "MiniMax-M2": _plain(
        "MiniMaxAI/MiniMax-M2", "minimax_m2", 3072, 1536, 62, 48, 8, 200064, FP8, head_dim=128, num_local_experts=256,
        num_experts_per_tok=8, rotary_dim=64, rope_theta=5e6, max_position_embeddings=196608, use_qk_norm=True,
    ),
    "SmolLM2": _plain(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct", "llama", 2048, 8192, 24, 32, 32, 49152, rope_theta=130000.0,
        tie_word_embeddings=True, max_position_embeddings=8192,
    ),
    "SmolLM3": _plain(
        "HuggingFaceTB/SmolLM3-3B", "smollm3", 2048, 11008, 36, 16, 4, 128256, rope_theta=5e6,
        no_rope_layers=[1, 1, 1, 0] * 9, tie_word_embeddings=True, max_position_embeddings=65536,
    ),
    "SmolVLM2": _wrapped("smolvlm", _plain(
        "HuggingFaceTB/SmolVLM2-2.2B-Instruct", "llama", 2048, 8192, 24, 32, 32, 49280, rope_theta=130000.0,
        max_position_embeddings=8192,
    ), tied=False),
    "Granite 3": _plain(
        "ibm-granite/granite-3.3-8b-instruct", "granite", 4096, 12800, 40, 32, 8, 49159, **_GRANITE,
        logits_scaling=16.0, rope_theta=1e7, tie_word_embeddings=True, max_position_embeddings=131072,
    ),
    "Granite 4 H": _plain(
        "ibm-granite/granite-4.0-h-tiny", "granitemoehybrid", 1536, 512, 40, 12, 4, 100352, **_GRANITE,
        layer_types=(["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, num_local_experts=64, num_experts_per_tok=6,
        shared_intermediate_size=1024, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128, mamba_expand=2,
        position_embedding_type="nope", tie_word_embeddings=True,
    ),
    "LFM2": _plain(
        "LiquidAI/LFM2-1.2B", "lfm2", 2048, 12288, 16, 32, 8, 65536, block_auto_adjust_ff_dim=True, **_LFM2,
        layer_types=["full_attention" if n in (2, 5, 8, 10, 12, 14) else "conv" for n in range(16)],
    ),
    "LFM2 MoE": _plain(
        "LiquidAI/LFM2-8B-A1B", "lfm2_moe", 2048, 7168, 24, 32, 8, 65536, **_LFM2, num_experts=32,
        num_experts_per_tok=4, num_dense_layers=2, moe_intermediate_size=1792, norm_topk_prob=True,
        layer_types=["full_attention" if n in (2, 6, 10, 14, 18, 21) else "conv" for n in range(24)],
    ),
    "Falcon 3": _plain(
        "tiiuae/Falcon3-7B-Instruct", "llama", 3072, 23040, 28, 12, 4, 131072, head_dim=256, rope_theta=1000042.0,
        max_position_embeddings=32768,
    ),
    "Falcon-H1": _plain(
        "tiiuae/Falcon-H1-1.5B-Instruct", "falcon_h1", 2048, 4096, 24, 8, 2, 65537, head_dim=128, mamba_d_ssm=3072,
        mamba_n_heads=48, mamba_d_head=64, mamba_d_state=256, mamba_n_groups=1, mamba_rms_norm=False,
        mamba_norm_before_gate=False, embedding_multiplier=5.656854249492381, lm_head_multiplier=0.0390625,
        key_multiplier=0.39062499999999994, attention_out_multiplier=0.9375, ssm_in_multiplier=1.25,
        ssm_out_multiplier=0.23570226039551587, mlp_multipliers=[0.8838834764831844, 0.5859375],
        ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738], rope_theta=1e11,
        max_position_embeddings=131072,
    ),
    "Nemotron-H, Nano": _plain(
        "nvidia/NVIDIA-Nemotron-Nano-9B-v2", "nemotron_h", 4480, 15680, 56, 40, 8, 131072, head_dim=128,
        hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", mamba_num_heads=128,
        mamba_head_dim=80, ssm_state_size=128, n_groups=8,
    ),
    "OLMo 2": _plain(
        "allenai/OLMo-2-1124-7B-Instruct", "olmo2", 4096, 11008, 32, 32, 32, 100352, rope_theta=500000.0,
        max_position_embeddings=4096,
    ),
    "OLMo 3": _plain(
        "allenai/Olmo-3-7B-Instruct", "olmo3", 4096, 11008, 32, 32, 32, 100278, rope_theta=500000.0,
        max_position_embeddings=65536, sliding_window=4096,
        rope_scaling=_rope("yarn", 8.0, 8192, beta_fast=32, beta_slow=1, attention_factor=1.2079441541679836),
    ),
    "Command R7B, A": _plain(
        "CohereLabs/c4ai-command-r7b-12-2024", "cohere2", 4096, 14336, 32, 32, 8, 256000, sliding_window=4096,
        rope_theta=50000.0, logit_scale=0.25, max_position_embeddings=132096,
    ),
    "EXAONE 4": _plain(
        "LGAI-EXAONE/EXAONE-4.0-32B", "exaone4", 5120, 27392, 64, 40, 8, 102400, head_dim=128, sliding_window=4096,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 16, rope_theta=1e6,
        max_position_embeddings=131072, rope_scaling=_rope("llama3", 16.0, 8192, **_LLAMA3),
    ),
    "ERNIE 4.5": _plain(
        "baidu/ERNIE-4.5-0.3B-PT", "ernie4_5", 1024, 3072, 18, 16, 2, 103424, head_dim=128, rope_theta=500000.0,
        tie_word_embeddings=True, max_position_embeddings=131072,
    ),
    "ERNIE 4.5 MoE": _plain(
        "baidu/ERNIE-4.5-21B-A3B-PT", "ernie4_5_moe", 2560, 12288, 28, 20, 4, 103424, moe_num_experts=64, moe_k=6,
        moe_intermediate_size=1536, moe_num_shared_experts=2, moe_layer_start_index=1, rope_theta=500000.0,
        tie_word_embeddings=True, max_position_embeddings=131072,
    ),
    "Hunyuan": _plain(
        "tencent/Hunyuan-7B-Instruct", "hunyuan_v1_dense", 4096, 14336, 32, 32, 8, 128167, head_dim=128,
        max_position_embeddings=32768, rope_scaling={"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
        tie_word_embeddings=True,
    ),
    "Seed-OSS": _plain(
        "ByteDance-Seed/Seed-OSS-36B-Instruct", "seed_oss", 5120, 27648, 64, 80, 8, 155136, head_dim=128,
        attention_bias=True, attention_out_bias=False, rope_theta=1e7, max_position_embeddings=524288,
    ),
    "Apertus": _plain(
        "swiss-ai/Apertus-8B-Instruct-2509", "apertus", 4096, 21504, 32, 32, 8, 131072, rope_theta=12000000.0,
        max_position_embeddings=65536, rope_scaling=_rope("llama3", 8.0, 8192, **_LLAMA3),
    ),
    "BitNet": _plain(
        "microsoft/bitnet-b1.58-2B-4T", "bitnet", 2560, 6912, 30, 20, 5, 128256,
        {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"},
        rope_theta=500000.0, tie_word_embeddings=True, max_position_embeddings=4096,
    ),
    "LLaVA 1.5": _wrapped("llava", _plain(
        "llava-hf/llava-1.5-7b-hf", "llama", 4096, 11008, 32, 32, 32, 32064, max_position_embeddings=4096
    )),
    "InternVL 3": _wrapped("internvl", _plain(
        "OpenGVLab/InternVL3-8B-hf", "qwen2", 3584, 18944, 28, 28, 4, 151674, rope_theta=1e6,
        max_position_embeddings=32768,
    ), tied=False),
    "StarCoder 2": _plain(
        "bigcode/starcoder2-7b", "starcoder2", 4608, 18432, 32, 36, 4, 49152, use_bias=True, sliding_window=4096,
        rope_theta=1000000.0, max_position_embeddings=16384,
    ),
    "GPT-2": Published("openai-community/gpt2", {
        "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257,
    }),
    "Pythia": _plain(
        "EleutherAI/pythia-1.4b", "gpt_neox", 2048, 8192, 24, 16, 16, 50304, rotary_pct=0.25,
        use_parallel_residual=True, max_position_embeddings=2048,
    ),
    "OPT": Published("facebook/opt-1.3b", {
        "model_type": "opt", "hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
        "vocab_size": 50272, "word_embed_proj_dim": 2048, "max_position_embeddings": 2048,
    }),
    "Falcon": _plain(
        "tiiuae/falcon-7b-instruct", "falcon", 4544, 18176, 32, 71, 71, 65024, multi_query=True, parallel_attn=True,
        new_decoder_architecture=False, bias=False, alibi=False,
    ),
}  # fmt: skip
