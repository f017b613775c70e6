"""The `config.json` of a model in a GGUF file.

In: the file's metadata, and which tensors it has. Out: the settings of transformers' config. A GGUF file says less than
a config.json, and some of it in llama.cpp's code: what is not known to mean the same here is refused by name, for a
model that is nearly right answers, and wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

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
_SAME = {
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
# How the first models with llama3's RoPE were made; a file holds the divisors that came of it.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPE_DIVISORS = "rope_freqs.weight"


class _Keys:
    """The metadata of the architecture; what was not asked for is left in `unread`."""

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
        """Take a key that says nothing new, or nothing at all."""
        value = self.take(name, allowed[0])
        if value not in allowed:
            raise self.refused(name, value)

    def refused(self, name: str, value: Any) -> InputError:
        return InputError(
            f"{self.path}: expected a model that transformers computes as llama.cpp does; found {self.prefix}.{name}"
            f" {_shown(value)}, which is not read; take the model's own checkpoint"
        )


def config_of(file: GgufFile, rope_divisors: Callable[[], np.ndarray]) -> dict[str, Any]:
    """Return the content of the model's `config.json`.

    rope_divisors: reads the tensor `rope_freqs.weight`, where there is one. Raises InputError for an architecture that
    is not known, and for settings that are not read.
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
    config |= {name: keys.need(key) for key, name in _SAME.items()}
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = keys.take("attention.head_count_kv", heads)
    if not isinstance(config["num_key_value_heads"], int):
        raise keys.refused("attention.head_count_kv", config["num_key_value_heads"])
    config["head_dim"] = keys.take("attention.key_length", config["hidden_size"] // heads)
    config["vocab_size"] = tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config |= _rope(file, keys, config, rope_divisors if ROPE_DIVISORS in tensors else None)
    config |= _own(file.architecture, keys, config)
    keys.expect("vocab_size", config["vocab_size"])
    keys.expect("attention.value_length", config["head_dim"])
    keys.expect("attention.causal", True)
    keys.expect("expert_count", 0)
    keys.expect("expert_used_count", 0)
    if keys.unread:
        name = min(keys.unread)
        raise keys.refused(name, keys.unread[name])
    # None where the file has none: a class may have the number of another vocabulary.
    config |= {name: file.metadata.get(f"tokenizer.ggml.{token}_token_id") for name, token in _TOKENS.items()}
    return config


def _rope(file: GgufFile, keys: _Keys, config: dict[str, Any], divisors: Callable | None) -> dict[str, Any]:
    keys.expect("rope.dimension_count", config["head_dim"])
    theta = keys.take("rope.freq_base", 10000.0)
    scaling: dict[str, Any] = {"rope_type": "default"}
    kind = keys.take("rope.scaling.type", "none")
    if kind == "linear" and file.architecture != "gemma3":
        scaling = {"rope_type": "linear", "factor": keys.need("rope.scaling.factor")}
    elif kind != "none":
        raise keys.refused("rope.scaling.type", kind)
    keys.take("rope.scaling.original_context_length")  # of no use where nothing is scaled, or all alike
    if divisors is not None:
        scaling = _llama3(file, divisors(), theta, config["head_dim"])
    if file.architecture == "gemma3":
        keys.expect("rope.freq_base_swa", 10000.0)
        return {
            "rope_parameters": {
                "full_attention": {"rope_theta": theta, **scaling},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            }
        }
    return {"rope_parameters": {"rope_theta": theta, **scaling}}


def _llama3(file: GgufFile, divisors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the RoPE of type llama3 that gives the divisors of frequencies in the file.

    They are its factor for long waves, 1 for short ones, and between these a blend
    (transformers' `_compute_llama3_parameters`).
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


def _own(architecture: str, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that only some architectures have."""
    window = keys.take("attention.sliding_window", 0)
    if architecture in ("gemma2", "gemma3"):
        deepest = config["num_hidden_layers"] == _SCALED_BY_HIDDEN[architecture]
        scale = config["hidden_size"] // config["num_attention_heads"] if deepest else config["head_dim"]
        own = {"sliding_window": window or 4096, "query_pre_attn_scalar": scale}
        if architecture == "gemma2":
            own |= {name: keys.take(name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
        else:
            keys.expect("attention.sliding_window_pattern", 6)
        return own
    if architecture == "phi3":
        return {"sliding_window": window or None}
    if window:
        raise keys.refused("attention.sliding_window", window)
    return {}


def _shortest(value: Any) -> float:
    """Return the shortest decimal number that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _shown(value: Any) -> str:
    text = "none" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
