"""Tiny models of many families: each small enough to run in a second, each with what makes its family different from a
Llama.

A window is shorter than any prompt of the tests; groups, heads and sizes are different numbers, so that none can stand
for another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from some import some

WINDOW = 5
_SIZES = {
    "vocab_size": 288, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_NO_GROUPS = {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}


@dataclass(frozen=True)
class Family:
    """config: the model's config.json. windows: of each kind, 0 for none. classes: number of block classes, the
    embedding among them. tolerance: of logits, whose standard deviation is 0.3 to 4; fp32 sums in another order give
    1e-6 to 2e-5 of it."""

    config: dict[str, Any]
    windows: tuple[int, ...] = (0,)
    classes: int = 4
    softcap: float = 0.0
    slots: tuple[str, ...] = field(default=())  # weights that some block must take: what the family is known for
    tolerance: float = 1e-4


def tiny(
    model_type: str,
    *,
    sizes: dict[str, Any] = _SIZES,
    windows=(0,),
    classes=4,
    softcap=0.0,
    slots=(),
    tolerance=1e-4,
    **settings: Any,
) -> Family:
    config = {"model_type": model_type, "dtype": "float32", **sizes, **settings}
    return Family(config, windows, classes, softcap, slots, tolerance)


def _rope(rope_type: str = "default", **settings: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10000.0, **settings}


FAMILIES = {
    "llama": tiny("llama", attention_bias=True, mlp_bias=True, slots=("self_attn.o_proj.bias", "mlp.down_proj.bias")),
    "llama, llama3 rope": tiny("llama", tie_word_embeddings=True, head_dim=16,
        rope_parameters=_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=64)),
    "llama, yarn rope": tiny("llama", rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "mistral": tiny("mistral", head_dim=16, sliding_window=WINDOW, windows=(WINDOW,)),
    "qwen2": tiny("qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, windows=(0, WINDOW),
        slots=("self_attn.q_proj.bias",)),
    "qwen3": tiny("qwen3", head_dim=16, slots=("self_attn.q_norm.weight", "self_attn.k_norm.weight")),
    "gemma": tiny("gemma", head_dim=16, hidden_activation="gelu_pytorch_tanh"),
    "gemma2": tiny("gemma2", head_dim=16, sliding_window=WINDOW, layer_types=_ALTERNATING, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0, query_pre_attn_scalar=24, windows=(WINDOW, 0), softcap=2.0),
    "gemma3_text": tiny("gemma3_text", head_dim=16, sliding_window=WINDOW, layer_types=_ALTERNATING,
        windows=(WINDOW, 0), slots=("self_attn.q_norm.weight",),
        rope_parameters={"full_attention": _rope("linear", factor=8.0), "sliding_attention": _rope(rope_theta=100.0)}),
    "phi": tiny("phi", partial_rotary_factor=0.5, qk_layernorm=True,
        slots=("self_attn.q_layernorm.bias", "mlp.fc1.bias")),
    "phi3": tiny("phi3", sliding_window=WINDOW, windows=(WINDOW,),
        slots=("self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight")),
    "gpt2": tiny("gpt2",
        sizes={"vocab_size": 288, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 128, "bos_token_id": 1,
            "eos_token_id": 2},
        slots=("wpe.weight",)),
    "gpt_neox": tiny("gpt_neox", sizes=_NO_GROUPS, rotary_pct=0.5, use_parallel_residual=True,
        slots=("attention.query_key_value.weight",)),
    "olmo2": tiny("olmo2", slots=("self_attn.q_norm.weight", "post_feedforward_layernorm.weight")),
    "smollm3": tiny("smollm3", no_rope_layers=[1, 0, 1], windows=(0, 0)),
    "starcoder2": tiny("starcoder2", sliding_window=WINDOW, windows=(WINDOW,), use_bias=True,
        slots=("self_attn.k_proj.bias",)),
    "cohere": tiny("cohere", use_qk_norm=True, logit_scale=0.25, slots=("self_attn.q_norm.weight",)),
    "granite": tiny("granite", attention_multiplier=0.2, embedding_multiplier=5.0, residual_multiplier=0.4,
        logits_scaling=0.5),
    "stablelm": tiny("stablelm", partial_rotary_factor=0.5, use_qkv_bias=True, qk_layernorm=True,
        slots=("self_attn.q_layernorm.norms.0.weight",)),
    "glm": tiny("glm", head_dim=16, partial_rotary_factor=0.5, slots=("mlp.gate_up_proj.weight",)),
    "opt": tiny("opt", sizes=_NO_GROUPS, ffn_dim=80, word_embed_proj_dim=32, do_layer_norm_before=True,
        slots=("project_in.weight", "embed_positions.weight")),
    "hunyuan_v1_dense": tiny("hunyuan_v1_dense", head_dim=16, slots=("self_attn.query_layernorm.weight",)),
    "mixtral": tiny("mixtral", head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW,
        windows=(WINDOW,), slots=("mlp.gate.weight",)),
    "gpt_oss": tiny("gpt_oss", head_dim=16, num_local_experts=4, num_experts_per_tok=2, attention_bias=True,
        sliding_window=WINDOW, layer_types=_ALTERNATING, windows=(WINDOW, 0),
        slots=("self_attn.sinks", "self_attn.o_proj.bias", "mlp.experts.gate_up_proj_bias"),
        rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=32, truncate=False)),
    # Sinks in a dense model; fused attention takes heads in steps of 8.
    "granite_swa": tiny("granite_swa", sizes={**_SIZES, "hidden_size": 64}, sliding_window=WINDOW,
        layer_types=_ALTERNATING, windows=(WINDOW, 0), slots=("self_attn.sinks",)),
    "qwen3_moe": tiny("qwen3_moe", head_dim=16, num_experts=4, mlp_only_layers=[0], classes=6, **_EXPERTS),
    "deepseek_v3": tiny("deepseek_v3", sizes={**_SIZES, "num_key_value_heads": 4}, q_lora_rank=24, kv_lora_rank=20,
        qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10, n_routed_experts=8, n_group=2, topk_group=1,
        first_k_dense_replace=1, classes=6, **_EXPERTS),
    # The router of DeepSeek V3: a sigmoid, a bias, groups; next to plain attention.
    "dots1": tiny("dots1", head_dim=16, n_routed_experts=8, n_group=2, topk_group=1, n_shared_experts=1,
        first_k_dense_replace=1, classes=6, **_EXPERTS),
    # Residuals are scaled by the depth: cut to its first layers, it must keep the whole model's scale.
    "minicpm3": tiny("minicpm3", sizes={**_SIZES, "num_key_value_heads": 4}, q_lora_rank=24, kv_lora_rank=20,
        qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10),
    "phi3, longrope": tiny("phi3", original_max_position_embeddings=64,
        rope_parameters=_rope("longrope", short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5], long_factor=[2.0, 3.0, 4.0,
            5.0, 6.0, 7.0])),
    # Its windows are in the mask alone.
    "qwen2_moe": tiny("qwen2_moe", layer_types=_ALTERNATING, use_sliding_window=True, sliding_window=WINDOW,
        windows=(WINDOW, 0), num_experts=4, shared_expert_intermediate_size=24, **_EXPERTS),
    # A state of the last two tokens in most layers.
    "lfm2": tiny("lfm2", sizes={**_SIZES, "hidden_size": 64, "num_hidden_layers": 4},
        layer_types=["conv", "conv", "full_attention", "conv"], conv_L_cache=3, conv_bias=True,
        block_auto_adjust_ff_dim=False, classes=7, slots=("conv.conv.weight", "conv.conv.bias")),
    # A short convolution and the gated delta rule in most layers.
    # Transformers' own error is 3e-5: sums that happen to be small are normalised.
    "qwen3_5_text": tiny("qwen3_5_text", head_dim=16,
        layer_types=["linear_attention", "linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=20, linear_conv_kernel_dim=4, classes=7,
        tolerance=5e-4, slots=("linear_attn.conv1d.weight", "linear_attn.dt_bias")),
    # Mamba-2.
    "bamba": tiny("bamba", sizes={**_SIZES, "hidden_size": 64, "num_hidden_layers": 4}, attn_layer_indices=[2],
        mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=10, mamba_d_conv=4, mamba_chunk_size=16,
        classes=8, slots=("mamba.A_log", "mamba.D")),
    # Mamba-2 and attention side by side; embeddings that are scaled outside their module.
    "falcon_h1": tiny("falcon_h1", head_dim=12, mamba_d_ssm=96, mamba_n_heads=6, mamba_d_head=16, mamba_n_groups=2,
        mamba_d_state=10, mamba_d_conv=4, mamba_chunk_size=16, mamba_rms_norm=False, embedding_multiplier=5.65,
        lm_head_multiplier=0.5, key_multiplier=0.4, attention_in_multiplier=0.5, attention_out_multiplier=0.7,
        ssm_in_multiplier=1.25, ssm_out_multiplier=0.24, ssm_multipliers=[0.35, 0.25, 0.12, 0.5, 0.36],
        mlp_multipliers=[0.88, 0.4], classes=6, slots=("mamba.A_log", "self_attn.q_proj.weight")),
    # Mamba-2, attention, an MLP or experts in a layer each: layers without a mixer.
    "nemotron_h": tiny("nemotron_h", sizes={**_SIZES, "num_hidden_layers": 6}, hybrid_override_pattern="M-M*-E",
        head_dim=12, mamba_num_heads=6, mamba_head_dim=16, n_groups=2, ssm_state_size=10, conv_kernel=4, chunk_size=16,
        n_routed_experts=4, moe_intermediate_size=24, moe_shared_expert_intermediate_size=24, classes=10,
        slots=("mixer.A_log", "mixer.D")),
    # Attention in chunks, of which the first is computed; every fourth layer without RoPE.
    "llama4_text": tiny("llama4_text", sizes={**_SIZES, "num_hidden_layers": 4}, head_dim=12, intermediate_size_mlp=64,
        num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=2, attention_chunk_size=128, classes=7,
        slots=("feed_forward.experts.gate_up_proj", "feed_forward.router.weight")),
    "phimoe": tiny("phimoe", sliding_window=WINDOW, windows=(WINDOW,), num_local_experts=4, num_experts_per_tok=2),
}  # fmt: skip


def in_eights(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the same family with heads in steps of 8, which fused attention takes."""
    if (
        config["model_type"] == "phi3" and "rope_parameters" in config
    ):  # with a factor for each pair of a head's numbers
        return config
    heads = {"head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    sizes = heads if "head_dim" in config else heads | {"hidden_size": 64, "n_embd": 64}
    return config | {key: size for key, size in sizes.items() if key in config}


# Layers with a state, which several ranks and TensorRT refuse by name (test_state_layers.py).
WITH_STATES = ("lfm2", "qwen3_5_text", "bamba", "falcon_h1", "nemotron_h")
# Attention with sinks, which several ranks refuse by name (test_sinks.py).
WITH_SINKS = ("gpt_oss", "granite_swa")


def some_families(*always: str, states: bool = False, sinks: bool = True) -> list[Any]:
    """All families as parameters, those with states and sinks if asked for; those but `always` are long.

    To trace one takes longer than all that a test does with it, and each trace is made once a test run. So tests take
    the same few: llama (biases), gpt2 (learned positions, transposed weights), gemma2 (windows, caps, norms around
    branches), phi3 (fused weights), gpt_neox (branches side by side), mixtral (experts).
    """
    left_out = (() if states else WITH_STATES) + (() if sinks else WITH_SINKS)
    chosen = [name for name in FAMILIES if name not in left_out]
    return some(chosen, *(always or [None]))
