"""Over gRPC, end connections of clients that take nothing of an answer.

grpcio tells when a message has left, and not how far it has come, and it ends no connection: the kernel does both. A
client that withholds its flow-control window still acknowledges pings, a few bytes each.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
import urllib.parse
from typing import Any

_LEAST_BYTES = 1024  # that a reader takes in its time: more than pings are
_BYTES_ACKED = struct.Struct("=120xQ")  # of struct tcp_info
_LOOKS = 8  # at whether a message has left, before its connection is looked for


async def write(context: Any, message: Any, slow_reader: float) -> None:
    """Write a message; where its client takes nothing for `slow_reader` seconds, end its connection."""
    writing = asyncio.ensure_future(context.write(message))
    try:
        await asyncio.wait({writing}, timeout=slow_reader / _LOOKS)
        num_taken = 0 if writing.done() else _num_taken(context.peer())
        while not writing.done():
            await asyncio.wait({writing}, timeout=slow_reader)
            num_before = num_taken
            num_taken = 0 if writing.done() else _num_taken(context.peer(), num_before + _LEAST_BYTES)
        await writing
    finally:
        writing.cancel()


def _num_taken(peer: str, least: int = 0) -> int:
    """Return how many bytes a client has acknowledged; end its connection where they are fewer than `least`.

    peer: as gRPC writes it, `ipv4:127.0.0.1:4711`.
    """
    address = urllib.parse.unquote(peer.partition(":")[2])
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                host, port = connection.getpeername()[:2]
                host = host.removeprefix("::ffff:")  # gRPC's sockets of IPv4
                if address not in (f"{host}:{port}", f"[{host}]:{port}"):
                    continue
                (num_taken,) = _BYTES_ACKED.unpack_from(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))
                if num_taken < least:
                    connection.shutdown(socket.SHUT_RDWR)
                return num_taken
    return 0
