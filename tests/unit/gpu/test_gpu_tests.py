"""The tests of `tests/gpu`, on the fake GPU: without a GPU this shows that the tests themselves are right."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from built_family import built_family
from quantized_models import demo

import fake_gpu
from lockstep.targets import Results
from shared import Shared

FOLDER = Path(__file__).resolve().parents[2] / "gpu"


@pytest.fixture(autouse=True)
def installed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Install the fake GPU of the test's backend; tests without a backend run without TensorRT."""
    backend = getattr(request.node, "callspec", SimpleNamespace(params={})).params.get("backend", "cuda")
    with fake_gpu.installed(name=backend) as gpu:
        yield
        gc.collect()
    assert not gpu.faults


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def quantized_demo(shared: Shared) -> SimpleNamespace:
    """The demo in w8a16 and w4a16."""
    return SimpleNamespace(
        assembly=lambda _, precision: demo(shared, precision).assembly("model", precision),
        weights=lambda _, precision: demo(shared, precision).weights("model", precision),
    )


@pytest.fixture
def family_results(shared: Shared) -> Callable[[str, str], Results]:
    return lambda family, precision: Results(built_family(shared, family, precision) / "results")


pytestmark = pytest.mark.long
sys.path.append(str(FOLDER))  # some import from others
for _name in (
    "test_gpu_kernels",
    "test_gpu_run",
    "test_gpu_compare",
    "test_gpu_families",
    "test_gpu_quantized",
    "test_gpu_products",
    "test_gpu_fp8_cache",
):
    _spec = importlib.util.spec_from_file_location(f"fake_{_name}", FOLDER / f"{_name}.py")
    _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
    _tests = {name: test for name, test in vars(_module).items() if name.startswith("test_")}
    globals().update(_tests)
