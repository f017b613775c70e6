"""The commands of rebuilding: `lockstep explain`, `lockstep reproduce`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from lockstep.cli.opened import TARGET, made_target, used_config
from lockstep.cli.stages import CONFIG, RESULTS, Project
from lockstep.cli.terminal import JSON, echo_json
from lockstep.errors import CheckError, InputError
from lockstep.targets import Results


@click.command()
@TARGET
@JSON
@CONFIG
@RESULTS
def explain(target: str, as_json: bool, config_file: Path | None, results: Path) -> None:
    """Explain what a run would make again for a target, and why."""
    from lockstep.provenance.explain import explain as reasons
    from lockstep.provenance.sources import Sources

    if not Results(results).config().is_file():
        raise InputError(
            f"{results}: expected results of an earlier run, found none: all would be made; run `lockstep run` first"
        )
    project = Project.open(config_file, results)
    chosen = project.config.parse_target(target, project.where)
    adapters = project.config.adapter_folders(chosen.model, results=project.results)
    sources = Sources.of(project.config, chosen.model, project.results, project.sources.get(chosen.model), adapters)
    steps = reasons(project.config, project.results, chosen, sources)
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


@click.command()
@TARGET
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="How often to build again.")
@click.option("--at-least", type=click.Choice(["R0", "R3", "R4"]), help="Exit code 1 if a lower level is reached.")
@click.option(
    "--against",
    metavar="LOCK",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Build it once, and compare with this lock, which may be another machine's. Results need not be there.",
)
@click.option(
    "--sign",
    metavar="KEY",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With --against, where all is the same: leave a statement beside the lock, signed with this private key.",
)
@CONFIG
@JSON
@RESULTS
def reproduce(
    target: str,
    rounds: int,
    at_least: str | None,
    against: Path | None,
    sign: Path | None,
    config_file: Path | None,
    as_json: bool,
    results: Path,
) -> None:
    """Build a target again in clean folders, and compare it with this one."""
    if against is not None:
        return _hold_against(target, against, sign, config_file, as_json, results)
    if sign is not None:
        raise InputError("--sign: expected it with --against LOCK, whose rebuild it states, found it alone")
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


def _hold_against(
    text: str, lock: Path, sign: Path | None, config_file: Path | None, as_json: bool, results: Path
) -> None:
    from lockstep.provenance.reproduce import against
    from lockstep.publish import dsse, rebuilds

    if sign is not None:
        dsse.private_key(sign)  # before minutes of work

    project = Project.open(config_file, results)
    target = project.config.parse_target(text, project.where)
    folder = project.checkpoint_folder(target.model)
    if folder is None:
        raise InputError(f"{target.model}: expected its checkpoint here, found none; run `lockstep stage fetch` first")
    found = against(project.config.dump(), folder, target, lock, lambda line: click.echo(line, err=True))
    if as_json:
        echo_json({"target": str(target), "lock": str(lock), "artefacts": [asdict(held) for held in found]})
    else:
        for held in found:
            status = "different" if held.is_locked else "not locked"
            if held.differs is None:
                status = "same"
            click.echo(f"{status:<11} {held.where}{f': {held.differs}' if held.is_locked and held.differs else ''}")
    if wrong := [held for held in found if held.differs]:
        raise CheckError(
            f"{target}: {len(wrong)} of {len(found)} artefacts are not as in {lock}; the first: {wrong[0].differs}"
        )
    if sign is not None:
        click.echo(rebuilds.write(lock, target, found, sign), err=as_json)
