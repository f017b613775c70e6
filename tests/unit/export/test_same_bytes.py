"""Artefacts are the same bytes whatever the CPU: its instruction sets and the number of threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXPORTED = Path(__file__).with_name("exported_bytes.py")


@pytest.mark.long  # minutes; test_committed_lock.py holds the graphs of this CPU to those of others
def test_graphs_are_the_same_bytes_on_every_cpu() -> None:
    """torch reads the variable when it is imported, so each instruction set has its own process."""
    variables = {"default": "1"}  # and their numbers of threads
    if torch.cpu._is_avx2_supported():
        variables["avx2"] = "2"
    if torch.cpu._is_avx512_supported():
        variables["avx512"] = "1"
    processes = [
        subprocess.Popen(
            [sys.executable, EXPORTED],
            env=os.environ | {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": threads},
            stdout=subprocess.PIPE,
        )
        for capability, threads in variables.items()
    ]
    results: list[dict[str, Any]] = [json.loads(process.communicate()[0]) for process in processes]
    assert [item["capability"] for item in results] == list(variables)
    first, *other_digests = (item["digests"] for item in results)
    assert len(first) == 18
    assert all(other == first for other in other_digests)
