"""When, where and with which versions results were made, for readers: nothing here is hashed or locked."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import lockstep
from lockstep.artifacts.statement import Statement
from lockstep.errors import InputError, LockstepError
from lockstep.provenance.statements import statement_paths
from lockstep.step.host_memory import total_bytes
from lockstep.targets import Results

EPOCH_VARIABLE = "SOURCE_DATE_EPOCH"


@dataclass(frozen=True)
class About:
    """The time in UTC, this machine, versions of Lockstep, Python and backends, and those of all packages."""

    written: str
    machine: str
    programs: str
    packages: list[str]


def about(results: Results, models: Iterable[str]) -> About:
    backends: set[str] = set()
    packages: set[str] = set()
    for model in models:
        for path in statement_paths(results.root / model):
            # The target of a damaged statement reports it.
            with contextlib.suppress(LockstepError, OSError):
                key = Statement.load(path).key
                if key.backend:
                    backends.add(f"{key.backend['name']} {key.backend['version']}")
                packages |= {f"{name} {version}" for name, version in key.environment.items()}
    machine = [platform.machine(), f"{os.cpu_count()} CPUs", f"{total_bytes() / 1e9:.0f} GB", platform.system()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        cpu = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if cpu:
            machine.insert(0, cpu[1])
    programs = [f"Lockstep {lockstep.__version__}", f"Python {platform.python_version()}", *sorted(backends)]
    written = now().replace("T", " ").replace("Z", " UTC")
    return About(written, ", ".join(machine), ", ".join(programs), sorted(packages))


def now() -> str:
    """Return the time in UTC to the second, as RFC 3339.

    It is that of SOURCE_DATE_EPOCH where it is set (https://reproducible-builds.org/specs/source-date-epoch).
    """
    text = os.environ.get(EPOCH_VARIABLE) or str(int(time.time()))
    try:
        if not (text.isascii() and text.isdecimal()):
            raise ValueError
        return datetime.datetime.fromtimestamp(int(text), datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        raise InputError(
            f"{EPOCH_VARIABLE}: expected seconds since 1970 as a whole number, found {text[:40]!r}; correct or unset it"
        ) from None
