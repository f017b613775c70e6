"""The charts of each page: a drawing for each question; errors on logarithmic scales, next to rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from markupsafe import Markup

from lockstep.artifacts.reports import BlockErrors, TensorError
from lockstep.report import charts
from lockstep.report.charts import Point
from lockstep.report.details import Details
from lockstep.report.jobs import STATES, JobState
from lockstep.stages import STAGES
from lockstep.targets import Target

_MB = 1e6
Worst = tuple[int | None, str, TensorError]  # the layer, a tensor's name, and its errors


def model_charts(details_of: Mapping[Target, Details], jobs: Sequence[JobState]) -> list[Markup]:
    """Return the charts of one model: targets side by side, its jobs with their states, and where the time went."""
    # Later keys win: one point for each precision and backend, of the target with the most layers.
    deepest = {(target.precision, target.backend): target for target in sorted(details_of, key=_depth)}
    speeds: dict[str, list[Point]] = {}
    sizes: dict[str, list[Point]] = {}
    # Colours go by order: targets with a speed come first, so that a precision has the same colour in both charts.
    for target in sorted(deepest.values(), key=lambda target: details_of[target].speed is None):
        details = details_of[target]
        error = _error_from_checkpoint(details)
        if error is None:
            continue
        name = f"{target.precision} on {target.backend}"
        if details.speed:
            point = Point(details.speed.decode_tokens_per_s, error, f"{name}: {details.speed.decode_tokens_per_s:.0f}")
            speeds.setdefault(target.precision, []).append(point)
        size = sum(_sizes(details).values())
        sizes.setdefault(target.precision, []).append(Point(size, error, f"{name}: {size:.1f} MB"))
    return _drawn(
        charts.scatter("Quality and speed", "tokens/s, decoding", "logit difference", speeds),
        charts.scatter("Quality and size", "MB of weights and engines", "logit difference", sizes),
        _job_graph(list(details_of), jobs),
        _stage_times(jobs),
    )


def target_charts(name: Target, details: Details, jobs: Sequence[JobState]) -> list[Markup]:
    needed = [entry for entry in jobs if entry.is_for(name)]
    sizes = _sizes(details)
    golden_job = next((entry for entry in needed if entry.job.stage == "golden" and entry.memory), None)
    if golden_job and golden_job.memory:
        sizes["process at its peak"] = golden_job.memory / _MB
    return _drawn(
        _errors_by_layer(details),
        _errors_by_position(details),
        _speed_by_requests(details),
        charts.bars("Memory, MB", sizes),
        _stage_times(needed),
    )


def worst_of_layers(blocks: Sequence[BlockErrors]) -> list[Worst]:
    """Return the tensor of each layer whose error is nearest to its tolerance, or furthest beyond."""
    layers: dict[int | None, list[Worst]] = {}
    for block in blocks:
        for name, tensor in block.tensors.items():
            layers.setdefault(block.layer, []).append((block.layer, name, tensor))
    return [max(tensors, key=_used_tolerance) for tensors in layers.values()]


def _used_tolerance(entry: Worst) -> float:
    tensor = entry[2]
    # A NaN or infinity.
    if tensor.relative_error is None:
        return float("inf")
    return tensor.relative_error / max(tensor.tolerance, 1e-30)


def _drawn(*drawings: Markup) -> list[Markup]:
    return [drawing for drawing in drawings if drawing]


def _depth(target: Target) -> float:
    return float("inf") if target.layers == "all" else float(target.layers)


def _error_from_checkpoint(details: Details) -> float | None:
    """Return the largest error of a logit, compared with the checkpoint in float32.

    Of quantized weights the quantization error, which is far larger than the engines' error.
    """
    if details.quantization_error:
        return details.quantization_error.max_logit_error
    return getattr(details.checks["golden"].report, "max_logit_error", None)


def _sizes(details: Details) -> dict[str, float]:
    sizes = {"weights": details.weights_bytes, "engines": details.engine_bytes}
    return {name: size / _MB for name, size in sizes.items() if size is not None}


def _errors_by_layer(details: Details) -> Markup:
    report = details.checks["validate"].report
    worst = worst_of_layers(getattr(report, "blocks", None) or ())
    tensors = [tensor for _, _, tensor in worst]
    return charts.lines(
        "Error by layer",
        "layer",
        [str(layer) for layer, _, _ in worst],
        {
            "largest error": [tensor.relative_error for tensor in tensors],
            "rounding": [tensor.noise for tensor in tensors],
            "passes": [tensor.tolerance for tensor in tensors],
        },
    )


def _errors_by_position(details: Details) -> Markup:
    positions = getattr(details.checks["golden"].report, "positions", ())
    return charts.curves(
        "Logit error by position",
        "tokens before",
        {
            "largest error": [Point(entry.num_tokens, entry.logit_error or 0.0) for entry in positions],
            "rounding": [Point(entry.num_tokens, entry.logit_noise) for entry in positions],
            "passes": [Point(entry.num_tokens, entry.tolerance) for entry in positions],
        },
        dots_size=1,
    )


def _speed_by_requests(details: Details) -> Markup:
    speeds = getattr(details.speed, "by_requests", ())
    points = [Point(speed.requests, speed.decode_tokens_per_s) for speed in speeds]
    requests = [point.x for point in points]
    return charts.curves("Speed, tokens/s", "requests that decode together", {"decoding": points}, requests)


def _stage_times(jobs: Sequence[JobState]) -> Markup:
    seconds = dict.fromkeys(STAGES, 0.0)
    for entry in jobs:
        seconds[entry.job.stage] += entry.seconds or 0.0
    return charts.bars("Time, s", {stage: time for stage, time in seconds.items() if time})


def _job_graph(targets: Sequence[Target], jobs: Sequence[JobState]) -> Markup:
    """Draw each job in the column of its stage, at the mean height of the targets that need it."""
    heights = {target: float(len(targets) - 1 - number) for number, target in enumerate(targets)}
    present = {entry.job.stage for entry in jobs}
    stages = [stage for stage in STAGES if stage in present]
    points = {}
    states: dict[str, list[Point]] = {state: [] for state in STATES}
    for entry in jobs:
        height = fmean(height for target, height in heights.items() if entry.is_for(target))
        point = Point(stages.index(entry.job.stage), height, f"{entry.job}: {entry.state}")
        points[entry.job.output] = point
        states[entry.state].append(point)
    rows: dict[str, list[float]] = {}
    for target, height in heights.items():
        rows.setdefault(f"{target.precision} {target.backend}", []).append(height)
    edges = []
    for entry in jobs:
        edges += [(points[path], points[entry.job.output]) for path in entry.job.inputs.values() if path in points]
    return charts.graph("Jobs", stages, {name: fmean(of_row) for name, of_row in rows.items()}, edges, states)
