"""A golden prompt in words: what was decoded, where it first differs, and why."""

from __future__ import annotations

import os

from lockstep.artifacts.reports import GoldenPrompt, TokenDifference


def answers(entry: GoldenPrompt) -> list[tuple[str, str, str | None]]:
    """Return a prompt's answer, the reference's and the expected one: name, text, and the rest where they differ."""
    decoded = entry.text_out
    reference = entry.reference_text
    expected = entry.expected
    rows = [("decoded", decoded, reference if expected is None else expected), ("reference", reference, decoded)]
    if expected is not None:
        rows.append(("expected", expected, decoded))
    return [(name, *_split(text, other)) for name, text, other in rows]


def _split(text: str, other: str) -> tuple[str, str | None]:
    """Return what two texts begin with, and the rest of the first one; None where they are the same."""
    if text == other:
        return text, None
    start = len(os.path.commonprefix([text, other]))
    return text[:start], text[start:]


def differences(entry: GoldenPrompt) -> list[str]:
    """Return a line for the first token that differs in each way of decoding."""
    return [
        _words(difference, where, how)
        for found, where, how in (
            (entry.differences, "in the reference", "decoding freely"),
            (entry.alone_differences, "in the batch", "with this prompt alone"),
            (entry.generate_differences, "in the batch", "as lockstep generate decodes"),
        )
        for difference in found
    ]


def _words(found: TokenDifference, expected: str, how: str) -> str:
    step = found.step
    gap = found.gap
    if found.found is None or found.reference is None:
        return f"step {step}: another number of tokens {expected} than {how}"
    one = f"{found.reference}{_quoted(found.reference_text)}"
    other = f"{found.found}{_quoted(found.found_text)}"
    margin = "the reference has no margin there" if gap is None else f"the reference's margin is {gap:.3g}"
    why = "accepted, both tokens are equally likely" if found.accepted else "a failure"
    return f"step {step}: token {one} {expected}, {other} {how}; {margin}: {why}"


def _quoted(token_text: str | None) -> str:
    return "" if token_text is None else f" \N{LEFT DOUBLE QUOTATION MARK}{token_text}\N{RIGHT DOUBLE QUOTATION MARK}"
