"""Keys and values of a cache in fp8 in PyTorch, as the backend `cuda` keeps them. Needs torch and transformers.

A model in; the same model out, whose attention sees keys, with RoPE, and values as e4m3 numbers with a scale for each
token and head: the smallest power of two, from 2^-22 to 2^7, with which none is beyond 448.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedModel

_LARGEST = 448.0


def rounded(heads: torch.Tensor) -> torch.Tensor:
    """Round [..., head_dim] to the numbers that the cache holds."""
    fraction, exponent = torch.frexp(heads.float().abs().amax(-1, keepdim=True))
    # fraction is from 0.5 on; 448 is 0.875 * 2^9
    scale = torch.exp2(torch.clamp(exponent - 9 + (fraction > _LARGEST / 512), -22, 7).float())
    codes = torch.clamp(heads.float() / scale, -_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(heads.dtype)


class RoundedCache(DynamicCache):
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().update(rounded(key_states), rounded(value_states), *args, **kwargs)


def round_kv_cache(model: PreTrainedModel) -> RemovableHandle:
    """Let a model of transformers keep rounded keys and values, also where it is asked for no cache."""

    def before(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = (
            {} if kwargs.get("past_key_values") is not None else {"past_key_values": RoundedCache(config=model.config)}
        )
        return args, {**kwargs, "use_cache": True, **own}

    return model.register_forward_pre_hook(before, with_kwargs=True)
