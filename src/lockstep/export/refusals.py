"""The known reasons why a model cannot be split, for the error message.

In: a model whose trace or parity check failed. Out: the property of its config or modules that a split form over a KV
cache does not support, if known. This module rejects nothing itself: a model that traces and agrees with transformers
is accepted, whatever the names of its modules.
"""

from __future__ import annotations

import re
import sys
from types import ModuleType

import torch
from transformers import PreTrainedConfig, PreTrainedModel

_RECURRENT = re.compile(
    r"mamba|rwkv|recurrentblock|rglru|deltanet|deltaattention|linearattention|lightningattention|[ms]lstm|retention|conv1d_state",
    re.IGNORECASE,
)
# Functions of recurrent layers that can be split (state_hook.py).
_SPLIT_FUNCTIONS = ("torch_chunk_gated_delta_rule", "mamba2_chunk_scan")
_ALIBI_TYPES = {"bloom"}  # ALiBi without a setting that says so


def known_reason(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        return (
            "it is the decoder of an encoder-decoder, with attention to an encoder's tokens; only "
            "decoder-only models can be split"
        )
    inputs = _extra_layer_inputs(config)
    if inputs:
        return (
            f"its layers read {' and '.join(inputs)}, which no block between two attentions has; Gemma 3, and Gemma 4 "
            "of 26B and 31B, have layers that do not"
        )
    if getattr(config, "cross_attention_layers", None):
        return "some of its layers attend to images (cross_attention_layers), which no KV cache of text holds"
    recurrent = sorted({type(module).__name__ for module in model.modules() if _is_unsupported_recurrence(module)})
    if recurrent:
        return f"it has recurrent layers ({', '.join(recurrent[:2])}), whose state of all tokens so far is no KV cache"
    settings = (config, getattr(config, "attn_config", None))
    if config.model_type in _ALIBI_TYPES or any(getattr(section, "alibi", False) for section in settings):
        return "its attention adds ALiBi biases (alibi) to the scores; only rotary and learned positions can be split"
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        return (
            "it is an encoder whose embeddings count positions from padding_idx + 1 and leave padding "
            "out; positions must count from 0"
        )
    if not any(hasattr(_source_module(module), "ALL_ATTENTION_FUNCTIONS") for module in model.modules()):
        return (
            "it computes attention in code of its own, not through transformers' attention interface, "
            "where a model is cut"
        )
    return None


def _source_module(module: torch.nn.Module) -> ModuleType:
    return sys.modules[type(module).__module__]


def _is_unsupported_recurrence(module: torch.nn.Module) -> bool:
    if not _RECURRENT.search(type(module).__name__):
        return False
    return not any(hasattr(_source_module(module), name) for name in _SPLIT_FUNCTIONS)


def _extra_layer_inputs(config: PreTrainedConfig) -> list[str]:
    """Return what layers read besides the previous layer's hidden state and their own keys and values."""
    inputs = []
    if getattr(config, "hidden_size_per_layer_input", 0):
        inputs.append("an embedding of each token for each layer (hidden_size_per_layer_input)")
    if getattr(config, "num_kv_shared_layers", 0):
        inputs.append("keys and values of earlier layers (num_kv_shared_layers)")
    return inputs
