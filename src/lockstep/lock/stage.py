"""Run one step: its artefact, its record beside it, and where a lock holds it, nothing else than what is locked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.cache.reuse import cache_for, put, take
from lockstep.lock.record import Step, build_key, record_path, write_record

# Stages that are recorded. The summary and its plots show what others made.
RECORDED = ("config", "fetch", "random_weights", "resolve", "architecture", "convert", "export", "validate", "build", "reference", "golden")  # fmt: skip


def run(step: Step, make: Callable[[], Any], cache: str = "") -> Any:
    """Make the artefact of `step` with `make`, whose result is given, and record it. cache: the shared cache that the config names; what it has
    is taken from there, and the path of its manifest given."""
    if step.stage not in RECORDED:
        return make()
    shared = cache_for(step, cache)
    record_path(step.output).unlink(missing_ok=True)  # of an earlier artefact: a run that is killed now leaves none that is wrong
    key = build_key(step)
    taken = take(shared, step, key)
    made = step.output if taken else make()
    record = write_record(step, key)
    if not taken:
        put(shared, step, record)
    return made


def from_rule(stage: str, names: dict[str, str], inputs: dict[str, Any], options: dict[str, Any], outputs: list[str]) -> Step:
    """The step of a Snakemake job. inputs by name: a path, or a list of paths, which are files of the checkpoint and stand in the manifest that the
    job makes. options: the rule's params."""
    manifests = {name: Path(path) for name, path in inputs.items() if isinstance(path, str) and name not in _NOT_READ}
    return Step(stage, names, manifests, {name: value for name, value in options.items() if name != "key"}, Path(outputs[0]))


_NOT_READ = ("config", "logits")  # fetch checks its limits only; the reference names its logits with their digest
