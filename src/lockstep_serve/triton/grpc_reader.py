"""Close gRPC connections of clients that do not read their answer.

grpcio says when a message was sent, but not how many bytes were acknowledged, and it cannot close a connection, so both
are asked of the kernel. A client that withholds its flow-control window still acknowledges pings, a few bytes each.
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

_MIN_BYTES = 1024  # that a reader acknowledges in `slow_reader` seconds: more than pings have
_BYTES_ACKED = struct.Struct("=120xQ")  # of struct tcp_info
_FRACTION = 8  # of `slow_reader`, after which a connection is first searched for, which most messages never need


async def write(context: Any, message: Any, slow_reader: float) -> None:
    """Write a message; close the connection if its client acknowledges too little for `slow_reader` seconds."""
    writing = asyncio.ensure_future(context.write(message))
    try:
        await asyncio.wait({writing}, timeout=slow_reader / _FRACTION)
        minimum = 0
        while not writing.done():
            minimum = _num_acknowledged(context.peer(), minimum) + _MIN_BYTES
            await asyncio.wait({writing}, timeout=slow_reader)
        await writing
    finally:
        writing.cancel()


def _num_acknowledged(peer: str, minimum: int) -> int:
    """Return the bytes that a client has acknowledged; close its connection if they are fewer than `minimum`.

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
                (num_bytes,) = _BYTES_ACKED.unpack_from(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))
                if num_bytes < minimum:
                    connection.shutdown(socket.SHUT_RDWR)
                return num_bytes
    return 0
