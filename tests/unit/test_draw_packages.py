"""The graph of packages in docs/design.md: current, in the order of the layers, without a circle, and readable."""

from __future__ import annotations

import pytest
from docs import draw_packages


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return draw_packages.packages()


def test_the_drawing_is_current(graph: dict[str, set[str]]) -> None:
    found = draw_packages.PAGE.read_text(encoding="utf-8")
    assert found == draw_packages.page(found, graph), "run: python docs/draw_packages.py"
