"""First lines of docstrings in the package: a summary of one line, in functions in the imperative."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "lockstep"
LONGEST = 80  # characters of the first line, without its quotes
NO_VERBS = {"A", "An", "The", "What", "Whether", "Where", "As"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Docstrings of a package that do not fulfil this yet. Only ever lower a number; remove it at zero.
EXEMPT: dict[str, int] = {
    "__init__": 1,
    "artifacts": 158,
    "backends": 430,
    "bundle": 23,
    "checkpoint": 50,
    "cli": 37,
    "config": 82,
    "errors": 6,
    "export": 202,
    "load": 58,
    "onnx_tools": 69,
    "pipeline": 38,
    "processes": 1,
    "provenance": 141,
    "report": 52,
    "runtime": 122,
    "serve": 214,
    "step": 112,
    "targets": 10,
    "verify": 142,
    "weights": 83,
}


def faults(path: Path) -> Iterator[str]:
    """Yield each docstring of a module that is not as it should be: file, line, what is wrong, its first line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
            continue
        text = ast.get_docstring(node, clean=False)
        if text is None:
            continue
        first, words = text.partition("\n")[0], text.split(maxsplit=1)
        where = f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 1)}"
        if len(first) > LONGEST:
            yield f"{where}: {len(first)} characters: {first}"
        elif isinstance(node, FUNCTIONS) and words and words[0].strip(",") in NO_VERBS:
            yield f"{where}: not imperative: {first}"


def package_of(path: Path) -> str:
    """Return the package of a module, or the module right below `lockstep`, by its name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_first_lines_are_short_and_imperative() -> None:
    found = {path: list(faults(path)) for path in sorted(PACKAGE.rglob("*.py"))}
    counts: Counter[str] = Counter()
    for path, wrong in found.items():
        counts[package_of(path)] += len(wrong)
    left = {name: count for name, count in counts.items() if count}
    lines = [line for path, wrong in found.items() if package_of(path) not in EXEMPT for line in wrong]
    assert not lines, "\n".join(lines)
    assert left == EXEMPT, "a number of EXEMPT is not the number found; it may only become lower"
