"""What other packages register with this one, by entry points of Python packages.

    lockstep.backends    a package with modules `settings` and `backend` (see `lockstep.config.backends`), beside the
                         folders of `src/lockstep/backends`
    lockstep.commands    a subcommand, a `click.Command`
    lockstep.protocols   a protocol of `lockstep serve` (see `lockstep_serve.protocols`)
    lockstep.server      `open_server`, which the check `served` opens a server with

`lockstep_gpu` and `lockstep_serve` are found in this way; this package imports neither.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import InputError

_DISTRIBUTION = "lockstep-engines"
_OWN_BACKENDS = Path(__file__).resolve().parent / "backends"


@functools.cache
def entry_points(group: str) -> Mapping[str, importlib.metadata.EntryPoint]:
    """Return the entry points of a group ("backends"), sorted by their names."""
    group = f"lockstep.{group}"
    registered = [entry for entry in importlib.metadata.entry_points(group=group) if not _is_gone(entry)]
    # After those of what is installed, which may be this checkout as it was then.
    in_checkout = _entry_points_of_checkout().get(group, {})
    registered += [importlib.metadata.EntryPoint(name, value, group) for name, value in in_checkout.items()]
    return {entry.name: entry for entry in sorted(registered, key=lambda entry: entry.name)}


def _is_gone(entry: importlib.metadata.EntryPoint) -> bool:
    """Return whether this project registered the entry when it was installed, and has its module no more."""
    if entry.dist is None or entry.dist.name != _DISTRIBUTION:
        return False
    try:
        return importlib.util.find_spec(entry.module) is None
    except ModuleNotFoundError:  # its package is gone too
        return True


@functools.cache
def _entry_points_of_checkout() -> Mapping[str, Mapping[str, str]]:
    """Return {group: {name: value}} of this project's pyproject.toml.

    Snakemake's environments have the checkout, not installed.
    """
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if sys.version_info < (3, 11) or not project.is_file():  # tomllib came with 3.11
        return {}
    import tomllib

    return tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"]


def load_plugin(group: str, name: str) -> Any:
    """Return what an entry point names. Raises InputError where no installed package registers it."""
    try:
        entry = entry_points(group)[name]
    except KeyError:
        raise InputError(
            f"lockstep.{group}: expected an installed package that registers {name!r}, found none; "
            "install this project again"
        ) from None
    return entry.load()


@functools.cache
def backend_packages() -> Mapping[str, str]:
    """Return the package of each backend by the backend's name, sorted; none is imported."""
    packages = {name: entry.value for name, entry in entry_points("backends").items()}
    for settings in _OWN_BACKENDS.glob("*/settings.py"):
        name = settings.parent.name
        packages[name] = f"lockstep.backends.{name}"
    wrong = [name for name in packages if not re.fullmatch("[a-z][a-z0-9_]*", name)]
    assert not wrong, f"backends: expected names of small letters, digits and _, found {', '.join(sorted(wrong))}"
    return {name: packages[name] for name in sorted(packages)}
