"""The options of tensorrt_llm/config.pbtxt, as options of `lockstep serve`.

As users of the TensorRT-LLM backend set them. Some are taken. Others have one meaning here: a value that asks for it,
or for nothing, is accepted, and any other is refused. What only says how that backend does its work is ignored. A name
that is in no table is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.serve.triton_repository.pbtxt import Message, parse

# The defaults are what the server does by itself.
TAKEN = {
    "batch_scheduler_policy": "guaranteed_no_evict",
    "kv_cache_free_gpu_mem_fraction": "0.9",
    "enable_kv_cache_reuse": "true",
    "exclude_input_in_output": "false",
    "cancellation_check_period_ms": "100",
    "stats_check_period_ms": "1000",
}
_POLICIES = {"guaranteed_no_evict": "guaranteed", "max_utilization": "optimistic"}
ACCEPTED = {
    "gpt_model_type": ("inflight_fused_batching", "inflight_batching"),
    "max_beam_width": ("1",),
    "max_tokens_in_paged_kv_cache": (),
    "max_attention_window_size": (),
    "sink_token_length": ("0",),
    "kv_cache_host_memory_bytes": ("0",),
    "gpu_weights_percent": ("1", "1.0"),
    "gpu_device_ids": ("0",),
    "participant_ids": (),
    "num_nodes": ("1",),
    "decoding_mode": ("auto", "top_k", "top_p", "top_k_top_p"),
    "medusa_choices": (),
    "eagle_choices": (),
    "lookahead_window_size": (),
    "lookahead_ngram_size": (),
    "lookahead_verification_set_size": (),
    "speculative_decoding_fast_logits": ("0", "false"),
    "encoder_model_path": (),
    "cross_kv_cache_fraction": (),
    "lora_cache_optimal_adapter_size": (),
    "lora_cache_max_adapter_size": (),
    "lora_cache_gpu_memory_fraction": (),
    "lora_cache_host_memory_bytes": (),
    "lora_prefetch_dir": (),
    "guided_decoding_backend": (),
    "normalize_log_probs": ("false",),
}
IGNORED = frozenset(
    (
        "FORCE_CPU_ONLY_INPUT_TENSORS",
        "gpt_model_path",
        "engine_dir",
        "tokenizer_dir",
        "xgrammar_tokenizer_info_path",
        "executor_worker_path",
        "enable_trt_overlap",
        "enable_chunked_context",
        "enable_kv_cache_onboard_blocks",
        "kv_cache_onboard_blocks",
        "enable_context_fmha_fp32_acc",
        "multi_block_mode",
        "cuda_graph_mode",
        "cuda_graph_cache_size",
        "max_queue_delay_microseconds",
        "max_num_sequences",
        "recv_poll_period_ms",
        "iter_stats_max_iterations",
        "request_stats_max_iterations",
    )
)
OWN = frozenset(("lockstep_socket", "lockstep_command", "lockstep_start_seconds"))
_NOTHING = ("", "none")


def parameters_of(config: Message) -> dict[str, str]:
    """Return the parameters of a model's configuration."""
    found = {}
    for entry in config.get("parameters", []):
        values = [str(text) for value in entry.get("value", []) for text in value.get("string_value", [])]
        found[str(entry.get("key", [""])[0])] = values[0] if values else ""
    return found


def read_config(path: Path) -> Message:
    """Return the configuration of a model.

    Raises InputError.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected a model's configuration, found none that can be read: {error}") from None
    if "${" in text:
        line = text.count("\n", 0, text.index("${")) + 1
        raise InputError(f"{path}, line {line}: expected a value, found a '${{' that was not filled in; fill it in")
    return parse(text, str(path))


def serve_options(repository: Path) -> dict[str, Any]:
    """Return the options of `lockstep serve` that `repository` sets, by name.

    Raises InputError for one that is refused.
    """
    path = repository / "tensorrt_llm" / "config.pbtxt"
    config = read_config(path)
    return options_of(config, str(path))


def options_of(config: Message, where: str) -> dict[str, Any]:
    """Return `serve_options` of a configuration that was read."""
    given = parameters_of(config)
    check_known(given, where)
    values = {name: given.get(name) or default for name, default in TAKEN.items()}
    name = "enable_kv_cache_reuse"
    found: dict[str, Any] = {"no_prefix_caching": not _bool(where, name, values[name])}
    _bool(where, "exclude_input_in_output", values["exclude_input_in_output"])
    for name in ("cancellation_check_period_ms", "stats_check_period_ms"):
        if not values[name].isdecimal() or not int(values[name]):
            raise InputError(f"{where}: {name}: expected milliseconds from 1 on, found {values[name]!r}")
    policy = values["batch_scheduler_policy"]
    if policy not in _POLICIES:
        raise InputError(f"{where}: batch_scheduler_policy: expected {' or '.join(_POLICIES)}, found {policy!r}")
    found["admission"] = _POLICIES[policy]
    fraction = given.get("kv_cache_free_gpu_mem_fraction") or ""
    if fraction not in (*_NOTHING, TAKEN["kv_cache_free_gpu_mem_fraction"]):  # by itself, a CPU takes less
        found["kv_bytes"] = _fraction(where, fraction)
    if size := _queue_size(config, where):
        found["max_queue"] = size
    return found


def check_known(given: Mapping[str, str], where: str) -> None:
    """Raise InputError for a parameter that is unknown or not supported.

    Not supported is a value that asks for what this server cannot do.
    """
    for name, value in given.items():
        if name in ACCEPTED and value not in _NOTHING and value not in ACCEPTED[name]:
            expected = " or ".join(map(repr, ACCEPTED[name])) or "no value"
            raise InputError(
                f"{where}: {name}: expected {expected}, as this server has nothing else, found {value!r}; leave it out"
            )
        if name not in TAKEN and name not in ACCEPTED and name not in IGNORED and name not in OWN:
            raise InputError(f"{where}: expected parameters that this server knows, found {name!r}; leave it out")


def _bool(where: str, name: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise InputError(f"{where}: {name}: expected true or false, found {value!r}")
    return value.lower() == "true"


def _fraction(where: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < 1:
        raise InputError(f"{where}: kv_cache_free_gpu_mem_fraction: expected a number between 0 and 1, found {value!r}")
    return number


def _queue_size(config: Message, where: str) -> int:
    """Return max_queue_size of the queue policy; 0 where there is none.

    0 is no limit of Triton's own.
    """
    for batching in config.get("dynamic_batching", []):
        for policy in batching.get("default_queue_policy", []):
            for size in policy.get("max_queue_size", []):
                if type(size) is not int or size < 0:
                    raise InputError(f"{where}: max_queue_size: expected a number from 0 on, found {size}")
                return size
    return 0
