"""The terms of references: golden prompts, and how many tokens follow them.

Options of a job in; dataclasses out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GoldenTerms:
    """What a reference is made from.

    max_new_tokens: decoded behind each prompt. long_prompt: tokens of the long prompt, 0 for none.
    """

    max_new_tokens: int
    prompts: tuple[str, ...]
    long_prompt: int = 0

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> GoldenTerms:
        """Return the terms that `Config.reference_terms` gives as JSON."""
        return cls(value["max_new_tokens"], tuple(value["prompts"]), value["long_prompt"])


@dataclass(frozen=True)
class AdaptedTerms:
    """What a reference with adapters is made from. prompts: by adapter, "" for none."""

    max_new_tokens: int
    prompts: Mapping[str, tuple[str, ...]]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> AdaptedTerms:
        """Return the terms of a job's options, which are JSON."""
        prompts = {adapter: tuple(texts) for adapter, texts in value["prompts"].items()}
        return cls(value["max_new_tokens"], prompts)
