"""The commands of rebuilding: `lockstep explain`, `lockstep reproduce`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.cli.opened import TARGET, check_was_run, made_target, used_config
from lockstep.cli.options import AT_LEAST_1, CONFIG, FILE, JSON, RESULTS
from lockstep.cli.terminal import echo_json
from lockstep.errors import CheckError, InputError
from lockstep.targets import Results, Target

if TYPE_CHECKING:
    from lockstep.config.schema import Config


@dataclass(frozen=True)
class _Project:
    """A target, its config, and the folder or file of its model's source, or None where it is not there yet."""

    config: Config
    target: Target
    source: Path | None

    @classmethod
    def open(cls, name: str, config_file: Path | None, results: Results) -> _Project:
        from lockstep.config.load import find_config, load

        path = find_config(config_file, results)
        config = load(path)
        where = str(path) if config_file else f"{path}; --config names another"
        target = config.parse_target(name, where)
        return cls(config, target, config.check_sources(results=results).get(target.model))


@click.command()
@TARGET
@JSON
@CONFIG
@RESULTS
def explain(target: str, as_json: bool, config_file: Path | None, results: Path) -> None:
    """Explain what a run would make again for a target, and why."""
    from lockstep.provenance.explain import explain as explain_jobs
    from lockstep.provenance.sources import Sources

    tree = Results(results)
    check_was_run(tree)
    project = _Project.open(target, config_file, tree)
    chosen = project.target
    adapters = project.config.adapter_folders(chosen.model, results=tree)
    sources = Sources.of(project.config, chosen.model, tree, project.source, adapters)
    explanations = explain_jobs(project.config, tree, chosen, sources)
    rebuilt = [explained for explained in explanations if explained.rebuilt]
    if as_json:
        entries = []
        for explained in rebuilt:
            job = explained.job
            entry = {"stage": job.stage, "names": job.names, "output": str(job.output)}
            entries.append({**entry, "unknown": explained.unknown, "reasons": explained.reasons})
        return echo_json({"target": str(chosen), "steps": entries})
    for explained in rebuilt:
        click.echo(explained)
    if not rebuilt:
        click.echo(f"{chosen}: nothing would be made again")


@click.command()
@TARGET
@click.option("--rounds", type=AT_LEAST_1, default=3, help="How often to build again.")
@click.option(
    "--vary",
    is_flag=True,
    help="Each round in another folder, PATH, time zone, locale, umask, hash seed, date, user, number of threads.",
)
@click.option("--tokens-only", is_flag=True, help="Exit code 0 where the golden tokens are the same, whatever differs.")
@click.option(
    "--against",
    metavar="LOCK",
    type=FILE,
    help="Build it once, and compare with this lock, which may be another machine's. Results need not be there.",
)
@CONFIG
@JSON
@RESULTS
def reproduce(
    target: str,
    rounds: int,
    vary: bool,
    tokens_only: bool,
    against: Path | None,
    config_file: Path | None,
    as_json: bool,
    results: Path,
) -> None:
    """Build a target again in clean folders, and compare.

    Exit code 0 if all is the same, else 1.
    """
    if against is not None:
        return _compare_with_lock(target, against, config_file, as_json, results)
    from lockstep.provenance.reproduce import reproduce as build_rounds

    tree = Results(results)
    config = used_config(tree)
    chosen = made_target(config, tree, target)
    record = build_rounds(config.dump(), tree, chosen, rounds, vary)
    path = tree.reproduction(chosen.model, chosen.precision, chosen.layers, chosen.backend)
    if as_json:
        echo_json(record.to_json())
    else:
        for place, difference in record.artefacts.items():
            _echo_artefact("same", place, difference)
        click.echo(f"The same in {record.in_words} builds, in {path}")
    # The record lists all differences; with --tokens-only the exit code depends on the tokens alone.
    places = [place for place in record.artefacts if place.startswith("golden") or not tokens_only]
    if wrong := list(filter(None, map(record.artefacts.get, places))):
        raise CheckError(f"{chosen}: {len(wrong)} of {len(places)} artefacts are not the same; the first: {wrong[0]}")


def _echo_artefact(status: str, place: str, difference: str | None) -> None:
    if difference:
        click.echo(f"{'different':<11} {place}: {difference}")
    else:
        click.echo(f"{status:<11} {place}")


def _compare_with_lock(text: str, lock: Path, config_file: Path | None, as_json: bool, results: Path) -> None:
    from lockstep.artifacts.fetched import folder_of
    from lockstep.provenance.lock import Lock
    from lockstep.provenance.reproduce import rebuild

    tree = Results(results)
    project = _Project.open(text, config_file, tree)
    target = project.target
    folder = project.source
    # Of the hub, a GGUF file or random weights the checkpoint is the folder that a job made.
    if not project.config.is_folder(target.model):
        folder = folder_of(tree.source(target.model))
    if folder is None or not folder.is_dir():
        raise InputError(
            f"{target.model}: expected its checkpoint here, found none; run `lockstep run -- --until fetch` first"
        )
    rebuilt = rebuild(project.config.dump(), folder, target, Lock.load(lock))
    if as_json:
        echo_json({"target": str(target), "lock": str(lock), "artefacts": [asdict(entry) for entry in rebuilt]})
    else:
        for entry in rebuilt:
            if entry.is_locked:
                _echo_artefact("same", entry.where, entry.differs)
            else:
                _echo_artefact("not locked", entry.where, None)
    if wrong := [entry for entry in rebuilt if entry.differs]:
        raise CheckError(
            f"{target}: {len(wrong)} of {len(rebuilt)} artefacts are not as in {lock}; the first: {wrong[0].differs}"
        )
