"""Freeze model parts that change with length: RoPE frequencies, attention chunks, scales of queries.

`longrope` takes other frequencies for all positions as soon as one position of the batch exceeds
`original_max_position_embeddings`, and `dynamic` beyond `max_position_embeddings`. transformers' `generate` then drops
its KV cache and recomputes every key, for all requests of a batch. A step over a cache of rotated keys cannot do that,
and one request must not change another: the model here has its first frequencies, and is limited to the positions that
have them.

The same holds for attention in chunks, and for queries that are scaled in steps of positions, which models count
themselves (`config.model_config.first_chunk`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers

from lockstep.config.model_config import first_chunk, scales_queries
from lockstep.errors import InputError
from lockstep.export.float64_constants import float64_constants


def freeze_ropes(model: transformers.PreTrainedModel) -> None:
    """Let every module compute as it does below the limit of `position_limit`, for text alone."""
    modules: Iterator[Any] = model.modules()  # those with a rope_type are of any class
    for module in modules:
        _freeze_rope_type(module)
        _freeze_frequencies(module)
        _use_one_axis(module)
        if scales_queries(vars(module).get):
            module.attn_temperature_tuning = False


def _use_one_axis(module: Any) -> None:
    """Let a rotary module of three axes read one, as for text, if its frequencies are then plain RoPE's."""
    recompose = getattr(module, "recomposition_frequencies", None)
    inverse = getattr(module, "inv_freq", None)
    if recompose is None or inverse is None or not isinstance(getattr(module, "mrope_section", None), Sequence):
        return
    frequencies = torch.rand(1, 2, inverse.shape[-1], generator=torch.Generator().manual_seed(0))
    if torch.equal(recompose(frequencies.repeat(3, 1, 1)[:, None]), _first_axis(frequencies[None])):
        module.recomposition_frequencies = _first_axis


def _first_axis(frequencies: torch.Tensor) -> torch.Tensor:
    """Return the first axis of [axes, 1, num_tokens, head_dim / 2], for both halves of a head."""
    return torch.cat((frequencies[0], frequencies[0]), dim=-1)


def _freeze_rope_type(module: Any) -> None:
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, str) and _changes_with_length(rope_type):
        module.rope_type = "default"
    elif isinstance(rope_type, Mapping):
        types = dict(rope_type)
        module.rope_type = types | {layer: "default" for layer, name in types.items() if _changes_with_length(name)}
    else:
        return
    parameters = module.config.rope_parameters
    # phimoe: its code chooses a factor of cos and sin by length
    if "short_mscale" in parameters:
        module.config = copy.copy(module.config)
        module.config.rope_parameters = {
            **parameters,
            "rope_type": "default",
            "attention_factor": parameters["short_mscale"],
        }


def _freeze_frequencies(module: Any) -> None:
    """Compute frequencies once: folded by another library a power may differ in its last bit."""
    if not _computes_in_each_call(module):
        return
    with float64_constants():
        inv_freq, scaling = module.rope_init_fn(module.config)
    module.inv_freq = inv_freq
    module.attention_scaling = scaling
    module.rope_init_fn = lambda *_, **__: (inv_freq, scaling)  # what each call of `forward` asks for


def define_frequencies(model: transformers.PreTrainedModel) -> None:
    """Let rotary modules that compute their frequencies in each call (phimoe) do so in float64."""
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if _computes_in_each_call(module):
            module.rope_init_fn = float64_constants()(module.rope_init_fn)


def _computes_in_each_call(module: Any) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "rope_init_fn" in code.co_names


def _changes_with_length(rope_type: str) -> bool:
    return rope_type == "longrope" or "dynamic" in rope_type


def position_limit(config: transformers.PreTrainedConfig) -> tuple[int | None, str | None]:
    """Return the number of positions of a model (None: unknown), and why it is below the config's."""
    text = config.get_text_config()
    max_positions = getattr(text, "max_position_embeddings", None)
    limits: list[tuple[int, str | None]] = []
    if isinstance(max_positions, int):
        limits.append((max_positions, None))
    limits += first_chunk(text.to_dict())
    for parameters in rope_settings(text):
        rope_type = parameters.get("rope_type", "default")
        if rope_type == "longrope":
            reason = "original_max_position_embeddings: beyond it longrope changes the keys of all positions"
            limits.append((int(parameters["original_max_position_embeddings"]), reason))
        elif _changes_with_length(rope_type) and not limits:
            raise InputError(
                f"model type {config.model_type!r} cannot be split: rope type {rope_type} changes "
                f"with length, from a max_position_embeddings that config.json does not name"
            )
    return min(limits, key=lambda limit: limit[0], default=(None, None))


def rope_settings(config: transformers.PreTrainedConfig) -> list[Mapping[str, Any]]:
    """Return a text config's RoPE settings: none, one mapping, or one for each layer type."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, Mapping):
        return []
    return [value for value in rope.values() if isinstance(value, Mapping)] or [rope]
