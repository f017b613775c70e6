"""A golden prompt in words: what was decoded, where it first differs, and why."""

from __future__ import annotations

from lockstep.artifacts.reports import GoldenPrompt, TokenDifference

Marked = tuple[str, str | None, str]  # what stands before a mark, in it and behind it; None: without one


def answers(entry: GoldenPrompt) -> list[tuple[str, str, str | None, str]]:
    """Return a prompt's answer, the reference's and the expected one: name, and `Marked` where they differ.

    That is the first differing token; where its text is not known, all from where the texts differ.
    """
    decoded, reference, expected = entry.text_out, entry.reference_text, entry.expected
    first = entry.differences[0] if entry.differences else None
    before, found, right = (first.text_before, first.found_text, first.reference_text) if first else (None, None, None)
    rows = [
        ("decoded", *_decoded(decoded, before, found, reference if expected is None else expected)),
        ("reference", *_decoded(reference, before, right, decoded)),
    ]
    if expected is not None:
        rows.append(("expected", *(rows[1][1:] if expected == reference else _decoded(expected, None, None, decoded))))
    return rows


def _decoded(whole: str, before: str | None, token: str | None, other: str) -> Marked:
    if before is not None and token is not None:
        start, end = len(before), len(before) + len(token)
    elif whole != other:
        start = next((i for i, (a, b) in enumerate(zip(whole, other)) if a != b), min(len(whole), len(other)))
        end = len(whole)
    else:
        return whole, None, ""
    return whole[:start], whole[start:end], whole[end:]


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
    step, gap = found.step, found.gap
    if found.found is None or found.reference is None:
        return f"step {step}: another number of tokens {expected} than {how}"
    one, other = f"{found.reference}{_quoted(found.reference_text)}", f"{found.found}{_quoted(found.found_text)}"
    margin = "the reference has no margin there" if gap is None else f"the reference's margin is {gap:.3g}"
    why = "accepted, both tokens are equally likely" if found.accepted else "a failure"
    return f"step {step}: token {one} {expected}, {other} {how}; {margin}: {why}"


def _quoted(token_text: str | None) -> str:
    return "" if token_text is None else f" \N{LEFT DOUBLE QUOTATION MARK}{token_text}\N{RIGHT DOUBLE QUOTATION MARK}"
