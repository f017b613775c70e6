"""The identity of a stage's code: digests of the parts of this package that it uses, and the pins of its packages.

In: the parts and packages that the stage names, and the pins of `envs/requirements.txt`. Out: hex digests for the
`params` of the stage's rule. Snakemake sees neither an edited module nor an edited pin; it does see changed `params`.
`tests/unit/test_buildkey.py` follows the imports, and holds what stages name to it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from lockstep.artifacts.files import sha256_json
from lockstep.backends.identity import versions
from lockstep.config.sources import REPOSITORY
from lockstep.errors import InputError

SOURCES = Path(__file__).resolve().parents[1]  # of the package
_PINS = REPOSITORY / "envs" / "requirements.txt"


def stage_key(parts: Sequence[str], packages: Iterable[str], backend: str | None = None) -> dict[str, str]:
    """Return the digests that a rule keeps in its `params`: of `code_digests`, and of the pins of `packages`."""
    return {"code": sha256_json(code_digests(parts, backend)), "environment": sha256_json(pinned_packages(packages))}


def code_digests(parts: Sequence[str], backend: str | None = None) -> dict[str, str]:
    """Return the hex sha256 of each part of this package.

    parts: folders with all below (`verify/golden`), the files of a folder (`verify/*`), or one file (`targets.py`).
    backend: the one that a job is for, whose folder is a part too, and what it is built on.
    """
    return {part: part_digest(part) for part in sorted({*parts, *_parts_of(backend)})}


def _parts_of(backend: str | None) -> tuple[str, ...]:
    if backend is None:
        return ()
    from lockstep.config.backends import backends  # loads pydantic

    return (f"backends/{backend}", *backends()[backend].built_on)


def files_of(part: str) -> list[Path]:
    """Return the Python and CUDA sources and templates of a part, sorted. Raises InputError where there is none."""
    place = SOURCES / part.removesuffix("/*")
    found = [place] if place.is_file() else place.glob("*.*" if part.endswith("/*") else "**/*.*")
    files = sorted(path for path in found if path.suffix in (".py", ".cu", ".html"))
    if not files:
        raise InputError(f"{part}: expected a part of this package, found no source in {place}")
    return files


def part_digest(part: str) -> str:
    """Return the hex sha256 over names and bytes of the sources of a part, as they are now."""
    files = files_of(part)
    return _digest(tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in files))


@functools.cache
def _digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Return the digest of files, with times and sizes that tell when they are to be read again."""
    digest = hashlib.sha256()
    for path, _, _ in files:
        digest.update(f"{path.relative_to(SOURCES).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def pinned_packages(packages: Iterable[str], pins: str | os.PathLike | None = None) -> dict[str, str]:
    """Return the pinned version of each of `packages`. Raises InputError for one that has no pin."""
    place = pins or _PINS
    pinned = read_pins(place)
    wanted = sorted({_canonical(name) for name in packages})
    for name in wanted:
        if name not in pinned:
            raise InputError(f"{place}: expected a pin of {name}, found none; add the line {name}==VERSION")
    return {name: pinned[name] for name in wanted}


def installed_packages(packages: Iterable[str]) -> dict[str, str]:
    """Return the installed version of each of `packages`.

    Local parts such as +cpu are left out. Of packages that are not installed it is the pinned one.
    """
    pinned = pinned_packages(packages)
    return {**pinned, **{name: version for name, version in versions(list(pinned)).items() if name in pinned}}


def untested() -> str | None:
    """Return a line where transformers is another than the one of the tests.

    Graphs and references are of what it traces and computes.
    """
    found = versions(["transformers"]).get("transformers")
    tested = read_pins()["transformers"]
    if found in (None, tested):
        return None
    return f"transformers {found} is installed, {tested} is tested: what it exports may differ, or be refused"


def read_pins(path: str | os.PathLike = _PINS) -> dict[str, str]:
    """Return the version by canonical package name of a requirements file.

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
