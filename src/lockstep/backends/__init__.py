"""Engines: a backend's built graphs, without weights. `build` makes an engine set from an assembly, `EngineSet` opens
and checks it."""

from lockstep.backends.base import Array, Backend, CanonicalBytes, Program, get_backend
from lockstep.backends.builder import build
from lockstep.backends.engine_set import EngineSet
from lockstep.step.executable import Executable

__all__ = ["Array", "Backend", "CanonicalBytes", "EngineSet", "Executable", "Program", "build", "get_backend"]
