"""The report of the check of adapters: the golden check's, with an adapter for each prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from lockstep.artifacts import formats
from lockstep.artifacts.reports import GoldenPrompt, GoldenReport


@dataclass(frozen=True)
class AdaptedPrompt(GoldenPrompt):
    """A prompt with an adapter ("": none), decoded in one batch with all others.

    from_base: the largest difference of the reference's first logits from those without an adapter.
    mixed_max_logit_error: with other adapters in other slots.
    """

    adapter: str
    from_base: float | None


@dataclass(frozen=True, kw_only=True)
class AdaptedReport(GoldenReport):
    """Answers with adapters, {name: sha256}. places: resident together. loads: how often one was loaded."""

    FORMAT: ClassVar[str] = formats.ADAPTED
    prompts: tuple[AdaptedPrompt, ...]
    adapters: Mapping[str, str]
    places: int
    loads: int
