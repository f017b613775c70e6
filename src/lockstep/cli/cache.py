"""The commands of the shared cache: list, prune and verify its entries."""

from __future__ import annotations

import os
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.options import CONFIG, JSON
from lockstep.cli.terminal import echo_json, working
from lockstep.errors import CheckError, InputError

if TYPE_CHECKING:
    from lockstep.provenance.cache.store import Cache
    from lockstep.provenance.cache.upkeep import Contents, Used

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_TIMES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_CACHE = click.option(
    "--cache", "folder", metavar="FOLDER", help="The cache.  [default: LOCKSTEP_CACHE, else the config's]"
)


class _Amount(click.ParamType):
    """A parameter type: a number with a unit, of bytes or seconds."""

    def __init__(self, name: str, units: dict[str, int], end: str, example: str) -> None:
        self.name = name
        self.units = units
        self.end = end
        self.example = example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(rf"([0-9]+(?:\.[0-9]+)?) *({'|'.join(self.units)}){self.end}", str(value), re.IGNORECASE)
        if not match:
            self.fail(f"expected a number and a unit, such as {self.example}; found {value!r}", param, ctx)
        return float(match[1]) * self.units[match[2].lower()]


@click.group()
def cache() -> None:
    """Inspect the shared cache of artefacts: list, prune and verify its entries."""


@cache.command()
@JSON
@_CACHE
@CONFIG
def ls(folder: str | None, config_file: Path | None, as_json: bool) -> None:
    """List the entries: stage, build key, size, last use."""
    from lockstep.provenance.cache.upkeep import bytes_text, scan, summary

    opened = _opened(folder, config_file)
    contents = scan(opened)
    if as_json:
        return echo_json(
            {"folder": str(opened.folder), "entries": [_entry(opened, used) for used in contents.entries]}
            | _contents(contents)
        )
    rows = [("stage", "of", "build key", "files", "size", "last use (UTC)")]
    for used in contents.entries:
        entry = _entry(opened, used)
        when = entry["last_use"][:16].replace("T", " ")
        rows.append(
            (entry["stage"], entry["of"], entry["key"][:12], str(entry["files"]), bytes_text(entry["size"]), when)
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        stage, of, key, files, size, when = map(str.ljust, row, widths)
        files = files.strip().rjust(widths[3])
        size = size.strip().rjust(widths[4])
        click.echo(f"{stage}  {of}  {key}  {files}  {size}  {when}".rstrip())
    click.echo(summary(contents))


@cache.command()
@click.option(
    "--max-size", type=_Amount("size", _SIZES, "b?", "10GB"), help="Keep this much, the last used, such as 10GB."
)
@click.option(
    "--older-than",
    type=_Amount("time", _TIMES, "", "30d"),
    help="Drop entries that were not used for this time, such as 30d or 12h.",
)
@JSON
@_CACHE
@CONFIG
def prune(
    max_size: float | None, older_than: float | None, folder: str | None, config_file: Path | None, as_json: bool
) -> None:
    """Drop entries that are unused or damaged, and files that no entry names."""
    from lockstep.provenance.cache.upkeep import bytes_text, scan, summary
    from lockstep.provenance.cache.upkeep import prune as drop

    opened = _opened(folder, config_file)
    dropped = drop(opened, max_size, older_than)
    if as_json:
        return echo_json({"dropped": asdict(dropped), "left": _contents(scan(opened))})
    click.echo(f"dropped: {dropped.entries} entries, {dropped.files} files of {bytes_text(dropped.size)}")
    click.echo(f"left: {summary(scan(opened))}")


@cache.command()
@JSON
@_CACHE
@CONFIG
def verify(folder: str | None, config_file: Path | None, as_json: bool) -> None:
    """Hash all files of the cache. Exit code 0 if it is whole, else 1."""
    from lockstep.provenance.cache.upkeep import scan, summary
    from lockstep.provenance.cache.upkeep import verify as check

    opened = _opened(folder, config_file)
    with working(f"verify {opened.folder}"):
        lines = check(opened)
    if as_json:
        echo_json({"folder": str(opened.folder), "wrong": lines} | _contents(scan(opened)))
    else:
        for line in lines:
            click.echo(line)
        click.echo(summary(scan(opened)))
    if lines:
        raise CheckError(
            f"{opened.folder}: expected a whole cache, found {len(lines)} files that are not as "
            f"they should be: delete them, or let prune do it"
        )


def _entry(cache: Cache, used: Used) -> dict[str, Any]:
    """Return an entry as JSON. size: bytes; last_use: UTC."""
    entry = used.entry
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(used.last_use))
    about = {"stage": entry.key.stage, "of": " ".join(entry.key.names.values()), "key": entry.key.sha256}
    return {**about, "files": len(entry.outputs), "size": cache.size(entry), "last_use": when}


def _contents(contents: Contents) -> dict[str, Any]:
    """Return the size of the cache, as JSON. size: bytes of all files."""
    other_files = {name: sorted(map(str, getattr(contents, name))) for name in ("damaged", "temporary")}
    return {
        "num_entries": len(contents.entries),
        "num_files": len(contents.blobs),
        "size": contents.size,
        **other_files,
    }


def _opened(folder: str | None, config_file: Path | None) -> Cache:
    from lockstep.provenance.cache.store import VARIABLE, Cache, cache_folder

    if folder is not None:
        return Cache(Path(folder).expanduser())
    configured = ""
    if VARIABLE not in os.environ:
        from lockstep.config.load import load_given

        configured = load_given(config_file).cache
    existing = cache_folder(configured)
    if existing is None:
        raise InputError(
            f"cache: expected a folder, found none: give it with --cache, {VARIABLE} or `cache` in the config"
        )
    return Cache(existing)
