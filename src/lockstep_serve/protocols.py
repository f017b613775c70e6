"""Protocols that packages add to a server: plug-ins, by entry points of the group `lockstep.protocols`.

An entry point names a `ProtocolPlugin`, whose options `lockstep serve` takes, and whose endpoints it serves.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import click

from lockstep.plugins import entry_points

if TYPE_CHECKING:  # `lockstep --help` loads this module, without the packages of a server
    from starlette.responses import Response

    from lockstep_serve.bodies import Access
    from lockstep_serve.openapi import Endpoint
    from lockstep_serve.service import Service


class Listener(Protocol):
    """A port besides HTTP's; str() is its part of the line that announces a ready server."""

    async def start(self) -> None:
        """Take requests."""

    async def stop(self, grace: float) -> None:
        """Take no more requests; running ones have `grace` seconds."""


@dataclass(frozen=True)
class OpenProtocol:
    """What a protocol adds to a server.

    prefix: of its paths ("/v2"). error_response: answers a path below it that is no endpoint.
    """

    prefix: str
    endpoints: Sequence[Endpoint]
    error_response: Callable[[Any], Response]
    listener: Listener | None = None


class ProtocolPlugin(ABC):
    """A protocol that a package adds. title: the heading of its options in the help."""

    title: str
    options: Sequence[click.Option] = ()

    @abstractmethod
    def prepare(self, options: SimpleNamespace) -> None:
        """Check, and where needed change, the options of `lockstep serve` before it starts. Raises InputError."""

    @abstractmethod
    def open(self, options: SimpleNamespace, service: Service, access: Access) -> OpenProtocol:
        """Return the protocol in front of a service; called in the event loop. Raises InputError."""


@functools.cache
def protocol_plugins() -> tuple[ProtocolPlugin, ...]:
    """Return the registered plug-ins, sorted by their names."""
    return tuple(entry.load() for entry in entry_points("protocols").values())
