"""Parts of a chart, as SVG text.

Numbers in; the same bytes for the same numbers out. Text and axes take the colour of the text around them, so that a
chart is readable on a light and on a dark page.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

COLORS = ("#2a7fb8", "#d9730d", "#8a63d2", "#2a9d72", "#c44569", "#8a7a3a")
_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
    'role="img" aria-label="{label}" font-family="system-ui, sans-serif" font-size="12" fill="currentColor">'
)
WIDTH = 360  # points: what a phone shows in full size; wider screens enlarge it


def svg(title: str, height: float, parts: Sequence[str]) -> str:
    """Return a chart of the elements `parts`, `WIDTH` wide. title: for those who cannot see it."""
    return "\n".join([_HEAD.format(width=WIDTH, height=coordinate(height), label=html.escape(title)), *parts, "</svg>"])


def label(x: float | str, y: float | str, text: str, anchor: str) -> str:
    """Return a text whose middle is at `y`. anchor: `start`, `middle` or `end` of the text stands at `x`."""
    where = f'x="{coordinate(float(x))}" y="{coordinate(float(y) + 4)}"'
    return f'<text {where} text-anchor="{anchor}">{html.escape(text)}</text>'


def rule(x1: float, y1: float | str, x2: float, y2: float | str, how: str = "") -> str:
    """Return a straight line. how: its attributes, by default those of a grid line."""
    how = how or 'stroke="currentColor" stroke-opacity="0.15"'
    ends = (f'{name}="{coordinate(float(value))}"' for name, value in zip(("x1", "y1", "x2", "y2"), (x1, y1, x2, y2)))
    return f"<line {' '.join(ends)} {how}/>"


def coordinate(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
