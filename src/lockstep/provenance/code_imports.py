"""The imports of each module of our packages, read from its text without importing it.

A module's name in; the files that it may load, and the packages that these import, out. Imports in functions count, and
so do modules that a text names ("lockstep.backends.*.backend"), and what `load_plugin` loads. Texts are searched, not
parsed: a plan asks for all stages, of which the syntax trees alone would take longer than the rest of it.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from lockstep.plugins import backend_packages, entry_points

SOURCES = Path(__file__).resolve().parents[2]  # the folder of our packages
PACKAGES = ("lockstep", "lockstep_gpu", "lockstep_serve")
# Packages whose import name is not their own name.
_DISTRIBUTIONS = {"yaml": "pyyaml", "google": "protobuf", "grpc": "grpcio"}
# Packages that these load when used, without an import in our code.
_LOADS = {"torch": ("onnxscript", "onnx-ir", "onnx"), "transformers": ("tokenizers", "safetensors")}
_DATA = (".cu", ".cuh", ".html")  # that modules read, of their folder and of folders below it that hold no module
_TYPES = re.compile(r"^if TYPE_CHECKING:\n(?:(?:[ \t].*)?\n)+", re.MULTILINE)
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(?:\(([^)]*)\)|([^\n]*))|import[ \t]+([^\n]*))", re.MULTILINE
)
_NAMED = re.compile(r"""["'](lockstep(?:_gpu|_serve)?\.[\w.*]+)(?::\w+)?["']""")
_PLUGIN = re.compile(r"""\bload_plugin\("(\w+)", "(\w+)"\)""")


@functools.cache
def imports(path: Path, with_types: bool = False) -> frozenset[str]:
    """Return the dotted names that a module imports; `from a import b` gives `a` and `a.b`.

    with_types: also the imports for type checkers.
    """
    text = path.read_text(encoding="utf-8")
    if not with_types:
        text = _TYPES.sub("", text)
    names: set[str] = set()
    for module, block, line, plain in _IMPORT.findall(text):
        imported = list(_names(block or line or plain))
        if module:
            imported = [module, *(f"{module}.{name}" for name in imported)]
        names.update(imported)
    for named in _NAMED.findall(text):
        names.update(_expanded(named))
    for group, name in _PLUGIN.findall(text):
        if name in entry_points(group):
            names.add(entry_points(group)[name].module)
    return frozenset(names)


def _names(text: str) -> Iterator[str]:
    for part in re.sub(r"#[^\n]*", "", text).split(","):
        words = part.split()
        if words and re.fullmatch(r"[\w.]+", words[0]):
            yield words[0]


def _expanded(text: str) -> list[str]:
    """Return the modules that a text names: `lockstep.backends.*.c` is module c of each backend's package."""
    before, star, after = text.partition("*")
    if not star:
        return [text]
    assert before == "lockstep.backends.", f"expected lockstep.backends.*, found {text}"
    return [package + after for package in backend_packages().values()]


@functools.cache
def file_of(module: str) -> Path | None:
    """Return the file of a module of our packages; None for any other name, such as that of a function."""
    parts = module.split(".")
    if parts[0] not in PACKAGES:
        return None
    base = SOURCES.joinpath(*parts)
    return next((path for path in (base / "__init__.py", base.parent / f"{base.name}.py") if path.is_file()), None)


@functools.cache
def reach(entry: str, backend: str | None = None) -> frozenset[Path]:
    """Return the files that importing `entry` may load, without those of other backends than `backend`."""
    reached: set[Path] = set()
    waiting = [f"lockstep.{entry}"]
    while waiting:
        name = waiting.pop()
        path = file_of(name)
        if path is None or path in reached:
            continue
        reached.add(path)
        names: Iterable[str] = imports(path)
        if backend and _backend_of(name) is None:
            names = [other for other in names if _backend_of(other) in (None, backend)]
        waiting.extend(names)
        if parent := name.rpartition(".")[0]:  # importing a module runs the packages above it
            waiting.append(parent)
    return frozenset(reached)


def with_data(files: Iterable[Path]) -> list[Path]:
    """Return modules and the files of code that they read, sorted."""
    files = set(files)
    for folder in {path.parent for path in files}:
        files.update(_data(folder))
    return sorted(files)


@functools.cache
def _data(folder: Path) -> tuple[Path, ...]:
    data_folders = [path for path in folder.iterdir() if path.is_dir() and not any(path.glob("*.py"))]
    files: list[Path] = []
    for place in (folder, *data_folders):
        files += [path for path in place.iterdir() if path.suffix in _DATA]
    return tuple(files)


def third_party(files: Iterable[Path]) -> set[str]:
    imported = set().union(*map(imports, files))
    roots = {name.partition(".")[0] for name in imported}
    outside = roots - {*PACKAGES} - set(sys.stdlib_module_names)
    names = {re.sub(r"[-_.]+", "-", _DISTRIBUTIONS.get(root, root)).lower() for root in outside}
    return names.union(*(_LOADS.get(owner, ()) for owner in names))


@functools.cache
def _backend_of(module: str) -> str | None:
    for name, package in backend_packages().items():
        if f"{module}.".startswith(f"{package}."):
            return name
    return None
