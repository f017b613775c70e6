"""A golden prompt as a person reads it: its entry in the golden check's report in, HTML out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.report.markup import pairs, tag, text

# Where a first differing token may stand, and what was compared there.
_COMPARED = {
    "differences": ("in the reference", "decoding freely"),
    "alone_differences": ("in the batch", "with this prompt alone"),
    "generate_differences": ("in the batch", "as lockstep generate decodes"),
}


def prompt(entry: Mapping[str, Any], tolerance: float) -> str:
    """The prompt, the decoded text beside the reference's and the expected one, and each first differing token with its
    margin. tolerance: the largest absolute error of a logit."""
    decoded, reference, expected = entry["text_out"], entry["reference_text"], entry["expected"]
    difference = next(iter(entry["differences"]), None)
    rows = [
        ("prompt", tag("div", text(entry["text"]), "text")),
        ("decoded", _decoded(decoded, difference, "found_text", reference if expected is None else expected)),
        ("reference", _decoded(reference, difference, "reference_text", decoded)),
    ]
    if expected == reference:
        rows.append(("expected", rows[-1][1]))
    elif expected is not None:
        rows.append(("expected", _marked(expected, _first_difference(expected, decoded))))
    rows.append(("logit error", text(_error(entry["max_logit_error"], tolerance))))
    rows += [
        ("first difference", text(_words(found, *compared, tolerance)))
        for key, compared in _COMPARED.items()
        for found in entry.get(key, ())
    ]
    return tag("div", pairs(rows), "prompt")


def _decoded(whole: str, difference: Mapping[str, Any] | None, key: str, other: str) -> str:
    """The text with the first token that differs marked; where no token differs, or its text is not known, the place
    where the text differs from `other`."""
    if difference is None or key not in difference:
        return _marked(whole, _first_difference(whole, other))
    start = len(difference["text_before"])
    return _marked(whole, (start, start + len(difference[key])))


def _first_difference(one: str, other: str) -> tuple[int, int] | None:
    """Where the rest of `one` that is not as in `other` begins and ends; None where both are the same."""
    if one == other:
        return None
    at = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return at, len(one)


def _marked(whole: str, place: tuple[int, int] | None) -> str:
    if place is None:
        return tag("div", text(whole), "text")
    start, end = place
    inside = text(whole[start:end]) or "&#9141;"  # nothing stands there: a place to be seen
    return tag("div", f"{text(whole[:start])}<mark>{inside}</mark>{text(whole[end:])}", "text")


def _error(error: float | None, tolerance: float) -> str:
    return f"{'not finite' if error is None else f'{error:.2e}'} (tolerance {tolerance:g})"


def _words(found: Mapping[str, Any], expected: str, how: str, tolerance: float) -> str:
    step, gap = found["step"], found["gap"]
    if found["found"] is None or found["reference"] is None:
        return f"step {step}: another number of tokens {expected} than {how}"
    one, other = (f"{found[token]}{_quoted(found.get(f'{token}_text'))}" for token in ("reference", "found"))
    margin = "the reference has no margin there" if gap is None else f"the reference's margin is {gap:.3g}"
    why = "accepted, both tokens are equally likely" if found["accepted"] else "a failure"
    return f"step {step}: token {one} {expected}, {other} {how}; {margin}, tolerance {tolerance:g}: {why}"


def _quoted(token_text: str | None) -> str:
    return "" if token_text is None else f" \N{LEFT DOUBLE QUOTATION MARK}{token_text}\N{RIGHT DOUBLE QUOTATION MARK}"
