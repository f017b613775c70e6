"""Charts of the report's pages, as SVG text.

Numbers in; the same bytes for the same numbers out. Text and axes take the colour of the text around them, so that a
chart is readable on a light and on a dark page.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

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


def error_by_layer(name: str, blocks: Sequence[BlockErrors]) -> str:
    """Draw the error of each layer on a log scale, beside the noise of its precision (dashed).

    Of each layer it is the tensor that is worst beside that noise. name: what the legend calls it. blocks: at least
    one.
    """
    left, plot, base = 46, (WIDTH - 56, 150), 160
    worst = _worst(blocks)
    tensors = worst.values()
    values = [value for tensor in tensors for value in (tensor.relative_error, tensor.noise) if value is not None]
    decades = [math.log10(max(value, _SMALLEST)) for value in values]
    low, high = math.floor(min(decades)), math.ceil(max(decades) + 0.05)
    layers = list(worst)
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
    color = COLORS[0]
    points = [(x(layer), y(tensor.relative_error), layer, tensor.relative_error) for layer, tensor in worst.items()]
    path = " ".join(f"{px},{py}" for px, py, _, _ in points)
    noise = " ".join(f"{x(layer)},{y(tensor.noise)}" for layer, tensor in worst.items())
    parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
    parts.append(f'<polyline points="{noise}" fill="none" stroke="{color}" stroke-dasharray="6 4"/>')
    for px, py, layer, error in points:
        said = "not finite" if error is None else f"{error:.2e}"
        tip = f"<title>{html.escape(f'{name}, layer {layer}: {said}')}</title>"
        parts.append(f'<circle cx="{px}" cy="{py}" r="3" fill="{color}">{tip}</circle>')
        if error is None:
            parts.append(label(px, float(py) + 14, "not finite", "middle"))
    row = base + 56
    for what, line in (("largest error", 'stroke-width="1.5"'), ("rounding error", 'stroke-dasharray="6 4"')):
        parts.append(rule(0, row, 20, row, f'stroke="{color}" {line}'))
        parts.append(label(26, row, f"{name}: {what}", "start"))
        row += _LEGEND_ROW
    return svg("Largest error by layer, and the rounding error of the precision", row - 6, parts)


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


def _worst(blocks: Sequence[BlockErrors]) -> dict[int, TensorError]:
    found: dict[int, list[TensorError]] = {}
    for block in blocks:
        assert block.layer is not None  # the embedding is none of them
        found.setdefault(block.layer, []).extend(block.tensors.values())
    return {layer: max(tensors, key=_of_noise) for layer, tensors in sorted(found.items())}


def _of_noise(tensor: TensorError) -> float:
    """Return how many times the noise an error is."""
    if tensor.relative_error is None:
        return math.inf
    return tensor.relative_error / max(tensor.noise, _SMALLEST)


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
