"""The memory of a control group, in files as the kernel writes them, and the KV cache's share of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.runtime.model import host_bytes
from lockstep.step import host_memory

GIB = 1 << 30
MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
# By case: /proc/self/cgroup, files below /sys/fs/cgroup, and limit and use that hold.
CASES = {
    "the container's own mount": ("0::/\n", {"memory.max": "1073741824", "memory.current": "268435456"}, 1.0, 0.25),
    "a slice above": (
        "0::/a.slice/b.scope\n",
        {
            "a.slice/memory.max": "1073741824",
            "a.slice/memory.current": "805306368",
            "a.slice/memory.stat": "anon 268435456\ninactive_file 536870912\n",
            "a.slice/b.scope/memory.max": "max",
            "a.slice/b.scope/memory.current": "268435456",
        },
        1.0,
        0.25,
    ),
    "a path of the host in a container": (
        "0::/kubepods.slice/pod.slice/1.scope\n",
        {"memory.max": "536870912", "memory.current": "0"},
        0.5,
        0.0,
    ),
    "version 1": (
        "11:cpu,cpuacct:/x\n4:memory:/docker/1\n0::/x\n",
        {
            "memory/docker/1/memory.limit_in_bytes": "1073741824",
            "memory/docker/1/memory.usage_in_bytes": "536870912",
            "memory/memory.limit_in_bytes": "9223372036854771712",  # what represents none
            "memory/memory.usage_in_bytes": "9999999999",
        },
        1.0,
        0.5,
    ),
}


def lay_out(root: Path, groups: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in files.items():
        path = root / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (root / "cgroup").write_text(groups)
    monkeypatch.setattr(host_memory, "CGROUP_ROOT", root / "fs")
    monkeypatch.setattr(host_memory, "CGROUPS_OF_PROCESS", root / "cgroup")


@pytest.mark.parametrize(("groups", "files", "limit", "used"), CASES.values(), ids=CASES)
def test_the_cache_has_its_share_of_the_groups_memory(
    groups: str, files: dict[str, str], limit: float, used: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MACHINE > 2 * GIB, "a machine of more memory than the groups here"
    lay_out(tmp_path, groups, files, monkeypatch)
    assert host_memory.total_bytes() == limit * GIB
    assert host_bytes(None) == limit * GIB // 4
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    assert host_memory.free_bytes() <= (limit - used) * GIB
    if available > 2 * GIB:
        assert host_bytes(0.5) == (limit - used) * GIB / 2


@pytest.mark.parametrize("groups", ["0::/\n", "4:memory:/\n", "", "none\n"])
def test_without_a_limit_it_is_the_machines(groups: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(tmp_path, groups, {"memory.max": "max", "memory.current": "5"}, monkeypatch)
    assert host_memory.total_bytes() == MACHINE
    assert host_bytes(None) == MACHINE // 4 and host_bytes(5e6) == 5_000_000
    (tmp_path / "cgroup").unlink()
    assert host_memory.total_bytes() == MACHINE
