"""The metadata and the table of tensors of a GGUF file.

In: a file as llama.cpp writes it, versions 2 and 3, little-endian. Out: its keys and values, and each tensor's place.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Tensors are not read.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import InputError

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # version 1 counts in 32 bits; a big-endian file shows as one of millions
_ALIGNMENT = 32  # the format's, where the file says none
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_MAX_DIMENSIONS = 4  # ggml's: more in a file are damage
# (names, values in words, whether a value is one) for the keys that are read here, as the format's page has them; the
# first row whose names match counts.
_TYPES: tuple[tuple[re.Pattern[str], str, Any], ...] = (
    (re.compile(r"general\.alignment"), "a multiple of 8", lambda value: _is_count(value) and value and not value % 8),
    (re.compile(r"split\.count|tokenizer\.ggml\.\w+_token_id"), "a whole number", lambda value: _is_count(value)),
    (re.compile(r"tokenizer\.ggml\.(tokens|merges)"), "a list of texts", lambda value: _is_list(value, str)),
    (re.compile(r"tokenizer\.ggml\.scores"), "a list of numbers", lambda value: _is_list(value, float)),
    (re.compile(r"tokenizer\.ggml\.token_type"), "a list of whole numbers", lambda value: _is_list(value, int)),
    (re.compile(r"tokenizer\.ggml\.(add_|remove_)\w+"), "true or false", lambda value: isinstance(value, bool)),
    (
        re.compile(r"tokenizer\.ggml\.(model|pre)|tokenizer\.chat_template|.*\.rope\.scaling\.type"),
        "a text",
        lambda value: isinstance(value, str),
    ),
    (
        re.compile(r".*\.(attention\.key_length|rope\.freq_base|\w+_softcapping)"),
        "a positive number",
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value > 0,
    ),
    (re.compile(r".*\.attention\.sliding_window"), "a whole number", lambda value: _is_count(value)),  # 0: no window
)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_list(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's place in the file.

    shape: as in torch, the last dimension contiguous. type: ggml's number of how it is stored. offset: bytes from the
    start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True)
class GgufFile:
    """The metadata of a GGUF file, and the places of its tensors."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        return self.metadata["general.architecture"]


def read_gguf(path: Path, arrays: bool = True) -> GgufFile:
    """Read metadata and table of tensors of a file.

    arrays: whether arrays are read too, such as the vocabulary; else they are passed over and left out. Raises
    InputError for a file that is no GGUF, is cut short, or is one part of several.
    """
    try:
        with open(path, "rb") as file:
            magic = file.read(len(_MAGIC))
            # Read before mapping, which fails for an empty file.
            if magic != _MAGIC:
                raise InputError(f"expected a GGUF file, which opens with {_MAGIC!r}, at {path}; found {magic!r}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, arrays).read()
    except OSError as error:
        raise InputError(f"expected a readable file at {path}; found {error.strerror}") from None


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap, arrays: bool) -> None:
        self.path = path
        self.data = data
        self.arrays = arrays
        self.at = len(_MAGIC)

    def read(self) -> GgufFile:
        try:
            version = self._take("I")
            if version not in _VERSIONS:
                raise self._refused("a GGUF file of version 2 or 3, little-endian", f"version {version}")
            tensors = self._take("Q")
            keys = self._take("Q")
            metadata = {}
            for _ in range(keys):
                key = self._string()
                kind = self._take("I")
                if (value := self._value(kind)) is not None:
                    metadata[key] = value
            table = [self._tensor() for _ in range(tensors)]
        except (struct.error, UnicodeDecodeError, OverflowError):
            raise self._refused("a whole GGUF file", f"{len(self.data)} bytes whose header ends beyond them") from None
        if not isinstance(metadata.get("general.architecture"), str):
            raise self._refused("a model", "no general.architecture")
        for key, value in metadata.items():
            rules = ((words, is_valid) for names, words, is_valid in _TYPES if names.fullmatch(key))
            words, is_valid = next(rules, ("", lambda value: True))
            if not is_valid(value):
                raise self._refused(f"{words} as {key}", repr(value)[:60])
        parts = metadata.get("split.count", 1)
        if parts > 1:
            raise self._refused("a model in one file", f"one of {parts} parts; join them by llama-gguf-split --merge")
        # Offsets of tensors are relative to the end of the header, rounded up.
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        start = -(-self.at // alignment) * alignment
        placed = tuple(GgufTensor(name, shape, kind, start + offset) for name, shape, kind, offset in table)
        if placed and max(tensor.offset for tensor in placed) >= len(self.data):
            raise self._refused("a whole GGUF file", f"{len(self.data)} bytes, which end before its tensors do")
        return GgufFile(self.path, metadata, placed)

    def _refused(self, expected: str, fault: str) -> InputError:
        return InputError(f"expected {expected} at {self.path}; found {fault}")

    def _take(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def _string(self) -> str:
        length = self._take("Q")
        # A slice past the end would silently be shorter.
        if self.at + length > len(self.data):
            raise struct.error
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def _value(self, kind: int) -> Any:
        """Return a value; None for an array that is passed over."""
        if kind in _SCALARS:
            return self._take(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._refused("a GGUF file", f"a value of the unknown type {kind} in its metadata")
        element = self._take("I")
        count = self._take("Q")
        if element in _SCALARS:
            size = struct.calcsize(f"<{_SCALARS[element]}") * count
            if self.at + size > len(self.data):
                raise struct.error
            self.at += size
            # Unpacking a vocabulary takes seconds.
            if not self.arrays:
                return None
            return list(struct.unpack_from(f"<{count}{_SCALARS[element]}", self.data, self.at - size))
        if element != _STRING:
            raise self._refused("a GGUF file", f"an array of the unknown type {element} in its metadata")
        if self.arrays:
            return [self._string() for _ in range(count)]
        for _ in range(count):
            length = self._take("Q")
            self.at += length
        return None

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._take("I")
        if dimensions > _MAX_DIMENSIONS:
            raise self._refused("a GGUF file", f"a tensor {name!r} of {dimensions} dimensions")
        # ggml lists the contiguous dimension first.
        shape = tuple(reversed([self._take("Q") for _ in range(dimensions)]))
        return name, shape, self._take("I"), self._take("Q")
