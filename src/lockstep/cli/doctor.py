"""The command that says what can be built and run here: `lockstep doctor [CONFIG.yaml]`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep import __version__
from lockstep.cli.extras import EXTRAS
from lockstep.cli.options import JSON, PATH
from lockstep.cli.terminal import echo_json
from lockstep.errors import is_installed, pip_install
from lockstep.targets import is_quantized

if TYPE_CHECKING:
    from lockstep.config.schema import Config

_VERSIONS = ("snakemake", "torch", "transformers", "onnx", "onnxruntime", "openvino")
# TensorRT comes for one version of CUDA or another, as a package of three.
_TENSORRT = ("tensorrt", "tensorrt-cu12", "tensorrt-cu13", "tensorrt-cu12-bindings", "tensorrt-cu13-bindings")
_GB = 1e9
# Of the largest job of a model, as workflow/rules ask a cluster for it: bytes, and bytes for each byte of weights in 16
# bits (docs/clusters.md). A quantised target's graphs are checked with its weights in fp32.
JOB_NBYTES = 2.5e9
JOB_PER_BYTE = 4.5
QUANTIZED_PER_BYTE = 8
_BYTES = {
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "w8a16": 1.2,
    "w4a16": 0.7,
    "w8a8": 1.2,
    "w4a8": 0.7,
    "w8a8-fp8": 1.05,
}  # of a parameter, with scales


@click.command()
@click.argument("config", required=False, type=PATH, metavar="[CONFIG.yaml]")
@JSON
def doctor(config: Path | None, as_json: bool) -> None:
    """Say what can be built and run here, and what is missing, with its install line.

    Of a config also what its models need of memory, disk and time. It changes nothing.
    """
    from lockstep.config.load import load

    facts = _machine()
    if config is not None:
        facts["models"] = _models(load(config))
    if as_json:
        return echo_json(facts)
    for line in _lines(facts):
        click.echo(line)


def _machine() -> dict[str, Any]:
    from lockstep.backends.cpu import describe_cpu
    from lockstep.backends.identity import versions
    from lockstep.step.host_memory import total_bytes

    cpu = describe_cpu()
    extras: dict[str, list[str]] = {}
    for module, extra in EXTRAS.items():
        if not is_installed(module):
            extras.setdefault(extra, []).append(module)
    return {
        "versions": {"lockstep": __version__, **versions(list(_VERSIONS)), **_tensorrt_version()},
        "cpu": {**cpu, "cores": len(os.sched_getaffinity(0))},
        "memory_bytes": total_bytes(),
        "disk_bytes": shutil.disk_usage(".").free,
        "backends": _backends(),
        "missing_extras": extras,
    }


def _tensorrt_version() -> dict[str, str]:
    from lockstep.backends.identity import versions

    installed = versions(list(_TENSORRT))
    tensorrt = [installed[name] for name in _TENSORRT if name in installed]
    return {"tensorrt": tensorrt[0]} if tensorrt else {}


def _backends() -> dict[str, dict[str, Any]]:
    """Return by backend why its engines are not built and not run here, None where they are, and its precisions."""
    from lockstep.config.backends import backends

    by_backend = {}
    for name, settings in backends().items():
        options = settings.build_options(settings.section() if settings.section else None, {})
        lacking = {precision: reason for precision in settings.precisions if (reason := settings.lacks_here(precision))}
        not_built = settings.missing() or settings.cannot_build()
        by_backend[name] = {
            "precisions": [precision for precision in settings.precisions if precision not in lacking],
            "lacking": lacking,
            "not_built": not_built,
            "not_run": not_built or settings.cannot_run(options),
        }
    return by_backend


def _models(config: Config) -> dict[str, dict[str, Any]]:
    """Return what each model of the config needs; without numbers where it must be fetched first."""
    from lockstep.cli.job_times import seconds_by_stage
    from lockstep.config.sources import read_shape

    by_model: dict[str, dict[str, Any]] = {}
    for name, place in config.check_sources().items():
        model = config.models[name]
        shape = read_shape(place)
        parameters = shape.num_parameters
        if parameters is None:
            continue
        factor = QUANTIZED_PER_BYTE if any(map(is_quantized, model.all_precisions())) else JOB_PER_BYTE
        by_model[name] = {
            "parameters": parameters,
            "memory_bytes": round(JOB_NBYTES + factor * 2 * parameters),
            "disk_bytes": round(parameters * sum(_BYTES[precision] for precision in model.all_precisions())),
            "seconds": seconds_by_stage(config, name, parameters, shape.num_hidden_layers),
        }
    return {name: by_model.get(name, {}) for name in config.models}


def _lines(facts: dict[str, Any]) -> list[str]:
    cpu = facts["cpu"]
    lines = [
        ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
        f"CPU: {cpu['architecture']}, {cpu['cores']} cores: {' '.join(cpu['isa'])}",
        f"Memory: {facts['memory_bytes'] / _GB:.1f} GB. Disk here: {facts['disk_bytes'] / _GB:.0f} GB free.",
        "",
        f"{'backend':<13} builds  runs  precisions",
    ]
    notes = []
    for name, entry in facts["backends"].items():
        builds = "no" if entry["not_built"] else "yes"
        runs = "no" if entry["not_run"] else "yes"
        lines.append(f"{name:<13} {builds:<7} {runs:<5} {', '.join(entry['precisions'])}")
        if reason := entry["not_built"] or entry["not_run"]:
            notes.append(f"{name}: {reason}")
        notes += [f"{name}: no {precision}: {reason}" for precision, reason in entry["lacking"].items()]
    lines += ["", *notes]
    for extra, modules in sorted(facts["missing_extras"].items()):
        lines.append(f"{extra}: {', '.join(modules)} not installed: {pip_install(extra)}")
    for name, model in facts.get("models", {}).items():
        lines.append(_model_line(name, model, facts))
    return lines


def _model_line(name: str, model: dict[str, Any], facts: dict[str, Any]) -> str:
    if not model:
        return f"{name}: its size is known once it is fetched: lockstep stage fetch {name}"
    words = []
    for key, what in (("memory_bytes", "memory"), ("disk_bytes", "disk")):
        fits = "" if model[key] <= facts[key] else f", more than the {facts[key] / _GB:.1f} GB here"
        words.append(f"about {model[key] / _GB:.1f} GB of {what}{fits}")
    total = sum(model["seconds"].values())
    stages = ", ".join(f"{stage} {seconds / total:.0%}" for stage, seconds in list(model["seconds"].items())[:5])
    words.append(f"about {total / 60:,.0f} min on {facts['cpu']['cores']} cores ({stages})")
    return f"{name}: about {model['parameters'] / 1e6:,.0f} M parameters: {', '.join(words)}"
