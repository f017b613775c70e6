"""The manual as a site: its pages are in the navigation, and what a page requests from elsewhere is seen."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from demo_model import ROOT

spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
assert spec is not None and spec.loader is not None
site_hooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site_hooks)


def pages(nav: Any) -> list[str]:
    """Return the pages of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return list(itertools.chain.from_iterable(map(pages, entries)))


def test_the_navigation_has_every_page_of_the_manual_once() -> None:
    actual = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert len(actual) == len(set(actual)) and not [page for page in actual if not (ROOT / page).is_file()]
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= set(actual)


@pytest.mark.parametrize(
    ("name", "text", "actual"),
    [
        ("a.html", '<script src="https://cdn.example.org/x.js"></script>', ["script https://cdn.example.org/x.js"]),
        ("a.html", '<link rel="stylesheet" href="//fonts.example.org/x">', ["link //fonts.example.org/x"]),
        ("a.html", '<link rel="preconnect" href="http://example.org">', ["link http://example.org"]),
        ("a.html", '<img src="HTTP://example.org/x.png">', ["img HTTP://example.org/x.png"]),
        ("a.html", '<p style="background: url(https://example.org/x)">', ["https://example.org/x"]),
        ("a.css", "@import 'https://example.org/x.css';", ["https://example.org/x.css"]),
        ("a.css", "src: url(fonts/lato.woff2)", []),
        ("a.html", '<link rel="canonical" href="https://example.org"><a href="https://example.org">x</a>', []),
        ("a.html", '<script src="js/theme.js"></script><img src="img/x.svg">', []),
    ],
)
def test_what_a_page_loads_from_elsewhere_is_seen(tmp_path: Path, name: str, text: str, actual: list[str]) -> None:
    (tmp_path / name).write_text(text)
    assert site_hooks.outside_requests(tmp_path / name) == actual


def test_badges_are_no_part_of_the_site() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("[![") == 3 and "img.shields.io" not in site_hooks.on_page_markdown(text)
