"""First lines of docstrings in the package: a summary of one line, in functions in the imperative."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "lockstep"
LONGEST = 80  # characters of the first line, without its quotes
NO_VERBS = {"A", "An", "The", "What", "Whether", "Where", "As"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


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


def test_first_lines_are_short_and_imperative() -> None:
    wrong = [fault for path in sorted(PACKAGE.rglob("*.py")) for fault in faults(path)]
    assert not wrong, "\n".join(wrong)
