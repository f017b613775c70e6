"""The README's pictures as SVG: `python -m benchmarks.chart` draws them.

In: records of `batches` on one card, with Lockstep's figures and vLLM's, and one of `invariance`, if it is there. Out:
SVG files with colours for light and dark pages, without scripts or fonts: speed in times vLLM's, and how many positions
have the same bits alone and in batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import read_json

RECORDS = Path(__file__).resolve().parents[1] / "records" / "gpu"
PAGE = RECORDS / "llama-3.1-8b.svg"
BITS = RECORDS / "invariance-models.json"
_WIDTH = 720
_LEFT = 190  # where bars begin, after their names
_UNIT = 400  # points of a bar as fast as vLLM
_BAR = 13
_ROW = 36
_TOP = 56
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1d232b; } .quiet { fill: #5b6573; } .end { text-anchor: end; }
.fp16 { fill: #0b5cad; } .fp8 { fill: #8a6100; } line { stroke: #5b6573; stroke-dasharray: 4 3; }
@media (prefers-color-scheme: dark) { text { fill: #e5e9ee; } .quiet { fill: #9aa5b2; } .fp16 { fill: #7db7f5; }
.fp8 { fill: #e6bb55; } line { stroke: #9aa5b2; } }
"""


def speeds(record: Mapping[str, Any]) -> dict[str, float]:
    """Return {measurement: speed divided by vLLM's}."""
    peer = record["vllm"]
    times = {}
    for rows in sorted(map(int, peer["decode"])):
        name = f"{rows} request{'s' * (rows > 1)}, decoding"
        times[name] = record["decode"][str(rows)]["tokens_per_second"] / peer["decode"][str(rows)]
    times["a prompt of 2,048 tokens"] = peer["prompt_2048"] / record["prompts"]["2048"]["milliseconds"]["median"]
    times["512 requests at once"] = min(peer["requests"]) / min(record["requests"]["seconds"])
    return times


def draw() -> str:
    """Return the SVG text of the records of Llama-3.1-8B in fp16 and in fp8, of one kind of card and one vLLM."""
    record = read_json(RECORDS / "llama-3.1-8b.json")
    fp16 = speeds(record)
    fp8 = speeds(read_json(RECORDS / "llama-3.1-8b-fp8.json"))
    version = record["vllm"]["version"]
    device = record["device"]["name"].removeprefix("NVIDIA ")
    bottom = _TOP + _ROW * len(fp16)
    lines = [
        *_opening(f"Llama-3.1-8B on one {device}: times the speed of vLLM {version}", bottom + 24),
        f'<rect class="fp16" x="{_LEFT}" y="28" width="10" height="10"/><text x="{_LEFT + 16}" y="38">fp16</text>',
        f'<rect class="fp8" x="{_LEFT + 70}" y="28" width="10" height="10"/><text x="{_LEFT + 86}" y="38">fp8</text>',
    ]
    for number, (name, times) in enumerate(fp16.items()):
        y = _TOP + _ROW * number
        lines.append(f'<text class="end" x="{_LEFT - 10}" y="{y + 18}">{name}</text>')
        lines += _bar("fp16", y, times) + _bar("fp8", y + _BAR + 1, fp8[name])
    edge = _LEFT + _UNIT
    lines.append(f'<line x1="{edge}" y1="{_TOP - 8}" x2="{edge}" y2="{bottom}"/>')
    lines.append(f'<text class="quiet end" x="{edge}" y="{bottom + 16}">vLLM {version}, its defaults: 1.00</text>')
    return "\n".join([*lines, "</svg>", ""])


def draw_bits(record: Mapping[str, Any]) -> str:
    """Return the SVG text of a record of `invariance`: a bar of the positions of each model, and how many differ."""
    models = record["models"]
    devices = sorted({row["device"]["name"].removeprefix("NVIDIA ") for row in models.values()})
    title = f"{record['positions']:,} positions alone and in batches on {' and '.join(devices)}: "
    lines = _opening(title + f"{record['differing']:,} have other bits", _TOP + _ROW * len(models))
    most = max(row["positions"] for row in models.values())
    for number, (name, row) in enumerate(models.items()):
        y = _TOP + _ROW * number - 16
        width = round(_UNIT * 0.6 * row["positions"] / most)
        lines.append(f'<text class="end" x="{_LEFT - 10}" y="{y + 12}">{name}</text>')
        lines.append(f'<rect class="fp16" x="{_LEFT}" y="{y}" width="{width}" height="{_BAR}"/>')
        figures = f"{row['positions']:,}, {row['differing']:,} differ"
        lines.append(f'<text x="{_LEFT + width + 8}" y="{y + 11}">{figures}</text>')
        about = f"{row['layers']} layers, weights {row['weights']}"
        lines.append(f'<text class="quiet" x="{_LEFT}" y="{y + 28}">{about}</text>')
    return "\n".join([*lines, "</svg>", ""])


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each picture, and its text."""
    yield PAGE, draw()
    if BITS.is_file():
        yield BITS.with_suffix(".svg"), draw_bits(read_json(BITS))


def _opening(title: str, height: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img">',
        f"<title>{title}</title>",
        f"<style>{_STYLE}</style>",
        f'<text x="8" y="18">{title}</text>',
    ]


def _bar(name: str, y: int, times: float) -> list[str]:
    width = round(_UNIT * times)
    bar = f'<rect class="{name}" x="{_LEFT}" y="{y}" width="{width}" height="{_BAR}"/>'
    return [bar, f'<text x="{_LEFT + width + 8}" y="{y + 11}">{times:.2f}</text>']


if __name__ == "__main__":
    for _path, _text in pages():
        _path.write_text(_text, encoding="utf-8")
