"""The request log: a JSON line, without texts and keys, for each request that has ended, written by a thread."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from datetime import datetime, timezone
from pathlib import Path

from lockstep.errors import InputError
from lockstep_serve.ended_requests import EndedRequest
from lockstep_serve.log import log

_MAX_LINES = 1 << 14  # that wait for the disk, at most
_SECONDS = 2.0  # for the last lines when the server ends


class RequestLog:
    """A log file; `-` is stderr. Close it at the end."""

    def __init__(self, path: Path, model: str):
        """Open the file, and start its thread; model: in the lines. Raises InputError where it cannot be written."""
        self._path = path
        self._model = model
        try:
            if str(path) == "-":
                self._file = sys.stderr.fileno()
            else:
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise InputError(
                f"--request-log: expected a file that can be written, found {path}: {error.strerror}"
            ) from None
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MAX_LINES)
        self._has_warned = False  # that lines are lost
        self._thread = threading.Thread(target=self._write_all, name="request-log", daemon=True)
        self._thread.start()

    def add(self, ended: EndedRequest) -> None:
        line = {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "id": ended.id and ended.id[:80],
            "endpoint": ended.endpoint,
            "status": ended.status,
            "model": ended.model(self._model),
            "stream": ended.in_chunks,
            **ended.figures(),
            "seconds": round(time.monotonic() - ended.began, 6),
            "error": ended.error_code,
        }
        try:
            self._lines.put_nowait(json.dumps(line).encode() + b"\n")
        except queue.Full:
            self._warn("the disk is too slow")

    def close(self) -> None:
        """Write the waiting lines, for at most `_SECONDS`."""
        try:
            self._lines.put(None, timeout=_SECONDS)
        except queue.Full:
            return
        self._thread.join(_SECONDS)

    def _write_all(self) -> None:
        prefix = b""  # ends a line of which a part was written
        while (line := self._lines.get()) is not None:
            data = prefix + line
            try:
                num_written = os.write(self._file, data)
            except OSError as error:
                self._warn(error.strerror or str(error))
                continue
            prefix = b""
            if num_written < len(data):
                prefix = b"\n"
                self._warn("the disk took a part of a line")

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(f"{self._path}: request log: lines are lost: {reason}")
