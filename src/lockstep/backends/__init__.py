"""Engines: a backend's built graphs, without weights.

`build` makes an engine set from an assembly, `EngineSet` opens and checks it. Both are imported at their first use: the
config reads the settings of backends, which are in this package too, and needs no more of it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.backends.base import Array, Backend, Program, get_backend
    from lockstep.backends.builder import build
    from lockstep.backends.engine_set import EngineSet
    from lockstep.step.executable import Executable

_MODULES = dict.fromkeys(("Array", "Backend", "Program", "get_backend"), "lockstep.backends.base") | {
    "EngineSet": "lockstep.backends.engine_set",
    "Executable": "lockstep.step.executable",
    "build": "lockstep.backends.builder",
}
__all__ = ["Array", "Backend", "EngineSet", "Executable", "Program", "build", "get_backend"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)  # `__getattr__` is not called again
    return globals()[name]
