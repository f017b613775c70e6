"""The stages: each file of this folder that has one, each after those whose artefacts it reads."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.stages.rules import collected_targets, ends, makers
from lockstep.stages.stage import Job, Stage
from lockstep.targets import Target

if TYPE_CHECKING:
    from lockstep.config.schema import Config

__all__ = ["STAGES", "Job", "Stage", "jobs"]


def _in_order() -> dict[str, Stage]:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    # Sorted: stage files import each other, and the order of jobs must not depend on the order of imports.
    stages = {kind.name: kind() for kind in sorted(Stage.classes, key=lambda kind: kind.name)}
    ordered: dict[str, Stage] = {}

    def add(name: str) -> None:
        for branch in stages[name].rule.inputs.values():
            for pattern in filter(None, (branch.then, branch.otherwise)):
                for maker in makers(pattern):
                    add(maker.name)
        # A stage that several read is assigned again, but keeps its first place in the dict.
        ordered[name] = stages[name]

    for name in stages:
        add(name)
    return ordered


STAGES = _in_order()


def jobs(
    config: Config, root: Path, targets: Iterable[Target], files: Mapping[str, Mapping[str, Any]] = {}
) -> list[Job]:
    """Return the jobs of some targets, each once, after those that it reads from.

    root: of the results tree. files: `model_files` of each model.
    """
    jobs_by_key: dict[tuple[str, ...], Job] = {}

    def add(pattern: str, names: Mapping[str, Any]) -> None:
        # Several rules make the same output, each for other kinds of sources, as `fetch` and `make_checkpoint`.
        stage = next(STAGES[rule.name] for rule in makers(pattern) if rule.is_for(config, names))
        key = stage.name, *(str(names[name]) for name in stage.wildcards)
        if key in jobs_by_key:
            return
        for needed in stage.rule.reads(config, names).values():
            add(needed, names)
        jobs_by_key[key] = stage.job(config, root, names, files.get(names["model"], {}))

    targets = set(targets)
    collected = collected_targets(config)
    for pattern, word in ends():
        for target in collected[word]:
            if target in targets:
                add(pattern, vars(target))
    return list(jobs_by_key.values())
