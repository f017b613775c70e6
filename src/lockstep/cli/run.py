"""The command that runs the workflow from any folder: `lockstep run my.yaml`."""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import os
import sys
from pathlib import Path

import click

from lockstep.errors import InputError, note

_SUFFIXES = (".yaml", ".yml", ".json")
_CONFIG_OPTIONS = ("--configfile", "--configfiles")
# With these, and with -n, Snakemake takes no lock of this folder.
_UNLOCKED_OPTIONS = ("--dry-run", "--dryrun", "--unlock", "--nolock", "-d", "--directory")


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--cores", default="all", metavar="N", help="CPU cores that jobs share.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[CONFIG.yaml] [SNAKEMAKE OPTIONS]...")
def run(cores: str, arguments: tuple[str, ...]) -> None:
    """Make and check all targets of a config, in results/.

    It is snakemake with the Snakefile of this installation; run again, it resumes. Without CONFIG.yaml it takes
    config/config.yaml, else the only config of this folder, else the demo's. Options of snakemake follow: -n lists the
    jobs of a run.
    """
    from lockstep.config.sources import REPOSITORY

    snakefile = REPOSITORY / "Snakefile"
    if not snakefile.is_file():
        raise InputError(f"{snakefile}: expected the workflow, found none; install the wheel again")
    # After execv, Python would report it without the name of the extra.
    if importlib.util.find_spec("snakemake") is None:
        raise ModuleNotFoundError("no snakemake", name="snakemake")
    config, options = split_arguments(arguments)
    if config is None and not any(option.partition("=")[0] in _CONFIG_OPTIONS for option in options):
        config = _config_here()
    # Before another option: --configfile takes all words that follow, also the files that a user asks for.
    named: list[str] = []
    if config is not None:
        named = ["--configfile", config]
    if not any(option.startswith("-n") or option.partition("=")[0] in _UNLOCKED_OPTIONS for option in options):
        _check_alone()
    _prepare_environment()
    # -P: `python -m` alone searches the working folder first, and would import a user's types.py.
    command = [sys.executable, "-P", "-m", "snakemake", *named, "--snakefile", str(snakefile), "--cores", cores]
    # Replace this process, so that signals and the exit code are Snakemake's. execv drops what Python has buffered.
    sys.stdout.flush()
    os.execv(sys.executable, [*command, *options])


def _check_alone() -> None:
    """Raise InputError where Snakemake runs in this folder: its own advice, `--unlock`, is for one that was killed."""
    if not any(Path(".snakemake/locks").glob("*")):
        return
    folder = os.path.realpath(".")
    for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda process: int(process.name)):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            words = (process / "cmdline").read_bytes().split(b"\0")
            is_snakemake = any(os.path.basename(word) == b"snakemake" for word in words)
            if is_snakemake and os.path.realpath(process / "cwd") == folder and int(process.name) != os.getpid():
                raise InputError(
                    f"run: expected no other run in {folder}, found process {process.name}; wait until it has ended, "
                    "or run in another folder"
                )


def _prepare_environment() -> None:
    """Set USER, PATH and a cache folder, which Snakemake needs, for users without a passwd entry, as in containers."""
    from lockstep.artifacts.files import check_writable

    os.environ.setdefault("PATH", os.defpath)
    # A container may run as a uid without a passwd entry.
    try:
        getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on
        os.environ["USER"] = str(os.getuid())
    cache = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"), "snakemake")
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{cache}: expected a folder that Snakemake can make and write to, found {error.strerror}; set "
            "XDG_CACHE_HOME to one"
        ) from None
    check_writable(cache, "set XDG_CACHE_HOME to one that can be written to")


def split_arguments(arguments: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """Return the config, the first argument, and Snakemake's options. Raises InputError for a checkpoint instead."""
    first, *following = arguments or ("",)
    # A name below results/ is an output to make, as in `lockstep run results/summary.json`.
    if first.endswith(_SUFFIXES) and Path(first).parts[:1] != ("results",):
        return first, tuple(following)
    if first.startswith("hf:") or first.endswith(".gguf") or (first and (Path(first) / "config.json").is_file()):
        raise InputError(f"run: expected a config, found the checkpoint {first}; write one: lockstep init {first}")
    return None, arguments


def _config_here() -> str | None:
    """Return this folder's config, chosen as by `config.load.find_config`, and note it.

    None for config/config.yaml or the demo's, the Snakefile's defaults. Raises InputError where there are several.
    """
    from lockstep.config.load import DEMO, configs_in

    configs = configs_in(Path())
    if DEMO.is_file():
        line = f"Config: {DEMO}"
        if configs:
            line += f", not {', '.join(map(str, configs))}"
        note(line)
        return None
    if len(configs) > 1:
        raise InputError(
            f"run: expected one config in this folder, found {', '.join(map(str, configs))}; name one of them"
        )
    if not configs:
        note("Config: the demo's, for no YAML file of this folder names models")
        return None
    note(f"Config: {configs[0]}")
    return str(configs[0])
