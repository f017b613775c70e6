"""The `lockstep` command: each stage by hand, without Snakemake, and text from a finished engine set.

Each stage is the function that its rule calls, on the same paths below `results/`. Imports stand in the commands: the
program explains itself without loading what only one of them needs.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from lockstep import __version__
from lockstep.cli.cache import cache
from lockstep.cli.guarded import SETTINGS, GuardedGroup
from lockstep.cli.load import load as load_command
from lockstep.cli.locks import COMMANDS
from lockstep.cli.opened import made_target, runnable, used_config
from lockstep.cli.serve import serve as serve_command
from lockstep.cli.stages import CONFIG, RESULTS, Project, load_config, stage_commands
from lockstep.cli.terminal import JSON, echo_json, working
from lockstep.cli.triton import triton as triton_command
from lockstep.errors import InputError
from lockstep.targets import Results


@click.group(cls=GuardedGroup, context_settings=SETTINGS)
@click.version_option(__version__, message="%(prog)s %(version)s")
def main() -> None:
    """From a Hugging Face checkpoint to inference engines that are checked and can be built again."""


for command in stage_commands():
    main.add_command(command)


@main.command()
@JSON
@RESULTS
def summary(as_json: bool, results: Path) -> None:
    """Print all checks as they stand now; changes nothing."""
    from lockstep.report import summary as stage

    tree = Results(results)
    config = used_config(tree)
    found = stage.collect(tree, config.targets(), config.not_run())
    if as_json:
        return echo_json(found.to_json())
    stage.print_table(found)
    stage.print_verdict(found)
    for path, what in ((tree.summary(), "Summary"), (tree.report_page(), "Report")):
        if path.is_file():
            click.echo(f"{what}: {path}")


@main.command()
@RESULTS
def report(results: Path) -> None:
    """Write the summary and the report's pages anew, of what is there now."""
    from lockstep.report.renew import summarise

    tree = Results(results)
    config = used_config(tree)
    summarise(tree, config.targets(), config.not_run())
    click.echo(tree.report_page())


@main.command()
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Also which block class, attention variant and exit each layer uses, of the models that are exported.",
)
@JSON
@CONFIG
@RESULTS
def targets(config_file: Path | None, results: Path, verbose: bool, as_json: bool) -> None:
    """List the targets of a config."""
    chosen = load_config(config_file).targets()
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
@JSON
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: all]")
@RESULTS
def bisect(target: str, prompt: str | None, as_json: bool, threads: int | None, results: Path) -> None:
    """Where a target goes wrong: engine against graph against PyTorch."""
    tree = Results(results)
    config = used_config(tree)
    chosen = config.parse_target(target)
    from lockstep.pipeline import worker
    from lockstep.verify.bisect.report import text
    from lockstep.verify.bisect.run import bisect as find

    python, tolerance = (
        config.interpreter(chosen.backend),
        config.tolerance(chosen.model, chosen.precision, chosen.backend).plain(),
    )
    ask = None if python is None else lambda **arguments: worker.ask(python, "bisect", **arguments)
    with working(f"bisect {chosen}"):
        report = find(tree, chosen, tolerance, ask, prompt, threads)
    if as_json:
        return echo_json(report.to_json())
    click.echo(text(report), nl=False)


@main.command()
@click.option("--target", metavar="TARGET", help="A target of the last run, such as demo-llama/fp16/all.")
@click.option("--bundle", "archive", type=click.Path(path_type=Path), help="Or a bundle that `lockstep bundle` made.")
@click.option(
    "--weights", type=click.Path(path_type=Path), help="For a bundle without weights: their folder, or a weights.json."
)
@click.option("--prompt", help="The text to go on from.")
@click.option(
    "--input", "source", type=click.Path(path_type=Path), help="Or a file of prompts, one JSON record a line."
)
@click.option("--output", "out", type=click.Path(path_type=Path), help="For --input: the file of completions.")
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
@click.option("--adapter", metavar="NAME", help="Compute it with this adapter of the model.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: LOCKSTEP_THREADS, else all]")
@JSON
@RESULTS
def generate(
    target: str | None,
    archive: Path | None,
    weights: Path | None,
    prompt: str | None,
    source: Path | None,
    out: Path | None,
    max_new_tokens: int,
    stop: tuple[str, ...],
    adapter: str | None,
    threads: int | None,
    as_json: bool,
    results: Path,
    **sampling: Any,
) -> None:
    """Text from an engine set or a bundle, as it is made; then the speed, on stderr. With --json both in one document.

    With --input and --output, a file of prompts is completed, as many at a time as the engines take; run again, it goes
    on where it was. A record: {"prompt": TEXT, "max_tokens": 64, "temperature": 0.8, "seed": 1, ...}."""
    from lockstep.pipeline import worker

    if (prompt is None) == (source is None) or (source is None) != (out is None):
        raise InputError(
            "generate: expected --prompt, or --input and --output, found "
            + (
                " ".join(
                    name for name, value in (("--prompt", prompt), ("--input", source), ("--output", out)) if value
                )
                or "neither"
            )
        )

    if as_json and prompt is None:
        raise InputError("generate: expected --json with --prompt, found it with --input; its --output is JSON already")
    with runnable("generate", "--target", target, archive, weights, results) as found:
        place = found.place
        asked: dict[str, Any] = {"prompt": prompt, "as_json": as_json}
        if source is not None:
            asked = {"source": str(source), "out": str(out)}
        worker.call(
            found.python,
            "generate" if source is None else "generate_file",
            assembly=str(place.assembly),
            weights=str(place.weights),
            engines=str(place.engines),
            layers=place.target.layers,
            limits=asdict(place.limits),
            **asked,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=list(stop),
            threads=threads,
            adapters=None if place.adapters is None else str(place.adapters),
            adapter=adapter,
        )


@main.command()
@click.argument("target")
@JSON
@CONFIG
@RESULTS
def explain(target: str, as_json: bool, config_file: Path | None, results: Path) -> None:
    """What a run would make again for a target, and why."""
    from lockstep.provenance.explain import explain as reasons

    if not Results(results).config().is_file():
        raise InputError(
            f"{results}: expected results of an earlier run, found none: all would be made; run snakemake first"
        )
    project = Project.open(config_file, results)
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
@RESULTS
def bundle(target: str, weights: bool, out: Path | None, results: Path) -> None:
    """A target in one file, that runs where its backend is installed."""
    from lockstep.bundle.pack import pack

    tree = Results(results)
    config = used_config(tree)
    chosen = made_target(config, tree, target)
    name = f"{chosen}".replace("/", "-") + ".tar"
    click.echo(pack(tree, chosen, config.limits.plain(), out or Path(name), weights))


@main.command()
@click.argument("target")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="How often to build again.")
@click.option(
    "--at-least", type=click.Choice(["R0", "R1", "R2", "R3", "R4"]), help="Exit code 1 if a lower level is reached."
)
@click.option(
    "--against",
    metavar="LOCK",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Build it once, and compare with this lock, which may be another machine's. Results need not be there.",
)
@CONFIG
@JSON
@RESULTS
def reproduce(
    target: str,
    rounds: int,
    at_least: str | None,
    against: Path | None,
    config_file: Path | None,
    as_json: bool,
    results: Path,
) -> None:
    """Build a target again in clean folders: what is the same?"""
    from lockstep.errors import CheckError

    if against is not None:
        return _hold_against(target, against, config_file, as_json, results)
    from lockstep.provenance.reproduce import print_table
    from lockstep.provenance.reproduce import reproduce as again

    tree = Results(results)
    config = used_config(tree)
    chosen = made_target(config, tree, target)
    record = again(config.dump(), tree, chosen, rounds, lambda line: click.echo(line, err=True))
    path = tree.reproduction(chosen.model, chosen.precision, chosen.layers, chosen.backend)
    if as_json:
        echo_json(record.to_json())
    else:
        print_table(record)
        click.echo(f"Level reached: {record.level}, in {path}")
    if at_least and (record.level == "none" or record.level < at_least):
        raise CheckError(f"{chosen}: expected {at_least} or higher, found {record.level}; {path} says what differs")


def _hold_against(text: str, lock: Path, config_file: Path | None, as_json: bool, results: Path) -> None:
    from dataclasses import asdict

    from lockstep.errors import CheckError
    from lockstep.provenance.against import against

    project = Project.open(config_file, results)
    target = project.config.parse_target(text)
    folder = _checkpoint_folder(project, target.model)
    if folder is None:
        raise InputError(f"{target.model}: expected its checkpoint to be here, found none; run `lockstep fetch` first")
    found = against(project.config.dump(), folder, target, lock, lambda line: click.echo(line, err=True))
    if as_json:
        echo_json({"target": str(target), "lock": str(lock), "artefacts": [asdict(held) for held in found]})
    else:
        for held in found:
            status = "same" if held.differs is None else "different" if held.is_locked else "not locked"
            click.echo(f"{status:<11} {held.where}{f': {held.differs}' if held.is_locked and held.differs else ''}")
    if wrong := [held for held in found if held.differs]:
        raise CheckError(
            f"{target}: {len(wrong)} of {len(found)} artefacts are not as in {lock}; the first: {wrong[0].differs}"
        )


def _checkpoint_folder(project: Project, model: str) -> Path | None:
    from lockstep.artifacts.fetched import folder_of
    from lockstep.config.sources import FolderSource, parse_source

    if isinstance(parse_source(project.config.models[model].source), FolderSource):
        return project.sources[model]
    folder = folder_of(project.results.source(model))
    return folder if folder.is_dir() else None


for command in (serve_command, load_command, triton_command, cache, *COMMANDS):
    main.add_command(command)
