"""Tests of the real Triton server: `make triton-test` makes its environment and says where it is. Nothing else collects
them. (A folder named `triton` would hide the package of that name, which torch looks for.)"""

from __future__ import annotations

import os

from unit_fixtures import unit_conftest

collect_ignore_glob = [] if "LOCKSTEP_TRITON" in os.environ else ["test_*.py"]

if "LOCKSTEP_TRITON" in os.environ:
    # The demo and its references are made as for the unit tests.
    unit = unit_conftest()
    demo = unit.demo
    references = unit.references
    each_tokenizer_is_loaded_once = unit.each_tokenizer_is_loaded_once
