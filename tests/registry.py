"""A real registry on this machine: Debian's `docker-registry`, with its files in a folder."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAM = shutil.which("docker-registry") or shutil.which("registry")
CONFIG = """\
version: 0.1
log: {{level: error}}
storage:
  filesystem: {{rootdirectory: {folder}}}
  delete: {{enabled: true}}
http: {{addr: "127.0.0.1:{port}"}}
"""


@dataclass(frozen=True)
class Registry:
    host: str
    folder: Path

    def blob(self, digest: str) -> Path:
        """Return the file that holds a blob."""
        sha256 = digest.removeprefix("sha256:")
        return self.folder / "docker/registry/v2/blobs/sha256" / sha256[:2] / sha256 / "data"


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Registry]:
    if PROGRAM is None:
        pytest.skip("needs a registry: apt-get install docker-registry")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = folder / "registry.yaml"
    config.write_text(CONFIG.format(folder=folder / "blobs", port=port))
    process = subprocess.Popen([PROGRAM, "serve", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None and time.monotonic() < until, "the registry does not answer"
            time.sleep(0.05)
        yield Registry(f"127.0.0.1:{port}", folder / "blobs")
    finally:
        process.terminate()
        process.wait(30)
