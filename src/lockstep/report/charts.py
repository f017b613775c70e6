"""The charts of the report: numbers in, SVG for a page out.

Drawn by pygal, which writes SVG alone: 0.1 MB to install and 20 ms a chart, where matplotlib takes 98 MB and half a
second, and Plotly and Vega put megabytes of script into each page. Colours, fonts and the dark scheme are the page's
(`templates/page.html`): pygal's own styles and scripts are removed.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from pygal.graph.graph import Graph

_HEIGHT = 235
_WIDTH = 340  # points, the width of a phone, where text then has `_FONT_SIZE`
_FONT_SIZE = 11
_BOTTOM_MARGIN = 10  # below the legend
_LEGEND_COLUMNS = 3
_BAR_HEIGHT = 22
_HEADROOM = 1.02  # pygal leaves out a tick on the upper edge, and cuts lines there
_DECIMALS = re.compile(r"(\d+\.\d)\d+")


@dataclass(frozen=True)
class Point:
    """x and y on the scales. tooltip: in place of these."""

    x: float
    y: float
    tooltip: str = ""


Series = Mapping[str, Sequence[Point]]


def curves(title: str, x_title: str, series: Series, x_ticks: Sequence[float] = (), **options: Any) -> Markup:
    """Draw points on two logarithmic scales, joined by lines; nothing where no point is above 0.

    x_ticks: in place of ticks that enclose the points.
    """
    import pygal

    drawn = {}
    for name, points in series.items():
        if above_zero := [point for point in points if point.x > 0 and point.y > 0]:
            drawn[name] = above_zero
    if not drawn:
        return Markup()
    all_points = list(itertools.chain(*drawn.values()))
    y_ticks = log_ticks(point.y for point in all_points)
    chart = pygal.XY(
        **_options(title, x_title=x_title, **{**_room_for_legend(len(drawn)), "dots_size": 2.5, **options}),
        logarithmic=True,
        range=(y_ticks[0], _HEADROOM * y_ticks[-1]),
        value_formatter=_short,
        x_value_formatter=_short,
    )
    chart.y_labels = y_ticks
    chart.x_labels = x_ticks or log_ticks(point.x for point in all_points)
    for name, points in drawn.items():
        chart.add(name, [_pygal_point(point) for point in points])
    return _svg(chart)


def scatter(title: str, x_title: str, y_title: str, series: Series) -> Markup:
    return curves(title, x_title, series, y_title=y_title, stroke=False, dots_size=5)


def lines(title: str, x_title: str, names: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> Markup:
    """Draw a value of each name, on a logarithmic scale, joined by lines that end at None and at 0."""
    import pygal

    values = list(filter(None, itertools.chain(*series.values())))
    if not values:
        return Markup()
    ticks = log_ticks(values)
    chart = pygal.Line(
        **_options(title, x_title=x_title, dots_size=2),
        logarithmic=True,
        range=(ticks[0], _HEADROOM * ticks[-1]),
        value_formatter=_short,
        allow_interruptions=True,
        # At most eight names fit at this width.
        x_labels_major_every=-(-len(names) // 8),
        show_minor_x_labels=False,
    )
    chart.y_labels = ticks
    chart.x_labels = list(names)
    for name, of_series in series.items():
        # 0 cannot be drawn on a logarithmic scale: the line is interrupted there.
        chart.add(name, [value or None for value in of_series])
    return _svg(chart)


def bars(title: str, values: Mapping[str, float]) -> Markup:
    """Draw a bar for each name, in order from the top."""
    import pygal

    if not values:
        return Markup()
    chart = pygal.HorizontalBar(
        **_options(title, height=52 + _BAR_HEIGHT * len(values)),
        print_values=True,
        print_values_position="top",
        show_legend=False,
        show_x_labels=False,
        range=(0, 1.25 * (max(values.values()) or 1)),  # room for the value of the longest bar
        value_formatter=_short,
    )
    # pygal draws bars from the bottom.
    names = list(values)[::-1]
    chart.x_labels = names
    chart.add(title, [values[name] for name in names])
    return _svg(chart)


def graph(
    title: str,
    columns: Sequence[str],
    rows: Mapping[str, float],
    edges: Iterable[tuple[Point, Point]],
    nodes: Mapping[str, Sequence[Point]],
) -> Markup:
    """Draw a graph of nodes by state.

    columns: names of x of 0, 1, 2 ... rows: names with their y. Of the colours the first is the edges'.
    """
    import pygal

    top = max((point.y for point in itertools.chain(*nodes.values())), default=0.0)
    chart = pygal.XY(
        **_options(title, classes=("chart", "states"), height=180 + 14 * top, dots_size=4),
        xrange=(-0.3, len(columns) - 0.7),
        range=(-0.7, top + 0.7),
        allow_interruptions=True,
        x_label_rotation=90,
        show_y_guides=False,
        value_formatter=lambda value: "",
        x_value_formatter=lambda value: "",
    )
    chart.x_labels = [{"value": x, "label": name} for x, name in enumerate(columns)]
    chart.y_labels = [{"value": y, "label": name} for name, y in rows.items()]
    # One line for all edges, interrupted after each, because pygal colours each series differently.
    path: list[tuple[float, float | None]] = []
    for start, end in edges:
        path += [(start.x, start.y), (end.x, end.y), (end.x, None)]
    chart.add(None, path, show_dots=False)
    for state, points in nodes.items():
        chart.add(state, [_pygal_point(point) for point in points], stroke=False)
    return _svg(chart)


def _options(title: str, **options: Any) -> dict[str, Any]:
    from pygal.style import Style

    sizes = {f"{text}_font_size": _FONT_SIZE for text in ("label", "major_label", "legend", "value", "value_label")}
    return {
        "title": title,
        "classes": ("chart",),
        "width": _WIDTH,
        "height": _HEIGHT,
        "style": Style(title_font_size=13, **sizes),
        "css": (),
        "js": (),
        "margin": 4,
        "margin_right": 18,  # half of the last label
        "margin_bottom": _BOTTOM_MARGIN,
        "spacing": 6,
        "legend_at_bottom": True,
        "legend_at_bottom_columns": _LEGEND_COLUMNS,
        "legend_box_size": 9,
        "truncate_legend": -1,
        "truncate_label": -1,
        **options,
    }


def _room_for_legend(names: int) -> dict[str, Any]:
    """Return the height that a last row of names takes, which pygal counts where it is full."""
    missing = 17 * (names % _LEGEND_COLUMNS > 0)
    return {"height": _HEIGHT + missing, "margin_bottom": _BOTTOM_MARGIN + missing, "show_legend": names > 1}


def _pygal_point(point: Point) -> dict[str, Any]:
    pygal_point: dict[str, Any] = {"value": (point.x, point.y)}
    if point.tooltip:
        pygal_point["tooltip"] = point.tooltip
    return pygal_point


def log_ticks(values: Iterable[float]) -> list[float]:
    """Return ticks of a logarithmic scale that enclose the values: powers of ten, or 1, 2 and 5 times these."""
    values = list(values)
    low = min(values)
    high = max(values)
    first = math.floor(math.log10(low))
    last = math.ceil(math.log10(high)) + 1
    # At most 7 powers of ten: a phone has no room for more labels. A short scale has 2 and 5 times them too.
    step = -(-(last - first) // 7)
    factors = [1]
    if last - first <= 3:
        factors = [1, 2, 5]
    exponents = range(first, last + step, step)
    ticks = [factor * 10.0**exponent for exponent, factor in itertools.product(exponents, factors)]
    below = max(number for number, tick in enumerate(ticks) if tick <= low * (1 + 1e-9))
    above = min(number for number, tick in enumerate(ticks) if tick >= high * (1 - 1e-9))
    return ticks[below : max(above, below + 1) + 1]


def _short(value: float | None) -> str:
    """Return a number in at most three digits: 0.05, 2,000, 1e-6."""
    if value is None:
        return ""
    if not 1e-3 <= abs(value) < 1e6:
        return re.sub(r"e([+-])0*", r"e\1", f"{value:.2g}").replace("+", "")
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _svg(chart: Graph) -> Markup:
    """Return the drawing without scripts: a tooltip is a `title`, which a browser shows by itself."""
    from pygal.etree import etree

    root = chart.render_tree()
    root.set("role", "img")
    for parent in list(root.iter()):
        words = [child.text for child in parent if child.tag == "desc" and child.get("class") in ("value", "x_label")]
        for child in list(parent):
            classes = child.get("class") or ""
            if not isinstance(child.tag, str) or child.tag in ("defs", "desc") or "tooltip-overlay" in classes:
                parent.remove(child)
        if words and parent.find("title") is None:
            etree.SubElement(parent, "title").text = ": ".join(filter(None, reversed(words)))
        parent.attrib.pop("id", None)
        # A digit after the point is precise enough for a screen, and halves the size of the page.
        for key, value in parent.items():
            parent.set(key, _DECIMALS.sub(r"\1", value))
    return Markup(etree.tostring(root, encoding="unicode"))
