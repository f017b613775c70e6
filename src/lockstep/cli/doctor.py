"""The command that checks this machine, and the needs of a config: `lockstep doctor [CONFIG.yaml]`."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep import __version__
from lockstep.cli.extras import EXTRAS
from lockstep.cli.opened import complete_target, runnable
from lockstep.cli.options import JSON, PATH, RESULTS
from lockstep.cli.terminal import echo_json
from lockstep.errors import is_installed, pip_install
from lockstep.step.host_memory import total_bytes

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.runtime.step_sizes import StepSizes

_VERSIONS = ("snakemake", "torch", "transformers", "onnx", "onnxruntime", "openvino")
# TensorRT has a package for each version of CUDA; of its parts, `bindings` alone is enough to import it.
_TENSORRT = ("tensorrt", "tensorrt-cu12", "tensorrt-cu13", "tensorrt-cu12-bindings", "tensorrt-cu13-bindings")
_GB = 1e9
# Memory of a model's largest job, `validate`, as measured (records/clusters.md; a test compares them): for any model,
# and for each byte of its weights in 16 bits. The rules ask a cluster for more.
JOB_NBYTES = 0.65e9
JOB_PER_BYTE = 4.5
# Bytes of a parameter in the checkpoint that a job makes; a folder is read where it lies.
_COPY_NBYTES = {"gguf": 4.0, "hub": 2.0, "random": 2.0}


@click.command()
@click.argument("config", required=False, type=PATH, metavar="[CONFIG.yaml]")
@click.option(
    "--gpu",
    "target",
    metavar="TARGET",
    shell_complete=complete_target,
    help="Also open this target, on a GPU or CPU, and compare the bits of steps of all sizes.",
)
@RESULTS
@JSON
def doctor(config: Path | None, target: str | None, results: Path, as_json: bool) -> None:
    """List the backends that build and run here.

    And what is missing, with its install line. With a config, also the memory, disk and time that its models need. It
    changes nothing.
    """
    from lockstep.config.load import load

    facts = _machine()
    lines = _machine_lines(facts)
    if target is not None:
        step_sizes = _step_sizes(target, results)
        facts["step_sizes"] = step_sizes.to_json()
        lines.append(str(step_sizes))
    if config is not None:
        loaded = load(config)
        # A model that must be fetched first has no place yet, and stays {}.
        facts["models"] = {name: {} for name in loaded.models}
        for name, place in loaded.check_sources(where=str(config)).items():
            facts["models"][name] = needs(loaded, name, place)
        lines += [model_line(name, needed) for name, needed in facts["models"].items()]
    if as_json:
        return echo_json(facts)
    click.echo("\n".join(lines))


def _machine() -> dict[str, Any]:
    from lockstep.backends.cpu import describe_cpu
    from lockstep.backends.identity import versions

    cpu = describe_cpu()
    extras: dict[str, list[str]] = {}
    for module, extra in EXTRAS.items():
        if not is_installed(module):
            extras.setdefault(extra, []).append(module)
    return {
        "versions": {"lockstep": __version__, **versions(list(_VERSIONS)), **_tensorrt_version()},
        "cpu": {**cpu, "cores": _cores()},
        "memory_bytes": total_bytes(),
        "disk_bytes": _free_disk(),
        "backends": _backends(),
        "missing_extras": extras,
    }


def _step_sizes(name: str, results: Path) -> StepSizes:
    from lockstep.runtime.model import Model, ModelOptions
    from lockstep.runtime.step_sizes import compare_step_sizes

    with runnable(name, None, results) as place:
        options = ModelOptions(adapters_json=place.adapters)
        model = Model.open(place.engines, place.assembly, place.weights, place.target.layers, options)
        # The comparison has a time limit, and first steps load libraries and record graphs.
        model.warm_up()
        return compare_step_sizes(model)


def _tensorrt_version() -> dict[str, str]:
    from lockstep.backends.identity import versions

    installed = versions(list(_TENSORRT))
    for name in _TENSORRT:
        if name in installed:
            return {"tensorrt": installed[name]}
    return {}


def _backends() -> dict[str, dict[str, Any]]:
    """Return for each backend its precisions, and the reasons why engines are not built or run here, or None."""
    from lockstep.config.backends import backends

    by_backend = {}
    for name, settings in backends().items():
        lacking = {precision: reason for precision in settings.precisions if (reason := settings.lacks_here(precision))}
        # Engines of a library that is not installed cannot run either: both have the same reason.
        not_built = settings.missing() or settings.cannot_build()
        by_backend[name] = {
            "precisions": [precision for precision in settings.precisions if precision not in lacking],
            "lacking": lacking,
            "not_built": not_built,
            "not_run": not_built or settings.cannot_run(),
        }
    return by_backend


def needs(config: Config, name: str, place: Path) -> dict[str, Any]:
    """Return a model's parameters, the bytes that its run needs, and seconds by stage; {} where its size is unknown.

    place: its folder, config.json or GGUF file.
    """
    from lockstep.checkpoint.tensors import find_tensors, has_weights
    from lockstep.cli.job_times import seconds_by_stage
    from lockstep.config.first import PARAMETER_NBYTES
    from lockstep.config.sources import kind_of, read_shape

    shape = read_shape(place)
    parameters = shape.num_parameters
    # A number of a packed tensor holds several weights: there the config's shapes count, not the tensors'.
    if shape.packing is None and has_weights(place):
        parameters = sum(math.prod(tensor.shape) for tensor in find_tensors(place).tensors.values())
    # Some config.json lack a size: report nothing rather than a wrong figure.
    if parameters is None:
        return {}
    precisions = config.models[name].all_precisions()
    copy_nbytes = _COPY_NBYTES.get(kind_of(config.models[name].source), 0.0)
    nbytes = copy_nbytes + sum(PARAMETER_NBYTES[precision] for precision in precisions)
    return {
        "parameters": parameters,
        "memory_bytes": round(JOB_NBYTES + JOB_PER_BYTE * 2 * parameters),
        "disk_bytes": round(nbytes * parameters),
        "seconds": seconds_by_stage(config, name, parameters, shape.num_hidden_layers),
    }


def _machine_lines(facts: dict[str, Any]) -> list[str]:
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
    # Extras that are backends have their install line in the notes above.
    missing_extras = [extra for extra in sorted(facts["missing_extras"]) if extra not in facts["backends"]]
    if missing_extras:
        lines.append(f"Extras not installed: {', '.join(missing_extras)}. To install one: {pip_install('NAME')}")
    return lines


def model_line(name: str, needed: dict[str, Any]) -> str:
    """Compare a model's `needs` with this machine, in a line."""
    if not needed:
        return f"{name}: its size is known once it is fetched"
    words = []
    for what, nbytes, available in (
        ("memory", needed["memory_bytes"], total_bytes()),
        ("disk", needed["disk_bytes"], _free_disk()),
    ):
        words.append(f"{_size(nbytes)} of {what}")
        if nbytes > available:
            words[-1] += f", more than the {_size(available)} here"
    total = sum(needed["seconds"].values())
    # They are sorted by time; the five longest fit on a line of a terminal.
    longest = list(needed["seconds"].items())[:5]
    stages = ", ".join(f"{stage} {seconds / total:.0%}" for stage, seconds in longest if seconds >= total / 100)
    time = f"{total / 60:.0f} min" if total < 7200 else f"{total / 3600:,.0f} h"
    words.append(f"{time} on {_cores()} cores ({stages})")
    millions = needed["parameters"] / 1e6
    decimals = 0 if millions >= 1 else 1
    return f"{name}: about {millions:,.{decimals}f} M parameters, {', '.join(words)}"


def _size(nbytes: int) -> str:
    if nbytes < _GB / 10:
        return f"{nbytes / 1e6:.0f} MB"
    return f"{nbytes / _GB:.1f} GB"


def _free_disk() -> int:
    return shutil.disk_usage(".").free


def _cores() -> int:
    return len(os.sched_getaffinity(0))
