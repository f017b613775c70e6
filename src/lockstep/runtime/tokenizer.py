"""Text to token ids and back, with the checkpoint's tokenizer.json."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.artifacts.assembly import TextFiles
from lockstep.artifacts.files import sha256_file
from lockstep.errors import CheckError, InputError
from lockstep.runtime.pieces import Pieces
from lockstep.runtime.text_stream import TextStream


@contextlib.contextmanager
def _one_line(expected: str) -> Iterator[None]:
    """Raise what the tokenizers package raises as InputError.

    The message opens with `expected`. The package raises bare Exception, and where its Rust code panics something that
    is none.
    """
    try:
        yield
    except BaseException as error:
        raise _said(expected, error) from None


def _said(expected: str, error: BaseException) -> BaseException:
    """Return what the tokenizers package raised, as `_one_line` raises it."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        return error
    return InputError(f"{expected}{' '.join(str(error).split())}")


_KEEPING = ("ByteLevel", "Metaspace", "Digits")  # pre-tokenizers that drop nothing
_NFC_SHRINKS = 4  # NFC makes at most 4 characters (of Greek with three marks) one


def _longest_token(value: Mapping[str, Any]) -> int | None:
    """Return the most characters of a text that one token may stand for.

    value: a tokenizer.json. None: any number. Known of BPE whose vocabulary has all bytes, so that no character is
    dropped and no run of them is one unknown token, with normalizers and pre-tokenizers that drop nothing.
    """
    model = value["model"]
    added = value.get("added_tokens") or []
    pre = _parts(value.get("pre_tokenizer"), "pretokenizers")
    normalizers = _parts(value.get("normalizer"), "normalizers")
    if model.get("type") != "BPE" or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    for each in pre:
        if each["type"] not in _KEEPING and (each["type"] != "Split" or each["behavior"] == "Removed"):
            return None
    vocabulary = model["vocab"]
    if any(each["type"] == "ByteLevel" for each in pre):
        from tokenizers.pre_tokenizers import ByteLevel

        has_all_bytes = all(byte in vocabulary for byte in ByteLevel.alphabet())
    else:
        has_all_bytes = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    shrinks = 1
    for each in normalizers:
        pattern = (each.get("pattern") or {}).get("String") if each["type"] == "Replace" else None
        if each["type"] == "NFC":
            shrinks *= _NFC_SHRINKS
        elif each["type"] != "Prepend" and not (pattern and len(pattern) <= len(each["content"])):
            return None
    if not has_all_bytes:
        return None
    return shrinks * max(max(map(len, vocabulary)), max((len(token["content"]) for token in added), default=0))


def _parts(value: Mapping[str, Any] | None, key: str) -> Sequence[Mapping[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer in order."""
    if value is None:
        return ()
    return [part for each in value[key] for part in _parts(each, key)] if value["type"] == "Sequence" else (value,)


def tokenizer_path(assembly_json: str | os.PathLike) -> Path:
    """Return the file of the tokenizer that an assembly names.

    Raises InputError where it names none, CheckError for a file that is not the one that was exported.
    """
    entry = TextFiles.load(assembly_json).tokenizer
    if entry is None:
        raise InputError(
            f"{assembly_json}: expected a tokenizer, found none; put tokenizer.json beside "
            f"the checkpoint's weights and export again"
        )
    path = Path(assembly_json).parent / entry.file
    if path.is_file() and (found := sha256_file(path)) != entry.sha256:
        raise CheckError(f"{path}: sha256: expected {entry.sha256}, found {found}; export again")
    return path


class Tokenizer:
    """The tokenizer of an assembly."""

    def __init__(self, path: str | os.PathLike):
        """Open a tokenizer.json.

        Raises InputError for a file that is absent or not a tokenizer, or when the tokenizers package is missing.
        """
        try:
            import tokenizers
        except ModuleNotFoundError:
            raise InputError(
                "text: needs the Python package 'tokenizers', which is not installed here; install it"
            ) from None
        if not Path(path).is_file():
            raise InputError(
                f"{path}: expected a tokenizer, found no file; put tokenizer.json beside the "
                f"checkpoint's weights and export again"
            )
        self._path = path
        # encode_batch_fast counts as parallel: without a word from the user tokenizers would warn at the next fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        with _one_line(f"{path}: expected a tokenizer.json, found "):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
            # Limits of the training set-up; here the runtime's own limits hold, and nothing is cut without a word.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self.pieces = Pieces(self._tokenizer)

    @classmethod
    def open(cls, assembly_json: str | os.PathLike) -> Tokenizer:
        """Open the tokenizer that the assembly names.

        Raises CheckError when its file is not the one that was exported.
        """
        return cls(tokenizer_path(assembly_json))

    def encode(self, text: str, special: bool = True) -> np.ndarray:
        """Return the token ids of a text, int64 [num_tokens].

        special: with the tokens that the tokenizer adds to a prompt. Raises InputError for text that is not Unicode,
        and for a text that the tokenizer fails on.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"prompt: expected text in UTF-8, found {text[error.start : error.end]!r} at character {error.start};"
                " correct it"
            ) from None
        with _one_line(f"prompt: expected a text that {self._path} can split, found {text[:40]!r}: "):
            # The ids of `encode`, without its offsets, and without Python's global lock: other threads run on.
            (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
            return np.array(found.ids, np.int64)

    @functools.cached_property
    def _longest(self) -> int | None:
        """Return `_longest_token` of this tokenizer.

        It reads the whole vocabulary, 80 ms for 65,000 words, which only servers need.
        """
        with _one_line(f"{self._path}: expected a tokenizer.json, found "):
            return _longest_token(json.loads(self._tokenizer.to_str()))

    @property
    def vocabulary(self) -> dict[str, int]:
        """Return all tokens by their names."""
        return self._tokenizer.get_vocab()

    def min_tokens(self, num_characters: int) -> int:
        """Return a lower bound of the tokens of any text of so many characters.

        It is 0 where nothing is known.
        """
        return 0 if self._longest is None else -(-num_characters // self._longest)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of token ids, without special tokens."""
        try:  # not a context manager: a server is here for each token
            return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)
        except BaseException as error:
            raise _said(f"{self._path}: expected a tokenizer.json, found ", error) from None

    def decode_whole(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, with those of special tokens.

        As `encode` it lets other threads run on.
        """
        with _one_line(f"{self._path}: expected a tokenizer.json, found "):
            (found,) = self._tokenizer.decode_batch([tokens], skip_special_tokens=False)
            return found

    def names(self, tokens: Iterable[int]) -> list[str]:
        """Return the vocabulary's names of tokens; "" for an id that has none."""
        name = self._tokenizer.id_to_token
        return [name(token) or "" for token in tokens]

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token behind others, those of a special token's name too."""
        if piece := self.pieces.behind(token):
            return piece
        one, two = (self._tokenizer.decode([int(token)] * count, skip_special_tokens=False) for count in (1, 2))
        return two[len(one) :].encode()

    def token_text(self, token: int) -> str:
        """Return `token_bytes` as text; parts of characters show as replacement characters."""
        return self.token_bytes(token).decode(errors=self.pieces.errors)

    def spellings(self, text: str) -> list[tuple[int, ...]]:
        """Return the ways in which the tokenizer splits a word in a text.

        At the beginning, behind a space and behind a line's end; each once. Raises InputError, as `encode`.
        """

        def encode(text: str) -> tuple[int, ...]:
            return tuple(self.encode(text, special=False).tolist())

        found = [encode(text), encode(text if text[:1].isspace() else f" {text}")]
        before = encode("\n")
        behind = encode(f"\n{text}")
        if behind[: len(before)] == before:
            found.append(behind[len(before) :])
        return [tokens for tokens in dict.fromkeys(found) if tokens]

    def token_id(self, name: str) -> int | None:
        """Return the token whose name in the vocabulary is `name`; None where there is none."""
        return self._tokenizer.token_to_id(name)

    def silent(self, names: Iterable[str]) -> dict[int, str]:
        """Return those of some names that are special tokens, which a text leaves out, by id."""
        found = {token: name for name in names if (token := self.token_id(name)) is not None}
        return {token: name for token, name in found.items() if self.pieces.is_silent(token)}

    def stream(
        self, context: Sequence[int] | np.ndarray = (), owed: bool = False, shown: Mapping[int, str] = {}
    ) -> TextStream:
        """Return a fresh stream for the tokens behind a context, as `TextStream` says."""
        return TextStream(self.pieces, context, owed, shown)

    def text(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, without a character that they leave unfinished."""
        return self.pieces.text(map(int, tokens))
