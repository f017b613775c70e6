"""The start of an engine process, by few imports: it starts while the API process imports the rest."""

from __future__ import annotations

import socket
import subprocess
import sys

from lockstep.errors import CheckError
from lockstep.processes import environment


class EngineProcess:
    """An engine process, which waits for its first frame, and our end of its socket. A context: ends the process."""

    def __init__(self, backend: str = ""):
        """Start it. backend: which it can already load. Raises CheckError."""
        try:
            self.end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:  # no free descriptor
            raise CheckError(f"engine process: expected a socket for it, found none: {error.strerror}") from None
        command = [sys.executable, "-m", "lockstep_serve.engine_process", str(theirs.fileno()), backend]
        # Libraries print to stderr, because stdout holds only the line of a ready server.
        try:
            self.process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=2, env=environment()
            )
        except OSError as error:
            self.end.close()
            raise CheckError(f"engine process: expected it to start, found an error: {error.strerror}") from None
        finally:
            theirs.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.end.close()
        self.process.kill()
        self.process.wait()
