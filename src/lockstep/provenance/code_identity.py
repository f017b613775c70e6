"""What a stage was made by, as digests: its own code and its pinned packages, found without importing either.

In: a module of this package that a stage enters by, and the pins of `envs/requirements.txt`. Out: hex digests for the
`params` of the stage's rule. Snakemake sees neither an edited module nor an edited pin; it does see changed `params`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from lockstep.artifacts.files import sha256_json
from lockstep.errors import InputError

PACKAGE = "lockstep"
# Rule -> the module that it enters the package by.
STAGES = {
    "fetch": "checkpoint.hub",
    "random_weights": "export.random_model",
    "resolve": "checkpoint",
    "architecture": "checkpoint",
    "convert": "weights",
    "export": "export",
    "validate": "verify.validate",
    "build": "backends",
    "compare": "verify.compare",
    "reference": "verify.golden.reference",
    "golden": "verify.golden.check",
    "summary": "report.summary",
    "plots": "report.plots",
}
SOURCES = Path(__file__).resolve().parents[1]  # of the package
_PINS = SOURCES.parents[1] / "envs" / "requirements.txt"
# Packages whose import name is not their own name.
_DISTRIBUTIONS = {"yaml": "pyyaml"}
# Packages that come with a GPU machine: no pin, since engines.json records the version that built and refuses another.
_ELSEWHERE = {"tensorrt", "cuda", "cudnn"}
# What these load when used, without an import that could be read in our code.
_BRINGS = {"torch": ("onnxscript", "onnx-ir", "onnx"), "transformers": ("tokenizers", "safetensors")}


def stage_key(entry: str, packages: Iterable[str] = ()) -> dict[str, str]:
    """The digests that a rule keeps in its `params`: of the code that `entry` reaches, and of the pins that this code
    imports.

    `packages` names those that are used without an import, such as a backend's.
    """
    return {
        "code": code_digest(entry),
        "environment": environment_digest(_with_brought(third_party(entry) | set(packages))),
    }


def packages_of(entry: str) -> set[str]:
    """Canonical names of the packages that the code of `entry` imports, and of what these load when used."""
    return _with_brought(third_party(entry))


def _with_brought(names: set[str]) -> set[str]:
    return names | {name for owner in names for name in _BRINGS.get(owner, ())}


def code_digest(entry: str) -> str:
    """Hex sha256 over the files of this package that `entry` ("split", "verify.golden.check") imports, directly or
    through others.

    Imports inside functions count too. Raises InputError when there is no such module.
    """
    return sha256_json(code_files(entry))


def code_files(entry: str) -> dict[str, str]:
    """Hex sha256 by file of this package that importing `entry` may load."""
    return {path.relative_to(SOURCES).as_posix(): _read(path).digest for path in module_files(entry)}


def pinned_packages(entry: str, pins: str | os.PathLike | None = None) -> dict[str, str]:
    """The pinned version of each package that the code of `entry` uses."""
    pinned = read_pins(pins or _PINS)
    return {name: pinned[name] for name in sorted(packages_of(entry))}


def installed_packages(entry: str) -> dict[str, str]:
    """The version of each package that the code of `entry` uses, as it is installed here (local parts such as +cpu left
    out); the pinned one of those that are not installed."""
    return {name: _installed(name) or version for name, version in pinned_packages(entry).items()}


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def environment_digest(packages: Iterable[str], pins: str | os.PathLike = _PINS) -> str:
    """Hex sha256 over the pins (`name==version`) of `packages`. Raises InputError for one that `pins` does not pin."""
    pinned = read_pins(pins)
    wanted = sorted({_canonical(name) for name in packages})
    for name in wanted:
        if name not in pinned:
            raise InputError(f"{pins}: expected a pin of {name}, found none; add the line {name}==VERSION")
    return sha256_json({name: pinned[name] for name in wanted})


def read_pins(path: str | os.PathLike = _PINS) -> dict[str, str]:
    """Version by canonical package name, of a requirements file in which each line is `name==version`, blank or a
    comment."""
    pins = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise InputError(
            f"{path}: expected the pinned packages, found no file; run in a checkout of the repository"
        ) from None
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if text:
            name, exact, version = text.partition("==")
            if not exact or not version.strip():
                raise InputError(f"{path}:{number}: expected name==version, found {text!r}; pin it")
            pins[_canonical(name)] = version.strip()
    return pins


def module_files(entry: str) -> list[Path]:
    """The files of this package that importing `entry` may load, sorted."""
    return sorted(_reach(f"{PACKAGE}.{entry}"))


def third_party(entry: str) -> set[str]:
    """Canonical names of the packages outside this one and the standard library that the code of `entry` imports."""
    roots = {name.partition(".")[0] for path in _reach(f"{PACKAGE}.{entry}") for name in _read(path).imports}
    outside = roots - {PACKAGE} - set(sys.stdlib_module_names) - _ELSEWHERE
    return {_canonical(_DISTRIBUTIONS.get(root, root)) for root in outside}


@functools.cache
def _reach(module: str) -> frozenset[Path]:
    start = _file_of(module)
    if start is None:
        raise InputError(f"{module}: expected a module of this package, found none")
    reached: set[Path] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _file_of(name)
        if path is None or path in reached:
            continue
        reached.add(path)
        parent = name.rpartition(".")[0]  # importing a module runs the packages above it
        waiting += [parent, *_read(path).imports] if parent else _read(path).imports
    return frozenset(reached)


def _file_of(module: str) -> Path | None:
    """The file of a module of this package; None for any other name, such as that of a function."""
    first, *parts = module.split(".")
    if first != PACKAGE:
        return None
    base = SOURCES.joinpath(*parts)
    return next((path for path in (base / "__init__.py", base.parent / f"{base.name}.py") if path.is_file()), None)


class _Source:
    """A module file: its digest, and the dotted names that it imports (`from a import b` gives `a` and `a.b`)."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        self.digest = hashlib.sha256(data).hexdigest()
        self.imports = tuple(_imports(ast.parse(data), _package_of(path)))


_read = functools.cache(_Source)


def _package_of(path: Path) -> list[str]:
    return [PACKAGE, *path.relative_to(SOURCES).parts[:-1]]


def _imports(tree: ast.AST, package: list[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(f"{PACKAGE}."):
            yield node.value  # a module that is imported by its name, as backends are


def _canonical(name: str) -> str:
    """PEP 503."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
