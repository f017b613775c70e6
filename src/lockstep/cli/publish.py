"""The commands of publishing: `lockstep push`, `lockstep pull`, `lockstep sbom`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from lockstep.cli.opened import TARGET, made_target, used_config
from lockstep.cli.options import FILE, JSON, RESULTS
from lockstep.cli.terminal import echo_json, file_json, working
from lockstep.errors import InputError
from lockstep.targets import Results

_REFERENCE = click.argument("reference", metavar="HOST/REPOSITORY[:TAG]")
_PLAIN = click.option("--plain-http", is_flag=True, help="Without TLS, as for a registry on this machine.")


def _lock(words: str) -> Callable[[Any], Any]:
    return click.option("--lock", metavar="LOCK", type=FILE, help=words)


@click.command()
@click.argument("bundle", type=FILE)
@_REFERENCE
@_lock("Write the manifest's digest into this lock.")
@_PLAIN
@JSON
def push(bundle: Path, reference: str, lock: Path | None, plain_http: bool, as_json: bool) -> None:
    """Push a bundle to an OCI registry.

    Its signature and its signed statement go with it.
    """
    from lockstep.publish import artifact
    from lockstep.publish.registry import Reference

    place = Reference.parse(reference)
    if place.digest is not None:
        raise InputError(f"{reference}: expected a tag, found a digest, which the bundle's bytes decide; leave it out")
    with working(f"push {bundle}"):
        pushed = artifact.push(bundle, place, plain_http)
    if lock is not None:
        artifact.note_in_lock(lock, bundle, pushed)
    if as_json:
        return echo_json(asdict(pushed))
    click.echo(f"{pushed.reference}@{pushed.digest}")


@click.command()
@_REFERENCE
@click.argument("out", type=FILE)
@_lock("Take the very manifest that this lock names.")
@_PLAIN
@JSON
def pull(reference: str, out: Path, lock: Path | None, plain_http: bool, as_json: bool) -> None:
    """Pull a bundle from an OCI registry, to the bytes that were pushed."""
    from lockstep.publish import artifact
    from lockstep.publish.registry import Reference

    place = Reference.parse(reference)
    if lock is not None:
        place = artifact.locked_reference(lock, place)
    with working(f"pull {reference}"):
        digest = artifact.pull(place, out, plain_http)
    if as_json:
        return echo_json({"reference": str(place), "digest": digest, **file_json(out)})
    click.echo(out)


@click.command()
@TARGET
@click.option("--out", type=FILE, help="The file to write.  [default: standard output]")
@RESULTS
def sbom(target: str, out: Path | None, results: Path) -> None:
    """Write the bill of materials of a target, a CycloneDX 1.7 ML-BOM."""
    from lockstep.artifacts.files import write_bytes
    from lockstep.publish.sbom import bill

    tree = Results(results)
    text = bill(tree, made_target(used_config(tree), tree, target))
    if out is None:
        return click.echo(text, nl=False)
    write_bytes(out, text.encode())
    click.echo(out)
