"""One job of the workflow: a stage with its wildcards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class JobSpec:
    """One job: a rule with its wildcards.

    inputs: manifests and files by the name that the rule gives them. output: the manifest that it makes. beside: what
    else it makes that must be the same each time. python: the interpreter that runs its backend, None for this one.
    device: of a device of the config its `backend` and the `hardware` that it must find.
    """

    stage: str
    names: Mapping[str, str]
    inputs: Mapping[str, Path]
    options: Mapping[str, Any]
    output: Path
    beside: tuple[Path, ...] = ()
    python: str | None = None
    device: Mapping[str, str] | None = None

    @property
    def backend(self) -> str | None:
        """Return the backend that builds or runs its engines; None without one."""
        return self.device["backend"] if self.device else self.names.get("backend")

    def __str__(self) -> str:
        return " ".join([self.stage, "/".join(map(str, self.names.values()))])
