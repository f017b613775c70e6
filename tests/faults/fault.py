"""A planted fault: a row of a table, and the function that plants it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from faults.edit import Edit, Value
from faults.harm import Scenario

# Graphs of an assembly, as patterns: block classes, `<variant>.prefill`, `<variant>.decode`.
ATTENTION = ("*.prefill", "*.decode")
PREFILL = ("*.prefill",)
DECODE = ("*.decode",)
ENTRY = ("entry",)
MIDDLE = ("middle",)
EXIT = ("exit",)
EMBEDDING = ("embedding",)
# BEHIND attention: output projection and MLP
BLOCKS = ("entry", "middle", "exit")
BEHIND = ("middle", "exit")
ASSEMBLY = "assembly"
RUNTIME = "runtime"
# Precisions
FLOATS = ("fp32", "fp16", "bf16")
INTEGER_WEIGHTS = ("w8a16", "w4a16", "w8a8", "w4a8")
ALL = (*FLOATS, *INTEGER_WEIGHTS, "w8a8-fp8")
HOST = ("onnxruntime", "openvino")  # run in this Python


@dataclass(frozen=True)
class Fault:
    """One mistake.

    where: the graphs that `change` is called with, each on its own as an `Edit`; ASSEMBLY, whose content `change`
    changes in place; or RUNTIME, whose code is another as long as the context that `change()` gives is open.
    gate: which must catch it on ONNX Runtime where it is harmful; by default `validate`, of the runtime `golden`.
    shown_by: requests that reach a fault too narrow for those that all faults are shown.
    """

    name: str
    about: str
    where: tuple[str, ...] | str
    change: Callable[..., Any]
    model: str = "demo"
    gate: str = ""
    precisions: tuple[str, ...] = ALL
    backends: tuple[str, ...] = (*HOST, "tensorrt")
    shown_by: Scenario | None = None

    @property
    def place(self) -> str:
        return self.where if isinstance(self.where, str) else "graph"

    @property
    def caught_by(self) -> str:
        return self.gate or ("golden" if self.place == RUNTIME else "validate")


def change(function: Callable[..., Any]) -> Callable[..., Callable[[Any], Any]]:
    """Turn `function(thing, *settings)` into a function of the settings that gives the change of a thing."""
    return lambda *settings, **options: lambda thing: function(thing, *settings, **options)


@change
def replaced(edit: Edit, value: Value, other: Callable[[Edit, Value], Value]) -> None:
    """Have `other(edit, value)` in place of a value of a graph."""
    edit.replace(value, lambda right: other(edit, right))
