"""The table of stages.

It says what each stage reads, makes and takes from the config, which function makes it, and how it is treated. Rules,
the script of all jobs, the command line, records, locks, the cache, `explain` and `reproduce` read it. A new stage is
an entry here, its function, a method of `Results` for what it makes, and a rule that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lockstep.config.sources import GgufSource, HubSource, RandomSource
from lockstep.pipeline import options, pinned
from lockstep.pipeline.resources import Resources
from lockstep.pipeline.stage import Finished, Stage, path_of
from lockstep.pipeline.step import JobSpec
from lockstep.targets import Results, Target, is_quantized

if TYPE_CHECKING:
    from lockstep.config.schema import Config


def _has_full_precision(model: Finished) -> bool:
    return not model.precisions or not all(map(is_quantized, model.precisions))


_JOBS = "lockstep.pipeline.jobs"

_TABLE = (
    Stage(
        "fetch", makes="source", code="checkpoint.hub", job=f"{_JOBS}:fetch", options=options.source,
        needed=options.comes_from(HubSource), continues=True,
        help="A model on the hub, a GGUF file or random weights -> source.json and its folder.",
    ),
    Stage(
        "make_checkpoint", makes="source", code="export.make_checkpoint", job=f"{_JOBS}:make_checkpoint",
        options=options.source, needed=options.comes_from(GgufSource, RandomSource),
        resources=Resources(1500, minutes_per_gb=5),
    ),
    Stage(
        "resolve", makes="checkpoint", code="checkpoint", job=f"{_JOBS}:resolve", options=options.source,
        waits_for={"source": options.is_fetched}, pinned=pinned.pin_checkpoint, is_reproduced=True,
        resources=Resources(1000, minutes_per_gb=2),
        help="Checkpoint folder -> checkpoint.json and architecture.json.",
    ),
    Stage(
        "architecture", makes="architecture", code="checkpoint", job=f"{_JOBS}:architecture", options=options.source,
        waits_for={"source": options.is_fetched}, resources=Resources(1000),
    ),
    Stage(
        "export", makes="assembly", reads=("architecture",), code="export", job=f"{_JOBS}:export",
        options=options.export, pinned=pinned.pin_graphs, is_cached=True, is_reproduced=True, owns_folder=True,
        resources=Resources(2000, 0.1),
        help="architecture.json -> assembly.json and its graphs.",
    ),
    Stage(
        "convert", makes="weights", reads=("checkpoint",), reads_quantized={"assembly": "assembly"}, code="weights",
        job=f"{_JOBS}:convert", pinned=pinned.pin_weights, is_cached=True, is_reproduced=True,
        resources=Resources(1000, minutes_per_gb=5),
        help="checkpoint.json -> weights.json in one precision.",
    ),
    Stage(
        "validate", makes="validation", reads=("checkpoint", "weights", "assembly"), code="verify.validate",
        job=f"{_JOBS}:validate", options=options.validate, is_check=True, is_judged=True, is_named=True,
        is_summarised=True, resources=Resources(2500, 8, minutes_per_gb=20),
        help="Graphs against torch, at one layer count.",
    ),
    Stage(
        "build", makes="engines", reads=("assembly",), code="backends", job=f"{_JOBS}:build", options=options.build,
        needed=lambda config, target: config.is_built(target), pinned=pinned.pin_engines, is_cached=True,
        is_reproduced=True, is_summarised=True, continues=True, owns_folder=True,
        # TensorRT's library and its builder come to the graphs, which hold no weights.
        resources=Resources(4000, minutes=180),
        help="assembly.json -> the engine set of one backend.",
    ),
    Stage(
        "compare", makes="comparison", reads=("assembly", "weights", "engines"), code="verify.compare",
        job=f"{_JOBS}:compare", options=options.compare, needed=lambda config, target: config.is_compared(target),
        required=lambda model: False,  # engines of some precisions are not compared
        is_check=True, is_judged=True, is_summarised=True, resources=Resources(2500, 4, minutes_per_gb=20),
        help="Each engine against its graph in ONNX Runtime.",
    ),
    Stage(
        "reference", makes="reference", reads=("checkpoint",), beside=("logits",), code="verify.golden.reference",
        job=f"{_JOBS}:reference", options=options.reference, pinned=pinned.pin_reference, is_check=True, is_cached=True,
        resources=Resources(2500, 4, minutes_per_gb=20),
        help="checkpoint.json -> tokens and logits of transformers.",
    ),
    Stage(
        "quantized_reference", makes="quantized_reference", reads=("checkpoint", "weights", "reference"),
        beside=("quantized_logits", "drift"), code="verify.golden.quantized", job=f"{_JOBS}:quantized_reference",
        options=options.quantized_reference, needed=lambda config, target: is_quantized(target.precision),
        is_check=True, is_cached=True, is_reproduced=True, only_quantized=True,
        # Both models, the checkpoint's and the one of dequantised weights, one after the other.
        resources=Resources(2500, 8, minutes_per_gb=30),
        help="Tokens and logits of transformers on the dequantised weights, and their drift.",
    ),
    Stage(
        "golden", makes="golden", reads=("assembly", "weights", "engines", "reference"), beside=("speed",),
        reads_quantized={"reference": "quantized_reference"},
        code="verify.golden.check", job=f"{_JOBS}:golden", options=options.golden, pinned=pinned.pin_golden,
        needed=lambda config, target: config.is_run(target), required=lambda model: model.runs,
        is_check=True, is_judged=True, is_reproduced=True, is_named=True, is_summarised=True,
        resources=Resources(2500, 4.5, minutes_per_gb=30),
        help="Engine set against the reference, and its speed.",
    ),
    Stage(
        "served", makes="served", reads=("assembly", "weights", "engines", "reference", "golden"), code="serve.check",
        runs_here_too=True,
        reads_quantized={"reference": "quantized_reference"},
        job=f"{_JOBS}:served", options=options.served, is_check=True, is_judged=True, is_named=True, is_summarised=True,
        resources=Resources(2500, 4.5, minutes_per_gb=30),
        needed=lambda config, target: config.is_run(target) and config.check_server,
        required=lambda model: model.runs and model.is_served,
        help="A server on the engine set against the golden check.",
    ),
    Stage(
        "fetch_adapters", makes="adapter_sources", code="checkpoint.hub.adapters", job=f"{_JOBS}:fetch_adapters",
        options=options.adapters_on_hub, continues=True, only_adapters=True,
        needed=lambda config, target: options.fetches_adapters(config, target.model),
        help="LoRA adapters on the hub -> adapter_sources.json and their folders.",
    ),
    Stage(
        "adapters", makes="adapters", reads=("checkpoint",), code="weights.check_adapters", job=f"{_JOBS}:adapters",
        options=options.adapters, needed=options.has_adapters, pinned=pinned.pin_adapters, only_adapters=True,
        waits_for={"adapter_sources": options.fetches_adapters}, resources=Resources(1000),
        help="Folders of LoRA adapters -> adapters.json, held against the checkpoint.",
    ),
    Stage(
        "adapted_reference", makes="adapted_reference", reads=("checkpoint", "adapters"),
        code="verify.golden.adapted_reference", job=f"{_JOBS}:adapted_reference", options=options.adapted_reference,
        needed=lambda config, target: options.has_adapters(config, target) and not is_quantized(target.precision),
        required=_has_full_precision, is_check=True, only_adapters=True,
        resources=Resources(2500, 4, minutes_per_gb=20), help="Tokens and logits of transformers with each adapter.",
    ),
    Stage(
        "quantized_adapted_reference", makes="quantized_adapted_reference", reads=("checkpoint", "weights", "adapters"),
        code="verify.golden.adapted_reference", job=f"{_JOBS}:quantized_adapted_reference", only_quantized=True,
        needed=lambda config, target: options.has_adapters(config, target) and is_quantized(target.precision),
        options=options.quantized_adapted_reference, is_check=True, only_adapters=True,
        resources=Resources(2500, 4, minutes_per_gb=20),
        help="Tokens and logits of transformers on the dequantised weights with each adapter.",
    ),
    Stage(
        "adapted", makes="adapted", reads=("assembly", "weights", "engines", "adapters", "adapted_reference"),
        reads_quantized={"adapted_reference": "quantized_adapted_reference"},
        code="verify.golden.adapted", job=f"{_JOBS}:adapted", options=options.adapted, is_check=True, is_judged=True,
        needed=lambda config, target: config.is_run(target) and options.has_adapters(config, target),
        pinned=pinned.pin_adapted, required=lambda model: model.runs, is_named=True, is_summarised=True,
        only_adapters=True, resources=Resources(2500, 4.5, minutes_per_gb=30),
        help="Engine set with several adapters in one batch against the reference of each.",
    ),
)  # fmt: skip

STAGES: dict[str, Stage] = {stage.name: stage for stage in _TABLE}
# Jobs that are of no one model: they show results. Their code, by rule.
REPORTS = {"summary": "report.summary", "plots": "report.plots"}
# What holds of a job that is no stage's.
_NO_STAGE = Stage("", makes="config", code="", job="")


def entry_of(step: JobSpec) -> Stage:
    """Return the job's entry in the table of stages.

    For a report or the config, one that is treated in no special way.
    """
    return STAGES.get(step.stage, _NO_STAGE)


def steps(config: Config, results: Results, target: Target) -> list[JobSpec]:
    """Return all jobs of one target, each after those that it reads from."""
    names = {"model": target.model, "precision": target.precision, "layers": target.layers, "backend": target.backend}
    return [step(stage.name, config, results, names) for stage in STAGES.values() if stage.needed(config, target)]


def all_steps(config: Config, results: Results, targets: Iterable[Target]) -> list[JobSpec]:
    """Return the jobs of several targets, each once, in the order of the targets."""
    found: dict[tuple[Any, ...], JobSpec] = {}
    for target in targets:
        names = vars(target)
        for stage in STAGES.values():
            key = stage.name, *(names[name] for name in stage.wildcards)
            if key not in found and stage.needed(config, target):
                found[key] = step(stage.name, config, results, names)
    return list(found.values())


def step(stage: str, config: Config, results: Results, names: Mapping[str, Any]) -> JobSpec:
    """Return one job.

    names: model, precision, layers, backend; those that the stage has are taken.
    """
    entry = STAGES[stage]
    taken = {name: names[name] for name in entry.wildcards}
    return JobSpec(
        stage,
        {name: str(value) for name, value in taken.items()},
        {name: path_of(made, results, taken) for name, made in entry.inputs(taken.get("precision")).items()},
        entry.options(config, **taken),
        path_of(entry.makes, results, taken),
        python=config.interpreter(taken["backend"]) if "backend" in taken else None,
        device=config.device_of(taken["backend"]) if "backend" in taken else None,
    )
