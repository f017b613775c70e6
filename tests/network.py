"""A record of what processes ask of the network: names and addresses.

Names looked up and addresses called, each refused (data/network.c). Needs a C compiler.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("data") / "network.c"
TELEMETRY = ("ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY")


class Recorder:
    """Processes started with `environment` are recorded, and all that they start.

    `folder` is also their folder of temporary and cached files.
    """

    def __init__(self, folder: Path) -> None:
        self._library = folder / "network.so"
        self._log = folder / "network.log"
        self._temporary = folder / "tmp"
        self._cache = folder / "cache"
        folders = {"TMPDIR": str(self._temporary), "XDG_CACHE_HOME": str(self._cache)}
        self.environment = {"LD_PRELOAD": str(self._library), "LOCKSTEP_NETWORK_LOG": str(self._log), **folders}

    @classmethod
    def make(cls, folder: Path) -> Recorder:
        """Make a recorder whose record begins here. Another process may read it as `Recorder(folder)`."""
        recorder = cls(folder)
        recorder._temporary.mkdir(parents=True)
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(recorder._library), str(SOURCE), "-ldl"], check=True)
        return recorder

    def calls(self) -> list[str]:
        """`call host: program`, in the order in which they were made."""
        return self._log.read_text(errors="replace").splitlines() if self._log.exists() else []

    def traces(self) -> list[str]:
        """Return what ONNX Runtime's telemetry keeps on disk, from its import on.

        The number of a session and of this machine, events not sent yet.
        """
        connections: list[Path] = []
        for folder in (self._temporary, self._cache):
            connections += [*folder.rglob(".ses"), *folder.rglob("Microsoft")]
        return sorted(map(str, connections))
