"""The bodies of requests: read with limits, decoded strictly; errors as OpenAI's."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from lockstep.errors import InputError
from lockstep_serve.stream import StreamError

_Body = TypeVar("_Body")
_LARGE = 1 << 16  # bytes of JSON that are decoded in a thread: token ids take 0.2 us each
_MIN_TYPO_LENGTH = 4  # of a field with a check for typos: `n` is one edit from any letter
_NO_TYPOS = ("top_a", "models")  # fields of other servers that are one edit from ours
_MAX_DIGITS = 309  # of a whole number within float64
# Limited, because the text of each new token is searched for all words.
_MAX_WORDS = 64
_MAX_LENGTH = 4096  # characters or tokens of all words together
# Fields of other servers, with the values that mean their default. Other values are rejected, because a client would
# misread an answer for which they were ignored. Each body lists further ones as UNSUPPORTED.
Unsupported = Mapping[str, tuple]
Keys = Mapping[bytes, Collection[str]]  # API keys, and the models that each opens; none named: all


@dataclass(frozen=True)
class Access:
    """The access rules of a server: its API keys, and limits of bodies.

    keys: of which a request must bring one; none: all requests are let in. max_body: bytes of a body. body_timeout:
    seconds that one may take. loopback_host: the host's name if the server listens on loopback alone, else None.
    """

    keys: Keys = field(default_factory=dict)
    max_body: int = 4 << 20
    body_timeout: float = 30.0
    loopback_host: str | None = None


class BadRequest(StreamError):
    """The error of a request that is refused. param: the wrong field of its body."""

    def __init__(self, message: str, param: str | None = None, status: int = 400):
        super().__init__(message, status, None, None, param)


def bad_request(error: InputError, names: Mapping[str, str] = {}) -> BadRequest:
    """Return an InputError of `Request` or `Sampling` as a BadRequest; names: {its field: the client's field}."""
    name, _, message = str(error).partition(": ")
    name = names.get(name, name)
    return BadRequest(f"{name}: {message}", name)


def path_below(root: Path, text: str) -> Path | None:
    """Return the path that a request names, links followed; None if it is none, or outside of `root` (resolved)."""
    try:
        path = (root / text).resolve()
    except (OSError, ValueError, RuntimeError):
        return None
    return path if path.is_relative_to(root) else None


def check_words(name: str, words: Sequence[Sized], unit: str = "characters") -> None:
    """Raise BadRequest for too many or too long words; unit: of their lengths."""
    total = sum(map(len, words))
    if len(words) > _MAX_WORDS or total > _MAX_LENGTH:
        expected = f"at most {_MAX_WORDS} words and {_MAX_LENGTH} {unit}"
        raise BadRequest(f"{name}: expected {expected}, found {len(words)} and {total}", name)


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    """Return the JSON of an error, as OpenAI's API gives it."""
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}}).encode()


def error_response(error: StreamError, body: bytes | None = None) -> Response:
    """Return the response to a request that is refused, or failed before any answer; body: None for OpenAI's."""
    kind = "server_error"
    headers = {}
    if error.status < 429:
        kind = "invalid_request_error"
    if error.status == 401:
        kind = "authentication_error"
        headers = {"WWW-Authenticate": "Bearer"}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.code == "shutting_down":
        headers["Connection"] = "close"
    if body is None:
        body = error_body(error.message, kind, error.param, error.code)
    return Response(body, error.status, headers, "application/json")


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def read_body(request: Request, access: Access) -> bytes:
    """Return the body. Raises BadRequest for one too long, too late, or compressed."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise BadRequest(f"content-encoding: expected identity, found {encoding[:40]!r}", status=415)
    limit = access.max_body
    seconds = access.body_timeout
    # The length that is announced, first: a body that is too long need not be received.
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and (len(length) > 18 or int(length) > limit):
        raise BadRequest(f"body: expected at most {limit} bytes, found {length}", status=413)
    data = bytearray()

    async def read() -> None:
        async for part in request.stream():
            data.extend(part)
            if len(data) > limit:
                raise BadRequest(f"body: expected at most {limit} bytes, found more", status=413)

    try:
        await asyncio.wait_for(read(), seconds)
    except asyncio.TimeoutError:
        raise BadRequest(f"body: expected all of it within {seconds:g} s", status=408) from None
    except ClientDisconnect:
        raise BadRequest("body: the client went away", status=400) from None
    return bytes(data)


async def decode_body(data: bytes, kind: type[_Body]) -> _Body:
    """Return JSON as a `kind`. Raises BadRequest for invalid JSON, duplicate keys and wrong types."""
    if len(data) > _LARGE:
        return await asyncio.to_thread(_decode, data, kind)
    return _decode(data, kind)


def _decode(data: bytes, kind: type[_Body]) -> _Body:
    try:
        text = data.decode("utf-8-sig")  # json.loads of bytes takes UTF-16 and UTF-32 too
    except UnicodeDecodeError as error:
        raise BadRequest(f"body: expected JSON in UTF-8, found {error}") from None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            parse_int=_bounded_int,
        )
    except RecursionError:
        raise BadRequest("body: expected JSON, found it nested too deep") from None
    except ValueError as error:
        raise BadRequest(f"body: expected JSON in UTF-8, found {error}") from None
    try:
        body = msgspec.convert(value, kind)
        if isinstance(body, msgspec.Struct):
            _check_names(value, body)
        return body
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        param = place.removesuffix("`").lstrip(".") or None
        if missing := re.fullmatch("Object missing required field `(.*)`", message):
            param = ".".join(filter(None, (param, missing[1])))
            message = "expected a value, found none"
        raise BadRequest(f"{param or 'body'}: {message[:1].lower()}{message[1:]}", param) from None


def _check_names(value: dict[str, Any], body: msgspec.Struct, place: str = "") -> None:
    """Raise BadRequest for an unsupported field, and for the typo of a known one; value: the JSON of `body`."""
    unsupported: Unsupported = getattr(body, "UNSUPPORTED", {})
    names = (*body.__struct_fields__, *unsupported)
    for name in value.keys() - set(names):
        nearest = next((candidate for candidate in names if is_near(name, candidate)), None)
        if nearest is not None:
            raise BadRequest(f"{place}{name}: expected {place}{nearest}, found another name; correct it", place + name)
    for name in unsupported:
        if value.get(name) not in unsupported[name]:
            raise BadRequest(f"{name}: not supported by this server; leave it out", name)
    for name in body.__struct_fields__:
        inner = getattr(body, name)
        if isinstance(inner, msgspec.Struct) and name in value:
            _check_names(value[name], inner, f"{place}{name}.")


def is_near(name: str, field: str) -> bool:
    """Return whether a name is one edit (a character, or two swapped) from one of at least `_MIN_TYPO_LENGTH`."""
    if len(field) < _MIN_TYPO_LENGTH or abs(len(name) - len(field)) > 1 or name == field or name in _NO_TYPOS:
        return False
    prefix = os.path.commonprefix([name, field])
    tail = name[len(prefix) :]
    field_tail = field[len(prefix) :]
    swapped = len(tail) > 1 and tail[1::-1] + tail[2:] == field_tail
    return swapped or field_tail in (tail[1:], field_tail[:1] + tail[1:]) or tail == field_tail[1:]


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise BadRequest(f"body: expected each name once, found {name[:60]!r} twice", name[:60])
        values[name] = value
    return values


def _refuse_constant(text: str) -> NoReturn:
    raise BadRequest(f"body: expected JSON, found {text}, which is no number of JSON")


def _bounded_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise BadRequest(f"body: expected numbers up to 1.8e308, found one of {len(text)} digits")
    return int(text)


def _finite_float(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise BadRequest(f"body: expected numbers up to 1.8e308, found {text[:40]}")
    return number
