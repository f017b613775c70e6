"""The memory that this process may have: the machine's, or less where its control groups say so.

The kernel's documents "cgroup-v2" and "cgroup-v1/memory" have the files. A container's limit is that of its group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_GROUPS = Path("/proc/self/cgroup")
# Names of version 2, and of version 1: limit, use, and in memory.stat what the kernel gives up first.
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def total_bytes() -> int:
    """Return the bytes that this process and its neighbours in its groups may have."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in _limits())])


def free_bytes() -> int:
    """Return the bytes that are free, of the machine's and of each group's."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return max(0, min([machine, *(limit - used for limit, used in _limits())]))


def _limits() -> Iterator[tuple[int, int]]:
    """Yield (limit, use) in bytes of each group with a limit, up to the root."""
    for folder, (limit, usage, reclaimed) in _groups():
        most = _number(folder / limit)
        used = _number(folder / usage)
        if most is not None and used is not None:
            yield most, max(0, used - _of_stat(folder / "memory.stat", reclaimed))


def _groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    try:
        lines = _GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (_ROOT / "memory", _V1) if controllers else (_ROOT, _V2)
        # In a container the path may be the host's, and what is mounted the container's own: the root is looked at too.
        folder = root / path.lstrip("/")
        for each in (folder, *folder.parents):
            yield each, names
            if each == root:
                break


def _number(path: Path) -> int | None:
    """Return the number in a file; None where there is none, as in "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _of_stat(path: Path, name: str) -> int:
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
        return sum(int(row[1]) for row in rows if row[:1] == [name])
    except (OSError, ValueError, IndexError):
        return 0
