"""The stages: each file of this folder that has one, in the order of the way that data flows."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.stages.stage import Job, Stage
from lockstep.targets import Target

if TYPE_CHECKING:
    from lockstep.config.schema import Config

__all__ = ["STAGES", "Job", "Stage", "jobs"]


def _found() -> dict[str, Stage]:
    """Return all stages by name, each after those whose artefacts it reads."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    stages = sorted((kind() for kind in Stage.classes), key=lambda stage: stage.name)
    ordered: dict[str, Stage] = {}

    def add(stage: Stage) -> None:
        read = stage.all_reads()
        for maker in stages:
            if maker.output in read:
                add(maker)
        ordered[stage.name] = stage

    for stage in stages:
        add(stage)
    return ordered


STAGES = _found()


def jobs(config: Config, root: Path, targets: Iterable[Target]) -> list[Job]:
    """Return the jobs of some targets, each once, after those that it reads from. root: of the results tree."""
    made: dict[tuple[object, ...], Job] = {}
    for target in targets:
        names = vars(target)
        for stage in STAGES.values():
            key = stage.name, *(names[name] for name in stage.wildcards)
            if key not in made and stage.needed(config, target):
                made[key] = stage.job(config, root, names)
    return list(made.values())
