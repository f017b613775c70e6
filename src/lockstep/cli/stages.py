"""Each stage as a command, without Snakemake.

They call what the rules call, and work on the same paths below `results/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.options import CONFIG, PATH, RESULTS
from lockstep.cli.terminal import echo_json_line, working
from lockstep.errors import InputError, note
from lockstep.targets import Results, Target

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.stages import Job


@dataclass(frozen=True)
class Project:
    """A config, its checkpoint folders and the results tree of a command.

    newest: take the commit that a branch is at now. where: what the config is, in words for a message.
    """

    config: Config
    sources: dict[str, Path]
    results: Results
    locked: bool = False
    newest: bool = False
    where: str = "config"

    @classmethod
    def open(cls, config_file: Path | None, results: Path, locked: bool = False, newest: bool = False) -> Project:
        tree = Results(results)
        config = load_config(config_file, tree)
        return cls(config, config.check_sources(results=tree), tree, locked, newest, _of_given(config_file, tree))

    def lock_file(self, model: str) -> Path | None:
        if not self.locked:
            return None
        from lockstep.provenance.locked import find_lock

        return find_lock(model, [Path()])

    def checkpoint_folder(self, model: str) -> Path | None:
        """Return the folder of the model's checkpoint.

        None for a checkpoint that is fetched from the hub, or made, and is not there yet.
        """
        from lockstep.artifacts.fetched import folder_of

        if self.config.is_folder(model):
            return self.sources[model]
        folder = folder_of(self.results.source(model))
        return folder if folder.is_dir() else None


def _of_given(config_file: Path | None, results: Results) -> str:
    from lockstep.config.load import given

    return str(config_file) if config_file else f"{given(None, results)}; --config names another"


def load_config(config_file: Path | None, results: Results = Results()) -> Config:
    from lockstep.config.load import load_given

    return load_given(config_file, results)


def _command(name: str) -> click.Command:
    """Return the command of one stage.

    It runs the stage's jobs of the targets that are named.
    """
    from lockstep.stages import STAGES

    entry = STAGES[name]

    @click.command(name, help=entry.help)
    @click.argument("targets", nargs=-1, metavar="[TARGET]...")
    @CONFIG
    @RESULTS
    @click.option("--json", "as_json", is_flag=True, help="A line of JSON for each artefact instead of its path.")
    @click.option("--locked", is_flag=True, help="Refuse to make anything else than what locks/<model>.lock.json says.")
    def command(
        targets: tuple[str, ...],
        config_file: Path | None,
        results: Path,
        merge: str | None = None,
        out: Path | None = None,
        as_json: bool = False,
        **options: bool,
    ) -> None:
        project = Project.open(config_file, results, **options)

        def tell(names: Mapping[str, Any], output: Path) -> None:
            if as_json:
                echo_json_line({"stage": name, "names": dict(names), "output": str(output)})
            else:
                click.echo(output)

        if merge is not None or out is not None:
            model, output = _merge(project, targets, merge, out)
            return tell({"model": model, "adapter": merge}, output)
        chosen = chosen_jobs(project, targets, name)
        if "backend" not in entry.wildcards:
            _note_missing(project.config, {job.names["model"] for job in chosen})
        for number, job in enumerate(chosen, start=1):
            with working(f"step {number} of {len(chosen)}: {job}", line=len(chosen) > 1):
                output = _run(project, job)
            tell(job.names, output)

    if name == "fetch":
        newest = "Take the commit that a branch is at now, not the one it was found at."
        command = click.option("--newest", is_flag=True, help=newest)(command)
    if name == "convert":
        command = click.option("--merge", metavar="NAME", help="Instead: merge this adapter into the checkpoint.")(
            click.option("--out", type=PATH, help="For --merge: the new checkpoint's folder.")(command)
        )
    return command


def _note_missing(config: Config, models: set[str]) -> None:
    """Say which backends' engines cannot be built here: minutes before a build does."""
    for model in sorted(models):
        for backend, reason in config.missing_backends(model).items():
            note(f"{model}: engines of {backend} cannot be built here: {reason}")


def _merge(project: Project, targets: tuple[str, ...], name: str | None, out: Path | None) -> tuple[str, Path]:
    """Merge an adapter into a model's checkpoint.

    Returns the model and the new checkpoint's folder. Raises InputError unless an adapter, a folder and one model with
    adapters are named.
    """
    from lockstep.artifacts.checkpoint import CheckpointManifest
    from lockstep.export.lora import transposed_layers  # loads torch
    from lockstep.weights.merge import merge

    models = [job.names["model"] for job in chosen_jobs(project, targets, "adapters")]
    if name is None or out is None or len(models) != 1:
        shown = " ".join(f"{key} {value}" for key, value in (("--merge", name), ("--out", out)) if value) or "neither"
        raise InputError(
            f"convert: expected --merge NAME and --out FOLDER, and one model with adapters, found {shown} and "
            f"{', '.join(models)}; name the model"
        )
    results = project.results
    checkpoint = results.checkpoint(models[0])
    with working(f"merging adapter {name!r}", line=False):
        transposed = transposed_layers(CheckpointManifest.load(checkpoint).config)
        return models[0], merge(checkpoint, results.adapters(models[0]), name, out, transposed)


def chosen_jobs(project: Project, texts: tuple[str, ...], name: str) -> list[Job]:
    """Return the jobs of a stage for the targets that are named, of all without any.

    Raises InputError where no target has such a job here.
    """
    from lockstep.stages import STAGES, jobs
    from lockstep.workflow.files import model_files

    config = project.config
    results = project.results
    entry = STAGES[name]
    targets = [target for text in texts for target in _named(project, text, entry.wildcards)] or config.targets()
    files = {
        model: vars(model_files(config, model, project.sources.get(model), results))
        for model in {target.model for target in targets}
    }
    # A checkpoint is fetched or made: two stages with one output.
    chosen = [job for job in jobs(config, results.root, targets, files) if STAGES[job.stage].output == entry.output]
    if not chosen and (reason := config.why_not_run(targets[0])):
        built = "; these engines can be built here, not run" if config.is_built(targets[0]) else ""
        raise InputError(f"{name}: {targets[0]}: {reason}{built}")
    if not chosen:
        names = ", ".join(texts) or "none of the config's"
        raise InputError(f"{name}: expected a target that needs it, found {names}; see `lockstep run -- -n`")
    return chosen


def _named(project: Project, text: str, wildcards: Sequence[str]) -> Sequence[Target]:
    """Return the target of this name, as every command takes it.

    Or all of a model, or those of an artefact's name as a run prints it: `demo-llama/all` of a reference.
    """
    names = {}
    for target in project.config.targets():
        names[target] = "/".join(str(getattr(target, field)) for field in wildcards)
    matches = [target for target, name in names.items() if text in (target.model, name)]
    return matches or [project.config.parse_target(text, project.where)]


def _run(project: Project, job: Job) -> Path:
    """Return a job's artefact, made and recorded as in the workflow."""
    from lockstep.provenance.code_identity import pinned_packages, untested
    from lockstep.provenance.run import run
    from lockstep.report.renew import refreshed
    from lockstep.stages import STAGES

    stage = STAGES[job.stage]
    lock_file = project.lock_file(job.names["model"])
    if "transformers" in pinned_packages(stage.module) and (line := untested()):
        click.echo(f"warning: {line}", err=True)
    if job.stage == "fetch":
        from lockstep.provenance.locked import fetch_terms

        terms = fetch_terms(project.config, job.names["model"], lock_file, project.newest)
        job = replace(job, extra={"newest": project.newest, **terms})
    with refreshed(project.results):
        return run(job, lock_file=lock_file, cache=project.config.cache)


class _Stages(click.Group):
    """A command for each stage, in the order of the stages."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        from lockstep.stages import STAGES

        return [name for name in STAGES if name != "config"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _command(cmd_name) if cmd_name in self.list_commands(ctx) else None


@click.group(cls=_Stages)
def stage() -> None:
    """Run one stage of a config's targets, as the workflow runs it.

    Of all targets, or of those that are named: a target, a model, or what a run prints with the stage.
    """
