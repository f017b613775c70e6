"""Server-sent events: bytes as they come in, the data of whole events out."""

from __future__ import annotations

from collections.abc import Iterator


class EventReader:
    """A reader of server-sent events, which cuts a stream of bytes into events.

    What is not whole yet stays for the next call. Lines end in LF or CRLF, several `data:` lines of an event are joined
    by LF, comments and other fields are left out (https://html.spec.whatwg.org/multipage/server-sent-events.html).
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of each event that `data` ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    yield b"\n".join(self._data)
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
