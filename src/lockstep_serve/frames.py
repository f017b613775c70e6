"""The frames between API process and engine process, over a socket.

Each is a length (4 bytes, big-endian) and a JSON object in UTF-8. Standard library only: the engine's Python may have
nothing else.

To the engine: "open" (first), "add", "abort", "load" and "unload" (an adapter). From it: "ready" or "failed" (first),
then "step" (tokens of one step, and the log-probabilities of prompts whose requests have them) and "tick" (an idle
engine, each second), both with its counters, "refused" for an invalid request, with "param" for the field at fault, and
"loaded" or "not_loaded" after a "load".
"""

from __future__ import annotations

import json
import math
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from lockstep.errors import InputError
from lockstep.runtime.grammar import Grammar
from lockstep.runtime.request import Request
from lockstep.step.sampling import Sampling

Frame = dict[str, Any]
HEADER = struct.Struct("!I")
LARGEST = 1 << 28  # bytes: the length of a corrupt frame may be any number
_BUFFER = 1 << 22
_DEFAULTS = asdict(Sampling())


@dataclass(frozen=True)
class Ready:
    """The frame "ready": an engine's limits; identity: of what is computed. lost_adapters: why, by name."""

    identity: str
    backend: str
    batch_invariant: bool
    engine_digest: str
    vocab_size: int
    eos_token_ids: Sequence[int]
    max_batch_size: int
    max_seq_len: int
    max_input_len: int
    max_num_tokens: int
    chunk_size: int
    prefix_caching: bool
    num_pages: int
    prompt_logprobs: bool
    verifies_drafts: bool
    adapters: Mapping[str, str]
    lost_adapters: Mapping[str, str]
    kv_cache_dtype: str | None = None


def packed(frame: Mapping[str, Any]) -> bytes:
    """Return a frame's bytes."""
    data = json.dumps(frame, separators=(",", ":")).encode()
    return HEADER.pack(len(data)) + data


def split(data: bytearray) -> list[bytes]:
    """Take all whole frames off the front of `data`, and return them. Raises InputError for one too long."""
    frames = []
    at = 0
    while len(data) - at >= HEADER.size:
        (size,) = HEADER.unpack_from(data, at)
        if size > LARGEST:
            raise InputError(f"frame: expected at most {LARGEST} bytes, found {size}")
        end = at + HEADER.size + size
        if len(data) < end:
            break
        frames.append(bytes(memoryview(data)[at + HEADER.size : end]))
        at = end
    del data[:at]
    return frames


def packed_add(number: int, request: Request) -> bytes:
    """Return the frame "add" of request `number`."""
    sampling = request.sampling
    # Not by asdict, which copies all values: an HTTP request may have 256 prompts.
    changed = {name: getattr(sampling, name) for name in _DEFAULTS if getattr(sampling, name) != _DEFAULTS[name]}
    return packed(
        {
            "type": "add",
            "id": number,
            "prompt_ids": [int(token) for token in request.prompt_ids],
            "max_new_tokens": request.max_new_tokens,
            "stop_ids": sorted(request.stop_ids),
            "sampling": changed,
            "n": request.n,
            "choice": request.choice,
            "priority": request.priority,
            "cache_salt": request.cache_salt,
            "answer_ids": list(request.answer_ids),
            "adapter": request.adapter,
            "prompt_logprobs": request.prompt_logprobs,
            "grammar": request.grammar and asdict(request.grammar),
        }
    )


def request_of(frame: Frame) -> Request:
    """Return the request of a frame "add"."""
    values = {field.name: frame[field.name] for field in fields(Request) if field.name in frame}
    sampling = dict(frame["sampling"])
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {int(token): bias for token, bias in sampling["logit_bias"].items()}
    if "bad_words" in sampling:  # texts, or lists of tokens
        words = sampling["bad_words"]
        sampling["bad_words"] = tuple(word if isinstance(word, str) else tuple(word) for word in words)
    values["stop_ids"] = frozenset(frame["stop_ids"])
    if values.get("grammar") is not None:
        values["grammar"] = Grammar(**values["grammar"])
    return Request(**{**values, "sampling": Sampling(**sampling)})


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(-9999.0, logprob)


class Connection:
    """The engine's end of the socket. It never blocks on its reader: what cannot be sent now is sent later."""

    def __init__(self, end: socket.socket):
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._end = end
        self._in = bytearray()
        self._out = bytearray()
        self._poll = select.poll()  # `select.select` cannot watch descriptors above 1,023
        self._poll.register(end, 0)

    def send(self, frame: Mapping[str, Any]) -> None:
        """Send a frame, as far as possible without blocking. Raises EOFError where the other end is closed."""
        self._out += packed(frame)
        self.flush()

    def flush(self) -> None:
        """Send what is left, as far as possible without blocking."""
        try:
            while self._out:
                del self._out[: self._end.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            raise EOFError from None

    def drain(self, seconds: float) -> None:
        """Send all that is left, for at most `seconds`."""
        while self._out and self._wait(select.POLLOUT, seconds):
            self.flush()

    def receive(self, seconds: float) -> list[Frame]:
        """Return all frames, after up to `seconds` for the first. Raises EOFError."""
        events = select.POLLIN
        if self._out:
            events |= select.POLLOUT
        ready = self._wait(events, seconds)
        if ready & select.POLLOUT:
            self.flush()
        if ready & ~select.POLLOUT:  # data, or the end of the other side
            self._fill()
        return [json.loads(frame) for frame in split(self._in)]

    def _wait(self, events: int, seconds: float) -> int:
        """Return which of the events, errors and ends occur within `seconds`, as bits."""
        self._poll.modify(self._end, events)
        return sum(ready for _, ready in self._poll.poll(math.ceil(seconds * 1000)))

    def _fill(self) -> None:
        try:
            while data := self._end.recv(1 << 18):
                self._in += data
        except BlockingIOError:
            return
        except OSError:
            pass
        raise EOFError
