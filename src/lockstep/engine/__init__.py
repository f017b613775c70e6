"""Engines: a backend's built graphs, without weights. `build` makes an engine set from an assembly, `EngineSet` opens and checks it."""

from lockstep.engine.backend import Array, Backend, CanonicalBytes, Executable, Program, get_backend
from lockstep.engine.builder import build
from lockstep.engine.engine_set import EngineSet

__all__ = ["Array", "Backend", "CanonicalBytes", "EngineSet", "Executable", "Program", "build", "get_backend"]
