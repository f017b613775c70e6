"""`.ci/as-avx2`: an older CPU, of this one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

AS_AVX2 = Path(__file__).parents[3] / ".ci" / "as-avx2"
SHOW_FEATURES = """
import json
from numpy._core._multiarray_umath import __cpu_features__ as by_cpuid
from lockstep.backends.cpu import describe_cpu
print(json.dumps([by_cpuid["AVX2"], by_cpuid["AVX512F"], describe_cpu()["isa"]]))
"""


def may_mount() -> bool:
    return subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(
    " cpuid_fault" not in Path("/proc/cpuinfo").read_text() or not shutil.which("cc") or not may_mount(),
    reason="needs a CPU whose cpuid can be made to fault, a C compiler and user namespaces",
)
def test_libraries_find_avx2_and_nothing_newer() -> None:
    done = subprocess.run([AS_AVX2, sys.executable, "-c", SHOW_FEATURES], capture_output=True, text=True, check=True)
    by_cpuid_avx2, by_cpuid_avx512, isa = json.loads(done.stdout)
    assert by_cpuid_avx2 and not by_cpuid_avx512
    assert "avx2" in isa and not [name for name in isa if name.startswith(("avx512", "amx", "avx_vnni"))]
