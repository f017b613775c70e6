"""Each stage as a command of its own, without Snakemake.

They call what the rules call, and work on the same paths below `results/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    from lockstep.stages import Stage


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

    It runs the stage for each combination of its wildcards among the targets that are named.
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
        seed: int | None = None,
        **options: bool,
    ) -> None:
        project = Project.open(config_file, results, **options)
        if seed is not None:
            project = replace(project, config=project.config.model_copy(update={"compare_seed": seed}))

        def tell(names: dict[str, Any], made: Path) -> None:
            if as_json:
                echo_json_line({"stage": name, "names": names, "output": str(made)})
            else:
                click.echo(made)

        if merge is not None or out is not None:
            model, made = _merge(project, targets, merge, out)
            return tell({"model": model, "adapter": merge}, made)
        chosen = _chosen(project, targets, entry)
        for number, values in enumerate(chosen, start=1):
            names = dict(zip(entry.wildcards, values, strict=True))
            words = f"step {number} of {len(chosen)}: {name} {'/'.join(map(str, values))}"
            with working(words, line=len(chosen) > 1):
                made = _BY_HAND.get(name, _run)(project, name, names)
            tell(names, made)

    if name == "fetch":
        newest = "Take the commit that a branch is at now, not the one it was found at."
        command = click.option("--newest", is_flag=True, help=newest)(command)
    if name == "compare":
        sizes = "Draw other sizes where not all are tried.  [default: compare_seed of the config]"
        command = click.option("--seed", type=click.IntRange(0), help=sizes)(command)
    if name == "convert":
        command = click.option("--merge", metavar="NAME", help="Instead: merge this adapter into the checkpoint.")(
            click.option("--out", type=PATH, help="For --merge: the new checkpoint's folder.")(command)
        )
    return command


def _merge(project: Project, targets: tuple[str, ...], name: str | None, out: Path | None) -> tuple[str, Path]:
    """Merge an adapter into a model's checkpoint.

    Returns the model and the new checkpoint's folder. Raises InputError unless an adapter, a folder and one model with
    adapters are named.
    """
    from lockstep.artifacts.checkpoint import CheckpointManifest
    from lockstep.export.lora import transposed_layers  # loads torch
    from lockstep.stages import STAGES
    from lockstep.weights.merge import merge

    models = [model for (model,) in _chosen(project, targets, STAGES["adapters"])]
    if name is None or out is None or len(models) != 1:
        found = " ".join(f"{key} {value}" for key, value in (("--merge", name), ("--out", out)) if value) or "neither"
        raise InputError(
            f"convert: expected --merge NAME and --out FOLDER, and one model with adapters, found {found} and "
            f"{', '.join(models)}; name the model"
        )
    results = project.results
    checkpoint = results.checkpoint(models[0])
    with working(f"merging adapter {name!r}", line=False):
        transposed = transposed_layers(CheckpointManifest.load(checkpoint).config)
        return models[0], merge(checkpoint, results.adapters(models[0]), name, out, transposed)


def _chosen(project: Project, targets: tuple[str, ...], entry: Stage) -> list[tuple[Any, ...]]:
    """Return the values of the stage's wildcards for the targets that are named.

    Engines that cannot run here are left out of a stage that runs them. Raises InputError where nothing is left then.
    """
    config = project.config
    chosen = [target for text in targets for target in _named(project, text, entry)] or config.targets()
    if entry.only_adapters:
        chosen = [target for target in chosen if config.models[target.model].adapters]
        if not chosen:
            raise InputError(f"{entry.name}: expected a model with adapters, found none; give its `adapters`")
        chosen = [target for target in chosen if entry.name != "fetch_adapters" or entry.needed(config, target)]
        if not chosen:
            raise InputError("fetch_adapters: expected adapters on the hub (hf:org/name), found none: nothing to fetch")
    if "precision" in entry.wildcards:
        asked = chosen
        chosen = [target for target in chosen if entry.is_of(target.precision)]
        if not chosen:
            raise InputError(f"{entry.name}: expected a target of quantised weights, found {asked[0]}")
    if "backend" in entry.wildcards:
        needed = [target for target in chosen if entry.needed(config, target)]
        if not needed and (reason := config.why_not_run(chosen[0])):
            built = "; these engines can be built here, not run" if config.is_built(chosen[0]) else ""
            raise InputError(f"{entry.name}: {chosen[0]}: {reason}{built}")
        chosen = needed or chosen
    return list(dict.fromkeys(_values(target, entry) for target in chosen))


def _named(project: Project, text: str, entry: Stage) -> Sequence[Target]:
    """Return the target of this name, as every command takes it.

    Or all of a model, or those of an artefact's name as a run prints it: `demo-llama/all` of a reference.
    """
    names = {target: "/".join(map(str, _values(target, entry))) for target in project.config.targets()}
    found = [target for target, name in names.items() if text in (target.model, name)]
    return found or [project.config.parse_target(text, project.where)]


def _values(target: Target, entry: Stage) -> tuple[Any, ...]:
    return tuple(getattr(target, field) for field in entry.wildcards)


def _run(project: Project, stage: str, names: dict[str, Any], **given: Any) -> Path:
    """Return a stage's artefact, made and recorded as in a job of the workflow."""
    from lockstep.provenance.code_identity import pinned_packages, untested
    from lockstep.provenance.run import run
    from lockstep.report.renew import refreshed
    from lockstep.stages import STAGES

    model = names["model"]
    if stage == "adapters":
        given["adapters"] = project.config.adapter_folders(model, results=project.results)
    if "transformers" in pinned_packages(STAGES[stage].module) and (line := untested()):
        click.echo(f"warning: {line}", err=True)
    job = STAGES[stage].job(project.config, project.results.root, names, **given)
    with refreshed(project.results):
        return run(job, lock_file=project.lock_file(model), cache=project.config.cache)


def _fetch(project: Project, stage: str, names: dict[str, Any]) -> Path:
    """Return a model's checkpoint folder, or the manifest of where it is.

    A model on the hub is downloaded, one of a GGUF file or random weights is made; a folder is there already.
    """
    from lockstep.config.sources import FolderSource, HubSource, parse_source

    model = names["model"]
    kind = parse_source(project.config.models[model].source)
    if isinstance(kind, FolderSource):
        return project.sources[model]
    if not isinstance(kind, HubSource):
        return _run(project, "make_checkpoint", names, path=project.sources[model])
    from lockstep.provenance.locked import fetch_terms

    terms = fetch_terms(project.config, model, project.lock_file(model), project.newest)
    return _run(project, stage, names, newest=project.newest, **terms)


def _resolve(project: Project, stage: str, names: dict[str, Any]) -> Path:

    model = names["model"]
    for backend, reason in project.config.missing_backends(model).items():
        note(f"{model}: engines of {backend} cannot be built here: {reason}")
    folder = project.sources[model] if project.config.is_folder(model) else None
    made = _run(project, stage, names, folder=folder)
    _run(project, "architecture", names, folder=folder)
    return made


_BY_HAND: dict[str, Callable[[Project, str, dict[str, Any]], Path]] = {"fetch": _fetch, "resolve": _resolve}


class _Stages(click.Group):
    """A command for each stage with a help text, in the order of the stages."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        from lockstep.stages import STAGES

        return [name for name, stage in STAGES.items() if stage.help]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _command(cmd_name) if cmd_name in self.list_commands(ctx) else None


@click.group(cls=_Stages)
def stage() -> None:
    """Run one stage of a config's targets, as the workflow runs it.

    Of all targets, or of those that are named: a target, a model, or what a run prints beside the stage.
    """
