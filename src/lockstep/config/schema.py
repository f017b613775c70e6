"""The config as a type, and what follows from it for stages, targets and machines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from lockstep.artifacts.adapters import fetched_manifest
from lockstep.artifacts.fetched import folder_of, load_if_same_source
from lockstep.config.backends import BackendSettings, backends
from lockstep.config.consistency import (
    device_problems,
    endpoint_problems,
    limit_problems,
    model_problems,
    name_problems,
    shape_problems,
    unknown_backends,
)
from lockstep.config.messages import Problem, Problems, describe, join, nearest
from lockstep.config.section import Flag, PathText, Section
from lockstep.config.sources import FolderSource, HubSource, parse_source, places_of, resolve_here
from lockstep.config.types import (
    Backends,
    Device,
    DeviceName,
    Endpoint,
    Limits,
    ModelConfig,
    ModelName,
    Prompt,
    Tolerances,
)
from lockstep.errors import InputError
from lockstep.targets import Results, Target, is_quantized
from lockstep.tolerances import GRAPH
from lockstep.tolerances import Tolerances as PlainTolerances


class Config(Section):
    """The config: models, and for all of them limits and tolerances."""

    models: dict[ModelName, ModelConfig] = Field(
        min_length=1, description="The models, each with a name, which is also a folder in `results/`."
    )
    limits: Limits = Field(default=Limits(), description="Sizes that engines and caches are made for.")
    tolerances: Tolerances = Field(default=Tolerances(), description="The errors that pass, by precision.")
    compare_seconds: int = Field(
        default=30,
        ge=0,
        description="For each engine, how many seconds of CPU time of each thread it is compared with its graph at "
        "sizes besides those it is tuned for (docs/checks.md). The demo's engines take two for all sizes.",
    )
    compare_seed: int = Field(
        default=0,
        ge=0,
        description="Draws other sizes where an engine is compared with its graph on a sample of them "
        "(docs/checks.md).",
    )
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
    endpoints: dict[ModelName, Endpoint] = Field(
        default={}, description="Servers that a run certifies (docs/certify.md), by names of yours."
    )

    @model_validator(mode="after")
    def _across_fields(self) -> Config:
        problems = [*limit_problems(self.limits)]
        problems += name_problems(self.models)
        problems += device_problems(self.devices)
        problems += endpoint_problems(self.endpoints, self.models)
        for name, model in self.models.items():
            # The checks below need the settings of known backends.
            unknown = list(unknown_backends(name, model, self.devices))
            if unknown:
                problems += unknown
                continue
            problems += model_problems(name, model, self.limits, self.backend_of)
            if not self.skip_missing_precisions:
                problems += self._lacking_problems(name, model)
        if problems:
            raise Problems(problems)
        return self

    def targets(self) -> list[Target]:
        """Return all targets, without those of backends that the config skips here.

        Models in order of their names, then precisions, layer counts and backends in the order of the config.
        """
        skipped = self.skipped_backends()
        return [target for target in self._all_targets() if target.backend not in skipped]

    def _all_targets(self) -> Iterator[Target]:
        for name, model in sorted(self.models.items()):
            for precision in model.all_precisions():
                for layers in model.layers:
                    for backend in model.backends:
                        if precision in model.precisions_of(backend):
                            yield Target(name, precision, layers, backend)

    def skipped_backends(self) -> dict[str, str]:
        """Return {backend: why its targets are skipped here} (`skip_missing_backends`)."""
        if not self.skip_missing_backends:
            return {}
        return self.missing_backends()

    def missing_backends(self) -> dict[str, str]:
        """Return {backend: why its engines cannot be built here}. A device's are built there."""
        used: set[str] = set()
        for entry in self.models.values():
            used.update(entry.backends)
        missing = {backend: self._settings(backend).missing() for backend in sorted(used - self.devices.keys())}
        return {backend: reason for backend, reason in missing.items() if reason}

    def backend_of(self, name: str) -> str:
        """Return the backend that a target names, or that of the device that it names."""
        if name in self.devices:
            return self.devices[name].backend
        return name

    def device_of(self, name: str) -> dict[str, str] | None:
        """Return backend and hardware of a target's device, as plain JSON; None where the target names a backend."""
        if name not in self.devices:
            return None
        return {"backend": self.devices[name].backend, "hardware": self.devices[name].hardware}

    def _lacking(self, precision: str, backend: str) -> str | None:
        """Return why the processor does not compute in a precision; None where it does."""
        return self._settings(backend).lacks_here(precision)

    def _lacking_problems(self, name: str, model: ModelConfig) -> Iterator[Problem]:
        for backend in model.backends:
            for place, precision in model.placed_precisions(backend):
                if reason := self._lacking(precision, backend):
                    text = (
                        f"expected a precision of this machine for backend {backend} ({reason}), or "
                        f"skip_missing_precisions: true; found {precision!r}"
                    )
                    yield Problem(("models", name, *place), text)

    def check_device(self, name: str | None) -> str | None:
        """Return the device that `--config device=NAME` names. Raises InputError where there is none."""
        if name is not None and name not in self.devices:
            device_names = ", ".join(self.devices) or "none, for the config has no devices"
            raise InputError(f"device: expected one of {device_names}; found {describe(name)}")
        return name

    def _settings(self, name: str) -> BackendSettings:
        return backends()[self.backend_of(name)]

    def cannot_run(self, backend: str) -> str | None:
        """Return why engines of a backend cannot run here; None where they can, and for a device elsewhere."""
        if backend in self.devices:
            return None
        return self._cannot_build(backend) or self._settings(backend).cannot_run()

    def _cannot_build(self, backend: str) -> str | None:
        """Return why engines of a backend cannot be built here; None where they can, and for a device."""
        if backend in self.devices:
            return None
        return self._settings(backend).cannot_build()

    def not_built(self) -> dict[str, str]:
        """Return why engines are not built here, by backend, or `<precision>/<backend>` where that is the reason."""
        pairs = sorted({(target.precision, target.backend) for target in self.targets()})
        reasons = {f"{precision}/{backend}": self._lacking(precision, backend) for precision, backend in pairs}
        reasons |= {backend: self._cannot_build(backend) for _, backend in pairs}
        return {name: reason for name, reason in reasons.items() if reason}

    def not_run(self) -> dict[str, str]:
        """Return why engines are not run here, by backend of the targets, and as `not_built` by precision."""
        used = sorted({target.backend for target in self.targets()})
        reasons = {backend: self.cannot_run(backend) for backend in used}
        return {backend: reason for backend, reason in reasons.items() if reason} | self.not_built()

    def check_backends(self) -> None:
        """Check that backends are installed and that the checks of the config can run.

        Raises InputError where a backend is not installed that the config does not skip then, and where it asks for
        checks that cannot run here.
        """
        problems: list[Problem] = []
        skipped = self.skipped_backends()
        missing = dict[str, str]()
        if not self.skip_missing_backends:
            missing = self.missing_backends()
        for name, model in self.models.items():
            for index, backend in enumerate(model.backends):
                path = ("models", name, "backends", index)
                if reason := missing.get(backend):
                    text = f"expected backends that are installed, or skip_missing_backends: true; {backend}: {reason}"
                    problems.append(Problem(path, text))
                elif self.require_run and backend not in skipped:
                    reasons = [
                        self.cannot_run(backend),
                        *(self._lacking(precision, backend) for precision in model.precisions_of(backend)),
                    ]
                    if why := next(filter(None, reasons), None):
                        text = f"expected to run its engines (require_run: true); {backend}: {why}"
                        problems.append(Problem(path, text))
        if problems:
            raise InputError(f"config: {join(Config, problems)}")

    def why_not_built(self, target: Target) -> str | None:
        """Return why a target's engines are not built here; None where they are. See `skip_missing_precisions`."""
        return self._lacking(target.precision, target.backend) or self._cannot_build(target.backend)

    def is_run(self, target: Target) -> bool:
        """Return whether a target's engines run here. Else they are built, and no more, or not even that."""
        return self.why_not_run(target) is None

    def why_not_run(self, target: Target) -> str | None:
        return self._lacking(target.precision, target.backend) or self.cannot_run(target.backend)

    def reference_terms(self, model: str) -> dict[str, Any]:
        """Return the parameters of a model's reference, as plain JSON: prompts, and how many tokens follow them."""
        golden = self.models[model].golden
        long_prompt = golden.long_prompt
        if long_prompt is None:  # as long as fits
            long_prompt = self.limits.max_seq_len - golden.max_new_tokens
        parameters: dict[str, Any] = {
            "max_new_tokens": golden.max_new_tokens,
            "prompts": [prompt.text for prompt in golden.prompts],
            "long_prompt": long_prompt,
        }
        if self.models[model].kv_cache_dtype:
            parameters["kv_cache_dtype"] = self.models[model].kv_cache_dtype
        return parameters

    def adapter_prompts(self, model: str) -> dict[str, tuple[Prompt, ...]]:
        """Return the golden prompts of each adapter, by default the model's texts; under "" those without one."""
        model_prompts = self.models[model].golden.prompts
        texts = tuple(Prompt(text=prompt.text) for prompt in model_prompts)
        by_adapter = {name: adapter.prompts or texts for name, adapter in sorted(self.models[model].adapters.items())}
        return {"": texts, **by_adapter}

    def adapter_folders(
        self, model: str, folders: Sequence[str | os.PathLike] | None = None, results: Results = Results()
    ) -> dict[str, Path]:
        """Return the folder of each adapter of a model.

        It is looked up as `check_sources` does; of one on the hub it is where a job of `results` brings it. Raises
        InputError, which names every place looked at, where there is none.
        """
        by_adapter = {}
        problems = []
        for name, adapter in sorted(self.models[model].adapters.items()):
            if isinstance(parse_source(adapter.source), HubSource):
                by_adapter[name] = folder_of(fetched_manifest(results.adapter_sources(model), name))
                continue
            places = places_of(adapter.source, folders)
            place = next((place for place in places if os.path.isdir(place)), None)
            if place is None:
                looked = " and ".join(map(str, places))
                text = f"expected the folder of an adapter, as PEFT saves it; found none at {looked}"
                problems.append(Problem(("models", model, "adapters", name, "source"), text))
            else:
                by_adapter[name] = place
        if problems:
            raise InputError(f"config: {join(Config, problems)}")
        return by_adapter

    def parse_target(self, text: str, where: str = "") -> Target:
        """Return the target of a name, on the model's first backend where it names none.

        The name is `<model>/<precision>`, which is all layers, or with `/<layers>` or `/<layers>/<backend>` after it.
        where: what the config is, for the message. Raises InputError listing the targets there are, or for one that is
        skipped with the reason.
        """
        by_name: dict[str, Target] = {}
        for target in self.targets():
            by_name[str(target)] = target
            by_name.setdefault(str(target).rpartition("/")[0], target)
            if target.layers == "all":
                by_name.setdefault(f"{target.model}/{target.precision}", target)
        if text in by_name:
            return by_name[text]
        skipped = self.skipped_backends()
        for target in self._all_targets():
            if text == str(target) and (reason := skipped.get(target.backend)):
                raise InputError(
                    f"target: expected one that is made here, found {text}: the config skips the backend "
                    f"{target.backend} (skip_missing_backends), for {reason}"
                )
        names = [str(target).rpartition("/")[0] for target in self.targets()]
        allowed = list(dict.fromkeys(names))
        expected = ", ".join(allowed[:20])
        if len(allowed) > 20:
            expected += f" (and {len(allowed) - 20} more)"
        if where:
            expected += f", in {where}"
        guess = ""
        if text.count("/") == 3:  # a whole name: the same target on another backend is nearer than another model
            same_target = text.rpartition("/")[0] + "/"
            guess = nearest(text, [name for name in by_name if name.startswith(same_target)])
        # A semicolon sets the guess apart from a list with commas.
        guess = (guess or nearest(text, by_name)).replace(",", ";", 1)
        raise InputError(f"target: expected one of {expected}; found {describe(text)}{guess}")

    def is_folder(self, model: str) -> bool:
        """Return whether the checkpoint of a model is in a folder that the config names; else a job fetches it."""
        return isinstance(parse_source(self.models[model].source), FolderSource)

    def check_sources(
        self, folders: Sequence[str | os.PathLike] | None = None, where: str = "config", results: Results = Results()
    ) -> dict[str, Path]:
        """Check the config against the `config.json` of each model; return their folders.

        For random weights the place is the config.json. folders: where relative sources are looked up (default: working
        directory, then repository). where: opens the message. No network is used: a model on the hub is compared with
        the files that `results` has of it, and left out before it has any. Raises InputError when a folder is not
        there, or is a model with fewer layers or positions than asked.
        """
        paths: dict[str, Path] = {}
        problems: list[Problem] = []
        for name, model in self.models.items():
            try:
                place = _place(model.source, folders, results.source(name))
                if place:
                    paths[name] = place
                    problems += shape_problems(name, model, self.limits, place, self._settings)
            except InputError as error:
                problems.append(Problem(("models", name, "source"), str(error)))
        if problems:
            raise InputError(f"{where}: {join(Config, problems)}")
        return paths

    def check_model(self, name: str, place: Path) -> None:
        """Compare the config with one model. place: the folder of its checkpoint, or its config.json."""
        problems = [*shape_problems(name, self.models[name], self.limits, place, self._settings)]
        if problems:
            raise InputError(f"config: {join(Config, problems)}")

    def tolerance(self, model: str, precision: str, backend: str | None = None) -> PlainTolerances:
        """Return the tolerances of a model in a precision, its own or those of all. backend: None gives graphs'."""
        noise = getattr(self.models[model].tolerances, precision).noise or self.tolerances[precision].noise
        if backend is None:
            return PlainTolerances(precision, GRAPH, noise)
        tolerances = PlainTolerances(precision, self.backend_of(backend), noise)
        if self.models[model].activations is not None and is_quantized(precision):
            return tolerances.in_bfloat16
        return tolerances

    def build_options(self, backend: str) -> dict[str, Any]:
        """Return the options of a backend's build as plain JSON: its settings, and the limits that it depends on."""
        section = getattr(self.backends, self.backend_of(backend), None)
        return self._settings(backend).build_options(section, self.engine_limits())

    def engine_limits(self) -> dict[str, int]:
        return self.limits.model_dump(include={"max_batch_size", "max_num_tokens", "max_seq_len"})

    def gpus(self, backend: str) -> int:
        """Return how many GPUs a job takes which builds or runs a backend's engines."""
        return self._settings(backend).gpus

    def dump(self) -> dict[str, Any]:
        """Return the config in plain JSON types with all defaults, but without the cache: `load` gives it again."""
        # The cache is this machine's and changes no artefact. Keys that came later are left out where they are empty,
        # so that results/config.json of older configs keeps its bytes.
        excluded = {"cache", *(name for name in ("devices", "endpoints") if not getattr(self, name))}
        return self.model_dump(mode="json", exclude=excluded)


def _place(source: str, folders: Sequence[str | os.PathLike] | None, manifest: Path) -> Path | None:
    """Return the folder, config.json or GGUF file with a model's shape; None for one of the hub not yet fetched."""
    kind = parse_source(source)
    if not isinstance(kind, HubSource):
        return resolve_here(kind, folders)
    folder = folder_of(manifest)
    if load_if_same_source(manifest, source) and (folder / "config.json").is_file():
        return folder
    return None
