"""Access checks of a request: its API key, and the origin of the page that sends it."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress

from starlette.requests import Request

from lockstep_serve.bodies import BadRequest, Keys
from lockstep_serve.stream import OPENED_MODELS, TENANT

_WITHOUT_KEY = ("/", "/ping", "/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready")
# Endpoints of the server as a whole, for keys that open all models.
_OF_SERVER = ("/metrics", "/status", "/update_weights", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")


def check_access(request: Request, keys: Keys, loopback_host: str | None) -> None:
    """Check a request's origin, its host and its API key. Raises BadRequest.

    No site may use a visitor's browser to send requests: a page of another origin is refused. On loopback, a page must
    also name the server by an address, localhost or `loopback_host`: a site's owner can point any other name to this
    machine (DNS rebinding), and a GET of such a page has no origin. Nobody reaches a Unix socket that way.
    """
    origin = request.headers.get("origin")
    host = request.headers.get("host", "")
    if origin is not None and origin.partition("://")[2] != host:
        raise BadRequest(f"origin: expected a page of {host[:80]!r}, found {origin[:80]!r}", status=403)
    # The path that routes are found by: `request.url` is put together with the client's Host header.
    path = request.scope["path"]
    needs_key = path not in _WITHOUT_KEY
    # A browser leaves the origin out of a page's own GET, so each GET that tells anything may be a page's.
    may_be_page = origin is not None or (request.method in ("GET", "HEAD") and host and needs_key)
    server = request.scope.get("server")
    is_tcp = server is not None and server[1] is not None  # else the path of a Unix socket
    if loopback_host is not None and may_be_page and is_tcp and not _is_loopback(host, loopback_host):
        raise BadRequest(
            f"host: expected an IP address, localhost or {loopback_host}, found {host[:80]!r}; have a proxy send one "
            "of them, or give its name as --host",
            status=403,
        )
    if not needs_key:
        return
    authorization = request.headers.get("authorization", "")
    if not authorization and path.startswith("/v1/messages"):
        key = request.headers.get("x-api-key")  # the header of Anthropic's clients
        if key:
            authorization = f"Bearer {key}"
    check_key(authorization, keys)
    if OPENED_MODELS.get() and path in _OF_SERVER:
        raise BadRequest(f"authorization: expected a key of all models at {path}, found one of some", None, 403)


def check_key(authorization: str, keys: Keys) -> None:
    """Check an Authorization header against the keys, if any; set the tenant and its models. Raises BadRequest, 401."""
    if not keys:
        return
    scheme, _, credentials = authorization.partition(" ")
    is_bearer = scheme.lower() == "bearer"  # RFC 7235: schemes are case-insensitive
    key = b""
    if is_bearer:
        key = credentials.strip().encode()
    TENANT.set(hashlib.sha256(key).hexdigest())
    # Compare with all keys: the time must not tell how close one was.
    matches = [models for other, models in keys.items() if hmac.compare_digest(key, other)]
    if matches:
        OPENED_MODELS.set(matches[0])
        return
    fault = "nothing"
    if authorization:
        fault = "another" if is_bearer else "another scheme"
    raise BadRequest(f"authorization: expected 'Bearer' and a key of this server, found {fault}", status=401)


def _is_loopback(host: str, loopback_host: str) -> bool:
    """Return whether a Host is an IP address, localhost or `loopback_host`, with or without a port."""
    if host.startswith("["):  # IPv6
        name = host[1:].partition("]")[0]
    else:
        name = host.partition(":")[0]
    name = name.lower().rstrip(".")
    try:
        return name in ("localhost", loopback_host.lower()) or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
