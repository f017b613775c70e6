"""One finished run of the demo that all tests start from, each in its own copy."""

from __future__ import annotations

import compileall
from pathlib import Path

import pytest
from checkout import REPOSITORY, Checkout

from network import TELEMETRY, Recorder
from shared import Shared


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.workflow)


@pytest.fixture(scope="session", autouse=True)
def compiled(shared: Shared) -> None:
    """Lay what Python keeps of each module next to the repository's.

    As after a first run: checkouts take it along, and hundreds of processes need not compile.
    """

    def make(folder: Path) -> None:
        compileall.compile_dir(REPOSITORY / "src", quiet=1)

    shared.folder("compiled", make)


@pytest.fixture(scope="session")
def filled_cache(first_run: Checkout) -> Path:
    """Return the artefact cache that `first_run` found empty and filled. Not to be changed."""
    return first_run.folder.parent / "cache"


@pytest.fixture(scope="session")
def first_run(shared: Shared) -> Checkout:
    """Return the demo, built and checked once for all processes of the test run.

    As a user runs it who has switched no telemetry off. Only to be read: take `finished` to run anything in it.
    """

    def make(folder: Path) -> None:
        recorder = Recorder.make(folder / "recorder")
        checkout = Checkout.make(folder / "checkout", {**dict.fromkeys(TELEMETRY, ""), **recorder.environment})
        checkout.finish("--config", f"cache={folder / 'cache'}")

    return Checkout(shared.folder("first_run", make) / "checkout")


@pytest.fixture(scope="session")
def recorder(first_run: Checkout) -> Recorder:
    """Return what the demo's run asked of the network."""
    return Recorder(first_run.folder.parent / "recorder")


@pytest.fixture(scope="session")
def finished(first_run: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """Return a copy of it for the tests of this process that change nothing. To change something, take `demo`."""
    return first_run.copy(tmp_path_factory.mktemp("finished") / "checkout")


@pytest.fixture
def demo(first_run: Checkout, tmp_path: Path) -> Checkout:
    """Return a copy of the finished run."""
    return first_run.copy(tmp_path / "checkout")


@pytest.fixture
def fresh(tmp_path: Path) -> Checkout:
    """Return a checkout in which nothing has run."""
    return Checkout.make(tmp_path / "checkout")
