"""Charts as SVG text, for a page or a file of its own.

Numbers in; the same bytes for the same numbers out. Text and axes take the colour of the text around them, so that a
chart is readable on a light and on a dark page.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.artifacts.reports import BlockErrors, TensorError
from lockstep.artifacts.summary import SummaryRow

COLORS = ("#2a7fb8", "#d9730d", "#8a63d2", "#2a9d72", "#c44569", "#8a7a3a")
_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
    'role="img" aria-label="{label}" font-family="system-ui, sans-serif" font-size="12" fill="currentColor">'
)
WIDTH = 360  # points: what a phone shows in full size; wider screens enlarge it
_SMALLEST = 1e-9  # a log scale has no zero; an exact layer stands at the edge of what fp32 can tell
_LEGEND_ROW = 18


@dataclass(frozen=True)
class Line:
    """A line of an error chart: by layer, in their order, the tensor that is worst."""

    name: str
    worst: Mapping[int, TensorError]


def error_by_layer(lines: Sequence[Line]) -> str:
    """Draw the error of each layer on a log scale.

    Each line stands beside the noise of its precision (dashed), both named in the legend.
    """
    left, plot, base = 46, (WIDTH - 56, 150), 160
    tensors = [tensor for line in lines for tensor in line.worst.values()]
    values = [value for tensor in tensors for value in (tensor.relative_error, tensor.noise) if value is not None]
    decades = [math.log10(max(value, _SMALLEST)) for value in values]
    low, high = math.floor(min(decades)), math.ceil(max(decades) + 0.05)
    layers = sorted({layer for line in lines for layer in line.worst})
    span = max(layers[-1] - layers[0], 1)

    def x(layer: int) -> str:
        return coordinate(left + plot[0] * (layer - layers[0] + 0.5) / (span + 1))

    def y(value: float | None) -> str:
        decade = high if value is None else math.log10(max(value, _SMALLEST))
        return coordinate(base - plot[1] * (decade - low) / (high - low))

    parts = []
    for decade in range(low, high + 1):
        at = y(10.0**decade)
        parts.append(rule(left, at, left + plot[0], at))
        parts.append(label(left - 8, at, f"1e{decade}", "end"))
    step = max(1, math.ceil(len(layers) / 16))
    parts += [label(x(layer), base + 16, str(layer), "middle") for layer in layers[::step]]
    parts.append(label(left + plot[0] / 2, base + 34, "layer", "middle"))
    for number, line in enumerate(lines):
        color = COLORS[number % len(COLORS)]
        errors = [(layer, tensor.relative_error) for layer, tensor in line.worst.items()]
        points = [(x(layer), y(error), layer, error) for layer, error in errors]
        path = " ".join(f"{px},{py}" for px, py, _, _ in points)
        noise = " ".join(f"{x(layer)},{y(tensor.noise)}" for layer, tensor in line.worst.items())
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts.append(f'<polyline points="{noise}" fill="none" stroke="{color}" stroke-dasharray="6 4"/>')
        for px, py, layer, error in points:
            said = "not finite" if error is None else f"{error:.2e}"
            tip = f"<title>{html.escape(f'{line.name}, layer {layer}: {said}')}</title>"
            parts.append(f'<circle cx="{px}" cy="{py}" r="3" fill="{color}">{tip}</circle>')
            if error is None:
                parts.append(label(px, float(py) + 14, "not finite", "middle"))
        row = base + 56 + 2 * _LEGEND_ROW * number
        parts.append(rule(0, row, 20, row, f'stroke="{color}" stroke-width="1.5"'))
        parts.append(label(26, row, f"{line.name}: largest error", "start"))
        row += _LEGEND_ROW
        parts.append(rule(0, row, 20, row, f'stroke="{color}" stroke-dasharray="6 4"'))
        parts.append(label(26, row, f"{line.name}: rounding error", "start"))
    height = base + 50 + 2 * _LEGEND_ROW * len(lines)
    return svg("Largest error by layer, and the rounding error of the precision", height, parts)


def speeds(rows: Sequence[SummaryRow]) -> str:
    """Draw bars of tokens per second of some targets, prefill and decode on scales of their own."""
    room, step, bar = WIDTH / 2, 44, 14
    parts = []
    for column, (kind, color) in enumerate((("prefill", COLORS[0]), ("decode", COLORS[1]))):
        values = [(row.prefill_tokens_per_s, row.decode_tokens_per_s)[column] for row in rows]
        largest, left = max((value for value in values if value), default=1.0), column * room
        parts.append(label(left, 8, f"{kind}, tokens/s", "start"))
        for number, value in enumerate(values):
            middle, width = 50 + step * number, (room - 56) * (value or 0) / largest
            where = {"x": left, "y": middle - bar / 2, "width": width, "height": bar}
            shape = " ".join(f'{name}="{coordinate(number)}"' for name, number in where.items())
            parts.append(f'<rect {shape} fill="{color}"/>')
            parts.append(label(left + width + 5, middle, "-" if value is None else f"{value:.0f}", "start"))
    parts += [label(0, 34 + step * number, str(row.target), "start") for number, row in enumerate(rows)]
    return svg("Tokens per second", 20 + step * len(rows), parts)


def error_line(name: str, blocks: Sequence[BlockErrors]) -> Line:
    """Return the line of one validation: of each layer the tensor that is worst beside what the precision costs of it.

    blocks: at least one.
    """
    found: dict[int, list[TensorError]] = {}
    for block in blocks:
        assert block.layer is not None  # the embedding is none of them
        found.setdefault(block.layer, []).extend(block.tensors.values())
    return Line(name, {layer: max(tensors, key=_of_noise) for layer, tensors in sorted(found.items())})


def _of_noise(tensor: TensorError) -> float:
    """Return how many times the noise an error is."""
    if tensor.relative_error is None:
        return math.inf
    return tensor.relative_error / max(tensor.noise, _SMALLEST)


def svg(title: str, height: float, parts: Sequence[str]) -> str:
    """Return a chart of the elements `parts`, `WIDTH` wide.

    title: for those who cannot see it.
    """
    return "\n".join([_HEAD.format(width=WIDTH, height=coordinate(height), label=html.escape(title)), *parts, "</svg>"])


def label(x: float | str, y: float | str, text: str, anchor: str) -> str:
    """Return a text whose middle is at `y`.

    anchor: `start`, `middle` or `end` of the text stands at `x`.
    """
    where = f'x="{coordinate(float(x))}" y="{coordinate(float(y) + 4)}"'
    return f'<text {where} text-anchor="{anchor}">{html.escape(text)}</text>'


def rule(x1: float, y1: float | str, x2: float, y2: float | str, how: str = "") -> str:
    """Return a straight line. how: its attributes, by default those of a grid line."""
    how = how or 'stroke="currentColor" stroke-opacity="0.15"'
    ends = (f'{name}="{coordinate(float(value))}"' for name, value in zip(("x1", "y1", "x2", "y2"), (x1, y1, x2, y2)))
    return f"<line {' '.join(ends)} {how}/>"


def coordinate(value: float) -> str:
    """Return a number as charts write it, with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")
