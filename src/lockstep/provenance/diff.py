"""Two values that should be the same: what differs between them, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.artifacts.statement import BuildKey

ABSENT = object()
_DIGEST = 64


def changes(before: Any, after: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (place, "before -> after") of each value that differs, sorted by name."""
    for where, old, new in differences(before, after):
        yield where, change(old, new)


def differences(before: Any, after: Any, where: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield (place, before, after) of each value that differs, sorted by name. ABSENT is one that is not there."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in sorted({*before, *after}):
            yield from differences(before.get(name, ABSENT), after.get(name, ABSENT), (*where, str(name)))
    elif before != after:
        yield where, before, after


def change(before: Any, after: Any) -> str:
    """Return a change in words."""
    if before is ABSENT:
        return f"new, {words(after)}"
    if after is ABSENT:
        return f"gone, was {words(before)}"
    return f"{words(before)} -> {words(after)}"


def words(value: Any) -> str:
    """Return a value on one line. Digests are cut to what tells them apart, lists and mappings are short."""
    if isinstance(value, str):
        return value[:12] if len(value) == _DIGEST and all(c in "0123456789abcdef" for c in value) else value
    if isinstance(value, Mapping):
        return f"{len(value)} entries"
    if isinstance(value, (list, tuple)):
        return " ".join(map(words, value))
    return "none" if value is None else str(value)


def cause(recorded: BuildKey, now: BuildKey) -> list[str]:
    """Return why two build keys of one stage differ, in words with both values.

    Inputs, options, backend, packages, code.
    """
    return lines(
        ("", recorded.names, now.names),
        ("input ", recorded.inputs, now.inputs),
        ("option ", recorded.options, now.options),
        ("backend ", recorded.backend or {}, now.backend or {}),
        ("", recorded.environment, now.environment),
        ("code ", recorded.code, now.code),
    )


def lines(*parts: tuple[str, Any, Any]) -> list[str]:
    """Return a line for each value that differs. parts: (what it is, before, after)."""
    texts: list[str] = []
    for what, before, after in parts:
        texts += [f"{what}{'.'.join(where)} {change}" for where, change in changes(before, after)]
    return texts
