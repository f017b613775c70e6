"""The steps that make a target, from a config: what the rules of the workflow say, for whoever runs without Snakemake."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.lock.record import Step
from lockstep.paths import Results, Target
from lockstep.sources import FolderSource, HubSource, parse_source

if TYPE_CHECKING:
    from lockstep.config import Config


def steps(config: Config, results: Results, target: Target) -> list[Step]:
    """All steps of one target, each after those that it reads from."""
    names = {"model": target.model, "precision": target.precision, "layers": target.layers, "backend": target.backend}
    kind = parse_source(config.models[target.model].source)
    stages = ["resolve", "architecture", "convert", "export", "validate", "build", "reference", "golden"]
    if not isinstance(kind, FolderSource):
        stages.insert(0, "fetch" if isinstance(kind, HubSource) else "random_weights")
    return [step(stage, config, results, names) for stage in stages]


def all_steps(config: Config, results: Results, targets: Sequence[Target]) -> Iterator[Step]:
    """The steps of several targets, each once."""
    seen = set()
    for target in targets:
        for found in steps(config, results, target):
            if found.output not in seen:
                seen.add(found.output)
                yield found


def step(stage: str, config: Config, results: Results, names: dict[str, Any]) -> Step:
    """One step. names: model, precision, layers, backend; only those that the stage has are looked at."""
    m, p, n, b = (names.get(name, "") for name in ("model", "precision", "layers", "backend"))
    source = {"source": config.models[m].source}
    checkpoint, weights, assembly = results.checkpoint(m), results.weights(m, p), results.assembly(m, p)
    fields, inputs, options, output = {
        "fetch": (("model",), {}, source, results.source(m)),
        "random_weights": (("model",), {}, source, results.source(m)),
        "resolve": (("model",), {}, source, checkpoint),
        "architecture": (("model",), {}, source, results.architecture(m)),
        "convert": (("model", "precision"), {"checkpoint": checkpoint}, {}, weights),
        "export": (("model", "precision"), {"architecture": results.architecture(m)}, {}, assembly),
        "validate": (("model", "precision", "layers"), {"checkpoint": checkpoint, "weights": weights, "assembly": assembly},
                     _tolerance(config, p), results.validation(m, p, n)),
        "build": (("model", "precision", "backend"), {"assembly": assembly}, {}, results.engines(m, p, b)),
        "reference": (("model", "layers"), {"checkpoint": checkpoint}, _prompts(config, m), results.reference(m, n)),
        "golden": (("model", "precision", "layers", "backend"),
                   {"assembly": assembly, "weights": weights, "engines": results.engines(m, p, b), "reference": results.reference(m, n)},
                   _golden(config, m, p, n), results.golden(m, p, n, b)),
    }[stage]  # fmt: skip
    return Step(stage, {name: str(names[name]) for name in fields}, inputs, options, output)


def _tolerance(config: Config, precision: str | None) -> dict[str, Any]:
    return {"tolerance": config.tolerances[precision].model_dump()} if precision else {}


def _prompts(config: Config, model: str) -> dict[str, Any]:
    golden = config.models[model].golden
    return {"golden": {"max_new_tokens": golden.max_new_tokens, "prompts": [prompt.text for prompt in golden.prompts]}}


def _golden(config: Config, model: str, precision: str | None, layers: int | str | None) -> dict[str, Any]:
    expected = [prompt.expected.get(layers) for prompt in config.models[model].golden.prompts]
    return {"expected": expected, **_tolerance(config, precision), "limits": config.limits.model_dump()}
