"""Build a target here, in an empty folder, and compare it with a lock.

In: a config, a target, a lock, which another machine may have written. Out: for each artefact that the lock may hold
its place there and what differs. The target's results need not be there, and are not touched where they are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.load import load
from lockstep.provenance.lock import TERMS, Lock
from lockstep.provenance.locked import difference
from lockstep.provenance.lockfile import sections
from lockstep.provenance.reproduce import make_again, reproduced_stages
from lockstep.targets import Results, Target


@dataclass(frozen=True)
class LockComparison:
    """An artefact beside a lock.

    where: its place there. differs: the first difference; None where it is the same. is_locked: whether the lock has
    it; engines of another device than those that it holds it has not.
    """

    where: str
    is_locked: bool
    differs: str | None


def against(
    config: Mapping[str, Any], checkpoint: Path, target: Target, lock_file: Path, tell: Callable[[str], None]
) -> list[LockComparison]:
    """Build and check `target`, and compare each artefact with the lock.

    Resolves, converts, exports, builds, and checks where its engines run. checkpoint: the folder of its checkpoint.
    Raises InputError for a lock that is none, CheckError where the target cannot be built.
    """
    lock = Lock.load(lock_file)
    with tempfile.TemporaryDirectory(prefix="lockstep-against-") as folder:
        tree = Results(Path(folder) / "results")
        stages = reproduced_stages(target, load(config).is_run(target), "reference")
        failure = make_again(config, checkpoint, target, Path(folder), stages, tell)
        found = [
            LockComparison("/".join(section.where), section.where in lock.sections, difference(lock, section))
            for section in sections(tree.root, target.model)
            if section.where[0] != TERMS
        ]
    return [*found, *([LockComparison("golden check", True, failure)] if failure else [])]
