"""The thread that checks and reads adapters while the engine steps: folders in, adapters out."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.errors import InputError, LockstepError
from lockstep.runtime.adapters import Adapters
from lockstep.weights.adapters import LoadedAdapter
from lockstep.weights.check_adapters import read_folder
from lockstep_serve.frames import Load
from lockstep_serve.log import fault_of


class ReadAdapter(NamedTuple):
    """What a `Load` read: an adapter, or a line that says why it is unusable."""

    id: int
    adapter: LoadedAdapter | str


class AdapterLoader:
    """A reader of adapters, one at a time, in the order of requests, checked against `checkpoint_json`."""

    def __init__(self, adapters: Adapters, checkpoint_json: str | None, deliver: Callable[[ReadAdapter], None]):
        """The thread starts with the first folder. deliver: called with each adapter that was read."""
        self.adapters = adapters
        self._checkpoint = checkpoint_json
        self._deliver = deliver
        self._most_bytes = adapters.most_bytes
        self._frames: queue.SimpleQueue[Load] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, frame: Load) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="adapters", daemon=True)
            self._thread.start()
        self._frames.put(frame)

    def read(self, name: str, folder: str) -> LoadedAdapter:
        """Check and read a folder at once. Raises InputError."""
        assert self._checkpoint is not None  # without one, the API process refuses adapters
        return read_folder(Path(folder), name, CheckpointManifest.load(self._checkpoint), self._most_bytes)

    def reload(self, loaded: Sequence[tuple[str, str, str]]) -> dict[str, str]:
        """Load what the previous engine had: name, folder and SHA-256 of each; return the error of each that failed."""
        lost = {}
        for name, folder, digest in loaded:
            try:
                adapter = self.read(name, folder)
                if adapter.sha256 != digest:
                    raise InputError(f"adapter {name!r}: {folder}: expected sha256 {digest}, found {adapter.sha256}")
                self.adapters.add(adapter)
            except (LockstepError, OSError) as error:
                lost[name] = str(error)
        return lost

    def _work(self) -> None:
        while True:
            frame = self._frames.get()
            try:
                adapter: LoadedAdapter | str = self.read(frame.name, frame.folder)
            except LockstepError as error:
                adapter = str(error)
            except Exception as error:  # the client gets the error, and the thread reads the next folder
                adapter = f"adapter {frame.name!r}: {frame.folder}: expected an adapter, found {fault_of(error)}"
            self._deliver(ReadAdapter(frame.id, adapter))
