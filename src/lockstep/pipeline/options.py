"""What each stage takes from the config, and which models and targets have it.

A function of a stage's name gives its options: (config, and the stage's wildcards by name) in, plain JSON out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lockstep.config.sources import FolderSource, HubSource, parse_source
from lockstep.targets import Target, is_quantized

if TYPE_CHECKING:
    from lockstep.config.schema import Config


def source(config: Config, model: str) -> dict[str, Any]:
    return {"source": config.models[model].source}


def _tolerance(config: Config, model: str, precision: str, backend: str | None = None) -> dict[str, Any]:
    return {"tolerance": asdict(config.tolerance(model, precision, backend))}


def validate(config: Config, model: str, precision: str, layers: int | str) -> dict[str, Any]:
    return {**_tolerance(config, model, precision), "max_seq_len": config.limits.max_seq_len}


def compare(config: Config, model: str, precision: str, backend: str) -> dict[str, Any]:
    return {
        "tolerance": config.compare_tolerance(model, precision, backend),
        "limits": config.engine_limits(),
        "seconds": config.compare_seconds,
    }


def reference(config: Config, model: str, layers: int | str) -> dict[str, Any]:
    return {"golden": config.reference_terms(model)}


def quantized_reference(config: Config, model: str, precision: str, layers: int | str) -> dict[str, Any]:
    return {"golden": config.reference_terms(model), "drift_text": config.models[model].golden.drift_text}


def golden(config: Config, model: str, precision: str, layers: int | str, backend: str) -> dict[str, Any]:
    # What the config expects the checkpoint says; of quantised weights the drift report shows what became of it.
    prompts = config.models[model].golden.prompts
    expected = [None if is_quantized(precision) else prompt.expected.get(layers) for prompt in prompts]
    return {"expected": expected, **_tolerance(config, model, precision, backend), "limits": config.limits.model_dump()}


def served(config: Config, model: str, precision: str, layers: int | str, backend: str) -> dict[str, Any]:
    return {**_tolerance(config, model, precision, backend), "limits": config.limits.model_dump()}


def export(config: Config, model: str, precision: str) -> dict[str, Any]:
    settings = config.models[model]
    ranks = {"tensor_parallel": settings.tensor_parallel} if settings.tensor_parallel > 1 else {}
    # Not which adapters there are: another one changes no graph.
    room = {"max_adapters": settings.max_adapters, **_rank_and_targets(config, model)}
    group = {"group_size": settings.group_size} if is_quantized(precision) else {}
    residual = {"residual": settings.residual} if settings.residual and precision == "fp16" else {}
    return {**ranks, **({"adapters": room} if settings.adapters else {}), **group, **residual}


def _rank_and_targets(config: Config, model: str) -> dict[str, Any]:
    settings = config.models[model]
    targets = settings.lora_target_modules
    return {"max_lora_rank": settings.max_lora_rank, "targets": None if targets is None else list(targets)}


def adapters(config: Config, model: str) -> dict[str, Any]:
    sources = {name: adapter.source for name, adapter in sorted(config.models[model].adapters.items())}
    return {"sources": sources, **_rank_and_targets(config, model)}


def adapters_on_hub(config: Config, model: str) -> dict[str, Any]:
    sources = {name: adapter.source for name, adapter in sorted(config.models[model].adapters.items())}
    return {"sources": {name: text for name, text in sources.items() if isinstance(parse_source(text), HubSource)}}


def fetches_adapters(config: Config, model: str) -> bool:
    """Return whether a job brings adapters of a model from the hub."""
    return bool(adapters_on_hub(config, model)["sources"])


def quantized_adapted_reference(config: Config, model: str, precision: str, layers: int | str) -> dict[str, Any]:
    return adapted_reference(config, model, layers)


def adapted_reference(config: Config, model: str, layers: int | str) -> dict[str, Any]:
    prompts = {name: [prompt.text for prompt in each] for name, each in config.adapter_prompts(model).items()}
    return {"golden": {"max_new_tokens": config.models[model].golden.max_new_tokens, "prompts": prompts}}


def adapted(config: Config, model: str, precision: str, layers: int | str, backend: str) -> dict[str, Any]:
    prompts = [prompt for each in config.adapter_prompts(model).values() for prompt in each]
    expected = [None if is_quantized(precision) else prompt.expected.get(layers) for prompt in prompts]
    return {"expected": expected, **_tolerance(config, model, precision, backend), "limits": config.limits.model_dump()}


def has_adapters(config: Config, target: Target) -> bool:
    """Return whether the model of a target has adapters."""
    return bool(config.models[target.model].adapters)


def build(config: Config, model: str, precision: str, backend: str) -> dict[str, Any]:
    return {"options": config.build_options(backend)}


def comes_from(*kinds: type) -> Callable[[Config, Target], bool]:
    """Return a function that says whether a target's model has a source of one of these kinds."""
    return lambda config, target: isinstance(parse_source(config.models[target.model].source), kinds)


def is_fetched(config: Config, model: str) -> bool:
    """Return whether a job brings the checkpoint of a model.

    Else it lies in a folder that the config names.
    """
    return not isinstance(parse_source(config.models[model].source), FolderSource)
