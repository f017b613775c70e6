"""The graph of packages in docs/design.md: current, in the order of the layers, without a circle, and readable."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs import draw_packages
from test_imports import LAYERS


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return draw_packages.packages()


def test_the_drawing_is_current(graph: dict[str, set[str]]) -> None:
    found = draw_packages.PAGE.read_text(encoding="utf-8")
    assert found == draw_packages.page(found, graph), "run: python docs/draw_packages.py"


def test_no_arrow_goes_against_the_order_of_the_layers(graph: dict[str, set[str]]) -> None:
    assert set(graph) == set(LAYERS) - draw_packages.ENTRY_POINTS
    against = {
        f"{name} imports {imported}"
        for name, found in graph.items()
        for imported in found
        if LAYERS.index(imported) >= LAYERS.index(name)
    }
    assert not against


def test_packages_import_in_no_circle(graph: dict[str, set[str]]) -> None:
    assert draw_packages.circle(graph) == []


def test_the_drawing_is_small_enough_to_be_read(graph: dict[str, set[str]]) -> None:
    assert len(graph) < 25


def test_imports_are_found_however_they_are_written(tmp_path: Path) -> None:
    root = tmp_path / "lockstep"
    for path, text in {
        "__init__.py": "from lockstep import top\n",
        "low.py": "import json\n",
        "middle/__init__.py": "from . import part\nfrom .. import low\n",
        "middle/part.py": "def late():\n    from lockstep.low import f\n",
        "top.py": "import lockstep.middle.part\nfrom lockstep import low, middle\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    graph = draw_packages.packages(root)
    assert graph == {"low": set(), "middle": {"low"}, "top": {"low", "middle"}}
    assert draw_packages.reduced(graph) == {"low": set(), "middle": {"low"}, "top": {"middle"}}
    assert "top --> middle\n" in draw_packages.drawing(graph)


def test_a_circle_is_named() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}}
    assert draw_packages.circle(graph) == ["b", "c", "b"]
    with pytest.raises(ValueError, match="found b -> c -> b"):
        draw_packages.drawing(graph)


def test_a_page_without_its_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="expected the lines"):
        draw_packages.page("# Design\n", {})
