"""Tests on a Slurm cluster: `make slurm-test` installs Snakemake's plugin and says where it is. Nothing else collects
them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PLUGIN = os.environ.get("LOCKSTEP_SLURM", "")
collect_ignore_glob = [] if PLUGIN else ["test_*.py"]
sys.path.insert(0, str(Path(__file__).parents[1] / "workflow"))

from checkout import Checkout  # noqa: E402
from cluster import NODES, Cluster  # noqa: E402


@pytest.fixture(scope="session")
def session_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    print(f"the cluster's logs: {folder}")
    with Cluster(folder) as cluster:
        yield cluster


@pytest.fixture
def cluster(session_cluster: Cluster) -> Iterator[Cluster]:
    """All nodes up, no job before the test and none after it."""
    yield session_cluster
    session_cluster.cancel_all()
    for node, state in session_cluster.nodes().items():
        if state not in ("idle", "completing"):
            session_cluster.update_node(node, "resume")
    session_cluster.wait_for(lambda: session_cluster.nodes() == dict.fromkeys(NODES, "idle"), "all nodes to be idle")


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """The whole demo, made without a cluster. Only to be read."""
    checkout = Checkout.make(tmp_path_factory.mktemp("local") / "checkout")
    checkout.take_whole_demo()
    checkout.finish()
    return checkout


@pytest.fixture
def fresh(tmp_path: Path, cluster: Cluster) -> Checkout:
    """A checkout in which nothing has run, as a user of the cluster has it."""
    folder = tmp_path / "checkout"
    path = os.pathsep.join([str(folder / "src"), PLUGIN])
    checkout = Checkout.make(folder, {**cluster.environment, "PYTHONPATH": path})
    checkout.take_whole_demo()
    return checkout
