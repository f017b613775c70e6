"""How models mark their reasoning, recognised from the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from lockstep.errors import InputError

AnyFormat = TypeVar("AnyFormat")


@dataclass(frozen=True)
class ReasoningFormat:
    """name: of --reasoning-parser. begin, end: the marks of the reasoning, which comes before the answer.

    then: a mark between the reasoning and the answer, for formats whose end mark has other uses too.
    """

    name: str
    begin: str
    end: str
    then: str = ""

    def is_used_by(self, template: str) -> bool:
        return self.begin in template or (not self.then and self.end in template)


FORMATS = {
    format.name: format
    for format in (
        ReasoningFormat("think", "<think>", "</think>"),  # Qwen 3, DeepSeek R1, GLM 4.5, SmolLM3 and most others
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
        ReasoningFormat("harmony", "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant"),
        ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
    )
}


def named_format(option: str, named: str, formats: Mapping[str, AnyFormat]) -> AnyFormat | None:
    """Return the format that an option names; None for "none". Raises InputError for an unknown name."""
    if named != "none" and named not in formats:
        raise InputError(f"{option}: expected none or one of {', '.join(sorted(formats))}; found {named!r}")
    return formats.get(named)


def reasoning_format(named: str | None, template: str | None) -> ReasoningFormat | None:
    """Return the named format, else the one that a chat template uses; None for neither, and for "none".

    Raises InputError for an unknown name.
    """
    if named is not None:
        return named_format("--reasoning-parser", named, FORMATS)
    return next((format for format in FORMATS.values() if format.is_used_by(template or "")), None)
