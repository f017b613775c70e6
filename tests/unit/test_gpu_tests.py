"""Tests marked `gpu`, on the fake GPU: whoever has no GPU sees that these tests say what they mean."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "gpu"
pytestmark = pytest.mark.usefixtures("gpu")


for _name in ("test_gpu_kernels", "test_gpu_run", "test_gpu_quantized"):
    _spec = importlib.util.spec_from_file_location(f"fake_{_name}", FOLDER / f"{_name}.py")
    _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
    globals().update({name: test for name, test in vars(_module).items() if name.startswith("test_")})
