"""How models mark their reasoning, recognised from the chat template."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import InputError


@dataclass(frozen=True)
class ReasoningFormat:
    """name: of --reasoning-parser. begin, end: the marks of the reasoning, which comes before the answer."""

    name: str
    begin: str
    end: str


FORMATS = {
    each.name: each
    for each in (
        ReasoningFormat("think", "<think>", "</think>"),  # Qwen 3, DeepSeek R1, GLM 4.5, SmolLM3 and most others
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
        ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
    )
}


def reasoning_format(named: str | None, template: str | None) -> ReasoningFormat | None:
    """Return the format of a name, else the one whose marks a chat template has; None for neither, or for "none".

    Raises InputError for an unknown name.
    """
    if named is not None:
        if named != "none" and named not in FORMATS:
            names = ", ".join(sorted(FORMATS))
            raise InputError(f"--reasoning-parser: expected none or one of {names}; found {named!r}")
        return FORMATS.get(named)
    text = template or ""
    return next((each for each in FORMATS.values() if each.begin in text or each.end in text), None)
