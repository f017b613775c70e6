"""What a stage is, and one of its jobs.

A stage is a file of this folder: the path of what it makes, what it reads, what the config says to it, what a lock pins
of it, and its work. Its rule in `workflow/rules` says the same to Snakemake; a test holds the two to each other.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.artifacts.build_record import BuildKey
from lockstep.manifests.manifest_files import named_files
from lockstep.targets import Limits, Results, Target, is_quantized, layer_count, wildcards_of
from lockstep.tolerances import Tolerances

if TYPE_CHECKING:
    from lockstep.artifacts.reference import ReferencePrompt
    from lockstep.artifacts.reports import GoldenPrompt
    from lockstep.config.schema import Config
    from lockstep.config.types import Prompt
else:
    Config = Any  # its module loads pydantic, which running engines does not need

Names = Mapping[str, Any]  # model, precision, layers and backend, those that a stage has
Pinned = tuple[tuple[str, ...], dict[str, Any]]  # the place in a lock, and what it must be, by name


@dataclass(frozen=True)
class Job:
    """A stage with its wildcards.

    inputs: manifests and files by the name that the rule gives them. options: plain JSON from the config. output: the
    manifest that it makes. device: of a device of the config its `backend` and the `hardware` that it must find.
    threads: of the CPU, None for all. given: what only some stages take (`Stage.run` says what).
    """

    stage: str
    names: Mapping[str, str]
    inputs: Mapping[str, Path]
    options: Mapping[str, Any]
    output: Path
    device: Mapping[str, str] | None = None
    threads: int | None = None
    given: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def backend(self) -> str | None:
        """Return the backend that builds or runs its engines; None without one."""
        return self.device["backend"] if self.device else self.names.get("backend")

    @property
    def layers(self) -> int | str:
        return layer_count(self.names["layers"])

    @property
    def target(self) -> Target:
        """Return the target of a job that has an engine set and a layer count."""
        return Target(self.names["model"], self.names["precision"], self.layers, self.names["backend"])

    def __str__(self) -> str:
        return " ".join([self.stage, "/".join(map(str, self.names.values()))])


class Stage(abc.ABC):
    """One kind of job.

    output: the pattern of its manifest below `results/`; what stands in braces are its wildcards. reads: patterns of
    what it reads, by name. reads_quantized: where weights are quantised, patterns that are read besides, or instead
    under a name of `reads`. brought: patterns of manifests beside which files of the user lie that another job brings.
    beside: patterns of what it makes beside the manifest. help: of its command, which it has not without one.
    """

    classes: ClassVar[list[type[Stage]]] = []  # of all stages
    name: ClassVar[str]
    output: ClassVar[str]
    help: ClassVar[str] = ""
    reads: ClassVar[Mapping[str, str]] = {}
    reads_quantized: ClassVar[Mapping[str, str]] = {}
    brought: ClassVar[Mapping[str, str]] = {}
    beside: ClassVar[Mapping[str, str]] = {}
    is_check: ClassVar[bool] = False  # the lock pins what the config says to it
    is_judged: ClassVar[bool] = False  # a failure leaves its report or its reason as `<name>.failed.json`
    is_cached: ClassVar[bool] = False  # in the shared cache of artefacts: no check, for one not run has checked nothing
    is_reproduced: ClassVar[bool] = False  # made again by `lockstep reproduce`
    is_named: ClassVar[bool] = False  # its results speak of the model by its name in the config
    only_quantized: ClassVar[bool] = False  # other precisions than those of quantised weights do without
    only_adapters: ClassVar[bool] = False  # models without adapters do without
    runs_engines: ClassVar[bool] = False  # targets whose engines do not run here do without
    continues: ClassVar[bool] = False  # begins with what an earlier run made
    owns_folder: ClassVar[bool] = False  # clears its folder of what an earlier artefact left

    def __init_subclass__(cls) -> None:
        cls.name = cls.__module__.rpartition(".")[2]
        cls.classes.append(cls)

    @property
    def module(self) -> str:
        """Return the module of this package that its jobs enter by; what they may load makes them run again."""
        return f"stages.{self.name}"

    @property
    def wildcards(self) -> tuple[str, ...]:
        """Return which of model, precision, layers and backend the stage has."""
        return wildcards_of(self.output)

    @property
    def is_pinned(self) -> bool:
        return type(self).pin is not Stage.pin

    @property
    def is_locked(self) -> bool:
        """Return whether a lock holds what it makes, or what the config says to it."""
        return self.is_pinned or self.is_check

    def needed(self, config: Config, target: Target) -> bool:
        """Return whether a target has a job of this stage on this machine.

        A stage of a backend has none where its engines are not built, for the processor does not compute in their
        precision; one that runs engines, none where they do not run.
        """
        return (
            self.is_of(target.precision)
            and ("backend" not in self.wildcards or config.is_built(target))
            and (not self.only_adapters or bool(config.models[target.model].adapters))
            and (not self.runs_engines or config.is_run(target))
        )

    def options(self, config: Config, names: Names) -> dict[str, Any]:
        """Return what the config says to a job, as plain JSON. names: the values of its wildcards."""
        return {}

    def pin(self, manifest: Path, key: BuildKey) -> Pinned:
        """Return what a lock holds of an artefact. key: of its record."""
        raise NotImplementedError  # asked of the stages alone that have their own (`is_pinned`)

    @abc.abstractmethod
    def run(self, job: Job) -> None:
        """Make the artefact of a job."""

    def make(self, job: Job) -> Path:
        """Make the artefact of a job; return its path."""
        self.run(job)
        return job.output

    def is_of(self, precision: str) -> bool:
        return is_quantized(precision) or not self.only_quantized

    def inputs(self, precision: str | None) -> dict[str, str]:
        """Return {name: pattern} of what a job of this precision reads; None for a stage without one."""
        quantized = precision is not None and is_quantized(precision)
        return {**self.reads, **(self.reads_quantized if quantized else {})}

    def all_reads(self) -> set[str]:
        """Return the patterns of all that a job of some precision reads, of results."""
        return {*self.brought.values(), *self.reads.values(), *self.reads_quantized.values()}

    def path(self, job: Job, pattern: str) -> Path:
        """Return the path that a pattern stands for in the results tree of one of the stage's jobs."""
        return job.output.parents[self.output.count("/")] / pattern.format(**job.names)

    def job(self, config: Config, root: Path, names: Names, **given: Any) -> Job:
        """Return a job as the config has it.

        root: of the results tree. names: model, precision, layers, backend; those that the stage has are taken.
        """
        taken = {name: names[name] for name in self.wildcards}
        backend = taken.get("backend")
        return Job(
            self.name,
            {name: str(value) for name, value in taken.items()},
            {name: root / pattern.format(**taken) for name, pattern in self.inputs(taken.get("precision")).items()},
            self.options(config, taken),
            root / self.output.format(**taken),
            device=config.device_of(backend) if backend else None,
            given=given,
        )


def artefacts(*names: str) -> dict[str, str]:
    """Return the patterns of what `Results` has by these names."""
    return {name: getattr(Results, name).pattern for name in names}


def digests(manifest: Path) -> dict[str, str]:
    return {file.path.name: file.sha256 for file in named_files(manifest)}


def tokens(prompts: Sequence[ReferencePrompt | GoldenPrompt]) -> dict[str, str]:
    """Return token ids on one line by prompt: a difference is then one line too."""
    return {prompt.text: " ".join(map(str, prompt.tokens)) for prompt in prompts}


def bounds(config: Config, names: Names) -> dict[str, Any]:
    """Return what the config says to each check of a target's engines: tolerances and limits."""
    tolerance = config.tolerance(names["model"], names["precision"], names["backend"])
    return {"tolerance": tolerance.to_json(), "limits": config.limits.model_dump()}


def arguments(job: Job) -> dict[str, Any]:
    """Return the arguments of a check of engines: the files that it reads, its target, `bounds`, report and threads."""
    return {
        **{f"{name}_json": path for name, path in job.inputs.items()},
        "target": job.target,
        "tolerance": Tolerances(**job.options["tolerance"]),
        "limits": Limits(**job.options["limits"]),
        "out": job.output,
        "threads": job.threads,
    }


def expected(config: Config, prompts: Iterable[Prompt], names: Names) -> list[str | None]:
    """Return the text that the config expects after each prompt.

    It is what the checkpoint says; of quantised weights and caches the drift report shows what became of it.
    """
    rounded = config.models[names["model"]].kv_cache_dtype or is_quantized(names["precision"])
    return [None if rounded else prompt.expected.get(layer_count(names["layers"])) for prompt in prompts]
