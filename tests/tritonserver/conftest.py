"""Tests of the real Triton server: `make triton-test` makes its environment and says where it is. Nothing else collects
them. (A folder named `triton` would hide the package of that name, which torch looks for.)"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

UNIT = Path(__file__).parents[1] / "unit"
collect_ignore_glob = [] if "LOCKSTEP_TRITON" in os.environ else ["test_*.py"]

if "LOCKSTEP_TRITON" in os.environ:
    # The demo and its references are made as for the unit tests.
    sys.path.insert(0, str(UNIT))
    spec = importlib.util.spec_from_file_location("unit_conftest", UNIT / "conftest.py")
    assert spec is not None and spec.loader is not None
    unit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unit)
    demo = unit.demo
    references = unit.references
    each_tokenizer_is_loaded_once = unit.each_tokenizer_is_loaded_once
