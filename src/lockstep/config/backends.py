"""The settings of each backend: precisions, config section, GPUs of its jobs.

The config and the rules take them from here. A backend is a folder of `lockstep.backends`, or a package that is
registered (`lockstep.plugins`), with the modules

    settings.py     SETTINGS, a `BackendSettings`. Imports this module, `lockstep.config.section`, `.messages` and
                    pydantic, nothing heavier: it is read whenever a config is.
    backend.py      BACKEND, a class that is a `lockstep.backends.base.Backend`

and whatever these import.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.config.section import Section
from lockstep.errors import is_installed
from lockstep.plugins import backend_packages

_SETTINGS = "lockstep.backends.*.settings"  # of each backend's package; what follows imports knows this form


@dataclass(frozen=True)
class BackendSettings:
    """The settings of a backend, known before its library is loaded.

    precisions: all that it supports; a version of its library may lack one. lacks: why it has no others. section: its
    part of the config, `backends.<name>`, the options of its builds; None: it has no settings. takes_limits: engines
    are built for the config's limits, which are options too. gpus: of a job that builds or runs its engines. unpinned:
    top level modules of packages that come with the machine, and have no pin in envs/requirements.txt; engines.json
    records their version. runs_ranks: whether it runs a model split by `tensor_parallel`. runs_adapters: the precisions
    whose graphs take adapters. zero_points: whether it takes weights with other zero points than the middle. mxfp4:
    whether it takes codes of MXFP4. model_settings: those of "activations" and "kv_cache_dtype" that it supports.

    The next four give a reason, or None, without loading the library. missing: why engines cannot be built in this
    Python, with the command that installs what they need. cannot_build: why not on this machine. cannot_run: why
    engines that can be built cannot run here. lacks_here: why the processor does not compute in a precision; asked when
    the config is read. The last three say "needs WHAT of which kind, found what", of which the summary's headline has
    WHAT. device_memory: bytes of the device that runs its engines, by its driver alone; 0 where that is the CPU.
    """

    precisions: tuple[str, ...]
    lacks: str = ""
    section: type[Section] | None = None
    takes_limits: bool = False
    gpus: int = 0
    unpinned: tuple[str, ...] = ()
    runs_ranks: bool = False
    runs_adapters: tuple[str, ...] = ()
    zero_points: bool = True
    mxfp4: bool = False
    model_settings: tuple[str, ...] = ()
    missing: Callable[[], str | None] = lambda: None
    cannot_build: Callable[[], str | None] = lambda: None
    cannot_run: Callable[[], str | None] = lambda: None
    lacks_here: Callable[[str], str | None] = lambda precision: None
    device_memory: Callable[[], int] = lambda: 0

    def build_options(self, section: Section | None, limits: Mapping[str, int]) -> dict[str, Any]:
        options = {}
        if section is not None:
            options = section.model_dump(mode="json")
        if self.takes_limits:
            options |= limits
        return options


def not_installed(module: str, package: str, install: str) -> str | None:
    """Return why a backend is missing: its package, and how it is installed. None where it is installed."""
    if is_installed(module):
        return None
    return f"the Python package {package} is not installed for this Python: {install}"


# Cached, and first called while `types.py` is imported: the config's types list these names.
@functools.cache
def backends() -> Mapping[str, BackendSettings]:
    settings = {}
    for name, package in backend_packages().items():
        settings[name] = importlib.import_module(_SETTINGS.replace("lockstep.backends.*", package)).SETTINGS
    return settings
