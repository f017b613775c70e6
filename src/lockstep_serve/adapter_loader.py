"""The thread that checks and reads adapters while the engine steps: folders in, adapters out."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.errors import LockstepError
from lockstep.runtime.adapters import Adapters
from lockstep.weights.adapters import LoadedAdapter
from lockstep.weights.check_adapters import read_folder
from lockstep_serve.say import fault_of


class AdapterLoader:
    """A reader of adapters, one at a time, in the order of requests, checked against `checkpoint_json`."""

    def __init__(self, adapters: Adapters, checkpoint_json: str | None):
        self.adapters = adapters
        self.under_way = 0  # that were started, and not polled yet
        self._checkpoint = checkpoint_json
        self._most_bytes = adapters.most_bytes
        self._asked: queue.SimpleQueue[tuple[int, str, str]] = queue.SimpleQueue()
        self._read: queue.SimpleQueue[tuple[int, LoadedAdapter | str]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, number: int, name: str, folder: str) -> None:
        """Begin to read a folder; `poll` yields it with this number."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        self.under_way += 1
        self._asked.put((number, name, folder))

    def poll(self) -> Iterator[tuple[int, LoadedAdapter | str]]:
        """Yield (number, adapter) for each folder read since the last call; an error's line where it is unusable."""
        while not self._read.empty():
            self.under_way -= 1
            yield self._read.get()

    def read(self, name: str, folder: str) -> LoadedAdapter:
        """Check and read a folder at once. Raises InputError."""
        assert self._checkpoint is not None  # nobody asks otherwise
        return read_folder(Path(folder), name, CheckpointManifest.load(self._checkpoint), self._most_bytes)

    def _work(self) -> None:
        while True:
            number, name, folder = self._asked.get()
            try:
                adapter: LoadedAdapter | str = self.read(name, folder)
            except LockstepError as error:
                adapter = str(error)
            except Exception as error:  # the client gets it, and the thread goes on with the next folder
                adapter = f"adapter {name!r}: {folder}: expected an adapter, found {fault_of(error)}"
            self._read.put((number, adapter))
