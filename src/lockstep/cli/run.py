"""The command that runs the workflow from any folder: `lockstep run my.yaml`."""

from __future__ import annotations

import importlib.util
import os
import sys

import click

from lockstep.errors import InputError

_SUFFIXES = (".yaml", ".yml", ".json")


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--cores", default="all", show_default=True, metavar="N", help="CPU cores that jobs share.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[CONFIG.yaml] [SNAKEMAKE OPTIONS]...")
def run(cores: str, arguments: tuple[str, ...]) -> None:
    """Make and check all targets of a config, below results/ in this folder.

    It is snakemake with the Snakefile of this installation; run again, it goes on where it stopped. Without CONFIG.yaml
    it is the demo. Options of snakemake follow: -n shows what would be made.
    """
    from lockstep.config.sources import REPOSITORY

    snakefile = REPOSITORY / "Snakefile"
    if not snakefile.is_file():
        raise InputError(f"{snakefile}: expected the workflow, found none; install the wheel again")
    if importlib.util.find_spec("snakemake") is None:
        raise ModuleNotFoundError("no snakemake", name="snakemake")
    config, options = _split(arguments)
    if config is not None:
        options = ("--configfile", config, *options)
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(snakefile), "--cores", cores, *options]
    sys.stdout.flush()
    os.execv(sys.executable, command)


def _split(arguments: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """Return the config, which stands first, and Snakemake's own options."""
    if arguments and arguments[0].endswith(_SUFFIXES):
        return arguments[0], arguments[1:]
    return None, arguments
