"""The protocol between API process and engine process: a dataclass per frame, over a socket that only they share.

A frame is its length (4 bytes, big-endian) and its pickle, in which token ids are raw int32. A frame is made of the
classes of `_CLASSES` and nothing else. Standard library and NumPy only: the engine's Python may have nothing else.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import numpy as np

from lockstep.errors import InputError
from lockstep.runtime.grammar import Grammar
from lockstep.runtime.request import CheckpointFiles, Request
from lockstep.step.sampling import Logprobs, Sampling
from lockstep_serve.settings import EngineOptions

HEADER = struct.Struct("!I")
LARGEST = 1 << 28  # bytes: the length of a corrupt frame may be any number


# -- to the engine process


@dataclass(frozen=True)
class Open:
    """The first frame: open these engines. Answered by `Ready` or `Failed`."""

    options: EngineOptions


@dataclass(frozen=True)
class Add:
    """Run a request, which was checked; prompt_ids: int32. Answered by `Step`, or `Refused`."""

    id: int
    request: Request


@dataclass(frozen=True)
class Abort:
    """End a request, or one choice of it."""

    id: int
    choice: int | None = None


@dataclass(frozen=True)
class Load:
    """Load an adapter of a checkpoint. Answered by `Loaded`."""

    id: int
    name: str
    folder: str
    checkpoint: str = ""


@dataclass(frozen=True)
class Unload:
    """Unload an adapter, by its name in requests; none may use it."""

    name: str


@dataclass(frozen=True)
class UpdateWeights:
    """Replace the weights by those of a manifest; no request runs. Answered by `WeightsUpdated`."""

    weights: str


# -- to the API process


@dataclass(frozen=True)
class Ready:
    """The engine's limits. adapters: by checkpoint and name, the digest of each. lost_adapters: the reason for each.

    identity: of the computation; eos_token_ids: both of the first checkpoint. others: those of further ones, by name,
    and the digest of the weights.
    step_sizes: see `StepSizes`.
    """

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
    adapters: Mapping[str, Mapping[str, str]]
    lost_adapters: Mapping[str, Mapping[str, str]]
    kv_cache_dtype: str | None = None
    step_sizes: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, tuple[str, Sequence[int], str]] = field(default_factory=dict)

    def of(self, checkpoint: str) -> Ready:
        """Return the same of a checkpoint."""
        if not checkpoint:
            return self
        identity, eos_token_ids, _ = self.others[checkpoint]
        return replace(self, identity=identity, eos_token_ids=eos_token_ids)


@dataclass(frozen=True)
class Failed:
    """The last frame of a process that fails; error: InputError or CheckError."""

    error: str
    message: str


@dataclass(frozen=True)
class Counters:
    """The engine's counters; those from `swaps` on only grow.

    is_warm: no step waits for a graph capture, or a library's first call. drafts: `Speculation.counts`.
    """

    is_warm: bool = False
    running: int = 0
    waiting: int = 0
    used_pages: int = 0
    cached_pages: int = 0
    swaps: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafts: Sequence[int] = ()


@dataclass(frozen=True)
class Step:
    """The results of a step; an idle engine sends an empty one every second.

    tokens: request, choice, token, finish and log-probabilities, as in `Token`. admitted, prompt_logprobs: as in
    `Engine`.
    """

    counters: Counters
    tokens: Sequence[tuple[int, int, int, str | None, Logprobs | None]] = ()
    admitted: Sequence[tuple[int, int]] = ()
    prompt_logprobs: Sequence[tuple[int, int, Sequence[Logprobs]]] = ()


@dataclass(frozen=True)
class Refused:
    """A request that the engine cannot run; param: the invalid field, if one is. is_fault: not the client's."""

    id: int
    message: str
    param: str | None = None
    is_fault: bool = False


@dataclass(frozen=True)
class Loaded:
    """The answer to `Load`: the SHA-256 of the adapter, or the error."""

    id: int
    sha256: str = ""
    error: str | None = None


@dataclass(frozen=True)
class WeightsUpdated:
    """The answer to `UpdateWeights`: the new identity, or the error."""

    identity: str = ""
    error: str | None = None


Frame = Open | Add | Abort | Load | Unload | UpdateWeights | Ready | Failed | Step | Refused | Loaded | WeightsUpdated


def _ids(data: bytes | bytearray) -> np.ndarray:
    """Return token ids of a frame, without a copy."""
    return np.frombuffer(data, np.int32)


class _Pickler(pickle.Pickler):
    # The buffer is written to the frame as it is: ids are copied once.
    dispatch_table = {np.ndarray: lambda ids: (_ids, (pickle.PickleBuffer(np.ascontiguousarray(ids, np.int32).data),))}


_ALLOWED: tuple[Any, ...] = (
    Open, Add, Abort, Load, Unload, Ready, Failed, Counters, Step, Refused, Loaded, EngineOptions, CheckpointFiles,
    Request, Sampling, Grammar, Logprobs, UpdateWeights, WeightsUpdated, frozenset, _ids,
)  # fmt: skip
_CLASSES = {(member.__module__, member.__qualname__): member for member in _ALLOWED}


class _Unpickler(pickle.Unpickler):
    # By default pickle would call any function that a frame names.
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _CLASSES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"frame: expected only classes of frames, found {module}.{name}") from None


def packed(frame: Frame) -> bytes:
    """Return a frame's bytes."""
    file = io.BytesIO(bytes(HEADER.size))
    file.seek(HEADER.size)
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(frame)
    HEADER.pack_into(file.getbuffer(), 0, file.tell() - HEADER.size)
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    """Return the frame in bytes that follow a length."""
    return _Unpickler(io.BytesIO(data)).load()


def _size(data: bytes | bytearray, start: int = 0) -> int:
    (size,) = HEADER.unpack_from(data, start)
    if size > LARGEST:
        raise InputError(f"frame: expected at most {LARGEST} bytes, found {size}")
    return size


def split(data: bytearray) -> list[bytes]:
    """Take all whole frames off the front of `data`, and return them. Raises InputError for one too long."""
    frames = []
    start = 0
    while len(data) - start >= HEADER.size:
        end = start + HEADER.size + _size(data, start)
        if len(data) < end:
            break
        frames.append(bytes(memoryview(data)[start + HEADER.size : end]))
        start = end
    # Delete once for all frames, because each deletion moves the rest.
    del data[:start]
    return frames


def receive(file: BinaryIO) -> Any:
    """Return the next frame of a blocking file. Raises EOFError at its end."""
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    size = _size(header)
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return unpacked(data)
