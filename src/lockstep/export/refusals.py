"""The reasons why models cannot be split, in the words of what they do.

They are for the one line of a refusal.

In: a model whose trace or parity check failed. Out: what its config and modules are known to do that a split form over
a KV cache does not have, if anything. Nothing is refused here: a model that traces and agrees with transformers is
taken, whatever its modules are called.
"""

from __future__ import annotations

import re
import sys

from transformers import PreTrainedConfig, PreTrainedModel

_RECURRENT = re.compile(
    r"mamba|rwkv|recurrentblock|rglru|deltanet|deltaattention|linearattention|lightningattention|[ms]lstm|retention|conv1d_state",
    re.IGNORECASE,
)
_WITHOUT = "Gemma 3, and Gemma 4 of 26B and 31B, have layers that do not"
# Functions of recurrent layers that can be split (state_hook.py).
_SPLIT = ("torch_chunk_gated_delta_rule", "mamba2_chunk_scan")
_OWN_SCHEMES = {"bloom"}  # ALiBi without a setting that says so


def known_reason(model: PreTrainedModel) -> str | None:
    """Return what the model is known to do that cannot be split; None when nothing is known."""
    config = model.config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        return (
            "it is the decoder of an encoder-decoder, with attention to an encoder's tokens; only "
            "decoders of their own can be split"
        )
    if own := _of_the_token(config):
        return f"its layers read {' and '.join(own)}, which no block between two attentions has; {_WITHOUT}"
    if getattr(config, "cross_attention_layers", None):
        return "some of its layers attend to images (cross_attention_layers), which no KV cache of text holds"
    kinds = {type(module) for module in model.modules() if _RECURRENT.search(type(module).__name__)}
    recurrent = sorted(
        kind.__name__ for kind in kinds if not any(hasattr(sys.modules[kind.__module__], name) for name in _SPLIT)
    )
    if recurrent:
        return f"it has recurrent layers ({', '.join(recurrent[:2])}), whose state of all tokens so far is no KV cache"
    if _alibi(config):
        return "its attention adds ALiBi biases (alibi) to the scores; only rotary and learned positions can be split"
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        return (
            "it is an encoder whose embeddings count positions from padding_idx + 1 and leave padding "
            "out; positions must count from 0"
        )
    if not any(hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS") for module in model.modules()):
        return (
            "it computes attention in code of its own, not through transformers' attention interface, "
            "where a model is cut"
        )
    return None


def _of_the_token(config: PreTrainedConfig) -> list[str]:
    """Return what layers read beside the stream of the layer before and their own keys and values."""
    shared = getattr(config, "num_kv_shared_layers", 0)
    width = getattr(config, "hidden_size_per_layer_input", 0)
    return [
        *(["an embedding of each token for each layer (hidden_size_per_layer_input)"] if width else []),
        *(["keys and values of earlier layers (num_kv_shared_layers)"] if shared else []),
    ]


def _alibi(config: PreTrainedConfig) -> bool:
    inner = getattr(config, "attn_config", None)
    return config.model_type in _OWN_SCHEMES or bool(getattr(config, "alibi", False) or getattr(inner, "alibi", False))
