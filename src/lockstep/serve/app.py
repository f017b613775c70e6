"""The ASGI application: routes, keys, limits and headers around the service."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import lockstep
from lockstep.serve.anthropic import MessagesAnswer, MessagesBody, anthropic_error, limited_messages_chat, messages_chat
from lockstep.serve.blocks import renamed
from lockstep.serve.bodies import Access, BadRequest, decoded, error_response, json_response, read_body
from lockstep.serve.ended_requests import note, observed
from lockstep.serve.kserve import kserve_routes
from lockstep.serve.kserve import refused as triton_error
from lockstep.serve.metrics import CONTENT_TYPE
from lockstep.serve.openai import CompletionBody, CompletionFormat, completion_requests
from lockstep.serve.openai_answers import AnswerFormat
from lockstep.serve.openai_chat import ChatBody, ChatFormat, chat_prompt, chat_requests
from lockstep.serve.openai_parameters import request_id
from lockstep.serve.openapi import openapi
from lockstep.serve.page import page
from lockstep.serve.responses import ResponsesAnswer, ResponsesBody, responses_chat
from lockstep.serve.service import Service
from lockstep.serve.stream import TENANT, StreamError
from lockstep.serve.tokenization import DetokenizeBody, TokenizeBody, detokenized, tokenized, tokenizer_info
from lockstep.serve.triton import generate_routes
from lockstep.serve.triton_infer import Triton

_OPEN = (
    "/",
    "/ping",
    "/health",
    "/health/live",
    "/health/ready",
    "/v2/health/live",
    "/v2/health/ready",
)  # without a key


class LoadAdapterBody(msgspec.Struct):
    """The body of POST /v1/load_lora_adapter, as vLLM has it."""

    lora_name: str
    lora_path: str


class UnloadAdapterBody(msgspec.Struct):
    """The body of POST /v1/unload_lora_adapter, as vLLM has it."""

    lora_name: str


def application(service: Service, access: Access = Access(), triton: Triton | None = None) -> ASGIApp:
    """Return a service's ASGI application; triton: shared with another front end, which may stop its requests."""
    encoded = [key.encode() for key in access.keys]
    triton = triton or Triton(service)

    bodies: dict[str, type] = {}  # of requests, by path

    def route(
        path: str,
        handler: Callable[[Request], Awaitable[Any]],
        *methods: str,
        refuse: Any = error_response,
        body: type | None = None,
    ) -> Route:
        if body is not None:
            bodies[path] = body

        async def handle(request: Request) -> Any:
            try:
                _check_access(request, encoded, access.own_name)
                return await handler(request)
            except StreamError as error:
                reason = error
            except asyncio.CancelledError:  # the server ends, and this request is not even read, or not tokenized
                reason = StreamError("the server is shutting down; try another one", 503, "shutting_down")
            # Without its frames, which hold the whole request: they and the note would be a cycle.
            note(request.scope, error=reason.with_traceback(None))
            return refuse(reason)

        return Route(path, handle, methods=list(methods or ("GET",)))

    def completing(path: str, kind: Any, requests_of: Callable[..., Any], form_of: type[AnswerFormat]) -> Route:
        async def handle(request: Request) -> Any:
            body = await decoded(await read_body(request, access), kind)
            id = request_id(body, request.headers.get("x-request-id"))
            stream = service.submit(await requests_of(body, service))
            return form_of(body, service, stream, id)

        return route(path, handle, "POST", body=kind)

    def chatting(
        path: str, kind: Any, chat_of: Callable[[Any], ChatBody], form_of: Callable[..., Any], refuse: Any
    ) -> Route:
        async def handle(request: Request) -> Any:
            body = await decoded(await read_body(request, access), kind)
            chat = chat_of(body)
            id = request_id(chat, request.headers.get("x-request-id"))
            try:
                stream = service.submit(await chat_requests(chat, service))
            except BadRequest as error:
                raise renamed(error, body.NAMES) from None
            return form_of(body, chat, service, stream, id)

        return route(path, handle, "POST", body=kind, refuse=refuse)

    async def count_tokens(request: Request) -> Any:
        body = await decoded(await read_body(request, access), MessagesBody)
        try:
            _, _, ids = await chat_prompt(messages_chat(body), service)
        except BadRequest as error:
            raise renamed(error, body.NAMES) from None
        return json_response({"input_tokens": len(ids)})

    async def tokenize(request: Request) -> Any:
        body = await decoded(await read_body(request, access), TokenizeBody)
        return Response(await tokenized(body, service), media_type="application/json")

    async def detokenize(request: Request) -> Any:
        body = await decoded(await read_body(request, access), DetokenizeBody)
        return Response(await detokenized(body, service), media_type="application/json")

    def telling(path: str, answer: Callable[[Request], Any], holds: Callable[[], bool] = lambda: True) -> Route:
        async def handle(request: Request) -> Any:
            return json_response(answer(request), 200 if holds() else 503)

        return route(path, handle)

    def models(request: Request) -> dict[str, Any]:
        return {"object": "list", "data": [_model(service, name) for name in service.adapters.model_names]}

    async def load_adapter(request: Request) -> Any:
        body = await decoded(await read_body(request, access), LoadAdapterBody)
        await service.adapters.load(body.lora_name, body.lora_path)
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")

    async def unload_adapter(request: Request) -> Any:
        body = await decoded(await read_body(request, access), UnloadAdapterBody)
        service.adapters.unload(body.lora_name)
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")

    async def metrics(request: Request) -> Any:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    async def ping(request: Request) -> Any:
        return Response(status_code=200 if service.is_live else 503)

    async def front(request: Request) -> Any:
        content, headers = page()
        return Response(content, headers=headers)

    def worded(request: Request, error: StreamError) -> Response:
        is_triton = request.url.path == "/v2" or request.url.path.startswith("/v2/")
        return (triton_error if is_triton else error_response)(error)

    async def refused(request: Request, error: Any) -> Response:
        note(request.scope)
        said = f"{request.method} {request.url.path[:80]}: {error.detail}"
        response = worded(request, BadRequest(said, None, error.status_code))
        response.headers.update(error.headers or {})  # Allow, of 405
        return response

    async def failed(request: Request, error: Exception) -> Response:
        answer = StreamError("the server failed; its log says why")
        note(request.scope, error=answer)
        return worded(request, answer)

    app = Starlette(
        exception_handlers={HTTPException: refused, Exception: failed},
        routes=[
            completing("/v1/completions", CompletionBody, completion_requests, CompletionFormat),
            completing("/v1/chat/completions", ChatBody, chat_requests, ChatFormat),
            chatting("/v1/responses", ResponsesBody, responses_chat, ResponsesAnswer, error_response),
            chatting("/v1/messages", MessagesBody, limited_messages_chat, MessagesAnswer, anthropic_error),
            route("/v1/messages/count_tokens", count_tokens, "POST", refuse=anthropic_error, body=MessagesBody),
            telling("/v1/models", models),
            telling("/v1/models/{name:path}", lambda request: _model(service, request.path_params["name"])),
            route("/v1/load_lora_adapter", load_adapter, "POST", body=LoadAdapterBody),
            route("/v1/unload_lora_adapter", unload_adapter, "POST", body=UnloadAdapterBody),
            route("/tokenize", tokenize, "POST", body=TokenizeBody),
            route("/detokenize", detokenize, "POST", body=DetokenizeBody),
            telling("/tokenizer_info", lambda request: tokenizer_info(service)),
            telling("/health", lambda request: _health(service), lambda: service.is_live),
            telling("/health/live", lambda request: _health(service), lambda: service.is_live),
            telling("/health/ready", lambda request: _health(service), lambda: service.is_ready and service.is_live),
            route("/metrics", metrics),
            telling("/version", lambda request: {"version": lockstep.__version__}),
            telling("/openapi.json", lambda request: openapi(app.routes, bodies, bool(encoded))),
            route("/ping", ping, "GET", "POST"),
            telling("/status", lambda request: _status(service)),
            route("/", front),
            *kserve_routes(route, triton, access),
            *generate_routes(route, triton, access),
        ],
    )
    app.router.redirect_slashes = False  # a client would send its key and its prompt again
    return observed(app, service.observers)


def _is_own(host: str, own_name: str) -> bool:
    """Return whether a Host is an IP address, localhost or `own_name`, with or without a port."""
    name = (host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]).lower().rstrip(".")
    try:
        return name in ("localhost", own_name.lower()) or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _check_access(request: Request, keys: Sequence[bytes], own_name: str | None) -> None:
    """Check a request's origin, its host and its API key.

    own_name: as of `Access`. There a page may be of an address, of localhost or of this name: another name could be
    that of any site, whose owner lets it point to this machine (DNS rebinding). To such a page a GET goes to its own
    site, and has no origin. Nobody is led to a Unix socket so. Raises BadRequest for a page of another site, since no
    site may use a visitor's browser to send requests, and for a key that is none.
    """
    origin = request.headers.get("origin")
    host = request.headers.get("host", "")
    if origin is not None and origin.partition("://")[2] != host:
        raise BadRequest(f"origin: expected a page of {host[:80]!r}, found {origin[:80]!r}", status=403)
    is_open = request.url.path in _OPEN
    may_be_page = origin is not None or (request.method in ("GET", "HEAD") and host and not is_open)
    server = request.scope.get("server")
    is_tcp = server is not None and server[1] is not None  # else the path of a Unix socket
    if own_name is not None and may_be_page and is_tcp and not _is_own(host, own_name):
        raise BadRequest(
            f"host: expected an IP address, localhost or {own_name}, found {host[:80]!r}; have a proxy send one of "
            "them, or give its name as --host",
            status=403,
        )
    if not is_open:
        authorization = request.headers.get("authorization", "")
        if not authorization and request.url.path.startswith("/v1/messages"):  # Anthropic's clients send it so
            authorization = f"Bearer {key}" if (key := request.headers.get("x-api-key")) else ""
        check_key(authorization, keys)


def check_key(authorization: str, keys: Sequence[bytes]) -> None:
    """Check an API key, and set the tenant: who has it. Raises BadRequest, 401, for none of `keys`, if any."""
    scheme, _, rest = authorization.partition(" ")
    given = rest.strip().encode() if scheme.lower() == "bearer" else b""  # RFC 7235: schemes are case-insensitive
    if keys:
        TENANT.set(hashlib.sha256(given).hexdigest())
    if keys and not sum(hmac.compare_digest(given, key) for key in keys):  # all of them: the time says nothing
        found = "nothing"
        if authorization:
            found = "another" if scheme.lower() == "bearer" else "another scheme"
        raise BadRequest(f"authorization: expected 'Bearer' and a key of this server, found {found}", status=401)


def _model(service: Service, name: str) -> dict[str, Any]:
    """Return a model's entry of /v1/models; an adapter's has its model as `parent`."""
    adapter = service.adapters.named(name)
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "lockstep",
        "max_model_len": service.ready.max_seq_len,
        "root": service.ready.identity if adapter is None else service.adapters.digest(adapter),
        **({} if adapter is None else {"parent": service.name}),
    }


def _health(service: Service) -> dict[str, Any]:
    age = service.heartbeat_age
    return {
        "live": service.is_live,
        "ready": service.is_ready,
        "draining": service.draining,
        "heartbeat_age": None if age is None else round(age, 3),
        "restarts": service.restarts,
    }


def _status(service: Service) -> dict[str, Any]:
    ready = service.ready
    counters = service.counters
    total = ready.num_pages
    names = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "chunk_size")
    return {
        "model": service.name,
        "identity": ready.identity,
        "backend": ready.backend,
        "limits": {name: getattr(ready, name) for name in names},
        "running": counters.get("running", 0),
        "waiting": counters.get("waiting", 0),
        "pages": {
            "total": total,
            "used": total - counters.get("free_pages", total),
            "cached": counters.get("cached_pages", 0),
        },
        "streams": service.num_streams,
        "chat": service.chat.fault is None,
        **_health(service),
    }
