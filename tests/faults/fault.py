"""A planted fault: what is wrong, in which model, and what plants it.

`make faults` plants them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from faults.edit import Edit
from faults.harm import Scenario

ATTENTION = ("*.prefill", "*.decode")
PREFILL, DECODE = ("*.prefill",), ("*.decode",)
BLOCKS = ("entry", "middle", "exit")


@dataclass(frozen=True)
class Fault:
    """One mistake, planted in one of three places.

    graphs: patterns of the graphs (block classes, `<kind>.prefill`, `<kind>.decode`) that `edit` is called with, each
    on its own.
    assembly: changes the assembly's content in place. runtime: replaces code of the runtime for as long as the context
    is open. shown_by: requests that reach a fault too narrow for those that all faults are shown.
    """

    name: str
    about: str
    model: str = "demo"
    graphs: tuple[str, ...] = ()
    edit: Callable[[Edit], None] | None = None
    assembly: Callable[[dict[str, Any]], None] | None = None
    runtime: Callable[[], AbstractContextManager[None]] | None = None
    precisions: tuple[str, ...] = ("fp32", "fp16")
    backends: tuple[str, ...] = ("onnxruntime", "tensorrt")
    shown_by: Scenario | None = None

    def __post_init__(self) -> None:
        places = [place for place in (self.edit, self.assembly, self.runtime) if place is not None]
        if len(places) != 1 or bool(self.graphs) != (self.edit is not None):
            raise ValueError(f"fault {self.name}: expected one place to plant it, found {len(places)}")

    @property
    def place(self) -> str:
        return "graph" if self.edit else "assembly" if self.assembly else "runtime"
