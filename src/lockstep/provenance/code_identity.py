"""The identity of a stage's code: digests of the modules that it may load, and the pins of the packages they import.

In: the module that a job enters by, and the pins of `envs/requirements.txt`. Out: hex digests for the `params` of the
stage's rule. Snakemake sees neither an edited module nor an edited pin; it does see changed `params`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from pathlib import Path

from lockstep.artifacts.files import sha256_json
from lockstep.backends.identity import versions
from lockstep.config.sources import REPOSITORY
from lockstep.errors import InputError
from lockstep.provenance.code_imports import SOURCES, reach, third_party, with_data

_PINS = REPOSITORY / "envs" / "requirements.txt"


def stage_key(entry: str, backend: str | None = None) -> dict[str, str]:
    """Return the digests that a rule keeps in its `params`: of the code, and of the pins of its packages.

    entry: the module of `lockstep` that a job enters by. backend: the one that it is for.
    """
    code = sha256_json(code_digests(entry, backend))
    return {"code": code, "environment": sha256_json(pinned_packages(entry, backend))}


def code_digests(entry: str, backend: str | None = None) -> dict[str, str]:
    """Return {folder of our packages: hex sha256 over names and bytes of the modules that a job may load}.

    Files outside of a package's folders have one each.
    """
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
    """Return the sha256 of a file. Its time and size are there for the function's cache: a new one is read again."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pinned_packages(entry: str, backend: str | None = None) -> dict[str, str]:
    """Return the pinned version of each package that a job imports. A machine's own packages have no pin."""
    pins = read_pins()
    return {name: pins[name] for name in sorted(third_party(reach(entry, backend)) & pins.keys())}


def installed_packages(entry: str, backend: str | None = None) -> dict[str, str]:
    """Return the installed version of each package that a job imports.

    Local parts such as +cpu are left out. Of packages that are not installed it is the pinned one.
    """
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
    """Return {canonical package name: version} of a requirements file.

    Each of its lines is `name==version`, with or without digests of files, blank or a comment.
    """
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


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
