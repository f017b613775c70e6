"""What the check `served` needs of a server: the entry point `lockstep.server` makes one.

The check sends requests over a Unix socket as any client does. The rest of this interface is what no request can do or
see: where the socket is, the engine's process, and counters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lockstep.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class EngineFiles:
    """An engine set, as the server and the check's own model open it.

    engines, assembly, weights: paths of manifests. layers: a layer count, or "all". limits: max_batch_size,
    max_seq_len, max_num_tokens, max_input_len. threads, chunk_size (tokens): None for the default.
    """

    engines: str
    assembly: str
    weights: str
    layers: int | str
    limits: Mapping[str, int]
    threads: int | None
    chunk_size: int | None


class ServedModel(Protocol):
    """A model of a server.

    chat: its `fault` says why it takes no chats. tool_format, reasoning_format: None where the model has none.
    """

    tokenizer: Tokenizer
    chat: Any
    tool_format: Any
    reasoning_format: Any


class Server(Protocol):
    """A server of one model in this process, whose engine runs in another.

    name: of the model, in requests. restarts: of the engine, after it died. ready: the engine's limits, and the
    identity of what is computed.
    """

    name: str
    restarts: int

    @property
    def default(self) -> ServedModel: ...
    @property
    def ready(self) -> Any: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def engine_pid(self) -> int | None: ...
    def total(self, name: str) -> int:
        """Return a counter over all engines."""

    def drafts(self) -> list[int]:
        """Return counts of drafts; nothing without speculation."""

    def speculate(self, options: Mapping[str, Any]) -> None:
        """Draft by these fields of `Speculative` once the engine is started again."""

    def listening(self, path: Path) -> AbstractAsyncContextManager[None]:
        """Start the engine and serve on a Unix socket, until the context ends. Raises LockstepError."""


OpenServer = Callable[[EngineFiles, str], Server]
