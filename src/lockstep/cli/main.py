"""The `lockstep` command: each stage by hand, without Snakemake, and text from a finished engine set.

Each stage is the function that its rule calls, on the same paths below `results/`. Imports stand in the commands: the
program explains itself without loading what only one of them needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep import __version__
from lockstep.cli.cache import cache
from lockstep.cli.guarded import SETTINGS, GuardedGroup
from lockstep.cli.locks import COMMANDS
from lockstep.cli.terminal import JSON, echo_json, working
from lockstep.errors import InputError
from lockstep.targets import Results, Target

if TYPE_CHECKING:
    from lockstep.config.load import Config

_RESULTS = click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("results"),
    show_default=True,
    help="The results tree.",
)
_CONFIG = click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="The config.  [default: config/config.yaml]"
)


@click.group(cls=GuardedGroup, context_settings=SETTINGS)
@click.version_option(__version__, message="%(prog)s %(version)s")
def main() -> None:
    """From a Hugging Face checkpoint to inference engines that are checked and can be built again."""


@dataclass(frozen=True)
class Project:
    """What a stage's command works on."""

    config: Config
    sources: dict[str, Path]
    results: Results
    locked: bool = False


def _stage(
    *fields: str, option: Callable[..., Any] = lambda command: command
) -> Callable[[Callable[..., Path]], click.Command]:
    """A command that runs `function(project, *values)` for each combination of `fields` of the targets that it is
    given.

    `option`: a further `click.option`, which the function gets by its name.
    """

    def decorate(function: Callable[..., Path]) -> click.Command:
        @main.command(function.__name__, help=function.__doc__)
        @click.argument("targets", nargs=-1, metavar="[TARGET]...")
        @_CONFIG
        @_RESULTS
        @click.option(
            "--locked", is_flag=True, help="Refuse to make anything else than what locks/<model>.lock.json says."
        )
        @option
        def command(
            targets: tuple[str, ...], config_file: Path | None, results: Path, locked: bool, **options: Any
        ) -> None:
            project = _project(config_file, results, locked)
            chosen = [
                target
                for target in project.config.targets()
                if not targets or any(_matches(target, text) for text in targets)
            ]
            for text in targets:
                if not any(_matches(target, text) for target in chosen):
                    project.config.parse_target(text)  # says which there are
            combinations = dict.fromkeys(tuple(getattr(target, field) for field in fields) for target in chosen)
            for number, values in enumerate(combinations, start=1):
                names, stage = dict(zip(fields, values)), function.__name__
                with working(f"{number} of {len(combinations)}: {stage} {'/'.join(map(str, values))}"):
                    made = _recorded(stage, project, names, lambda: function(project, *values, **options))
                click.echo(made)

        return command

    return decorate


def _recorded(stage: str, project: Project, names: dict[str, Any], make: Callable[[], Path]) -> Path:
    """What `make` gives; the artefact is recorded as a job of the workflow records it."""
    from lockstep.config.sources import FolderSource, RandomSource, parse_source
    from lockstep.pipeline.stages import step
    from lockstep.provenance.run import run
    from lockstep.report.renew import refreshed

    if stage == "fetch":
        kind = parse_source(project.config.models[names["model"]].source)
        if isinstance(kind, FolderSource):
            return make()  # nothing is fetched
        stage = "random_weights" if isinstance(kind, RandomSource) else stage
    with refreshed(project.results):
        return run(
            step(stage, project.config, project.results, names),
            make,
            _lock_file(project, names["model"]),
            project.config.cache,
        )


def _lock_file(project: Project, model: str) -> Path | None:
    if not project.locked:
        return None
    from lockstep.provenance.locked import find_lock

    return find_lock(model, [Path()])


def _matches(target: Target, text: str) -> bool:
    """Whether `text` is the target's name or its beginning: `demo-llama`, `demo-llama/fp16`."""
    return f"{target}/".startswith(f"{text.rstrip('/')}/")


def _project(config_file: Path | None, results: Path, locked: bool = False) -> Project:
    config, tree = _config(config_file), Results(results)
    return Project(config, config.check_sources(results=tree), tree, locked)


def _config(config_file: Path | None) -> Config:
    from lockstep.config.load import load_given

    return load_given(config_file)


def _used_config(results: Results) -> Config:
    """The config that the results were made with."""
    from lockstep.artifacts.files import read_json
    from lockstep.config.load import load
    from lockstep.provenance.record import read_record, record_path

    value = read_json(results.config())
    if record_path(results.config()).is_file() and read_record(results.config()) is None:
        raise InputError(
            f"{results.config()}: expected the config that was recorded, found another; run snakemake again"
        )
    return load(value, where=str(results.config()))


@_stage(
    "model",
    option=click.option(
        "--newest", is_flag=True, help="Take the commit that a branch is at now, not the one it was found at."
    ),
)
def fetch(project: Project, model: str, newest: bool) -> Path:
    """A model on the hub, or random weights -> source.json and its folder."""
    from lockstep.config.sources import FolderSource, RandomSource, parse_source

    source, out = project.config.models[model].source, project.results.source(model)
    kind = parse_source(source)
    if isinstance(kind, FolderSource):
        return project.sources[model]  # nothing to fetch
    if isinstance(kind, RandomSource):
        from lockstep.export import random_model

        return random_model.fetch(source, project.sources[model], out)
    from lockstep.checkpoint import hub
    from lockstep.provenance.locked import before_weights, locked_commit

    lock = _lock_file(project, model)
    check = before_weights(project.config, model, lock)
    return hub.fetch(source, out, check, newest, commit=locked_commit(lock, source) if lock and not newest else None)


@_stage("model")
def resolve(project: Project, model: str) -> Path:
    """Checkpoint folder -> checkpoint.json and architecture.json."""
    from lockstep import checkpoint
    from lockstep.artifacts.fetched import folder_of
    from lockstep.config.sources import FolderSource, parse_source

    source, results = project.config.models[model].source, project.results
    fetched = None if isinstance(parse_source(source), FolderSource) else results.source(model)
    folder = folder_of(fetched) if fetched else project.sources[model]
    made = (
        checkpoint.resolve_fetched(fetched, results.checkpoint(model))
        if fetched
        else checkpoint.resolve(source, folder, results.checkpoint(model))
    )
    _recorded(
        "architecture",
        project,
        {"model": model},
        lambda: checkpoint.resolve_architecture(source, folder, results.architecture(model)),
    )
    return made


@_stage("model", "precision")
def convert(project: Project, model: str, precision: str) -> Path:
    """checkpoint.json -> weights.json in one precision."""
    from lockstep import weights

    return weights.convert(project.results.checkpoint(model), precision, project.results.weights(model, precision))


@_stage("model", "precision")
def export(project: Project, model: str, precision: str) -> Path:
    """architecture.json -> assembly.json and its graphs."""
    from lockstep import export

    return export.export(project.results.architecture(model), precision, project.results.assembly(model, precision))


@_stage("model", "precision", "layers")
def validate(project: Project, model: str, precision: str, layers: int | str) -> Path:
    """Graphs against torch, at one layer count."""
    from lockstep.verify import validate as stage

    results = project.results
    return stage.run(
        results.assembly(model, precision),
        results.weights(model, precision),
        results.checkpoint(model),
        layers,
        project.config.tolerance(model, precision).model_dump(),
        project.config.limits.max_seq_len,
        results.validation(model, precision, layers),
        model,
    )


@_stage("model", "precision", "backend")
def build(project: Project, model: str, precision: str, backend: str) -> Path:
    """assembly.json -> the engine set of one backend."""
    from lockstep.pipeline import worker

    out, config = project.results.engines(model, precision, backend), project.config
    assembly = project.results.assembly(model, precision)
    worker.call(
        config.interpreter(backend),
        "build",
        assembly=str(assembly),
        backend=backend,
        out=str(out),
        options=config.build_options(backend),
    )
    return out


@_stage("model", "precision", "backend")
def compare(project: Project, model: str, precision: str, backend: str) -> Path:
    """Each engine against its graph in ONNX Runtime."""
    from lockstep.pipeline import worker

    results, config = project.results, project.config
    out = results.comparison(model, precision, backend)
    worker.call(
        config.interpreter(backend), "compare",
        assembly=str(results.assembly(model, precision)), weights=str(results.weights(model, precision)),
        engines=str(results.engines(model, precision, backend)), tolerance=config.compare_tolerance(model, precision),
        limits=config.engine_limits(), out=str(out),
    )  # fmt: skip
    return out


@_stage("model", "layers")
def reference(project: Project, model: str, layers: int | str) -> Path:
    """checkpoint.json -> tokens and logits of transformers."""
    from lockstep.verify import golden as stage

    return stage.make_reference(
        project.results.checkpoint(model),
        layers,
        project.config.reference_terms(model),
        project.results.reference(model, layers),
    )


@_stage("model", "precision", "layers", "backend")
def golden(project: Project, model: str, precision: str, layers: int | str, backend: str) -> Path:
    """Engine set against the reference, and its speed."""
    from lockstep.pipeline import worker

    results, config = project.results, project.config
    names = (model, precision, layers, backend)
    worker.call(
        config.interpreter(backend),
        "golden",
        assembly=str(results.assembly(model, precision)),
        weights=str(results.weights(model, precision)),
        engines=str(results.engines(model, precision, backend)),
        reference=str(results.reference(model, layers)),
        target=asdict(Target(*names)),
        tolerance=config.tolerance(model, precision).model_dump(),
        limits=config.limits.model_dump(),
        out=str(results.golden(*names)),
        speed=str(results.speed(*names)),
        expected=[prompt.expected.get(layers) for prompt in config.models[model].golden.prompts],
    )
    return results.golden(*names)


@main.command()
@JSON
@_RESULTS
def summary(as_json: bool, results: Path) -> None:
    """Print all checks as they stand now; changes nothing."""
    from lockstep.report import summary as stage

    tree = Results(results)
    found = stage.collect(tree, _used_config(tree).targets())
    if as_json:
        return echo_json(found)
    stage.print_table(found)
    stage.print_verdict(found)
    for path, what in ((tree.summary(), "Summary"), (tree.report_page(), "Report")):
        if path.is_file():
            click.echo(f"{what}: {path}")


@main.command()
@_RESULTS
def report(results: Path) -> None:
    """Write the summary and the report's pages anew, of what is there now."""
    from lockstep.report.renew import summarise

    tree = Results(results)
    summarise(tree, _used_config(tree).targets())
    click.echo(tree.report_page())


@main.command()
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Also which block class, kind and exit each layer uses, of the models that are exported.",
)
@JSON
@_CONFIG
@_RESULTS
def targets(config_file: Path | None, results: Path, verbose: bool, as_json: bool) -> None:
    """List the targets of a config."""
    chosen = _config(config_file).targets()
    if as_json:
        if verbose:
            raise InputError("targets: expected --json or --verbose, found both; --verbose is text for a person")
        return echo_json({"targets": [{"name": str(target), **asdict(target)} for target in chosen]})
    exported = {
        (target.model, target.precision): Results(results).assembly(target.model, target.precision) for target in chosen
    }
    if verbose and not any(path.is_file() for path in exported.values()):
        raise InputError(
            f"{next(iter(exported.values()))}: expected an assembly, found none, nor one of "
            f"another target; run snakemake first"
        )
    for target in chosen:
        click.echo(target)
    if verbose:
        from lockstep.onnx_tools.show import layer_table

        for (model, precision), path in exported.items():
            click.echo(f"\n{model}/{precision}: " + (layer_table(path) if path.is_file() else "not exported yet"))


@main.command()
@click.argument("graph", type=click.Path(path_type=Path))
def show(graph: Path) -> None:
    """Print a graph so that a person can read it: operators, shapes, slots."""
    from lockstep.onnx_tools.show import show as text

    click.echo(text(graph), nl=False)


@main.command()
@click.argument("target")
@click.option("--prompt", help="The text to follow.  [default: the first golden prompt that fails, else the longest]")
@click.option("--json", "as_json", is_flag=True, help="All of it as JSON.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: all]")
@_RESULTS
def bisect(target: str, prompt: str | None, as_json: bool, threads: int | None, results: Path) -> None:
    """Where a target goes wrong: engine against graph against PyTorch."""
    tree = Results(results)
    config = _used_config(tree)
    chosen = config.parse_target(target)
    from lockstep.artifacts.files import dump_json
    from lockstep.pipeline import worker
    from lockstep.verify.bisect.report import text
    from lockstep.verify.bisect.run import bisect as find

    python, tolerance = (
        config.interpreter(chosen.backend),
        config.tolerance(chosen.model, chosen.precision).model_dump(),
    )
    ask = None if python is None else lambda **arguments: worker.ask(python, "bisect", **arguments)
    report = find(tree, chosen, tolerance, ask, prompt, threads)
    click.echo(dump_json(report) if as_json else text(report), nl=False)


@main.command()
@click.option("--target", metavar="TARGET", help="A target of the last run, such as demo-llama/fp16/all.")
@click.option("--bundle", "archive", type=click.Path(path_type=Path), help="Or a bundle that `lockstep bundle` made.")
@click.option(
    "--weights", type=click.Path(path_type=Path), help="For a bundle without weights: their folder, or a weights.json."
)
@click.option("--prompt", required=True, help="The text to go on from.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the most likely token.")
@click.option(
    "--top-k", type=int, default=0, show_default=True, help="Draw from so many most likely tokens; 0: from all."
)
@click.option(
    "--top-p",
    type=float,
    default=1.0,
    show_default=True,
    help="Draw from the most likely tokens that make up this probability.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text. May be given several times.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: LOCKSTEP_THREADS, else all]")
@_RESULTS
def generate(
    target: str | None,
    archive: Path | None,
    weights: Path | None,
    prompt: str,
    max_new_tokens: int,
    stop: tuple[str, ...],
    threads: int | None,
    results: Path,
    **sampling: Any,
) -> None:
    """Text from an engine set or a bundle, as it is made; then the speed, on stderr."""
    from lockstep.bundle.opened import Opened, opened
    from lockstep.pipeline import worker

    if (target is None) == (archive is None) or (weights is not None and archive is None):
        given = " ".join(
            name
            for name, value in (("--target", target), ("--bundle", archive), ("--weights", weights))
            if value is not None
        )
        raise InputError(
            f"generate: expected --target, or --bundle with or without --weights, found {given or 'neither'}"
        )

    def of_target() -> Opened:
        tree = Results(results)
        config = _used_config(tree)
        chosen = config.parse_target(target)
        engines, assembly = (
            tree.engines(chosen.model, chosen.precision, chosen.backend),
            tree.assembly(chosen.model, chosen.precision),
        )
        return Opened(
            chosen, config.limits.model_dump(), engines, assembly, tree.weights(chosen.model, chosen.precision)
        )

    def run(place: Opened) -> None:
        python = _used_config(Results(results)).interpreter(place.target.backend) if archive is None else None
        worker.call(
            python,
            "generate",
            assembly=str(place.assembly),
            weights=str(place.weights),
            engines=str(place.engines),
            layers=place.target.layers,
            limits=dict(place.limits),
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=list(stop),
            threads=threads,
        )

    with contextlib.nullcontext(of_target()) if archive is None else opened(archive, weights) as place:
        run(place)


@main.command()
@click.argument("target")
@JSON
@_CONFIG
@_RESULTS
def explain(target: str, as_json: bool, config_file: Path | None, results: Path) -> None:
    """What a run would make again for a target, and why."""
    from lockstep.provenance.explain import explain as reasons

    if not Results(results).config().is_file():
        raise InputError(
            f"{results}: expected results of an earlier run, found none: all would be made; run snakemake first"
        )
    project = _project(config_file, results)
    chosen = project.config.parse_target(target)
    steps = reasons(project.config, project.results, chosen, _checkpoint_folder(project, chosen.model))
    found = [step for step in steps if step.rebuilt]
    if as_json:
        entries = [
            {"stage": each.step.stage, "names": each.step.names, "output": str(each.step.output)}
            | {"unknown": each.unknown, "reasons": each.reasons}
            for each in found
        ]
        return echo_json({"target": str(chosen), "steps": entries})
    for step in found:
        click.echo(step)
    if not found:
        click.echo(f"{chosen}: nothing would be made again")


@main.command()
@click.argument("target")
@click.option("--weights", is_flag=True, help="Pack the weights too.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write.  [default: MODEL-PRECISION-LAYERS-BACKEND.tar]",
)
@_RESULTS
def bundle(target: str, weights: bool, out: Path | None, results: Path) -> None:
    """A target in one file, that runs where its backend is installed."""
    from lockstep.bundle.pack import pack

    tree = Results(results)
    config = _used_config(tree)
    chosen = config.parse_target(target)
    name = f"{chosen}".replace("/", "-") + ".tar"
    click.echo(pack(tree, chosen, config.limits.model_dump(), out or Path(name), weights))


@main.command()
@click.argument("target")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="How often to build again.")
@click.option(
    "--at-least", type=click.Choice(["R0", "R1", "R2", "R3", "R4"]), help="Exit code 1 if a lower level is reached."
)
@JSON
@_RESULTS
def reproduce(target: str, rounds: int, at_least: str | None, as_json: bool, results: Path) -> None:
    """Build a target again in clean folders: what is the same?"""
    from lockstep.errors import CheckError
    from lockstep.provenance.reproduce import print_table
    from lockstep.provenance.reproduce import reproduce as again

    tree = Results(results)
    config = _used_config(tree)
    chosen = config.parse_target(target)
    record = again(config.dump(), tree, chosen, rounds, lambda line: click.echo(line, err=True))
    path = tree.reproduction(chosen.model, chosen.precision, chosen.layers, chosen.backend)
    if as_json:
        echo_json(record)
    else:
        print_table(record)
        click.echo(f"Level reached: {record['level']}, in {path}")
    if at_least and (record["level"] == "none" or record["level"] < at_least):
        raise CheckError(f"{chosen}: expected {at_least} or higher, found {record['level']}; {path} says what differs")


def _checkpoint_folder(project: Project, model: str) -> Path | None:
    from lockstep.artifacts.fetched import folder_of
    from lockstep.config.sources import FolderSource, parse_source

    if isinstance(parse_source(project.config.models[model].source), FolderSource):
        return project.sources[model]
    folder = folder_of(project.results.source(model))
    return folder if folder.is_dir() else None


for command in (cache, *COMMANDS):
    main.add_command(command)
