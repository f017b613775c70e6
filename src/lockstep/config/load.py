"""The typed configuration: a YAML file or Snakemake's merged mapping in, a frozen `Config` out, or one line on what is
wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from lockstep.artifacts.adapters import fetched_manifest
from lockstep.artifacts.dtypes import GROUP_SIZE
from lockstep.artifacts.fetched import folder_of, known
from lockstep.artifacts.packing import largest_group, precision_of
from lockstep.config.backends import BackendSettings, backends
from lockstep.config.documents import read_document
from lockstep.config.messages import Problem, Problems, describe, join, nearest, one_line
from lockstep.config.section import Flag, PathText, Section
from lockstep.config.sources import (
    CheckpointShape,
    FolderSource,
    HubSource,
    RandomSource,
    parse_source,
    places_of,
    read_shape,
    resolve_random,
    resolve_source,
    source_folders,
)
from lockstep.config.types import (
    COMPARED_PRECISIONS,
    Backends,
    Device,
    DeviceName,
    Golden,
    Limits,
    ModelConfig,
    ModelName,
    Prompt,
    Tolerance,
    Tolerances,
)
from lockstep.errors import InputError
from lockstep.targets import Results, Target, is_quantized

__all__ = [
    "Backends",
    "Config",
    "Golden",
    "Limits",
    "ModelConfig",
    "Prompt",
    "Tolerance",
    "Tolerances",
    "load",
    "load_given",
    "load_merged",
    "resolve_source",
    "source_folders",
]

# Names beside the models' folders in the results tree (lockstep.targets), which no model may take.
_RESERVED_NAMES = re.compile(r"config\.json|summary(\..*)?|reports?(\..*)?|logs?|benchmarks?", re.IGNORECASE)

_DEMO = Path("config/config.yaml")


class Config(Section):
    """What is made: models, and for all of them limits and tolerances."""

    models: dict[ModelName, ModelConfig] = Field(
        min_length=1, description="The models by name. A name is also a folder in `results/`."
    )
    limits: Limits = Field(default=Limits(), description="Sizes that engines and caches are made for.")
    tolerances: Tolerances = Field(default=Tolerances(), description="Largest absolute errors that pass, by precision.")
    cache: PathText = Field(
        default="",
        description="A folder of artefacts shared between checkouts and machines (docs/cache.md); a relative "
        "path is looked up from the working "
        "directory. The environment variable `LOCKSTEP_CACHE` goes before it, and turns it off where it is empty.",
    )
    skip_missing_backends: Flag = Field(
        default=False,
        description="Leave out the targets of a backend whose package is not installed, and say so; else that is a "
        "mistake of the config.",
    )
    skip_missing_precisions: Flag = Field(
        default=False,
        description="Build no engines in a precision that the processor here does not compute in, and show their "
        "targets as not run, with the reason; else that is a mistake of the config.",
    )
    require_run: Flag = Field(
        default=False,
        description="Refuse targets whose engines cannot be run here, which else are shown as not run: "
        "`--config require_run=true`.",
    )
    check_server: Flag = Field(
        default=True,
        description="Check a server on each target that is run, too: the golden prompts over HTTP, alone, under load, "
        "on a reused prefix, and with its engine killed.",
    )
    backends: Backends = Field(
        default=Backends(), description="Settings of each backend; which models use it stands with them."
    )
    devices: dict[DeviceName, Device] = Field(
        default={},
        description="Several kinds of device for one backend, by names of yours that models put in `backends`.",
    )

    @model_validator(mode="after")
    def _across_fields(self) -> Config:
        problems = [*_limit_problems(self.limits)]
        problems += _name_problems(self.models)
        problems += _device_problems(self.devices)
        for name, model in self.models.items():
            unknown = list(_unknown_backends(name, model, self.devices))
            problems += unknown or _model_problems(name, model, self.limits, self.backend_of)
            problems += [] if self.skip_missing_precisions or unknown else self._lacking_problems(name, model)
        if problems:
            raise Problems(problems)
        return self

    def targets(self) -> list[Target]:
        """All targets: models by name, then precisions, layer counts and backends in the order of the config; without
        those of backends that it skips here."""
        skipped = self.skipped_backends()
        return [
            Target(name, precision, layers, backend)
            for name, model in sorted(self.models.items())
            for precision in _all_precisions(model)
            for layers in model.layers
            for backend in model.backends
            if precision in model.precisions_of(backend) and backend not in skipped
        ]

    def skipped_backends(self) -> dict[str, str]:
        """Why, by backend, its targets are left out here: `skip_missing_backends`."""
        return self._missing_backends() if self.skip_missing_backends else {}

    def _missing_backends(self) -> dict[str, str]:
        used = {backend for model in self.models.values() for backend in model.backends}
        missing = {backend: self._settings(backend).missing() for backend in sorted(used)}
        return {backend: reason for backend, reason in missing.items() if reason}

    def backend_of(self, name: str) -> str:
        """The backend that a target names: of a device its backend."""
        return self.devices[name].backend if name in self.devices else name

    def device_of(self, name: str) -> dict[str, str] | None:
        """The backend and the hardware of a target's device, plain JSON; None where it names a backend."""
        if name not in self.devices:
            return None
        return {"backend": self.devices[name].backend, "hardware": self.devices[name].hardware}

    def _lacking(self, precision: str, backend: str) -> str | None:
        """Why the processor here does not compute in a precision; None where it does."""
        return self._settings(backend).lacks_here(precision)

    def _lacking_problems(self, name: str, model: ModelConfig) -> Iterator[Problem]:
        for backend in model.backends:
            own = backend in model.backend_precisions
            place: tuple[Any, ...] = ("backend_precisions", backend) if own else ("precisions",)
            for index, precision in enumerate(model.precisions_of(backend)):
                if reason := self._lacking(precision, backend):
                    text = (
                        f"expected a precision of this machine for backend {backend} ({reason}), or "
                        f"skip_missing_precisions: true; found {precision!r}"
                    )
                    yield Problem(("models", name, *place, index), text)

    def check_device(self, name: str | None) -> str | None:
        """The device that a run is for, as `--config device=NAME` says. Raises InputError where there is none."""
        if name is not None and name not in self.devices:
            found = ", ".join(self.devices) or "none, for the config has no devices"
            raise InputError(f"device: expected one of {found}; found {describe(name)}")
        return name

    def _settings(self, name: str) -> BackendSettings:
        return backends()[self.backend_of(name)]

    def cannot_run(self, backend: str) -> str | None:
        """Why engines of a backend cannot run here, though they can be built; None where they can, and for a device:
        its jobs run where it is."""
        return None if backend in self.devices else self._settings(backend).cannot_run(self.build_options(backend))

    def not_built(self) -> dict[str, str]:
        """Why engines are not built here, by `<precision>/<backend>` of the targets: `skip_missing_precisions`."""
        pairs = sorted({(one.precision, one.backend) for one in self.targets()})
        reasons = {f"{precision}/{backend}": self._lacking(precision, backend) for precision, backend in pairs}
        return {name: reason for name, reason in reasons.items() if reason}

    def not_run(self) -> dict[str, str]:
        """Why engines are not run here, by backend of the targets, and as `not_built` where a precision is the reason;
        those that are run are left out."""
        reasons = {backend: self.cannot_run(backend) for backend in sorted({one.backend for one in self.targets()})}
        return {backend: reason for backend, reason in reasons.items() if reason} | self.not_built()

    def check_backends(self, where: str = "config") -> None:
        """Raises InputError where a backend is not installed that the config does not skip then, and where it asks for
        checks that cannot run here."""
        problems: list[Problem] = []
        absent = self._missing_backends()
        skipped, missing = (absent, {}) if self.skip_missing_backends else ({}, absent)
        for name, model in self.models.items():
            for index, backend in enumerate(model.backends):
                here = ("models", name, "backends", index)
                if reason := missing.get(backend):
                    text = f"expected backends that are installed, or skip_missing_backends: true; {backend}: {reason}"
                    problems.append(Problem(here, text))
                elif self.require_run and backend not in skipped:
                    reasons = [
                        self.cannot_run(backend),
                        *(self._lacking(one, backend) for one in model.precisions_of(backend)),
                    ]
                    if why := next(filter(None, reasons), None):
                        text = f"expected to run its engines (require_run: true); {backend}: {why}"
                        problems.append(Problem(here, text))
        if problems:
            raise InputError(f"{where}: {join(Config, problems)}")

    def is_compared(self, target: Target) -> bool:
        """Whether its engines are compared with their graphs in ONNX Runtime: where the precision is one that it
        computes in, and they run here."""
        return target.precision in COMPARED_PRECISIONS and self.is_run(target)

    def is_built(self, target: Target) -> bool:
        """Whether its engines are built here: the processor computes in their precision."""
        return self._lacking(target.precision, target.backend) is None

    def is_run(self, target: Target) -> bool:
        """Whether its engines run here; else they are built, and no more, or not even that."""
        return self.why_not_run(target) is None

    def why_not_run(self, target: Target) -> str | None:
        """Why its engines do not run here; None where they do."""
        return self._lacking(target.precision, target.backend) or self.cannot_run(target.backend)

    def reference_terms(self, model: str) -> dict[str, Any]:
        """What a model's reference is made from: how many tokens, the prompts' texts, and the tokens of the long
        prompt. Plain JSON."""
        golden = self.models[model].golden
        fills = self.limits.max_seq_len - golden.max_new_tokens
        long_prompt = fills if golden.long_prompt is None else golden.long_prompt
        return {
            "max_new_tokens": golden.max_new_tokens,
            "prompts": [prompt.text for prompt in golden.prompts],
            "long_prompt": long_prompt,
        }

    def adapter_prompts(self, model: str) -> dict[str, tuple[Prompt, ...]]:
        """The golden prompts of each adapter of a model, and under "" those that are run without; the model's own texts
        where an adapter has none."""
        own = self.models[model].golden.prompts
        texts = tuple(Prompt(text=prompt.text) for prompt in own)
        found = {name: adapter.prompts or texts for name, adapter in sorted(self.models[model].adapters.items())}
        return {"": texts, **found}

    def adapter_folders(
        self,
        model: str,
        folders: Sequence[str | os.PathLike] | None = None,
        where: str = "config",
        results: Results = Results(),
    ) -> dict[str, Path]:
        """The folder of each adapter of a model, looked up as `check_sources` does; of one on the hub where a job of
        `results` brings it. Raises InputError, which names every place looked at, where there is none."""
        found, problems = {}, []
        for name, adapter in sorted(self.models[model].adapters.items()):
            if isinstance(parse_source(adapter.source), HubSource):
                found[name] = folder_of(fetched_manifest(results.adapter_sources(model), name))
                continue
            places = places_of(adapter.source, folders)
            place = next((place for place in places if os.path.isdir(place)), None)
            if place is None:
                looked = " and ".join(map(str, places))
                text = f"expected the folder of an adapter, as PEFT saves it; found none at {looked}"
                problems.append(Problem(("models", model, "adapters", name, "source"), text))
            else:
                found[name] = place
        if problems:
            raise InputError(f"{where}: {join(Config, problems)}")
        return found

    def parse_target(self, text: str) -> Target:
        """The target named `<model>/<precision>/<layers>` (on the model's first backend) or with `/<backend>` after it.

        Raises InputError listing the targets there are.
        """
        by_name: dict[str, Target] = {}
        for target in self.targets():
            by_name[str(target)] = target
            by_name.setdefault(str(target).rpartition("/")[0], target)
        if text in by_name:
            return by_name[text]
        names = [str(target).rpartition("/")[0] for target in self.targets()]
        allowed = list(dict.fromkeys(names))
        more = f" (and {len(allowed) - 20} more)" if len(allowed) > 20 else ""
        guess = nearest(text, by_name).removeprefix(",")
        raise InputError(
            f"target: expected one of {', '.join(allowed[:20])}{more}; found "
            f"{describe(text)}{';' + guess if guess else ''}"
        )

    def check_sources(
        self, folders: Sequence[str | os.PathLike] | None = None, where: str = "config", results: Results = Results()
    ) -> dict[str, Path]:
        """Hold the config against the `config.json` of each model; gives the folder, or for random weights the
        config.json, of each.

        `folders` is where relative sources are looked up (default: working directory, then repository), `where` opens
        the message. No network is used: a model on the hub is held against what `results` has of it, and left out
        before that.
        Raises InputError when a folder is not there, or is a model with fewer layers or positions than asked.
        """
        found: dict[str, Path] = {}
        problems: list[Problem] = []
        for name, model in self.models.items():
            try:
                place = _place(model.source, folders, results.source(name))
                if place:
                    found[name] = place
                    problems += _shape_problems(name, model, self.limits, place, self._settings)
            except InputError as error:
                problems.append(Problem(("models", name, "source"), str(error)))
        if problems:
            raise InputError(f"{where}: {join(Config, problems)}")
        return found

    def check_model(self, name: str, place: Path, where: str = "config") -> None:
        """As `check_sources` for one model, with the folder of its checkpoint or its config.json at hand."""
        problems = [*_shape_problems(name, self.models[name], self.limits, place, self._settings)]
        if problems:
            raise InputError(f"{where}: {join(Config, problems)}")

    def tolerance(self, model: str, precision: str, backend: str | None = None) -> Tolerance:
        """What passes for targets of a model in a precision: its own where it has one, else that of all models. Of a
        backend that rounds activations to fp16, at least what passes in fp16. None: of graphs."""
        own = getattr(self.models[model].tolerances, precision).model_dump(exclude_none=True)
        found = self.tolerances[precision].model_copy(update=own)
        if backend is None or precision not in self._settings(backend).fp16_activations:
            return found
        half = self.tolerance(model, "fp16").model_dump()
        return found.model_copy(update={name: max(size, getattr(found, name)) for name, size in half.items()})

    def compare_tolerance(self, model: str, precision: str, backend: str) -> float:
        """The largest error of an engine beside its graph, relative to its output: see `BackendSettings`."""
        return self._settings(backend).compare_tolerance(precision, self.tolerance(model, precision, backend).block)

    def build_options(self, backend: str) -> dict[str, Any]:
        """What a backend's build is given (`engine.build`): its settings, and the limits where its engines depend on
        them. Plain JSON."""
        section = getattr(self.backends, self.backend_of(backend), None)
        return self._settings(backend).build_options(section, self.engine_limits())

    def engine_limits(self) -> dict[str, int]:
        """The limits that sizes of engines' inputs come from."""
        return self.limits.model_dump(include={"max_batch_size", "max_num_tokens", "max_seq_len"})

    def interpreter(self, backend: str) -> str | None:
        """The Python that builds and runs a backend's engines; None: this one."""
        own = self.devices[backend].python if backend in self.devices else ""
        section = getattr(self.backends, self.backend_of(backend), None)
        return own or (section.python if section is not None and self._settings(backend).has_interpreter else None)

    def gpus(self, backend: str) -> int:
        """GPUs that a job takes which builds or runs a backend's engines."""
        return self._settings(backend).gpus

    def dump(self) -> dict[str, Any]:
        """Plain JSON types, with all defaults filled in; `load` of it gives the same config. Not the cache: results do
        not hang on where it lies."""
        return self.model_dump(mode="json", exclude={"cache", *(() if self.devices else ("devices",))})


def load(config: str | os.PathLike | Mapping[str, Any], where: str | None = None) -> Config:
    """The config in a YAML (or `.json`) file, or in a mapping such as Snakemake's merged config.

    Raises InputError, one line that opens with `where` (default: the path, or `config` for a mapping) and names the
    first
    mistake: its key, what is expected and what was found.
    """
    if isinstance(config, Mapping):
        where, value = where or "config", dict(config)
    else:
        where, value = where or os.fspath(config), read_document(config)
    if value is None:
        raise InputError(f"{where}: expected a mapping of {', '.join(Config.model_fields)}; found an empty file")
    try:
        return Config.model_validate(value)
    except ValidationError as error:
        raise InputError(f"{where}: {one_line(Config, error)}") from None


def load_given(path: Path | None) -> Config:
    """The config at `path`, by default the demo: of the working directory, else of the repository. Raises InputError as
    `load` does."""
    found = (folder / _DEMO for folder in source_folders() if (folder / _DEMO).is_file())
    return load(path or next(found, _DEMO))


def load_merged(merged: Mapping[str, Any], files: Sequence[str | os.PathLike], where: str | None = None) -> Config:
    """Snakemake's merged config, and the config files it was merged from.

    Snakemake reads the files itself, and lets the last of two equal keys win without a word: here they are read again,
    strictly. Messages open with `where` (default: the file, where one file is all of the config, else `config`). Raises
    InputError as `load` does.
    """
    values = [read_document(file) for file in files]
    only_one = len(values) == 1 and values[0] == merged
    return load(merged, where=where or (os.fspath(files[0]) if only_one else None))


def _all_precisions(model: ModelConfig) -> list[str]:
    return list(dict.fromkeys([*model.precisions, *chain(*model.backend_precisions.values())]))


def _limit_problems(limits: Limits) -> Iterator[Problem]:
    if limits.max_input_len > limits.max_seq_len:
        text = f"expected at most max_seq_len ({limits.max_seq_len}); found {limits.max_input_len}"
        yield Problem(("limits", "max_input_len"), text)
    if limits.max_num_tokens < limits.max_batch_size:
        text = (
            f"expected at least max_batch_size ({limits.max_batch_size}), a token for each request; found "
            f"{limits.max_num_tokens}"
        )
        yield Problem(("limits", "max_num_tokens"), text)


def _name_problems(names: Iterable[str]) -> Iterator[Problem]:
    """A name is a folder: where a file system does not tell capitals from small letters, two models would share one."""
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(name.casefold(), name)
        if other != name:
            yield Problem(
                ("models", name), f"expected names that differ in more than capitals; found {other!r} and {name!r}"
            )


def _device_problems(devices: Mapping[str, Device]) -> Iterator[Problem]:
    for name, device in devices.items():
        if name in backends():
            yield Problem(("devices", name), f"expected another name, for {name} is a backend; found {name!r}")
        key, other = ("gpu", "cpu") if backends()[device.backend].gpus else ("cpu", "gpu")
        if not getattr(device, key):
            yield Problem(("devices", name, key), f"expected its name, for {device.backend} runs on it; found nothing")
        if found := getattr(device, other):
            yield Problem(("devices", name, other), f"expected {key} with {device.backend}; found {found!r}")
        if device.python and not backends()[device.backend].has_interpreter:
            text = f"expected no interpreter, for {device.backend} runs in this one; found {device.python!r}"
            yield Problem(("devices", name, "python"), text)


def _unknown_backends(name: str, model: ModelConfig, devices: Mapping[str, Device]) -> Iterator[Problem]:
    allowed = [*backends(), *devices]
    keys = [("backends", index) for index in range(len(model.backends))]
    places: list[tuple[Any, ...]] = [*keys, *(("backend_precisions", backend) for backend in model.backend_precisions)]
    for place, backend in zip(places, [*model.backends, *model.backend_precisions], strict=True):
        if backend not in allowed:
            yield Problem(("models", name, *place), f"expected one of {', '.join(allowed)}; found {describe(backend)}")


def _model_problems(
    name: str, model: ModelConfig, limits: Limits, backend_of: Callable[[str], str]
) -> Iterator[Problem]:
    here = ("models", name)
    if _RESERVED_NAMES.fullmatch(name):
        yield Problem(here, f"expected another name, for results/{name} is used for results; found {name!r}")
    for key in ("layers", "precisions", "backends"):
        items = getattr(model, key)
        for index, item in enumerate(items):
            if item in items[:index]:
                yield Problem((*here, key, index), f"expected each item once; found {item!r} again")
    for backend in model.backend_precisions:
        if backend not in model.backends:
            text = f"expected one of the model's backends ({', '.join(model.backends)}) as the key; found {backend!r}"
            yield Problem((*here, "backend_precisions", backend), text)
    for backend in model.backends:
        settings, own = backends()[backend_of(backend)], backend in model.backend_precisions
        if model.tensor_parallel > 1 and not settings.runs_ranks:
            able = ", ".join(name for name, each in backends().items() if each.runs_ranks)
            text = f"expected 1 for backend {backend}; several ranks run on {able}; found {model.tensor_parallel}"
            yield Problem((*here, "tensor_parallel"), text)
        if model.adapters and not settings.runs_adapters:
            able = ", ".join(name for name, each in backends().items() if each.runs_adapters)
            text = f"expected none for backend {backend}; adapters run on {able}; found {len(model.adapters)}"
            yield Problem((*here, "adapters"), text)
        elif model.adapters:
            other = [each for each in model.precisions_of(backend) if each not in settings.runs_adapters]
            if other and other[0] in settings.precisions:
                able = ", ".join(settings.runs_adapters)
                text = f"expected none for backend {backend} in {other[0]}; there they run in {able}; found "
                yield Problem((*here, "adapters"), f"{text}{len(model.adapters)}")
        place: tuple[str, ...] = ("backend_precisions", backend) if own else ("precisions",)
        for index, precision in enumerate(model.precisions_of(backend)):
            if precision not in settings.precisions:
                allowed, why = ", ".join(settings.precisions), f" ({settings.lacks})" if settings.lacks else ""
                text = f"expected one of {allowed} for backend {backend}{why}; found {precision!r}"
                yield Problem((*here, *place, index), text)
            elif own and precision in model.precisions_of(backend)[:index]:
                yield Problem((*here, *place, index), f"expected each item once; found {precision!r} again")
    if model.adapters and model.tensor_parallel > 1:
        text = (
            f"expected none for a model that is split over {model.tensor_parallel} ranks; found {len(model.adapters)}"
        )
        yield Problem((*here, "adapters"), text)
    for adapter, settled in model.adapters.items():
        for index, prompt in enumerate(settled.prompts):
            yield from _expected_problems((*here, "adapters", adapter, "prompts", index), prompt, model)
    if model.golden.max_new_tokens >= limits.max_seq_len:
        text = (
            f"expected less than limits.max_seq_len ({limits.max_seq_len}), which counts the prompt too; "
            f"found {model.golden.max_new_tokens}"
        )
        yield Problem((*here, "golden", "max_new_tokens"), text)
    elif (model.golden.long_prompt or 0) + model.golden.max_new_tokens > limits.max_seq_len:
        text = (
            f"expected at most limits.max_seq_len less max_new_tokens "
            f"({limits.max_seq_len - model.golden.max_new_tokens}); found {model.golden.long_prompt}"
        )
        yield Problem((*here, "golden", "long_prompt"), text)
    for index, prompt in enumerate(model.golden.prompts):
        yield from _expected_problems((*here, "golden", "prompts", index), prompt, model)


def _expected_problems(here: tuple[Any, ...], prompt: Prompt, model: ModelConfig) -> Iterator[Problem]:
    for count in prompt.expected:
        if count not in model.layers:
            text = (
                f"expected one of the model's layers ({', '.join(map(str, model.layers))}) as the key; found {count!r}"
            )
            yield Problem((*here, "expected", count), text)


def _place(source: str, folders: Sequence[str | os.PathLike] | None, manifest: Path) -> Path | None:
    """What holds the model's shape: a folder or a config.json. None for a model on the hub that was not fetched yet."""
    kind = parse_source(source)
    if isinstance(kind, FolderSource):
        return resolve_source(source, folders)
    if isinstance(kind, RandomSource):
        return resolve_random(kind, folders)
    fetched = known(manifest, source)
    return fetched.folder if fetched and (fetched.folder / "config.json").is_file() else None


def _group_problems(
    name: str, model: ModelConfig, shape: CheckpointShape, path: Path, settings_of: Callable[[str], BackendSettings]
) -> Iterator[Problem]:
    """`group_size` against the rows, and of a checkpoint that is quantised already against its own."""
    where, packing = ("models", name, "group_size"), shape.packing
    already = largest_group(packing.group_size) if packing and packing.group_size else None
    found = model.group_size or already or (None if packing else GROUP_SIZE)
    if already and found != already:
        yield Problem(where, f"expected {already}, or none: {path} says how weights are quantised; found {found}")
    elif found and shape.hidden_size is not None and shape.hidden_size % found:
        yield Problem(where, f"expected a size that divides hidden_size ({shape.hidden_size} in {path}); found {found}")
    for backend in model.backends:
        own = backend in model.backend_precisions
        for index, precision in enumerate(model.precisions_of(backend)):
            if packing and is_quantized(precision) and precision != precision_of(packing.bits):
                place: tuple[Any, ...] = ("backend_precisions", backend) if own else ("precisions",)
                text = f"expected {precision_of(packing.bits)} or floating point, as {path} says how weights are"
                yield Problem(("models", name, *place, index), f"{text} quantised; found {precision!r}")
            elif packing and packing.zero_points and is_quantized(precision) and not settings_of(backend).zero_points:
                text = f"expected none of {backend}, which takes no zero points of the weights' own ({path})"
                yield Problem(("models", name, "backends"), f"{text}, with {precision}; found one")


def _shape_problems(
    name: str, model: ModelConfig, limits: Limits, place: Path, settings_of: Callable[[str], BackendSettings]
) -> Iterator[Problem]:
    """`layers` and `limits` against the depth and the positions in a `config.json`, or that of a folder."""
    shape, path = read_shape(place), place / "config.json" if place.is_dir() else place
    depth, positions = shape.num_hidden_layers, shape.max_position_embeddings
    for index, layers in enumerate(model.layers):
        where = ("models", name, "layers", index)
        if isinstance(layers, int) and layers > depth:
            yield Problem(where, f"expected at most {depth} (num_hidden_layers in {path}) or all; found {layers}")
        if layers == depth and "all" in model.layers:
            yield Problem(
                where, f"expected each target once; found {layers}, which is all of this model's layers, beside all"
            )
    if any(map(is_quantized, _all_precisions(model))):
        yield from _group_problems(name, model, shape, path, settings_of)
    if positions is not None and limits.max_seq_len > positions:
        text = f"expected at most {positions} ({shape.limited_by} in {path}); found {limits.max_seq_len}"
        yield Problem(("limits", "max_seq_len"), text)
