"""The CPU here: its architecture, the instruction sets that libraries choose kernels by, and thread counts."""

from __future__ import annotations

import functools
import math
import os
import platform
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import InputError

THREADS_VARIABLE = "LOCKSTEP_THREADS"

# More threads than CPUs wait for each other, and each spins while it waits: on two CPUs 64 take a second to start, 512
# half a minute.
_MAX_THREADS = 64

# ONNX Runtime picks block sizes and kernels by these flags alone (onnxruntime/core/mlas/lib/platform.cpp).
_ISA = {
    "x86_64": (
        "sse4_1", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl",
        "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    ),
    "aarch64": ("asimd", "asimdhp", "asimddp", "fphp", "i8mm", "bf16", "sve", "sve2", "sme", "sme2"),
}  # fmt: skip
_ALIASES = {"AMD64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}


def describe_cpu(cpuinfo: str | None = None, machine: str | None = None) -> dict[str, Any]:
    """Return {"architecture", "vendor", "family", "isa"} of this CPU.

    isa: the sorted list of known flags that the CPU has. cpuinfo: the text of Linux's /proc/cpuinfo; where there is
    none, vendor and flags stay empty.
    """
    machine = machine or platform.machine()
    architecture = _ALIASES.get(machine, machine)
    if cpuinfo is None:
        cpuinfo = _cpuinfo()
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())  # the first processor speaks for all
    # x86's names of fields, or Arm's.
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    family = fields.get("cpu family") or fields.get("CPU part", "")
    return {
        "architecture": architecture,
        "vendor": fields.get("vendor_id") or fields.get("CPU implementer", ""),
        "family": " ".join(filter(None, (family, fields.get("model", "")))),
        "isa": sorted(flags & set(_ISA.get(architecture, ()))),
    }


@functools.cache
def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(errors="replace") if path.exists() else ""


def cpu_key(device: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be equal for an engine to be loaded: the vendor need not be."""
    return {"architecture": device.get("architecture"), "isa": list(device.get("isa", []))}


def cpu_count(root: Path = Path("/"), cpus: Collection[object] | None = None) -> int:
    """Return how many CPUs this process may use, by its affinity and its cgroup's quota.

    root: of the file system, another one for tests. cpus: instead of those of the affinity.
    """
    quotas = _quotas(root / "sys/fs/cgroup", _text(root / "proc/self/cgroup"))
    if cpus is None:
        cpus = _cpus()
    return max(1, min([len(cpus), *map(math.ceil, quotas)]))


def core_count(root: Path = Path("/")) -> int:
    """Return how many cores this process may use: two CPUs that are threads of one core count once."""
    files = (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in sorted(_cpus()))
    return cpu_count(root, {_text(file) or str(file) for file in files})


def _cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _quotas(cgroups: Path, membership: str) -> Iterator[float]:
    """Yield the CPU quotas of this process's cgroup and of those above it: `cpu.max`, or in version 1 its quota.

    membership: the text of /proc/self/cgroup.
    """
    group = next((line[3:].strip("/") for line in membership.splitlines() if line.startswith("0::")), "")
    for path in (cgroups / group, *(cgroups / group).parents):
        if not path.is_relative_to(cgroups):
            break
        quota, _, period = _text(path / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)
    quota = _text(cgroups / "cpu/cpu.cfs_quota_us")
    period = _text(cgroups / "cpu/cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit():
        yield int(quota) / int(period)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def thread_count(threads: int | None = None) -> int:
    """Return the number of threads: `threads`, else the variable LOCKSTEP_THREADS, else `core_count`.

    Raises InputError for fewer than one, and for more than `_MAX_THREADS`, or four for each CPU where that is more.
    """
    cpus = len(_cpus())
    limit = max(_MAX_THREADS, 4 * cpus)
    where = "threads"
    text = str(threads)
    if threads is None:
        where = THREADS_VARIABLE
        text = os.environ.get(THREADS_VARIABLE, "")
        if not text:
            return core_count()
        threads = 0
        if re.fullmatch("[0-9]{1,9}", text):
            threads = int(text)
    if not 1 <= threads <= limit:
        if len(text) >= 40:
            text = text[:37] + "..."
        raise InputError(
            f"{where}: expected 1 to {limit} ({cpus} CPUs are here), found {text}; more only wait for each other"
        )
    return threads
