"""A cache of what was read in each module of this package, between processes.

To parse all takes a second of each start. In: a key that is of a module's bytes, and texts by name. Out: the same texts
in a later process. They lie beside Python's bytecode and under its terms: nothing is kept where PYTHONDONTWRITEBYTECODE
is set or the folder cannot be written, and the file may be deleted at any time.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.artifacts.files import read_json, sha256_file, write_json
from lockstep.errors import InputError

Texts = Mapping[str, Sequence[str]]

_READER = Path(__file__).with_name("code_identity.py")  # another one may read something else in the same module


def find(key: str) -> Texts | None:
    """Return what `keep` was given for the key.

    None where it was not, or where its file is damaged.
    """
    kept = _kept()
    found = kept.before.get(key)
    if found is not None:
        kept.now[key] = found
    return found


def keep(key: str, texts: Texts) -> None:
    """Keep `texts` when this process ends."""
    kept = _kept()
    kept.now[key] = texts
    if not kept.is_new:
        kept.is_new = True
        atexit.register(kept.save)


class _Kept:
    """before: what the file had when this process began. now: what was asked for."""

    def __init__(self) -> None:
        self.place = Path(importlib.util.cache_from_source(__file__)).with_suffix(".json")
        self.reader, self.is_new = sha256_file(_READER), False
        self.now: dict[str, Texts] = {}
        self.before: dict[str, Texts] = self._read()

    def _read(self) -> dict[str, Any]:
        try:
            value = read_json(self.place)
        except (InputError, OSError):
            return {}
        fits = isinstance(value, dict) and value.get("reader") == self.reader and isinstance(value.get("modules"), dict)
        return {key: texts for key, texts in value["modules"].items() if _is_texts(texts)} if fits else {}

    def save(self) -> None:
        """Put what is new beside what another process may have kept since.

        Of a module that was edited, the newest of a few stay.
        """
        if sys.dont_write_bytecode:
            return
        modules = {**self._read(), **self.now}
        if len(modules) > 2 * len(self.now) + 1000:
            modules = self.now
        try:
            self.place.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.place, {"reader": self.reader, "modules": modules})
        except (InputError, OSError):
            return  # a folder that cannot be written, a full disk: it is parsed again next time


_kept = functools.cache(_Kept)


def _is_texts(value: Any) -> bool:
    names = ("digest", "imports", "texts")
    return isinstance(value, dict) and all(
        isinstance(value.get(name), list) and all(isinstance(text, str) for text in value[name]) for name in names
    )
