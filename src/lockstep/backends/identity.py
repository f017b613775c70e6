"""What engines are built for and what runs them: a backend's library, this machine's device, installed packages.

Records and locks contain it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from typing import Any


def identity(name: str, runs: bool = True) -> dict[str, Any]:
    """Return the libraries and the device that engines are built for: a backend's entry in build keys and locks.

    runs: whether engines run, and are not only built.
    """
    from lockstep.backends.base import get_backend  # loads the library: only where something is built or run

    library = get_backend(name)
    device = library.describe_device()
    entries = {
        "name": name,
        "version": library.version(),
        "revision": library.revision,
        "device": library.device_key(device),
        "portable": library.portable,
        "options": library.default_options(),
    }
    if libraries := library.libraries(runs):
        entries["libraries"] = libraries
    if "driver" in device:
        entries["driver"] = device["driver"]
    return entries


def versions(packages: list[str]) -> dict[str, str]:
    """Return the version of this Python and of each of `packages` that it has.

    The first is named `python`. Local parts such as +cpu are left out.
    """
    installed = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name).partition("+")[0]
    return installed


def hardware(name: str, builds: bool) -> str | None:
    """Return the name of the GPU or CPU here that a backend runs on.

    Of a CPU its architecture. None where engines of any device can be built here and it `builds`.
    """
    from lockstep.backends.base import get_backend

    library = get_backend(name)
    describe = getattr(library, "describe_hardware", None)  # of a backend whose engines are for no one device
    if describe and builds:
        return None
    device = (describe or library.describe_device)()
    return str(device.get("name") or device.get("architecture"))
