"""The conftest of the unit tests, for tests of other programs that have their own environments."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

UNIT = Path(__file__).parent / "unit"


def unit_conftest() -> Any:
    """Return the module, whose fixtures make the demo."""
    spec = importlib.util.spec_from_file_location("unit_conftest", UNIT / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
