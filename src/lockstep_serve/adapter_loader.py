"""The thread that checks and reads adapters while the engine steps: folders in, adapters out."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.errors import InputError, LockstepError
from lockstep.runtime.adapters import Adapters
from lockstep.runtime.request import adapter_of
from lockstep.weights.adapters import LoadedAdapter
from lockstep.weights.check_adapters import read_folder
from lockstep_serve.frames import Load
from lockstep_serve.log import fault_of


class ReadAdapter(NamedTuple):
    """What a `Load` read: an adapter, or a line that says why it is unusable."""

    id: int
    adapter: LoadedAdapter | str


class AdapterLoader:
    """A reader of adapters, one at a time, in the order of requests."""

    def __init__(self, adapters: Adapters, manifests: Mapping[str, str | None], deliver: Callable[[ReadAdapter], None]):
        """The thread starts with the first folder.

        manifests: of the checkpoints that adapters are checked against, by name. deliver: called with each adapter that
        was read.
        """
        self.adapters = adapters
        self._manifests = manifests
        self._deliver = deliver
        self._most_bytes = adapters.most_bytes
        self._frames: queue.SimpleQueue[Load] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, frame: Load) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="adapters", daemon=True)
            self._thread.start()
        self._frames.put(frame)

    def read(self, frame: Load) -> LoadedAdapter:
        """Check and read a folder at once. Raises InputError."""
        manifest = self._manifests[frame.checkpoint]
        assert manifest is not None  # without one, the API process refuses adapters
        checkpoint = CheckpointManifest.load(manifest)
        adapter = read_folder(Path(frame.folder), frame.name, checkpoint, self._most_bytes)
        return replace(adapter, name=adapter_of(frame.checkpoint, frame.name))

    def reload(self, loaded: Sequence[tuple[Load, str]]) -> dict[str, dict[str, str]]:
        """Load what the previous engine had, each with its SHA-256; return the error of each that failed."""
        lost: dict[str, dict[str, str]] = {}
        for frame, digest in loaded:
            try:
                adapter = self.read(frame)
                if adapter.sha256 != digest:
                    where = f"adapter {frame.name!r}: {frame.folder}"
                    raise InputError(f"{where}: expected sha256 {digest}, found {adapter.sha256}")
                self.adapters.add(adapter)
            except (LockstepError, OSError) as error:
                lost.setdefault(frame.checkpoint, {})[frame.name] = str(error)
        return lost

    def _work(self) -> None:
        while True:
            frame = self._frames.get()
            try:
                adapter: LoadedAdapter | str = self.read(frame)
            except LockstepError as error:
                adapter = str(error)
            except Exception as error:  # the client gets the error, and the thread reads the next folder
                adapter = f"adapter {frame.name!r}: {frame.folder}: expected an adapter, found {fault_of(error)}"
            self._deliver(ReadAdapter(frame.id, adapter))
