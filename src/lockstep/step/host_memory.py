"""The memory available to this process: the machine's, or less if its control groups limit it, as in a container.

The files are documented in the kernel's "cgroup-v2" and "cgroup-v1/memory".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUPS_OF_PROCESS = Path("/proc/self/cgroup")
# Files of version 2 and of version 1: limit and usage; and the field of memory.stat that the kernel reclaims first.
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def total_bytes() -> int:
    """Return the memory limit in bytes, which other processes in the same groups share."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in _limits())])


def free_bytes() -> int:
    """Return the bytes that are free on the machine and within the limit of every group."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return max(0, min([machine, *(limit - used for limit, used in _limits())]))


def _limits() -> Iterator[tuple[int, int]]:
    """Yield (limit, use) in bytes of each group with a limit, up to the root."""
    for folder, (limit_file, usage_file, reclaimable) in _groups():
        limit = _number(folder / limit_file)
        used = _number(folder / usage_file)
        if limit is not None and used is not None:
            yield limit, max(0, used - _memory_stat(folder / "memory.stat", reclaimable))


def _groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    try:
        lines = CGROUPS_OF_PROCESS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, group_and_path = line.partition(":")
        controllers, _, path = group_and_path.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        root = CGROUP_ROOT
        names = _V2
        if controllers:  # version 1 names them
            root = CGROUP_ROOT / "memory"
            names = _V1
        # In a container the path may be the host's while the container's own group is mounted at the root.
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, names
            if folder == root:
                break


def _number(path: Path) -> int | None:
    """Return the number in a file; None if it has none, such as "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _memory_stat(path: Path, name: str) -> int:
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
        return sum(int(row[1]) for row in rows if row[:1] == [name])
    except (OSError, ValueError, IndexError):
        return 0
