"""One finished run of the demo that all tests start from, each in its own copy."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkout import Checkout


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.workflow)


@pytest.fixture(scope="session")
def filled_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artefact cache that `finished` found empty and filled. Not to be changed."""
    return tmp_path_factory.mktemp("shared") / "cache"


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, filled_cache: Path) -> Checkout:
    """The demo, built and checked. Not to be changed: take `demo`."""
    checkout = Checkout.make(tmp_path_factory.mktemp("demo") / "checkout")
    checkout.finish("--config", f"cache={filled_cache}")
    return checkout


@pytest.fixture
def demo(finished: Checkout, tmp_path: Path) -> Checkout:
    """A copy of the finished run."""
    return finished.copy(tmp_path / "checkout")


@pytest.fixture
def fresh(tmp_path: Path) -> Checkout:
    """A checkout in which nothing has run."""
    return Checkout.make(tmp_path / "checkout")
