"""A golden prompt as HTML, from its entry in the golden check's report."""

from __future__ import annotations

from lockstep.artifacts.reports import GoldenPrompt, TokenDifference
from lockstep.report.markup import pairs, tag, text


def prompt(entry: GoldenPrompt) -> str:
    """Return a prompt's answer beside the reference's and the expected one.

    With the first differing token of each and its margin.
    """
    decoded, reference, expected = entry.text_out, entry.reference_text, entry.expected
    first = entry.differences[0] if entry.differences else None
    before, found, right = (first.text_before, first.found_text, first.reference_text) if first else (None, None, None)
    rows = [
        ("prompt", tag("div", text(entry.text), "text")),
        ("decoded", _decoded(decoded, before, found, reference if expected is None else expected)),
        ("reference", _decoded(reference, before, right, decoded)),
    ]
    if expected == reference:
        rows.append(("expected", rows[-1][1]))
    elif expected is not None:
        rows.append(("expected", _marked(expected, _first_difference(expected, decoded))))
    rows.append(("logit error", text(_error(entry))))
    rows += [
        ("first difference", text(_words(difference, where, how)))
        for differences, where, how in (
            (entry.differences, "in the reference", "decoding freely"),
            (entry.alone_differences, "in the batch", "with this prompt alone"),
            (entry.generate_differences, "in the batch", "as lockstep generate decodes"),
        )
        for difference in differences
    ]
    return tag("div", pairs(rows), "prompt")


def _decoded(whole: str, before: str | None, token: str | None, other: str) -> str:
    """Return the text with the first token that differs marked.

    That is `token`, after `before`. Where no token differs, or its text is not known, the place is marked where the
    text differs from `other`.
    """
    if before is None or token is None:
        return _marked(whole, _first_difference(whole, other))
    return _marked(whole, (len(before), len(before) + len(token)))


def _first_difference(one: str, other: str) -> tuple[int, int] | None:
    """Return (start, end) of the rest of `one` that is not as in `other`. None where both are the same."""
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


def _error(entry: GoldenPrompt) -> str:
    error = "not finite" if entry.max_logit_error is None else f"{entry.max_logit_error:.2e}"
    return f"{error} (rounding error {entry.logit_noise:.2e}, allowed {entry.tolerance:.2e})"


def _words(found: TokenDifference, expected: str, how: str) -> str:
    step, gap = found.step, found.gap
    if found.found is None or found.reference is None:
        return f"step {step}: another number of tokens {expected} than {how}"
    one, other = f"{found.reference}{_quoted(found.reference_text)}", f"{found.found}{_quoted(found.found_text)}"
    margin = "the reference has no margin there" if gap is None else f"the reference's margin is {gap:.3g}"
    why = "accepted, both tokens are equally likely" if found.accepted else "a failure"
    return f"step {step}: token {one} {expected}, {other} {how}; {margin}: {why}"


def _quoted(token_text: str | None) -> str:
    return "" if token_text is None else f" \N{LEFT DOUBLE QUOTATION MARK}{token_text}\N{RIGHT DOUBLE QUOTATION MARK}"
