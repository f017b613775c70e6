"""The demo's graphs and weights for the tests on a GPU. torch, which exports them, may be in another Python than
TensorRT: LOCKSTEP_PYTHON names it. LOCKSTEP_DEMOS names a folder in which they were made before, on this machine or
another; what it lacks is made there.
"""

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
    tensor_parallel: {ranks}
    golden: {{prompts: [{{text: Light}}]}}
"""
QUANTIZED = """
models:
  demo-llama:
    source: resources/demo-llama
    precisions: [w8a16, w4a16]
    backends: [tensorrt]
    group_size: 16
    golden: {prompts: [{text: Light}]}
"""
ADAPTERS = """
    max_adapters: 2
    adapters:
      captain: {source: resources/demo-adapters/captain}
      shakespeare: {source: resources/demo-adapters/shakespeare}
"""


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return made(1, tmp_path_factory)


@pytest.fixture(scope="session")
def demo_of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return made(2, tmp_path_factory)


@pytest.fixture(scope="session")
def demo_with_adapters(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return made(1, tmp_path_factory, ADAPTERS)


@pytest.fixture(scope="session")
def quantized_demo(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return made(1, tmp_path_factory, config=QUANTIZED)


def made(ranks: int, tmp_path_factory: pytest.TempPathFactory | None, more: str = "", config: str = CONFIG) -> Results:
    """Checkpoint, weights and graphs of the demo for so many ranks. more: of the config, for the model."""
    given, quantized = os.environ.get("LOCKSTEP_DEMOS"), config == QUANTIZED
    name = "adapters" if more else "quantized" if quantized else str(ranks)
    folder = Path(given) / name if given else tmp_path_factory.mktemp("demo")
    results = Results(folder / "results")
    if results.assembly("demo-llama", "w4a16" if quantized else "fp16").is_file():
        return results
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text((config if quantized else config.format(ranks=ranks)) + more)
    python, own = os.environ.get("LOCKSTEP_PYTHON", sys.executable), {"PYTHONPATH": str(ROOT / "src")}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"} | own
    # Which weights are quantised the export decides.
    middle = ["export", "convert"] if quantized else ["convert", *(["adapters"] if more else []), "export"]
    for stage in ("resolve", *middle):
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
    return results
