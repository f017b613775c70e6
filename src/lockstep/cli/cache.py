"""The command of the shared cache: `lockstep cache prune`."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.options import CONFIG, JSON
from lockstep.cli.terminal import echo_json
from lockstep.errors import InputError

if TYPE_CHECKING:
    from lockstep.provenance.cache.store import Cache
    from lockstep.provenance.cache.upkeep import Contents

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
    """Prune the shared cache of artefacts."""


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
    from lockstep.provenance.cache.upkeep import bytes_text, scan
    from lockstep.provenance.cache.upkeep import prune as drop

    opened = _opened(folder, config_file)
    dropped = drop(opened, max_size, older_than)
    if as_json:
        return echo_json({"dropped": asdict(dropped), "left": _contents(scan(opened))})
    click.echo(f"dropped: {dropped.entries} entries, {dropped.files} files of {bytes_text(dropped.size)}")
    remaining = scan(opened)
    click.echo(f"left: {len(remaining.entries)} entries, {len(remaining.blobs)} files of {bytes_text(remaining.size)}")


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
