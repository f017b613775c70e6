"""When and where a report was written, and with which versions its results were made.

For readers of the page alone: nothing of this is in a file that is hashed or locked.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import lockstep
from lockstep.artifacts import formats
from lockstep.artifacts.files import read_json
from lockstep.errors import LockstepError
from lockstep.provenance.record import records
from lockstep.provenance.slsa import now
from lockstep.step.host_memory import total_bytes
from lockstep.targets import Results


@dataclass(frozen=True)
class About:
    """The time in UTC, this machine, versions of Lockstep, Python and backends, and those of all packages."""

    written: str
    machine: str
    programs: str
    packages: list[str]


def about(results: Results, models: Iterable[str]) -> About:
    """Return this machine and the versions in the build records of the models."""
    backends: set[str] = set()
    packages: set[str] = set()
    for model in models:
        for path in records(results.root / model):
            # The target of a damaged record reports it.
            with contextlib.suppress(LockstepError, OSError, LookupError, TypeError):
                record = read_json(path, formats.BUILD)
                if backend := record.get("backend"):
                    backends.add(f"{backend['name']} {backend['version']}")
                packages |= {f"{name} {version}" for name, version in record.get("environment", {}).items()}
    machine = [platform.machine(), f"{os.cpu_count()} CPUs", f"{total_bytes() / 1e9:.0f} GB", platform.system()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        cpu = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if cpu:
            machine.insert(0, cpu[1])
    programs = [f"Lockstep {lockstep.__version__}", f"Python {platform.python_version()}", *sorted(backends)]
    written = now().replace("T", " ").replace("Z", " UTC")
    return About(written, ", ".join(machine), ", ".join(programs), sorted(packages))
