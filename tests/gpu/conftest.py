"""The demo's graphs and weights for the tests on a GPU, and which of these run here.

LOCKSTEP_DEMOS names a folder in which they were made before, on this machine or another; missing ones are made there.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.backends.base import get_backend
from lockstep.errors import LockstepError
from lockstep.targets import Results
from lockstep_gpu.backends.cuda.gpu import why_not

ROOT = Path(__file__).parents[2]
_PATH = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
# Graphs and weights are those of any backend: the one that is always there.
CONFIG = """
models:
  demo-llama:
    source: resources/demo-llama
    precisions: [{precisions}]
    backends: [{backend}]
    golden: {{prompts: [{{text: Light}}]}}
"""
RANKS = """
    tensor_parallel: 2
"""
QUANTIZED = """
    group_size: 16
"""
ADAPTERS = """
    max_adapters: 2
    adapters:
      captain: {source: resources/demo-adapters/captain}
      shakespeare: {source: resources/demo-adapters/shakespeare}
"""


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    """Skip where no GPU can be run on: whatever the backend, a step is the runtime's, which is cuda's."""
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> str:
    """Return the backend of a test's parameters; skip one whose library is not in this Python."""
    try:
        get_backend(request.param).describe_device()
    except LockstepError as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return make_demo("1", tmp_path_factory)


@pytest.fixture(scope="session")
def demo_bf16(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return make_demo("bf16", tmp_path_factory, ("bf16",))


@pytest.fixture(scope="session")
def demo_of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return make_demo("2", tmp_path_factory, extra=RANKS)


@pytest.fixture(scope="session")
def demo_with_adapters(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return make_demo("adapters", tmp_path_factory, extra=ADAPTERS)


@pytest.fixture(scope="session")
def quantized_demo(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return make_demo("quantized", tmp_path_factory, ("w8a16", "w4a16", "w8a8-fp8"), QUANTIZED)


@pytest.fixture(scope="session")
def family_results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Results]:
    """Give a family's results in a precision of 16 bits, made once."""

    @functools.cache
    def results_of(family: str, precision: str) -> Results:
        demos = os.environ.get("LOCKSTEP_DEMOS")
        name = family if precision == "fp16" else f"{family}-{precision}"
        folder = Path(demos) / name if demos else tmp_path_factory.mktemp(name)
        if not (folder / "results").exists():
            folder.mkdir(parents=True, exist_ok=True)
            _run(str(ROOT / "tests/unit/built_family.py"), str(folder), family, precision)
        return Results(folder / "results")

    return results_of


def _run(*arguments: str) -> None:
    """Run this in its own process, with torch."""
    paths = os.pathsep.join([_PATH, str(ROOT / "tests")])
    subprocess.run([sys.executable, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, check=True)


def make_demo(
    name: str, tmp_path_factory: pytest.TempPathFactory, precisions: tuple[str, ...] = ("fp32", "fp16"), extra: str = ""
) -> Results:
    """Return checkpoint, weights and graphs of the demo. extra: lines of the config, for the model."""
    demos = os.environ.get("LOCKSTEP_DEMOS")
    folder = Path(demos) / name if demos else tmp_path_factory.mktemp("demo")
    results = Results(folder / "results")
    if results.weights("demo-llama", precisions[-1]).is_file():  # which are made last
        return results
    folder.mkdir(parents=True, exist_ok=True)
    backend = "cuda" if precisions == ("bf16",) else "onnxruntime"  # which has no bf16
    (folder / "config.yaml").write_text(CONFIG.format(precisions=", ".join(precisions), backend=backend) + extra)
    adapters = ["adapters"] if extra == ADAPTERS else []
    # Which weights are quantised the export decides: their conversion is after it.
    checkpoint = ["resolve", "architecture", *adapters]
    for precision in precisions:
        for stage in (*checkpoint, "export", "convert"):
            place = f"demo-llama/{precision}", str(folder / "config.yaml"), str(folder / "results")
            _run("-m", "stage_job", stage, *place)
        checkpoint = []
    return results
