"""The base class of stages, and their jobs.

A stage is a rule of `workflow/rules` and the file of its name in this folder. The rule has its inputs, outputs and
parameters; the file has its work, and the content of its entry in a lock.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.artifacts.statement import BuildKey
from lockstep.manifests.manifest_files import named_files
from lockstep.stages import params
from lockstep.stages.rules import Names, Rule, rules
from lockstep.targets import Limits, Target, layer_count
from lockstep.tolerances import Tolerances

if TYPE_CHECKING:
    from lockstep.artifacts.reference import ReferencePrompt
    from lockstep.artifacts.reports import GoldenPrompt
    from lockstep.config.schema import Config

Pinned = tuple[tuple[str, ...], dict[str, Any]]  # the place in a lock, and {name: locked value}


@dataclass(frozen=True)
class Job:
    """A stage with its wildcards.

    inputs: {name in the rule: manifest}. options: plain JSON from the config. output: the manifest that it makes.
    device: `backend` and required `hardware` of a device of the config. threads: of the CPU, None for all. files: the
    user's, {name in the rule: paths, or {name: folder}}. extra: parameters that no rule has.
    """

    stage: str
    names: Mapping[str, str]
    inputs: Mapping[str, Path]
    options: Mapping[str, Any]
    output: Path
    device: Mapping[str, str] | None = None
    threads: int | None = None
    files: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def backend(self) -> str | None:
        """Return the backend that builds or runs its engines; None without one."""
        # The wildcard is then the name of a device in the config.
        if self.device:
            return self.device["backend"]
        return self.names.get("backend")

    @property
    def layers(self) -> int | str:
        return layer_count(self.names["layers"])

    @property
    def target(self) -> Target:
        return Target(self.names["model"], self.names["precision"], self.layers, self.names["backend"])

    def __str__(self) -> str:
        return " ".join([self.stage, "/".join(map(str, self.names.values()))])


class Stage(abc.ABC):
    """One kind of job. Its name is that of its file and of its rule."""

    classes: ClassVar[list[type[Stage]]] = []  # of all stages
    name: ClassVar[str]
    is_check: ClassVar[bool] = False  # a lock has its options
    is_judged: ClassVar[bool] = False  # a failure leaves its report or its reason as `<name>.failed.json`
    builds_engines: ClassVar[bool] = False  # its backend compiles engines; else it runs them

    def __init_subclass__(cls) -> None:
        cls.name = cls.__module__.rpartition(".")[2]
        cls.classes.append(cls)

    @property
    def module(self) -> str:
        """Return the entry module of its jobs: a change of it, or of its imports, makes them run again."""
        return f"stages.{self.name}"

    @property
    def rule(self) -> Rule:
        return rules()[self.name]

    @property
    def output(self) -> str:
        return self.rule.output

    @property
    def wildcards(self) -> tuple[str, ...]:
        return self.rule.wildcards

    @property
    def is_pinned(self) -> bool:
        return type(self).pin is not Stage.pin

    @property
    def is_locked(self) -> bool:
        """Return whether a lock has its artefact, or its options."""
        return self.is_pinned or self.is_check

    @property
    def is_cached(self) -> bool:
        """Return whether the shared cache holds its artefact: one made of artefacts alone, and no verdict."""
        return bool(self.rule.inputs) and not self.rule.files and not self.is_judged

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        """Return a job's options from the config, as plain JSON. names: the values of its wildcards."""
        wildcards = {name: names[name] for name in self.wildcards}
        return params.options_of(self.rule.params, config, wildcards)

    def pin(self, manifest: Path, key: BuildKey) -> Pinned:
        """Return an artefact's entry in a lock. key: of its statement."""
        raise NotImplementedError  # called only where a stage has its own (`is_pinned`)

    @abc.abstractmethod
    def run(self, job: Job) -> None:
        """Make the artefact of a job."""

    def job(self, config: Config, root: Path, names: Names, files: Mapping[str, Any] = {}, **extra: Any) -> Job:
        """Return a job of the config.

        root: of the results tree. names: model, precision, layers, backend; those that the stage has are used. files:
        `model_files` of the model.
        """
        wildcards = {name: str(names[name]) for name in self.wildcards}
        device = None
        if "backend" in wildcards:
            device = config.device_of(wildcards["backend"])
        return Job(
            self.name,
            wildcards,
            {name: root / pattern.format(**wildcards) for name, pattern in self.rule.reads(config, wildcards).items()},
            self.options(config, wildcards),
            root / self.output.format(**wildcards),
            device=device,
            files={name: files[key] for name, key in self.rule.files.items() if key in files},
            extra=extra,
        )


def digests(manifest: Path) -> dict[str, str]:
    return {file.path.name: file.sha256 for file in named_files(manifest)}


def tokens(prompts: Sequence[ReferencePrompt | GoldenPrompt]) -> dict[str, str]:
    """Return {prompt: token ids as one text}: a difference is then one line of a lock."""
    return {prompt.text: " ".join(map(str, prompt.tokens)) for prompt in prompts}


def arguments(job: Job) -> dict[str, Any]:
    return {
        **{f"{name}_json": path for name, path in job.inputs.items()},
        "target": job.target,
        "tolerance": Tolerances(**job.options["tolerance"]),
        "limits": Limits(**job.options["limits"]),
        "out": job.output,
        "threads": job.threads,
    }
