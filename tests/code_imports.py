"""What each module of the package imports, read without importing it: also in functions, and modules named in texts."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from lockstep.config.backends import backends
from lockstep.provenance.code_identity import SOURCES

# Packages whose import name is not their own name.
DISTRIBUTIONS = {"yaml": "pyyaml", "google": "protobuf", "grpc": "grpcio"}
# What these load when used, without an import that could be read in our code.
BRINGS = {"torch": ("onnxscript", "onnx-ir", "onnx"), "transformers": ("tokenizers", "safetensors")}


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """The dotted names that a module imports; `from a import b` gives `a` and `a.b`."""
    nodes = list(ast.walk(ast.parse(path.read_bytes())))
    package = ["lockstep", *path.relative_to(SOURCES).parts[:-1]]
    return (*_imports(nodes, package), *(name for text in _texts(nodes) for name in _named(text)))


@functools.cache
def file_of(module: str) -> Path | None:
    """The file of a module of this package; None for any other name, such as that of a function."""
    first, *parts = module.partition(":")[0].split(".")
    if first != "lockstep":
        return None
    base = SOURCES.joinpath(*parts)
    return next((path for path in (base / "__init__.py", base.parent / f"{base.name}.py") if path.is_file()), None)


def reach(entry: str, backend: str | None = None) -> set[Path]:
    """The files of this package that importing `entry` may load, without those of other backends than `backend`."""
    reached: set[Path] = set()
    waiting = [f"lockstep.{entry}"]
    while waiting:
        name = waiting.pop()
        path = file_of(name)
        if path is None or path in reached:
            continue
        reached.add(path)
        found = imports(path)
        if backend and _backend_of(name) is None:
            found = tuple(other for other in found if _backend_of(other) in (None, backend))
        parent = name.rpartition(".")[0]  # importing a module runs the packages above it
        waiting += [parent, *found] if parent else found
    return reached


def third_party(files: set[Path]) -> set[str]:
    """The names of the packages that modules import, and what these load when used; not what a machine brings."""
    unpinned = {name for settings in backends().values() for name in settings.unpinned}
    roots = {name.partition(".")[0] for path in files for name in imports(path)}
    outside = roots - {"lockstep"} - set(sys.stdlib_module_names) - unpinned
    names = {re.sub(r"[-_.]+", "-", DISTRIBUTIONS.get(root, root)).lower() for root in outside}
    return names | {name for owner in names for name in BRINGS.get(owner, ())}


def _backend_of(module: str) -> str | None:
    found = re.match(r"lockstep\.backends\.(\w+)", module)
    return found[1] if found and (SOURCES / "backends" / found[1]).is_dir() else None


def _imports(nodes: list[ast.AST], package: list[str]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _texts(nodes: list[ast.AST]) -> list[str]:
    texts = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [text for text in texts if text.startswith("lockstep.")]


def _named(text: str) -> list[str]:
    """The modules that a text names: `a.*.c` is module c of each package in a."""
    if "*" not in text:
        return [text]
    found = sorted(SOURCES.glob(text.removeprefix("lockstep.").replace(".", "/") + ".py"))
    return [".".join(("lockstep", *path.relative_to(SOURCES).with_suffix("").parts)) for path in found]
