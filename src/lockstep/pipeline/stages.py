"""The table of stages.

It says what each stage reads, makes and takes from the config, which function makes it, and how it is treated. Rules,
the script of all jobs, the command line, records, locks, the cache, `explain` and `reproduce` read it. A new stage is
an entry here, its function, a method of `Results` for what it makes, and a rule that names it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.artifacts.build_record import BuildKey
from lockstep.config.sources import FolderSource, HubSource, RandomSource, parse_source
from lockstep.pipeline import pinned
from lockstep.pipeline.resources import Resources
from lockstep.pipeline.step import JobSpec
from lockstep.targets import Results, Target, is_quantized

if TYPE_CHECKING:
    from lockstep.config.schema import Config

Options = Callable[..., dict[str, Any]]  # (config, and the stage's wildcards by name) -> plain JSON


@dataclass(frozen=True)
class Finished:
    """What was made of a model, on which the rest of its lock depends.

    precisions: of its weights. runs: some of its engines run here.
    """

    precisions: frozenset[str]
    has_adapters: bool
    runs: bool


@dataclass(frozen=True)
class Stage:
    """One kind of job.

    Artefacts are methods of `Results`: their parameters are the stage's wildcards. makes: the artefact, whose manifest
    is the result. reads: artefacts. code: the module of this package that the stage enters by; a change of what it
    imports makes the stage run again. job: `module:function` that is given the `Job`.
    """

    name: str
    makes: str
    code: str
    job: str
    reads: tuple[str, ...] = ()
    # Where weights are quantised, {name: artefact}: read besides or, under a name of `reads`, in its place.
    reads_quantized: Mapping[str, str] = field(default_factory=dict)
    # {artefact: condition on (config, model)}: waited for where a job brings what else lies in a folder of the config.
    waits_for: Mapping[str, Callable[[Config, str], bool]] = field(default_factory=dict)
    # Made beside the manifest, by name of the rule's output. Speeds are no part of a record.
    beside: tuple[str, ...] = ()
    options: Options = lambda config, **names: {}
    needed: Callable[[Config, Target], bool] = lambda config, target: True
    # What a lock pins of it, from its manifest and its record. None: nothing.
    pinned: Callable[[Path, BuildKey], pinned.Pinned] | None = None
    # Whether a lock of such a model must have it; besides, a model has what its precisions and adapters ask for.
    required: Callable[[Finished], bool] = lambda model: True
    # What a job asks of a cluster. None: it runs where Snakemake runs.
    resources: Resources | None = None
    is_check: bool = False  # the lock pins what the config says to it; a failure leaves a report
    is_judged: bool = False  # a failure leaves its report or its reason as `<name>.failed.json`
    is_cached: bool = False  # in the shared cache of artefacts
    is_reproduced: bool = False  # made again by `lockstep reproduce`
    is_named: bool = False  # its results speak of the model by its name in the config
    is_summarised: bool = False  # the summary shows its results
    only_quantized: bool = False  # other precisions than those of quantised weights do without
    only_adapters: bool = False  # models without adapters do without
    continues: bool = False  # begins with what an earlier run made
    owns_folder: bool = False  # clears its folder of what an earlier artefact left
    help: str = field(default="", compare=False)

    @property
    def wildcards(self) -> tuple[str, ...]:
        """Return which of model, precision, layers and backend the stage has."""
        return wildcards_of(self.makes)

    def is_of(self, precision: str) -> bool:
        """Return whether targets of this precision have the stage."""
        return is_quantized(precision) or not self.only_quantized

    def is_required(self, model: Finished) -> bool:
        """Return whether the lock of a finished model must have this stage."""
        is_in_lock = self.pinned is not None or self.is_check
        has_precision = not self.only_quantized or any(map(is_quantized, model.precisions))
        has_adapters = not self.only_adapters or model.has_adapters
        return is_in_lock and has_precision and has_adapters and self.required(model)

    def inputs(self, precision: str | None) -> dict[str, str]:
        """Return {name: artefact} that a job of this precision reads.

        precision: None for a stage without one.
        """
        quantized = precision is not None and is_quantized(precision)
        return {name: name for name in self.reads} | (dict(self.reads_quantized) if quantized else {})


@functools.cache
def wildcards_of(artefact: str) -> tuple[str, ...]:
    """Return the parameters of `Results.<artefact>`."""
    return tuple(inspect.signature(getattr(Results, artefact)).parameters)[1:]


def path_of(artefact: str, results: Results, names: Mapping[str, Any]) -> Path:
    """Return the path of an artefact. names: values of at least its wildcards."""
    return getattr(results, artefact)(*(names[name] for name in wildcards_of(artefact)))


def _source(config: Config, model: str) -> dict[str, Any]:
    return {"source": config.models[model].source}


def _tolerance(config: Config, model: str, precision: str, backend: str | None = None) -> dict[str, Any]:
    return {"tolerance": config.tolerance(model, precision, backend).model_dump()}


def _validate(config: Config, model: str, precision: str, layers: int | str) -> dict[str, Any]:
    return {**_tolerance(config, model, precision), "max_seq_len": config.limits.max_seq_len}


def _compare(config: Config, model: str, precision: str, backend: str) -> dict[str, Any]:
    return {"tolerance": config.compare_tolerance(model, precision, backend), "limits": config.engine_limits()}


def _reference(config: Config, model: str, layers: int | str) -> dict[str, Any]:
    return {"golden": config.reference_terms(model)}


def _quantized_reference(config: Config, model: str, precision: str, layers: int | str) -> dict[str, Any]:
    return {"golden": config.reference_terms(model), "drift_text": config.models[model].golden.drift_text}


def _golden(config: Config, model: str, precision: str, layers: int | str, backend: str) -> dict[str, Any]:
    # What the config expects the checkpoint says; of quantised weights the drift report shows what became of it.
    prompts = config.models[model].golden.prompts
    expected = [None if is_quantized(precision) else prompt.expected.get(layers) for prompt in prompts]
    return {"expected": expected, **_tolerance(config, model, precision, backend), "limits": config.limits.model_dump()}


def _served(config: Config, model: str, precision: str, layers: int | str, backend: str) -> dict[str, Any]:
    return {**_tolerance(config, model, precision, backend), "limits": config.limits.model_dump()}


def _export(config: Config, model: str, precision: str) -> dict[str, Any]:
    settings = config.models[model]
    ranks = {"tensor_parallel": settings.tensor_parallel} if settings.tensor_parallel > 1 else {}
    # Not which adapters there are: another one changes no graph.
    room = {"max_adapters": settings.max_adapters, **_rank_and_targets(config, model)}
    group = {"group_size": settings.group_size} if is_quantized(precision) else {}
    return {**ranks, **({"adapters": room} if settings.adapters else {}), **group}


def _rank_and_targets(config: Config, model: str) -> dict[str, Any]:
    settings = config.models[model]
    targets = settings.lora_target_modules
    return {"max_lora_rank": settings.max_lora_rank, "targets": None if targets is None else list(targets)}


def _adapters(config: Config, model: str) -> dict[str, Any]:
    sources = {name: adapter.source for name, adapter in sorted(config.models[model].adapters.items())}
    return {"sources": sources, **_rank_and_targets(config, model)}


def _adapters_on_hub(config: Config, model: str) -> dict[str, Any]:
    sources = {name: adapter.source for name, adapter in sorted(config.models[model].adapters.items())}
    return {"sources": {name: text for name, text in sources.items() if isinstance(parse_source(text), HubSource)}}


def fetches_adapters(config: Config, model: str) -> bool:
    """Return whether a job brings adapters of a model from the hub."""
    return bool(_adapters_on_hub(config, model)["sources"])


def _quantized_adapted_reference(config: Config, model: str, precision: str, layers: int | str) -> dict[str, Any]:
    return _adapted_reference(config, model, layers)


def _adapted_reference(config: Config, model: str, layers: int | str) -> dict[str, Any]:
    prompts = {name: [prompt.text for prompt in each] for name, each in config.adapter_prompts(model).items()}
    return {"golden": {"max_new_tokens": config.models[model].golden.max_new_tokens, "prompts": prompts}}


def _adapted(config: Config, model: str, precision: str, layers: int | str, backend: str) -> dict[str, Any]:
    prompts = [prompt for each in config.adapter_prompts(model).values() for prompt in each]
    expected = [None if is_quantized(precision) else prompt.expected.get(layers) for prompt in prompts]
    return {"expected": expected, **_tolerance(config, model, precision, backend), "limits": config.limits.model_dump()}


def _has_adapters(config: Config, target: Target) -> bool:
    return bool(config.models[target.model].adapters)


def _build(config: Config, model: str, precision: str, backend: str) -> dict[str, Any]:
    return {"options": config.build_options(backend)}


def _comes_from(kind: type) -> Callable[[Config, Target], bool]:
    return lambda config, target: isinstance(parse_source(config.models[target.model].source), kind)


def is_fetched(config: Config, model: str) -> bool:
    """Return whether a job brings the checkpoint of a model.

    Else it lies in a folder that the config names.
    """
    return not isinstance(parse_source(config.models[model].source), FolderSource)


def _has_full_precision(model: Finished) -> bool:
    return not model.precisions or not all(map(is_quantized, model.precisions))


_JOBS = "lockstep.pipeline.jobs"

_TABLE = (
    Stage(
        "fetch", makes="source", code="checkpoint.hub", job=f"{_JOBS}:fetch", options=_source,
        needed=_comes_from(HubSource), continues=True,
        help="A model on the hub, or random weights -> source.json and its folder.",
    ),
    Stage(
        "random_weights", makes="source", code="export.random_model", job=f"{_JOBS}:random_weights", options=_source,
        needed=_comes_from(RandomSource), resources=Resources(1500, minutes_per_gb=5),
    ),
    Stage(
        "resolve", makes="checkpoint", code="checkpoint", job=f"{_JOBS}:resolve", options=_source,
        waits_for={"source": is_fetched}, pinned=pinned.pin_checkpoint, is_reproduced=True,
        resources=Resources(1000, minutes_per_gb=2),
        help="Checkpoint folder -> checkpoint.json and architecture.json.",
    ),
    Stage(
        "architecture", makes="architecture", code="checkpoint", job=f"{_JOBS}:architecture", options=_source,
        waits_for={"source": is_fetched}, resources=Resources(1000),
    ),
    Stage(
        "export", makes="assembly", reads=("architecture",), code="export", job=f"{_JOBS}:export",
        options=_export, pinned=pinned.pin_graphs, is_cached=True, is_reproduced=True, owns_folder=True,
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
        job=f"{_JOBS}:validate", options=_validate, is_check=True, is_judged=True, is_named=True, is_summarised=True,
        resources=Resources(2500, 8, minutes_per_gb=20),
        help="Graphs against torch, at one layer count.",
    ),
    Stage(
        "build", makes="engines", reads=("assembly",), code="backends", job=f"{_JOBS}:build", options=_build,
        needed=lambda config, target: config.is_built(target), pinned=pinned.pin_engines, is_cached=True,
        is_reproduced=True, is_summarised=True, continues=True, owns_folder=True,
        # TensorRT's library and its builder come to the graphs, which hold no weights.
        resources=Resources(4000, minutes=180),
        help="assembly.json -> the engine set of one backend.",
    ),
    Stage(
        "compare", makes="comparison", reads=("assembly", "weights", "engines"), code="verify.compare",
        job=f"{_JOBS}:compare", options=_compare, needed=lambda config, target: config.is_compared(target),
        required=lambda model: False,  # engines of some precisions are not compared
        is_check=True, is_judged=True, is_summarised=True, resources=Resources(2500, 4, minutes_per_gb=20),
        help="Each engine against its graph in ONNX Runtime.",
    ),
    Stage(
        "reference", makes="reference", reads=("checkpoint",), beside=("logits",), code="verify.golden.reference",
        job=f"{_JOBS}:reference", options=_reference, pinned=pinned.pin_reference, is_check=True, is_cached=True,
        resources=Resources(2500, 4, minutes_per_gb=20),
        help="checkpoint.json -> tokens and logits of transformers.",
    ),
    Stage(
        "quantized_reference", makes="quantized_reference", reads=("checkpoint", "weights", "reference"),
        beside=("quantized_logits", "drift"), code="verify.golden.quantized", job=f"{_JOBS}:quantized_reference",
        options=_quantized_reference, needed=lambda config, target: is_quantized(target.precision), is_check=True,
        is_cached=True, is_reproduced=True, only_quantized=True,
        # Both models, the checkpoint's and the one of dequantised weights, one after the other.
        resources=Resources(2500, 8, minutes_per_gb=30),
        help="Tokens and logits of transformers on the dequantised weights, and their drift.",
    ),
    Stage(
        "golden", makes="golden", reads=("assembly", "weights", "engines", "reference"), beside=("speed",),
        reads_quantized={"reference": "quantized_reference"},
        code="verify.golden.check", job=f"{_JOBS}:golden", options=_golden, pinned=pinned.pin_golden, is_check=True,
        needed=lambda config, target: config.is_run(target), required=lambda model: model.runs, is_judged=True,
        is_reproduced=True, is_named=True, is_summarised=True, resources=Resources(2500, 4.5, minutes_per_gb=30),
        help="Engine set against the reference, and its speed.",
    ),
    Stage(
        "served", makes="served", reads=("assembly", "weights", "engines", "reference", "golden"), code="serve.check",
        reads_quantized={"reference": "quantized_reference"},
        job=f"{_JOBS}:served", options=_served, is_check=True, is_judged=True, is_named=True, is_summarised=True,
        resources=Resources(2500, 4.5, minutes_per_gb=30),
        needed=lambda config, target: config.is_run(target) and config.check_server,
        help="A server on the engine set against the golden check.",
    ),
    Stage(
        "fetch_adapters", makes="adapter_sources", code="checkpoint.hub.adapters", job=f"{_JOBS}:fetch_adapters",
        options=_adapters_on_hub, needed=lambda config, target: fetches_adapters(config, target.model), continues=True,
        only_adapters=True,
        help="LoRA adapters on the hub -> adapter_sources.json and their folders.",
    ),
    Stage(
        "adapters", makes="adapters", reads=("checkpoint",), code="weights.check_adapters", job=f"{_JOBS}:adapters",
        options=_adapters, needed=_has_adapters, pinned=pinned.pin_adapters, only_adapters=True,
        waits_for={"adapter_sources": fetches_adapters}, resources=Resources(1000),
        help="Folders of LoRA adapters -> adapters.json, held against the checkpoint.",
    ),
    Stage(
        "adapted_reference", makes="adapted_reference", reads=("checkpoint", "adapters"),
        code="verify.golden.adapted_reference", job=f"{_JOBS}:adapted_reference", options=_adapted_reference,
        needed=lambda config, target: _has_adapters(config, target) and not is_quantized(target.precision),
        required=_has_full_precision, is_check=True, only_adapters=True,
        resources=Resources(2500, 4, minutes_per_gb=20), help="Tokens and logits of transformers with each adapter.",
    ),
    Stage(
        "quantized_adapted_reference", makes="quantized_adapted_reference", reads=("checkpoint", "weights", "adapters"),
        code="verify.golden.adapted_reference", job=f"{_JOBS}:quantized_adapted_reference", only_quantized=True,
        needed=lambda config, target: _has_adapters(config, target) and is_quantized(target.precision), is_check=True,
        options=_quantized_adapted_reference, only_adapters=True, resources=Resources(2500, 4, minutes_per_gb=20),
        help="Tokens and logits of transformers on the dequantised weights with each adapter.",
    ),
    Stage(
        "adapted", makes="adapted", reads=("assembly", "weights", "engines", "adapters", "adapted_reference"),
        reads_quantized={"adapted_reference": "quantized_adapted_reference"},
        code="verify.golden.adapted", job=f"{_JOBS}:adapted", options=_adapted, is_check=True, is_judged=True,
        needed=lambda config, target: config.is_run(target) and _has_adapters(config, target),
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
