"""The endpoints of a server: requests in, records of their answers out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from lockstep.errors import InputError, pip_install
from lockstep.load import triton, wire
from lockstep.load.http import Client, clock
from lockstep.load.records import Planned, Prompt, Record

if TYPE_CHECKING:
    from lockstep.load.triton_grpc import GrpcEndpoint

Endpoint: TypeAlias = "HttpEndpoint | GrpcEndpoint"  # senders of requests of one kind
# Over gRPC, Triton's API; all others over HTTP.
ENDPOINTS = ("completions", "chat", "triton", "grpc")
TRITON = ("triton", "grpc")  # no model is named, no tokens are counted and no reason is given


def request(
    endpoint: str, prompt: Prompt, model: str, extra: Mapping[str, Any], stream: bool = True
) -> tuple[str, bytes]:
    """Return the path and the body of a request. Raises InputError."""
    if endpoint == "grpc":
        return _grpc().request(prompt, model, extra, stream)
    if endpoint == "triton":
        return triton.request(prompt, model, extra, stream)
    return wire.PATHS[endpoint], wire.body(prompt, endpoint, model, extra, stream)


@contextlib.asynccontextmanager
async def opened(client: Client, endpoint: str) -> AsyncIterator[Endpoint]:
    """Open an endpoint of `ENDPOINTS`, for as long as the context lasts."""
    if endpoint == "grpc":
        async with _grpc().GrpcEndpoint(client) as found:
            yield found
    else:
        yield HttpEndpoint(client, endpoint)


class HttpEndpoint:
    """A sender of requests over HTTP."""

    def __init__(self, client: Client, endpoint: str) -> None:
        self._client = client
        self._reader = triton.TritonReader if endpoint == "triton" else wire.StreamReader

    async def ask(self, one: Planned, record: Record, start: float, limit: float) -> None:
        """Send a request and fill its record. Raises NoAnswer, and asyncio.TimeoutError after `limit` seconds."""
        reader = self._reader(record, start, one.stream)
        async with self._client.connection() as connection:
            record.sent = clock() - start
            request = self._client.request("POST", one.path, one.body)
            answer = await asyncio.wait_for(connection.ask(request, reader.piece), limit)
        reader.end(answer)


def _grpc() -> Any:
    try:
        from lockstep.load import triton_grpc
    except ModuleNotFoundError as error:
        raise InputError(
            f"load: -i grpc needs the Python package {error.name!r}, which is not installed here; {pip_install('grpc')}"
        ) from None
    return triton_grpc
