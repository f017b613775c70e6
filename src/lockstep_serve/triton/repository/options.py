"""The options of tensorrt_llm/config.pbtxt, which users of the TensorRT-LLM backend set, as those of `lockstep serve`.

TAKEN ones have an option here. ACCEPTED ones have only the listed values. IGNORED ones only say how that backend works.
Other values and other names are refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep_serve.triton.model_config import parameters_of, read_config

# The defaults are the server's behaviour without options.
TAKEN = {
    "batch_scheduler_policy": "guaranteed_no_evict",
    "kv_cache_free_gpu_mem_fraction": "0.9",
    "enable_kv_cache_reuse": "true",
    "exclude_input_in_output": "false",
    "cancellation_check_period_ms": "100",
    "stats_check_period_ms": "1000",
}
_POLICIES = {"guaranteed_no_evict": "guaranteed", "max_utilization": "optimistic"}
# NAME=VALUE,...: the values that are accepted; no value always is.
_ACCEPTED = """
    gpt_model_type=inflight_fused_batching,inflight_batching decoding_mode=auto,top_k,top_p,top_k_top_p
    max_beam_width=1 num_nodes=1 gpu_device_ids=0 sink_token_length=0 kv_cache_host_memory_bytes=0
    gpu_weights_percent=1,1.0 speculative_decoding_fast_logits=0,false normalize_log_probs=false
    max_tokens_in_paged_kv_cache max_attention_window_size participant_ids medusa_choices eagle_choices
    lookahead_window_size lookahead_ngram_size lookahead_verification_set_size encoder_model_path
    cross_kv_cache_fraction guided_decoding_backend lora_cache_optimal_adapter_size lora_cache_max_adapter_size
    lora_cache_gpu_memory_fraction lora_cache_host_memory_bytes lora_prefetch_dir
    triton_backend=tensorrtllm,python logits_datatype=type_fp32 accumulate_tokens=false skip_special_tokens=true
    add_special_tokens=true tensorrt_llm_model_name=tensorrt_llm tensorrt_llm_draft_model_name tokenizer_type=auto
    multimodal_encoders_name multimodal_model_path max_num_images
"""
_IGNORED = """
    FORCE_CPU_ONLY_INPUT_TENSORS gpt_model_path engine_dir tokenizer_dir hf_model_path xgrammar_tokenizer_info_path
    executor_worker_path enable_trt_overlap enable_chunked_context enable_kv_cache_onboard_blocks
    kv_cache_onboard_blocks enable_context_fmha_fp32_acc multi_block_mode cuda_graph_mode cuda_graph_cache_size
    max_queue_delay_microseconds max_num_sequences recv_poll_period_ms iter_stats_max_iterations
    request_stats_max_iterations encoder_input_features_data_type prompt_embedding_table_data_type
    preprocessing_instance_count postprocessing_instance_count bls_instance_count
"""
ACCEPTED = {entry.partition("=")[0]: entry.partition("=")[2].split(",") for entry in _ACCEPTED.split()}
IGNORED = frozenset(_IGNORED.split())
# What `fill_template.py` calls a parameter of another name, of config.pbtxt or of `lockstep triton`.
RENAMED = {"batching_strategy": "gpt_model_type", "encoder_engine_dir": "encoder_model_path"}
OWN = frozenset(("lockstep_socket", "lockstep_command", "lockstep_start_seconds"))
_SWITCHES = dict.fromkeys(("enable_kv_cache_reuse", "exclude_input_in_output"), ("true", "false"))
_CHOICES = {**ACCEPTED, **_SWITCHES, "batch_scheduler_policy": _POLICIES}
_NUMBER = re.compile(r"[0-9]*\.?[0-9]+(e-?[0-9]+)?")
_BELOW = {"kv_cache_free_gpu_mem_fraction": 1}
_BELOW |= dict.fromkeys(("cancellation_check_period_ms", "stats_check_period_ms", "lockstep_start_seconds"), 10**9)


def template_values(pairs: Sequence[str], max_batch_size: int) -> tuple[dict[str, str], dict[str, Any]]:
    """Return parameters of config.pbtxt, and settings of a `Repository`, of K:V or K=V as fill_template.py takes them.

    A comma of a value is `\\,`, as there. max_batch_size: of the engines, which is the models'. Raises InputError.
    """
    parameters: dict[str, str] = {}
    settings: dict[str, Any] = {}
    for pair in filter(None, re.split(r"(?<!\\),", ",".join(pairs))):
        name, *values = re.split("[:=]", pair.replace("\\,", ","), maxsplit=1)
        value = "".join(values)
        if name == "triton_max_batch_size":
            if value != str(max_batch_size):
                raise InputError(
                    f"--set {name}: expected {max_batch_size}, as the engines have, found {value!r}; set "
                    "limits.max_batch_size of the config and run it, or leave it out"
                )
        elif name == "decoupled_mode":
            if value.lower() not in ("true", "false"):
                raise InputError(f"--set {name}: expected true or false, found {value!r}; correct it")
            settings["decoupled"] = value.lower() == "true"
        elif name == "max_queue_size":
            if not value.isdecimal():
                raise InputError(f"--set {name}: expected a number, found {value!r}; correct it")
            settings["max_queue"] = int(value)
        else:
            parameters[RENAMED.get(name, name)] = value
    return parameters, settings


def serve_options(repository: Path) -> dict[str, Any]:
    """Return the options of `lockstep serve` that a repository sets. Raises InputError for one refused."""
    where = repository / "tensorrt_llm" / "config.pbtxt"
    config = read_config(where)
    unknown = sorted(config.parameters.keys() - _CHOICES.keys() - _BELOW.keys() - IGNORED - OWN)
    if unknown:
        raise InputError(f"{where}: expected parameters that this server knows, found {unknown[0]!r}; leave it out")
    values = TAKEN | parameters_of(config)
    for name, value in values.items():
        if name in _CHOICES and value.lower() not in _CHOICES[name]:
            expected = (" or ".join(_CHOICES[name]) or "no value") + " (this server supports nothing else)"
        elif name in _BELOW and not (_NUMBER.fullmatch(value) and 0 < float(value) < _BELOW[name]):
            expected = f"a number above 0 and below {_BELOW[name]}"
        else:
            continue
        instead = "set kv_cache_free_gpu_mem_fraction" if name == "max_tokens_in_paged_kv_cache" else "correct it"
        raise InputError(f"{where}: {name}: expected {expected}, found {value!r}; {instead}, or leave it out")
    options: dict[str, Any] = {"no_prefix_caching": values["enable_kv_cache_reuse"].lower() == "false"}
    options["admission"] = _POLICIES[values["batch_scheduler_policy"].lower()]
    share = values["kv_cache_free_gpu_mem_fraction"]
    if share != TAKEN["kv_cache_free_gpu_mem_fraction"]:  # the server's default is less on a CPU
        options["kv_bytes"] = float(share)
    max_queue = config.dynamic_batching.default_queue_policy.max_queue_size
    if max_queue:  # 0: Triton has no limit
        options["max_queue"] = max_queue
    return options
