"""Text to token ids and back, with the checkpoint's tokenizer.json.

`Tokenizer`: a whole text or all of its ids at once. `TextStream`: tokens of an answer in, one at a time; text out once
no later token can change it. `Pieces`: what each token adds to a text, as UTF-8 that may end inside a character.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.artifacts.assembly import TextFiles
from lockstep.artifacts.files import sha256_file
from lockstep.errors import CheckError, InputError


@contextlib.contextmanager
def _one_line(expected: str) -> Iterator[None]:
    """Raise the errors of the tokenizers package as InputError, whose message starts with `expected`.

    The package raises bare Exception, and for a panic of its Rust code a BaseException.
    """
    try:
        yield
    except BaseException as error:
        raise _input_error(expected, error) from None


def _input_error(expected: str, error: BaseException) -> BaseException:
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        return error
    return InputError(f"{expected}{' '.join(str(error).split())}")


# Pre-tokenizers that drop no character.
_LOSSLESS = ("ByteLevel", "Metaspace", "Digits")
# NFC composes at most 4 characters (a Greek letter with three marks) into one.
_NFC_SHRINKS = 4


def _longest_token(value: Mapping[str, Any]) -> int | None:
    """Return the largest number of characters that one token of a tokenizer.json may cover; None if unbounded.

    It is bounded for BPE whose vocabulary has all bytes (so that no character is dropped and no run of them becomes one
    unknown token), with normalizers and pre-tokenizers that drop nothing.
    """
    model = value["model"]
    added = value.get("added_tokens") or []
    pre = _parts(value.get("pre_tokenizer"), "pretokenizers")
    normalizers = _parts(value.get("normalizer"), "normalizers")
    if model.get("type") != "BPE" or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    for step in pre:
        if step["type"] not in _LOSSLESS and (step["type"] != "Split" or step["behavior"] == "Removed"):
            return None
    vocabulary = model["vocab"]
    if any(step["type"] == "ByteLevel" for step in pre):
        from tokenizers.pre_tokenizers import ByteLevel

        has_all_bytes = all(byte in vocabulary for byte in ByteLevel.alphabet())
    else:
        has_all_bytes = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    shrinks = 1
    for step in normalizers:
        pattern = (step.get("pattern") or {}).get("String") if step["type"] == "Replace" else None
        if step["type"] == "NFC":
            shrinks *= _NFC_SHRINKS
        elif step["type"] != "Prepend" and not (pattern and len(pattern) <= len(step["content"])):
            return None
    if not has_all_bytes:
        return None
    return shrinks * max(max(map(len, vocabulary)), max((len(token["content"]) for token in added), default=0))


def _parts(value: Mapping[str, Any] | None, key: str) -> Sequence[Mapping[str, Any]]:
    if value is None:
        return ()
    if value["type"] != "Sequence":
        return (value,)
    parts: list[Mapping[str, Any]] = []
    for step in value[key]:
        parts += _parts(step, key)
    return parts


def tokenizer_path(assembly_json: str | os.PathLike) -> Path:
    """Return the path of an assembly's tokenizer.

    Raises InputError for an assembly without one, CheckError for another file than was exported.
    """
    entry = TextFiles.load(assembly_json).tokenizer
    if entry is None:
        raise InputError(
            f"{assembly_json}: expected a tokenizer, found none; put tokenizer.json next to "
            f"the checkpoint's weights and export again"
        )
    path = Path(assembly_json).parent / entry.file
    if path.is_file():
        digest = sha256_file(path)
        if digest != entry.sha256:
            raise CheckError(f"{path}: sha256: expected {entry.sha256}, found {digest}; export again")
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
                f"{path}: expected a tokenizer, found no file; put tokenizer.json next to the "
                f"checkpoint's weights and export again"
            )
        self.path = path
        # encode_batch_fast counts as parallel: without this setting tokenizers warns at the next fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        with _one_line(f"{path}: expected a tokenizer.json, found "):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
            # Settings of the training: the runtime has its own limits, and never truncates silently.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self.pieces = Pieces(self._tokenizer)

    @classmethod
    def open(cls, assembly_json: str | os.PathLike) -> Tokenizer:
        return cls(tokenizer_path(assembly_json))

    def encode(self, text: str, special: bool = True) -> np.ndarray:
        """Return the token ids of a text, int32 [num_tokens].

        special: with the special tokens that the tokenizer adds to a prompt. Raises InputError for text that is not
        valid Unicode, and for text that the tokenizer fails on.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"prompt: expected text in UTF-8, found {text[error.start : error.end]!r} at character {error.start};"
                " correct it"
            ) from None
        with _one_line(f"prompt: expected a text that {self.path} can split, found {text[:40]!r}: "):
            # Unlike `encode` it computes no offsets and releases the GIL.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
            return np.array(encoding.ids, np.int32)

    @functools.cached_property
    def _max_token_characters(self) -> int | None:
        """Return `_longest_token` of this tokenizer, on first use: only servers need it, and it takes 80 ms."""
        with _one_line(f"{self.path}: expected a tokenizer.json, found "):
            return _longest_token(json.loads(self._tokenizer.to_str()))

    @property
    def vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab()

    def min_tokens(self, num_characters: int) -> int:
        """Return a lower bound of the tokens of any text of `num_characters`; 0 if there is none."""
        if self._max_token_characters is None:
            return 0
        return -(-num_characters // self._max_token_characters)

    def decode(self, tokens: Iterable[int]) -> str:
        # No context manager: a server calls this for each token.
        try:
            return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)
        except BaseException as error:
            raise _input_error(f"{self.path}: expected a tokenizer.json, found ", error) from None

    def decode_whole(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids with special tokens, with the GIL released."""
        with _one_line(f"{self.path}: expected a tokenizer.json, found "):
            (text,) = self._tokenizer.decode_batch([tokens], skip_special_tokens=False)
            return text

    def names(self, tokens: Iterable[int]) -> list[str]:
        name = self._tokenizer.id_to_token
        return [name(token) or "" for token in tokens]

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds after others; of a special token, its name."""
        if piece := self.pieces.after(token):
            return piece
        once = self._tokenizer.decode([int(token)], skip_special_tokens=False)
        twice = self._tokenizer.decode([int(token)] * 2, skip_special_tokens=False)
        return twice[len(once) :].encode()

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors=self.pieces.errors)

    def spellings(self, text: str) -> list[tuple[int, ...]]:
        """Return the distinct tokenizations of a word at the start of a text, after a space and after a newline."""

        def encode(text: str) -> tuple[int, ...]:
            return tuple(self.encode(text, special=False).tolist())

        after_space = text
        if not text[:1].isspace():
            after_space = f" {text}"
        spellings = [encode(text), encode(after_space)]
        newline = encode("\n")
        after_newline = encode(f"\n{text}")
        if after_newline[: len(newline)] == newline:
            spellings.append(after_newline[len(newline) :])
        return [tokens for tokens in dict.fromkeys(spellings) if tokens]

    def token_id(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(name)

    def silent(self, names: Iterable[str]) -> dict[int, str]:
        """Return the special tokens among `names`, which texts leave out, by id."""
        silent = {}
        for name in names:
            token = self.token_id(name)
            if token is not None and self.pieces.is_silent(token):
                silent[token] = name
        return silent

    def stream(
        self, context: Sequence[int] | np.ndarray = (), owed: bool = False, shown: Mapping[int, str] = {}
    ) -> TextStream:
        return TextStream(self.pieces, context, owed, shown)

    def text(self, tokens: Iterable[int]) -> str:
        return self.pieces.text(map(int, tokens))


_UNDECODED = "\N{REPLACEMENT CHARACTER}"
_MAX_CHARACTER_BYTES = 4
_BYTE_NAME = re.compile("<0x([0-9A-F]{2})>")
_ONE_EACH = "lockstep.one_replacement_for_each_byte"


def _one_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _UNDECODED * (error.end - error.start), error.end


codecs.register_error(_ONE_EACH, _one_each)


def _byte_characters() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary (GPT-2's mapping)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    substitutes = iter(range(256, 512))
    return {chr(byte if byte in printable else next(substitutes)): byte for byte in range(256)}


_BYTES = _byte_characters()


class Pieces:
    """What each token adds to a text.

    It depends on whether the token is the first one, of which some decoders strip the space, and with a few decoders on
    the token before. Special tokens and unused ids add nothing.
    """

    def __init__(self, library: Any):
        self._library = library
        kinds = set[str]()
        if library.decoder is not None:
            kinds.update(_kinds(json.loads(library.decoder.__getstate__())))
        # This decoder adds a space after a word if another word follows.
        self._ends_words = "BPEDecoder" in kinds
        self._is_local = not kinds & {"BPEDecoder", "CTC"}
        # Invalid UTF-8 becomes one replacement character a byte, or one for each truncated character.
        self.errors = _ONE_EACH if "ByteFallback" in kinds else "replace"
        self._cache: dict[int, bytes] = {}

    def is_silent(self, token: int) -> bool:
        return not self.after(token)

    def first(self, token: int) -> bytes:
        alone = self._decode([token])
        if _UNDECODED in alone:
            return self.after(token)
        return alone.encode()

    def after(self, token: int, previous: int | None = None) -> bytes:
        """Return what a token adds after `previous`, by default after itself."""
        if previous is not None and not self._is_local:
            return self._decode([previous, token])[len(self._decode([previous])) :].encode()
        piece = self._cache.get(token)
        if piece is None:
            piece = self._bytes(token, self._decode([token]), self._decode([token, token]))
            self._cache[token] = piece
        return piece

    def text(self, tokens: Iterable[int]) -> str:
        audible = [token for token in tokens if not self.is_silent(token)]
        pieces = [self.first(token) for token in audible[:1]]
        for previous, token in zip(audible, audible[1:]):
            pieces.append(self.after(token, previous))
        return self.decoder().decode(b"".join(pieces))

    def table(self, size: int) -> list[bytes]:
        """Return what each of the tokens 0 to size-1 adds after others, with the GIL released.

        With a decoder that ends words by spaces, the space is included.
        """
        alone = self._library.decode_batch([[token] for token in range(size)], skip_special_tokens=True)
        twice = self._library.decode_batch([[token, token] for token in range(size)], skip_special_tokens=True)
        if self._ends_words:
            return [text[: len(text) - len(single)].encode() for single, text in zip(alone, twice)]
        return [self._bytes(token, *texts) for token, texts in enumerate(zip(alone, twice))]

    def unfinished(self, context: Sequence[int] | np.ndarray) -> bytes:
        """Return the bytes of an incomplete character at the end of a context."""
        tail = b""
        # Only the end of a long prompt is looked at.
        for token in reversed(context):
            if len(tail) >= _MAX_CHARACTER_BYTES - 1:
                break
            tail = self.after(int(token)) + tail
        decoder = self.decoder()
        decoder.decode(tail[1 - _MAX_CHARACTER_BYTES :])
        return decoder.getstate()[0]

    def decoder(self) -> codecs.IncrementalDecoder:
        return codecs.getincrementaldecoder("utf-8")(self.errors)

    def _bytes(self, token: int, alone: str, twice: str) -> bytes:
        """Return what a token adds after itself, from the text of the token, and the text of it twice."""
        if _UNDECODED not in alone:
            return twice[len(alone) :].encode()
        # Decoded alone, part of a character is a replacement character: its bytes are in the token's name.
        name = self._library.id_to_token(token)
        if byte := _BYTE_NAME.fullmatch(name):
            raw = bytes([int(byte[1], 16)])
        elif all(character in _BYTES for character in name):
            raw = bytes(_BYTES[character] for character in name)
        else:
            return alone.encode()
        if raw.decode(errors="replace") != alone:  # the name only looks like bytes
            return alone.encode()
        return raw

    def _decode(self, tokens: Sequence[int]) -> str:
        try:
            return self._library.decode(tokens, skip_special_tokens=True)
        except OverflowError:
            # A negative id, or one of more than 32 bits.
            return ""


def _kinds(decoder: Mapping[str, Any]) -> Iterator[str]:
    yield decoder["type"]
    for part in decoder.get("decoders") or ():
        yield from _kinds(part)


class TextStream:
    """The text that tokens add after a context.

    All deltas together are `Tokenizer.decode` of context and tokens without `decode` of the context. The exception is a
    run of byte tokens (<0xE4>) that is not valid UTF-8, where `decode` drops whole characters too. At most three bytes,
    of an incomplete character, are buffered. The cost of a token does not grow with the text.
    """

    def __init__(
        self,
        pieces: Pieces,
        context: Sequence[int] | np.ndarray = (),
        owed: bool = False,
        shown: Mapping[int, str] = {},
    ):
        """Start after a context.

        shown: texts of special tokens that are part of the answer. owed: a character that the context leaves incomplete
        belongs to the answer, as a replacement character if the tokens do not complete it.
        """
        self._pieces = pieces
        self._decoder = pieces.decoder()
        self._shown = shown
        backwards = map(int, reversed(context))
        self._previous = next((token for token in backwards if not pieces.is_silent(token)), None)
        unfinished = pieces.unfinished(context)
        self._decoder.decode(unfinished)
        # Bytes of the answer's first character that the context's text shows already, as replacement characters.
        self._context_bytes = b"" if owed else unfinished

    def push(self, token: int) -> str:
        """Return the text that this token completes; empty in the middle of a character."""
        token = int(token)
        pieces = self._pieces
        if (name := self._shown.get(token)) is not None:
            return self.finish() + name
        if pieces.is_silent(token):
            return ""
        piece = pieces.first(token) if self._previous is None else pieces.after(token, self._previous)
        self._previous = token
        return self._new(self._decoder.decode(piece))

    def finish(self) -> str:
        """Return the rest of the text; an incomplete character becomes the replacement character."""
        return self._new(self._decoder.decode(b"", True))

    def _new(self, text: str) -> str:
        """Remove what the context's text has already shown of an incomplete character."""
        unfinished = self._context_bytes
        if not unfinished or not text:
            return text
        self._context_bytes = b""
        if text[0].encode().startswith(unfinished):  # the answer completes the character: it is all the answer's
            return text
        return text[len(unfinished.decode(errors=self._pieces.errors)) :]
