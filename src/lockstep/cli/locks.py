"""The commands of locks: `lockstep lock`, `lockstep verify`, `lockstep diff`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from lockstep.cli.terminal import JSON, echo_json, file_json, working
from lockstep.errors import CheckError, InputError
from lockstep.targets import Results

_RESULTS = click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("results"),
    show_default=True,
    help="The results tree.",
)
_LOCKS = click.option(
    "--locks",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("locks"),
    show_default=True,
    help="The folder of the lock files.",
)


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--renew", is_flag=True, help="Drop engines that other devices locked for graphs that have changed.")
@JSON
@_LOCKS
@_RESULTS
def lock(models: tuple[str, ...], renew: bool, as_json: bool, locks: Path, results: Path) -> None:
    """Write locks/<model>.lock.json of finished models.

    A lock that is there already keeps what other devices locked.
    """
    from lockstep.artifacts.files import read_json
    from lockstep.manifests.manifest_files import manifest_entries
    from lockstep.provenance.lock import lock_path
    from lockstep.provenance.lockfile import write_lock

    config = Results(results).config()
    with manifest_entries(config):
        chosen = models or sorted(read_json(config)["models"])
    written = []
    for model in chosen:
        path = lock_path(locks, model)
        said = write_lock(results, model, path, renew)
        written.append({"model": model, **file_json(path), "changes": said})
        if not as_json:
            for line in said:
                click.echo(f"{path}: {line}", err=True)
            click.echo(path)
    if as_json:
        echo_json({"locks": written})


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option(
    "--deep", is_flag=True, help="Hash large files too that have the size and times of when they were hashed last."
)
@click.option("-v", "--verbose", is_flag=True, help="Also what is the same.")
@JSON
@_LOCKS
@_RESULTS
def verify(models: tuple[str, ...], deep: bool, verbose: bool, as_json: bool, locks: Path, results: Path) -> None:
    """Check that every artefact is what was recorded and locked.

    Exit code 0 if all are, else 1.
    """
    from lockstep.provenance.verify import SAME
    from lockstep.provenance.verify import verify as check

    known = {path.name.removesuffix(".lock.json"): path for path in sorted(locks.glob("*.lock.json"))}
    for model in models:
        if model not in known and not (results / model).is_dir():
            raise InputError(
                f"{results / model}: expected results of a model, or a lock in {locks}, found "
                f"neither; run snakemake first, or correct the name"
            )
    with working(f"verify {results}"):
        findings = check(
            results, {model: path for model, path in known.items() if not models or model in models}, models, deep
        )
    if not findings:
        raise InputError(f"{results}: expected results to verify, found none; run snakemake first")
    wrong = [finding for finding in findings if finding.status != SAME]
    if as_json:
        entries = [asdict(finding) for finding in findings]
        echo_json({"locks": sorted(known), "same": len(findings) - len(wrong), "findings": entries})
    else:
        for finding in findings if verbose else wrong:
            click.echo(finding)
        held = f", with {len(known)} lock{'s' * (len(known) != 1)}" if known else ", without a lock"
        click.echo(f"{len(findings) - len(wrong)} of {len(findings)} the same{held}")
    if wrong:
        raise CheckError(
            f"{len(wrong)} of {len(findings)} artefacts are not what was recorded: "
            f"{wrong[0].name}{' and others' * (len(wrong) > 1)}"
        )


@click.command()
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@JSON
def diff(first: Path, second: Path, as_json: bool) -> None:
    """List what differs between two lock files.

    Exit code 1 if anything does.
    """
    from lockstep.provenance.lock import diff as differences

    found = differences(first, second)
    if as_json:
        echo_json({"differences": [{"where": where, "change": change} for where, change in found]})
    else:
        for where, change in found:
            click.echo(f"{' / '.join(where)}: {change}")
    if found:
        raise SystemExit(1)
