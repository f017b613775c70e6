"""The function of each stage: a job in, its artefact out.

Imports stand in the functions, so that a job loads what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.manifests.own_files import clear_unnamed
from lockstep.pipeline import worker
from lockstep.pipeline.stage import path_of
from lockstep.pipeline.stages import entry_of
from lockstep.pipeline.step import JobSpec
from lockstep.targets import Limits, Results, Target, Tolerances, layer_count


@dataclass(frozen=True)
class Job:
    """A job to be run.

    results: the tree that it is of. folder: of the checkpoint, for the stages that read it. adapters: folders of the
    model's adapters by name, for the stage that reads them. threads: CPU threads, None for all. given: what only some
    stages take, by name (`fetch`: check, commit, newest, terminal; `make_checkpoint`: path).
    """

    step: JobSpec
    results: Results
    folder: Path | None = None
    threads: int | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    adapters: Mapping[str, Path] = field(default_factory=dict)

    @property
    def names(self) -> Mapping[str, str]:
        return self.step.names

    @property
    def target(self) -> Target:
        """Return the target of a job that has an engine set and a layer count."""
        names = self.names
        return Target(names["model"], names["precision"], layer_count(names["layers"]), names["backend"])

    @property
    def options(self) -> Mapping[str, Any]:
        return self.step.options

    @property
    def output(self) -> Path:
        return self.step.output

    def path(self, artefact: str) -> Path:
        return self.step.inputs[artefact]


def run(job: Job) -> Path:
    """Make the artefact of `job` and return its path.

    The table of stages names the function that makes it.
    """
    worker.function_named(entry_of(job.step).job)(job)
    return job.output


def fetch(job: Job) -> None:
    from lockstep.checkpoint import hub

    hub.fetch(job.options["source"], job.output, **job.given)


def make_checkpoint(job: Job) -> None:
    from lockstep.export.make_checkpoint import make_checkpoint

    make_checkpoint(job.options["source"], job.given["path"], job.output)


def resolve(job: Job) -> None:
    from lockstep import checkpoint

    source = job.results.source(job.names["model"])
    if job.folder is None:
        checkpoint.resolve_fetched(source, job.output)
    else:
        checkpoint.resolve(job.options["source"], job.folder, job.output)


def architecture(job: Job) -> None:
    from lockstep import checkpoint
    from lockstep.artifacts.fetched import folder_of

    folder = job.folder or folder_of(job.results.source(job.names["model"]))
    checkpoint.resolve_architecture(job.options["source"], folder, job.output)


def convert(job: Job) -> None:
    from lockstep.weights.convert import WEIGHTS, convert

    clear_unnamed(job.output, lambda path: path.name == WEIGHTS)
    convert(job.path("checkpoint"), job.names["precision"], job.output, job.step.inputs.get("assembly"))


def export(job: Job) -> None:
    from lockstep import export

    clear_unnamed(job.output, lambda path: True)
    export.export(job.path("architecture"), job.names["precision"], job.output, **job.options)


def validate(job: Job) -> None:
    from lockstep.verify import validate

    validate.run(
        job.path("assembly"),
        job.path("weights"),
        job.path("checkpoint"),
        layer_count(job.names["layers"]),
        Tolerances(**job.options["tolerance"]),
        job.options["max_seq_len"],
        job.output,
        job.names["model"],
        job.threads,
    )


def build(job: Job) -> None:
    arguments = {"backend": job.step.backend, "out": str(job.output), "owns_folder": True, **job.options}
    worker.call(job.step.python, "build", assembly=str(job.path("assembly")), **arguments)


def compare(job: Job) -> None:
    arguments = {"out": str(job.output), "threads": job.threads, **job.options}
    worker.call(job.step.python, "compare", **_inputs(job), **arguments)


def reference(job: Job) -> None:
    from lockstep.verify import golden

    terms = golden.GoldenTerms.from_json(job.options["golden"])
    golden.make_reference(job.path("checkpoint"), layer_count(job.names["layers"]), terms, job.output)


def quantized_reference(job: Job) -> None:
    from lockstep.verify import golden

    paths = [job.path(name) for name in ("checkpoint", "weights", "reference")]
    layers, drift = layer_count(job.names["layers"]), path_of("drift", job.results, job.names)
    terms = golden.GoldenTerms.from_json(job.options["golden"])
    golden.make_quantized_reference(*paths, layers, terms, job.options["drift_text"], job.output, drift)


def golden(job: Job) -> None:
    speed = path_of("speed", job.results, job.names)
    arguments = {"out": str(job.output), "speed": str(speed), "threads": job.threads, **job.options}
    worker.call(job.step.python, "golden", **_inputs(job), target=asdict(job.target), **arguments)


def served(job: Job) -> None:
    from lockstep.serve.check import check

    check(
        job.path("assembly"),
        job.path("weights"),
        job.path("engines"),
        job.path("reference"),
        job.path("golden"),
        job.target,
        Tolerances(**job.options["tolerance"]),
        Limits(**job.options["limits"]),
        job.output,
        job.step.python,
        job.threads,
    )


def fetch_adapters(job: Job) -> None:
    from lockstep.checkpoint.hub.adapters import fetch_adapters

    fetch_adapters(job.options["sources"], job.output)


def adapters(job: Job) -> None:
    from lockstep.weights.check_adapters import resolve_adapters

    resolve_adapters(
        job.options["sources"],
        job.adapters,
        job.path("checkpoint"),
        job.options["max_lora_rank"],
        job.options["targets"],
        job.output,
    )


def adapted_reference(job: Job) -> None:
    _adapted_reference(job, None)


def quantized_adapted_reference(job: Job) -> None:
    _adapted_reference(job, job.path("weights"))


def _adapted_reference(job: Job, weights: Path | None) -> None:
    from lockstep.verify.golden.adapted_reference import make_adapted_reference
    from lockstep.verify.golden.terms import AdaptedTerms

    layers, terms = layer_count(job.names["layers"]), AdaptedTerms.from_json(job.options["golden"])
    make_adapted_reference(job.path("checkpoint"), job.path("adapters"), layers, terms, job.output, weights)


def adapted(job: Job) -> None:
    arguments = {"out": str(job.output), "threads": job.threads, **job.options}
    worker.call(job.step.python, "adapted", **_inputs(job), target=asdict(job.target), **arguments)


def _inputs(job: Job) -> dict[str, str]:
    return {artefact: str(path) for artefact, path in job.step.inputs.items()}
