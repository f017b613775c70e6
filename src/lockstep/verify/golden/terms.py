"""The terms of references: golden prompts, and how many tokens follow them. Options of a job in; dataclasses out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.artifacts.document import JsonObject


@dataclass(frozen=True)
class GoldenTerms(JsonObject):
    """What a reference is made from. long_prompt: its tokens, 0 for none. kv_cache_dtype: "fp8" where it rounds."""

    max_new_tokens: int
    prompts: tuple[str, ...]
    long_prompt: int = 0
    kv_cache_dtype: str | None = None


@dataclass(frozen=True)
class AdaptedTerms(JsonObject):
    """What a reference with adapters is made from. prompts: by adapter, "" for none."""

    max_new_tokens: int
    prompts: Mapping[str, tuple[str, ...]]
    kv_cache_dtype: str | None = None
