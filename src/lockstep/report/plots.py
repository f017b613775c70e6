"""The report's plots: validations and the summary in, SVG files out, the same bytes for the same numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

from lockstep.artifacts import formats
from lockstep.artifacts.files import atomic_path, read_json
from lockstep.targets import Target

# Without a window system; text stays text; ids from a fixed salt, where matplotlib would draw random ones.
matplotlib.use("Agg")
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "lockstep",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_COLORS = ("#0b6e99", "#d9730d", "#6940a5", "#0f7b6c")


def error_by_layer(validations: Sequence[Path], out: Path) -> None:
    """The largest error of each layer's tensors, as it is held to the tolerance (dashed), on a log scale.

    A line for each model and precision, of the validation with the most layers: the others' layers are the same.
    """
    deepest: dict[str, dict[str, Any]] = {}
    for path in validations:
        validation = read_json(path, formats.VALIDATION)
        name = f"{validation['target']['model']}, {validation['target']['precision']}"
        deepest[name] = max(validation, deepest.get(name, validation), key=lambda item: len(item["blocks"]))
    with _figure(out) as figure:
        axes = figure.subplots()
        for number, (name, validation) in enumerate(deepest.items()):
            color = _COLORS[number % len(_COLORS)]
            layers, errors = zip(*sorted(_worst_by_layer(validation).items()))
            axes.plot(layers, errors, color=color, marker="o", markersize=3, linewidth=1, label=name)
            axes.axhline(_tolerance(validation), color=color, linestyle="--", linewidth=0.6)
        axes.set(yscale="log", xlabel="layer", ylabel="largest error")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def speed(summary_json: Path, out: Path) -> None:
    """Prefill and decode of each target in tokens per second, side by side."""
    rows = read_json(summary_json, formats.SUMMARY)["targets"]
    names = [str(Target(row["model"], row["precision"], row["layers"], row["backend"])) for row in rows]
    with _figure(out, height=0.8 + 0.3 * len(rows)) as figure:
        for axes, kind, color in zip(figure.subplots(ncols=2, sharey=True), ("prefill", "decode"), _COLORS):
            values = [row[f"{kind}_tokens_per_s"] for row in rows]
            bars = axes.barh(range(len(rows)), [value or 0 for value in values], height=0.6, color=color)
            axes.bar_label(bars, ["-" if value is None else f"{value:.0f}" for value in values], padding=3)
            axes.set(
                xlabel=f"{kind}, tokens/s", yticks=range(len(rows)), yticklabels=names, ylim=(len(rows) - 0.5, -0.5)
            )
            axes.margins(x=0.2)
        figure.tight_layout()


def _worst_by_layer(validation: dict[str, Any]) -> dict[int, float]:
    worst: dict[int, float] = {}
    for block in validation["blocks"]:
        error = max(tensor["relative_error"] for tensor in block["tensors"].values())
        worst[block["layer"]] = max(error, worst.get(block["layer"], 0.0))
    # A log scale has no zero; an exact layer is shown at the edge of what fp32 can tell.
    return {layer: max(error, 1e-9) for layer, error in worst.items()}


def _tolerance(validation: dict[str, Any]) -> float:
    return max(tensor["tolerance"] for block in validation["blocks"] for tensor in block["tensors"].values())


@contextmanager
def _figure(out: Path, height: float = 3.2) -> Iterator[Any]:
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7, height))
        yield figure
        with atomic_path(out) as temporary:
            figure.savefig(temporary, format="svg", bbox_inches="tight", metadata={"Date": None})
