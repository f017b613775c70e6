"""Tests marked `gpu`, on the fake GPU: whoever has no GPU sees that these tests say what they mean."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_quantization import demo

from shared import Shared

FOLDER = Path(__file__).resolve().parents[1] / "gpu"
pytestmark = pytest.mark.usefixtures("gpu")


@pytest.fixture
def quantized_demo(shared: Shared) -> SimpleNamespace:
    """The demo in w8a16 and w4a16."""
    return SimpleNamespace(
        assembly=lambda _, precision: demo(shared, precision).assembly("model", precision),
        weights=lambda _, precision: demo(shared, precision).weights("model", precision),
    )


for _name in ("test_gpu_kernels", "test_gpu_run", "test_gpu_compare", "test_gpu_quantized"):
    _spec = importlib.util.spec_from_file_location(f"fake_{_name}", FOLDER / f"{_name}.py")
    _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
    _tests = {name: test for name, test in vars(_module).items() if name.startswith("test_")}
    if _name == "test_gpu_compare":  # a minute each
        _tests = {name: pytest.mark.long(test) for name, test in _tests.items()}
    globals().update(_tests)
