"""A step: one job of the workflow, a stage with its wildcards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Step:
    """One job: a rule with its wildcards. inputs: manifests and files by the name that the rule gives them; output: the
    manifest that it makes;
    beside: what else it makes that must be the same each time; python: the interpreter that runs its backend, None for
    this one."""

    stage: str
    names: Mapping[str, str]
    inputs: Mapping[str, Path]
    options: Mapping[str, Any]
    output: Path
    beside: tuple[Path, ...] = ()
    python: str | None = None

    def __str__(self) -> str:
        return " ".join([self.stage, "/".join(map(str, self.names.values()))])
