"""The plots of a measurement, as SVG text."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from lockstep.load.records import COMPLETED, Record
from lockstep.load.report import Run
from lockstep.load.svg import COLORS, WIDTH, coordinate, label, rule, svg

_LEFT = 64
_PLOT = (WIDTH - 84, 220)
_TOP = 16
_MOST_ROWS = 300  # requests in a timeline
_LATENCIES = ("latency_p50_ms", "latency_p99_ms", "ttft_p50_ms", "ttft_p99_ms", "itl_p99_ms")
_THROUGHPUTS = ("output_tokens_per_s",)
_NAMES = {
    "latency_p50_ms": "latency, p50",
    "latency_p99_ms": "latency, p99",
    "ttft_p50_ms": "time to first token, p50",
    "ttft_p99_ms": "time to first token, p99",
    "itl_p99_ms": "inter-token latency, p99",
    "output_tokens_per_s": "output tokens/s",
}


def latency(runs: Sequence[Run]) -> str:
    """Draw latencies over the request rate, both axes from 0."""
    return _over_rate(runs, _LATENCIES, "Latency over the request rate", "ms")


def throughput(runs: Sequence[Run]) -> str:
    """Draw output tokens per second over the request rate, both axes from 0."""
    return _over_rate(runs, _THROUGHPUTS, "Throughput over the request rate", "tokens/s")


def _over_rate(runs: Sequence[Run], keys: Sequence[str], title: str, unit: str) -> str:
    """Draw figures over the rate, of the runs that have one; at least one has."""
    lines = {
        key: [(run.rate, value) for run in runs if run.rate is not None and (value := run.figures[key]) is not None]
        for key in keys
    }
    points = [point for line in lines.values() for point in line]
    x = _Axis(max((rate for rate, _ in points), default=1.0), _LEFT, _PLOT[0])
    y = _Axis(max((value for _, value in points), default=1.0), _TOP + _PLOT[1], -_PLOT[1])
    parts = _axes(x, y, "requests/s", unit)
    for number, (key, line) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        path = " ".join(f"{coordinate(x.at(rate))},{coordinate(y.at(value))}" for rate, value in sorted(line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        for rate, value in line:
            tip = f"<title>{html.escape(f'{_NAMES[key]} at {rate:g}/s: {value:.4g} {unit}')}</title>"
            place = f'cx="{coordinate(x.at(rate))}" cy="{coordinate(y.at(value))}"'
            parts.append(f'<circle {place} r="3" fill="{color}">{tip}</circle>')
    return svg(title, _legend(parts, [_NAMES[key] for key in keys]), parts)


def timeline(records: Sequence[Record]) -> str:
    """Draw a row for each of up to 300 requests: due, waiting, getting tokens; a cross where it failed."""
    chosen = list(records)[:: max(1, math.ceil(len(records) / _MOST_ROWS))]
    x = _Axis(max((record.end or 0.0 for record in chosen), default=1.0), _LEFT, _PLOT[0])
    row = max(1.0, min(8.0, 2 * _PLOT[1] / max(len(chosen), 1)))
    bottom = _TOP + row * len(chosen)
    parts = [rule(x.at(tick), _TOP, x.at(tick), bottom) for tick in x.ticks]
    parts += [label(x.at(tick), bottom + 14, f"{tick:g}", "middle") for tick in x.ticks]
    parts.append(label(_LEFT + _PLOT[0] / 2, bottom + 32, "seconds", "middle"))
    parts += [label(_LEFT - 8, _TOP + row / 2, str(each.number), "end") for each in chosen[:1]]
    parts += [label(_LEFT - 8, bottom - row / 2, str(each.number), "end") for each in chosen[1:][-1:]]
    for at, record in enumerate(chosen):
        end = record.end if record.end is not None else record.scheduled
        sent = record.sent if record.sent is not None else end
        first = record.chunks[0] if record.chunks else end
        middle = _TOP + row * (at + 0.5)
        for color, begin, until in zip(_PHASES.values(), (record.scheduled, sent, first), (sent, first, end)):
            if until > begin:
                how = f'stroke="{color}" stroke-width="{coordinate(row * 0.8)}"'
                parts.append(rule(x.at(begin), middle, x.at(until), middle, how))
        if record.status != COMPLETED:
            tip = f"<title>{html.escape(f'request {record.number}: {record.status} {record.error or str()}')}</title>"
            place = f'cx="{coordinate(x.at(end))}" cy="{coordinate(middle)}"'
            parts.append(f'<circle {place} r="{coordinate(max(2.0, row / 2))}" fill="{_OTHER}">{tip}</circle>')
    names = [*_PHASES, "end of a request that was cancelled, refused or failed"]
    height = _legend(parts, names, [*_PHASES.values(), _OTHER], bottom + 50)
    return svg("Requests along the time", height, parts)


_PHASES = {"due, not sent": COLORS[4], "sent, no token yet": COLORS[1], "tokens": COLORS[0]}
_OTHER = COLORS[2]


class _Axis:
    """A linear axis from 0 to a round number; at: the place of a value. ticks: five or so."""

    def __init__(self, largest: float, origin: float, length: float) -> None:
        largest = largest if largest > 0 else 1.0
        rough = largest / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
        count = math.ceil(largest / step - 1e-9)
        self.ticks = [round(step * number, 12) for number in range(count + 1)]
        self._origin = origin
        self._length = length
        self._largest = step * count

    def at(self, value: float) -> float:
        return self._origin + self._length * value / self._largest


def _axes(x: _Axis, y: _Axis, x_name: str, y_name: str) -> list[str]:
    bottom = _TOP + _PLOT[1]
    parts = [rule(_LEFT, y.at(tick), _LEFT + _PLOT[0], y.at(tick)) for tick in y.ticks]
    parts += [label(_LEFT - 8, y.at(tick), f"{tick:g}", "end") for tick in y.ticks]
    parts += [label(x.at(tick), bottom + 16, f"{tick:g}", "middle") for tick in x.ticks]
    parts.append(label(_LEFT + _PLOT[0] / 2, bottom + 34, x_name, "middle"))
    parts.append(label(4, _TOP - 8, y_name, "start"))
    return parts


def _legend(parts: list[str], names: Sequence[str], colors: Sequence[str] = COLORS, top: float = 290) -> float:
    """Add a row for each name; return the chart's height."""
    for number, (name, color) in enumerate(zip(names, colors)):
        row = top + 18 * number
        parts.append(rule(_LEFT, row, _LEFT + 24, row, f'stroke="{color}" stroke-width="3"'))
        parts.append(label(_LEFT + 32, row, name, "start"))
    return top + 18 * len(names)
