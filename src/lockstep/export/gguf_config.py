"""The `config.json` of a model in a GGUF file.

In: the file's metadata, and which tensors it has. Out: the settings of transformers' config. A GGUF file says less than
a config.json, and some settings are in llama.cpp's code alone: settings that are not known to mean the same here are
rejected with the key's name, since a nearly correct model still generates wrong text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.checkpoint.source_files import shorten
from lockstep.config.gguf_file import GgufFile
from lockstep.errors import InputError

# llama.cpp's names of architectures, and transformers' of the models. Mistral is a llama there.
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
_RENAMED = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
# The depths by which llama.cpp knows the 27B models, whose scores are scaled by another size than the head's.
_SCALED_BY_HIDDEN = {"gemma2": 46, "gemma3": 62}
# The settings of the first models with llama3's RoPE; a file holds the divisors that follow from them.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPE_DIVISORS = "rope_freqs.weight"


class _Keys:
    """The metadata of the architecture; keys that were not read remain in `unread`."""

    def __init__(self, file: GgufFile) -> None:
        self.prefix = file.architecture
        self.path = file.path
        start = f"{self.prefix}."
        self.unread = {key.removeprefix(start): value for key, value in file.metadata.items() if key.startswith(start)}

    def take(self, name: str, default: Any = None) -> Any:
        value = self.unread.pop(name, default)
        return _shortest(value) if isinstance(value, float) else value

    def need(self, name: str) -> Any:
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise InputError(f"{self.path}: expected a positive {self.prefix}.{name}; found {_shown(value)}")
        return value

    def expect(self, name: str, *allowed: Any) -> None:
        """Read a key that must have one of these values, or be absent."""
        value = self.take(name, allowed[0])
        if value not in allowed:
            raise self.error(name, value)

    def error(self, name: str, value: Any) -> InputError:
        return InputError(
            f"{self.path}: expected a model that transformers computes as llama.cpp does; found {self.prefix}.{name}"
            f" {_shown(value)}, which is not read; take the model's own checkpoint"
        )


def config_of(file: GgufFile, rope_divisors: Callable[[], np.ndarray]) -> dict[str, Any]:
    """Return the content of the model's `config.json`.

    rope_divisors: reads the tensor `rope_freqs.weight`, if the file has it. Raises InputError for an unsupported
    architecture, and for settings that are not supported.
    """
    if file.architecture not in MODEL_TYPES:
        raise InputError(
            f"{file.path}: expected a GGUF model of {', '.join(sorted(MODEL_TYPES))}; found {file.architecture!r}"
        )
    keys = _Keys(file)
    tensors = {tensor.name: tensor for tensor in file.tensors}
    if "token_embd.weight" not in tensors:
        raise InputError(f"{file.path}: expected a model's tensors; found no token_embd.weight")
    config: dict[str, Any] = {"model_type": MODEL_TYPES[file.architecture], "dtype": "float32"}
    config |= {name: keys.need(key) for key, name in _RENAMED.items()}
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = keys.take("attention.head_count_kv", heads)
    if not isinstance(config["num_key_value_heads"], int):
        raise keys.error("attention.head_count_kv", config["num_key_value_heads"])
    config["head_dim"] = keys.take("attention.key_length", config["hidden_size"] // heads)
    config["vocab_size"] = tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config |= _rope(file, keys, config, rope_divisors() if ROPE_DIVISORS in tensors else None)
    config |= _architecture_settings(file.architecture, keys, config)
    keys.expect("vocab_size", config["vocab_size"])
    keys.expect("attention.value_length", config["head_dim"])
    keys.expect("attention.causal", True)
    keys.expect("expert_count", 0)
    keys.expect("expert_used_count", 0)
    if keys.unread:
        name = min(keys.unread)
        raise keys.error(name, keys.unread[name])
    # An explicit None where the file has no id: the class's default may belong to another vocabulary.
    config |= {name: file.metadata.get(f"tokenizer.ggml.{token}_token_id") for name, token in _TOKENS.items()}
    return config


def _rope(file: GgufFile, keys: _Keys, config: dict[str, Any], divisors: np.ndarray | None) -> dict[str, Any]:
    keys.expect("rope.dimension_count", config["head_dim"])
    theta = keys.take("rope.freq_base", 10000.0)
    parameters: dict[str, Any] = {"rope_type": "default"}
    scaling_type = keys.take("rope.scaling.type", "none")
    if scaling_type == "linear" and file.architecture != "gemma3":
        parameters = {"rope_type": "linear", "factor": keys.need("rope.scaling.factor")}
    elif scaling_type != "none":
        raise keys.error("rope.scaling.type", scaling_type)
    keys.take("rope.scaling.original_context_length")  # only matters to types that are not supported
    if divisors is not None:
        parameters = _llama3(file, divisors, theta, config["head_dim"])
    if file.architecture == "gemma3":
        keys.expect("rope.freq_base_swa", 10000.0)
        return {
            "rope_parameters": {
                "full_attention": {"rope_theta": theta, **parameters},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            }
        }
    return {"rope_parameters": {"rope_theta": theta, **parameters}}


def _llama3(file: GgufFile, divisors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the RoPE of type llama3 that gives the frequency divisors in the file.

    They are its factor for long waves, 1 for short ones, and a blend in between (transformers'
    `_compute_llama3_parameters`).
    """
    frequencies = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    factor = _shortest(divisors.max())
    length = _LLAMA3["original_max_position_embeddings"]
    waves = 2 * np.pi / frequencies
    low = _LLAMA3["low_freq_factor"]
    high = _LLAMA3["high_freq_factor"]
    blend = np.clip((length / waves - low) / (high - low), 0, 1)
    expected = 1 / ((1 - blend) / factor + blend)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-5, atol=0):  # they are float32
        raise InputError(
            f"{file.path}: expected {ROPE_DIVISORS} of a RoPE of type llama3 with {_LLAMA3}; found others, which are"
            " not read; take the model's own checkpoint"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _architecture_settings(architecture: str, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    window = keys.take("attention.sliding_window", 0)
    if architecture in ("gemma2", "gemma3"):
        scale = config["head_dim"]
        if config["num_hidden_layers"] == _SCALED_BY_HIDDEN[architecture]:
            scale = config["hidden_size"] // config["num_attention_heads"]
        settings = {"sliding_window": window or 4096, "query_pre_attn_scalar": scale}
        if architecture == "gemma2":
            for name in ("attn_logit_softcapping", "final_logit_softcapping"):
                settings[name] = keys.take(name)
        else:
            keys.expect("attention.sliding_window_pattern", 6)
        return settings
    if architecture == "phi3":
        return {"sliding_window": window or None}
    if window:
        raise keys.error("attention.sliding_window", window)
    return {}


def _shortest(value: Any) -> float:
    """Return the shortest decimal number that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _shown(value: Any) -> str:
    return "none" if value is None else shorten(value)
