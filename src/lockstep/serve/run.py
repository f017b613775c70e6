"""The life of a server: an engine that is warm, a line that says so, requests, and a drain on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import uvicorn
import uvloop
from starlette.types import ASGIApp

from lockstep import processes
from lockstep.errors import ENDING, InputError
from lockstep.serve.app import application
from lockstep.serve.bodies import Access
from lockstep.serve.protocol import LimitedProtocol
from lockstep.serve.service import Service
from lockstep.serve.triton_infer import Triton
from lockstep.serve.unix_socket import unix_socket
from lockstep.step.pages import PAGE_SIZE

if TYPE_CHECKING:
    from lockstep.serve.grpc_server import GrpcServer


@dataclass(frozen=True)
class Address:
    """The address to listen at. port 0: any that is free; None: at no port."""

    host: str = "127.0.0.1"
    port: int | None = 8000


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers (`serve` drains first), awake once a second, not ten times."""

    def __init__(self, app: ASGIApp, slow_reader: float):
        # Once all requests are through, connections that are kept alive are closed; what is left has a moment more.
        config = uvicorn.Config(
            app,
            http=cast(Any, functools.partial(LimitedProtocol, slow_reader=slow_reader)),
            log_level="error",  # below it uvicorn has a line for each request that is no HTTP
            ws="none",
            timeout_keep_alive=75,  # longer than proxies keep one, which else meet one that has just been closed
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            server_header=False,
            proxy_headers=False,
        )
        super().__init__(config)
        self._ending = asyncio.Event()

    async def start(self, ends: list[socket.socket]) -> None:
        """Serve at these sockets, as the task `serving`; return when connections are taken."""
        self.serving = asyncio.create_task(self.serve(sockets=ends))
        while not (self.started or self.serving.done()):
            await asyncio.sleep(0.005)

    async def end(self) -> None:
        """Take no more connections, and close those that are there."""
        self.should_exit = True
        self._ending.set()
        await self.serving

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ending.wait(), 1)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    service: Service,
    address: Address,
    access: Access,
    drain: float,
    say: Callable[[str], None],
    grpc_port: int | None = None,
    triton: Triton | None = None,
    unix: Path | None = None,
) -> None:
    """Serve until SIGTERM, SIGHUP or Ctrl-C; a second one ends at once.

    drain: seconds that running requests have then. say: gets the line of a server that is ready. grpc_port: where gRPC
    is served too, 0 for any that is free; None: nowhere. triton: of the service, with options of its own. unix: a Unix
    socket that HTTP is served at too, or alone if the address has no port. Raises InputError for an address that cannot
    be had, and LockstepError where the engine does not start, or the service ends by a fault of its own.
    """
    with contextlib.ExitStack() as stack:
        ends = [] if address.port is None else [stack.enter_context(contextlib.closing(_bound(address)))]
        if unix is not None:
            ends.append(stack.enter_context(unix_socket(unix)))
        uvloop.run(_serve(service, ends, address.host, access, drain, say, grpc_port, triton or Triton(service)))


@contextlib.asynccontextmanager
async def listening(service: Service, path: Path) -> AsyncIterator[None]:
    """Start a service and serve it on a Unix socket, until the context ends. Raises LockstepError."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as end:
        end.bind(str(path))
        server = _Server(application(service), service.limits.slow_reader)
        await service.start()
        try:
            await server.start([end])
            yield
        finally:
            await service.stop()
            await server.end()


async def _serve(
    service: Service,
    ends: list[socket.socket],
    host: str,
    access: Access,
    drain: float,
    say: Callable[[str], None],
    grpc_port: int | None,
    triton: Triton,
) -> None:
    inside = all(end.family == socket.AF_UNIX or ip_address(end.getsockname()[0]).is_loopback for end in ends)
    access = replace(access, own_name=host if inside else None)
    server = _Server(application(service, access, triton), service.limits.slow_reader)
    signals = asyncio.Queue[int]()
    loop = asyncio.get_running_loop()
    grpc = None if grpc_port is None else _grpc_server(triton, access, host, grpc_port)
    for number in (signal.SIGINT, *ENDING):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as of `nohup`
            loop.add_signal_handler(number, signals.put_nowait, number)
    asked = asyncio.create_task(signals.get())
    starting = asyncio.create_task(service.start())
    try:
        await asyncio.wait((starting, asked), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return
        await starting
        await server.start(ends)
        if grpc is not None:
            await grpc.start()
        processes.freeze_heap()
        ready = service.ready
        shown = f"[{host}]" if ":" in host else host
        places = [
            f"unix:{end.getsockname()}" if end.family == socket.AF_UNIX else f"http://{shown}:{end.getsockname()[1]}"
            for end in ends
        ]
        say(
            f"ready: {' and '.join(places)} serves {service.name} "
            f"({ready.backend}, identity {ready.identity[:12]}): up to {ready.max_batch_size} requests of "
            f"{ready.max_seq_len} tokens at a time, a KV cache of "
            f"{ready.num_pages * PAGE_SIZE:,} tokens"
            + (f" in {ready.kv_cache_dtype}" if ready.kv_cache_dtype else "")
            + (f"; gRPC at {shown}:{grpc.port}" if grpc is not None else "")
        )
        failed = asyncio.create_task(service.ended.wait())
        await asyncio.wait((server.serving, asked, failed), return_when=asyncio.FIRST_COMPLETED)
        failed.cancel()
        if asked.done():
            draining = asyncio.create_task(service.drain(drain))
            again = asyncio.create_task(signals.get())
            await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
            draining.cancel()
            again.cancel()
        await service.stop()
        await server.end()
        service.check()
    finally:
        asked.cancel()
        await service.stop()
        if grpc is not None:
            await grpc.stop(1)


def _grpc_server(triton: Triton, access: Access, host: str, port: int) -> GrpcServer:
    from lockstep.serve.grpc_server import GrpcServer  # needs a package that HTTP does not

    return GrpcServer(triton, access, host, port)


def _bound(address: Address) -> socket.socket:
    assert address.port is not None
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address.host, address.port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise InputError(
            f"--host, --port: expected an address that is free, found {address.host}:{address.port}: "
            f"{getattr(error, 'strerror', None) or error}; name another"
        ) from None
    return listening
