"""The demo's graphs and weights for the tests on a GPU. torch, which exports them, may be in another Python than
TensorRT: LOCKSTEP_PYTHON names it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.targets import Results

ROOT = Path(__file__).parents[2]
CONFIG = """
models:
  demo-llama:
    source: resources/demo-llama
    precisions: [fp32, fp16]
    backends: [tensorrt]
    golden: {prompts: [{text: Light}]}
"""


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> Results:
    folder = tmp_path_factory.mktemp("demo")
    (folder / "config.yaml").write_text(CONFIG)
    python, own = os.environ.get("LOCKSTEP_PYTHON", sys.executable), {"PYTHONPATH": str(ROOT / "src")}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"} | own
    for stage in ("resolve", "convert", "export"):
        command = [
            python,
            "-m",
            "lockstep",
            stage,
            "--config",
            str(folder / "config.yaml"),
            "--results",
            str(folder / "results"),
        ]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return Results(folder / "results")
