"""Prose of generated pages, in lines of at most 120 characters."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any

_WIDTH = 120
_MAX_UNBROKEN = 100  # characters of inline code that stay on one line
_SPACE = "\x00"  # a space at which no line may end


def paragraph(text: str) -> str:
    """Return one paragraph, wrapped; short inline code is not broken."""
    return _wrapped(text, "")


def item(text: str) -> str:
    """Return one item of a list, wrapped, with its dash and further lines indented."""
    return _wrapped(f"- {text}", "  ")


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return the lines of a table."""
    cells = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(map(str, row))} |" for row in cells]


def _wrapped(text: str, indent: str) -> str:
    def keep_together(code: re.Match[str]) -> str:
        if len(code[0]) > _MAX_UNBROKEN:
            return code[0]
        return code[0].replace(" ", _SPACE)

    lines = textwrap.fill(
        re.sub(r"`[^`]+`", keep_together, " ".join(text.split())),
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.replace(_SPACE, " ")
