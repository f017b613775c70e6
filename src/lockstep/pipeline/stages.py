"""The steps that make a target, from a config: what the rules of the workflow say, for whoever runs without
Snakemake."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.sources import FolderSource, HubSource, parse_source
from lockstep.pipeline.step import Step
from lockstep.targets import Results, Target

if TYPE_CHECKING:
    from lockstep.config.load import Config


def steps(config: Config, results: Results, target: Target) -> list[Step]:
    """All steps of one target, each after those that it reads from."""
    names = {"model": target.model, "precision": target.precision, "layers": target.layers, "backend": target.backend}
    kind = parse_source(config.models[target.model].source)
    stages = ["resolve", "architecture", "convert", "export", "validate", "build", "reference", "golden"]
    if config.is_compared(target):
        stages.insert(stages.index("build") + 1, "compare")
    if not isinstance(kind, FolderSource):
        stages.insert(0, "fetch" if isinstance(kind, HubSource) else "random_weights")
    return [step(stage, config, results, names) for stage in stages]


def step(stage: str, config: Config, results: Results, names: Mapping[str, Any]) -> Step:
    """One step. names: model, precision, layers, backend; those that the stage has are taken."""
    fields, inputs, options, output = _RULES[stage]
    taken = {name: names[name] for name in fields}
    python = config.interpreter(taken["backend"]) if "backend" in taken else None
    texts = {name: str(value) for name, value in taken.items()}
    return Step(
        stage, texts, inputs(results, **taken), options(config, **taken), output(results, **taken), python=python
    )


def _source(config: Config, model: str) -> dict[str, Any]:
    return {"source": config.models[model].source}


def _tolerance(config: Config, model: str, precision: str) -> dict[str, Any]:
    return {"tolerance": config.tolerance(model, precision).model_dump()}


def _validate(config: Config, model: str, precision: str, layers: int | str) -> dict[str, Any]:
    return {**_tolerance(config, model, precision), "max_seq_len": config.limits.max_seq_len}


def _compare(config: Config, model: str, precision: str, backend: str) -> dict[str, Any]:
    return {"tolerance": config.compare_tolerance(model, precision), "limits": config.engine_limits()}


def _reference(config: Config, model: str, layers: int | str) -> dict[str, Any]:
    return {"golden": config.reference_terms(model)}


def _golden(config: Config, model: str, precision: str, layers: int | str, backend: str) -> dict[str, Any]:
    expected = [prompt.expected.get(layers) for prompt in config.models[model].golden.prompts]
    return {"expected": expected, **_tolerance(config, model, precision), "limits": config.limits.model_dump()}


def _build(config: Config, model: str, precision: str, backend: str) -> dict[str, Any]:
    return {"options": config.build_options(backend)}


def _nothing(of: Any, **names: Any) -> dict[str, Any]:
    return {}


_M, _P, _N, _B = "model", "precision", "layers", "backend"
# Stage: its wildcards, its inputs by name, its options, its manifest.
_RULES: dict[
    str, tuple[tuple[str, ...], Callable[..., dict[str, Path]], Callable[..., dict[str, Any]], Callable[..., Path]]
] = {
    "fetch": ((_M,), _nothing, _source, Results.source),
    "random_weights": ((_M,), _nothing, _source, Results.source),
    "resolve": ((_M,), _nothing, _source, Results.checkpoint),
    "architecture": ((_M,), _nothing, _source, Results.architecture),
    "convert": (
        (_M, _P),
        lambda results, model, precision: {"checkpoint": results.checkpoint(model)},
        _nothing,
        Results.weights,
    ),
    "export": (
        (_M, _P),
        lambda results, model, precision: {"architecture": results.architecture(model)},
        _nothing,
        Results.assembly,
    ),
    "validate": (
        (_M, _P, _N),
        lambda results, model, precision, layers: {
            "checkpoint": results.checkpoint(model),
            "weights": results.weights(model, precision),
            "assembly": results.assembly(model, precision),
        },
        _validate,
        Results.validation,
    ),
    "build": (
        (_M, _P, _B),
        lambda results, model, precision, backend: {"assembly": results.assembly(model, precision)},
        _build,
        Results.engines,
    ),
    "compare": (
        (_M, _P, _B),
        lambda results, model, precision, backend: {
            "assembly": results.assembly(model, precision),
            "weights": results.weights(model, precision),
            "engines": results.engines(model, precision, backend),
        },
        _compare,
        Results.comparison,
    ),
    "reference": (
        (_M, _N),
        lambda results, model, layers: {"checkpoint": results.checkpoint(model)},
        _reference,
        Results.reference,
    ),
    "golden": (
        (_M, _P, _N, _B),
        lambda results, model, precision, layers, backend: {
            "assembly": results.assembly(model, precision),
            "weights": results.weights(model, precision),
            "engines": results.engines(model, precision, backend),
            "reference": results.reference(model, layers),
        },
        _golden,
        Results.golden,
    ),
}
