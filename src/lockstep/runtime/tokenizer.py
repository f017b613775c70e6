"""Text to token ids and back, with the checkpoint's tokenizer.json.

Streams whole characters only.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.artifacts.assembly import load_tokenizer
from lockstep.artifacts.files import sha256_file
from lockstep.errors import CheckError, InputError


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
    model, added = value["model"], value.get("added_tokens") or []
    pre = _parts(value.get("pre_tokenizer"), "pretokenizers")
    normalizers = _parts(value.get("normalizer"), "normalizers")
    if model.get("type") != "BPE" or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    keeps = lambda each: each["type"] in _KEEPING or (each["type"] == "Split" and each["behavior"] != "Removed")
    if not all(map(keeps, pre)):
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
    entry = load_tokenizer(assembly_json)
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
        self._lengths: dict[int, int] = {}  # of the texts of single tokens, as they are asked for

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

    def length(self, tokens: Sequence[int]) -> int:
        """Return the number of characters of `decode`; those of one token are kept."""
        if len(tokens) != 1:
            return len(self.decode(tokens))
        found = self._lengths.get(tokens[0])
        if found is None:
            found = self._lengths[tokens[0]] = len(self.decode(tokens))
        return found

    def token_text(self, token: int) -> str:
        """Return the text of one token behind others, that of a special token too.

        A decoder may take the space off the first token of a text, so the token is decoded behind itself.
        """
        with _one_line(f"{self._path}: expected a tokenizer.json, found "):
            decode = lambda count: self._tokenizer.decode([int(token)] * count, skip_special_tokens=False)
            return decode(2)[len(decode(1)) :]

    def stream(self, context: Sequence[int] = ()) -> TextStream:
        """Return a fresh stream for one request's new tokens.

        context: tokens before them; of their text only a character that they leave unfinished is given.
        """
        return TextStream(self, context)


class TextStream:
    """Tokens in one at a time, text out as soon as its characters are whole.

    The pieces together are `decode` of all tokens, but for bytes that are no text, of which `decode` may make other
    replacement characters.

    A token's text depends on the one before it (spaces, bytes of a character), so both are decoded, and what the first
    alone gives is taken off. The tokenizers package's DecodeStream does the same, but raises when bytes turn out to be
    no text.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()):
        self._tokenizer = tokenizer
        whole = len(context)
        while whole and tokenizer.decode(context[:whole]).endswith("\N{REPLACEMENT CHARACTER}"):
            whole -= 1
        self._context = list(context[:whole])  # tokens whose text is out, the last that gave any
        self._pending = list(context[whole:])

    def push(self, token: int) -> str:
        """Return the text that this token completes.

        It is empty in the middle of a character.
        """
        self._pending.append(int(token))
        piece = self._text()
        if not piece or piece.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._context, self._pending = self._pending, []
        return piece

    def finish(self) -> str:
        """Return what is left.

        A character cut off by the end shows as the replacement character.
        """
        piece = self._text()
        self._context, self._pending = self._pending, []
        return piece

    def _text(self) -> str:
        return self._tokenizer.decode(self._context + self._pending)[self._tokenizer.length(self._context) :]
