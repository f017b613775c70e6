"""The identity of a stage's code: digests of its modules and pinned packages.

They are found without importing either. In: a module of this package that a stage enters by, and the pins of
`envs/requirements.txt`. Out: hex digests for the `params` of the stage's rule. Snakemake sees neither an edited module
nor an edited pin; it does see changed `params`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from lockstep.artifacts.files import sha256_json
from lockstep.errors import InputError
from lockstep.pipeline.engine_jobs import versions
from lockstep.provenance import parsed_modules

PACKAGE = "lockstep"
SOURCES = Path(__file__).resolve().parents[1]  # of the package
_PINS = SOURCES.parents[1] / "envs" / "requirements.txt"
# Packages whose import name is not their own name.
_DISTRIBUTIONS = {"yaml": "pyyaml", "google": "protobuf", "grpc": "grpcio"}
# What these load when used, without an import that could be read in our code.
_BRINGS = {"torch": ("onnxscript", "onnx-ir", "onnx"), "transformers": ("tokenizers", "safetensors")}


def stage_key(entry: str, backend: str | None = None) -> dict[str, str]:
    """Return the digests that a rule keeps in its `params`.

    Of the code that `entry` reaches, and of the pins that this code imports. backend: the one that the job is for.
    """
    return {"code": code_digest(entry, backend), "environment": environment_digest(packages_of(entry, backend))}


def packages_of(entry: str, backend: str | None = None) -> set[str]:
    """Return the canonical names of the packages that the code of `entry` uses.

    Those that it imports, and what these load when used.
    """
    names = third_party(entry, backend)
    return names | {name for owner in names for name in _BRINGS.get(owner, ())}


def code_digest(entry: str, backend: str | None = None) -> str:
    """Return the hex sha256 over the code of the files that `entry` imports.

    Files of this package, imported directly or through others; entry: such as "export" or "verify.golden.check".
    Imports inside functions count too. Raises InputError when there is no such module.
    """
    return sha256_json(code_files(entry, backend))


def code_files(entry: str, backend: str | None = None) -> dict[str, str]:
    """Return the hex sha256 of the code by file that importing `entry` may load.

    Files of this package, without what only other backends than `backend` load; code without comments, docstrings and
    blank lines.
    """
    return {path.relative_to(SOURCES).as_posix(): _read(path).digest for path in module_files(entry, backend)}


def pinned_packages(entry: str, backend: str | None = None, pins: str | os.PathLike | None = None) -> dict[str, str]:
    """Return the pinned version of each package that the code of `entry` uses."""
    pinned = read_pins(pins or _PINS)
    return {name: pinned[name] for name in sorted(packages_of(entry, backend))}


def installed_packages(entry: str, backend: str | None = None) -> dict[str, str]:
    """Return the installed version of each package that the code of `entry` uses.

    Local parts such as +cpu are left out. Of packages that are not installed it is the pinned one.
    """
    pinned = pinned_packages(entry, backend)
    found = versions(list(pinned))
    return {name: found.get(name, version) for name, version in pinned.items()}


def untested() -> str | None:
    """Return a line where transformers is another than the one of the tests.

    Graphs and references are of what it traces and computes.
    """
    found, tested = versions(["transformers"]).get("transformers"), read_pins()["transformers"]
    if found in (None, tested):
        return None
    return f"transformers {found} is installed, {tested} is tested: what it exports may differ, or be refused"


def environment_digest(packages: Iterable[str], pins: str | os.PathLike = _PINS) -> str:
    """Return the hex sha256 over the pins (`name==version`) of `packages`.

    Raises InputError for one that `pins` does not pin.
    """
    pinned = read_pins(pins)
    wanted = sorted({_canonical(name) for name in packages})
    for name in wanted:
        if name not in pinned:
            raise InputError(f"{pins}: expected a pin of {name}, found none; add the line {name}==VERSION")
    return sha256_json({name: pinned[name] for name in wanted})


def read_pins(path: str | os.PathLike = _PINS) -> dict[str, str]:
    """Return the version by canonical package name of a requirements file.

    Each of its lines is `name==version`, blank or a comment.
    """
    pins = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise InputError(
            f"{path}: expected the pinned packages, found no file; use the lockstep of a checkout (`make setup`)"
        ) from None
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].partition(";")[0].strip()  # without the platforms that it is for
        if text:
            name, exact, version = text.partition("==")
            if not exact or not version.strip():
                raise InputError(f"{path}:{number}: expected name==version, found {text!r}; pin it")
            pins[_canonical(name)] = version.strip()
    return pins


def module_files(entry: str, backend: str | None = None) -> list[Path]:
    """Return the files of this package that importing `entry` may load, sorted."""
    return sorted(_reach(f"{PACKAGE}.{entry}", backend))


def third_party(entry: str, backend: str | None = None) -> set[str]:
    """Return the canonical names of the packages that the code of `entry` imports.

    Without this package and the standard library.
    """
    roots = {name.partition(".")[0] for path in _reach(f"{PACKAGE}.{entry}", backend) for name in _read(path).imports}
    outside = roots - {PACKAGE} - set(sys.stdlib_module_names) - _unpinned()
    return {_canonical(_DISTRIBUTIONS.get(root, root)) for root in outside}


def _unpinned() -> set[str]:
    """Return modules of packages that come with the machine that a backend is for.

    They have no pin, since engines.json records the version that built and refuses another.
    """
    from lockstep.config.backends import backends  # loads pydantic

    return {name for settings in backends().values() for name in settings.unpinned}


@functools.cache
def _reach(module: str, backend: str | None = None) -> frozenset[Path]:
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
        imports = _read(path).imports
        if backend and _backend_of(name) is None:  # no job of one backend loads another, unless that one is built on it
            imports = tuple(other for other in imports if _backend_of(other) in (None, backend))
        waiting += [parent, *imports] if parent else imports
    return frozenset(reached)


def _backend_of(module: str) -> str | None:
    """Return the backend whose folder a module is in; None for other modules."""
    head, _, rest = module.partition(f"{PACKAGE}.backends.")
    name = rest.partition(".")[0]
    return name if not head and name and (SOURCES / "backends" / name).is_dir() else None


@functools.cache
def _file_of(module: str) -> Path | None:
    """Return the file of a module of this package.

    None for any other name, such as that of a function.
    """
    first, *parts = module.split(".")
    if first != PACKAGE:
        return None
    base = SOURCES.joinpath(*parts)
    return next((path for path in (base / "__init__.py", base.parent / f"{base.name}.py") if path.is_file()), None)


class _Source:
    """A module file: its digest, and the dotted names that it imports.

    The digest is also of the CUDA sources beside it that it names. `from a import b` gives `a` and `a.b`.
    """

    def __init__(self, path: Path) -> None:
        data, package = path.read_bytes(), _package_of(path)
        key = hashlib.sha256(".".join([*package, ""]).encode() + data).hexdigest()
        kept = parsed_modules.find(key)
        if kept is None:
            code, nodes = _parse(data)
            sources = _cuda_sources(path, nodes)
            digest = hashlib.sha256(b"".join([code, *(source.read_bytes() for source in sources)]))
            kept = {"digest": [digest.hexdigest()], "imports": list(_imports(nodes, package)), "texts": _texts(nodes)}
            if not sources:  # which may change while the module stays
                parsed_modules.keep(key, kept)
        (self.digest,) = kept["digest"]
        self.imports = (*kept["imports"], *(name for text in kept["texts"] for name in _named(text)))


_read = functools.cache(_Source)


@functools.cache
def _parse(data: bytes) -> tuple[bytes, list[ast.AST]]:
    """Return a module's code and the nodes that may name another file.

    By content: each put into the artefact cache reads all files again.
    """
    nodes = list(ast.walk(ast.parse(data)))
    return _code(data, nodes), [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom, ast.Constant))]


def digest_of(path: Path) -> str:
    """Return the hex sha256 of the code in the file `path` as it is now."""
    return _Source(path).digest


def _cuda_sources(path: Path, nodes: list[ast.AST]) -> list[Path]:
    """Return the files beside a module whose names stand in it, in that order.

    Such as `kernel.cu`.
    """
    texts = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [path.with_name(text) for text in texts if re.fullmatch(r"\w+\.cu", text) and path.with_name(text).is_file()]


def _code(data: bytes, nodes: list[ast.AST]) -> bytes:
    """Return a module without what changes nothing.

    Comments, docstrings; outside of strings blank lines, and spaces at the ends of lines. Not by `ast.unparse`, which
    differs between versions of Python, nor the tokenizer, which is slower than the parser.
    """

    def kept(found: re.Match[bytes]) -> bytes:  # a line that ends in a string is marked: all of it stays
        return found[0].replace(b"\n", b"\0\n") if found[1] else b""

    lines = _STRING_OR_COMMENT.sub(kept, data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")).split(b"\n")
    for node in nodes:
        if not isinstance(node, _WITH_DOCSTRING) or not node.body or not isinstance(node.body[0], ast.Expr):
            continue
        value = node.body[0].value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            first, last = value.lineno - 1, value.end_lineno or value.lineno
            lines[first:last] = [lines[first][: value.col_offset]] + [b""] * (last - first - 1)
    return b"\n".join(line.rstrip() for line in lines if line.strip())


# Of code that parses: what opens a string outside of strings and comments, to its end; or a comment.
_STRING_OR_COMMENT = re.compile(rb"""(\"{3}|'{3}|"|')(?:\\.|(?!\1).)*\1|#[^\r\n]*""", re.DOTALL)
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _package_of(path: Path) -> list[str]:
    return [PACKAGE, *path.relative_to(SOURCES).parts[:-1]]


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
    """Return texts that may name modules of this package.

    These are imported by name, as backends are.
    """
    texts = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [text for text in texts if text.startswith(f"{PACKAGE}.")]


def _named(text: str) -> list[str]:
    """Return the modules that a text names: `a.*.c` is module c of each package in a."""
    if "*" not in text:
        return [text]
    found = sorted(SOURCES.glob(text.removeprefix(f"{PACKAGE}.").replace(".", "/") + ".py"))
    return [".".join((PACKAGE, *path.relative_to(SOURCES).with_suffix("").parts)) for path in found]


def _canonical(name: str) -> str:
    """Return the canonical name of a package (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
