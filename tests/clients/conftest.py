"""Tests of clients that have their own environments: `make clients-test` makes these and says where they are.
Nothing else collects them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from unit_fixtures import unit_conftest

collect_ignore_glob = [] if "LOCKSTEP_CLIENTS" in os.environ else ["test_*.py"]

if "LOCKSTEP_CLIENTS" in os.environ:
    # The demo is made as for the unit tests.
    unit = unit_conftest()
    demo = unit.demo
    each_tokenizer_is_loaded_once = unit.each_tokenizer_is_loaded_once

    from lockstep.targets import Results
    from real_server import RealServer, make_tree

    @pytest.fixture(scope="session")
    def server(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
        """`lockstep serve` of the demo in fp32, with the limits of its config: 4 requests at a time."""
        with RealServer(make_tree(tmp_path_factory.mktemp("clients") / "results", demo)) as server:
            yield server
