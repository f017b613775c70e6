"""The server that the check `served` starts, which `lockstep` finds by an entry point.

`lockstep.verify.served.server` says what the check needs of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.artifacts.chat_template import ChatTemplate
from lockstep.runtime.tokenizer import Tokenizer
from lockstep.verify.served.server import EngineFiles, Server
from lockstep_serve.log import start_log
from lockstep_serve.run import listening
from lockstep_serve.service import Service
from lockstep_serve.settings import EngineOptions, ServedModelOptions, ServiceLimits, ServiceOptions

_MAX_QUEUE = 1000  # all of the check's requests at once
_HANGS_S = 600.0  # what takes longer hangs: a machine may be busy, and speed is not checked


class CheckedServer(Service):
    """A service with what only the check does to it."""

    def speculate(self, options: Mapping[str, Any]) -> None:
        self.engine_options = replace(self.engine_options, speculative=options)

    def listening(self, path: Path) -> AbstractAsyncContextManager[None]:
        return listening(self, path)


def open_server(files: EngineFiles, name: str) -> Server:
    """Return a server of an engine set, not started yet. name: of the model, in requests."""
    start_log("warning")  # to the job's log: why an engine died
    engine = EngineOptions(
        files.engines,
        files.assembly,
        files.weights,
        files.layers,
        files.limits,
        files.threads,
        chunk_size=files.chunk_size,
    )
    limits = ServiceLimits(
        max_queue=_MAX_QUEUE, queue_timeout=_HANGS_S, stall=_HANGS_S, start=_HANGS_S, slow_reader=_HANGS_S
    )
    model = ServedModelOptions(name, Tokenizer.open(files.assembly), ChatTemplate.open(files.assembly))
    return CheckedServer(ServiceOptions([model], engine, limits))
