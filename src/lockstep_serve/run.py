"""Server lifecycle: start the engine, announce readiness, serve, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast

import uvicorn
import uvloop
from starlette.types import ASGIApp

from lockstep import processes
from lockstep.errors import ENDING, InputError, truncate_list
from lockstep.step.pages import PAGE_SIZE
from lockstep_serve.app import application
from lockstep_serve.bodies import Access
from lockstep_serve.http_protocol import LimitedProtocol
from lockstep_serve.protocols import Listener, OpenProtocol
from lockstep_serve.service import Service
from lockstep_serve.unix_socket import unix_socket

Opener = Callable[[Service, Access], OpenProtocol]


@dataclass(frozen=True)
class Address:
    """The addresses to listen at. port 0: a free one; None: no TCP port. unix: a Unix socket for HTTP."""

    host: str = "127.0.0.1"
    port: int | None = 8000
    unix: Path | None = None


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers (`serve` drains first), awake once a second, not ten times."""

    def __init__(self, app: ASGIApp, slow_reader: float):
        config = uvicorn.Config(
            app,
            http=cast(Any, functools.partial(LimitedProtocol, slow_reader=slow_reader)),
            log_level="error",  # uvicorn logs a warning for each request that is not HTTP
            ws="none",
            timeout_keep_alive=75,  # longer than proxies', so that they never reuse a connection that is being closed
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,  # when it is called, requests have been drained
            server_header=False,
            proxy_headers=False,
        )
        super().__init__(config)
        self._ending = asyncio.Event()

    async def start(self, sockets: list[socket.socket]) -> None:
        """Serve at these sockets, as the task `serving`; return when connections are accepted."""
        self.serving = asyncio.create_task(self.serve(sockets=sockets))
        # uvicorn offers a flag, not an event.
        while not (self.started or self.serving.done()):
            await asyncio.sleep(0.005)

    async def end(self) -> None:
        """Accept no more connections, and close the open ones."""
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
    openers: Sequence[Opener] = (),
) -> None:
    """Serve until SIGTERM, SIGHUP or Ctrl-C; a second one ends at once.

    drain: seconds in which running requests may then finish. say: gets the line of a server that is ready. openers: of
    the protocols of plug-ins. Raises InputError for an address that cannot be bound, and LockstepError where the engine
    does not start or the service fails.
    """
    with contextlib.ExitStack() as stack:
        sockets = []
        if address.port is not None:
            sockets.append(stack.enter_context(contextlib.closing(_tcp_socket(address))))
        if address.unix is not None:
            sockets.append(stack.enter_context(unix_socket(address.unix)))
        # If only this machine can connect, requests for other hosts come from web pages (`check_access`).
        is_local = all(end.family == socket.AF_UNIX or ip_address(end.getsockname()[0]).is_loopback for end in sockets)
        if is_local:
            access = replace(access, loopback_host=address.host)
        processes.share_interpreter()
        uvloop.run(_Lifecycle(service, access, address.host, openers).run(sockets, drain, say))


@contextlib.asynccontextmanager
async def listening(service: Service, path: Path) -> AsyncIterator[None]:
    """Start a service and serve it on a Unix socket, until the context ends. Raises LockstepError."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        listener.bind(str(path))
        server = _Server(application(service), service.limits.slow_reader)
        await service.start()
        try:
            await server.start([listener])
            yield
        finally:
            await service.stop()
            await server.end()


class _Lifecycle:
    """One run of a server, from the start of its engine to the end."""

    def __init__(self, service: Service, access: Access, host: str, openers: Sequence[Opener]):
        self._service = service
        self._access = access
        self._host = host
        self._openers = openers

    async def run(self, sockets: list[socket.socket], drain: float, say: Callable[[str], None]) -> None:
        service = self._service
        protocols = [open(service, self._access) for open in self._openers]
        http = _Server(application(service, self._access, protocols), service.limits.slow_reader)
        listeners = [protocol.listener for protocol in protocols if protocol.listener is not None]
        signals = _watch_signals()
        stop_requested = asyncio.create_task(signals.get())
        starting = asyncio.create_task(service.start())
        try:
            # A signal while the engine loads ends the server at once: it has no requests to drain.
            await asyncio.wait((starting, stop_requested), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                return
            await starting
            await http.start(sockets)
            for listener in listeners:
                await listener.start()
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, service.describe)
            processes.freeze_heap()
            say(self._ready_line(sockets, listeners))
            # Until a signal, or until the engine or the HTTP server ends by itself.
            failed = asyncio.create_task(service.ended.wait())
            await asyncio.wait((http.serving, stop_requested, failed), return_when=asyncio.FIRST_COMPLETED)
            failed.cancel()
            if stop_requested.done():
                await self._drain(drain, signals)
            await service.stop()
            await http.end()
            service.check()
        finally:
            stop_requested.cancel()
            await service.stop()
            for listener in listeners:
                await listener.stop(1)

    async def _drain(self, seconds: float, signals: asyncio.Queue[int]) -> None:
        """Let running requests finish, until another signal comes."""
        draining = asyncio.create_task(self._service.drain(seconds))
        second_signal = asyncio.create_task(signals.get())
        await asyncio.wait((draining, second_signal), return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        second_signal.cancel()

    def _ready_line(self, sockets: list[socket.socket], listeners: Sequence[Listener]) -> str:
        ready = self._service.ready
        host = f"[{self._host}]" if ":" in self._host else self._host
        urls = []
        for http in sockets:
            if http.family == socket.AF_UNIX:
                urls.append(f"unix:{http.getsockname()}")
            else:
                urls.append(f"http://{host}:{http.getsockname()[1]}")
        line = (
            f"ready: {' and '.join(urls)} serves {truncate_list([*self._service.models])} "
            f"({ready.backend}, identity {ready.identity[:12]}): up to {ready.max_batch_size} requests of "
            f"{ready.max_seq_len} tokens at a time, a KV cache of {ready.num_pages * PAGE_SIZE:,} tokens"
        )
        if ready.kv_cache_dtype:
            line += f" in {ready.kv_cache_dtype}"
        equal = ready.step_sizes["equal"]
        if equal and not ready.step_sizes["differing"]:
            line += f", the same bits in steps of 1 to {equal[-1]} rows"
        return "; ".join((line, *map(str, listeners)))


def _watch_signals() -> asyncio.Queue[int]:
    """Return the queue of the signals that end the server."""
    signals = asyncio.Queue[int]()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, *ENDING):
        # Under nohup it is ignored, and must stay so.
        is_nohup = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
        if not is_nohup:
            loop.add_signal_handler(number, signals.put_nowait, number)
    return signals


def _tcp_socket(address: Address) -> socket.socket:
    assert address.port is not None
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    # Connections of a server that has just ended keep its port busy for a while.
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
