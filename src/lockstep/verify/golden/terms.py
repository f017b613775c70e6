"""The terms of references: golden prompts, and how many tokens follow them. Options of a job in; a dataclass out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.artifacts.document import JsonObject


@dataclass(frozen=True)
class GoldenTerms(JsonObject):
    """The inputs of a reference.

    long_prompt: its tokens, 0 for none. kv_cache_dtype: "fp8" where it rounds. adapted: {adapter, "" for none:
    prompts}, instead of `prompts`.
    """

    max_new_tokens: int
    prompts: tuple[str, ...] = ()
    long_prompt: int = 0
    kv_cache_dtype: str | None = None
    adapted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
