"""What changes with length, held to what it is first: RoPE's frequencies, chunks of attention, scales of queries.

`longrope` takes other frequencies for all positions as soon as one position of the batch passes
`original_max_position_embeddings`, and `dynamic` beyond `max_position_embeddings`. transformers' `generate` then drops
its KV cache and computes every key anew, for all requests of a batch alike. A step over a cache of rotated keys cannot
do that, and one request must not change another: the first frequencies are the model here, and the positions that have
them are its limit.

So it is with attention in chunks, and with queries that are scaled in steps of positions, which models count themselves
(`config.model_config.first_chunk`).
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
    """Let every module compute what it does up to the limit of `position_limit`, for text alone."""
    modules: Iterator[Any] = model.modules()  # those with a rope_type are of any class
    for module in modules:
        _freeze_kind(module)
        _keep_frequencies(module)
        _take_one_axis(module)
        if scales_queries(vars(module).get):
            module.attn_temperature_tuning = False


def _take_one_axis(module: Any) -> None:
    """Let a rotary module of three axes read one, as of text, where its frequencies are then plain RoPE's."""
    recompose = getattr(module, "recomposition_frequencies", None)
    inverse = getattr(module, "inv_freq", None)
    if recompose is None or inverse is None or not isinstance(getattr(module, "mrope_section", None), Sequence):
        return
    one = torch.rand(1, 2, inverse.shape[-1], generator=torch.Generator().manual_seed(0))
    if torch.equal(recompose(one.repeat(3, 1, 1)[:, None]), _plain(one[None])):
        module.recomposition_frequencies = _plain


def _plain(frequencies: torch.Tensor) -> torch.Tensor:
    """Return the first axis of [axes, 1, num_tokens, head_dim / 2], for both halves of a head."""
    return torch.cat((frequencies[0], frequencies[0]), dim=-1)


def _freeze_kind(module: Any) -> None:
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, str) and _changes(kinds):
        module.rope_type = "default"
    elif isinstance(kinds, Mapping):
        module.rope_type = {layer: "default" if _changes(kind) else kind for layer, kind in kinds.items()}
    else:
        return
    parameters = module.config.rope_parameters
    # phimoe: a factor of cos and sin for each of the two sets, chosen in its own code
    if "short_mscale" in parameters:
        module.config = copy.copy(module.config)
        module.config.rope_parameters = {
            **parameters,
            "rope_type": "default",
            "attention_factor": parameters["short_mscale"],
        }


def _keep_frequencies(module: Any) -> None:
    """Compute frequencies once: folded by another library a power may differ in its last bit."""
    if _computes_in_each_call(module):
        with float64_constants():
            frequencies = module.rope_init_fn(module.config)
        module.inv_freq, module.attention_scaling = frequencies
        module.rope_init_fn = lambda *_, **__: frequencies


def define_frequencies(model: transformers.PreTrainedModel) -> None:
    """Let rotary modules that compute their frequencies in each call (phimoe) do so in float64."""
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if _computes_in_each_call(module):
            module.rope_init_fn = float64_constants()(module.rope_init_fn)


def _computes_in_each_call(module: Any) -> bool:
    return "rope_init_fn" in getattr(inspect.unwrap(type(module).forward), "__code__", _NO_CODE).co_names


_NO_CODE = (lambda: None).__code__


def _changes(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind


def position_limit(config: transformers.PreTrainedConfig) -> tuple[int | None, str | None]:
    """Return how many positions a model has (None: it does not say), and why they are fewer than it names."""
    text = config.get_text_config()
    known = getattr(text, "max_position_embeddings", None)
    limits: list[tuple[int, str | None]] = [(known, None)] if isinstance(known, int) else []
    limits += first_chunk(text.to_dict())
    for parameters in rope_settings(text):
        kind = parameters.get("rope_type", "default")
        if kind == "longrope":
            limits.append(
                (
                    int(parameters["original_max_position_embeddings"]),
                    "original_max_position_embeddings: beyond it longrope changes the keys of all positions",
                )
            )
        elif _changes(kind) and not limits:
            raise InputError(
                f"model type {config.model_type!r} cannot be split: rope type {kind} changes "
                f"with length, from a max_position_embeddings that config.json does not name"
            )
    return min(limits, key=lambda limit: limit[0], default=(None, None))


def rope_settings(config: transformers.PreTrainedConfig) -> list[Mapping[str, Any]]:
    """Return a text config's RoPE settings: none, one mapping, or one for each layer type."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, Mapping):
        return []
    return [value for value in rope.values() if isinstance(value, Mapping)] or [rope]
