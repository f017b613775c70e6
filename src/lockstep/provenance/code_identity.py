"""The identity of a stage's code: digests of the modules that it may load, and the pins of the packages they import.

In: the module that a job enters by, and the pins of `envs/requirements.txt`. Out: hex digests for the `params` of the
stage's rule. Snakemake sees neither an edited module nor an edited pin; it does see changed `params`.

Imports are read from the text of each module without importing it. Imports in functions count, and so do modules that
a text names ("lockstep.backends.*.backend"), and what `load_plugin` loads. Texts are searched, not parsed: a plan asks
for all stages, of which the syntax trees alone would take longer than the rest of it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from lockstep.artifacts.files import sha256_json
from lockstep.backends.identity import versions
from lockstep.config.sources import REPOSITORY
from lockstep.errors import InputError
from lockstep.plugins import backend_packages, entry_points

SOURCES = Path(__file__).resolve().parents[2]  # the folder of our packages
PACKAGES = ("lockstep", "lockstep_gpu", "lockstep_serve")
_DISTRIBUTIONS = {"yaml": "pyyaml", "google": "protobuf", "grpc": "grpcio"}  # {import name: another name to install}
# Packages that these load when used, without an import in our code.
_LOADS = {"torch": ("onnxscript", "onnx-ir", "onnx"), "transformers": ("tokenizers", "safetensors")}
_DATA = (".cu", ".cuh", ".html")  # files that modules read, from their folder or one below it that holds no module
_TYPE_CHECKING_BLOCK = re.compile(r"^if TYPE_CHECKING:\n(?:(?:[ \t].*)?\n)+", re.MULTILINE)
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(?:\(([^)]*)\)|([^\n]*))|import[ \t]+([^\n]*))", re.MULTILINE
)
_QUOTED_MODULE = re.compile(r"""["'](lockstep(?:_gpu|_serve)?\.[\w.*]+)(?::\w+)?["']""")
_PLUGIN = re.compile(r"""\bload_plugin\("(\w+)", "(\w+)"\)""")
_PINS = REPOSITORY / "envs" / "requirements.txt"


def stage_key(entry: str, backend: str | None = None) -> dict[str, str]:
    """Return the digests that a rule keeps in its `params`: of the code, and of the pins of its packages.

    entry: the module of `lockstep` that a job enters by. backend: the one that it is for.
    """
    code = sha256_json(code_digests(entry, backend))
    return {"code": code, "environment": sha256_json(pinned_packages(entry, backend))}


def code_digests(entry: str, backend: str | None = None) -> dict[str, str]:
    """Return {folder of our packages, or file outside of one: hex sha256 of the modules that a job may load}."""
    digests: dict[str, hashlib._Hash] = {}
    for path in with_data(reach(entry, backend)):
        place = path.relative_to(SOURCES)
        folder = place.as_posix()
        if len(place.parts) > 2:
            folder = place.parent.as_posix()
        status = path.stat()
        line = f"{place.as_posix()}\0{_digest(path, status.st_mtime_ns, status.st_size)}\0"
        digests.setdefault(folder, hashlib.sha256()).update(line.encode())
    return {folder: digest.hexdigest() for folder, digest in sorted(digests.items())}


@functools.cache
def _digest(path: Path, mtime_ns: int, size: int) -> str:
    """Return the sha256 of a file. Time and size are keys of the function's cache: an edited file is read again."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pinned_packages(entry: str, backend: str | None = None) -> dict[str, str]:
    """Return the pinned version of each package that a job imports. A machine's own packages have no pin."""
    pins = read_pins()
    return {name: pins[name] for name in sorted(third_party(reach(entry, backend)) & pins.keys())}


def installed_packages(entry: str, backend: str | None = None) -> dict[str, str]:
    """Return the installed version, without parts as +cpu, else the pinned one, of each package that a job imports."""
    pinned = pinned_packages(entry, backend)
    return {**pinned, **{name: version for name, version in versions(list(pinned)).items() if name in pinned}}


def untested() -> str | None:
    """Return a line where another transformers is installed than in the tests. Graphs and references depend on it."""
    installed = versions(["transformers"]).get("transformers")
    tested = read_pins()["transformers"]
    if installed in (None, tested):
        return None
    return f"transformers {installed} is installed, {tested} is tested: its exports may differ, or be refused"


def read_pins(path: str | os.PathLike = _PINS) -> dict[str, str]:
    """Return {canonical package name: version} of a requirements file of lines `name==version`, with digests or not."""
    pins = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise InputError(
            f"{path}: expected the pinned packages, found no file; install the wheel again, or use a checkout"
        ) from None
    for number, line in enumerate(lines, start=1):
        text = re.split(r"#|;| --hash=", line)[0].strip()  # without the platforms that it is for
        if text:
            name, exact, version = text.partition("==")
            if not exact or not version.strip():
                raise InputError(f"{path}:{number}: expected name==version, found {text!r}; pin it")
            pins[_canonical(name)] = version.strip()
    return pins


@functools.cache
def imports(path: Path, with_types: bool = False) -> frozenset[str]:
    """Return the dotted names that a module imports; `from a import b` gives `a` and `a.b`."""
    text = path.read_text(encoding="utf-8")
    if not with_types:
        text = _TYPE_CHECKING_BLOCK.sub("", text)
    names: set[str] = set()
    for module, block, line, plain in _IMPORT.findall(text):
        imported = list(_imported_names(block or line or plain))
        if module:
            # `b` of `from a import b` may be a module: `file_of` finds no file for other names.
            imported = [module, *(f"{module}.{name}" for name in imported)]
        names.update(imported)
    for quoted in _QUOTED_MODULE.findall(text):
        names.update(_expand_backends(quoted))
    for group, name in _PLUGIN.findall(text):
        if name in entry_points(group):
            names.add(entry_points(group)[name].module)
    return frozenset(names)


def _imported_names(text: str) -> Iterator[str]:
    """Yield the names of "a, b as c", without comments between them."""
    for part in re.sub(r"#[^\n]*", "", text).split(","):
        words = part.split()
        if words and re.fullmatch(r"[\w.]+", words[0]):
            yield words[0]


def _expand_backends(text: str) -> list[str]:
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
        # Shared code names the modules of all backends; a backend may itself build on another one.
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
    names = {_canonical(_DISTRIBUTIONS.get(root, root)) for root in outside}
    return names.union(*(_LOADS.get(owner, ()) for owner in names))


@functools.cache
def _backend_of(module: str) -> str | None:
    for name, package in backend_packages().items():
        if f"{module}.".startswith(f"{package}."):
            return name
    return None


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
