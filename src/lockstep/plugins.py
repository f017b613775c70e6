"""Plug-ins that other packages register by entry points.

    lockstep.backends    a package with modules `settings` and `backend` (see `lockstep.config.backends`), as the
                         folders of `src/lockstep/backends` are
    lockstep.commands    a subcommand, a `click.Command`
    lockstep.protocols   a protocol of `lockstep serve` (see `lockstep_serve.protocols`)
    lockstep.server      `open_server`, which the check `served` opens a server with

`lockstep_gpu` and `lockstep_serve` are found in this way; this package imports neither.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import InputError, is_installed

_DISTRIBUTION = "lockstep-engines"
_OWN_BACKENDS = Path(__file__).resolve().parent / "backends"


@functools.cache
def entry_points(group: str) -> Mapping[str, importlib.metadata.EntryPoint]:
    """Return the entry points of a group ("backends"), sorted by their names."""
    group = f"lockstep.{group}"
    by_name = {}
    for entry in importlib.metadata.entry_points(group=group):
        if not _is_removed(entry):
            by_name[entry.name] = entry
    # The checkout's replace those of the installation, which is editable and may be older than pyproject.toml is now.
    for name, value in _entry_points_of_checkout().get(group, {}).items():
        by_name[name] = importlib.metadata.EntryPoint(name, value, group)
    return dict(sorted(by_name.items()))


def _is_removed(entry: importlib.metadata.EntryPoint) -> bool:
    """Return whether this project registered the entry when it was installed, and has since lost its module."""
    return entry.dist is not None and entry.dist.name == _DISTRIBUTION and not is_installed(entry.module)


@functools.cache
def _entry_points_of_checkout() -> Mapping[str, Mapping[str, str]]:
    """Return {group: {name: value}} of this project's pyproject.toml; {} where the package is installed as a wheel.

    Environments that Snakemake makes import the package from the checkout, and have no metadata of it.
    """
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if sys.version_info < (3, 11) or not project.is_file():  # tomllib came with 3.11
        return {}
    import tomllib

    return tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"]


def load_plugin(group: str, name: str) -> Any:
    """Return the object that an entry point names. Raises InputError where no installed package registers it."""
    registered = entry_points(group)
    if name not in registered:
        raise InputError(
            f"lockstep.{group}: expected an installed package that registers {name!r}, found none; "
            "install this project again"
        )
    return registered[name].load()


@functools.cache
def backend_packages() -> Mapping[str, str]:
    """Return {backend: its package}, sorted; none is imported."""
    packages = {name: entry.value for name, entry in entry_points("backends").items()}
    for settings in _OWN_BACKENDS.glob("*/settings.py"):
        name = settings.parent.name
        packages[name] = f"lockstep.backends.{name}"
    # Backend names become parts of paths, and of target names, which slashes separate.
    for name in packages:
        assert re.fullmatch("[a-z][a-z0-9_]*", name), f"backends: expected small letters, digits and _, found {name!r}"
    return dict(sorted(packages.items()))
