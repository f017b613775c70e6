"""The report of the check of adapters: how far engines with them are from transformers' answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from lockstep.artifacts import formats
from lockstep.artifacts.reports import Report, TokenDifference
from lockstep.targets import Target


@dataclass(frozen=True)
class AdaptedPrompt:
    """A prompt with an adapter ("": none), decoded in one batch with all others.

    It holds the text, and how far the logits are off, beside what the precision itself costs. from_base: the largest
    difference of the reference's first logits from those without an adapter. alone_equal: the same tokens, and where
    the backend is batch invariant the same bits of all logits, as alone, and as with other adapters in other slots.
    """

    adapter: str
    text: str
    tokens: tuple[int, ...]
    text_out: str
    reference_text: str
    expected: str | None
    logit_noise: float
    max_logit_error: float | None
    differences: tuple[TokenDifference, ...]
    alone_equal: bool
    from_base: float | None


@dataclass(frozen=True, kw_only=True)
class AdaptedReport(Report):
    """Answers with adapters, {name: sha256}. places: resident together. loads: how often one was loaded."""

    FORMAT: ClassVar[str] = formats.ADAPTED
    target: Target
    engine_digest: str
    tolerance: float
    logit_noise: float
    max_logit_error: float | None
    adapters: Mapping[str, str]
    places: int
    loads: int
    prompts: tuple[AdaptedPrompt, ...]
