"""Code reads plainly: places per 1,000 lines that slow a reader, in `src`, each of its packages, and tests."""

from pathlib import Path

import pytest

from plainness import count

ROOT = Path(__file__).parents[3]
LIMITS = {
    "tuple assignment": 0.2, "condition": 7, "nested condition": 0.5, "heavy comprehension": 0.3, "name": 0.8,
    "dialect": 0.9,
}  # fmt: skip
LIMITS_OF_TESTS = {"tuple assignment": 1, "nested condition": 1.7, "heavy comprehension": 1.5, "name": 1, "dialect": 2}
PACKAGES = sorted(str(file.parent.relative_to(ROOT)) for file in (ROOT / "src").rglob("__init__.py"))


def excess(folder: str, limits: dict[str, float], factor: float = 1) -> dict[str, int]:
    counts, lines = count(ROOT / folder)
    # One place in a small package is no density.
    allowed = {kind: max(1, factor * limit * lines / 1000) for kind, limit in limits.items()}
    return {kind: counts[kind] for kind in limits if counts[kind] > allowed[kind]}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_at_most_half_as_dense_again_as_all(package: str) -> None:
    assert excess(package, LIMITS, 1.5) == {}


@pytest.mark.parametrize(("folder", "limits"), [("src", LIMITS), ("tests", LIMITS_OF_TESTS), ("benchmarks", LIMITS)])
def test_the_code_gets_no_denser(folder: str, limits: dict[str, float]) -> None:
    assert excess(folder, limits) == {}
