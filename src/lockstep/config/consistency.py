"""Checks between keys of the config, and with a model's `config.json`, which yield `Problem`s."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from lockstep.artifacts.dtypes import GROUP_SIZE, QUANTIZATIONS, is_fp8
from lockstep.artifacts.tensor_parallel import heads_divide
from lockstep.config.backends import BackendSettings, backends
from lockstep.config.messages import Location, Problem, describe, repeated
from lockstep.config.packing import MXFP4, Packing, largest_group, precision_of
from lockstep.config.sources import CheckpointShape, read_shape
from lockstep.config.types import Device, Endpoint, Limits, ModelConfig, Prompt
from lockstep.targets import is_quantized

# Names next to the models' folders in the results tree (lockstep.targets), which no model may take.
_RESERVED_NAMES = re.compile(r"config\.json|summary(\..*)?|reports?(\..*)?|logs?|benchmarks?|endpoints", re.IGNORECASE)


def limit_problems(limits: Limits) -> Iterator[Problem]:
    if limits.max_input_len > limits.max_seq_len:
        text = f"expected at most max_seq_len ({limits.max_seq_len}); found {limits.max_input_len}"
        yield Problem(("limits", "max_input_len"), text)
    if limits.max_num_tokens < limits.max_batch_size:
        text = (
            f"expected at least max_batch_size ({limits.max_batch_size}), a token for each request; found "
            f"{limits.max_num_tokens}"
        )
        yield Problem(("limits", "max_num_tokens"), text)


def name_problems(names: Iterable[str]) -> Iterator[Problem]:
    """Yield models whose names differ only in capitals: some file systems have one folder for both."""
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(name.casefold(), name)
        if other != name:
            text = f"expected names that differ in more than capitals; found {other!r} and {name!r}"
            yield Problem(("models", name), text)


def endpoint_problems(endpoints: Mapping[str, Endpoint], models: Iterable[str]) -> Iterator[Problem]:
    for name, endpoint in endpoints.items():
        if endpoint.model not in models:
            yield Problem(("endpoints", name, "model"), f"expected a model of the config; found {endpoint.model!r}")


def device_problems(devices: Mapping[str, Device]) -> Iterator[Problem]:
    for name, device in devices.items():
        if name in backends():
            yield Problem(("devices", name), f"expected another name, for {name} is a backend; found {name!r}")
        required, other = ("gpu", "cpu") if backends()[device.backend].gpus else ("cpu", "gpu")
        if not getattr(device, required):
            text = f"expected its name, for {device.backend} runs on it; found nothing"
            yield Problem(("devices", name, required), text)
        if value := getattr(device, other):
            yield Problem(("devices", name, other), f"expected {required} with {device.backend}; found {value!r}")


def unknown_backends(name: str, model: ModelConfig, devices: Mapping[str, Device]) -> Iterator[Problem]:
    allowed = [*backends(), *devices]
    places: dict[Location, str] = {("backends", index): backend for index, backend in enumerate(model.backends)}
    places |= {("backend_precisions", backend): backend for backend in model.backend_precisions}
    for place, backend in places.items():
        if backend not in allowed:
            yield Problem(("models", name, *place), f"expected one of {', '.join(allowed)}; found {describe(backend)}")


def model_problems(
    name: str, model: ModelConfig, limits: Limits, backend_of: Callable[[str], str]
) -> Iterator[Problem]:
    path = ("models", name)
    if _RESERVED_NAMES.fullmatch(name):
        yield Problem(path, f"expected another name, for results/{name} is used for results; found {name!r}")
    for key in ("layers", "precisions", "backends"):
        yield from repeated((*path, key), getattr(model, key))
    for backend, precisions in model.backend_precisions.items():
        if backend not in model.backends:
            text = f"expected one of the model's backends ({', '.join(model.backends)}) as the key; found {backend!r}"
            yield Problem((*path, "backend_precisions", backend), text)
        yield from repeated((*path, "backend_precisions", backend), precisions)
    for backend in model.backends:
        yield from _backend_problems(path, model, backend, backends()[backend_of(backend)])
    if model.adapters and model.tensor_parallel > 1:
        text = (
            f"expected none for a model that is split over {model.tensor_parallel} ranks; found {len(model.adapters)}"
        )
        yield Problem((*path, "adapters"), text)
    # The scale depends on the largest number of a whole row, and each rank has only a part of the row.
    if model.tensor_parallel > 1 and any(map(is_fp8, model.all_precisions())):
        text = f"expected 1 in w8a8-fp8, whose activations have a scale a row; found {model.tensor_parallel}"
        yield Problem((*path, "tensor_parallel"), text)
    for adapter, settings in model.adapters.items():
        for index, prompt in enumerate(settings.prompts):
            yield from _expected_problems((*path, "adapters", adapter, "prompts", index), prompt, model)
    yield from _golden_problems(path, model, limits)


def _backend_problems(path: Location, model: ModelConfig, backend: str, settings: BackendSettings) -> Iterator[Problem]:
    """Check the keys of a model that one of its backends may not support. path: of the model."""
    if model.tensor_parallel > 1 and not settings.runs_ranks:
        able = ", ".join(name for name, item in backends().items() if item.runs_ranks)
        text = f"expected 1 for backend {backend}; several ranks run on {able}; found {model.tensor_parallel}"
        yield Problem((*path, "tensor_parallel"), text)
    if model.adapters and not settings.runs_adapters:
        able = ", ".join(name for name, item in backends().items() if item.runs_adapters)
        text = f"expected none for backend {backend}; adapters run on {able}; found {len(model.adapters)}"
        yield Problem((*path, "adapters"), text)
    elif model.adapters:
        other = [item for item in model.precisions_of(backend) if item not in settings.runs_adapters]
        # A precision that the backend does not support at all is reported below.
        if other and other[0] in settings.precisions:
            able = ", ".join(settings.runs_adapters)
            text = f"expected none for backend {backend} in {other[0]}; there they run in {able}; found "
            yield Problem((*path, "adapters"), f"{text}{len(model.adapters)}")
    for key in ("activations", "kv_cache_dtype"):
        value = getattr(model, key)
        if value and key not in settings.model_settings:
            able = ", ".join(name for name, item in backends().items() if key in item.model_settings)
            text = f"expected none for backend {backend}; it is for {able}; found {value!r}"
            yield Problem((*path, key), text)
    # e4m3 codes times their scales are exact in fp16, which is how kernels and the reference read the cache.
    wide = {"fp32", "bf16"}.intersection(model.precisions_of(backend))
    if model.kv_cache_dtype and (model.activations or wide):
        text = f"expected none for backend {backend} in {min(wide, default='bf16')}; it is for fp16; found "
        yield Problem((*path, "kv_cache_dtype"), f"{text}{model.kv_cache_dtype!r}")
    for place, precision in model.placed_precisions(backend):
        if precision not in settings.precisions:
            text = f"expected one of {', '.join(settings.precisions)} for backend {backend}"
            if settings.lacks:
                text += f" ({settings.lacks})"
            yield Problem((*path, *place), f"{text}; found {precision!r}")


def _golden_problems(path: Location, model: ModelConfig, limits: Limits) -> Iterator[Problem]:
    if model.golden.max_new_tokens >= limits.max_seq_len:
        text = (
            f"expected less than limits.max_seq_len ({limits.max_seq_len}), which counts the prompt too; "
            f"found {model.golden.max_new_tokens}"
        )
        yield Problem((*path, "golden", "max_new_tokens"), text)
    elif (model.golden.long_prompt or 0) + model.golden.max_new_tokens > limits.max_seq_len:
        text = (
            f"expected at most limits.max_seq_len less max_new_tokens "
            f"({limits.max_seq_len - model.golden.max_new_tokens}); found {model.golden.long_prompt}"
        )
        yield Problem((*path, "golden", "long_prompt"), text)
    for index, prompt in enumerate(model.golden.prompts):
        yield from _expected_problems((*path, "golden", "prompts", index), prompt, model)


def _expected_problems(path: Location, prompt: Prompt, model: ModelConfig) -> Iterator[Problem]:
    for count in prompt.expected:
        if count not in model.layers:
            text = (
                f"expected one of the model's layers ({', '.join(map(str, model.layers))}) as the key; found {count!r}"
            )
            yield Problem((*path, "expected", count), text)


def _group_problems(
    name: str, model: ModelConfig, shape: CheckpointShape, path: Path, settings_of: Callable[[str], BackendSettings]
) -> Iterator[Problem]:
    """Compare `group_size` with the rows of weights, or with that of a checkpoint that is quantised already."""
    where = ("models", name, "group_size")
    packing = shape.packing
    packed_size = None
    if packing and packing.group_size:
        packed_size = largest_group(packing.group_size)
    group_size = model.group_size or packed_size
    if not group_size and not packing:
        group_size = GROUP_SIZE
    # w8a8-fp8 has a scale for a whole row, and no groups.
    has_groups = any(is_quantized(name) and not is_fp8(name) for name in model.all_precisions())
    if packed_size and group_size != packed_size:
        text = f"expected {packed_size}, or none: {path} says how weights are quantised; found {group_size}"
        yield Problem(where, text)
    # Checked here from config.json alone; export would refuse it only after a download and minutes of tracing.
    elif group_size and not packed_size and has_groups:
        for row, size in shape.linear_rows.items():
            if size % group_size:
                yield Problem(where, f"expected a size that divides {row} ({size} in {path}); found {group_size}")
                break
    if packing is None:
        return
    for backend in model.backends:
        for place, precision in model.placed_precisions(backend):
            if not is_quantized(precision):
                continue
            if QUANTIZATIONS[precision].bits != packing.bits or is_fp8(precision):
                text = f"expected {precision_of(packing.bits)} or floating point, as {path} says how weights are"
                yield Problem(("models", name, *place), f"{text} quantised; found {precision!r}")
            elif not _takes(settings_of(backend), packing):
                text = f"expected none of {backend}, which takes no {packing.beyond_integers} ({path})"
                yield Problem(("models", name, "backends"), f"{text}, with {precision}; found one")


def _takes(settings: BackendSettings, packing: Packing) -> bool:
    if packing.layout == MXFP4:
        return settings.mxfp4
    return settings.zero_points or not packing.beyond_integers


def shape_problems(
    name: str, model: ModelConfig, limits: Limits, place: Path, settings_of: Callable[[str], BackendSettings]
) -> Iterator[Problem]:
    """Compare `layers` and `limits` with a model's depth and positions. place: its `config.json`, or its folder."""
    shape = read_shape(place)
    path = place
    if place.is_dir():
        path = place / "config.json"
    depth = shape.num_hidden_layers
    positions = shape.max_position_embeddings
    for index, layers in enumerate(model.layers):
        where = ("models", name, "layers", index)
        if isinstance(layers, int) and layers > depth:
            yield Problem(where, f"expected at most {depth} (num_hidden_layers in {path}) or all; found {layers}")
        if layers == depth and "all" in model.layers:
            yield Problem(
                where, f"expected each target once; found {layers}, which is all of this model's layers, and all"
            )
    heads, kv_heads = shape.num_heads
    # Without the key, or with a list of sizes by layer, assume as many as query heads.
    if type(kv_heads) is not int or not kv_heads:
        kv_heads = heads
    ranks = model.tensor_parallel
    if type(heads) is int and not heads_divide(heads, kv_heads, ranks):
        text = f"expected a divisor of the {heads} attention heads, and a divisor or a multiple of the {kv_heads} key"
        yield Problem(("models", name, "tensor_parallel"), f"{text} and value heads, in {path}; found {ranks}")
    if any(map(is_quantized, model.all_precisions())):
        yield from _group_problems(name, model, shape, path, settings_of)
    if positions is not None and limits.max_seq_len > positions:
        text = f"expected at most {positions} ({shape.limited_by} in {path}); found {limits.max_seq_len}"
        yield Problem(("limits", "max_seq_len"), text)
