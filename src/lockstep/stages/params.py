"""The parameters of jobs from the config: a function for each, with its name in the rules' `params`.

The config and the wildcards that a parameter depends on in, plain JSON out; None where the config has no value.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lockstep.config.sources import HubSource, parse_source
from lockstep.targets import Target, is_quantized, layer_count

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.config.types import Prompt

Value = Any  # plain JSON


def config(config: Config) -> Value:
    return config.dump()


def source(config: Config, model: str) -> Value:
    return config.models[model].source


def hub_adapters(config: Config, model: str) -> Value:
    adapters = sources(config, model).items()
    return {name: text for name, text in adapters if isinstance(parse_source(text), HubSource)}


def sources(config: Config, model: str) -> Value:
    return {name: adapter.source for name, adapter in sorted(config.models[model].adapters.items())}


def max_lora_rank(config: Config, model: str) -> Value:
    return config.models[model].max_lora_rank


def lora_target_modules(config: Config, model: str) -> Value:
    modules = config.models[model].lora_target_modules
    if modules is None:
        return None
    return list(modules)


def adapters(config: Config, model: str) -> Value:
    """Return the room for adapters in graphs. Not which: another adapter changes no graph."""
    settings = config.models[model]
    if not settings.adapters:
        return None
    return {
        "max_adapters": settings.max_adapters,
        "max_lora_rank": settings.max_lora_rank,
        "targets": lora_target_modules(config, model),
    }


def tensor_parallel(config: Config, model: str) -> Value:
    ranks = config.models[model].tensor_parallel
    return _value_if(ranks > 1, ranks)


def group_size(config: Config, model: str, precision: str) -> Value:
    return _value_if(is_quantized(precision), config.models[model].group_size)


def head_bits(config: Config, model: str, precision: str) -> Value:
    return _value_if(is_quantized(precision), config.models[model].head_bits)


def residual(config: Config, model: str, precision: str) -> Value:
    return _value_if(precision in ("fp16", "bf16"), config.models[model].residual)


def activations(config: Config, model: str, precision: str) -> Value:
    return _value_if(is_quantized(precision), config.models[model].activations)


def kv_cache_dtype(config: Config, model: str) -> Value:
    return config.models[model].kv_cache_dtype


def options(config: Config, backend: str) -> Value:
    return config.build_options(backend)


def tolerance(config: Config, model: str, precision: str, backend: str | None = None) -> Value:
    return config.tolerance(model, precision, backend).to_json()


def limits(config: Config) -> Value:
    return config.limits.model_dump()


def engine_limits(config: Config) -> Value:
    return config.engine_limits()


def max_seq_len(config: Config) -> Value:
    return config.limits.max_seq_len


def seconds(config: Config) -> Value:
    return config.compare_seconds


def seed(config: Config) -> Value:
    return config.compare_seed


def golden(config: Config, model: str) -> Value:
    return config.reference_terms(model)


def adapted_golden(config: Config, model: str) -> Value:
    settings = config.models[model]
    texts = {}
    for adapter, prompts in config.adapter_prompts(model).items():
        texts[adapter] = [prompt.text for prompt in prompts]
    terms = {"max_new_tokens": settings.golden.max_new_tokens, "adapted": texts}
    if settings.kv_cache_dtype:
        terms["kv_cache_dtype"] = settings.kv_cache_dtype
    return terms


def perplexity_text(config: Config, model: str, precision: str | None = None) -> Value:
    """Return the text whose perplexity is measured, where weights or the cache are quantised."""
    settings = config.models[model]
    return _value_if(bool(precision or settings.kv_cache_dtype), settings.golden.perplexity_text)


def max_perplexity_change(config: Config, model: str) -> Value:
    return config.models[model].golden.max_perplexity_change


def expected(config: Config, model: str, precision: str, layers: int | str) -> Value:
    return _expected(config, config.models[model].golden.prompts, model, precision, layers)


def adapted_expected(config: Config, model: str, precision: str, layers: int | str) -> Value:
    prompts = itertools.chain.from_iterable(config.adapter_prompts(model).values())
    return _expected(config, prompts, model, precision, layers)


def device(config: Config, backend: str) -> Value:
    """Return the backend and the hardware that a job needs, where its backend is a device of the config."""
    return config.device_of(backend)


def _value_if(applies: bool, value: Value) -> Value:
    """Return a value where it applies; else None, which is no part of a build key."""
    if applies:
        return value
    return None


def _expected(
    config: Config, prompts: Iterable[Prompt], model: str, precision: str, layers: int | str
) -> list[str | None]:
    """Return the expected texts; none of quantised weights or caches, whose text may change with the error."""
    if config.models[model].kv_cache_dtype or is_quantized(precision):
        return [None for _ in prompts]
    return [prompt.expected.get(layer_count(layers)) for prompt in prompts]


# All public functions above this line; those below are not parameters.
_FUNCTIONS: Mapping[str, Callable[..., Value]] = {
    name: value
    for name, value in list(globals().items())
    if inspect.isfunction(value) and value.__module__ == __name__ and not name.startswith("_")
}
_WILDCARDS: Mapping[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(function).parameters)[1:] for name, function in _FUNCTIONS.items()
}


def value_of(name: str, config: Config, names: Mapping[str, Any]) -> Value:
    return _FUNCTIONS[name](config, **{key: names[key] for key in _WILDCARDS[name] if key in names})


def options_of(params: Iterable[str], config: Config, names: Mapping[str, Any]) -> dict[str, Value]:
    """Return the values of a rule's parameters that are part of the build key, without those of None."""
    # The device only says where a job runs; the identity of the engines has the hardware.
    values = {name: value_of(name, config, names) for name in params if name in _FUNCTIONS and name != "device"}
    return {name: value for name, value in values.items() if value is not None}


def table(name: str, config: Config, targets: Iterable[Target]) -> tuple[tuple[str, ...], dict[str, Value]]:
    """Return the wildcards that a parameter depends on, and {their values joined by "/": its value}.

    A rule may have fewer of them than the others: a check of graphs has no backend.
    """
    wildcards = _WILDCARDS[name]
    if not wildcards:
        return wildcards, {"": value_of(name, config, {})}
    optional = [key for key, value in inspect.signature(_FUNCTIONS[name]).parameters.items() if value.default is None]
    values = {}
    # Snakemake looks values up by the wildcards of a rule, so store each under both of its keys.
    for target in targets:
        for left_out in ([], optional):
            names = {key: vars(target)[key] for key in wildcards if key not in left_out}
            place = "/".join(map(str, names.values()))
            if place not in values:
                values[place] = value_of(name, config, names)
    return wildcards, values


def names() -> Iterable[str]:
    return _FUNCTIONS
