"""A golden prompt in words: its answers, and the first differing token of each."""

from __future__ import annotations

import os

from lockstep.artifacts.reports import GoldenPrompt, TokenDifference


def answers(entry: GoldenPrompt) -> list[tuple[str, str, str | None]]:
    """Return (name, text, rest from the first difference on) of the decoded, reference and expected answer."""
    decoded = entry.text_out
    reference = entry.reference_text
    expected = entry.expected
    rows = [("decoded", decoded, reference), ("reference", reference, decoded)]
    if expected is not None:
        rows[0] = ("decoded", decoded, expected)
        rows.append(("expected", expected, decoded))
    return [(name, *_split(text, other)) for name, text, other in rows]


def _split(text: str, other: str) -> tuple[str, str | None]:
    """Return the common prefix of two texts, and the rest of the first one; None if they are equal."""
    if text == other:
        return text, None
    start = len(os.path.commonprefix([text, other]))
    return text[:start], text[start:]


def differences(entry: GoldenPrompt) -> list[str]:
    """Return a line for the first token that differs in each way of decoding."""
    comparisons = (
        (entry.differences, "in the reference", "decoding freely"),
        (entry.alone_differences, "in the batch", "with this prompt alone"),
        (entry.generate_differences, "in the batch", "as lockstep generate decodes"),
    )
    lines = []
    for token_differences, where, how in comparisons:
        lines += [_line(difference, where, how) for difference in token_differences]
    return lines


def _line(difference: TokenDifference, where: str, how: str) -> str:
    step = difference.step
    if difference.found is None or difference.reference is None:
        return f"step {step}: another number of tokens {where} than {how}"
    expected = f"{difference.reference}{_quoted(difference.reference_text)}"
    decoded = f"{difference.found}{_quoted(difference.found_text)}"
    margin = "the reference has no margin there"
    if difference.gap is not None:
        margin = f"the reference's margin is {difference.gap:.3g}"
    consequence = "accepted, both tokens are equally likely" if difference.accepted else "a failure"
    return f"step {step}: token {expected} {where}, {decoded} {how}; {margin}: {consequence}"


def _quoted(token_text: str | None) -> str:
    if token_text is None:
        return ""
    return f" \N{LEFT DOUBLE QUOTATION MARK}{token_text}\N{RIGHT DOUBLE QUOTATION MARK}"
