"""The differences between two values that should be the same, in words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.artifacts.statement import BuildKey

ABSENT = object()
_DIGEST = re.compile("[0-9a-f]{64}")


def changes(before: Any, after: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (place, "before -> after") of each value that differs, in order of names."""
    for where, old, new in differences(before, after):
        yield where, change(old, new)


def differences(before: Any, after: Any, where: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield (place, before, after) of each value that differs, in order of names. A missing value is ABSENT."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in sorted({*before, *after}):
            yield from differences(before.get(name, ABSENT), after.get(name, ABSENT), (*where, str(name)))
    elif before != after:
        yield where, before, after


def change(before: Any, after: Any) -> str:
    if before is ABSENT:
        return f"new, {words(after)}"
    if after is ABSENT:
        return f"gone, was {words(before)}"
    return f"{words(before)} -> {words(after)}"


def words(value: Any) -> str:
    """Return a value as part of a line. Of a digest the first 12 digits, of a mapping the number of its entries."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return f"{len(value)} entries"
    if isinstance(value, (list, tuple)):
        return " ".join(map(words, value))
    text = str(value)
    if _DIGEST.fullmatch(text):
        return text[:12]
    return text


def cause(recorded: BuildKey, now: BuildKey) -> list[str]:
    """Return a line for each difference between two build keys of one stage, in order of likely causes."""
    return lines(
        ("", recorded.names, now.names),
        ("input ", recorded.inputs, now.inputs),
        ("option ", recorded.options, now.options),
        ("backend ", recorded.backend or {}, now.backend or {}),
        ("", recorded.environment, now.environment),
        ("code ", recorded.code, now.code),
    )


def lines(*parts: tuple[str, Any, Any]) -> list[str]:
    """Return a line for each value that differs. parts: (kind of value, before, after)."""
    texts: list[str] = []
    for what, before, after in parts:
        texts += [f"{what}{'.'.join(where)} {change}" for where, change in changes(before, after)]
    return texts
