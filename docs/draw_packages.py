"""Draw the packages of src and what they import, as a Mermaid graph.

The graph stands in docs/design.md. In: the modules of src, read as text. A package of `lockstep` is a box of its own,
each of the other packages is one. Out: the lines between two markers in
docs/design.md. An arrow that follows from others (a imports b, b imports c: a to c) is left out. `python
docs/draw_packages.py` writes; with `--check` a drawing that is not current is exit code 1.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCES = REPOSITORY / "src"
PAGE = REPOSITORY / "docs" / "design.md"
BEGIN = "<!-- packages: written by `python docs/draw_packages.py` -->"
END = "<!-- /packages -->"
ENTRY_POINTS = {"__init__", "__main__", "lockstep"}  # they belong to no box

Graph = Mapping[str, set[str]]


def packages(root: Path = SOURCES) -> dict[str, set[str]]:
    """Return what each package below `root` imports of the others, in any module."""
    imported: dict[str, set[str]] = {}
    for path in sorted(root.rglob("*.py")):
        module = path.relative_to(root).with_suffix("").parts
        names = {_box(name.split(".")) for name in _imports(path, module)}
        imported.setdefault(_box(module), set()).update(names)
    boxes = imported.keys() - ENTRY_POINTS
    return {box: imported[box] & boxes - {box} for box in sorted(boxes)}


def _box(module: Sequence[str]) -> str:
    """Return the box of the drawing that a module is in: `lockstep.step.pages` is in `step`."""
    return module[1] if module[0] == "lockstep" and len(module) > 1 else module[0]


def _imports(path: Path, module: tuple[str, ...]) -> Iterator[str]:
    """Yield the dotted names that a module imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # Without the last name for one dot: of a package's __init__.py that is `__init__`.
            base = [*module[: len(module) - node.level], *(node.module or "").split(".")] if node.level else []
            origin = ".".join(filter(None, base)) or node.module or ""
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def circle(graph: Graph) -> list[str]:
    """Return packages that import each other in a circle; empty where there is none.

    The first one stands at the end again.
    """
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for imported in sorted(graph[name]):
            if found := walk(imported, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in graph if (found := walk(name, []))), [])


def reduced(graph: Graph) -> dict[str, set[str]]:
    """Return the transitive reduction: without arrows that a path stands for.

    A path over other packages. Raises ValueError for a graph with a circle, which has none.
    """
    if found := circle(graph):
        raise ValueError(f"expected packages that import one way, found {' -> '.join(found)}")

    def reach(name: str) -> set[str]:
        return set(graph[name]).union(*(reach(imported) for imported in graph[name]))

    return {name: imported - set().union(*map(reach, imported)) for name, imported in graph.items()}


def drawing(graph: Graph) -> str:
    """Return the reduced graph as a Mermaid flowchart in a fenced block.

    Arrows lead from whoever imports to what is imported.
    """
    arrows = [f"    {name} --> {imported}" for name, found in reduced(graph).items() for imported in sorted(found)]
    alone = [f"    {name}" for name in graph if not any(name in arrow.split() for arrow in arrows)]
    return "\n".join(["```mermaid", "flowchart TD", *arrows, *alone, "```"])


def page(text: str, graph: Graph) -> str:
    """Return the page with the drawing between its markers.

    Raises ValueError for a page that has not one of each.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name}: expected the lines {BEGIN!r} and {END!r}; put them where the graph goes")
    return f"{before}{BEGIN}\n{drawing(graph)}\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Write the drawing, or with `--check` compare it; return the exit code."""
    found = PAGE.read_text(encoding="utf-8")
    expected = page(found, packages())
    if arguments == ["--check"]:
        if found != expected:
            print(f"{PAGE}: not current; run: python docs/draw_packages.py", file=sys.stderr)
        return int(found != expected)
    PAGE.write_text(expected, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
